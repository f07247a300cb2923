"""Save into a store from other frameworks without patching them."""
