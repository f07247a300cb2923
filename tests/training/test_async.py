"""What is saved in the background is what the model was when it was saved; nothing gets lost."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from processes.process_state import fork, forked
from store_runs.stores import (
    Arrays,
    Gate,
    Model,
    assert_same,
    copied,
    forest,
    gated,
    handle,
    network,
    open_store,
    shares,
    train,
)
from tensor_dedup.errors import StoreError
from tensor_dedup.store.buffers import PAGE
from tensor_dedup.store.errors import LostHitError
from tensor_dedup.store.steps.errors import BadOptionError, BadStepError, KeptStepError
from tensor_dedup.store.writing.containers import PACK_BELOW
from tensor_dedup.training import CheckpointStore, PendingSave
from tensor_dedup.training.adapters import StateProvider, register_provider
from tensor_dedup.training.capture import CaptureContext, StepCapture
from tensor_dedup.training.errors import ForkedSaveError, UnsupportedArrayError
from tensor_dedup.training.host_pool import HostPool

WEIGHT_BYTES = 160 * 200 * 4


def allocated(run: CheckpointStore) -> int:
    return run._saves._pool.allocated


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("pool_bytes", [None, WEIGHT_BYTES, 0])
def test_training_goes_on_while_steps_are_saved(
    tmp_path: Path, lazy: bool, pool_bytes: int | None
) -> None:
    run, kept = handle(tmp_path, pool_bytes=pool_bytes), {}
    model = {**network(1), **forest(40)}
    for step in range(6):
        kept[step] = copied(model)
        run.save_async(model, step, {"loss": float(step)}, lazy=lazy)
        if lazy:
            run.before_update()
        # At once, in place: tensors of both sizes, and one that did not move before.
        train(model, step, "layer2.weight", "layer2.bias", f"layer{step % 3}.weight")
        model["tree000003"][:] = step
    run.close()
    assert allocated(run) == 0  # all that was taken came back
    assert shares(run)
    assert run.steps() == list(range(6))
    for step, expected in kept.items():
        assert_same(run.load(step), expected)
    assert run.metrics()[3] == {"loss": 3.0}
    assert run.store.verify(full=True).faults == []


def test_what_did_not_change_is_not_copied(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    run.save(model, 0)
    train(model, 0, "layer1.weight")
    saved = run.save_async(model, 1).wait()
    assert shares(run)
    assert saved.new_tensors == 1
    assert allocated(run) == -(-WEIGHT_BYTES // 4096) * 4096 + PACK_BELOW  # of the small ones
    # One bit, of the same array, under the same name.
    model["layer0.weight"].view(np.uint32)[80, 100] ^= 1
    assert run.save_async(model, 2).wait().new_tensors == 1
    assert_same(run.load(2), model)


def test_what_no_longer_moves_is_no_longer_written(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    for step in range(3):
        train(model, step, *model)
        run.save_async(model, step)
    # It moved in each step, so it is copied first, and found known in the background.
    assert run.save_async(model, 3).wait().new_tensors == 0
    run.close()
    assert allocated(run) == 0
    assert run.save_async(model, 4).wait().new_tensors == 0
    assert run.save_async(model, 5).wait().new_tensors == 0
    assert shares(run)
    assert allocated(run) <= 4 * WEIGHT_BYTES
    assert_same(run.load(5), model)


def test_before_update_keeps_small_tensors_as_they_were(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    kept = copied(model)
    run.save_async(model, 0, lazy=True)
    train(model, 1, "layer0.bias")  # as a forward pass does with statistics
    run.before_update()
    train(model, 2, *model)
    run.save_async(model, 1).wait()
    assert_same(run.load(0), kept)
    assert_same(run.load(1), model)


@pytest.mark.parametrize("pool_bytes", [None, WEIGHT_BYTES, 0])
def test_what_could_change_unnoticed_is_copied_at_once(
    tmp_path: Path, pool_bytes: int | None
) -> None:
    run, kept = handle(tmp_path, pool_bytes=pool_bytes), {}
    with torch.inference_mode():
        model: dict[str, Any] = {**network(1), "inference": torch.ones(200, 200)}
    view = model["inference"].numpy()
    for step in range(3):
        kept[step] = copied({**model, "inference": view})
        pending = run.save_async(model, step, lazy=True)
        train(model, step, "layer0.weight", "layer1.weight")  # and nobody has waited
        view += 1
        pending.wait()
    assert shares(run)
    for step, expected in kept.items():
        assert_same(run.load(step), expected)


def test_tensors_of_one_memory_are_copied_once(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1, layers=1)
    model["tied"] = model["layer0.weight"]
    model["turned"] = model["layer0.weight"].T
    kept = copied(model)
    pending = run.save_async(model, 0)
    # One for both of the same order, one for the other order, one for what is small.
    assert allocated(run) == 2 * -(-WEIGHT_BYTES // 4096) * 4096 + PACK_BELOW
    train(model, 0, "layer0.weight")
    pending.wait()
    assert shares(run)
    assert_same(run.load(0), kept)


def test_a_full_pool_makes_the_model_wait_for_the_disk(tmp_path: Path) -> None:
    gate = Gate()
    gate.opened.set()
    run, model = handle(tmp_path, files=gate, pool_bytes=0), network(1)
    assert run.save_async(model, 0).done()
    train(model, 0, "layer0.weight")
    gate.opened.clear()
    # Of tensors torch counts the writes: only before_update has to wait for them.
    tensors = {name: torch.from_numpy(array) for name, array in model.items()}
    pending = run.save_async(tensors, 1, lazy=True)
    thread = threading.Thread(target=run.before_update)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    gate.opened.set()
    thread.join()
    assert pending.done()
    assert shares(run)
    assert_same(run.load(1), model)


def test_one_save_at_a_time_waits_for_the_one_before(tmp_path: Path) -> None:
    gate = Gate()
    run, model, begun = gated(tmp_path, gate), network(1), list[PendingSave]()
    first = run.save_async(model, 0)
    thread = threading.Thread(target=lambda: begun.append(run.save_async(model, 1)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert not first.done()
    gate.opened.set()
    thread.join()
    assert first.done()
    assert begun[0].wait().new_tensors == 0
    assert run.steps() == [0, 1]


@pytest.mark.parametrize("lazy", [False, True])
def test_some_columns_of_an_array_are_not_taken_for_others_of_it(
    tmp_path: Path, lazy: bool
) -> None:
    rows = np.zeros(20_000, [("one", "<i4"), ("other", "<i4")])
    rows["one"], rows["other"] = np.arange(20_000), -np.arange(20_000)
    state = {"one": rows[["one"]], "same": rows[["one"]], "other": rows[["other"]]}
    run = CheckpointStore(tmp_path, "run")
    run.save_async(state, 0, lazy=lazy).wait()
    assert 2 * rows.nbytes <= allocated(run) < 3 * rows.nbytes  # what is the same is copied once
    loaded = run.load(0)
    for name, part in state.items():
        field = "other" if name == "other" else "one"
        assert np.array_equal(loaded[name][field], part[field])
    run.close()


def test_several_saves_are_committed_in_order_and_the_pool_bounds_them(tmp_path: Path) -> None:
    gate = Gate()
    room = 4 * WEIGHT_BYTES
    run = gated(tmp_path, gate, in_flight=9, pool_bytes=room, compress=None)
    model, kept, order, first = network(1), {}, list[int](), threading.Event()

    def all_of_them() -> None:
        for step in range(5):
            kept[step] = copied(model)
            run.save_async(model, step)
            order.append(step)
            first.set()
            train(model, step, *model)

    thread = threading.Thread(target=all_of_them)
    thread.start()
    assert gate.waiting.wait(60)
    assert first.wait(60)
    thread.join(0.2)
    assert thread.is_alive()
    assert order == [0]  # three tensors are in the pool, and three more do not fit
    assert allocated(run) <= room
    gate.opened.set()
    thread.join()
    run.close()
    times = [(tmp_path / "refs" / name).stat().st_mtime_ns for name in _refs(run, range(5))]
    assert times == sorted(times)
    for step, expected in kept.items():
        assert_same(run.load(step), expected)


def _refs(run: CheckpointStore, steps: range) -> list[str]:
    from tensor_dedup.store.format.names import file_of

    return [file_of(f"{run.run_id}@{step}") for step in steps]


def test_wrong_use_is_found_before_anything_is_begun(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    run.save_async(model, 0).wait()
    run.keep(0)
    with pytest.raises(KeptStepError):
        run.save_async(model, 0)
    with pytest.raises(BadStepError):
        run.save_async(model, -1)
    with pytest.raises(UnsupportedArrayError):
        run.save_async({"names": np.array(["a", "b"], object)}, 1)
    with pytest.raises(BadOptionError, match="let one save or more be unfinished"):
        handle(tmp_path, in_flight=0)
    with pytest.raises(BadOptionError, match="give the pool bytes"):
        handle(tmp_path, pool_bytes=-1)
    run.close()
    assert run.steps() == [0]


def test_what_was_collected_is_written_again(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    run.save_async(model, 0)
    run.gc(0)  # waits for it
    assert run.steps() == [0]
    run.delete(0)
    run.gc(0)
    assert run.save_async(model, 1).wait().new_tensors == 6
    assert_same(run.load(1), model)


def test_what_is_collected_between_looking_and_committing_is_an_error(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    run.save_async(model, 0).wait()
    taken = run._extract(model, 1, None, None)
    context = CaptureContext(run._saves._pool, [], set(), run._saver.base().pieces)
    capture = StepCapture(taken, context)
    capture.hold()
    other = handle(tmp_path)
    other.delete(0)
    other.gc(0)
    model["layer0.weight"][0, 0] += 1  # as it may
    with pytest.raises(LostHitError, match="1 tensors"):
        run.commit(capture.snapshot())
    assert run.steps() == []
    run.save_async(model, 1).wait()
    assert_same(run.load(1), model)


@pytest.mark.parametrize("copied_first", [False, True])
def test_what_is_collected_meanwhile_is_written_anew_from_memory(
    tmp_path: Path, copied_first: bool
) -> None:
    """Somebody deletes the step that a save in flight counts on."""
    run, model = handle(tmp_path), network(1)
    model["again"] = model["layer0.weight"]  # two names of one memory
    run.save_async(model, 0).wait()
    taken = run._extract(model, 1, None, None)
    changing = {*model} if copied_first else set()
    context = CaptureContext(run._saves._pool, [], changing, run._saver.base().pieces)
    capture = StepCapture(taken, context)
    capture.hold()
    other = handle(tmp_path)
    other.delete(0)
    other.gc(0)
    expected = copied(model)
    if copied_first:  # the copies are in the pool
        train(model, 9, *model)
    saved = run.commit(capture.snapshot())
    capture.release()
    assert saved.new_tensors == 6
    assert_same(run.load(1), expected)
    assert run.store.verify(full=True).fine


def test_saves_of_several_kinds_keep_their_order(tmp_path: Path) -> None:
    run, model = handle(tmp_path, keep_last=2), network(1)
    for step in range(0, 8, 2):
        train(model, step, "layer0.weight")
        run.save_async(model, step)
        train(model, step + 1, "layer0.weight")
        run.save(model, step + 1)
    assert shares(run)
    assert run.steps() == [6, 7]
    assert_same(run.load(7), model)


def test_threads_and_handles_save_at_once(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        runs = [CheckpointStore(store, name, Arrays(), in_flight=2) for name in ("a", "b")]
        models = {number: network(number) for number in range(8)}

        def work(number: int) -> None:
            for again in range(3):
                runs[number % 2].save_async(models[number], 10 * number + again)

        threads = [threading.Thread(target=work, args=[number]) for number in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for run in runs:
            run.close()
            assert shares(run)
        for number, model in models.items():
            for again in range(3):
                assert_same(runs[number % 2].load(10 * number + again), model)
        assert store.verify(full=True).fine


class Scaler:
    """A user's own class: a number, and an array that it changes in place."""

    def __init__(self, mean: Model, steps: int) -> None:
        self.mean, self.steps = mean, steps


