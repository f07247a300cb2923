"""Plug-ins for training and serving frameworks. Importing them patches nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensor_dedup.integrations.freezing import Frozen as Frozen
    from tensor_dedup.integrations.freezing import FrozenLayerError as FrozenLayerError
    from tensor_dedup.integrations.freezing import check_frozen as check_frozen
    from tensor_dedup.integrations.freezing import freeze as freeze

__all__ = ["Frozen", "FrozenLayerError", "check_frozen", "freeze"]


def __getattr__(name: str) -> Any:
    # When it is asked for: freezing needs torch, and not every integration does.
    if name in __all__:
        from tensor_dedup.integrations import freezing

        return getattr(freezing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
