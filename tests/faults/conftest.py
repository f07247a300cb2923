"""Folders in memory: crashes are tried by the hundred, and the disk's own pace proves nothing."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_SHARED_MEMORY = Path("/dev/shm")


def _folder() -> Path:
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    return Path(tempfile.mkdtemp(prefix="store-", dir=_SHARED_MEMORY if usable else None))


@pytest.fixture
def folder() -> Iterator[Path]:
    path = _folder()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def shared_folder() -> Iterator[Path]:
    path = _folder()
    yield path
    shutil.rmtree(path, ignore_errors=True)
