"""Clients that stall, lie or send garbage: a typed refusal, and nobody else notices."""

import array
import contextlib
import itertools
import mmap
import os
import resource
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from manager_runs import managers
from processes.process_state import descriptor_limit
from store_runs.contracts import committed
from tensor_dedup.digest import digest
from tensor_dedup.memory_manager.backends.memfd import MemfdBackend
from tensor_dedup.memory_manager.client import Client, connect
from tensor_dedup.memory_manager.client.puts import Put
from tensor_dedup.memory_manager.core import Settings
from tensor_dedup.memory_manager.errors import (
    ManagerGoneError,
    NoMemoryError,
    RefusedError,
    UnsafeSocketError,
)
from tensor_dedup.memory_manager.protocol import codec, wire
from tensor_dedup.memory_manager.protocol.limits import MAX_MESSAGE
from tensor_dedup.memory_manager.protocol.messages import (
    DigestSpan,
    FoundDigests,
    Hello,
    LookupDigests,
    Offer,
    Refused,
    Reply,
    Request,
    Status,
    Stop,
    Welcome,
)
from tensor_dedup.memory_manager.server.acceptor import SocketFile
from tensor_dedup.memory_manager.server.main import Start, serve
from tensor_dedup.memory_manager.server.server import Options, Server

MIB = 1 << 20
DATA = managers.pattern(1, MIB)


class Raw:
    """A client that says what it likes."""

    def __init__(self, path: Path) -> None:
        self.socket = managers.raw_socket()
        self.socket.settimeout(managers.PATIENCE_S)
        self.socket.connect(str(path))

    def send(self, data: bytes, *descriptors: int) -> None:
        wire.send(self.socket, data, descriptors)

    def say(self, request: Request, *descriptors: int) -> Reply:
        self.send(codec.encode(request), *descriptors)
        return self.hear()

    def hear(self) -> Reply:
        datagram = wire.receive(self.socket)
        wire.close_all(datagram.descriptors)
        return codec.decode_reply(datagram.data)

    def refused(self, code: str) -> bool:
        """Was it told why, and then hung up on?"""
        reply = self.hear()
        assert isinstance(reply, Refused), reply
        assert reply.code == code, reply
        return wire.receive(self.socket).data == b""


@pytest.fixture
def raw(manager: managers.Manager) -> Iterator[Raw]:
    client = Raw(manager.socket)
    yield client
    client.socket.close()
    # Whatever it did, others are served, and nothing of it is left.
    with manager.client() as other:
        managers.build(other, "afterwards", DATA)
    managers.until(lambda: manager.overview().totals.clients == 1)


def test_garbage_is_refused(raw: Raw) -> None:
    raw.send(b"GET / HTTP/1.1\r\n\r\n")
    assert raw.refused("protocol")


def test_an_empty_message_ends_the_connection(raw: Raw) -> None:
    raw.send(b"")
    assert wire.receive(raw.socket).data == b""


def test_an_oversized_message_is_refused(raw: Raw) -> None:
    raw.send(codec.encode(Stop()) + bytes(MAX_MESSAGE + 1))
    assert raw.refused("protocol")


def test_another_version_is_refused_by_name(raw: Raw) -> None:
    raw.send(codec.MAGIC + b"\x63\x00" + b"anything")
    assert raw.refused("version")


def test_the_former_protocol_is_refused(raw: Raw) -> None:
    """Versions 2 to 4 of it were in use, under another magic."""
    raw.send(b"TD\x04\x00" + codec.encode(Hello("former"))[codec.HEADER_BYTES :])
    assert raw.refused("protocol")


def test_nothing_comes_before_hello(raw: Raw) -> None:
    raw.send(codec.encode(Status()))
    assert raw.refused("protocol")


def test_hello_is_said_once(raw: Raw) -> None:
    assert isinstance(raw.say(Hello("raw")), Welcome)
    raw.send(codec.encode(Hello("again")))
    assert raw.refused("protocol")


