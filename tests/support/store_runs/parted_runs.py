"""Runs in which each step changes another leaf of one tensor, and what must hold of them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from store_runs.stores import KIB, Model, assert_same, handle, noise
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.store import LocalStore
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.format.tables import Record, Table
from tensor_dedup.training import CheckpointStore

LEAVES = 6
TAIL = 100 * KIB  # of the last leaf
BASE = noise(1, LEAVES * LEAF_BYTES + TAIL)
# What a table, a page, a manifest and a reference may take.
BOOKS = 16 * KIB


@cache
def data_of(step: int) -> bytes:
    """The embedding of a step: another leaf is new in each, and no codec makes it smaller."""
    found = bytearray(BASE)
    for number in range(1, step + 1):
        at = number % (LEAVES + 1) * LEAF_BYTES
        stop = min(at + LEAF_BYTES, len(found))
        found[at:stop] = noise(100 + number, stop - at)
    return bytes(found)


def model(step: int) -> Model:
    """A step of which one leaf of the embedding and another tensor are new."""
    return {
        "embedding": np.frombuffer(data_of(step), np.uint8).copy(),
        "dense": np.full(50_000, step, np.float32),
    }


def all_tables(store: LocalStore) -> dict[ContainerId, Table]:
    return {
        each: store.handle.objects.containers.table(each)
        for each in store.handle.objects.containers
    }


def in_parts(store: LocalStore) -> dict[bytes, Record]:
    """The records that have parts, by digest."""
    found = {r.digest: r for table in all_tables(store).values() for r in table.records if r.parts}
    assert all(len(record.bases) == 1 + len(record.parts) for record in found.values())
    return found


def containers(store: LocalStore) -> int:
    return sum(p.stat().st_size for p in (store.path / "containers").rglob("*") if p.is_file())


def check(run: CheckpointStore, steps: list[int], root: Path | None = None) -> None:
    """Every step that should be there is, to the last byte, and nothing else."""
    again = handle(root or run.store.path)
    assert again.steps() == steps
    for step in steps:
        assert_same(again.load(step), model(step))
    assert again.store.verify(full=True).faults == []
    again.close()


def save_parted_run(root: Path, compress: str | None) -> None:
    """Save six steps, of which all but the first are stored in parts."""
    with handle(root, compress=compress) as run:
        for step in range(LEAVES):
            run.save(model(step), step)
        run.gc(24)  # which waits for what is encoded in the background
        expected = {bytes.fromhex(digest(data_of(step))) for step in range(1, LEAVES)}
        assert in_parts(run.store).keys() == expected


@contextmanager
def parted_run(saved: Path, root: Path, compress: str | None) -> Iterator[CheckpointStore]:
    """A copy of a run that was saved before."""
    shutil.copytree(saved, root)
    with handle(root, compress=compress) as run:
        yield run