def test_what_providers_say_is_what_it_was(tmp_path: Path) -> None:
    register_provider(
        Scaler,
        StateProvider(
            "test.async.scaler",
            lambda scaler: {"mean": scaler.mean, "steps": scaler.steps},
            lambda state, original: Scaler(**state),
        ),
    )
    with CheckpointStore(tmp_path, "run") as run:
        scaler, history = Scaler(network(1), 0), [1.0]
        for step in range(3):
            run.save_async({"scaler": scaler, "history": history}, step)
            train(scaler.mean, step, "layer1.weight", "layer1.bias")
            scaler.steps += 1
            history.append(step)
        run.close()
        assert shares(run)
        expected = network(1)
        for step in range(3):
            found = run.load(step)
            assert_same(found["scaler"].mean, expected)
            assert (found["scaler"].steps, found["history"]) == (step, [1.0, *range(step)])
            train(expected, step, "layer1.weight", "layer1.bias")


def forking(root: str) -> list[object]:
    """Forks while a save is under way; the child saves too."""
    gate = Gate()
    run, model = gated(Path(root), gate), network(1)
    pending = run.save_async(model, 0)
    assert gate.waiting.wait(60)
    child = fork()
    if not child:
        code = 1
        try:
            gate.opened = threading.Event()
            gate.opened.set()
            try:
                pending.wait()
            except ForkedSaveError:
                run.save_async(network(2), 1).wait()
                code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    gate.opened.set()
    return [os.waitstatus_to_exitcode(status), pending.wait().step, run.steps()]


