"""Death at any step: nothing half-visible, nothing leaked, the others go on."""

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manager_runs import managers
from store_runs.clocks import JUMPS
from tensor_dedup.digest import digest
from tensor_dedup.memory_manager.client import Client, Put, connect
from tensor_dedup.memory_manager.client import client as client_module
from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.client.leases import SharedSlab
from tensor_dedup.memory_manager.client.watch import offer_slab
from tensor_dedup.memory_manager.errors import LeaseClosedError, ManagerGoneError, RefusedError
from tensor_dedup.memory_manager.protocol.limits import MAX_DESCRIPTORS
from tensor_dedup.memory_manager.protocol.messages import FoundDigests, LookupDigests

MIB = 1 << 20
DATA = managers.pattern(1, MIB)
OTHER = managers.pattern(2, MIB)
State = dict[str, object]


class UnsteadyManager(managers.Manager):
    """One whose wall clock is set back and forth by hours, from one reading to the next."""

    command = (
        "-c",
        "import itertools, runpy, time\n"
        f"jumps, real = itertools.cycle({JUMPS}), time.time_ns\n"
        "time.time_ns = lambda: real() + int(next(jumps) * 3600e9)\n"
        "time.time = lambda: time.time_ns() / 1e9\n"
        "runpy.run_module('tensor_dedup.memory_manager.server', run_name='__main__')",
    )


@pytest.fixture(params=["steady", pytest.param("jumping", marks=pytest.mark.long)])
def manager(folder: Path, request: pytest.FixtureRequest) -> Iterator[managers.Manager]:
    """A manager that gives silent builders one second, by a clock that is right or is not."""
    kind = UnsteadyManager if request.param == "jumping" else managers.Manager
    options = ("--build-timeout", "1", "--stall-timeout", "1")
    with managers.running(folder, *options, kind=kind) as running:
        yield running


def client_of(state: State) -> Client:
    client = state["client"]
    assert isinstance(client, Client)
    return client


def put_of(state: State) -> Put:
    put = state["put"]
    assert isinstance(put, Put)
    return put


def say_hello(state: State) -> None:
    state["client"] = connect(str(state["path"]), name="doomed", keep_connected=False)


def look_up(state: State) -> None:
    state["found"] = client_of(state).get(["layer", "resident"])


def reserve(state: State) -> None:
    state["put"] = client_of(state).reserve(["layer"], "base").put


def allocate(state: State) -> None:
    put_of(state).allocate([len(DATA)], [digest(DATA)])


