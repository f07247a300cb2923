"""The server around another kind of memory, one that fails when a test wants it to."""

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manager_runs import managers
from manager_runs.manager_fakes import FakeBackend, FakeSlab
from tensor_dedup.digest import digest
from tensor_dedup.memory_manager.client import Client, Put, connect
from tensor_dedup.memory_manager.core import Settings
from tensor_dedup.memory_manager.errors import (
    ManagerRunningError,
    RefusedError,
    UnsafeSocketError,
)
from tensor_dedup.memory_manager.server.acceptor import SocketFile
from tensor_dedup.memory_manager.server.main import Start, default_budget, serve
from tensor_dedup.memory_manager.server.server import Options, Server

DATA = managers.pattern(1, 10_000)


class Faulty(FakeBackend):
    """Fails in a way that no backend may."""

    broken = False

    def reserve(self, nbytes: int) -> FakeSlab:
        if self.broken:
            raise ZeroDivisionError("a bug")
        return super().reserve(nbytes)


@pytest.fixture
def backend(folder: Path) -> Faulty:
    (folder / "slabs").mkdir()
    return Faulty(folder / "slabs")


@pytest.fixture
def client(folder: Path, backend: Faulty) -> Iterator[Client]:
    settings = Settings(1 << 20, backend="fake", build_timeout_s=60.0)
    server = Server(SocketFile(folder / "m.sock"), backend, settings, Options())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with connect(folder / "m.sock", keep_connected=False) as connected:
            yield connected
    finally:
        server.stop()
        thread.join()


def put_of(client: Client, key: str = "layer") -> Put:
    put = client.reserve([key]).put
    assert put is not None
    return put


def refused(code: str, request: object, *arguments: object) -> bool:
    assert callable(request)
    with pytest.raises(RefusedError) as caught:
        request(*arguments)
    return caught.value.code == code


def test_a_client_is_told_what_the_memory_can_do(client: Client) -> None:
    assert client.welcome.backend == "fake"
    assert not client.welcome.hardware_readonly


def test_tensors_are_shared_all_the_same(client: Client, folder: Path) -> None:
    [lease] = managers.build(client, "layer", DATA)
    with connect(folder / "m.sock", keep_connected=False) as other:
        [found] = other.get(["layer"])
        assert found is not None
        assert managers.bytes_of(found.leases[0]) == DATA
    assert lease.digest == digest(DATA)


def test_without_memory_a_put_can_be_tried_again(client: Client, backend: Faulty) -> None:
    with put_of(client) as put:
        backend.fail_reserve = True
        assert refused("no_memory", put.allocate, [len(DATA)], [digest(DATA)])
        backend.fail_reserve = False
        put.allocate([len(DATA)], [digest(DATA)])
        put.write(0, DATA)
        backend.busy = True
        assert refused("still_writable", put.seal)
        backend.busy = False
        [lease] = put.seal()
        assert managers.bytes_of(lease) == DATA


def test_who_announces_nothing_is_refused_where_nobody_hashes(client: Client) -> None:
    with put_of(client) as put:
        put.allocate([len(DATA)])
        assert refused("not_sealed", put.seal)
    assert client.reserve(["layer"]).answers == {"layer": "granted"}


