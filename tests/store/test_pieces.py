"""Pieces by digest, whosever they are, read into memory of the caller's."""

from pathlib import Path

import pytest

from store_runs import stores
from tensor_dedup import Store
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.store.errors import CorruptTensorError, MissingObjectError

# More than two leaves, and not a whole number of them.
DATA = stores.noise(1, 2 * LEAF_BYTES + 77)
SMALL = stores.noise(2, 1000)
NAME = digest(DATA)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = stores.open_store(tmp_path / "store")
    file = stores.safetensors(stores.u8(a=DATA, b=SMALL))
    made.import_(stores.write(tmp_path / "model", {"model.safetensors": file}))
    return made


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        *((0, len(DATA)), (0, LEAF_BYTES), (LEAF_BYTES, 2 * LEAF_BYTES)),
        *((2 * LEAF_BYTES, len(DATA)), (5, 9), (LEAF_BYTES - 1, LEAF_BYTES + 1), (3, 3)),
    ],
)
def test_any_range_is_read_into_place(store: Store, start: int, stop: int) -> None:
    buffer = bytearray(stop - start)
    with store.open_pieces([NAME]) as pieces, memoryview(buffer) as view:
        pieces.read_piece_into(bytes.fromhex(NAME), start, view, len(DATA))
    assert buffer == DATA[start:stop]


def test_only_what_was_asked_for_is_there(store: Store) -> None:
    with store.open_pieces([NAME, digest(b"nobody")]) as pieces:
        assert bytes.fromhex(NAME) in pieces
        for other in (digest(b"nobody"), digest(SMALL)):
            assert bytes.fromhex(other) not in pieces
            with pytest.raises(MissingObjectError, match=other):
                pieces.read_piece_into(bytes.fromhex(other), 0, memoryview(bytearray(6)), 6)


def test_asking_for_another_size_spoils_nothing(store: Store) -> None:
    name, buffer = bytes.fromhex(NAME), memoryview(bytearray(len(DATA) + 1))
    with store.open_pieces([NAME]) as pieces:
        with pytest.raises(MissingObjectError, match=NAME):
            pieces.read_piece_into(name, 0, buffer, len(buffer))
        with pytest.raises(MissingObjectError, match=NAME):
            pieces.read_piece(name, 0, len(buffer), len(buffer))
        assert pieces.read_piece(name, 0, len(DATA), len(DATA)) == DATA
    assert not list(store.path.glob("quarantine/*"))


@pytest.mark.parametrize("at", [0, LEAF_BYTES, len(DATA) - 1])
def test_a_flipped_bit_is_never_returned(store: Store, at: int) -> None:
    (raw,) = store.path.glob("containers/*/*.raw")
    offset = raw.read_bytes().index(DATA) + at
    with raw.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    first, last = at // LEAF_BYTES * LEAF_BYTES, min(len(DATA), (at // LEAF_BYTES + 1) * LEAF_BYTES)
    with store.open_pieces([NAME]) as pieces, pytest.raises(CorruptTensorError, match=NAME):
        pieces.read_piece_into(
            bytes.fromhex(NAME), first, memoryview(bytearray(last - first)), len(DATA)
        )
    # From now on it is a miss: nobody tries it again.
    with store.open_pieces([NAME]) as pieces:
        assert bytes.fromhex(NAME) not in pieces


def test_what_is_open_outlives_a_collection(store: Store) -> None:
    buffer = bytearray(len(DATA))
    with store.open_pieces([NAME]) as pieces:
        store.delete("model")
        store.gc(0)
        pieces.read_piece_into(bytes.fromhex(NAME), 0, memoryview(buffer), len(DATA))
    assert buffer == DATA
    with store.open_pieces([NAME]) as pieces:
        assert bytes.fromhex(NAME) not in pieces
