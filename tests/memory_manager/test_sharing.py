"""One copy for several processes: what is shared, what is charged, and when it goes."""

import mmap
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from manager_runs import managers
from tensor_dedup.digest import digest
from tensor_dedup.memory_manager.client import Client, Lease, connect
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.errors import ManagerGoneError, RefusedError

MIB = 1 << 20


def map_all(lease: Lease) -> mmap.mmap:
    """A private mapping whose pages have all been read."""
    view = mmap.mmap(lease.slab.fileno, lease.nbytes, flags=mmap.MAP_PRIVATE, offset=lease.offset)
    assert len(view.read()) == lease.nbytes
    return view


def pss(pid: int) -> int:
    """Proportional bytes of the slabs that a process maps."""
    found, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "/memfd:tensor-dedup" in line
        elif inside and line.startswith("Pss:"):
            found += int(line.split()[1]) * 1024
    return found


def anonymous(pid: int, lease: Lease) -> int:
    """Bytes of a process's mappings of this slab that are the process's own copies.

    Of no other slab: a forked child has those that earlier tests have left, too.
    """
    slab = str(os.fstat(lease.slab.fileno).st_ino)
    found, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.split()[4] == slab
        elif inside and line.startswith("Anonymous:"):
            found += int(line.split()[1]) * 1024
    return found


def attach(state: dict[str, object]) -> str:
    client = connect(str(state["path"]), name="reader", keep_connected=False)
    [found] = client.get(["layer"], "tuned")
    assert found is not None
    state["client"], state["lease"] = client, found.leases[0]
    state["view"] = map_all(found.leases[0])
    return digest(state["view"])  # type: ignore[arg-type]  # an mmap is a buffer


def write_first_page(state: dict[str, object]) -> None:
    view = state["view"]
    assert isinstance(view, mmap.mmap)
    view[:7] = b"changed"


def test_two_processes_read_the_same_physical_memory(manager: managers.Manager) -> None:
    data = managers.pattern(1, 32 * MIB)
    others = pss(os.getpid())  # of slabs that earlier tests have left in this process
    with manager.client() as client:
        [lease] = managers.build(client, "layer", data)
        reader = managers.Actor(manager.socket, attach)
        with map_all(lease) as mine:
            assert reader.step() == digest(data)
            total = pss(manager.pid) + pss(reader.pid) + pss(os.getpid())
            assert 0.9 * len(data) <= total <= 1.03 * len(data) + others
            assert mine[:] == data
        reader.join()


def test_a_reader_that_writes_changes_nobody_elses_bytes(manager: managers.Manager) -> None:
    data = managers.pattern(2, MIB)
    with manager.client() as client:
        [lease] = managers.build(client, "layer", data)
        writer = managers.Actor(manager.socket, attach, write_first_page)
        writer.step()
        assert anonymous(writer.pid, lease) == 0
        assert writer.step() is None
        assert anonymous(writer.pid, lease) == mmap.PAGESIZE
        assert managers.bytes_of(lease) == data
        writer.join()


def test_a_killed_reader_has_no_leases(manager: managers.Manager) -> None:
    with manager.client() as client:
        managers.build(client, "layer", managers.pattern(3, MIB))
    reader = managers.Actor(manager.socket, attach)
    reader.step()
    assert [(row.pid, row.leases) for row in manager.overview().clients] == [(reader.pid, 1)]
    reader.kill()
    managers.until(lambda: manager.overview().totals.leases == 0)
    assert manager.overview().totals.lingering_bytes == 0
    assert manager.overview().clients == []


def test_what_a_living_process_may_have_mapped_stays_charged(manager: managers.Manager) -> None:
    # Almost the whole budget: room for another of this size is there only when the first is free.
    with manager.client() as client:
        managers.build(client, "layer", bytes(200 * MIB))
    reader = managers.Actor(manager.socket, attach, lambda state: _client(state).close())
    reader.step()
    reader.step()  # hung up, and still there
    managers.until(lambda: manager.overview().totals.lingering_bytes == 200 * MIB)
    with manager.client() as client:
        reservation = client.reserve(["other"])
        assert reservation.put is not None
        with reservation.put as put:
            with pytest.raises(RefusedError) as caught:
                put.allocate([200 * MIB])
            assert caught.value.code == "no_room"
            reader.kill()
            managers.until(lambda: manager.overview().totals.lingering_bytes == 0)
            put.allocate([200 * MIB])  # evicts what nobody uses any more
    assert manager.overview().totals.evicted_bytes == 200 * MIB