def test_a_bug_in_a_backend_costs_one_put(
    client: Client, backend: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    with put_of(client) as put:
        backend.broken = True
        assert refused("no_memory", put.allocate, [10])
        backend.broken = False
        put.allocate([10], [digest(bytes(10))])
        put.seal()
    managers.until(lambda: "a job failed" in caplog.text)


def test_more_than_the_budget_is_refused(client: Client) -> None:
    with put_of(client) as put:
        assert refused("no_room", put.allocate, [2 << 20])


def test_a_client_holds_no_more_puts_than_it_may(client: Client) -> None:
    puts = [put_of(client, f"k{n}") for n in range(Settings(0).max_puts)]
    assert refused("limit", client.reserve, ["another"])
    for put in puts:
        put.abandon()
    put_of(client).abandon()


def test_a_socket_has_one_owner(client: Client, folder: Path) -> None:
    with pytest.raises(ManagerRunningError, match=r"m\.sock"):
        SocketFile(folder / "m.sock")
    assert client.get(["none"]) == [None]  # and its socket is untouched


def a_file(path: Path) -> None:
    path.write_bytes(b"weights")


def a_link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [a_file, a_link, a_pipe, Path.mkdir])
@pytest.mark.parametrize("name", ["m.sock", "m.sock.lock"])
def test_what_is_no_socket_of_a_manager_stays(
    folder: Path, make: Callable[[Path], object], name: str
) -> None:
    make(folder / name)
    before = (folder / name).lstat()
    with pytest.raises(UnsafeSocketError, match=re.escape(str(folder / name))):
        SocketFile(folder / "m.sock")
    after = (folder / name).lstat()
    assert (after.st_mode, after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_mode,
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )


def test_who_cannot_serve_leaves_the_handlers_of_signals_as_they_were(folder: Path) -> None:
    a_file(folder / "m.sock")
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(UnsafeSocketError):
        serve(Start(folder / "m.sock", 1 << 20))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_the_socket_of_another_program_stays_while_that_lives(
    folder: Path, kind: socket.SocketKind
) -> None:
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(folder / "m.sock"))
        if kind != socket.SOCK_DGRAM:
            other.listen(0)
        before = (folder / "m.sock").lstat().st_ino
        for _ in range(3):  # also when nobody else fits its queue
            with pytest.raises((ManagerRunningError, UnsafeSocketError), match=r"m\.sock"):
                SocketFile(folder / "m.sock")
        assert (folder / "m.sock").lstat().st_ino == before


def test_a_dead_socket_is_replaced_and_a_file_put_there_later_stays(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(folder / "m.sock"))
        dead.listen()
    assert (folder / "m.sock").is_socket()
    for text in ("", "12345\n"):
        (folder / "m.sock.lock").write_text(text)
        SocketFile(folder / "m.sock").close()
        assert not (folder / "m.sock").exists()
    file = SocketFile(folder / "m.sock")
    (folder / "m.sock").unlink()
    (folder / "m.sock").write_bytes(b"weights")
    file.close()
    assert (folder / "m.sock").read_bytes() == b"weights"


def test_a_socket_of_another_user_stays(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a socket away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(folder / "m.sock"))
    os.chown(folder / "m.sock", 65534, 65534)
    with pytest.raises(UnsafeSocketError, match="65534"):
        SocketFile(folder / "m.sock")
    assert (folder / "m.sock").is_socket()


def test_the_default_budget_is_some_of_the_memory() -> None:
    assert 0 < default_budget() < 1 << 60


def test_what_was_not_announced_before_is_announced_when_it_is_sealed(client: Client) -> None:
    put = put_of(client)
    put.allocate([5, 5], ["", digest(b"other")])
    put.write(0, b"bytes")
    put.write(1, b"other")
    right = [digest(b"bytes"), digest(b"other")]
    assert refused("wrong_state", put.seal, right[:1])
    assert refused("mismatch", put.seal, list(reversed(right)))
    assert [lease.digest for lease in put.seal(right)] == right


def test_what_was_built_is_said_when_its_builder_is_quiet_and_once(
    manager: managers.Manager,
) -> None:
    with manager.client("an engine") as client:
        kept = [
            managers.build(client, f"{name}-{n}", bytes([n]) * n * 4096, checkpoint=name)
            for name in ("base", "tuned")
            for n in (1, 2, 3)
        ]
        managers.until(lambda: manager.lines("built"))
        del kept
    managers.until(lambda: manager.lines("disconnected"))
    lines = manager.lines("built")  # of the second none: all that it made was there
    assert all("checkpoint='base' " in line and "by='an engine'" in line for line in lines)
    # More than one only where this machine stood still for as long as a load pauses.
    assert sum(int(re.findall(r"tensors=(\d+) MiB=0\.0", line)[0]) for line in lines) == 3
