"""The state machine of the memory manager, without I/O.

It takes events (messages of clients, results of slow jobs, the time) and returns effects: a list of
what the server has to do. PROTOCOL.md specifies the behaviour.
"""

from tensor_dedup.memory_manager.core.core import Core, Settings

__all__ = ["Core", "Settings"]
