"""What a load asks of a memory manager, and what it makes of a manager that refuses or goes."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manager_runs import managers
from tensor_dedup.digest import digest
from tensor_dedup.loader.residents.host_manager import HostMemory, HostResidents, host_session
from tensor_dedup.loader.residents.lent import LentResident
from tensor_dedup.loader.residents.manager import ResidentQuery, ResidentRequest
from tensor_dedup.loader.residents.provider import HostProvider
from tensor_dedup.loader.residents.resident import Resident, resident_key, tensor_bytes
from tensor_dedup.loader.residents.slab import SlabUsageError
from tensor_dedup.memory_manager.client import Client, Lease, connect
from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.errors import ManagerGoneError
from tensor_dedup.memory_manager.protocol import wire
from tensor_dedup.types import ResidentKey

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def manager(folder: Path) -> Iterator[managers.Manager]:
    with managers.running(folder, "--budget", str(10 * MIB)) as running:
        yield running


Lend = Callable[[], HostResidents]


@pytest.fixture
def lender(manager: managers.Manager) -> Iterator[Lend]:
    """Makes what a load has of the manager; each has a connection of its own, as a process has."""
    with ExitStack() as stack:

        def make() -> HostResidents:
            client = stack.enter_context(connect(manager.socket, keep_connected=False))
            return HostResidents(host_session(client, "a checkpoint"))

        yield make


def wanted(number: int, nbytes: int = 5000) -> ResidentRequest:
    tensor = torch.full((nbytes,), number, dtype=torch.uint8)
    return ResidentRequest(f"recipe {number}", tensor, digest(tensor_bytes(tensor)))


def by_recipe(lender: HostResidents, recipe: str, key: ResidentKey) -> Resident | None:
    return lender.find([ResidentQuery(recipe, replace(key, digest=""))])[0]


def by_content(lender: HostResidents, key: ResidentKey) -> Resident | None:
    return lender.find([ResidentQuery("", key)])[0]


def client_of(lender: HostResidents) -> Client:
    assert lender.session is not None
    return lender.session.client


def test_what_one_load_puts_another_borrows(lender: Lend) -> None:
    each = wanted(1)
    [put] = lender().put([each])
    assert put is not None
    assert put[1], "it was there before"
    other = lender()
    key = resident_key(each.tensor, "")
    for found in (by_recipe(other, "recipe 1", key), by_content(other, put[0].key)):
        assert found is not None
        assert torch.equal(found.map(), each.tensor)
    assert by_recipe(other, "recipe 2", key) is None
    again = other.put([each])[0]
    assert again is not None
    assert not again[1]


def test_another_geometry_is_not_taken(lender: Lend) -> None:
    each = wanted(1)
    kept = lender().put([each])
    assert kept[0] is not None
    square = resident_key(each.tensor.view(50, 100), "")
    assert by_recipe(lender(), "recipe 1", square) is None


def test_a_put_without_room_leaves_what_is_there_to_be_borrowed(lender: Lend) -> None:
    first, large = wanted(1, 6 * MIB), wanted(2, 6 * MIB)
    kept = lender().put([first])
    assert kept[0] is not None
    other = lender()
    assert other.put([large]) == [None]
    assert other.refused is not None
    assert by_content(other, kept[0][0].key) is not None
    assert other.put([wanted(3)])[0] is not None


def test_a_manager_that_dies_costs_sharing_and_no_error(
    manager: managers.Manager, lender: Lend
) -> None:
    mine = lender()
    kept = mine.put([wanted(1)])
    assert kept[0] is not None
    manager.kill()
    assert mine.put([wanted(2)]) == [None]
    assert mine.failed is not None
    assert by_content(mine, kept[0][0].key) is None
    assert torch.equal(kept[0][0].map(), wanted(1).tensor)


def test_a_lease_on_other_bytes_is_refused(lender: Lend) -> None:
    kept = lender().put([wanted(1)])
    assert kept[0] is not None
    resident = kept[0][0]
    assert isinstance(resident, LentResident)
    with pytest.raises(SlabUsageError):
        LentResident(resident_key(wanted(2).tensor, wanted(2).digest), resident.lease)


def test_a_bad_lease_costs_one_tensor_and_no_load(
    lender: Lend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer whose leases are on something else: by content, by recipe and when it is put."""
    requests = [wanted(number) for number in range(1, 5)]
    kept = lender().put(requests)
    assert all(kept)
    mine = lender()
    bad = requests[1].digest
    real = HostMemory.resident

    def cut_off(memory: HostMemory, key: ResidentKey, lease: Lease) -> Resident:
        if lease.digest == bad:
            key = replace(key, shape=(4000,), stride=(1,))
        return real(memory, key, lease)

    monkeypatch.setattr(HostMemory, "resident", cut_off)
    keys = [each.key for each in requests]
    assert mine.session is not None
    [lease] = mine.session.client.lease([bad])
    assert lease is not None
    with pytest.raises(SlabUsageError):
        mine.session.memory.resident(keys[1], lease)
    for queries in (
        [ResidentQuery("", key) for key in keys],
        [ResidentQuery(each.recipe, replace(each.key, digest="")) for each in requests],
    ):
        found = mine.find(queries)
        assert [each is not None for each in found] == [True, False, True, True]
    put = mine.put([*requests, wanted(7)])
    assert [each is not None for each in put] == [True, False, True, True, True]
    assert mine.failed is None
    assert mine.not_lent is not None
    assert bad in mine.not_lent
    # As a load does it: what cannot be lent is made here.
    provider = HostProvider(mine)
    built = provider.get_or_build(requests)
    assert [
        torch.equal(resident.map(), each.tensor)
        for each, (resident, _) in zip(requests, built, strict=True)
    ] == [True] * 4
    assert provider.not_lent == mine.not_lent