def _client(state: dict[str, object]) -> Client:
    client = state["client"]
    assert isinstance(client, Client)
    return client


def test_equal_bytes_of_two_layers_are_one_tensor(manager: managers.Manager) -> None:
    same, own = managers.pattern(4, MIB), managers.pattern(5, MIB)
    with manager.client() as client:
        [first] = managers.build(client, "a", same)
        again, other = managers.build(client, "b", same, own)
        assert again.slab is first.slab
        assert (again.offset, again.digest) == (first.offset, digest(same))
        assert manager.overview().totals.residents == 2
        assert managers.bytes_of(other) == own


def test_what_is_offered_first_is_not_written_again(manager: managers.Manager) -> None:
    data = managers.pattern(6, MIB)
    with manager.client() as client:
        managers.build(client, "a", data)
        [known, unknown] = client.lease([digest(data), digest(b"unknown")])
        assert known is not None
        assert unknown is None
        put = client.reserve(["b"]).put
        assert put is not None
        with put:
            put.publish("b", b"nothing to write", [known.digest])
        assert manager.overview().totals.slabs == 1
        [found] = client.get(["b"])
        assert found is not None
        assert managers.bytes_of(found.leases[0]) == data


def test_pinned_and_leased_memory_is_not_evicted(manager: managers.Manager) -> None:
    with manager.client() as client, Admin(manager.socket) as admin:
        [lease] = managers.build(client, "a", bytes(MIB), checkpoint="base")
        assert admin.evict("base").count == 0  # leased
        assert admin.pin("base").count == 1
        lease.close()
        assert admin.evict("base").count == 0  # pinned
        admin.pin("base", pinned=False)
        assert admin.evict("base").nbytes == MIB
        assert client.get(["a"]) == [None]


def test_evicting_a_checkpoint_keeps_what_another_has(manager: managers.Manager) -> None:
    common, own = managers.pattern(1, MIB), managers.pattern(2, MIB)
    with manager.client() as client, Admin(manager.socket) as admin:
        managers.build(client, "common", common, checkpoint="base")
        managers.build(client, "own", own, checkpoint="base")
        managers.build(client, "of-the-tune", common, checkpoint="tune")
        managers.until(lambda: manager.overview().totals.leases == 0)
        rows = {row.name: row.nbytes for row in manager.overview().checkpoints}
        assert rows == {"base": 2 * MIB, "tune": MIB}  # one tensor is shared

        assert admin.evict("base").nbytes == MIB
        rows = {row.name: row.nbytes for row in manager.overview().checkpoints}
        assert rows == {"tune": MIB}
        [found, gone] = client.get(["of-the-tune", "own"])
        assert found is not None
        assert gone is None
        assert managers.bytes_of(found.leases[0]) == common
        del found
        managers.until(lambda: manager.overview().totals.leases == 0)
        assert admin.evict("tune").nbytes == MIB
        assert manager.overview().totals.residents == 0


def test_a_digest_is_evicted_whosever_it_is(manager: managers.Manager) -> None:
    data = managers.pattern(1, MIB)
    with manager.client() as client, Admin(manager.socket) as admin:
        managers.build(client, "layer", data, checkpoint="base")
        managers.until(lambda: manager.overview().totals.leases == 0)
        assert admin.evict(digest(data)).nbytes == MIB


def test_a_manager_ends_within_its_time_while_it_is_used(manager: managers.Manager) -> None:
    data = managers.pattern(7, MIB)
    client = manager.client()
    [lease] = managers.build(client, "layer", data)
    assert manager.end() == 0
    assert not manager.socket.exists()
    assert managers.bytes_of(lease) == data
    client.close()


def test_it_ends_while_it_hashes_and_its_client_knows(manager: managers.Manager) -> None:
    client = manager.client()
    put = client.reserve(["layer"]).put
    assert put is not None
    put.allocate([200 * MIB])
    outcomes: list[object] = []

    def seal() -> None:
        try:
            outcomes.append(put.seal())
        except ManagerGoneError as error:
            outcomes.append(error)

    thread = threading.Thread(target=seal)
    thread.start()
    managers.until(lambda: outcomes or _state_of_build(manager) == "sealing")
    assert manager.end() == 0
    thread.join()
    assert len(outcomes) == 1
    client.close()


def _state_of_build(manager: managers.Manager) -> str:
    return "".join(row.state for row in manager.overview().builds)


def test_interrupting_it_ends_it_too(manager: managers.Manager) -> None:
    os.kill(manager.pid, signal.SIGINT)
    assert manager.wait() == 0
    assert not manager.socket.exists()
