"""The client: pages, waiting, threads, forks, and managers that start by themselves."""

import gc
import mmap
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from manager_runs import managers
from processes import process_state
from project import package_source
from tensor_dedup.digest import digest
from tensor_dedup.memory_manager.client import Client, connect, connection, watch
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.errors import (
    LeaseClosedError,
    ManagerGoneError,
    MemoryManagerError,
    ProtocolError,
    RefusedError,
    UnsafeSocketError,
)
from tensor_dedup.memory_manager.protocol import paths
from tensor_dedup.memory_manager.protocol.limits import MAX_DESCRIPTORS, MAX_KEYS, MAX_PIECES

SMALL = 4096


def test_many_slabs_take_several_pages(manager: managers.Manager) -> None:
    count = MAX_DESCRIPTORS + 20
    with manager.client() as client:
        datas = [managers.pattern(n, SMALL) + n.to_bytes(2, "little") for n in range(count)]
        names = {}
        for n, data in enumerate(datas):
            [lease] = managers.build(client, f"k{n}", data)
            names[lease.digest] = data
        leases = client.lease(list(names))
        found = client.get([f"k{n}" for n in range(count)] + ["none"])
        assert [managers.bytes_of(lease) for lease in leases if lease] == list(names.values())
        assert found[-1] is None
        layers = [layer for layer in found if layer]
        assert [managers.bytes_of(layer.leases[0]) for layer in layers] == datas
        assert [layer.record for layer in layers] == [
            f"record of k{n}".encode() for n in range(count)
        ]


def test_many_keys_and_large_records_take_several_requests(manager: managers.Manager) -> None:
    with manager.client() as client:
        keys = [f"k{n}" for n in range(MAX_KEYS + 40)]
        for start in range(0, len(keys), MAX_KEYS):
            put = client.reserve(keys[start : start + MAX_KEYS]).put
            assert put is not None
            with put:
                for key in sorted(put.open_keys):
                    put.publish(key, key.encode() * 500, [])
        found = client.get(keys)
        assert [layer.record for layer in found if layer] == [key.encode() * 500 for key in keys]


