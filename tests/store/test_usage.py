"""What checkpoints and runs take in a store: the same by every count, and what the disk says."""

from pathlib import Path

import numpy as np
import pytest

from store_runs.stores import KIB, noise, safetensors, size_on_disk, tuned, u8, weights, write
from tensor_dedup import Store
from tensor_dedup.store.upkeep.usage import Usage
from tensor_dedup.training import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A base, a fine-tune stored as differences from it, one that shares a tensor, and a run."""
    store = Store.open(tmp_path / "store")
    base = weights(1, 200 * KIB)
    for name, data in (("base", base), ("tune", tuned(base, 2))):
        files = {"model.safetensors": safetensors({"w": ("BF16", (len(data) // 2,), data)})}
        store.import_(write(tmp_path / name, files), compress="auto")
    shared = {"w": ("BF16", (len(base) // 2,), base), **u8(own=noise(3, 90 * KIB))}
    store.import_(write(tmp_path / "grown", {"model.safetensors": safetensors(shared)}))
    for step in (1, 2, 3):
        model = {
            "frozen": np.frombuffer(noise(4, 80 * KIB), np.uint8),
            "head": np.frombuffer(noise(10 + step, 30 * KIB), np.uint8),
        }
        CheckpointStore(store, "run").save(model, step=step, metrics={})
    return store


def by_name(store: Store, name: str | None = None) -> dict[str, Usage]:
    return {each.name: each for each in store.usage(name).checkpoints}


def files_on_disk(store: Store) -> int:
    return sum(size_on_disk(store.path / part) for part in ("containers", "manifests", "refs"))


def test_the_sums_are_those_of_stats_and_of_the_disk(store: Store) -> None:
    found, stats = store.usage(), store.stats()
    assert [each.name for each in found.checkpoints] == ["base", "grown", "run", "tune"]
    assert found.shared_bytes > 0  # else nothing is shared, and the sums say little
    stored = sum(coded.stored_bytes for coded in stats.codecs.values())
    assert found.unique_bytes + found.shared_bytes == stored
    every = sum(path.stat().st_size for path in store.path.rglob("*") if path.is_file())
    assert found.disk_bytes == stats.disk_bytes == every
    saved = sum(coded.nbytes - coded.stored_bytes for coded in stats.codecs.values())
    each_saves = [each.encoding_saves_bytes for each in found.checkpoints]
    # What two checkpoints have counts once there, and for both here.
    assert 0 < max(each_saves) <= saved <= sum(each_saves)


@pytest.mark.parametrize("name", ["base", "tune", "grown", "run@2"])
def test_deleting_gives_back_what_was_said(store: Store, name: str) -> None:
    said = by_name(store, name)[name].reclaimable_bytes
    before = files_on_disk(store)
    store.delete(name)
    store.gc(0)
    assert said == before - files_on_disk(store)


def test_a_run_costs_what_run_cost_says(store: Store) -> None:
    run = by_name(store)["run"]
    assert (run.kind, run.steps) == ("run", 3)
    assert run.reclaimable_bytes == store.run_cost("run").reclaimable_bytes
    before = files_on_disk(store)
    for step in (1, 2, 3):
        store.delete(f"run@{step}")
    store.gc(0)
    assert run.reclaimable_bytes == before - files_on_disk(store)


def test_a_step_can_count_alone(store: Store) -> None:
    found = by_name(store, "run@2")
    assert found["run"].steps == 2
    assert 30 * KIB <= found["run@2"].unique_bytes < 40 * KIB
    assert found["run@2"].shared_bytes >= 80 * KIB
    assert "run@2" not in by_name(store)


def test_a_base_is_needed_by_what_is_stored_against_it(store: Store, tmp_path: Path) -> None:
    store.delete("grown")
    found = by_name(store)
    assert found["tune"].encoding_saves_bytes > 0
    assert found["base"].unique_bytes < 10 * KIB  # its header; the tensor is an anchor
    assert found["base"].shared_bytes == found["tune"].shared_bytes > 100 * KIB
    assert found["base"].reclaimable_bytes is not None
    assert found["base"].reclaimable_bytes < 10 * KIB


def test_an_external_checkpoint_whose_file_changes_is_not_healthy(
    store: Store, tmp_path: Path
) -> None:
    folder = write(tmp_path / "ext", {"model.safetensors": safetensors(u8(x=noise(9, 50 * KIB)))})
    store.import_(folder, external=True)
    fine = by_name(store)["ext"]
    assert (fine.kind, fine.damage) == ("external", None)
    assert fine.external_bytes >= 50 * KIB
    (folder / "model.safetensors").unlink()
    found = by_name(store)
    gone = found["ext"]
    assert gone.kind == "external"
    assert gone.damage is not None
    assert str(folder / "model.safetensors") in gone.damage
    assert found["base"].damage is None
    assert found["base"].reclaimable_bytes is None  # gc would refuse
    assert found["base"].unique_bytes == by_name(store)["base"].unique_bytes


def test_a_damaged_reference_hides_no_other(store: Store) -> None:
    reference = store.path / "refs" / "base"
    reference.write_bytes(reference.read_bytes().replace(b"base", b"esab"))
    found = by_name(store)
    assert found["base"].damage is not None
    assert found["grown"].damage is None
    assert found["grown"].nbytes > 0
