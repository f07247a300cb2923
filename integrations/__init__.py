"""Integrations that save into a store from other frameworks without patching them at import."""

from tensor_dedup.integrations.freezing import Frozen, FrozenLayerError, check_frozen, freeze

__all__ = ["Frozen", "FrozenLayerError", "check_frozen", "freeze"]