def begins(state: dict[str, object]) -> None:
    # What a test of another module, or a shell, has left would end this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    client = connect(Path(str(state["path"])), keep_connected=False)
    state["mine"] = HostResidents(host_session(client, "a checkpoint"))


def asks_and_is_interrupted(state: dict[str, object]) -> str:
    """Asks for zeros. A file says when the request is on its way."""
    receive, asked = wire.receive, Path(str(state["path"])).with_suffix(".asked")

    def receiving(connection: socket.socket) -> wire.Datagram:
        asked.touch()
        return receive(connection)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "receive", receiving)
        try:
            client_of(residents_of(state)).lease([wanted(0).digest])
        except KeyboardInterrupt:
            return "interrupted"
    return "answered"


def asks_again(state: dict[str, object]) -> str:
    try:
        client_of(residents_of(state)).lease([wanted(1).digest])
    except ManagerGoneError:
        return "refused"
    return "answered"


def reconnects_and_finds(state: dict[str, object]) -> bool:
    mine, ones = residents_of(state), wanted(1)

    def back() -> bool:
        with suppress(ManagerGoneError):  # it was stopped, and may take its time
            client_of(mine).reconnect()
        return client_of(mine).connected

    managers.until(back)
    found = by_content(mine, resident_key(ones.tensor, ones.digest))
    return found is not None and torch.equal(found.map(), ones.tensor)


def residents_of(state: dict[str, object]) -> HostResidents:
    mine = state["mine"]
    assert isinstance(mine, HostResidents)
    return mine


def test_a_reply_that_nobody_waited_for_answers_nothing_else(
    manager: managers.Manager, lender: Lend
) -> None:
    """Ctrl-C while the manager is slow: the late reply must not be taken for the next one's."""
    kept = lender().put([wanted(0), wanted(1)])
    assert all(kept)
    impatient = managers.Actor(
        manager.socket, begins, asks_and_is_interrupted, asks_again, reconnects_and_finds
    )
    impatient.step()
    os.kill(manager.pid, signal.SIGSTOP)
    try:
        impatient.begin()
        managers.until(manager.socket.with_suffix(".asked").exists)
        impatient.signal(signal.SIGINT)
        assert impatient.result() == "interrupted"
    finally:
        os.kill(manager.pid, signal.SIGCONT)
    assert impatient.step() == "refused"
    assert impatient.step() is True
    impatient.kill()


def test_many_are_looked_up_in_few_messages(lender: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 300
    kept = lender().put(
        [replace(wanted(n % 251, 100 + n), recipe=f"recipe {n}") for n in range(count)]
    )
    assert all(kept)
    other = lender()
    asked: list[str] = []
    ask = Connection.ask

    def counting(self: Connection, message: object, *args: Any, **more: Any) -> Any:
        asked.append(type(message).__name__)
        return ask(self, message, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "ask", counting)
    provider = HostProvider(other)
    tensors = [replace(wanted(n % 251, 100 + n), recipe=f"recipe {n}") for n in range(count)]
    by_recipe = [ResidentQuery(t.recipe, replace(t.key, digest="")) for t in tensors[: count // 2]]
    by_digest = [ResidentQuery("", each.key) for each in tensors[count // 2 :]]
    found = provider.find([*by_recipe, *by_digest, *by_recipe])
    assert all(found)
    assert sorted(asked) == ["Lookup", "LookupDigests"]
    for each, resident in zip(tensors, found, strict=False):
        assert resident is not None
        assert torch.equal(resident.map(), each.tensor)
    assert provider.find([*by_recipe, *by_digest]) == found[:count], "answered here"
    assert len(asked) == 2
    provider.find([ResidentQuery(f"recipe of nothing {n}", tensors[0].key) for n in range(5)])
    assert len(asked) == 2
    nothing = replace(tensors[0].key, digest="")
    assert not any(provider.find([ResidentQuery(f"none {n}", nothing) for n in range(257)]))
    assert asked[2:] == ["Lookup", "Lookup"]