def test_unasked_descriptors_are_refused_and_closed(raw: Raw, manager: managers.Manager) -> None:
    assert isinstance(raw.say(Hello("raw")), Welcome)
    idle = managers.steady(manager.descriptors)
    raw.send(codec.encode(Status()), *[raw.socket.fileno()] * 5)
    assert raw.refused("protocol")
    managers.until(lambda: manager.descriptors() == idle - 2)  # its socket and its pidfd


def test_more_descriptors_than_are_read_are_refused_and_closed(
    raw: Raw, manager: managers.Manager
) -> None:
    assert isinstance(raw.say(Hello("raw")), Welcome)
    idle = managers.steady(manager.descriptors)
    raw.send(codec.encode(Status()), *[raw.socket.fileno()] * 250)
    assert raw.refused("protocol")
    managers.until(lambda: manager.descriptors() == idle - 2)


def test_ancillary_data_of_another_kind_is_no_descriptor(raw: Raw) -> None:
    assert isinstance(raw.say(Hello("raw")), Welcome)
    credentials = array.array("i", [os.getpid(), os.getuid(), os.getgid()])
    raw.socket.sendmsg(
        [codec.encode(Status())], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)]
    )
    assert type(raw.hear()).__name__ == "Totals"


def test_a_client_that_says_nothing_is_cut_off(folder: Path) -> None:
    settings = Settings(1 << 20, hello_timeout_s=0.5)
    server = Server(SocketFile(folder / "m.sock"), MemfdBackend(), settings, Options())
    thread = threading.Thread(target=server.run)
    thread.start()
    silent = Raw(folder / "m.sock")
    assert silent.refused("protocol")
    silent.socket.close()
    server.stop()
    thread.join()


def test_a_client_that_does_not_read_is_cut_off_and_holds_up_nobody(
    raw: Raw, manager: managers.Manager
) -> None:
    assert isinstance(raw.say(Hello("stalled")), Welcome)
    raw.socket.setblocking(False)
    message = codec.encode(LookupDigests(["0" * 64] * 1000))

    def cut_off() -> bool:
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                raw.send(message)
        with manager.client() as other:
            other.get(["meanwhile"])
        return "has not read" in manager.log.read_text()

    managers.until(cut_off)


@pytest.mark.parametrize("what", ["open", "pipe", "unsealed", "short", "writable file"])
def test_only_sealed_memory_is_taken_back(
    raw: Raw, manager: managers.Manager, folder: Path, what: str
) -> None:
    assert isinstance(raw.say(Hello("liar")), Welcome)
    reader, writer = os.pipe()
    sealed = MemfdBackend()
    slab = committed(sealed, 4096)
    if what == "short":
        sealed.seal(slab)
    file = os.open(folder / "tensor-dedup", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 4096)
    plain = os.memfd_create("tensor-dedup", os.MFD_CLOEXEC)
    os.ftruncate(plain, 4096)
    fd = {
        "open": plain,
        "pipe": reader,
        "unsealed": slab.fileno,
        "short": slab.fileno,
        "writable file": file,
    }[what]
    size = 8192 if what == "short" else 4096
    reply = raw.say(Offer(size, [DigestSpan(0, 4096, digest(bytes(4096)))]), fd)
    assert isinstance(reply, Refused)
    assert reply.code == "not_sealed"
    for each in (reader, writer, file, plain):
        os.close(each)


def test_what_is_offered_must_be_what_it_is_called(raw: Raw, manager: managers.Manager) -> None:
    assert isinstance(raw.say(Hello("liar")), Welcome)
    backend = MemfdBackend()
    slab = committed(backend, 4096)
    backend.seal(slab)
    reply = raw.say(Offer(4096, [DigestSpan(0, 4096, "a" * 64)]), slab.fileno)
    assert isinstance(reply, Refused)
    assert reply.code == "mismatch"
    assert manager.overview().totals.residents == 0


def reserved(client: Client, key: str = "layer") -> Put:
    put = client.reserve([key]).put
    assert put is not None
    return put


