"""The protocol without I/O: messages and time in, effects out. PROTOCOL.md specifies it."""

from tensor_dedup.memory_manager.core.core import Core, Settings

__all__ = ["Core", "Settings"]
