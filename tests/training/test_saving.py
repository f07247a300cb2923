"""What is saved comes back, what did not change is not saved again, and nothing else is assumed."""

import copy
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from processes.process_state import forked
from store_runs.stores import (
    Arrays,
    Model,
    assert_same,
    copied,
    forest,
    handle,
    network,
    open_store,
    shares,
    size_on_disk,
    train,
)
from tensor_dedup import Store
from tensor_dedup.store.errors import BadNameError
from tensor_dedup.store.steps.errors import (
    BadMetricError,
    BadStepError,
    NotATrainingError,
    UnknownStepError,
)
from tensor_dedup.store.steps.runs import describe_all, run_names
from tensor_dedup.training import CheckpointStore, TensorCasStore
from tensor_dedup.training.adapters import StateChunk
from tensor_dedup.training.encoding.decisions import Compress
from tensor_dedup.training.errors import NamedTwiceError, UnknownAdapterError, UnsupportedArrayError
from tensor_dedup.training.state import NamedValue

WRONG = NamedValue("z", "F32", (7,), b"abc")
TOO_SHORT: dict[str, Callable[[], tuple[Any, Any]]] = {
    "a value": lambda: (None, {"m": WRONG}),
    "made in the background": lambda: (
        None,
        {"m": StateChunk(make=lambda: WRONG, frozen=True)},
    ),
    "of an adapter": lambda: (Arrays(), {"z": WRONG}),
}


@pytest.mark.parametrize("way", TOO_SHORT)
def test_what_nobody_could_load_is_not_saved(tmp_path: Path, way: str) -> None:
    adapter, model = TOO_SHORT[way]()
    run = CheckpointStore(tmp_path, "run", adapter)
    with pytest.raises(UnsupportedArrayError, match="3 bytes are no F32"):
        run.save(model, 0)
    with pytest.raises(UnsupportedArrayError, match="3 bytes are no F32"):
        run.save_async(model, 0).wait()
    run.close()
    assert run.steps() == []