def test_bytes_that_are_not_what_was_announced_are_refused(manager: managers.Manager) -> None:
    with manager.client() as client:
        put = reserved(client)
        put.allocate([4096], [digest(b"something else")])
        with pytest.raises(RefusedError, match="announced") as caught:
            put.seal()
        assert caught.value.code == "mismatch"
        totals = manager.overview().totals
        assert (totals.residents, totals.charged, totals.builds) == (0, 0, 0)
        assert client.reserve(["layer"]).answers == {"layer": "granted"}


@pytest.mark.parametrize("size", [MIB + 1, 2**40, 2**63 - 1])
def test_a_record_that_has_more_of_a_tensor_than_there_is_counts_for_nothing(
    manager: managers.Manager, size: int
) -> None:
    """Numbers of clients are added up and sent: too large ones would end the manager."""
    data = [DATA, managers.pattern(2, MIB)]
    with manager.client() as client:
        with reserved(client) as put:
            put.allocate([MIB, MIB], [digest(each) for each in data])
            for index, each in enumerate(data):
                put.write(index, each)
            leases = put.seal()
            parts = [(0, 0, size), (0, size, size), (1, 0, MIB)]
            record = msgspec.msgpack.encode(("uint8", (2 * MIB,), (1,), digest(b""), parts))
            put.publish("layer", record, [each.digest for each in leases])
        overview = manager.overview()
        assert overview.totals.leaf_shared_bytes == 0
        assert [each.leased_bytes for each in overview.clients] == [2 * MIB]
        assert leases


def test_a_writer_cannot_seal_while_it_can_write_nor_write_once_it_is_sealed(
    manager: managers.Manager,
) -> None:
    with manager.client() as client:
        put = reserved(client)
        put.allocate([4096])
        kept = os.dup(put._fd)
        own = mmap.mmap(put.place[0], 4096)
        with pytest.raises(RefusedError) as caught:
            put.seal()
        assert caught.value.code == "still_writable"
        own.close()
        mapping = mmap.mmap(kept, 4096)
        with pytest.raises(RefusedError) as caught:
            put.seal()
        assert caught.value.code == "still_writable"
        mapping[:5] = b"final"
        mapping.close()
        [lease] = put.seal()
        with pytest.raises(PermissionError):
            os.pwrite(kept, b"later", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(kept, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(kept, 4096)
        assert managers.bytes_of(lease)[:5] == b"final"
        put.abandon()
        os.close(kept)


def test_a_slab_cannot_be_shrunk_under_those_who_read_it(manager: managers.Manager) -> None:
    with manager.client() as client:
        put = reserved(client)
        put.allocate([4096])
        with pytest.raises(PermissionError):
            os.ftruncate(put._fd, 0)
        put.abandon()


def test_without_descriptors_a_client_is_told_and_later_served(folder: Path) -> None:
    with managers.running(folder, limit=40) as manager:
        crowd: list[Raw] = []
        reply: Reply = Welcome(0, 0, "", False, 0.0)
        while isinstance(reply, Welcome):
            crowd.append(Raw(manager.socket))
            with contextlib.suppress(BrokenPipeError):  # it may be told before it has said a word
                crowd[-1].send(codec.encode(Hello("crowd")))
            reply = crowd[-1].hear()
            assert len(crowd) < 40
        assert isinstance(reply, Refused)
        assert reply.code == "crowded"
        assert type(crowd[0].say(Status())).__name__ == "Totals"  # those inside are served
        for each in crowd:
            each.socket.close()
        managers.until(lambda: _is_served(manager))


def limit_with_room(count: int) -> int:
    """The limit on descriptors that leaves this many, whatever a forked child inherited.

    The kernel goes by their numbers and a manager by how many are open; they have gaps.
    """
    used = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208
    free = (number for number in itertools.count() if number not in used)
    return max(1 + next(itertools.islice(free, count - 1, None)), len(used) + count)


def _is_served(manager: managers.Manager) -> bool:
    try:
        return manager.overview().totals.clients == 1
    except (RefusedError, ManagerGoneError):
        return False


def test_without_descriptors_a_client_gives_its_leases_back(manager: managers.Manager) -> None:
    with manager.client() as client:
        leases = [managers.build(client, f"k{n}", managers.pattern(n, 5000)) for n in range(8)]
        digests = [lease.digest for [lease] in leases]
        del leases
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
        # Descriptors are numbered from the lowest free one: leave room for a few.
        spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest + 2)]
        try:
            with (
                descriptor_limit(max(spare) + 3),
                pytest.raises(NoMemoryError, match="descriptors"),
            ):
                client.lease(digests)
        finally:
            for fd in spare:
                os.close(fd)
        managers.until(lambda: client.get(["none"]) and not manager.overview().totals.leases)


