"""The allocator's memory."""

import ctypes
from typing import Final

_libc: Final = ctypes.CDLL(None)


def release_memory() -> None:
    """Give freed memory back: glibc keeps what was assembled, cast or read and is needed no more.

    It takes milliseconds. Elsewhere than with glibc it does nothing.
    """
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