def test_a_slab_takes_as_many_tensors_as_it_may(manager: managers.Manager) -> None:
    datas = [bytes([n % 251, n // 251]) * (1 + n % 7) for n in range(MAX_PIECES)]
    with manager.client() as client:
        put = client.reserve(["layer"]).put
        assert put is not None
        with put:
            put.allocate([len(data) for data in datas])
            for index, data in enumerate(datas):
                put.write(index, data)
            leases = put.seal()
        assert [managers.bytes_of(lease) for lease in leases] == datas
        assert [lease.digest for lease in leases] == [digest(data) for data in datas]


def test_pieces_may_be_written_in_parts_and_views(manager: managers.Manager) -> None:
    with manager.client() as client:
        put = client.reserve(["layer"]).put
        assert put is not None
        with put:
            put.allocate([10, 100_000])
            put.write(0, b"01234")
            put.write(0, b"56789", at=5)
            fd, nbytes, offsets = put.place
            with mmap.mmap(fd, nbytes) as view:
                view[offsets[1] : offsets[1] + 100_000] = b"v" * 100_000
            for index, data, at in ((0, b"x", 10), (1, b"x", -1)):
                with pytest.raises(LeaseClosedError, match="of a tensor of"):
                    put.write(index, data, at)
            put.progress()
            first, second = put.seal()
            assert managers.bytes_of(first) == b"0123456789"
            assert managers.bytes_of(second) == b"v" * 100_000
            with pytest.raises(LeaseClosedError, match="no writable slab"):
                put.write(0, b"late")
            with pytest.raises(RefusedError) as caught:
                put.allocate([10])
            assert caught.value.code == "wrong_state"


def test_a_put_that_is_forgotten_leaves_no_descriptor(manager: managers.Manager) -> None:
    with manager.client() as client:
        put = client.reserve(["layer"]).put
        assert put is not None
        before = process_state.open_slabs()
        put.allocate([SMALL])
        assert process_state.open_slabs() - before
        del put
        gc.collect()
        assert not process_state.open_slabs() - before


def test_a_lease_ends_with_its_last_reference(manager: managers.Manager) -> None:
    with manager.client() as client, Admin(manager.socket) as admin:
        leases = managers.build(client, "layer", b"a" * SMALL, b"b" * SMALL)
        assert admin.totals().leases == 2
        leases.pop()
        gc.collect()
        managers.until(lambda: admin.totals().leases == 1)
        leases[0].close()
        leases[0].close()
        assert leases[0].closed
        managers.until(lambda: admin.totals().leases == 0)


def test_a_wait_ends_with_its_time_and_with_news(manager: managers.Manager) -> None:
    with manager.client("builder") as builder, manager.client("waiter") as waiter:
        put = builder.reserve(["layer"]).put
        assert put is not None
        assert waiter.wait("layer", 0.0) == "building"
        outcomes: list[str] = []
        thread = threading.Thread(target=lambda: outcomes.append(waiter.wait("layer", 60)))
        thread.start()
        managers.until(lambda: manager.overview().totals.waiting == 1)
        put.publish("layer", b"record", [])
        thread.join()
        assert outcomes == ["ready"]
        assert waiter.wait("layer", 60) == "ready"
        assert waiter.wait("nobody's", 60) == "free"


def test_a_builder_that_says_that_it_gets_on_is_not_taken_over(manager: managers.Manager) -> None:
    with manager.client("builder") as builder, manager.client("waiter") as waiter:
        put = builder.reserve(["layer"]).put
        assert put is not None
        done = threading.Event()

        def get_on() -> None:
            while not done.wait(0.1):
                put.progress()

        thread = threading.Thread(target=get_on)
        thread.start()
        # Longer than the one second that a silent builder has.
        assert waiter.wait("layer", 1.6) == "building"
        assert waiter.reserve(["layer"]).answers == {"layer": "building"}
        done.set()
        thread.join()
        assert waiter.wait("layer", 60) == "stalled"
        taken = waiter.reserve(["layer"]).put
        assert taken is not None
        assert taken.number > put.number
        taken.abandon()


def test_threads_share_one_client(manager: managers.Manager) -> None:
    with manager.client() as client:
        [lease] = managers.build(client, "layer", b"w" * SMALL)
        wrong: list[object] = []

        def look() -> None:
            for _ in range(100):
                [found, none] = client.get(["layer", "none"])
                if found is None or none is not None or found.leases[0].slab is not lease.slab:
                    wrong.append(found)

        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        client.get(["none"])
        managers.until(lambda: manager.overview().totals.leases == 1)


def test_a_forked_child_has_the_memory_and_not_the_connection(manager: managers.Manager) -> None:
    client = manager.client("parent")
    [lease] = managers.build(client, "layer", b"w" * SMALL)
    socket = Path(f"/proc/self/fd/{client.watched()}").readlink()
    assert socket in managers.open_files()

    def look(state: dict[str, object]) -> object:
        with pytest.raises(ManagerGoneError, match="connect again"):
            client.get(["layer"])
        assert socket not in managers.open_files()
        lease.close()  # says nothing to the manager: it is the parent's
        return managers.bytes_of(lease)

    child = managers.Actor(manager.socket, look, lambda state: client.reconnect())
    assert child.step() == b"w" * SMALL
    assert manager.overview().totals.leases == 1
    client.close()
    # The parent's leases do not live as long as its children.
    managers.until(lambda: manager.overview().totals.leases == 0)
    child.join()


def test_a_lease_that_ends_while_the_connection_is_checked_is_given_back(
    manager: managers.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager.client() as client:
        [lease] = managers.build(client, "k", managers.pattern(1, SMALL))
        is_gone = connection._has_hung_up

        def collected_meanwhile(fd: int) -> bool:
            lease.close()
            return is_gone(fd)

        monkeypatch.setattr(connection, "_has_hung_up", collected_meanwhile)
        assert client.reconnect() == 0  # it looks at the connection, and that is good
        managers.until(lambda: manager.overview().totals.leases == 0, 2)


def test_a_forked_child_may_have_leases_of_its_own(manager: managers.Manager) -> None:
    client = manager.client("parent")
    [lease] = managers.build(client, "layer", b"w" * SMALL)

    child = managers.Actor(manager.socket, lambda state: client.reconnect(), lambda state: None)
    assert child.step() == 1
    rows = {row.pid: row.leases for row in manager.overview().clients}
    assert rows == {os.getpid(): 1, child.pid: 1}
    child.kill()
    managers.until(lambda: manager.overview().totals.leases == 1)
    assert not lease.closed
    client.close()


def test_nobody_there(folder: Path) -> None:
    with pytest.raises(ManagerGoneError, match="tensor-dedup serve"):
        connect(folder / "m.sock")
    with pytest.raises(UnsafeSocketError, match="107 bytes"):
        connect(folder / ("x" * 200) / "m.sock")


def test_a_manager_of_the_former_protocol_is_named(folder: Path) -> None:
    path = folder / "m.sock"
    refusal = b"TD\x04\x00\x83\xa1t\xa7Refused\xa4code\xa8protocol\xa4text\xa2no"

    def answer() -> None:
        connection, _ = former.accept()
        with connection:
            assert connection.recv(4096)
            connection.send(refusal)

    with managers.raw_socket() as former:
        former.bind(str(path))
        former.listen()
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ProtocolError, match=r"m\.sock: .*same version .*restart the manager"):
            connect(path)


def test_one_manager_for_many_that_start_it_at_once(folder: Path) -> None:
    code = (
        "import sys\n"
        "from tensor_dedup.memory_manager.client import connect\n"
        "client = connect('auto', name='starter')\n"
        "print(client.welcome.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        pids = {process.stdout.readline().strip() for process in starters if process.stdout}
        assert len(pids) == 1
        socket = folder / "tensor-dedup" / "manager.sock"
        with Admin(socket) as admin:
            overview = admin.overview()
            assert len(overview.clients) == 4
            assert {str(overview.totals.pid)} == pids
            admin.stop()
        assert not socket.exists()
    finally:
        for process in starters:
            process.communicate()


def test_a_manager_that_cannot_start_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tensor-dedup").mkdir(mode=0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with pytest.raises(UnsafeSocketError, match="0700"):
        connect("auto")


def test_where_no_manager_can_be_started_loads_go_on_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tensor-dedup").write_bytes(b"a file in the folder's place")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with pytest.raises(MemoryManagerError):
        connect("auto")


def test_a_runtime_folder_that_is_not_there_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert paths.default_socket() == folder / "tensor-dedup" / "manager.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "missing"))
    assert paths.default_socket().parent.name == f"tensor-dedup-{os.geteuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert paths.default_socket().parent.name == f"tensor-dedup-{os.geteuid()}"


def test_an_idle_manager_ends(folder: Path) -> None:
    with managers.running(folder, "--idle-exit", "0.5") as manager:
        with manager.client() as client:
            client.get(["none"])
        assert manager.wait() == 0
        assert not manager.socket.exists()


def test_two_managers_on_one_socket_cannot_be(manager: managers.Manager) -> None:
    command = [sys.executable, "-m", "tensor_dedup.memory_manager.server"]
    done = subprocess.run(
        [*command, "--socket", str(manager.socket)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert f"process {manager.pid}" in done.stderr
    with manager.client() as client:
        assert client.get(["none"]) == [None]


@pytest.mark.parametrize(("here", "there"), [("client", "server"), ("server", "client")])
def test_client_and_server_do_not_know_each_other(here: str, there: str) -> None:
    package = "tensor_dedup.memory_manager"
    graph = package_source.import_graph(package_source.sources())
    reached, wanted = set(), [name for name in graph if name.startswith(f"{package}.{here}")]
    while wanted:
        name = wanted.pop()
        if name not in reached:
            reached.add(name)
            wanted += graph[name]
    assert not [name for name in reached if name.startswith(f"{package}.{there}")]


def test_a_request_that_is_none_is_not_sent(manager: managers.Manager) -> None:
    with manager.client() as client:
        with pytest.raises(ProtocolError, match="regex"):
            client.get(["a key with spaces"])
        with pytest.raises(ProtocolError):
            client.reserve([])
        assert client.get(["none"]) == [None]


def test_a_closed_client_does_not_come_back(manager: managers.Manager) -> None:
    client: Client = manager.client()
    client.close()
    with pytest.raises(ManagerGoneError):
        client.get(["layer"])
    with pytest.raises(LeaseClosedError):
        client.reconnect()


class Unreachable:
    """A client whose manager does not answer any more."""

    closed = False

    def __init__(self) -> None:
        self.asked = threading.Event()

    def watched(self) -> int:
        return -1

    def reconnect(self) -> object:
        self.asked.set()
        raise MemoryManagerError("nobody answers", path="m.sock")


def test_a_client_that_waits_for_its_manager_goes_when_nobody_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "_FIRST_S", 3600)
    stop, gone = threading.Event(), threading.Event()
    client = Unreachable()
    weakref.finalize(client, gone.set)
    watch.watch_manager(client, stop)
    client.asked.wait()
    del client
    try:
        assert gone.wait(30)
    finally:
        stop.set()
