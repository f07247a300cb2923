"""What stands for memory of the old kind where a descriptor is expected: a file with its handle."""

import fcntl
import os
import struct
from typing import Final

from tensor_dedup.memory_manager.cuda.driver import IPC_HANDLE_BYTES
from tensor_dedup.memory_manager.errors import NotSealedError

_MAGIC: Final = b"TDIPC\0\0\1"
_TICKET: Final = struct.Struct(f"<8sQ{IPC_HANDLE_BYTES}s")
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def write_ticket(handle: bytes, nbytes: int) -> int:
    """A descriptor of a sealed file that says how to open so much memory; the caller's. OSError."""
    fd = os.memfd_create("tensor-dedup-ticket", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(fd, _TICKET.pack(_MAGIC, nbytes, handle), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_ticket(fd: int) -> tuple[bytes, int]:
    """The handle, and how much memory it opens. NotSealedError for any other file."""
    try:
        data = os.pread(fd, _TICKET.size, 0)
    except OSError as error:
        raise NotSealedError(f"the descriptor cannot be read: {error.strerror}") from error
    if len(data) != _TICKET.size or not data.startswith(_MAGIC):
        raise NotSealedError("the descriptor leads to no ticket for memory of a GPU")
    _, nbytes, handle = _TICKET.unpack(data)
    return handle, nbytes
