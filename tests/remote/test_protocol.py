"""Every request of push, pull, delete and gc, and everything that can go wrong with it.

What must hold after each fault: the remote verifies in full (nobody sees a name before its pieces),
the store has whole checkpoints only, and the same command again succeeds.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from remote_runs.remotes import FAULTS, READ_FAULTS, Faulty, Killed, MemoryBucket
from remote_runs.s3_faults import FaultyProxy, MemoryS3, client
from store_runs.stores import (
    KIB,
    Content,
    content,
    open_store,
    safetensors,
    stored,
    tuned,
    u8,
    weights,
    write,
)
from tensor_dedup import Store
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.catalog import catalog_of
from tensor_dedup.remote.errors import NoConditionsError, RemoteBusyError, RemoteNameTakenError
from tensor_dedup.remote.lease import LEASE_S

HOUR = 3600.0
ALL = (*FAULTS, *READ_FAULTS)
SOME = ("lost after", "killed before", *READ_FAULTS)
in_short_and_all = pytest.mark.parametrize(
    "faults", [SOME, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"]
)


@pytest.fixture
def paths(tmp_path: Path, full: Store) -> dict[str, Path]:
    return {name: tmp_path / name for name in full.names()}


@pytest.fixture
def based(full: Store) -> MemoryBucket:
    """A remote with the base."""
    bucket = MemoryBucket()
    full.push(Remote(bucket), "base")
    return bucket


def copied(bucket: MemoryBucket, hours: float = 0) -> MemoryBucket:
    found = bucket.copied()
    found.clock += hours * HOUR
    return found


def count(bucket: MemoryBucket, work: Callable[[Remote], object]) -> int:
    gate = Faulty(copied(bucket))
    work(Remote(gate))
    assert len(gate.calls) > 1
    return len(gate.calls)


def cases(calls: int, faults: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    return ((number, fault) for number in range(calls) for fault in faults)


def survived(work: Callable[[], object]) -> bool:
    """Whether it went through; else it was a typed error, or the end of the process."""
    try:
        work()
    except (StoreError, Killed):
        return False
    return True


@in_short_and_all
@pytest.mark.parametrize("first", [True, False])
def test_a_push_is_whole_or_is_not(
    full: Store, based: MemoryBucket, first: bool, faults: tuple[str, ...]
) -> None:
    start, name = (MemoryBucket(), "base") if first else (based, "tune")
    calls = count(start, lambda remote: full.push(remote, name))
    cut = 0
    for number, fault in cases(calls, faults):
        inner = copied(start)
        gate = Faulty(inner, number, fault)
        done = survived(partial(full.push, Remote(gate), name))
        cut += not done
        assert gate.struck
        if "FORMAT" in inner.objects:
            found = Remote(inner).verify(full=True)
            assert found.fine, (number, fault, gate.calls[number], found.faults)
            assert (name in Remote(inner).names()) or not done
        full.push(Remote(inner), name)
        assert Remote(inner).verify(full=True).fine, (number, fault)
        assert name in Remote(inner).names()
    assert cut > (3 if faults is ALL else 1) * calls  # what is lost, and who is killed, mostly


def test_a_push_again_sends_what_the_first_had_not(
    full: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensor_dedup.remote import push

    monkeypatch.setattr(layout, "CONTAINER_BYTES", 100_000)
    monkeypatch.setattr(push, "_ASKED_BYTES", 1)
    start = MemoryBucket()
    calls = count(start, lambda remote: full.push(remote, "base"))
    whole = start.traffic.sent
    probe = copied(start)
    full.push(Remote(probe), "base")
    whole = probe.traffic.sent
    for number in range(calls):
        inner = copied(start)
        with suppress(Killed):
            full.push(Remote(Faulty(inner, number, "killed after")), "base")
        sizes = {k: len(o[0]) for k, o in inner.objects.items() if k.startswith("containers/")}
        before = inner.traffic.sent
        full.push(Remote(inner), "base")
        assert inner.traffic.sent - before <= whole - sum(sizes.values()), number


@in_short_and_all
def test_a_pull_is_whole_or_is_not(
    tmp_path: Path,
    full: Store,
    based: MemoryBucket,
    paths: dict[str, Path],
    faults: tuple[str, ...],
) -> None:
    full.push(Remote(based), "tune")
    numbered = iter(range(10**6))

    def fresh() -> Store:
        return open_store(tmp_path / f"other-{next(numbered)}")

    calls = count(based, lambda remote: fresh().pull(remote, "tune"))
    expected: Content = content(paths["tune"])
    cut = 0
    for number, fault in cases(calls, faults):
        store, gate = fresh(), Faulty(copied(based), number, fault)
        done = survived(partial(store.pull, Remote(gate), "tune"))
        cut += not done
        assert gate.struck
        assert store.names() == (["tune"] if done else [])
        if done:
            assert stored(store, "tune") == expected
        store.pull(Remote(based), "tune")
        assert stored(store, "tune") == expected
        assert store.verify(full=True).faults == []
    assert cut >= (4 if faults is ALL else 2) * calls


def test_a_pull_again_fetches_what_the_first_had_not(
    tmp_path: Path, full: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensor_dedup.remote import pull

    monkeypatch.setattr(layout, "CONTAINER_BYTES", 100_000)
    based = MemoryBucket()
    full.push(Remote(based), "base")
    monkeypatch.setattr(pull, "_CONTAINER_BYTES", 1)
    monkeypatch.setattr("tensor_dedup.remote.pieces._AHEAD", 1)
    calls = count(based, lambda remote: open_store(tmp_path / "probe").pull(remote, "base"))
    kept = 0
    for number in range(calls):
        store = open_store(tmp_path / f"other-{number}")
        with suppress(Killed):
            store.pull(Remote(Faulty(copied(based), number, "killed after")), "base")
        held = sum(p.stat().st_size for p in (store.path / "containers").rglob("*.*"))
        kept += held > 0
        result = store.pull(Remote(based), "base")
        assert result.moved_bytes <= 1_131_985 - 0.8 * held
    assert kept


@in_short_and_all
@pytest.mark.parametrize("verb", ["delete", "gc"])
def test_deleting_and_collecting_lose_nothing(
    full: Store, based: MemoryBucket, verb: str, faults: tuple[str, ...]
) -> None:
    full.push(Remote(based), "tune")
    if verb == "gc":
        Remote(based).delete("tune")
        based.clock += 25 * HOUR
        assert Remote(based).gc(24).condemn
        based.clock += 25 * HOUR

    def work(remote: Remote) -> None:
        if verb == "gc":
            assert remote.gc(24).done
        else:
            remote.delete("tune")

    calls = count(based, work)
    probe = copied(based)
    work(Remote(probe))
    swept = {key for key in probe.objects if key.startswith("containers/")}
    for number, fault in cases(calls, faults):
        inner = copied(based)
        gate = Faulty(inner, number, fault)
        done = survived(partial(work, Remote(gate)))
        assert gate.struck
        found = Remote(inner).verify(full=True)
        assert found.fine, (number, fault, gate.calls[number], found.faults)
        assert "base" in Remote(inner).names()
        if verb == "gc":
            # Until an hour has passed, the first one may not be over, for all that others know.
            with suppress(RemoteBusyError):
                Remote(inner).gc(24)
            inner.clock += HOUR
            Remote(inner).gc(24)
            left = {key for key in inner.objects if key.startswith("containers/")}
            assert left == swept or not fault.startswith("killed"), (number, fault)
            # What seemed to be gone already is condemned again.
            for _ in range(2):
                inner.clock += 25 * HOUR
                Remote(inner).gc(24)
            left = {key for key in inner.objects if key.startswith("containers/")}
            assert left == swept, (number, fault)
        elif done:
            assert Remote(inner).names() == ["base"]
        full.push(Remote(inner), "tune")
        assert Remote(inner).verify(full=True).fine


class Overtaken(Faulty):
    """A write of the reference `key` is carried out, another writer comes, the answer is lost."""

    def __init__(self, inner: MemoryBucket, key: str, others: Callable[[], object]) -> None:
        super().__init__(inner)
        self._key, self._others = key, others
        self.texts: list[bytes] = []

    def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        if key != self._key or self.texts:
            return super().put_if(key, data, tag)
        assert self.inner.put_if(key, data, tag)
        self.texts.append(data)
        self._others()
        found = self.inner.get(key, 1 << 20)
        assert found is not None
        self.texts.append(found[0])
        return False


@pytest.mark.parametrize("verb", ["push", "delete"])
def test_no_name_goes_back_to_what_another_writer_has_replaced(
    tmp_path: Path, full: Store, based: MemoryBucket, verb: str
) -> None:
    other = open_store(tmp_path / "other")
    other.import_(tmp_path / "tiny", "base")
    full.rename("base", "old")
    full.rename("tune", "base")
    gate = Overtaken(based, "refs/base", lambda: other.push(Remote(based), "base", replace=True))
    work: Callable[[], object] = {
        "push": lambda: full.push(Remote(gate), "base", replace=True),
        "delete": lambda: Remote(gate).delete("base"),
    }[verb]
    with pytest.raises(RemoteBusyError, match="another writer changed 'base'"):
        work()
    assert len({*gate.texts}) == 2
    assert based.objects["refs/base"][0] == gate.texts[1]
    assert Remote(based).verify(full=True).fine


def test_a_push_that_begins_again_does_not_undo_what_came_after_it(
    tmp_path: Path, full: Store, based: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was late with its reference, and another writer replaced that meanwhile."""
    from tensor_dedup.remote import push

    other = open_store(tmp_path / "other")
    other.import_(tmp_path / "tiny", "base")
    full.rename("base", "old")
    full.rename("tune", "base")
    now = [0.0]
    monkeypatch.setattr(push, "boottime", lambda: now[0])

    class Slow(Faulty):
        def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
            done = super().put_if(key, data, tag)
            if key == "refs/base" and not now[0]:
                other.push(Remote(based), "base", replace=True)
                now[0] = LEASE_S
            return done

    gate = Slow(based)
    full.push(Remote(gate), "base", replace=True)
    assert now[0]
    assert sum(call == "put_if refs/base" for call in gate.calls) == 1
    there = open_store(tmp_path / "there")
    there.pull(Remote(based), "base")
    assert stored(there, "base") == content(tmp_path / "tiny")