def test_another_user_is_refused_by_the_kernels_word(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with managers.running(folder) as manager:
        # As if every file permission had been given away.
        for place in (folder, *folder.parents[:-1]):
            place.chmod(place.stat().st_mode | stat.S_IXOTH)
        manager.socket.chmod(0o666)

        def visit(state: dict[str, object]) -> bool:
            os.setgid(65534)
            os.setuid(65534)
            return Raw(Path(str(state["path"]))).refused("forbidden")

        visitor = managers.Actor(manager.socket, visit)
        assert visitor.step() is True
        visitor.join()


def test_descriptors_in_flight_are_waited_for(folder: Path) -> None:
    """An unprivileged manager may not have more descriptors under way than it may have open."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    for place in (folder, *folder.parents[:-1]):
        place.chmod(place.stat().st_mode | stat.S_IXOTH)
    (folder / "own").mkdir(mode=0o700)
    os.chown(folder / "own", 65534, 65534)
    path = folder / "own" / "m.sock"

    # Room for what the manager keeps free for one message, and for received ones too, which are
    # closed a moment later, by another thread.
    limit = limit_with_room(320)
    questions = limit // 24 + 2

    def drop() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        os.setgid(65534)
        os.setuid(65534)

    def be_manager(state: dict[str, object]) -> None:
        drop()
        serve(Start(path, 64 * MIB, stall_timeout_s=30.0))

    def be_clients(state: dict[str, object]) -> list[bool]:
        drop()
        with connect(path, keep_connected=False) as client:
            leases = [managers.build(client, f"k{n}", bytes([n]) * 5000)[0] for n in range(24)]
            question = codec.encode(LookupDigests([lease.digest for lease in leases]))
            crowd = [Raw(path) for _ in range(questions)]
            for each in crowd:
                assert isinstance(each.say(Hello("in flight")), Welcome)
            for each in crowd:
                each.send(question)  # more descriptors in all than the limit, and nobody reads
            client.get(["others"])
            return [isinstance(each.hear(), FoundDigests) for each in crowd]

    manager = managers.Actor(path, be_manager)
    manager.begin()
    managers.until(path.exists)
    clients = managers.Actor(path, be_clients)
    assert clients.step() == [True] * questions
    clients.join()
    manager.signal(signal.SIGTERM)
    assert manager.result() is None
    manager.join()


def test_a_folder_that_is_open_to_others_is_refused_by_both_sides(folder: Path) -> None:
    with managers.running(folder) as manager:
        folder.chmod(0o750)
        with pytest.raises(UnsafeSocketError, match="0700"):
            connect(manager.socket)
        with pytest.raises(AssertionError, match="open to others"):
            managers.Manager(folder / "n.sock")
        folder.chmod(0o700)


def test_a_link_in_place_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "real")
    with managers.running(folder / "real"), pytest.raises(UnsafeSocketError, match="not a folder"):
        connect(folder / "link" / "m.sock")


def test_a_slab_for_which_there_is_no_descriptor_is_refused(folder: Path) -> None:
    with managers.running(folder, limit=32) as manager, manager.client() as client:
        kept: list[Put] = []
        code = ""
        while not code:
            put = reserved(client, f"k{len(kept)}")
            try:
                put.allocate([4096])
            except RefusedError as error:
                code = error.code
            kept.append(put)
            assert len(kept) < 40
        assert code == "no_memory"
        for put in kept:
            put.abandon()
        managers.build(client, "again", DATA)
