"""The memory manager's process: sockets, memory and threads around the core."""
