"""Folders as they are downloaded: what of them an import takes, and what it refuses."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from stores import (
    KIB,
    assert_clean,
    content,
    handle,
    network,
    noise,
    open_store,
    safetensors,
    u8,
    write,
)
from tensor_dedup.analyze import analyze
from tensor_dedup.store import Store
from tensor_dedup.store.checkpoints.commit import StepSnapshot
from tensor_dedup.store.errors import ContradictoryManifestError, DamagedFileError
from tensor_dedup.store.format import manifests
from tensor_dedup.store.format.manifests import FileEntry
from tensor_dedup.store.writing import sources
from tensor_dedup.store.writing.transaction import OrderedTransaction

INDEX = "model.safetensors.index.json"
A, B = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def index(**weight_map: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


def weights(*names: str) -> bytes:
    """A file of tensors, each of bytes of its own."""
    return safetensors(u8(**{name: noise(ord(name), KIB) for name in names}))


SHARDED = {"w/" + A: weights("a", "b"), "w/" + B: weights("c"), "config.json": b"{}"}
WITHIN = {**SHARDED, INDEX: index(a="w/" + A, b="w/" + A, c="w/" + B)}


@pytest.mark.parametrize(
    "files",
    [
        WITHIN,
        {**WITHIN, INDEX: index(a="w/" + A, b="./w/" + A, c="w//" + B)},
        {**WITHIN, "w/" + INDEX: index(a=A, b=A, c=B)},
        {A: weights("a", "b"), B: weights("c"), INDEX: index(a=A, b="./" + A, c=B)},
        {
            A: weights("a", "b"),
            B: weights("c"),
            INDEX: index(a=A, c=B),
            "other.safetensors.index.json": index(b=A, c=B),
        },
    ],
    ids=["below", "below and twice", "two indexes above each other", "twice", "by two indexes"],
)
def test_a_file_is_taken_once_however_indexes_name_it(
    store: Store, tmp_path: Path, files: Mapping[str, bytes]
) -> None:
    result = store.import_(write(tmp_path / "m", files))
    assert (result.tensors, result.files) == (3, len(files))
    with store.checkpoint("m") as checkpoint:
        assert sorted(tensor.name for tensor in checkpoint) == ["a", "b", "c"]
    store.export("m", tmp_path / "out")
    assert content(tmp_path / "out") == dict(files)
    assert_clean(store, {"m": dict(files)})
    assert analyze([tmp_path / "m"]).checkpoints[0].nbytes == 3 * KIB


def test_repair_does_not_bring_back_a_manifest_that_nobody_can_read(
    store: Store, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", WITHIN)
    source = sources.read_source(store._objects.files, folder)
    twice = [*source.files[:2], *source.files]  # what an earlier version took for the checkpoint
    store.import_(folder, "good")
    with store.checkpoint("good") as checkpoint:
        pieces = {file.path: list(file.pieces) for file in checkpoint.files}
    name, blobs = manifests.build(
        [FileEntry(f.stored_as, f.nbytes, len(f.segments), f.prefix) for f in twice],
        [piece for f in twice for piece in pieces[f.stored_as]],
    )
    layout = store._objects.layout
    for part, blob in blobs.items():
        store._objects.publish(blob, layout.manifest(part))
    store._objects.set_ref("bad", name, replace=False)
    with pytest.raises(DamagedFileError, match="two of its files have one path"):
        store.checkpoint("bad")
    assert [fault.kind for fault in store.verify().faults] == ["manifest"]
    assert not store.repair([folder]).whole
    assert not layout.manifest(name).exists()
    store.delete("bad")
    assert_clean(store, {"good": dict(WITHIN)})


def test_an_import_that_nobody_could_read_is_not_committed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "m", WITHIN)
    found = sources.read_source(store._objects.files, folder)
    twice = sources.ImportSource((*found.files, found.files[0]), ())
    monkeypatch.setattr("tensor_dedup.store.store.read_source", lambda *_: twice)
    with pytest.raises(ContradictoryManifestError, match="one path; nothing was committed"):
        store.import_(folder)
    assert list(store._objects.manifest_names()) == []
    assert_clean(store, {})


def test_a_save_that_nobody_could_read_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepSnapshot, "check", lambda _: None)
    with handle(tmp_path / "store") as run:
        run.save(network(1), 1)
        with pytest.raises(ContradictoryManifestError, match="one path; nothing was committed"):
            run.save(network(2), 2, files={"a": b"1", "a/b": b"2"})
        assert run.steps() == [1]
        assert run.store.verify(full=True).fine


def test_a_merge_that_nobody_could_read_is_not_committed(store: Store, tmp_path: Path) -> None:
    store.import_(write(tmp_path / "m", {"a.safetensors": weights("a")}), "m")
    with store.checkpoint("m") as checkpoint:
        ((_, tensor),) = [file.pieces for file in checkpoint.files]
    name, blobs = manifests.build([FileEntry("x", KIB + 1, 1, "")], [tensor])
    with store._locked(), OrderedTransaction(store._objects) as transaction:
        for part, blob in blobs.items():
            transaction.add_object(part, blob)
        with pytest.raises(ContradictoryManifestError, match="x is not 1025 bytes"):
            transaction.commit("run@1", name)
    assert [listed.name for listed in store.list()] == ["m"]
