"""Stores in memory; tests/faults has some on the disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stores import memory_folder


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as path:
        yield path
