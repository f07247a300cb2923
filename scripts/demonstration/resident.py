"""Which pages of a model are in memory. Imports nothing of this package: plain processes use it."""

import ctypes
import mmap
from typing import Any


def read_pages(module: Any) -> None:
    """Read one byte of every page of a torch module's parameters, so that the kernel counts it.

    What a loader has mapped or written through a descriptor is in memory, and in no process's
    count before the process has touched it.
    """
    import torch

    strided = [p for p in module.parameters() if p.layout is torch.strided]  # packed is opaque
    storages = {s.data_ptr(): s for s in (p.untyped_storage() for p in strided) if s.nbytes()}
    for storage in storages.values():
        if storage.device.type == "cpu":
            flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            flat[:: mmap.PAGESIZE].sum()


def resident(address: int, nbytes: int) -> int:
    """Bytes of the pages of this range that are in memory."""
    page = mmap.PAGESIZE
    start = address // page * page
    pages = -(-(address + nbytes - start) // page)
    flags = ctypes.create_string_buffer(pages)
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), flags):
        return 0
    return page * sum(byte & 1 for byte in flags.raw[:pages])
