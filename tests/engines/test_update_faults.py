"""Something happens at any moment of an update: the engine is wholly at one step or at another.

An exception arrives, as when a key is pressed; the step is deleted; the memory manager is killed,
or another engine that shares the weights. The next update repairs.
"""

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from manager_runs import managers
from processes import forked
from tensor_dedup import Store, TensorDedupError
from tensor_dedup.loader import takeover
from tensor_dedup.loader.unsharing import model_digests
from tensor_dedup.memory_manager.client import connection
from tensor_dedup.patches.vllm import step_updates, weight_transfer, weight_versions
from vllm_runs import fleet, updating
from vllm_runs.moments import Moment, Moments
from vllm_runs.updating import Following

pytestmark = pytest.mark.vllm

_LONG = (pytest.mark.long, pytest.mark.timeout(1800))

_MODULES = (step_updates, weight_transfer, weight_versions, takeover, model_digests, connection)
# What exchanges the weights, and takes note of it.
_CHANGE = {"apply", "_rebind", "note", "take_over", "finish_weight_update", "refresh", "_refresh"}
# What a thread does afterwards, to which no key can be pressed.
_THREAD = {"_let_go", "_return_memory", "_evict_formers", "is_former"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Following]:
    made = Following(updating.steps(tmp_path_factory.mktemp("update-faults")))
    yield made
    made.close()


def _moments(engine: Following, *, ahead: bool, every: bool) -> list[Moment]:
    """The moments of an update, or those of the change and few others."""
    moments = Moments(*_MODULES)
    with moments.listed():
        engine.update(1, ahead=ahead)
    engine.update(0)
    found = [m for m in moments.found if m.function not in _THREAD]
    assert {"plan", "apply", "_rebind", "load_beside", "refresh"} <= {m.function for m in found}
    chosen = [m for m in found if m.function in _CHANGE]
    found = [m for m in found if m in chosen or m.time == 1]
    return found if every else [*chosen[::4], *[m for m in found if m not in chosen][::40]]


def _befall(
    engine: Following, moment: Moment, act: Callable[[], object], *, ahead: bool
) -> BaseException | None:
    """Let something happen during an update to step 1; the error with which it has ended."""
    moments = Moments(*_MODULES)
    with moments.at(moment, act):
        try:
            engine.update(1, ahead=ahead)
        except (KeyboardInterrupt, TensorDedupError) as error:
            raised: BaseException | None = error.with_traceback(None)
        else:
            raised = None
    assert moments.struck or moment.time > 1, moment  # how often it is asked is a matter of time
    return raised


def _of_each_function(moments: list[Moment]) -> list[Moment]:
    """The first moment in each function, for what takes long."""
    return [*{m.function: m for m in reversed(moments)}.values()]


def _press_a_key() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=_LONG)])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_exception_at_any_moment(engine: Following, *, ahead: bool, every: bool) -> None:
    ended = []
    for moment in _moments(engine, ahead=ahead, every=every):
        raised = _befall(engine, moment, _press_a_key, ahead=ahead)
        at = engine.step()
        assert at is not None, moment
        assert raised is not None or at == 1, moment
        ended.append((raised is not None, at))
        engine.update(1)
        assert engine.step() == 1, moment
        engine.update(0)
        assert engine.step() == 0, moment
    assert {(True, 0), (True, 1)} <= {*ended}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=_LONG)])
def test_a_step_that_is_deleted_at_any_moment(
    engine: Following, tmp_path: Path, *, every: bool
) -> None:
    """It is loaded whole, or not at all, and where it is published again, it is found again."""
    kept = shutil.copytree(engine.store, tmp_path / "kept")

    def delete() -> None:
        with Store.open(engine.store) as store:
            store.delete(f"{updating.RUN}@1")
            store.gc(0)

    ended = []
    found = _moments(engine, ahead=True, every=every)
    for moment in _of_each_function(found) if every else found[::3]:
        raised = _befall(engine, moment, delete, ahead=True)
        at = engine.step()
        assert at == (1 if raised is None else 0), moment
        ended.append(at)
        assert Store.open(engine.store).names() == [f"{updating.RUN}@0"]
        shutil.rmtree(engine.store)
        shutil.copytree(kept, engine.store)
        engine.update(1)
        assert engine.step() == 1, moment
        engine.update(0)
    assert {0, 1} == {*ended}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=_LONG)])
def test_a_manager_that_is_killed_at_any_moment(tmp_path: Path, *, every: bool) -> None:
    with ExitStack() as stack:
        running = stack.enter_context(fleet.manager(tmp_path))
        engine = Following(updating.steps(tmp_path), memory_manager=str(running.socket))
        stack.callback(engine.close)
        found = _messages(engine)
        for moment in found if every else found[:: len(found) // 3]:
            raised = _befall(engine, moment, running.kill, ahead=True)
            running.kill()  # if it was not asked so often as before
            assert engine.step() == (1 if raised is None else 0), moment
            engine.update(0)  # without a manager
            assert engine.step() == 0
            running = stack.enter_context(fleet.manager(tmp_path))
            engine.update(1)
            assert engine.step() == 1, moment
            assert running.leases(), "the engine goes on without a manager"
            engine.update(0)


def _messages(engine: Following) -> list[Moment]:
    """The moments at which a line of the update is run for the first time, or the manager asked."""
    moments = Moments(*_MODULES)
    with moments.listed():
        engine.update(1, ahead=True)
    engine.update(0)
    asked = [m for m in moments.found if m.file == "weight_transfer.py" or m.function == "ask"]
    found = _of_each_function([m for m in asked if m.time == 1])
    assert {"ask", "load_beside", "finish_weight_update"} <= {m.function for m in found}
    return [*found, *[m for m in asked if m.function == "ask" and m.time > 1]]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=_LONG)])
def test_an_engine_that_is_killed_at_any_moment(tmp_path: Path, *, every: bool) -> None:
    """Another one, which shares its weights by a manager, changes to the same step meanwhile."""
    store = updating.steps(tmp_path)
    with fleet.manager(tmp_path) as running:
        config = {"memory_manager": str(running.socket)}
        engine = Following(store, **config)
        leases = running.leases()
        number, count, killed = 0, 1, 0
        while number < count:
            mine, its = multiprocessing.Pipe()
            log = tmp_path / f"killed-{number}.log"
            arguments = its, str(store), config
            process = forked.start(updating.die, *arguments, environ=os.environ, log=log)
            its.close()
            try:
                found = mine.recv()
                mine.send(found[number])
                engine.update(1, ahead=True)
                process.join(60)
                killed += process.exitcode == -signal.SIGKILL
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid or 0, signal.SIGKILL)
                process.join()
            assert engine.step() == 1, found[number]
            engine.update(0)
            assert engine.step() == 0, found[number]
            managers.until(lambda: running.leases() == leases)
            count = len(found)
            number += 1 if every else max(1, 2 * count // 3)
        assert killed
        engine.close()
