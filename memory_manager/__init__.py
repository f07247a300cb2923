"""The memory manager: a process that owns the memory of shared tensors and lends it to engines.

The package has the server and its clients. Programs that share state dicts call `connect`, which
needs torch. Engines use `tensor_dedup.memory_manager.client`, which does not need torch.

The terms of the package:

* A slab is one block of memory, such as a memory file. One client fills it, and then the manager
  seals it, so that no process can write to it any more.
* A resident is one tensor in a sealed slab, named by the digest of its bytes.
* A layer is a record (bytes that only engines understand) and the tensors that the record refers
  to. Engines find the layer by its layer key.
* A put is the right of one client to build some layers, from the reservation of their keys to the
  publication of their records.
* A lease is the right of one client to use one resident, which stays in place until the lease ends.
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