def test_two_pushers_lose_neither(full: Store, based: MemoryBucket) -> None:
    """The second one runs as a whole at each moment of the first."""
    calls = count(based, lambda remote: full.push(remote, "tune"))
    for number in range(calls):
        inner = copied(based)
        other = partial(full.push, Remote(inner), "tiny")
        gate = Faulty(inner, number, meanwhile=other)
        full.push(Remote(gate), "tune")
        assert gate.struck
        assert Remote(inner).names() == ["base", "tiny", "tune"]
        found = Remote(inner).verify(full=True)
        assert found.fine, (number, gate.calls[number], found.faults)


def test_of_two_pushers_of_one_name_one_is_refused(
    tmp_path: Path, full: Store, based: MemoryBucket, paths: dict[str, Path]
) -> None:
    other = open_store(tmp_path / "another")
    other.import_(paths["tiny"], "tune")
    calls = count(based, lambda remote: full.push(remote, "tune"))
    refused = 0
    for number in range(calls):
        inner = copied(based)
        push = partial(other.push, Remote(inner), "tune")
        try:
            full.push(Remote(Faulty(inner, number, meanwhile=push)), "tune")
        except RemoteNameTakenError:
            refused += 1
        manifest = Remote(inner).read("tune").manifest
        assert manifest == other.manifest("tune")  # it was told that it is there
        assert Remote(inner).verify(full=True).fine
    assert refused == calls


