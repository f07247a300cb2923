"""Where crashes are tried by the hundred. What is killed for real uses tmp_path, on the disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from store_runs.stores import memory_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


@pytest.fixture(scope="module")
def shared_folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path
