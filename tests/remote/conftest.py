"""What tests of remotes have in common."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_runs.s3_faults import Wire
from store_runs.stores import memory_folder, open_store, three
from store_runs.stores import tmp_path as tmp_path
from tensor_dedup import Store


@pytest.fixture(scope="session")
def filled() -> Iterator[Path]:
    """Three checkpoints, and a store with them; one has a difference from another's tensor."""
    with memory_folder() as root:
        store = open_store(root / "full")
        for name, path in three(root).items():
            store.import_(path, name, compress="auto")
        with store.checkpoint("tune") as checkpoint:
            assert any(checkpoint.stored(tensor)[2] for tensor in checkpoint)
        yield root


@pytest.fixture
def full(tmp_path: Path, filled: Path) -> Store:
    """A store with the three checkpoints, which lie beside it."""
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    return open_store(tmp_path / "full")


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Objects in memory behind a proxy that counts."""
    made = Wire()
    yield made
    made.close()
