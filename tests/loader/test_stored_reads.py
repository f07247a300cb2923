"""Source tensors read from a store on a disk with bad sectors."""

from pathlib import Path

import pytest

from store_runs.disk_faults import FaultyFiles
from store_runs.stores import KIB, MIB, noise, open_store, safetensors, u8, write
from tensor_dedup import Store
from tensor_dedup.loader.checkpoint_io.from_store import CheckpointFiles, StoredSource
from tensor_dedup.store.errors import CorruptTensorError

DATA = noise(1, 900 * KIB)


@pytest.fixture
def disk(tmp_path: Path) -> tuple[Store, FaultyFiles, Path]:
    """A store with one checkpoint, and the container that it lies in."""
    (tmp_path / "limbo").mkdir()
    files = FaultyFiles(tmp_path / "limbo")
    store = open_store(tmp_path / "store", files)
    data = safetensors(u8(a=DATA, b=noise(2, 900 * KIB)))
    store.import_(write(tmp_path / "m", {"model.safetensors": data}))
    (container,) = store.path.glob("containers/*/*.raw")
    return store, files, container


def again(store: Store, folder: Path) -> None:
    """Store the tensor in a second container, in which little else is wanted."""
    data = safetensors(u8(a=DATA, c=noise(3, 4 * MIB)))
    store.import_(write(folder / "again", {"model.safetensors": data}))
    assert len(list(store.path.glob("containers/*/*.raw"))) == 2


@pytest.mark.parametrize("twice", [False, True])
def test_an_unreadable_page_of_a_stored_checkpoint(
    twice: bool, disk: tuple[Store, FaultyFiles, Path], tmp_path: Path
) -> None:
    store, files, container = disk
    files.lose_page(container, 500_000)
    if twice:
        assert not store.verify(full=True).fine
        again(store, tmp_path)
    with store.checkpoint("m") as checkpoint:
        (file,) = checkpoint.files
        source = StoredSource(store, checkpoint, file, tmp_path / file.path, trust=True)
        spec, memory = source.tensors["a"].spec, memoryview(bytearray(len(DATA)))
        if twice:
            source.read_into(spec, memory)
            assert memory == DATA
        else:
            with pytest.raises(CorruptTensorError, match="cannot be read from the disk"):
                source.read_into(spec, memory)


def test_what_the_store_cannot_read_is_left_to_the_file(
    disk: tuple[Store, FaultyFiles, Path], caplog: pytest.LogCaptureFixture
) -> None:
    store, files, container = disk
    with store.checkpoint("m") as checkpoint:
        digests = {tensor.name: tensor.digest for tensor in checkpoint}
    pieces = CheckpointFiles(store)
    pieces.expect(digests.values())
    memory = memoryview(bytearray(len(DATA)))
    assert pieces.fill(digests["a"], len(DATA), 0, memory) is not None
    files.lose_page(container, 500_000)
    assert pieces.fill(digests["a"], len(DATA), 0, memory) is None
    assert "cannot be read from the disk" in caplog.text
    assert pieces.fill(digests["b"], len(DATA), 0, memory) is not None
    assert pieces.bytes_read == 2 * len(DATA)
    pieces.close()
