"""The state machine of the memory manager, without I/O.

It takes events (messages from clients, results of slow jobs, the time) and returns effects, which
are actions for the server to perform. PROTOCOL.md specifies the behaviour.
"""

from tensor_dedup.memory_manager.core.core import Core, Settings

__all__ = ["Core", "Settings"]
