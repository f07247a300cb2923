"""A training with a remote behind its fast tier suffers something at every request of its drain.

The process dies before or after the request is carried out, or the request or its answer is lost,
or it is carried out twice. Then the remote alone holds whole steps, and the last one that was there
before; what was saved is on one tier or the other; a name means the same on both, unless the fast
tier has a later state that is still to be drained; and the next handle drains the rest.

In memory all requests and faults are tried; over real sockets, with a process that is killed, some.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_runs import real_servers
from remote_runs.remotes import FAULTS, Faulty, Killed, MemoryBucket, s3
from remote_runs.s3_faults import ONCE, FaultyProxy, MemoryS3, RealS3, Request, client
from store_runs.disk_faults import Crash, Faults, FaultyFiles
from store_runs.stores import KIB, assert_same, handle, open_store, shares
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.folder_bucket import FolderBucket
from tensor_dedup.store.files import RealFiles
from tensor_dedup.store.format.identity import writer_in
from tensor_dedup.store.steps.runs import in_save_order
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.tiers import drain as drain_module
from tensor_dedup.training.tiers.drain import Drain
from tensor_dedup.training.tiers.two_tiers import TwoTiers
from training_runs import drains
from training_runs.drains import OLD, Act, Steps, drain, held, model_of, pulled


def deleted_before(run: CheckpointStore) -> None:
    """The step was there once, so that its name says that it was deleted."""
    run.save(model_of(2), 2)
    drain(run)
    run.delete(2)
    run.save(model_of(3), 2)


ACTS = {
    **drains.ACTS,
    "a name that was deleted": Act(
        deleted_before,
        drain,
        ({**OLD, 2: 3},),
        (OLD, {**OLD, 2: 3}),
        {"keep_fast": None},
    ),
}


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread drains: the test does, in its own, so that requests come in one order."""
    monkeypatch.setattr(Drain, "_run_thread", lambda self: None)
    monkeypatch.setattr(drain_module, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(drain_module, "_LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr("tensor_dedup.remote.push._AT_ONCE", 1)
    monkeypatch.setattr("tensor_dedup.remote.push._ASKED_BYTES", 1)
    monkeypatch.setattr("tensor_dedup.remote.buckets._THREADS", 1)
    monkeypatch.setattr("tensor_dedup.remote.catalog._PAUSE_S", 0.0)
    # So that a step has several containers.
    monkeypatch.setattr("tensor_dedup.remote.layout.CONTAINER_BYTES", 100 * KIB)


def open_(fast: Path, bucket: Bucket, **options: Any) -> CheckpointStore:
    return handle(fast, drain=Remote(bucket), **options)


def landed(bucket: MemoryBucket, before: set[str]) -> int:
    """How many bytes of containers have come since."""
    new = (key for key in bucket.objects.keys() - before if key.startswith("containers/"))
    return sum(len(bucket.objects[key][0]) for key in new)


class Scene:
    """Runs one act on copies of a fast tier and of a remote in memory."""

    def __init__(self, folder: Path, act: Act) -> None:
        self.folder, self.act = folder, act
        self.bucket = MemoryBucket()
        run = open_(folder / "template", self.bucket, **act.options)
        for step in OLD:
            run.save(model_of(step), step)
        drain(run)
        act.before(run)
        assert shares(run)
        kinds = {key.rpartition(".")[2] for key in self.bucket.objects if "containers" in key}
        assert {"pack", "delta"} <= kinds
        self._start = dict(self.bucket.objects)
        self.reset()

    def reset(self) -> None:
        shutil.rmtree(self.folder / "fast", ignore_errors=True)
        shutil.copytree(self.folder / "template", self.folder / "fast")
        self.bucket.objects = dict(self._start)

    def open(self, bucket: Bucket | None = None) -> CheckpointStore:
        return open_(self.folder / "fast", bucket or self.bucket, **self.act.options)

    def requests(self, act: Callable[[CheckpointStore], object] | None = None) -> list[str]:
        """The requests of the act, undisturbed."""
        self.reset()
        spy = Faulty(self.bucket)
        run = self.open(spy)
        began = 0 if self.act.opening else len(spy.calls)
        (act or self.act.act)(run)
        return [""] * began + spy.calls[began:]

    def suffer(self, number: int, fault: str) -> None:
        """Do the act; request `number` suffers the fault, and the act may fail."""
        self.reset()
        faulty = Faulty(self.bucket, number, fault)
        try:
            run = self.open(faulty)
            self.act.act(run)
            assert not run.undrained()
        except Killed:
            assert "killed" in fault
        except StoreError:  # of a user's own call: it is not done, or not known to be
            assert "lost" in fault
        assert faulty.struck

    def check(self) -> Steps:
        """What the remote was after the fault; then the next handle goes on."""
        remote, fast = Remote(self.bucket), handle(self.folder / "fast")
        assert not [f for f in remote.verify(full=True).faults if f.affected]
        second = held(pulled(self.folder / "alone", self.bucket))
        assert second in self.act.second
        run = self.open()
        both = held(run)
        assert both in self.act.both
        kept = run.kept()
        assert kept in self.act.kept
        there = {name: remote.read(name).manifest for name in remote.names()}
        for step in {*fast.steps()} & {*second} - {*run.undrained()}:
            assert fast.store.manifest(f"run@{step}") == there[f"run@{step}"]
        for step in {*fast.steps()} - {*second}:
            assert step in run.undrained()
        order = in_save_order(run._places())
        assert fast.store.verify(full=True).faults == []
        fast.store.gc(0)
        run = self.open()
        drain(run)
        assert run.undrained() == []
        run.save(model_of(7), 7)
        drain(run)
        left = pulled(self.folder / "alone", self.bucket)
        assert left.kept() == kept
        assert in_save_order(left._places()) == [*(s for s in order if s in left.steps()), 7]
        if self.act.options.get("keep_last") is None:
            assert held(left) == {**both, 7: 7}
        assert held(left)[7] == 7
        assert remote.verify(full=True).fine
        return second


@pytest.fixture(params=["some", pytest.param("all", marks=pytest.mark.long)])
def every(request: pytest.FixtureRequest) -> bool:
    return str(request.param) == "all"


# Of this act short forms try the most, and these faults at every commit of all acts.
_MOST = "next steps"
_AT_COMMITS = ("killed before", "killed after", "lost after")


@pytest.mark.parametrize("name", ACTS)
def test_every_request_suffers_every_fault(folder: Path, name: str, every: bool) -> None:
    scene, seen = Scene(folder, ACTS[name]), list[Steps]()
    numbers = [number for number, call in enumerate(scene.requests()) if call]
    assert scene.check() == scene.act.second[-1]
    requests = scene.requests()
    writes = [number for number in numbers if requests[number].startswith("put")]
    assert any(requests[number].startswith("put_if refs/") for number in writes)
    turn = itertools.cycle(FAULTS)
    one_in = 2 if name == _MOST else 4
    for place, number in enumerate(numbers):
        commits = requests[number].startswith("put_if refs/")
        tried = place % one_in == 0 and (number in writes or number % 4 == 0)
        few = {next(turn)} if tried else set()
        if commits:
            few |= {*_AT_COMMITS}
        for fault in FAULTS:
            if every or fault in few:
                scene.suffer(number, fault)
                seen.append(scene.check())
    assert all(state in seen for state in scene.act.second)


def test_what_landed_is_not_sent_again(folder: Path) -> None:
    scene = Scene(folder, ACTS["next steps"])
    requests = scene.requests()
    total = landed(scene.bucket, {*scene._start})
    assert total > 100 * KIB
    for number, call in enumerate(requests):
        if call.startswith("put containers/") or call.startswith("put_if"):
            scene.suffer(number, "killed after")
            before = {*scene.bucket.objects}
            have = landed(scene.bucket, {*scene._start})
            run = scene.open(spy := Faulty(scene.bucket))
            drain(run)
            assert landed(scene.bucket, before) == total - have
            again = [c for c in spy.calls if c.startswith("put containers/")]
            assert not [c for c in again if c.removeprefix("put ") in before]


@pytest.mark.parametrize("name", ["next steps", "replacing", "a name that was deleted"])
@pytest.mark.parametrize("what", ["delete", "save again", "save elsewhere", "gc"])
def test_a_step_changes_at_every_request(folder: Path, name: str, what: str, every: bool) -> None:
    """Somebody deletes it or saves it again in another handle, of this fast tier or another one.

    Neither a save nor a gc waits for a request of the drain.
    """
    scene, done = Scene(folder, ACTS[name]), 0
    step = 0 if name == "replacing" else 2
    requests = scene.requests()
    numbers = [number for number, call in enumerate(requests) if call]
    for number in numbers:
        one_in = 1 if every else 4
        if number % one_in and not requests[number].startswith("put_if refs/"):
            continue
        scene.reset()
        other = scene.open()

        def act(run: CheckpointStore = other) -> None:
            if what == "save elsewhere":
                shutil.rmtree(folder / "another", ignore_errors=True)
                run = open_(folder / "another", scene.bucket)
                run.save(model_of(6), step)
                drain(run)
                return
            if what == "save again":
                run.save(model_of(6), step)
                return
            if what == "delete":
                run.delete(step)
            run.store.gc(0)

        work = threading.Thread(target=act)

        def meanwhile(work: threading.Thread = work) -> None:
            work.start()
            # A deletion may have to wait for the drain.
            work.join(0.1 if what == "delete" else 10)
            assert what == "delete" or not work.is_alive()

        run = scene.open(Faulty(scene.bucket, number, meanwhile=meanwhile))
        drain(run)
        work.join(30)
        assert not work.is_alive()
        run = scene.open()
        drain(run)
        second = pulled(folder / "alone", scene.bucket)
        assert run.undrained() == []
        # What the other fast tier did not know of stays here, and is named.
        stranded = {each for each in handle(folder / "fast").steps() if each not in second.steps()}
        if step in handle(folder / "fast").steps():
            same = handle(folder / "fast").manifest(step) == second.manifest(step)
            stranded |= set() if same else {step}
        assert {*run.stats()["stranded"]} == stranded  # type: ignore[misc]
        assert not stranded or what == "save elsewhere"
        if what == "delete":
            assert step not in second.steps()
            assert step not in run.steps()
        else:
            expected = 6 if what.startswith("save") else scene.act.second[-1][step]
            assert_same(second.load(step), model_of(expected))
        done += 1
    assert done >= 5


def test_a_takeover_suffers_every_fault(folder: Path, every: bool) -> None:
    """Another fast tier opens the run and drains a step; then the first one goes on."""
    scene, seen = Scene(folder, ACTS["next steps"]), set[tuple[int, bool]]()

    def take(bucket: Bucket) -> CheckpointStore:
        shutil.rmtree(folder / "other", ignore_errors=True)
        run = open_(folder / "other", bucket)
        run.save(model_of(5), 2)
        drain(run)
        return run

    scene.reset()
    take(spy := Faulty(scene.bucket))
    writes = [n for n, call in enumerate(spy.calls) if call.startswith("put_if writers/")]
    assert len(writes) == 1
    assert sum(call.startswith("get writers/") for call in spy.calls) >= 3
    for number in range(len(spy.calls)):
        near = abs(number - writes[0]) <= 1
        for fault in FAULTS:
            if not every and not near and (number + FAULTS.index(fault)) % 11:
                continue
            scene.reset()
            first = scene.open()
            died = False
            try:
                taken = take(Faulty(scene.bucket, number, fault))
                assert not taken.undrained()
            except Killed:
                died = True
            except StoreError:  # the run could not be opened
                assert "lost" in fault
            drain(first)
            text, _ = scene.bucket.get("writers/run", KIB) or (b"", "")
            writer = writer_in(text, "run")
            assert writer is not None
            assert isinstance(first._tiers, TwoTiers)
            assert first._tiers.is_taken == (writer.generation == 2)
            assert bool(first.undrained()) == first._tiers.is_taken
            seen.add((writer.generation, died))
            second = held(pulled(folder / "alone", scene.bucket))
            if writer.generation == 1:  # the other one did not come so far
                assert second == scene.act.second[-1]
                continue
            assert second in (OLD, {**OLD, 2: 5})
            run = scene.open()  # which takes it back
            assert run.stats()["stranded"] == [2, 3]
            assert held(run) == {**OLD, 2: second.get(2, 2), 3: 3}
            run.save(model_of(4), 4)
            drain(run)
            assert held(pulled(folder / "alone", scene.bucket)) == {**second, 4: 4}
            if (folder / "other" / "refs").is_dir() and 2 not in second:
                left = handle(folder / "other").steps()
                back = open_(folder / "other", scene.bucket)
                assert back.stats()["stranded"] == left
            assert Remote(scene.bucket).verify(full=True).fine
    assert seen == {(1, True), (1, False), (2, True), (2, False)}


def test_a_kill_before_a_name_is_durable_and_then_a_power_cut(folder: Path, every: bool) -> None:
    """The remote is a folder. Who goes on relies on names that were never synced."""
    options: dict[str, Any] = {"keep_fast": 1}
    run = open_(folder / "template" / "fast", bucket_in(folder / "template"), **options)
    for step in OLD:
        run.save(model_of(step), step)
    drain(run)
    run.save(model_of(2), 2)
    run.save(model_of(3), 3)

    def stage(name: str, faults: Faults) -> tuple[Path, FaultyFiles]:
        where = folder / name
        shutil.copytree(folder / "template", where)
        (where / "limbo").mkdir()
        return where, FaultyFiles(where / "limbo", faults)

    where, files = stage("whole", Faults())
    drain(open_(where / "fast", bucket_in(where, files), **options))
    syncs = [number for number, operation in enumerate(files.log) if operation == "sync_folder"]
    assert len(syncs) > 10
    for number in syncs[:: 1 if every else 4]:
        where, files = stage(f"cut-{number}", Faults(stop_at=number))
        with pytest.raises(Crash):
            drain(open_(where / "fast", bucket_in(where, files), **options))
        unsynced = [*files._journal]
        files.lose("nothing")
        (where / "again").mkdir()
        again = FaultyFiles(where / "again", Faults())
        again._journal += unsynced
        run = open_(where / "fast", bucket_in(where, again), **options)
        drain(run)
        assert isinstance(run._tiers, TwoTiers)
        run._tiers.tidy()  # as after the next step, but nothing new is written
        assert handle(where / "fast").steps() == [3]
        again.lose("everything")
        left = pulled(folder / "alone", bucket_in(where))
        assert held(left) == {step: step for step in range(4)}, number
        shutil.rmtree(where)


def bucket_in(folder: Path, files: FaultyFiles | None = None) -> Bucket:
    return FolderBucket(folder / "remote", files or RealFiles())


_PARTS = 6  # of the long form, each of two or three minutes
_TRAINING = """
import json, os, sys
sys.path[:0] = {paths!r}
from importlib import import_module
for module, name, value in (
    ("layout", "CONTAINER_BYTES", 100_000), ("push", "_ASKED_BYTES", 1), ("push", "_AT_ONCE", 1),
    ("buckets", "_THREADS", 1),
):
    setattr(import_module("tensor_dedup.remote." + module), name, value)
from training_runs.drains import model_of
from store_runs.stores import handle
run = handle(sys.argv[1], drain=sys.argv[2], keep_fast=1)
latest = run.latest()
for step in range(0 if latest is None else latest + 1, 4):
    run.save(model_of(step), step)
    print(step, flush=True)
    run.drain()
run.close()
"""


class Training:
    """A process that saves four steps and drains each, and a server that sees its requests."""

    def __init__(self, root: Path, upstream: Any, server: Bucket) -> None:
        self._root, self.server = root, server
        self.proxy = FaultyProxy(upstream)
        self._environment = {**os.environ, **real_servers.s3_environment(self.proxy.port)}
        support = str(Path(__file__).parents[1] / "support")
        self._program = _TRAINING.format(paths=[support])
        self.saved: list[int] = []

    def run(self, fast: Path, case: str, at: int = -1, *, after: bool = False) -> bool:
        """Train; kill the process at a request, or when that was carried out; whether it was."""
        held: list[subprocess.Popen[str]] = []
        struck = False

        def kill(request: Request, number: int) -> None:
            nonlocal struck
            if number == at:
                struck = True
                held[0].kill()
                raise ConnectionResetError(request.name)

        self.proxy.arm(before=None if after else kill, after=kill if after else None)
        words = [sys.executable, "-c", self._program, str(fast), f"s3://bucket/{case}"]
        process = subprocess.Popen(
            words,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        held.append(process)
        out, said = process.communicate(timeout=120)
        self.saved = [int(line) for line in out.split()]
        assert process.returncode == (-signal.SIGKILL if struck else 0), said
        return struck


@pytest.fixture(params=["memory", pytest.param("moto", marks=pytest.mark.long)])
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    if request.param == "memory":
        bucket = MemoryBucket()
        made = Training(tmp_path, MemoryS3(bucket), bucket)
        yield made
        made.proxy.close()
    else:
        with s3() as server:
            made = Training(tmp_path, RealS3(server.port), client(server.port))
            yield made
            made.proxy.close()


@pytest.mark.parametrize(
    "part", [None, *(pytest.param(part, marks=pytest.mark.long) for part in range(_PARTS))]
)
def test_a_training_is_killed_at_every_request(
    tmp_path: Path, training: Training, part: int | None
) -> None:
    assert not training.run(tmp_path / "whole", "whole")
    requests, sent = len(training.proxy.requests), sum(training.proxy.bodies)
    assert requests > 60
    moments = range(2 * requests)
    for number in moments[5::requests] if part is None else moments[part::_PARTS]:
        last, after = divmod(number, 2)
        # A step's drain may look once more than in another run, so runs have not as many requests.
        for at in range(last, last - 8, -1):
            fast, case = tmp_path / f"fast-{number}-{at}", f"case-{number}-{at}"
            if training.run(fast, case, at, after=bool(after)):
                break
            done = client(training.proxy.port, case)
            assert pulled(tmp_path / "alone", done).steps() == [0, 1, 2, 3]
        else:
            pytest.fail(f"runs end before request {last - 7} of {requests}")
        # The request before which it was killed has been sent, and nothing was made of it.
        saved, there = training.saved, sum(training.proxy.bodies[: at + after])
        # A machine that has nothing but the remote sees whole steps, in order, without a gap.
        direct = client(training.proxy.port, case)
        training.proxy.arm()
        second = pulled(tmp_path / "alone", direct)
        assert second.steps() == [*range(len(second.steps()))]
        for step in second.steps():
            assert_same(second.load(step), model_of(step))
        run = open_(fast, direct)
        assert run.steps()[: len(saved)] == saved
        if saved:
            assert run.latest() is not None
            assert run.latest() >= saved[-1]  # type: ignore[operator]
            assert_same(run.load(saved[-1]), model_of(saved[-1]))
        assert not training.run(fast, case)
        # What was sent is not sent again, but for bookkeeping and what is encoded otherwise now.
        assert sum(training.proxy.bodies) + there <= sent + 64 * KIB, number
        left = pulled(tmp_path / "alone", direct)
        assert left.steps() == [0, 1, 2, 3]
        for step in range(4):
            assert_same(left.load(step), model_of(step))
        # After a kill between the last commit and the letting go, that comes after the next step.
        assert handle(fast).steps() in ([3], [2, 3])
        assert Remote(direct).verify(full=True).fine
        assert open_store(fast).verify(full=True).fine


@pytest.mark.parametrize("step", [25, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_every_request_over_sockets_suffers_a_fault(folder: Path, step: int) -> None:
    """With obstore, which sends a request again whose answer was lost."""
    scene = Scene(folder, ACTS["retention"])
    proxy = FaultyProxy(MemoryS3(scene.bucket))
    try:
        scene.reset()
        run = scene.open(client(proxy.port))
        proxy.arm()
        scene.act.act(run)
        requests = len(proxy.requests)
        assert requests > 15
        faults = [f"{fault}, {often}" for fault in ONCE for often in ("once", "for good")]
        for number, fault in itertools.islice(
            itertools.product(range(requests), faults), 0, None, step
        ):
            scene.reset()
            run = scene.open(client(proxy.port, retries=1))
            proxy.arm(number, fault)
            for _ in range(3):  # as the thread does, with pauses
                run._drain.work_once()  # type: ignore[union-attr]
            proxy.deliver()
            proxy.arm()
            assert scene.check() in scene.act.second, json.dumps([number, fault])
    finally:
        proxy.close()