def test_a_first_push_at_each_moment_of_another(full: Store) -> None:
    calls = count(MemoryBucket(), lambda remote: full.push(remote, "base"))
    for number in range(calls):
        inner = MemoryBucket()
        other = partial(full.push, Remote(inner), "tiny")
        gate = Faulty(inner, number, meanwhile=other)
        full.push(Remote(gate), "base")
        assert Remote(inner).names() == ["base", "tiny"]
        assert Remote(inner).verify(full=True).fine, (number, gate.calls[number])


def test_a_server_without_conditions_is_refused_and_may_be_read(
    tmp_path: Path, full: Store, based: MemoryBucket
) -> None:
    gateway = MemoryBucket(conditions=False)
    with pytest.raises(NoConditionsError, match="If-None-Match"):
        full.push(Remote(gateway), "base")
    assert not [key for key in gateway.objects if not key.startswith("probe/")]
    # A remote that was copied to such a server.
    gateway.objects |= based.objects
    with pytest.raises(NoConditionsError):
        full.push(Remote(gateway), "tune")
    other = open_store(tmp_path / "other")
    other.pull(Remote(gateway), "base")
    assert stored(other, "base") == stored(full, "base")


@pytest.mark.parametrize("over", ["calls", "sockets"])
def test_a_push_of_nothing_new_writes_nothing(full: Store, based: MemoryBucket, over: str) -> None:
    before = dict(based.objects)
    if over == "calls":
        gate = Faulty(based)
        assert full.push(Remote(gate), "base").unchanged
        calls = gate.calls
    else:
        proxy = FaultyProxy(MemoryS3(based))
        assert full.push(Remote(client(proxy.port)), "base").unchanged
        calls = proxy.requests
        proxy.close()
    keys = [call.lower() for call in calls]
    assert keys == ["get refs/base", "get catalog/head"]
    assert based.objects == before  # with tags and times