def test_a_forked_child_has_saves_of_its_own(tmp_path: Path) -> None:
    assert forked(lambda: forking(str(tmp_path))) == [0, 0, [0, 1]]
    assert_same(handle(tmp_path).load(0), network(1))
    assert_same(handle(tmp_path).load(1), network(2))


# Ends while a save is under way, and waits for nothing.
_LEAVING = """
import sys
sys.path.insert(0, sys.argv[1])
from store_runs.stores import Arrays, network
from tensor_dedup.training import CheckpointStore
run = CheckpointStore(sys.argv[2], "run", Arrays(), compress=None)
model = {f"w{number}": network(number)["layer0.weight"] for number in range(60)}
run.save_async(model, 0)
if sys.argv[3] == "True":
    raise KeyError
"""


@pytest.mark.parametrize("failing", [False, True])
def test_a_program_that_ends_ends_when_its_steps_are_there(tmp_path: Path, failing: bool) -> None:
    support = str(Path(__file__).parents[1] / "support")
    words = [sys.executable, "-c", _LEAVING, support, str(tmp_path), str(failing)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == failing, done.stderr
    assert ("KeyError" in done.stderr) == failing
    run = handle(tmp_path)
    assert run.steps() == [0]
    for number in (0, 59):
        assert run.load(0)[f"w{number}"].tobytes() == network(number)["layer0.weight"].tobytes()
    assert run.store.verify(full=True).fine
    assert list((tmp_path / "tmp").iterdir()) == []


def test_store_errors_are_all_it_raises() -> None:
    for error in (BadOptionError, ForkedSaveError, LostHitError):
        assert issubclass(error, StoreError)


def test_the_pool_uses_blocks_again_and_never_has_more_than_it_may() -> None:
    pool = HostPool(10 * PAGE)
    first, second = pool.take(4 * PAGE - 7), pool.take(5 * PAGE)
    assert first is not None
    assert second is not None
    assert (first.nbytes, second.nbytes, pool.take(2 * PAGE)) == (4 * PAGE, 5 * PAGE, None)
    first[:3] = b"abc"
    pool.give(first)
    again = pool.take(4 * PAGE)
    assert again is first
    pool.give(first)
    pool.give(second)
    assert pool.take(PAGE) is not None  # the others are too large for it, and may stay
    assert pool.allocated == 10 * PAGE
    assert pool.take(9 * PAGE) is not None  # these may not
    assert pool.allocated == 10 * PAGE
    assert pool.take(11 * PAGE) is None


def test_a_handle_that_is_dropped_is_gone_whoever_has_its_saves(tmp_path: Path) -> None:
    """Its descriptors go with it, and what it could have waited for."""
    run, model = handle(tmp_path / "store"), network(1)
    run.save_async(model, 0).wait()
    train(model, 1, "layer0.weight")
    pending = run.save_async(model, 1)
    assert pending.wait().step == 1
    assert shares(run)
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
    assert pending.done()
