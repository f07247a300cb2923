"""What is done to a run of two tiers in tests of faults, and what may be there afterwards."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from store_runs.stores import Model, assert_same, forest, handle, network, open_store, train
from tensor_dedup.remote import Remote
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.errors import NotARemoteError
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.tiers.remote_tier import RemoteTier
from tensor_dedup.training.tiers.second_tier import StoreTier
from tensor_dedup.training.tiers.two_tiers import TwoTiers

Steps = Mapping[int, int]
"""Which model each step is."""


@cache
def model_of(number: int) -> Model:
    """A large tensor that moves, a small one, and an ensemble that grows."""
    model = network(1, layers=1)
    for seed in range(number + 1):
        train(model, seed, "layer0.weight")
    return {**model, **forest(4 + number)}


def drain(run: CheckpointStore) -> None:
    assert run._drain is not None
    while run._drain.work_once():
        pass


@dataclass(frozen=True)
class Act:
    """What is done to a run of two tiers, what both together may then be, and the second alone."""

    before: Callable[[CheckpointStore], object]
    act: Callable[[CheckpointStore], object]
    both: tuple[Steps, ...]
    second: tuple[Steps, ...]
    options: dict[str, Any] = field(default_factory=dict)
    kept: tuple[set[int], ...] = (set(),)
    opening: bool = False
    """Whether to open the run is a part of it."""


def undrained(*saves: tuple[int, int]) -> Callable[[CheckpointStore], None]:
    def before(run: CheckpointStore) -> None:
        for step, number in saves:
            run.save(model_of(number), step)

    return before


def with_mark(run: CheckpointStore) -> None:
    run.keep(0)
    drain(run)


def keep(run: CheckpointStore) -> None:
    run.keep(0)
    drain(run)


def of_an_earlier_version(run: CheckpointStore) -> None:
    """Neither tier has a note of the other, and the second one has no token."""
    assert isinstance(run._tiers, TwoTiers)
    run._tiers._bond._note = None
    shutil.rmtree(run.store.path / "tiers")
    second = run._tiers.second
    if isinstance(second, StoreTier):
        (second.path / "identity").unlink()
        shutil.rmtree(second.path / "writers")
    else:
        assert isinstance(second, RemoteTier)
        second._bucket.delete("identity")
        second._bucket.delete("writers/run")
    run.save(model_of(2), 2)


def pulled(folder: Path, remote: Any) -> CheckpointStore:
    """The run as it is on a remote, pulled into a new store in `folder`; no writer is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    opened = Remote(remote) if isinstance(remote, Bucket) else Remote.open(remote)
    store = open_store(folder)
    with suppress(NotARemoteError):  # its marker is written first, and may not be there yet
        if opened.names():
            store.pull(opened, "run")
    return handle(folder)


_ALL: dict[str, Any] = {"keep_fast": None}
OLD = {0: 0, 1: 1}
ACTS = {
    "next steps": Act(
        undrained((2, 2), (3, 3)),
        drain,
        ({**OLD, 2: 2, 3: 3},),
        (OLD, {**OLD, 2: 2}, {**OLD, 2: 2, 3: 3}),
    ),
    "first drain of this version": Act(
        of_an_earlier_version,
        drain,
        ({**OLD, 2: 2},),
        (OLD, {**OLD, 2: 2}),
        {"keep_fast": 2},
        opening=True,
    ),
    "sweeping": Act(
        undrained((2, 2), (3, 3)),
        drain,
        ({**OLD, 2: 2, 3: 3},),
        (OLD, {**OLD, 2: 2}, {**OLD, 2: 2, 3: 3}),
        {"drain_backlog": 2},
    ),
    "replacing": Act(undrained((0, 5)), drain, ({0: 5, 1: 1},), (OLD, {0: 5, 1: 1}), _ALL),
    "retention": Act(
        undrained((2, 2)),
        drain,
        ({0: 0, 1: 1, 2: 2}, {1: 1, 2: 2}),
        (OLD, {**OLD, 2: 2}, {1: 1, 2: 2}),
        {"keep_last": 2, "keep_fast": None},
    ),
    "delete": Act(undrained(), lambda run: run.delete(0), (OLD, {1: 1}), (OLD, {1: 1}), _ALL),
    "delete of what was saved again": Act(
        undrained((0, 5)),
        lambda run: run.delete(0),
        ({0: 5, 1: 1}, {1: 1}),  # never what it was before
        (OLD, {1: 1}),
        _ALL,
    ),
    "keep": Act(undrained(), keep, (OLD,), (OLD,), _ALL, (set(), {0})),
    "unkeep": Act(with_mark, lambda run: run.unkeep(0), (OLD,), (OLD,), _ALL, (set(), {0})),
}


def held(run: CheckpointStore) -> Steps:
    """Which model each step is; each is whole."""
    found = {}
    for step in run.steps():
        model = run.load(step)
        number = sum(name.startswith("tree") for name in model) - 4
        assert_same(model, model_of(number))
        found[step] = number
    return found