def write_half(state: State) -> None:
    put_of(state).write(0, DATA[: MIB // 2])


def map_and_write(state: State) -> None:
    fd, nbytes, [offset] = put_of(state).place
    state["view"] = view = mmap.mmap(fd, nbytes)
    view[offset : offset + MIB] = DATA


def seal(state: State) -> None:
    if isinstance(view := state.pop("view", None), mmap.mmap):
        view.close()
    state["leases"] = put_of(state).seal()


def publish(state: State) -> None:
    put_of(state).publish("layer", b"record", [digest(DATA)])


STEPS: tuple[Callable[[State], None], ...] = (
    say_hello,
    look_up,
    reserve,
    allocate,
    write_half,
    map_and_write,
    seal,
    publish,
)


def settled(manager: managers.Manager, *, residents: int) -> bool:
    """Nobody is connected, nothing is held, and only residents are charged."""
    totals = manager.overview().totals
    held = (totals.leases, totals.builds, totals.lingering_bytes, totals.waiting)
    return held == (0, 0, 0, 0) and totals.residents == residents == totals.slabs


@pytest.mark.parametrize("count", range(1, len(STEPS) + 1), ids=[s.__name__ for s in STEPS])
def test_a_client_killed_after_any_step_leaves_nothing(
    manager: managers.Manager, count: int
) -> None:
    with manager.client() as client:
        managers.build(client, "resident", OTHER)
    managers.until(lambda: settled(manager, residents=1))
    idle = managers.steady(manager.descriptors)
    doomed = managers.Actor(manager.socket, *STEPS[:count])
    for _ in range(count):
        assert doomed.step() is None
    doomed.kill()
    sealed = STEPS.index(seal) < count
    managers.until(lambda: settled(manager, residents=1 + sealed))
    managers.until(lambda: manager.descriptors() == idle + sealed)  # one for each slab
    assert manager.threads() <= 1 + 4 + len(os.sched_getaffinity(0))
    with manager.client() as client:
        [found] = client.get(["layer"])
        assert (found is not None) == (count == len(STEPS))
        if found is None:
            [lease] = managers.build(client, "layer", DATA)
        else:
            [lease] = found.leases
        assert managers.bytes_of(lease) == DATA


def test_a_client_killed_between_two_pages_leaves_nothing(manager: managers.Manager) -> None:
    with manager.client() as client:
        datas = [n.to_bytes(2, "little") * 50 for n in range(MAX_DESCRIPTORS + 5)]
        for n, data in enumerate(datas):
            managers.build(client, f"k{n}", data)

    def ask_for_the_first_page(state: State) -> int:
        connection = Connection(Path(str(state["path"])), "doomed")
        state["connection"] = connection
        question = LookupDigests([digest(data) for data in datas])
        return len(connection.ask(question, FoundDigests)[0].extents)

    doomed = managers.Actor(manager.socket, ask_for_the_first_page)
    assert doomed.step() == MAX_DESCRIPTORS
    assert manager.overview().totals.leases == MAX_DESCRIPTORS
    doomed.kill()
    managers.until(lambda: settled(manager, residents=len(datas)))


def test_a_client_killed_while_it_waits_leaves_nothing(manager: managers.Manager) -> None:
    with manager.client() as client:
        reservation = client.reserve(["layer"])
        waiter = managers.Actor(
            manager.socket, say_hello, lambda state: client_of(state).wait("layer", 60)
        )
        waiter.step()
        waiter.begin()
        managers.until(lambda: manager.overview().totals.waiting == 1)
        waiter.kill()
        managers.until(lambda: manager.overview().totals.waiting == 0)
        assert reservation.put is not None
        reservation.put.abandon()


def test_a_builder_killed_hands_over_to_who_waits(manager: managers.Manager) -> None:
    doomed = managers.Actor(manager.socket, say_hello, reserve, allocate, write_half)
    for _ in range(4):
        doomed.step()
    waiter = managers.Actor(
        manager.socket, say_hello, lambda state: client_of(state).wait("layer", 60)
    )
    waiter.step()
    waiter.begin()
    managers.until(lambda: manager.overview().totals.waiting == 1)
    doomed.kill()
    assert waiter.result() == "free"
    waiter.join()


def test_a_builder_that_was_stopped_cannot_reach_what_others_see(
    manager: managers.Manager,
) -> None:
    def write_garbage_and_seal(state: State) -> object:
        put_of(state).write(0, b"garbage")
        return put_of(state).seal()

    def publish_all_the_same(state: State) -> None:
        put_of(state).publish("layer", b"garbage", [])

    stopped = managers.Actor(
        manager.socket,
        say_hello,
        reserve,
        allocate,
        write_garbage_and_seal,
        publish_all_the_same,
        lambda state: put_of(state).abandon(),
    )
    for _ in range(3):
        stopped.step()
    stopped.signal(signal.SIGSTOP)
    with manager.client() as client:
        assert client.reserve(["layer"]).answers == {"layer": "building"}
        assert client.wait("layer", 60) == "stalled"
        [lease] = managers.build(client, "layer", DATA)
        assert manager.overview().totals.takeovers == 1
        assert manager.overview().totals.lingering_bytes == MIB  # the old slab is still mapped
        stopped.signal(signal.SIGCONT)
        for _ in range(2):
            error = stopped.step()
            assert isinstance(error, RefusedError)
            assert error.code == "stale_put"
        assert managers.bytes_of(lease) == DATA
        [found] = client.get(["layer"])
        assert found is not None
        assert found.record == b"record of layer"
        stopped.step()
        assert manager.overview().totals.lingering_bytes == 0
    stopped.join()


def test_crossed_reservations_do_not_lock(manager: managers.Manager) -> None:
    with manager.client("one") as one, manager.client("two") as two:
        first, second = one.reserve(["a"]), two.reserve(["b"])
        assert one.reserve(["b"]).answers == {"b": "building"}
        assert two.reserve(["a"]).answers == {"a": "building"}
        with pytest.raises(RefusedError) as caught:
            one.wait("b", 60)
        assert caught.value.code == "holds_reservation"
        for reservation in (first, second):
            assert reservation.put is not None
            reservation.put.abandon()
        assert one.wait("b", 60) == "free"


@pytest.mark.parametrize("count", range(1, len(STEPS) + 1), ids=[s.__name__ for s in STEPS])
def test_when_the_manager_dies_a_client_knows_and_the_next_one_is_clean(
    manager: managers.Manager, count: int
) -> None:
    state: State = {"path": manager.socket}
    for step in STEPS[:count]:
        step(state)
    manager.kill()
    with pytest.raises(ManagerGoneError):
        client_of(state).get(["layer"])
    successor = managers.Manager(manager.socket)  # on the socket that was left behind
    try:
        totals = successor.overview().totals
        assert (totals.residents, totals.charged, totals.builds) == (0, 0, 0)
        with successor.client() as client:
            [lease] = managers.build(client, "layer", DATA)
            assert managers.bytes_of(lease) == DATA
    finally:
        successor.close()
        client_of(state).close()


def test_a_restarted_manager_gets_back_what_is_leased(manager: managers.Manager) -> None:
    client = manager.client()
    [lease] = managers.build(client, "layer", DATA)
    [twin] = client.lease([lease.digest])
    assert twin is not None
    client.remember(["layer"], b"record of layer", [lease.digest])
    manager.kill()
    successor = managers.Manager(manager.socket)
    try:
        assert client.reconnect() == 1
        overview = successor.overview()
        assert (overview.totals.residents, overview.totals.leases) == (1, 2)
        with successor.client() as other:
            [found] = other.get(["layer"])
            assert found is not None
            assert managers.bytes_of(found.leases[0]) == DATA
        lease.close()
        twin.close()
        managers.until(lambda: successor.overview().totals.leases == 0)
        # Taken back once, it is taken back again.
        [again] = client.lease([digest(DATA)])
        assert again is not None
        successor.kill()
        third = managers.Manager(manager.socket)
        assert client.reconnect() == 1
        assert third.overview().totals.leases == 1
        third.close()
    finally:
        successor.close()
        client.close()


def test_a_client_reconnects_by_itself(manager: managers.Manager) -> None:
    client = connect(manager.socket, name="kept")
    [lease] = managers.build(client, "layer", DATA)
    manager.kill()
    managers.until(lambda: not client.connected or client.watched() >= 0)
    successor = managers.Manager(manager.socket)
    try:
        managers.until(lambda: successor.overview().totals.leases == 1)
        assert managers.bytes_of(lease) == DATA
    finally:
        client.close()
        successor.close()


def test_a_client_that_is_closed_while_it_reconnects_leaves_no_connection(
    manager: managers.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(manager.socket, name="kept", keep_connected=False)
    [lease] = managers.build(client, "layer", DATA)
    manager.kill()
    successor = managers.Manager(manager.socket)
    offered = []

    def offer_and_close(connection: Connection, slab: SharedSlab) -> bool:
        offered.append(offer_slab(connection, slab))
        client.close()
        return offered[-1]

    monkeypatch.setattr(client_module, "offer_slab", offer_and_close)
    try:
        with pytest.raises(LeaseClosedError):
            client.reconnect()
        assert offered == [True]
        assert not client.connected
        managers.until(lambda: successor.overview().totals.leases == 0)
        assert managers.bytes_of(lease) == DATA
    finally:
        successor.close()
