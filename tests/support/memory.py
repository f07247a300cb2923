"""Folders in memory: many tests write many small files, and the disk's own pace proves nothing."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A new folder in memory, or on disk where there is no such place; removed at the end."""
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    path = Path(tempfile.mkdtemp(prefix="store-", dir=_SHARED_MEMORY if usable else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
