"""What tests of remotes have in common."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from s3_faults import Wire
from stores import open_store, three
from stores import tmp_path as tmp_path
from tensor_dedup import Store


@pytest.fixture
def full(tmp_path: Path) -> Store:
    """A store with three checkpoints, one of which has a difference from another."""
    store = open_store(tmp_path / "full")
    for name, path in three(tmp_path).items():
        store.import_(path, name, compress="auto")
    return store


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Objects in memory behind a proxy that counts."""
    made = Wire()
    yield made
    made.close()