def test_steps_come_back_and_share_what_did_not_change(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    kept = {}
    for step in range(4):
        train(model, step, "layer2.weight", "layer2.bias")
        run.save(model, step, {"loss": 1.0 / (step + 1)})
        kept[step] = copied(model)
    assert shares(run)
    assert run.stats() == {
        "run_id": "run",
        "checkpoints": 4,
        "total_chunks": 4 * 6,
        "unique_chunks": 4 + 4 * 2,
        "dedup_ratio": 0.5,
        "total_bytes": run.stats()["total_bytes"],
    }
    assert run.steps() == [0, 1, 2, 3]
    assert run.latest() == 3
    for step, model in kept.items():
        assert_same(run.load(step), model)


def test_the_sizes_of_a_run_without_compression(tmp_path: Path) -> None:
    run, model = handle(tmp_path, compress=None), network(1)
    run.save(model, 0)
    train(model, 1, "layer0.bias")
    run.save(model, 1)
    assert shares(run)
    assert run.stats()["total_bytes"] == 3 * (160 * 200 + 160) * 4 + 160 * 4


def test_a_tensor_that_was_changed_in_place_is_saved(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    run.save(model, 0)
    # One bit, of the same array, under the same name.
    model["layer1.weight"].view(np.uint32)[80, 100] ^= 1
    saved = run.save(model, 1)
    assert shares(run)
    assert saved.new_tensors == 1
    assert_same(run.load(1), model)
    assert not np.array_equal(run.load(0)["layer1.weight"], model["layer1.weight"])


def test_a_tensor_that_is_what_it_once_was_costs_nothing(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    first = copied(model)
    run.save(model, 0)
    train(model, 1, "layer0.weight")
    run.save(model, 1)
    saved = run.save(first, 2)
    assert shares(run)
    assert saved.new_tensors == 0
    assert_same(run.load(2), first)


def test_names_may_change_and_bytes_stay(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    run.save(model, 0)
    other: Model = {f"model.{name}": array for name, array in reversed(model.items())}
    saved = run.save(other, 1)
    assert shares(run)
    assert saved.new_bytes == 0
    assert_same(run.load(1), other)


def test_swapped_tensors_are_swapped(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    run.save(model, 0)
    model["layer0.bias"], model["layer1.bias"] = model["layer1.bias"], model["layer0.bias"]
    saved = run.save(model, 1)
    assert shares(run)
    assert saved.new_bytes == 0
    assert_same(run.load(1), model)


@pytest.mark.parametrize("again", [False, True])
def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path, again: bool) -> None:
    run, model = handle(tmp_path), network(1)
    run.save(model, 0)
    run.save(model, 1)
    train(model, 1, "layer0.bias")
    (handle(tmp_path) if again else run).save(model, 1, {"loss": 2.0})
    assert shares(run)
    assert run.steps() == [0, 1]
    assert run.metrics() == {0: {}, 1: {"loss": 2.0}}
    assert_same(run.load(1), model)


def test_another_process_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    model = network(1)
    handle(tmp_path).save(model, 0)
    train(model, 1, "layer2.bias")
    run = handle(tmp_path)
    assert run.save(model, 1).new_tensors == 1
    assert shares(run)
    assert_same(run.load(1), model)


def test_runs_share_what_they_have_in_common(tmp_path: Path) -> None:
    runs, models = [], []
    for seed in range(4):
        run, model = handle(tmp_path, f"seed{seed}"), network(1)
        train(model, seed, "layer2.weight", "layer2.bias")
        saved = run.save(model, 0)
        assert saved.new_tensors == (6 if seed == 0 else 2)
        runs.append(run)
        models.append(model)
    for run, model in zip(runs, models, strict=True):
        assert run.stats()["total_chunks"] == 6
        assert_same(run.load(0), model)
    assert open_store(tmp_path).verify(full=True).fine


def test_handles_of_one_run_in_one_process(tmp_path: Path) -> None:
    one, two, model = handle(tmp_path), handle(tmp_path), network(1)
    for step in range(6):
        train(model, step, "layer1.bias")
        saved = (one, two)[step % 2].save(model, step)
        assert saved.new_tensors == (6 if step == 0 else 1)
    assert shares(one)
    assert one.steps() == two.steps() == list(range(6))
    assert_same(one.load(5), model)


def test_threads_save_at_once(tmp_path: Path) -> None:
    together, base = handle(tmp_path, "together"), network(1)
    models = []
    for seed in range(6):
        models.append(copied(base))
        train(models[seed], seed, "layer0.bias")
    own = [handle(tmp_path, f"own{seed}") for seed in range(6)]

    def work(seed: int) -> None:
        together.save(models[seed], seed)
        own[seed].save(models[seed], 0)

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shares(together)
    assert together.steps() == list(range(6))
    for seed, model in enumerate(models):
        assert_same(together.load(seed), model)
        assert_same(own[seed].load(0), model)
    assert open_store(tmp_path).verify(full=True).fine


def test_an_ensemble_pays_for_its_new_trees(tmp_path: Path) -> None:
    run = handle(tmp_path)
    run.save(forest(1000), 0)
    before = size_on_disk(tmp_path / "containers") + size_on_disk(tmp_path / "manifests")
    for step in range(1, 6):
        saved = run.save(forest(1000 + 10 * step), step)
        assert saved.new_tensors == 10
    assert shares(run)
    after = size_on_disk(tmp_path / "containers") + size_on_disk(tmp_path / "manifests")
    new_trees = 5 * 10 * 15 * 3 * 8
    # Beside the trees: a page that is not full yet, a manifest and a table, for each step.
    assert after - before < new_trees + 5 * 30_000
    assert_same(run.load(5), forest(1050))
    assert_same(run.load(0), forest(1000))


def test_a_long_run_does_not_lie_in_ever_more_files(tmp_path: Path) -> None:
    run = handle(tmp_path)
    for step in range(80):
        run.save(forest(2 * step + 2), step)
    assert shares(run)
    with run.store.checkpoint("run@79") as opened:
        assert len(opened._copies._handles) < 40
    assert_same(run.load(79), forest(160))
    run.store.gc(0)
    assert run.store.verify(full=True).fine
    assert_same(run.load(40), forest(82))


def test_odd_tensors(tmp_path: Path) -> None:
    run = handle(tmp_path)
    model: Model = {
        "none": np.zeros((0, 3), np.int64),
        "scalar": np.array(3.5),
        "nan": np.array([np.nan, -0.0, np.inf], np.float16),
        "bool": np.array([[True, False]]),
        "complex": np.array([1 + 2j], np.complex64),
        "again": np.zeros((0,), np.float32),
        "same": np.array([[True, False]]),
    }
    run.save(model, 0)
    run.save(model, 1)
    assert shares(run)
    assert_same(run.load(1), model)


@pytest.mark.parametrize("compress", [None, "auto", "always"])
def test_what_lies_in_another_order_is_saved_leaf_by_leaf(
    tmp_path: Path, compress: Compress
) -> None:
    dice, kept = np.random.default_rng(1), {}
    model: dict[str, Any] = {
        "turned": dice.normal(size=(1000, 1501)).astype(np.float32).T,  # three leaves
        "big": dice.normal(size=(600, 1000)).astype(">f4"),
        "little": dice.normal(size=(30, 40)).T,
        "tensor": torch.randn(800, 900).bfloat16().T,
        "conj": torch.randn(300, 500, dtype=torch.complex64).T.conj(),
    }
    with CheckpointStore(open_store(tmp_path), "run", compress=compress) as run:
        for step in range(3):
            run.save(model, step)
            assert run.save(model, 10 + step).new_tensors == 0
            kept[step] = copy.deepcopy(model)
            for each in model.values():
                each[: 1 + 300 * step] *= 1.001
        run.save_async(model, 3).wait()
        kept[3] = model
    assert run.store.verify(full=True).faults == []
    for step, expected in kept.items():
        found = run.load(step)
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            assert (found[name] == each).all()


def test_views_of_one_element_and_texts_that_end_in_zeros(tmp_path: Path) -> None:
    matrix = torch.arange(24.0).view(4, 6)
    assert matrix[1:2, 3].is_contiguous()
    assert matrix[1:2, 3].stride() != (1,)
    state: dict[str, Any] = {
        "one": matrix[1:2, 3],
        "texts": [np.bytes_(b"a\0"), np.bytes_(b""), np.str_("b\0"), np.str_("")],
    }
    with CheckpointStore(open_store(tmp_path), "run") as run:
        run.save(state, 0)
        run.save_async(state, 1).wait()
        for step in (0, 1):
            back = run.load(step)
            assert torch.equal(back["one"], matrix[1:2, 3])
            assert [bytes(text.data) for text in back["texts"]] == [
                b"a\0",
                b"",
                b"b" + bytes(7),
                b"",
            ]


def test_nothing_at_all(tmp_path: Path) -> None:
    run = handle(tmp_path)
    assert run.latest() is None
    assert run.stats()["dedup_ratio"] == 1.0
    run.save({}, 0)
    assert run.load(0) == {}


def test_what_was_loaded_is_writable_and_its_own(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    model["twin"] = model["layer0.weight"].copy()
    run.save(model, 0)
    found = run.load(0)
    found["twin"] += 1
    assert_same(run.load(0), model)
    assert np.array_equal(found["layer0.weight"], model["layer0.weight"])
    assert shares(run)


def test_best_and_metrics(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    for step, loss in enumerate([3.0, 1.0, float("nan"), 1.0]):
        run.save(model, step, {"loss": loss, "acc": np.float32(step)})
    run.save(model, 4)
    assert shares(run)
    assert run.best("loss") == 1
    assert run.best("acc", mode="max") == 3
    with pytest.raises(BadMetricError, match="they have acc, loss"):
        run.best("accuracy")
    with pytest.raises(BadMetricError, match="is 'low'"):
        run.save(model, 5, {"loss": "low"})
    assert run.latest() == 4


def test_config_files_are_kept_with_every_step(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "model.safetensors").write_bytes(b"weights are left out")
    run, model = handle(tmp_path / "store", config=folder), network(1)
    run.save(model, 0)
    run.save(model, 1, files={"tokenizer/vocab.txt": "a\nb\n"})
    assert shares(run)
    run.store.export("run@1", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == '{"a": 1}'
    assert (tmp_path / "out" / "tokenizer" / "vocab.txt").read_text() == "a\nb\n"
    assert_same(run.load(1), model)
    for path in ("model.safetensors", "config.json/x"):
        with pytest.raises(NamedTwiceError):
            run.save(model, 2, files={path: b""})
    assert run.steps() == [0, 1]


def test_wrong_use_is_named(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    run.save(model, 3)
    with pytest.raises(UnknownStepError, match="it has step 3 only"):
        run.load(4)
    with pytest.raises(BadStepError):
        run.save(model, -1)
    with pytest.raises(BadStepError):
        run.load(True)
    with pytest.raises(BadNameError):
        handle(tmp_path, "../run")


def test_an_imported_checkpoint_is_no_step(tmp_path: Path) -> None:
    run, model = handle(tmp_path / "store"), network(1)
    run.save(model, 1)
    run.store.export("run@1", tmp_path / "out")
    run.store.import_(tmp_path / "out", "run@2")
    for act in (run.load, run.delete):
        with pytest.raises(NotATrainingError):
            act(2)
    assert handle(tmp_path / "store", keep_last=1).save(model, 3).new_tensors == 0
    assert run.steps() == [3]
    assert [step.step for step in describe_all(run.store.handle.objects, "run")] == [3]
    assert run_names(run.store.handle.objects) == ["run"]
    assert run.stats()["checkpoints"] == 1


def test_the_article_s_class_is_the_same(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    other = TensorCasStore(root=run.store, run_id="other", adapter=run._options.adapter)
    run.save(model, 0)
    other.save(model, step=1, metrics={"val_loss": 0.5})
    assert isinstance(other, CheckpointStore)
    assert other.best("val_loss", mode="min") == 1
    assert_same(other.load(step=1, original=model), model)


class Bare:
    """An adapter as tensorcas knows them: nothing but its two methods."""

    def extract(self, model: list[float]) -> dict[str, Any]:
        return {"values": np.array(model), "same": np.ones(100_000)}

    def reconstruct(self, tensors: dict[str, Any], original: list[float]) -> list[float]:
        return [*original, *tensors["values"].tolist()]


def test_an_adapter_of_two_methods_is_one(tmp_path: Path) -> None:
    adapter: Any = Bare()
    with TensorCasStore(tmp_path, "run", adapter) as run:
        run.save([1.0, 2.0], step=1)
        run.save([3.0], step=2)
        assert shares(run)
        assert run.load(1, [0.0]) == [0.0, 1.0, 2.0]
    with CheckpointStore(tmp_path, "run") as run, pytest.raises(UnknownAdapterError, match="Bare"):
        run.load(1)


def forget_while_a_thread_starts(folder: str) -> bool:
    """Whether a forgotten handle is collected while this thread holds what a join waits for."""

    def forget() -> None:
        with threading._shutdown_locks_lock:  # type: ignore[attr-defined]  # not in Python 3.13
            run.clear()
            gc.collect()
        done.set()

    store = Store.open(folder, worker_count=2)
    run = [CheckpointStore(store, "run", compress=None)]
    run[0].save({str(n): np.full(300_000, n, np.float32) for n in range(4)}, 0)
    assert any(each.name.startswith("tensor-dedup-store") for each in threading.enumerate())
    kept = weakref.ref(run[0]._saver._cache)
    done = threading.Event()
    threading.Thread(target=forget, daemon=True).start()
    if not done.wait(30):
        os._exit(1)  # no thread of this process can end any more
    return kept() is None


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="threads are joined without such a lock")
def test_a_handle_that_is_forgotten_waits_for_no_thread(tmp_path: Path) -> None:
    """A collection may run while a thread starts; who joins another one then waits for itself."""
    assert forked(lambda: forget_while_a_thread_starts(str(tmp_path / "store")))
