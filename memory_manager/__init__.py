"""The process that owns memory and lends it: a server, and clients without torch.

`connect` is for programs that share state dicts; engines use `tensor_dedup.memory_manager.client`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensor_dedup.memory_manager.client.state_dicts import (
        PublishedStateDict as PublishedStateDict,
    )
    from tensor_dedup.memory_manager.client.state_dicts import StateDictClient as StateDictClient
    from tensor_dedup.memory_manager.client.state_dicts import connect as connect

_PUBLIC = ("PublishedStateDict", "StateDictClient", "connect")


def __getattr__(name: str) -> Any:
    # When it is asked for: the server, which has this package above it, never loads torch.
    if name in _PUBLIC:
        from tensor_dedup.memory_manager.client import state_dicts

        return getattr(state_dicts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
