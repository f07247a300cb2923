"""The server process of the memory manager: sockets, memory and threads around the core.

The core (`memory_manager.core`) is a state machine without I/O. The server passes events to it and
performs the effects that it returns.
"""
