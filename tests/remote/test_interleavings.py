"""A push, a pull, a delete and a gc, each with a fault at one request and a rival at another.

The short form takes a case here and there, the long one more than 5,000 of some 58,000.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from remote_runs.remotes import FAULTS, READ_FAULTS, Faulty, Killed, MemoryBucket
from store_runs.stores import Content, content, handle, noise, open_store, stored, three
from tensor_dedup import Store
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.catalog import (
    catalog_of,
    note_damage,
    read_catalog,
)
from tensor_dedup.remote.errors import RemoteBusyError
from tensor_dedup.remote.inventory import take_inventory

HOUR = 3600.0
KINDS = (*FAULTS, *READ_FAULTS, "delayed")
Work = Callable[[Remote], object]


class Delayed(Faulty):
    """The write at one call is lost, and carried out later.

    Not so a deletion: of two equal containers, one deleted late and one pushed meanwhile, no server
    without conditional deletes can tell which is meant.
    """

    late: Callable[[], object] | None = None

    def _do(self, verb: str, key: str, call: Callable[[], object]) -> object:
        if len(self.calls) == self._at and self._fault == "delayed" and verb != "delete":
            self.late = call
            self._fault = "lost before"
        return super()._do(verb, key, call)


class Scene:
    """A remote in which something is condemned and about to be deleted, and who works on it."""

    base, tune, tiny = "base", "tune", "tiny"

    def __init__(self, root: Path) -> None:
        self.full = open_store(root / "full")
        self.expected: dict[str, Content] = {}
        self.start = MemoryBucket()
        self.fill(root)
        for name in (self.base, self.tune):
            self.full.push(Remote(self.start), name)
        Remote(self.start).delete(self.tune)
        self.start.clock += 25 * HOUR
        assert Remote(self.start).gc(24).condemn
        self.start.clock += 25 * HOUR
        self._root, self._numbers = root, iter(range(10**6))

    def fill(self, root: Path) -> None:
        """Fill the store."""
        for name, path in three(root).items():
            self.expected[name] = content(path)
            self.full.import_(path, name, compress="auto")

    def bucket(self) -> MemoryBucket:
        return self.start.copied()

    def store(self) -> Store:
        return open_store(self._root / f"other-{next(self._numbers)}")

    def works(self) -> dict[str, Work]:
        return {
            "push": lambda remote: self.full.push(remote, self.tune),
            "gc": lambda remote: remote.gc(24),
            "delete": lambda remote: remote.delete(self.base),
            "pull": lambda remote: self.store().pull(remote, self.base),
        }

    def collect_and_push(self, remote: Remote) -> None:
        """What a gc has deleted is pushed again at once."""
        tried(partial(remote.gc, 24))
        self.full.push(remote, self.tune)

    def cases(self) -> Iterator[tuple[str, int, str, str, int]]:
        works = self.works()
        counts = {}
        for verb, work in works.items():
            gate = Faulty(self.bucket())
            work(Remote(gate))
            counts[verb] = len(gate.calls)
        for verb, calls in counts.items():
            for at in range(calls):
                for fault in KINDS:
                    for rival in ("push", "gc", "push of another", "delete", "gc and push"):
                        yield from ((verb, at, fault, rival, m) for m in range(calls))

    def run(self, verb: str, at: int, fault: str, rival: str, moment: int) -> None:
        case, inner = (verb, at, fault, rival, moment), self.bucket()
        rivals: dict[str, Work] = {
            **self.works(),
            "push of another": lambda remote: self.full.push(remote, self.tiny),
            "gc and push": self.collect_and_push,
        }

        def other() -> None:
            tried(partial(rivals[rival], Remote(inner)))

        gate = Delayed(Faulty(inner, moment, meanwhile=other), at, fault)
        tried(partial(self.works()[verb], Remote(gate)))
        self.check(inner, case)
        if not self._free(inner):
            inner.clock += HOUR  # when nobody deletes any more
            Remote(inner).gc(24)
        self.full.push(Remote(inner), self.tune)
        if gate.late is not None:
            gate.late()
        inner.clock += 25 * HOUR
        Remote(inner).gc(24)
        self.check(inner, case)
        assert self.tune in Remote(inner).names(), case

    def _free(self, bucket: MemoryBucket) -> bool:
        """Whether no gc that was cut short is still to be finished."""
        catalog = read_catalog(bucket, with_trash=True)
        return catalog is None or not catalog.trash.deleting

    def check(self, bucket: MemoryBucket, case: object) -> None:
        found = Remote(bucket).verify(full=True)
        lost = [fault for fault in found.faults if fault.affected]
        assert not lost, (case, lost)


class PartedScene(Scene):
    """Steps whose changed leaves are pieces of their own: each needs those of the ones before."""

    base, tune, tiny = "run@1", "run@2", "run@3"

    def fill(self, root: Path) -> None:
        data = bytearray(noise(1, 3 * LEAF_BYTES + 1000))
        with handle(self.full.path, compress=None) as run:
            for step in range(4):
                data[step * 100 + step * LEAF_BYTES] ^= step
                run.save({"w": np.frombuffer(bytes(data), np.uint8)}, step)
                self.expected[f"run@{step}"] = stored(self.full, f"run@{step}")
        self.full.push(Remote(self.start), "run@0")


def first_deletion(scene: Scene) -> int:
    """The number of the call with which a sweep begins to delete."""
    gate = Faulty(scene.bucket())
    Remote(gate).gc(24)
    return next(n for n, call in enumerate(gate.calls) if call.startswith("delete"))


def tried(work: Callable[[], object]) -> None:
    """A typed error is an answer, and so is the end of the process."""
    with suppress(StoreError, Killed):
        work()


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        pytest.param(Scene, 389, id="some"),
        pytest.param(Scene, 11, marks=pytest.mark.long, id="5000"),
        pytest.param(PartedScene, 2503, id="some of parts"),
        pytest.param(PartedScene, 31, marks=pytest.mark.long, id="1600 of parts"),
    ],
)
def test_nothing_is_lost_whatever_goes_wrong_and_whoever_else_is_at_work(
    tmp_path: Path, kind: type[Scene], step: int
) -> None:
    scene = kind(tmp_path)
    every = [*scene.cases()]
    assert len({*every}) == len(every) >= 50_000
    for case in islice(every, 0, None, step):
        scene.run(*case)
    store = scene.store()
    store.pull(Remote(scene.start), scene.base)
    assert stored(store, scene.base) == scene.expected[scene.base]


def test_steps_in_parts_need_what_a_sweep_is_about_to_delete(tmp_path: Path) -> None:
    scene = PartedScene(tmp_path)
    inner = scene.bucket()
    assert any(key.startswith("containers/") for key in Remote(inner).gc(24, dry_run=True).delete)
    scene.full.push(Remote(inner), scene.tune)
    records = [r for table in take_inventory(inner).tables.values() for r in table.records]
    assert sorted(len(record.parts) for record in records if record.parts) == [1, 2]


def damaged(bucket: MemoryBucket) -> MemoryBucket:
    """The bucket, of which what is condemned is noted as damaged: a push sends that again."""
    condemned = catalog_of(bucket).trash.condemned
    note_damage(bucket, [key for key in condemned if key.startswith(layout.CONTAINERS)])
    return bucket


class Sending(Faulty):
    """A bucket for a push: one object arrives between a gc's last look at it and its deletion."""

    def __init__(self, inner: MemoryBucket, key: str, deletion: int) -> None:
        super().__init__(inner)
        self._key, self._deletion = key, deletion
        self.sent = False

    def put(self, key: str, chunks: Sequence[memoryview] | Iterator[memoryview]) -> None:
        if key != self._key or self.sent:
            super().put(key, chunks)
            return
        self.sent = True
        arrive = partial(super().put, key, chunks)
        Remote(Faulty(self.inner, self._deletion, meanwhile=arrive)).gc(24)


