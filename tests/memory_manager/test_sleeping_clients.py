"""Who sleeps keeps what it leases, and learns whether somebody awake uses it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from manager_runs import managers
from tensor_dedup.digest import digest
from tensor_dedup.memory_manager.client import Client, Lease
from tensor_dedup.memory_manager.errors import ManagerGoneError, RefusedError

DATA = managers.pattern(1, 5000)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[managers.Manager]:
    tmp_path.chmod(0o700)
    with managers.running(tmp_path) as running:
        yield running


@pytest.fixture
def three(manager: managers.Manager) -> Iterator[list[Client]]:
    made = [manager.client() for _ in range(3)]
    yield made
    for each in made:
        each.close()


def leased(client: Client, data: bytes = DATA) -> Lease:
    [found] = client.lease([digest(data)])
    assert found is not None
    return found


def test_the_last_one_awake_is_told_so_and_nothing_goes_meanwhile(
    manager: managers.Manager, three: list[Client]
) -> None:
    first, second, third = three
    [mine] = managers.build(first, "layer", DATA)
    others = [leased(second), leased(third)]
    assert first.stand_by([mine]) == [True]
    assert second.stand_by([others[0]]) == [True]
    assert third.stand_by([others[1]]) == [False]
    assert first.stand_by([mine]) == [False]
    # All sleep, and their leases hold it all the same.
    assert first.evict(digest(DATA)) == 0
    assert managers.bytes_of(others[0]) == DATA
    assert second.stand_by([others[0]], asleep=False) == [True]
    assert first.stand_by([mine]) == [True]
    for lease in (mine, *others):
        lease.close()
    managers.until(lambda: manager.overview().totals.leases == 0)
    assert first.evict(digest(DATA)) > 0
    assert first.lease([digest(DATA)]) == [None]


def test_one_client_may_have_leases_of_both_kinds(three: list[Client]) -> None:
    first, *_ = three
    managers.build(first, "layer", DATA)
    asleep, awake = leased(first), leased(first)
    assert first.stand_by([asleep]) == [True]
    awake.close()
    assert first.stand_by([asleep, asleep]) == [False, False]


def test_who_dies_is_awake_no_more(manager: managers.Manager, three: list[Client]) -> None:
    first, *_ = three
    [mine] = managers.build(first, "layer", DATA)

    def lease(state: dict[str, object]) -> None:
        state["client"] = client = manager.client()
        state["lease"] = leased(client)

    other = managers.Actor(manager.socket, lease)
    other.step()
    assert first.stand_by([mine]) == [True]
    other.kill()
    managers.until(lambda: first.stand_by([mine]) == [False])
    assert managers.bytes_of(mine) == DATA


def test_whose_lease_it_is_not_is_refused_and_nothing_is_noted(three: list[Client]) -> None:
    first, second, _ = three
    [mine] = managers.build(first, "layer", DATA)
    theirs = leased(second)
    with pytest.raises(RefusedError) as caught:
        first.stand_by([mine, theirs])
    assert caught.value.code == "not_resident"
    assert second.stand_by([theirs]) == [True]


def test_a_tensor_that_is_being_published_is_in_use(three: list[Client]) -> None:
    first, second, _ = three
    put = first.reserve(["layer"]).put
    assert put is not None
    with put:
        put.allocate([len(DATA)], [digest(DATA)])
        put.write(0, DATA)
        [mine] = put.seal()
        assert first.stand_by([mine]) == [True]
    assert first.stand_by([mine]) == [False]
    assert second.stand_by([leased(second)]) == [False]


def test_leases_that_the_next_manager_has_taken_over_can_stand_by_there(
    tmp_path: Path, manager: managers.Manager
) -> None:
    first = manager.client()
    [mine] = managers.build(first, "layer", DATA)
    assert first.stand_by([mine]) == [False]
    manager.kill()
    with pytest.raises(ManagerGoneError):
        first.stand_by([mine])
    with managers.running(tmp_path) as heir:
        assert first.reconnect() == 1
        other = heir.client()
        lease = leased(other)
        assert other.stand_by([lease]) == [True]  # awake, until it says otherwise
        assert first.stand_by([mine]) == [False]
        other.close()
        first.close()
