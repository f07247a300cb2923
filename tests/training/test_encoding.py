"""Tensors of a step that are stored as what differs from another step, and stay readable."""

from pathlib import Path

import numpy as np
import pytest

from store_runs.stores import Model, assert_holds, assert_same, copied, handle, open_store, shares
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.encoding.anchors import AnchorMemory


def weights(seed: int) -> Model:
    """Two tensors that move in training, one that does not, one that nothing makes smaller."""
    dice = np.random.default_rng(seed)
    return {
        "embedding": dice.standard_normal((300, 400)).astype(np.float32),
        "head": dice.standard_normal((200, 200)).astype(np.float16),
        "frozen": dice.standard_normal((200, 200)).astype(np.float32),
        "noise": dice.integers(0, 256, 100_000, dtype=np.uint8),
    }


def tune(model: Model, seed: int) -> None:
    """A small step of training."""
    dice = np.random.default_rng(seed)
    for name in ("embedding", "head"):
        model[name] += (dice.standard_normal(model[name].shape) * 1e-4).astype(model[name].dtype)
    model["noise"][:] = dice.integers(0, 256, 100_000, dtype=np.uint8)


def run_of(run: CheckpointStore, steps: int) -> dict[int, Model]:
    model, kept = weights(1), {}
    for step in range(steps):
        tune(model, step)
        run.save(model, step)
        kept[step] = copied(model)
    return kept


def bases(run: CheckpointStore, step: int) -> dict[str, str | None]:
    with run.store.checkpoint(f"run@{step}") as opened:
        return {tensor.name: opened.stored(tensor)[2] for tensor in opened}


def test_steps_of_training_are_stored_as_differences(tmp_path: Path) -> None:
    run = handle(tmp_path / "auto")
    kept = run_of(run, 8)
    plain = handle(tmp_path / "plain", compress=None)
    run_of(plain, 8)
    assert shares(run)
    changing = 8 * (300 * 400 * 4 + 200 * 200 * 2)
    saved = int(str(plain.stats()["total_bytes"])) - int(str(run.stats()["total_bytes"]))
    assert saved > changing * 0.2
    assert bases(run, 7)["embedding"] is not None
    assert bases(run, 7)["noise"] is None
    for step, model in kept.items():
        assert_same(run.load(step), model)


def test_deltas_are_stars(tmp_path: Path) -> None:
    run = handle(tmp_path)
    run_of(run, 12)
    assert shares(run)
    against = {bases(run, step)["embedding"] for step in range(12)}
    digests = {}
    for step in range(12):
        with run.store.checkpoint(f"run@{step}") as opened:
            digests[opened["embedding"].digest] = bases(run, step)["embedding"]
    assert len(against) > 1  # some step is no delta, others are against it
    for base in against - {None}:
        assert digests[str(base)] is None


def test_a_new_process_stores_against_what_the_old_one_did(tmp_path: Path) -> None:
    model = weights(1)
    for step in range(3):
        tune(model, step)
        handle(tmp_path).save(model, step)
    run = handle(tmp_path)
    assert shares(run)
    assert bases(run, 1)["embedding"] == bases(run, 2)["embedding"] is not None
    assert_same(run.load(2), model)


def test_deltas_outlive_the_step_they_are_against(tmp_path: Path) -> None:
    run = handle(tmp_path, keep_last=1)
    kept = run_of(run, 3)
    assert bases(run, 2)["embedding"] is not None
    assert run.steps() == [2]
    run.gc(0)
    assert_same(run.load(2), kept[2])
    model = copied(kept[2])
    tune(model, 99)
    run.save(model, 3)
    run.gc(0)
    assert_same(run.load(3), model)
    assert run.store.verify(full=True).fine


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int8, np.complex64])
def test_elements_of_any_width(tmp_path: Path, dtype: type) -> None:
    run = handle(tmp_path)
    model: Model = {"a": (np.arange(100_000) % 1000).astype(dtype), "b": np.ones(3)}
    first = copied(model)
    run.save(model, 0)
    model["a"][::7] += dtype(1)
    run.save(model, 1)
    assert shares(run)
    assert int(str(run.stats()["total_bytes"])) < 2 * first["a"].nbytes
    assert_same(run.load(0), first)
    assert_same(run.load(1), model)


def test_exports_of_encoded_steps(tmp_path: Path) -> None:
    run = handle(tmp_path / "store")
    kept = run_of(run, 2)
    assert shares(run)
    other = open_store(tmp_path / "other")
    run.store.export("run@1", tmp_path / "out")
    other.import_(tmp_path / "out", "copy")
    content = {"model.safetensors": (tmp_path / "out" / "model.safetensors").read_bytes()}
    assert_holds(other, {"copy": content})
    with other.checkpoint("copy") as opened:
        for name, array in kept[1].items():
            assert bytes(opened.read(name)) == array.tobytes()


def grown(trees: int) -> Model:
    """An ensemble whose trees are texts that resemble each other, and one that never repeats."""
    found: Model = {
        f"tree{n:05}": np.frombuffer((f"<node id={n}>" * 60).encode(), np.uint8).copy()
        for n in range(trees)
    }
    found["state"] = np.random.default_rng(trees).integers(0, 256, 2500, dtype=np.uint8)
    return found


def test_small_tensors_are_encoded_and_stay_so_when_they_are_put_together(tmp_path: Path) -> None:
    run = handle(tmp_path)
    for step in range(40):
        run.save(grown(3 * step + 3), step)
    assert shares(run)
    raw = sum(array.nbytes for array in grown(120).values())
    assert int(str(run.stats()["total_bytes"])) - 40 * 2500 < raw * 0.3
    with run.store.checkpoint("run@39") as opened:
        assert opened.stored(opened["tree00000"])[0] == "planes1"
        assert opened.stored(opened["state"])[0] == "raw"
        assert len(opened._copies._handles) < 32
    for step in (0, 39):
        assert_same(run.load(step), grown(3 * step + 3))
    run.gc(0)
    assert_same(run.load(20), grown(63))
    assert run.store.verify(full=True).fine


@pytest.mark.parametrize("most", [0, 200_000, 64 << 20])
def test_memory_of_anchors_is_bounded_and_changes_nothing(tmp_path: Path, most: int) -> None:
    run = handle(tmp_path)
    decisions = run._saver._encoder.decisions
    decisions.anchors = AnchorMemory(most)
    kept = run_of(run, 5)
    assert shares(run)
    assert bases(run, 4)["embedding"] is not None
    assert sum(map(len, decisions.anchors._leaves.values())) <= most
    assert (most < 300 * 400 * 4) or decisions.anchors._leaves
    for step, model in kept.items():
        assert_same(run.load(step), model)


@pytest.mark.parametrize("again", [False, True])
def test_a_delta_whose_anchor_is_lost_is_stored_again(tmp_path: Path, again: bool) -> None:
    run = handle(tmp_path)
    kept = run_of(run, 2)
    with run.store.checkpoint("run@0") as opened:
        anchor = opened["embedding"].digest
    assert bases(run, 1)["embedding"] == anchor
    for container in run.store.handle.objects.containers:
        table = run.store.handle.objects.containers.table(container)
        if anchor in {record.digest.hex() for record in table.records}:
            run.store.handle.objects.layout.container(container.name, container.kind).unlink()
    run = handle(tmp_path) if again else run
    assert run.save(kept[1], 2).new_tensors > 0
    assert_same(run.load(2), kept[1])
    assert_same(run.load(1), kept[1])
    run.delete(0)
    assert shares(run)
    assert run.store.verify(full=True).fine