def test_what_is_sent_while_a_gc_deletes_it_is_sent_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    gate = Faulty(damaged(scene.bucket()))
    Remote(gate).gc(24)
    deletions = {n: call.split()[1] for n, call in enumerate(gate.calls) if call[:3] == "del"}
    sent = set()
    for number, key in deletions.items():
        inner = damaged(scene.bucket())
        push = Sending(inner, key, number)
        scene.full.push(Remote(push), "tune")
        sent |= {key.split("/")[0]} if push.sent else set()
        scene.check(inner, key)
        store = scene.store()
        store.pull(Remote(inner), "tune")
        assert stored(store, "tune") == scene.expected["tune"]
    assert {"containers", "tables", "manifests"} <= sent


@pytest.mark.parametrize(
    ("kind", "fault", "step"),
    [
        (Scene, "", 1),
        (Scene, "killed after", 13),
        *(
            pytest.param(kind, f"killed {when}", 1, marks=pytest.mark.long)
            for kind in (Scene, PartedScene)
            for when in ("before", "after")
        ),
    ],
)
def test_two_sweeps_and_a_push_at_once(
    tmp_path: Path, kind: type[Scene], fault: str, step: int
) -> None:
    """Another sweep, and then a push of what both delete, at each moment of a sweep.

    The other one ends, or is killed at any moment of its own. Whoever was told that it is pushed
    has it when the first sweep has deleted what it was about to.
    """
    scene = kind(tmp_path)
    gate = Faulty(scene.bucket())
    Remote(gate).gc(24)
    moments = len(gate.calls)
    pushed = 0
    for moment in range(moments):
        for at in range(moment % step, moments + 4, step) if fault else [-1]:
            inner = scene.bucket()
            told: list[object] = []

            def meanwhile(
                inner: MemoryBucket = inner, at: int = at, told: list[object] = told
            ) -> None:
                tried(partial(Remote(Faulty(inner, at, fault)).gc, 24))
                tried(lambda: told.append(scene.full.push(Remote(inner), scene.tune)))

            tried(partial(Remote(Faulty(inner, moment, meanwhile=meanwhile)).gc, 24))
            pushed += len(told)
            case = (moment, at)
            assert (scene.tune in Remote(inner).names()) == bool(told), case
            scene.check(inner, case)
            inner.clock += HOUR
            Remote(inner).gc(24)
            scene.full.push(Remote(inner), scene.tune)
            scene.check(inner, case)
            assert not catalog_of(inner).trash.deleting, case
    assert pushed >= moments // 4


