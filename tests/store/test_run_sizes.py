"""What a run costs beside the rest of a store, and how often its tensors change."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store_runs.stores import content, handle, network, noise, safetensors, train, u8, write
from tensor_dedup import Store
from tensor_dedup.store import LocalStore
from tensor_dedup.store.errors import UnfitForCollectionError
from tensor_dedup.store.files import Handle, Mode, RealFiles
from tensor_dedup.store.format.manifests import PAGE_ENTRIES
from tensor_dedup.store.upkeep.run_sizes import RunCost
from tensor_dedup.training import CheckpointStore

_FOLDERS = ("containers", "manifests", "refs")


def disk_bytes(store: LocalStore) -> int:
    """What all that `gc` decides about takes."""
    held = content(store.path)
    return sum(len(data) for path, data in held.items() if path.partition("/")[0] in _FOLDERS)


def deleted(store: LocalStore, run: str) -> int:
    """Delete a run, and say how many bytes went."""
    before = disk_bytes(store)
    with CheckpointStore(store, run) as steps:
        for step in steps.steps():
            steps.unkeep(step)
            steps.delete(step)
    store.gc(0)
    return before - disk_bytes(store)


def many(seed: int) -> dict[str, Any]:
    """A model of more tensors than one page holds."""
    return {f"t{n}": np.full(30, n + 1000 * seed) for n in range(PAGE_ENTRIES + 40)}


@pytest.fixture
def shared(tmp_path: Path) -> LocalStore:
    """Runs that share with each other and with an import, deltas and kept steps among them."""
    one, two = handle(tmp_path / "store", "one"), handle(tmp_path / "store", "two")
    model = network(1)
    one.save(model, 0)
    two.save(model, 0)
    for step in (1, 2):
        train(model, step, "layer0.bias")
        one.save(model, step)
        two.save({**model, "other": np.frombuffer(noise(step, 5000), "<u1")}, step)
    one.keep(1)
    with CheckpointStore(one.store, "many") as run:
        run.save(many(1), 0)
        run.save(many(1) | {"t3": np.zeros(30)}, 1)
    files = {"model.safetensors": safetensors(u8(x=noise(1, 5000), a=noise(7, 90_000)))}
    one.store.import_(write(tmp_path / "in", files), "imported")
    one.store.gc(0)
    return one.store


@pytest.mark.parametrize("run", ["one", "two", "many"])
def test_what_a_run_costs_is_what_goes_with_it(shared: LocalStore, run: str) -> None:
    cost = shared.run_cost(run)
    before = shared.stats().dead_bytes
    assert cost.reclaimable_bytes > 0
    assert deleted(shared, run) == cost.reclaimable_bytes
    assert shared.stats().dead_bytes - before <= cost.dead_bytes
    after = shared.run_cost(run)
    assert after == RunCost(0, 0, 0, 0, after.store_bytes)


def test_what_others_have_too_is_shared(shared: LocalStore) -> None:
    alone = {run: shared.run_cost(run) for run in ("one", "two", "many")}
    assert alone["many"].shared_bytes == 0
    assert alone["one"].shared_bytes > alone["one"].reclaimable_bytes
    # The import has one of its tensors; the rest of it is shared with the other run only.
    assert alone["two"].shared_bytes > alone["one"].shared_bytes
    deleted(shared, "one")
    assert shared.run_cost("two").shared_bytes == 5000
    together = shared.run_cost()
    assert (together.shared_bytes, together.dead_bytes) == (5000, 0)
    assert deleted(shared, "two") + deleted(shared, "many") == together.reclaimable_bytes


@pytest.mark.parametrize("run", ["one", "two", "many"])
def test_the_numbers_are_those_of_du(shared: LocalStore, run: str) -> None:
    cost = shared.run_cost(run)
    used = {each.name: each for each in shared.usage().checkpoints}[run]
    assert (cost.unique_bytes, cost.shared_bytes) == (used.unique_bytes, used.shared_bytes)
    assert cost.reclaimable_bytes == used.reclaimable_bytes
    assert cost.store_bytes == shared.usage().disk_bytes
    assert sum(each.stored_bytes for each in shared.run_growth(run)) == cost.disk_bytes


def test_an_import_of_a_step_s_name_is_not_of_the_run(shared: LocalStore, tmp_path: Path) -> None:
    shared.export("many@0", tmp_path / "out")
    shared.import_(tmp_path / "out", "many@7")
    cost = shared.run_cost("many")
    assert cost.shared_bytes > 0
    assert deleted(shared, "many") == cost.reclaimable_bytes


def test_without_certainty_there_is_no_cost(shared: LocalStore) -> None:
    slabs = sorted((shared.path / "containers").rglob("*.pack"))
    for path in slabs:
        path.unlink()
    with pytest.raises(UnfitForCollectionError, match=r"lost pieces: [1-9]"):
        shared.run_cost("one")


class Counting(RealFiles):
    """A disk that counts the manifests and pages that are opened."""

    opened = 0

    def open(self, path: Path, mode: Mode) -> Handle:
        self.opened += path.parent.parent.name == "manifests"
        return super().open(path, mode)


def states(seed: int) -> list[dict[str, Any]]:
    """Steps of several pages: tensors change, come, go, come back, and get another type."""
    dice, model = random.Random(seed), many(0)
    found = []
    for step in range(12):
        for name in dice.sample(sorted(model), dice.choice([0, 1, 5])):
            model[name] = model[name] + 1
        if step % 4 == 1:
            model[f"new{step}"] = np.ones(3)
            model.pop(dice.choice(sorted(model)))
        if step == 5:
            model["t9"] = np.full(30, 9, "<i4")
        if step == 8:
            model = many(0)
        found.append(dict(model))
    return found


def expected(steps: list[dict[str, Any]]) -> dict[str, list[int]]:
    counts: dict[str, list[int]] = {name: [0, 0] for model in steps for name in model}
    for old, new in pairwise(steps):
        for name in old.keys() & new.keys():
            same = old[name].dtype == new[name].dtype and np.array_equal(old[name], new[name])
            counts[name][not same] += 1
    return counts


@pytest.mark.parametrize("seed", range(3))
def test_changes_of_tensors_are_counted(tmp_path: Path, seed: int) -> None:
    steps = states(seed)
    with CheckpointStore(tmp_path / "store", "run") as run:
        for step, model in enumerate(steps):
            run.save(model, step)
    files = Counting()
    store = Store.open(tmp_path / "store", files=files)
    found = store.tensor_changes("run")
    opened = files.opened
    tensors = {each.name: [each.identical, each.changed] for each in found}
    assert {n: c for n, c in tensors.items() if not n.startswith("#")} == expected(steps)
    assert tensors["#values"] == [len(steps) - 1, 0]
    manifests = [store.handle.objects.manifest(step.manifest) for step in store.steps("run")]
    pages = [page for manifest in manifests for page in manifest.pages]
    assert len(pages) > len({*pages}) + len(steps) // 3
    # Each manifest once, and each page once, but for those that come back.
    assert len(steps) < opened <= len(steps) + len({*pages}) + 2


def test_the_share_of_identical_steps(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, "run") as run:
        for step in range(4):
            run.save(
                {
                    "a": np.zeros(9),
                    "b": np.full(9, step // 2),
                    **({"c": np.ones(9)} if step == 3 else {}),
                },
                step,
            )
    found = {each.name: each for each in run.store.tensor_changes("run")}
    assert [found[name].percent for name in "abc"] == [100.0, 66.7, None]
    assert run.store.tensor_changes("none") == []
