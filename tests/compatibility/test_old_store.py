"""What commit ead6e99 wrote is read as it was written, and goes on to be used."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import compatible
from tensor_dedup import Store
from tensor_dedup.digest import digest
from tensor_dedup.store.reading.tensors import load_tensors
from tensor_dedup.training import CheckpointStore

EXPECTED: dict[str, Any] = json.loads((compatible.DATA / "expected.json").read_text())
STORED = sorted(EXPECTED["files"].keys() - {compatible.GONE})
CODE = compatible.Code()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the old code left; nobody changes this copy."""
    return compatible.unpack(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return compatible.unpack(tmp_path)


def check(root: Path, *gone: str) -> None:
    """Every step and every checkpoint is there but for these, and is what it was."""
    assert compatible.steps_of(root) == EXPECTED["steps"]
    with Store.open(root, create=False) as store:
        assert store.verify(full=True).faults == []
        for name in set(STORED).difference(gone):
            target = root.parent / f"checked-{len(list(root.parent.iterdir()))}"
            store.export(name, target)
            assert compatible.hashes(target) == EXPECTED["files"][name]


def test_the_verbs_print_what_the_old_code_printed(kept: Path) -> None:
    index = kept / "store" / "index.sqlite"
    before = index.stat().st_size
    found = compatible.documents(CODE, kept / "store")
    assert found["verify --full"]["faults"] == []
    # The index is no part of the format: each version lays out its own, and makes it anew.
    found["stats"]["disk_bytes"] -= index.stat().st_size - before
    # Later code may say more, and what it says of this must be the same.
    for verb, document in EXPECTED["documents"].items():
        assert compatible.said_of(found[verb], document) == document, verb


def test_the_store_has_every_kind_of_container_and_garbage() -> None:
    """Else the tests here would say less than they seem to."""
    stats = EXPECTED["documents"]["stats"]
    assert stats["containers"].keys() == {"raw", "slab", "pack", "delta"}
    assert {"raw", "planes4", "sparse2", "xor4"} <= stats["codecs"].keys()
    assert stats["trash_bytes"] > 0


@pytest.mark.parametrize("without_index", [False, True])
def test_every_byte_comes_back(old: Path, without_index: bool) -> None:
    if without_index:
        (old / "store" / "index.sqlite").unlink()
    check(old / "store")


def test_tensors_come_back_with_their_values(kept: Path, tmp_path: Path) -> None:
    with Store.open(kept / "store", create=False) as store:
        for name in ("org/base", "tune", "pickled"):
            store.export(name, tmp_path / name)
            expected: dict[str, torch.Tensor] = {}
            for file in (tmp_path / name).glob("*.safetensors"):
                expected |= load_file(file)
            for file in (tmp_path / name).glob("*.bin"):
                expected |= torch.load(file, weights_only=True)
            with store.checkpoint(name) as checkpoint:
                found = load_tensors(checkpoint)
            assert found.keys() == expected.keys()
            assert len(found) > 1
            for tensor, value in expected.items():
                assert found[tensor].dtype == value.dtype
                assert torch.equal(found[tensor], value)


def test_an_old_run_goes_on_and_shares_with_its_steps(old: Path) -> None:
    root = old / "store"
    with CheckpointStore(root, compatible.RUN) as run:
        latest = run.latest()
        assert latest == compatible.STEPS[-1]
        held = run.load(latest, original=compatible.training())
        again = run.save(held, 40)
        assert again.new_bytes == 0
        compatible.train(held, 50)
        changed = run.save(held, 50)
        frozen = held["model"].frozen.weight.nbytes
        assert 0 < changed.new_bytes <= changed.nbytes - frozen
        described = compatible.described(held)
        run.delete(40)
    with CheckpointStore(root, compatible.RUN) as run:
        assert run.latest() == 50
        found = run.load(50, original=compatible.training())
        assert compatible.described(found) == described
        run.delete(50)
    check(root)


def test_an_import_finds_what_the_old_code_stored(old: Path, tmp_path: Path) -> None:
    root = old / "store"
    CODE.verb("export", "org/base", tmp_path / "base", "--store", root)
    result = CODE.verb("import", tmp_path / "base", "--name", "again", "--store", root)
    assert (result["new_bytes"], result["stored_bytes"]) == (0, 0)
    shown, before = CODE.verbs([["show", name, "--store", root] for name in ("again", "org/base")])
    assert shown["manifest"] == before["manifest"]


def test_gc_takes_what_is_dead_and_nothing_else(old: Path) -> None:
    root = old / "store"
    with Store.open(root, create=False) as store:
        trash = store.stats().trash_bytes
        assert trash == EXPECTED["documents"]["stats"]["trash_bytes"]
        assert store.gc().freed_bytes == trash  # older than a day
        assert store.stats().trash_bytes == 0
        check(root)
        # The delta of `tune` keeps its anchor, which is what only the base has otherwise.
        store.delete("org/base")
        store.delete("twin")
        assert store.gc(0).freed_bytes > 0
    check(root, "org/base", "twin")


# --- hints


def move_hints(index: Path, files: dict[str, Path]) -> None:
    """Make hints of the old machine's files hints of these, by name; seals must be as we make them.

    A hint is of one state of one file, as the kernel names it: no other machine has such a file.
    """
    with closing(sqlite3.connect(index)) as db, db:
        rows = db.execute("SELECT name, file, state, algorithm, digests, seal FROM hint").fetchall()
        assert {row[0] for row in rows} == files.keys()
        for name, file, state, algorithm, digests, seal in rows:
            assert seal == digest(f"{file} {state} {algorithm} ".encode() + digests).encode()
            status = files[name].stat()
            here = f"{status.st_dev}:{status.st_ino}"
            now = f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
            sealed = digest(f"{here} {now} {algorithm} ".encode() + digests).encode()
            changes = "UPDATE hint SET file = ?, state = ?, seal = ? WHERE name = ?"
            db.execute(changes, (here, now, sealed, name))


@pytest.fixture
def exported(old: Path, tmp_path: Path) -> list[Path]:
    """The two checkpoints whose hints the old code kept."""
    folders = [tmp_path / "base", tmp_path / "tune"]
    with Store.open(old / "store", create=False) as store:
        store.export("org/base", folders[0])
        store.export("tune", folders[1])
    return folders


def test_old_hints_are_believed(old: Path, exported: list[Path]) -> None:
    files = {file.name: file for folder in exported for file in folder.glob("*.safetensors")}
    index = old / "hints.sqlite"
    move_hints(index, files)
    found = CODE.verb("analyze", *exported, TENSOR_DEDUP_HINTS=str(index))
    expected = EXPECTED["analysis"]
    assert expected["bytes_read"] > 0
    read = {"bytes_read": 0, "bytes_hashed": 0}
    compared = compatible.without(found, *exported)
    assert compatible.said_of(compared, expected | read) == expected | read


def test_hints_of_other_files_are_not_believed(old: Path, exported: list[Path]) -> None:
    hints = {"TENSOR_DEDUP_HINTS": str(old / "hints.sqlite")}
    found = CODE.verb("analyze", *exported, **hints)
    assert found["bytes_read"] == EXPECTED["analysis"]["bytes_read"]