def test_of_two_sweeps_that_plan_the_same_at_once_one_deletes(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    gate = Faulty(scene.bucket())
    assert Remote(gate).gc(24).delete
    enters = gate.calls.index(f"put_if {layout.HEAD}")
    bucket = scene.bucket()

    def killed_when_it_has_entered() -> None:
        with pytest.raises(Killed):
            Remote(Faulty(bucket, enters, "killed after")).gc(24)

    second = Faulty(bucket, enters, meanwhile=killed_when_it_has_entered)
    assert not Remote(second).gc(24).delete  # what the first is deleting is all there is
    assert second.struck
    assert not [call for call in second.calls if call.startswith("delete ")]
    assert catalog_of(bucket).trash.deleting  # by the first, for all that anybody knows
    with pytest.raises(RemoteBusyError):
        scene.full.push(Remote(bucket), "tune")


class Clock:
    """The clock of a sweep's machine, which goes on while that sleeps."""

    now = 0.0

    def clock_gettime(self, clock: int) -> float:
        return self.now if clock == time.CLOCK_BOOTTIME else 0.0


class Late(Faulty):
    """A bucket that gives its answer to one call late."""

    def __init__(self, inner: MemoryBucket, at: int, meanwhile: Callable[[], object]) -> None:
        super().__init__(inner)
        self._late = (at, meanwhile)

    def _do(self, verb: str, key: str, call: Callable[[], object]) -> object:
        at, meanwhile = self._late
        is_late = len(self.calls) == at
        found = super()._do(verb, key, call)
        if is_late:
            meanwhile()
        return found


def test_a_sweep_that_was_held_up_deletes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour later another one no longer counts on it, and a push may send it all again."""
    scene = Scene(tmp_path)
    gate = Faulty(scene.bucket())
    Remote(gate).gc(24)
    deletions = [n for n, call in enumerate(gate.calls) if call.startswith("delete")]
    assert len(deletions) > 2

    for number in deletions:
        inner, clock = scene.bucket(), Clock()
        monkeypatch.setattr("tensor_dedup.remote.lease.time", clock)

        def meanwhile(inner: MemoryBucket = inner, clock: Clock = clock) -> None:
            clock.now += HOUR
            inner.clock += HOUR
            Remote(inner).gc(24)
            scene.full.push(Remote(inner), "tune")

        # The look before the deletion.
        tried(partial(Remote(Late(inner, number - 1, meanwhile)).gc, 24))
        scene.check(inner, number)
        assert "tune" in Remote(inner).names()


def test_a_push_that_a_killed_sweep_stops_sends_nothing(tmp_path: Path) -> None:
    """What that one was deleting stays on the list for an hour, whatever has been sent."""
    scene = Scene(tmp_path)
    first = first_deletion(scene)
    inner = scene.bucket()
    tried(partial(Remote(Faulty(inner, first, "killed before")).gc, 24))
    assert catalog_of(inner).trash.deleting
    push = Faulty(inner)
    with pytest.raises(RemoteBusyError, match="a gc deletes"):
        scene.full.push(Remote(push), "tune")
    assert not [call for call in push.calls if call.startswith("put ")]
    scene.full.push(Remote(inner), "tiny")  # of which nothing is on that list


def test_a_sweep_that_slept_takes_nothing_of_another_one_off_the_list(tmp_path: Path) -> None:
    """It wakes between the other one's last look at a container and the deletion."""
    scene = Scene(tmp_path)
    gate = Faulty(damaged(scene.bucket()))
    Remote(gate).gc(24)
    deletions = [n for n, call in enumerate(gate.calls) if call.startswith("delete")]
    assert gate.calls[deletions[-1] + 1] == f"get {layout.HEAD}"
    inner, asleep, awake = damaged(scene.bucket()), threading.Event(), threading.Event()

    def sleep() -> None:
        asleep.set()
        assert awake.wait(60)

    first = Faulty(inner, deletions[-1] + 1, meanwhile=sleep)
    sweep = threading.Thread(target=lambda: Remote(first).gc(24))

    def delete() -> None:
        sweep.start()
        assert asleep.wait(60)

    sends = Faulty(damaged(scene.bucket()))
    scene.full.push(Remote(sends), "tune")
    sent = next(n for n, call in enumerate(sends.calls) if call.startswith("put containers/"))
    push = Faulty(inner, sent, meanwhile=delete)
    with pytest.raises(RemoteBusyError):  # but it has sent what it needs
        scene.full.push(Remote(push), "tune")
    assert push.struck
    inner.clock += 1.1 * HOUR
    probe = Faulty(inner.copied())
    Remote(probe).gc(24)
    at = [n for n, call in enumerate(probe.calls) if call.startswith("delete containers/")][-1]

    def wake() -> None:
        assert catalog_of(inner).trash.deleting
        awake.set()
        sweep.join(60)
        with pytest.raises(RemoteBusyError):
            scene.full.push(Remote(inner), "tune")

    second = Faulty(inner, at, meanwhile=wake)
    Remote(second).gc(24)
    assert second.struck
    assert not sweep.is_alive()
    assert not catalog_of(inner).trash.deleting
    scene.full.push(Remote(inner), "tune")
    store = scene.store()
    store.pull(Remote(inner), "tune")
    assert stored(store, "tune") == scene.expected["tune"]


def test_a_sweep_whose_time_is_over_leaves_the_list_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on while the machine sleeps."""
    scene = Scene(tmp_path)
    gate = Faulty(scene.bucket())
    Remote(gate).gc(24)
    deletions = [n for n, call in enumerate(gate.calls) if call.startswith("delete")]
    for slept, is_left in ((0.4 * HOUR, False), (0.6 * HOUR, True)):
        inner, clock = scene.bucket(), Clock()
        monkeypatch.setattr("tensor_dedup.remote.lease.time", clock)
        sleep = partial(setattr, clock, "now", slept)
        Remote(Faulty(inner, deletions[-1] + 1, meanwhile=sleep)).gc(24)
        assert bool(catalog_of(inner).trash.deleting) == is_left


def test_a_sweep_that_sleeps_when_it_has_asked_for_the_time_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second is an hour ago: others hold it for dead from the beginning."""
    scene = Scene(tmp_path)
    inner, clock = scene.bucket(), Clock()
    monkeypatch.setattr("tensor_dedup.remote.lease.time", clock)
    condemned = {*catalog_of(inner).trash.condemned}

    def now() -> float:
        clock.now += HOUR
        return inner.clock

    gate = Faulty(inner)
    monkeypatch.setattr(gate, "now", now)
    with pytest.raises(RemoteBusyError):
        Remote(gate).gc(24)
    assert condemned <= inner.objects.keys()


def test_a_sweep_that_finds_no_segments_at_its_end_loses_none(tmp_path: Path) -> None:
    """It puts the catalog together from tables, and writes that."""
    scene = Scene(tmp_path)
    gate = Faulty(scene.bucket())
    Remote(gate).gc(24)
    end = [n for n, call in enumerate(gate.calls) if call == f"get {layout.HEAD}"][-1]
    inner = scene.bucket()

    def lose() -> None:
        for key in [key for key in inner.objects if key.startswith(layout.CATALOG)]:
            if key != layout.HEAD:
                del inner.objects[key]

    Remote(Faulty(inner, end, meanwhile=lose)).gc(24)
    found = read_catalog(inner)
    assert found is not None
    assert found.containers
    scene.check(inner, "lost")


def test_of_two_pushes_at_once_the_catalog_has_both(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    def push(remote: Remote) -> None:
        scene.full.push(remote, "tiny")

    gate = Faulty(scene.bucket())
    push(Remote(gate))
    inner = scene.bucket()
    before = {*catalog_of(inner).containers}
    at = gate.calls.index(f"put_if {layout.HEAD}")
    meanwhile = partial(scene.full.push, Remote(inner), "tune")
    push(Remote(Faulty(inner, at, meanwhile=meanwhile)))
    added = {*catalog_of(inner).containers} - before
    sent = {key for key in inner.objects if key.startswith(layout.CONTAINERS)}
    assert len(added) >= 2
    assert {layout.container_key(each) for each in added | before} == sent
