"""Integrations that save into a store from other frameworks without patching them at import."""
