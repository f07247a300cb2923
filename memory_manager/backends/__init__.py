"""The backends of the memory manager: one module for each kind of memory.

`base.Backend` is the interface that all of them implement.
"""
