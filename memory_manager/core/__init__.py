"""The protocol without I/O: messages and time in, effects out. See PROTOCOL.md."""

from tensor_dedup.memory_manager.core.core import Core, Settings

__all__ = ["Core", "Settings"]
