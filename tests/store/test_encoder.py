"""What an import encodes, one tensor at a time."""

from contextlib import closing
from pathlib import Path

import pytest

from store_runs.stores import (
    KIB,
    content,
    open_store,
    safetensors,
    tuned,
    weights,
    write,
)
from tensor_dedup.digest import digest, leaf_digests
from tensor_dedup.store.hashing import Hashed
from tensor_dedup.store.writing.containers import NewPiece
from tensor_dedup.store.writing.deltas import EncodedWriter
from tensor_dedup.store.writing.encoder import Encoder
from tensor_dedup.store.writing.sources import read_source


def bf16(folder: Path, data: bytes) -> Path:
    tensor = ("BF16", (len(data) // 2,), data)
    return write(folder, {"model.safetensors": safetensors({"w": tensor})})


@pytest.mark.parametrize("others", [{}, {"near": 3}, {"same": 2}, {"same": 2, "near": 3}])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_base_that_is_deleted_as_it_is_chosen_is_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: dict[str, int], damaged: bool
) -> None:
    store, data = open_store(tmp_path / "store"), weights(1, 300 * KIB)
    for name, seed in {"nearest": 2, **others}.items():
        share = 0.4 if name == "near" else 0.1
        store.import_(bf16(tmp_path / name, tuned(data, seed, share)), name)
    tune = bf16(tmp_path / "tune", data)
    open_base, chosen = Encoder.open_base, list[str]()

    def delete_first(encoder: Encoder, name: str) -> None:
        if not chosen:
            layout, objects = store.handle.objects.layout, store.handle.objects
            gone = layout.manifest(objects.ref(name)) if damaged else layout.refs / name
            gone.rename(tmp_path / "gone")
        chosen.append(name)
        open_base(encoder, name)

    monkeypatch.setattr(Encoder, "open_base", delete_first)
    result = store.import_(tune, compress="auto")
    # Another name of a damaged manifest is of no use.
    usable = [name for name in others if not (damaged and name == "same")]
    assert chosen == ["nearest", *usable[:1]]
    assert (result.base, result.encoded_tensors) == (usable[0] if usable else None, 1)
    store.export("tune", tmp_path / "out")
    assert content(tmp_path / "out") == content(tune)


def test_nothing_is_stored_against_itself(tmp_path: Path) -> None:
    """Somebody else may store the same after it was looked up: then it is the base's, too."""
    data = weights(1, 300 * KIB)
    store = open_store(tmp_path / "store")
    tensor = ("BF16", (150 * KIB,), data)
    write(tmp_path / "base", {"model.safetensors": safetensors({"w": tensor})})
    store.import_(tmp_path / "base", name="base")
    with store.handle.session() as (index, hasher):
        encoder = Encoder(store.handle.objects, index)
        writer = EncodedWriter(store.handle.objects, hasher)
        with closing(encoder):
            encoder.open_base("base")
            source = read_source(store.handle.files, tmp_path / "base")
            [file] = [each for each in source.files if each.weights]
            [part] = [each for each in file.segments if each.dtype is not None]
            handle = store.handle.files.open(file.path, "read")
            hashed = Hashed(bytes.fromhex(digest(data)), b"".join(leaf_digests(data)))
            plan = encoder.plan(handle, part, file.prefix, hashed, None)
            assert plan is not None
            assert plan.anchor is not None
            new = NewPiece(part.start, part.nbytes, hashed.digest)
            assert writer.encode(handle, new, hashed.leaves, plan) is None
            store.handle.files.close(handle)
            assert writer.seal() is None
    assert store.verify(full=True).faults == []
    store.export("base", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "base")