@pytest.mark.parametrize("what", ["lost", "damaged", "old", "lying", "segment lost"])
def test_a_catalog_that_is_wrong_costs_requests_and_nothing_else(
    tmp_path: Path, full: Store, based: MemoryBucket, paths: dict[str, Path], what: str
) -> None:
    old = dict(based.objects)
    full.push(Remote(based), "tune")
    objects = based.objects
    head = objects["catalog/HEAD"]
    if what == "lost":
        del objects["catalog/HEAD"]
    elif what == "damaged":
        objects["catalog/HEAD"] = (head[0][:-1] + b"?", head[1], head[2])
    elif what == "old":
        objects["catalog/HEAD"] = old["catalog/HEAD"]
    elif what == "segment lost":
        for key in [k for k in objects if k.startswith("catalog/") and k != "catalog/HEAD"]:
            del objects[key]
    else:
        for key in [k for k in objects if k.startswith("tables/") and k not in old]:
            objects[f"hidden/{key}"] = objects.pop(key)
    other = open_store(tmp_path / "other")
    other.pull(Remote(based), "tune")  # of a table that is gone, the container has another one
    for key in [k for k in objects if k.startswith("hidden/")]:
        objects[key.removeprefix("hidden/")] = objects.pop(key)
    assert stored(other, "tune") == content(paths["tune"])
    full.push(Remote(based), "tiny")
    assert Remote(based).verify(full=True).fine
    third = open_store(tmp_path / "third")
    third.pull(Remote(based), "tiny")
    third.pull(Remote(based), "tune")


@pytest.mark.parametrize("what", ["gone", "cut"])
def test_a_push_sends_again_what_it_would_have_relied_on_and_is_gone(
    tmp_path: Path, full: Store, based: MemoryBucket, paths: dict[str, Path], what: str
) -> None:
    """The catalog names a container that is not there: nobody need run `verify` first."""
    intact = full.push(Remote(copied(based)), "tune").moved_bytes
    for key in [key for key in based.objects if key.startswith("containers/")]:
        blob, tag, when = based.objects.pop(key)
        if what == "cut":
            based.objects[key] = (blob[:-1], tag, when)
    assert full.push(Remote(based), "tune").moved_bytes > intact
    assert {f.affected for f in Remote(based).verify(full=True).faults} <= {(), ("base",)}
    store = open_store(tmp_path / "other")
    store.pull(Remote(based), "tune")
    assert stored(store, "tune") == content(paths["tune"])
    full.push(Remote(based), "base", replace=True)
    assert not any(f.affected for f in Remote(based).verify(full=True).faults)


@pytest.mark.parametrize("what", ["gone", "cut"])
def test_a_push_that_mends_sends_again_what_is_stored_against_something_lost(
    tmp_path: Path, what: str
) -> None:
    """Its own container is whole, and nobody has noted that the one of its base is not."""
    store, bucket = open_store(tmp_path / "here"), MemoryBucket()
    b = weights(2, 400 * KIB)
    for name, tensors in {"base": u8(b=b), "tune": u8(tuned=tuned(b, 4))}.items():
        path = write(tmp_path / name, {"m.safetensors": safetensors(tensors)})
        store.import_(path, name, compress="auto")
        store.push(Remote(bucket), name)
    (key,) = {
        layout.container_key(c) for c, e in catalog_of(bucket).containers.items() if not e.deltas
    }
    blob, tag, when = bucket.objects.pop(key)
    if what == "cut":
        bucket.objects[key] = (blob[:-1], tag, when)
    assert store.push(Remote(bucket), "tune", replace=True).moved_pieces == 1
    other = open_store(tmp_path / "other")
    other.pull(Remote(bucket), "tune")
    assert stored(other, "tune") == content(tmp_path / "tune")
    assert not store.push(Remote(bucket), "base").unchanged  # it was noted for the other one
    assert Remote(bucket).verify(full=True).fine


class Clock:
    """The only clock of this machine that goes on while it sleeps."""

    now = 0.0

    def clock_gettime(self, clock: int) -> float:
        return self.now if clock == time.CLOCK_BOOTTIME else 0.0


@pytest.mark.parametrize("where", [layout.HEAD, "refs/tune"])
def test_a_push_that_slept_too_long_begins_anew(
    tmp_path: Path, full: Store, based: MemoryBucket, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What it found in the catalog has been deleted since, as nothing leads to it."""
    calls = Faulty(copied(based))
    full.push(Remote(calls), "tune")
    inner, clock = copied(based), Clock()
    Remote(inner).delete("base")
    monkeypatch.setattr("tensor_dedup.remote.lease.time", clock)

    def sleep() -> None:
        for _ in range(2):
            clock.now += 8 * 24 * HOUR
            inner.clock += 8 * 24 * HOUR
            assert Remote(inner).gc().done

    gate = Faulty(inner, calls.calls.index(f"put_if {where}"), meanwhile=sleep)
    full.push(Remote(gate), "tune")
    assert gate.struck
    assert gate.calls.count("get catalog/HEAD") > 1
    assert Remote(inner).names() == ["tune"]
    assert Remote(inner).verify(full=True).fine
    other = open_store(tmp_path / "other")
    other.pull(Remote(inner), "tune")
    assert stored(other, "tune") == stored(full, "tune")
