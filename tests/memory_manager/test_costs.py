"""What a client, or any user of the machine, can cost the others: a share, and never all."""

import contextlib
import errno
import gc
import os
import re
import signal
import socket
import struct
import threading
import time
import tracemalloc
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manager_runs import managers
from manager_runs.manager_fakes import FakeBackend, PlayedClients
from store_runs.contracts import committed
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.memory_manager.backends.base import Capabilities, Memory, Spans
from tensor_dedup.memory_manager.backends.memfd import MemfdBackend
from tensor_dedup.memory_manager.client import Lease, connect
from tensor_dedup.memory_manager.core import Settings
from tensor_dedup.memory_manager.core.effects import (
    AllocateSlab,
    CancelJob,
    ReclaimSlab,
    SealAndHash,
)
from tensor_dedup.memory_manager.errors import ManagerGoneError, NoMemoryError, RefusedError
from tensor_dedup.memory_manager.protocol import codec, wire
from tensor_dedup.memory_manager.protocol.layout import PAGE
from tensor_dedup.memory_manager.protocol.messages import (
    Abandon,
    Allocate,
    DigestSpan,
    Done,
    Hello,
    LookupDigests,
    Offer,
    Publish,
    PutPiece,
    Refused,
    Reply,
    Request,
    Reserve,
    Reserved,
    Seal,
    StandBy,
    Status,
    Welcome,
)
from tensor_dedup.memory_manager.server.acceptor import SocketFile
from tensor_dedup.memory_manager.server.descriptor_closer import DescriptorCloser
from tensor_dedup.memory_manager.server.main import Start, serve
from tensor_dedup.memory_manager.server.server import Options, Server
from tensor_dedup.memory_manager.server.slab_jobs import Outcome, SlabJobs

MIB = 1 << 20
DATA = managers.pattern(1, 10_000)


class Speaker:
    """A client that sends what it likes, and descriptors with it."""

    def __init__(self, path: Path) -> None:
        self.socket = managers.raw_socket()
        self.socket.settimeout(managers.PATIENCE_S)
        self.socket.connect(str(path))
        assert isinstance(self.ask(Hello("speaker")), Welcome)

    def send(self, request: Request, *descriptors: int) -> None:
        wire.send(self.socket, codec.encode(request), descriptors)

    def ask(self, request: Request, *descriptors: int) -> Reply:
        self.send(request, *descriptors)
        return self.hear()

    def hear(self) -> Reply:
        datagram = wire.receive(self.socket)
        wire.close_all(datagram.descriptors)
        return codec.decode_reply(datagram.data)


@pytest.fixture
def speaker(manager: managers.Manager) -> Iterator[Speaker]:
    client = Speaker(manager.socket)
    yield client
    client.socket.close()


# Metrics, threads.


def metrics_address(manager: managers.Manager) -> tuple[str, int]:
    pattern = re.compile(r"metrics=http://([\d.]+):(\d+)/")
    managers.until(lambda: pattern.search(manager.log.read_text()))
    [(host, port)] = pattern.findall(manager.log.read_text())
    return host, int(port)


class Impatient(managers.Manager):
    """Hangs up on who says nothing to its metrics sooner than others do."""

    command = (
        "-c",
        "from tensor_dedup.memory_manager.server import __main__, metrics\n"
        "metrics._PATIENCE_S = 2.0\n"
        "raise SystemExit(__main__.main())",
    )


def test_silent_connections_to_the_metrics_cost_no_thread_and_few_descriptors(
    folder: Path,
) -> None:
    running = managers.running(folder, "--metrics", "0", kind=Impatient)
    with running as manager, contextlib.ExitStack() as silent:
        address = metrics_address(manager)
        threads, idle = manager.threads(), managers.steady(manager.descriptors)
        connections = [
            silent.enter_context(socket.create_connection(address, managers.PATIENCE_S))
            for _ in range(300)
        ]
        managers.until(lambda: manager.descriptors() > idle)
        assert manager.threads() == threads
        assert managers.steady(manager.descriptors) <= idle + 80
        # Who asks is answered all the same, and the silent ones are hung up on.
        page = urllib.request.urlopen(f"http://{address[0]}:{address[1]}/metrics").read()
        assert b"tensor_dedup_charged_bytes" in page
        for connection in connections:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
        managers.until(lambda: manager.descriptors() <= idle)
        assert manager.end() == 0


@pytest.mark.parametrize(
    "text",
    [b"POST / HTTP/1.1\r\n\r\n", b"x" * 100_000, b"GET / HTTP/1.1\r\n"],
    ids=["another verb", "no end", "half"],
)
def test_whatever_the_metrics_are_asked_they_go_on(folder: Path, text: bytes) -> None:
    with managers.running(folder, "--metrics", "0", kind=Impatient) as manager:
        address = metrics_address(manager)
        with (
            socket.create_connection(address, managers.PATIENCE_S) as connection,
            contextlib.suppress(ConnectionResetError, BrokenPipeError),
        ):
            connection.sendall(text)
            assert connection.recv(1000)[:12] in (b"", b"HTTP/1.1 405")
        page = urllib.request.urlopen(f"http://{address[0]}:{address[1]}/metrics").read()
        assert b"tensor_dedup_bookkeeping_bytes" in page


@contextlib.contextmanager
def serving(
    folder: Path, backend: Any = None, settings: Settings | None = None
) -> Iterator[Server]:
    """A server on a thread of this process."""
    server = Server(
        SocketFile(folder / "m.sock"),
        backend or MemfdBackend(),
        settings or Settings(64 * MIB),
        Options(),
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def no_threads(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_without_threads_the_manager_serves_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder):
        monkeypatch.setattr(threading.Thread, "start", no_threads)
        with pytest.raises(RuntimeError, match="new thread"):
            threading.Thread(target=print).start()
        with connect(folder / "m.sock", keep_connected=False) as client:
            datas = [managers.pattern(number, MIB) for number in range(20)]  # hashed here at once
            leases = managers.build(client, "layer", *datas)
            assert [managers.bytes_of(lease) for lease in leases] == datas
        monkeypatch.undo()


def test_a_manager_that_gets_no_thread_says_so_before_it_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_threads)
    backend = MemfdBackend()
    with pytest.raises(NoMemoryError, match="ulimit -u"):
        serve(Start(folder / "m.sock", MIB), make=lambda _: backend)
    monkeypatch.undo()
    assert not (folder / "m.sock").exists()


def test_with_fewer_threads_than_it_wants_the_manager_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def few(thread: threading.Thread) -> None:
        if len(started) == 3:  # two that close, and one that works
            no_threads()
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few)
    server = Server(SocketFile(folder / "m.sock"), MemfdBackend(), Settings(64 * MIB), Options())
    monkeypatch.undo()
    thread = threading.Thread(target=server.run)
    thread.start()
    with connect(folder / "m.sock", keep_connected=False) as client:
        managers.build(client, "layer", DATA, DATA[:-1])
    server.stop()
    thread.join()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_while_nobody_can_be_accepted_the_loop_rests(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with serving(folder) as server:
        client = connect(folder / "m.sock", keep_connected=False)
        tries = []

        def refuse() -> None:
            tries.append(number)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(server._acceptor, "accept", refuse)
        monkeypatch.setattr(server._acceptor, "turn_away", lambda: False)
        with contextlib.closing(managers.raw_socket()) as waiting:
            waiting.connect(str(folder / "m.sock"))
            managers.until(lambda: tries)
            before = len(tries)
            for key in range(200):  # those inside are served meanwhile
                assert client.get([f"{key}"]) == [None]
            assert len(tries) - before < 50
            monkeypatch.undo()
            waiting.settimeout(managers.PATIENCE_S)
            wire.send(waiting, codec.encode(Hello("later")))
            assert isinstance(codec.decode_reply(wire.receive(waiting).data), Welcome)
        client.close()


# Work.


def test_what_is_offered_may_not_overlap(speaker: Speaker, manager: managers.Manager) -> None:
    slab = committed(MemfdBackend(), 16 * MIB)
    MemfdBackend().seal(slab)
    spans = [DigestSpan(at, 15 * MIB, digest(bytes(15 * MIB))) for at in (0, 64, 64)]
    reply = speaker.ask(Offer(16 * MIB, spans), slab.fileno)
    assert isinstance(reply, Refused)
    assert (reply.code, "overlap" in reply.text) == ("not_sealed", True)
    assert manager.overview().totals.charged == 0
    # In any order, as long as they do not.
    half = digest(bytes(8 * MIB))
    apart = [DigestSpan(8 * MIB, 8 * MIB, half), DigestSpan(0, 8 * MIB, half)]
    assert not isinstance(speaker.ask(Offer(16 * MIB, apart), slab.fileno), Refused)


def test_a_slab_of_holes_is_no_slab(speaker: Speaker) -> None:
    slab = MemfdBackend().reserve(64 * MIB)
    MemfdBackend().seal(slab)
    assert os.fstat(slab.fileno).st_blocks == 0
    reply = speaker.ask(Offer(64 * MIB, [DigestSpan(0, 64 * MIB, "0" * 64)]), slab.fileno)
    assert isinstance(reply, Refused)
    assert (reply.code, "holes" in reply.text) == ("not_sealed", True)
    assert os.fstat(slab.fileno).st_blocks == 0  # nor was it filled to look at it


class Slow(FakeBackend):
    """Hashes as it is told, and counts how often."""

    capabilities = Capabilities("fake", hardware_readonly=False, hashes_itself=True)  # type: ignore[misc]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.hashed: list[int] = []  # how large the slab was, for each step

    def leaves(self, memory: Memory, spans: Spans) -> list[list[bytes]]:
        self.begun.set()
        assert self.gate.wait(managers.PATIENCE_S)
        time.sleep(0.001)  # as hashing lets other threads of Python run
        self.hashed.append(memory.nbytes)
        return [[bytes(32)] * -(-nbytes // LEAF_BYTES) for _, nbytes in spans]


@pytest.fixture
def slow(tmp_path: Path) -> Slow:
    return Slow(tmp_path)


@pytest.fixture
def jobs(slow: Slow) -> Iterator[SlabJobs]:
    closer = DescriptorCloser()
    jobs = SlabJobs(slow, closer)
    yield jobs
    slow.gate.set()
    jobs.close()
    closer.end()


def next_outcomes(jobs: SlabJobs) -> list[Outcome]:
    found: list[Outcome] = []

    def any_() -> list[Outcome]:
        found.extend(jobs.outcomes())
        return found

    managers.until(any_)
    return found


LARGE, SMALL = 2000 * LEAF_BYTES, 1000


def test_a_large_job_holds_up_another_client_for_a_step(slow: Slow, jobs: SlabJobs) -> None:
    greedy, modest = 1, 2
    for slab in range(10, 20):
        jobs.seal_and_hash(slab, greedy, slow.reserve(LARGE), [(0, LARGE, "")])
    assert slow.begun.wait(managers.PATIENCE_S)
    jobs.seal_and_hash(5, modest, slow.reserve(SMALL), [(0, SMALL, "")])
    slow.gate.set()
    [first, *_] = next_outcomes(jobs)
    assert (first.slab, first.failure) == (5, None)
    # One step at each thread when it came, and the turns of both since.
    assert slow.hashed.index(SMALL) <= 4 * len(jobs._threads)


def test_every_client_has_its_turn_however_many_jobs_another_has(
    slow: Slow, jobs: SlabJobs
) -> None:
    for slab in range(100, 300):
        jobs.seal_and_hash(slab, 1, slow.reserve(SMALL + 1), [(0, SMALL, "")])
    for slab in range(10):
        jobs.seal_and_hash(slab, 2 + slab, slow.reserve(SMALL), [(0, SMALL, "")])
    slow.gate.set()
    done: list[Outcome] = []

    def all_done() -> bool:
        done.extend(jobs.outcomes())
        return len(done) == 210

    managers.until(all_done)
    last = max(place for place, outcome in enumerate(done) if outcome.slab < 10)
    assert last < 105  # and not behind the 200


def test_the_job_of_who_has_gone_ends_between_two_steps(slow: Slow, jobs: SlabJobs) -> None:
    jobs.seal_and_hash(10, 1, slow.reserve(LARGE), [(0, LARGE, "")])
    assert slow.begun.wait(managers.PATIENCE_S)
    jobs.cancel(10)
    slow.gate.set()
    [outcome] = next_outcomes(jobs)
    assert outcome.failure is not None
    assert outcome.failure[0] == "stale_put"
    assert len(slow.hashed) <= len(jobs._threads)


@pytest.mark.parametrize("how", ["offer", "allocate", "seal", "abandon"])
def test_who_goes_takes_its_work_along(how: str) -> None:
    played = PlayedClients()
    client = played.client()
    job: AllocateSlab | SealAndHash | ReclaimSlab
    if how == "offer":
        spans = [DigestSpan(0, PAGE, "0" * 64)]
        effects = played.ask(client, Offer(PAGE, spans))
        job = next(e for e in effects if isinstance(e, ReclaimSlab))
    else:
        put = played.reply(client, Reserve(["key"])).put
        effects = played.ask(client, Allocate(put, [PutPiece(PAGE)]))
        job = next(e for e in effects if isinstance(e, AllocateSlab))
        if how == "seal":
            played.core.allocated(0.0, job.slab)
            effects = played.ask(client, Seal(put))
            job = next(e for e in effects if isinstance(e, SealAndHash))
    assert job.process == client
    if how == "abandon":
        effects = played.ask(client, Abandon(put))
    else:
        effects = list(played.core.disconnected(1.0, client))
    assert CancelJob(job.slab) in effects
    done = played.core.allocated if isinstance(job, AllocateSlab) else played.core.hashed
    done(1.0, job.slab, ("stale_put", "gone"))
    played.core.ended(2.0, client)
    assert played.core.state.ledger.slabs == {}
    assert played.core.state.ledger.charged == 0


# Descriptors that clients send.


def lingering() -> tuple[socket.socket, socket.socket, socket.socket]:
    """A connected socket whose close waits for hours: its other end reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 10_000))
    return ours, theirs, ours.dup()


def test_the_premise_closing_it_waits() -> None:
    ours, theirs, kept = lingering()
    kept.close()
    thread = threading.Thread(target=ours.close, daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    theirs.close()  # which resets the connection
    thread.join(managers.PATIENCE_S)
    assert not thread.is_alive()


def with_a_status(speaker: Speaker, fd: int) -> None:
    speaker.send(Status(), fd)


def with_an_offer(speaker: Speaker, fd: int) -> None:
    speaker.send(Offer(PAGE, [DigestSpan(0, PAGE, "0" * 64)]), fd)


def many_at_once(speaker: Speaker, fd: int) -> None:
    speaker.send(Status(), *[fd] * 250)


def in_garbage(speaker: Speaker, fd: int) -> None:
    wire.send(speaker.socket, b"garbage", [fd])


def behind_garbage(speaker: Speaker, fd: int) -> None:
    """In messages that nobody reads, because of the first."""
    wire.send(speaker.socket, b"garbage")
    for text in (b"", b"more"):
        wire.send(speaker.socket, text, [fd])


def in_a_message_that_is_too_large(speaker: Speaker, fd: int) -> None:
    wire.send(speaker.socket, bytes(150_000), [fd])


@pytest.mark.parametrize(
    "send",
    [
        with_a_status,
        with_an_offer,
        many_at_once,
        in_garbage,
        behind_garbage,
        in_a_message_that_is_too_large,
    ],
)
def test_a_descriptor_that_blocks_when_it_is_closed_holds_up_nobody(
    manager: managers.Manager, send: Callable[[Speaker, int], None]
) -> None:
    with manager.client() as other:
        for number in range(3):
            speaker = Speaker(manager.socket)
            ours, theirs, kept = lingering()
            ours.close()
            os.kill(manager.pid, signal.SIGSTOP)
            send(speaker, kept.fileno())
            kept.close()  # from now on the manager has the last one
            os.kill(manager.pid, signal.SIGCONT)
            managers.build(other, f"layer-{number}", DATA)
            speaker.socket.close()
            managers.build(other, f"after-{number}", DATA)
            theirs.close()
        assert other.get(["none"]) == [None]


def test_a_closer_that_is_stuck_costs_no_slab_and_no_client(folder: Path) -> None:
    with serving(folder) as server:
        stuck, free = threading.Event(), threading.Event()

        def block() -> None:
            stuck.set()
            assert free.wait(managers.PATIENCE_S)

        close = os.close
        reader, writer = os.pipe()

        def closing(fd: int) -> None:
            if threading.current_thread().name.startswith("tensor-dedup-close"):
                block()
            close(fd)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "close", closing)
            speaker = Speaker(folder / "m.sock")
            speaker.send(Status(), reader)
            assert stuck.wait(managers.PATIENCE_S)
            for number in range(3):
                with connect(folder / "m.sock", keep_connected=False) as client:
                    managers.build(client, f"layer-{number}", DATA)
            assert server._closer.pending == 1
            free.set()
            managers.until(lambda: server._closer.pending == 0)
        speaker.socket.close()
        close(reader)
        close(writer)


def test_slabs_are_freed_by_nobody_who_is_waited_for(folder: Path) -> None:
    """Freeing a gigabyte takes a third of a second; evicting and closing only drop it."""
    by = set[str]()
    close = os.close

    def closing(fd: int) -> None:
        with contextlib.suppress(OSError):
            if "memfd:tensor-dedup" in str(Path(f"/proc/self/fd/{fd}").readlink()):
                by.add(threading.current_thread().name.rpartition("-")[0])
        close(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "close", closing)
        with (
            serving(folder, settings=Settings(4 * MIB)) as server,
            connect(folder / "m.sock", keep_connected=False) as client,
        ):
            for number in range(8):
                managers.build(client, f"{number}", managers.pattern(number, MIB))
            managers.until(lambda: server._core.state.ledger.evicted_bytes >= 4 * MIB)
            managers.until(lambda: "tensor-dedup-free" in by)
            # Of this process's client, which holds leases of its own, there are other threads.
            assert by <= {"tensor-dedup-free", ""}


# Descriptors of slabs.


def test_for_want_of_descriptors_unused_slabs_go(folder: Path) -> None:
    with managers.running(folder, limit=64) as manager, manager.client() as client:
        used = managers.build(client, "used", managers.pattern(1, PAGE))
        for number in range(150):
            managers.build(client, f"layer-{number}", managers.pattern(2 + number, PAGE))
        totals = manager.overview().totals
        assert totals.refusals == 0
        assert 20 < totals.residents < 64
        # The least recently used ones, and nothing that is in use.
        assert client.get(["layer-0", "layer-149"])[0] is None
        assert client.get(["layer-149", "used"]) != [None, None]
        assert managers.bytes_of(used[0]) == managers.pattern(1, PAGE)


def test_while_slabs_fill_what_may_be_open_clients_come_in(folder: Path) -> None:
    with managers.running(folder, limit=64) as manager, contextlib.ExitStack() as crowd:
        with manager.client() as client:
            for number in range(100):
                managers.build(client, f"layer-{number}", managers.pattern(number, PAGE))
        managers.until(lambda: manager.overview().totals.leases == 0)
        slabs = manager.overview().totals.slabs
        for _ in range(6):
            crowd.enter_context(manager.client())
        totals = manager.overview().totals
        assert (totals.clients, totals.refusals) == (7, 0)
        assert totals.slabs < slabs


def test_slabs_in_use_are_not_evicted_for_descriptors(folder: Path) -> None:
    with managers.running(folder, limit=64) as manager, manager.client() as client:
        kept: list[Lease] = []
        refused: RefusedError | None = None
        while refused is None:
            try:
                kept += managers.build(
                    client, f"{len(kept)}", managers.pattern(len(kept) + 1, PAGE)
                )
            except RefusedError as error:
                refused = error
            assert len(kept) < 64
        assert refused.code == "no_memory"
        assert "ulimit -n" in refused.message
        assert manager.overview().totals.residents == len(kept)


def test_descriptors_that_others_have_taken_are_made_up_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole machine may be at its limit (ENFILE), whatever this process has counted."""
    with (
        serving(folder, backend=Scarce(slabs=5)) as server,
        connect(folder / "m.sock", keep_connected=False) as client,
    ):
        for number in range(30):
            managers.build(client, f"{number}", managers.pattern(number + 1, PAGE))
        assert server._core.state.counters["refusals"] == 0


class Scarce(MemfdBackend):
    """Has descriptors for a few slabs only. `refusing` is called before it refuses one."""

    def __init__(self, slabs: int) -> None:
        self.slabs = slabs
        self.living: list[Any] = []
        self.refusing: Callable[[], object] = lambda: None

    def reserve(self, nbytes: int) -> Any:
        self.living = [each for each in self.living if each() is not None]
        if len(self.living) >= self.slabs:
            self.refusing()
            raise NoMemoryError("no descriptor", errno=errno.ENFILE)
        slab = super().reserve(nbytes)
        self.living.append(weakref.ref(slab))
        return slab


@pytest.mark.parametrize("freed", ["before the refusal is known", "after it"])
def test_a_descriptor_that_is_about_to_be_free_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, freed: str
) -> None:
    """Slabs are freed on a thread, which may be behind."""
    backend, refusing, again = Scarce(slabs=1), threading.Event(), threading.Event()
    with (
        serving(folder, backend=backend, settings=Settings(3 * MIB // 2)) as server,
        connect(folder / "m.sock", keep_connected=False) as client,
    ):
        managers.build(client, "old", managers.pattern(1, MIB))
        closer, later = server._closer, server._slabs._allocate_later

        def allocate_later(refused: Outcome) -> None:
            later(refused)
            again.set()

        def refuse() -> None:
            refusing.set()
            if freed != "after it":
                # Memory may be asked for a moment before the old slab is dropped.
                managers.until(lambda: backend.living[0]() is None and not closer.freeing)

        def hold_the_freer() -> None:
            (again if freed == "after it" else refusing).wait(30)

        backend.refusing = refuse
        monkeypatch.setattr(server._slabs, "_allocate_later", allocate_later)
        closer.afterwards(hold_the_freer)
        managers.build(client, "new", managers.pattern(2, MIB))
        assert refusing.is_set()
        assert again.is_set()
        assert server._core.state.counters["refusals"] == 0


def test_a_client_comes_in_by_a_descriptor_that_was_freed_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(folder) as server,
        connect(folder / "m.sock", keep_connected=False) as client,
    ):
        managers.build(client, "unused", managers.pattern(1, MIB))
        accept, refused = server._acceptor.accept, threading.Event()

        def refuse_once() -> object:
            if refused.is_set():
                return accept()
            refused.set()
            before = server._closer.freed
            server._closer.drop([object()])
            managers.until(lambda: server._closer.freed > before)
            raise OSError(errno.EMFILE, "no descriptor")

        monkeypatch.setattr(server._acceptor, "accept", refuse_once)
        with connect(folder / "m.sock", keep_connected=False) as other:
            assert refused.is_set()
            assert server._core.state.ledger.evicted_bytes == 0
            assert other.get(["unused"])[0] is not None


@pytest.mark.parametrize("waits", [False, True])
def test_nothing_is_allocated_later_for_a_client_that_has_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """It goes before its refusal is handled, or while another attempt waits for the freer."""
    backend, refusing, gone = Scarce(slabs=1), threading.Event(), threading.Event()
    committed: list[int] = []
    with (
        serving(folder, backend=backend) as server,
        connect(folder / "m.sock", keep_connected=False) as client,
    ):
        managers.build(client, "unused", managers.pattern(1, MIB))
        ledger = server._core.state.ledger
        other = connect(folder / "m.sock", keep_connected=False)

        def refuse() -> None:
            refusing.set()
            if not waits:
                assert gone.wait(60)

        def hold_the_freer() -> None:
            gone.wait(60)

        backend.refusing = refuse
        monkeypatch.setattr(backend, "commit", lambda *_: committed.append(1))
        if waits:
            server._closer.afterwards(hold_the_freer)
        put = other.reserve(["new"], "base").put
        assert put is not None
        data = managers.pattern(2, MIB)

        def ask() -> None:
            with contextlib.suppress(ManagerGoneError):
                put.allocate([MIB], [digest(data)])

        asking = threading.Thread(target=ask)
        asking.start()
        assert refusing.wait(60)
        if waits:
            managers.until(lambda: ledger.evicted_bytes > 0)
        link = other._connection._socket
        assert link is not None
        link.shutdown(socket.SHUT_RDWR)
        managers.until(lambda: len(server._clients._clients) == 1)
        gone.set()
        asking.join()
        managers.until(lambda: not server._slabs._asked and not server._slabs._jobs._jobs)
        assert committed == []
        assert (ledger.evicted_bytes > 0) == waits


# What the manager remembers.


def name(number: int) -> str:
    return f"{number:064x}"


def remembered(kind: str, played: PlayedClients, client: int) -> Callable[[int], object]:
    """A thing of which clients can make the manager remember as many as they like."""

    def look_up(number: int) -> object:
        some = [name(8 * (number % 64) + n) for n in range(8)]
        return played.ask(client, LookupDigests(some, f"{number:0128d}" if kind == "names" else ""))

    def stand_by(number: int) -> object:
        look_up(number)
        last = played.core.state.next_lease
        return played.ask(client, StandBy(list(range(last - 8, last))))

    def record(number: int) -> object:
        count = 128 if kind == "large records" else 1
        some = [name((number + n) % 512) for n in range(count)]
        return played.ask(client, Publish(0, f"{number:0100d}", b"r" * count, some))

    def marks(number: int) -> object:
        keys = [f"{number:010d}{n:070d}" for n in range(16)]
        return played.ask(client, Publish(0, f"{number}", bytes(128), [name(number % 512)], keys))

    def slab(number: int) -> object:
        count = {"tensors": 1024, "few tensors": 64, "one tensor": 1}[kind]
        digests = [name(100_000 + number * count + n) for n in range(count)]
        return played.ask(client, Abandon(played.build(client, f"{number}", digests)))

    def reserve(number: int) -> object:
        if number % 50 == 0:
            reserve.client = played.client()  # type: ignore[attr-defined]
        count = 256 if kind == "keys" else 1
        keys = [f"{number:010d}{n:090d}" for n in range(count)]
        return played.ask(reserve.client, Reserve(keys))  # type: ignore[attr-defined]

    return {
        "leases": look_up,
        "leases of who sleeps": stand_by,
        "names": look_up,
        "records": record,
        "large records": record,
        "marks": marks,
        "keys": reserve,
        "one key": reserve,
    }.get(kind, slab)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("tensors", 15),
        ("few tensors", 150),
        ("one tensor", 700),
        ("leases", 1000),
        ("leases of who sleeps", 1000),
        ("names", 1000),
        ("records", 1000),
        ("large records", 100),
        ("marks", 100),
        ("keys", 50),
        ("one key", 1000),
    ],
)
def test_what_the_manager_remembers_is_charged(kind: str, count: int) -> None:
    played = PlayedClients()
    client = played.client()
    put = played.build(client, "some", [name(n) for n in range(512)])
    played.ask(client, LookupDigests([name(n) for n in range(512)]))
    played.ask(client, Abandon(put))
    do = remembered(kind, played, client)
    tracemalloc.start()
    try:
        gc.collect()
        before, charged = tracemalloc.get_traced_memory()[0], played.core.state.ledger.bookkeeping
        for number in range(count):
            do(number)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
        charged = played.core.state.ledger.bookkeeping - charged
    finally:
        tracemalloc.stop()
    assert taken > 100_000  # it was remembered
    assert taken <= charged <= 6 * taken
    for each in list(played.core.state.connections):
        played.core.disconnected(1.0, each)
        played.core.ended(1.0, each)
    for slab in list(played.core.state.ledger.slabs.values()):
        played.core.state.ledger.evict(slab)
    played.core.tick(2.0)
    assert played.core.state.ledger.charged == 0


def test_tiny_tensors_fill_the_budget_with_what_they_take() -> None:
    played = PlayedClients(Settings(4 * MIB))
    client = played.client()
    for number in range(200):
        digests = [name(number * 64 + n) for n in range(64)]
        played.ask(client, Abandon(played.build(client, f"{number}", digests)))
    ledger = played.core.state.ledger
    assert ledger.charged <= 4 * MIB
    assert ledger.evicted_bytes > 0
    assert len(ledger.residents) * 700 < 4 * MIB


def test_what_is_remembered_has_a_limit_and_others_still_borrow() -> None:
    played = PlayedClients(Settings(1 << 20))
    greedy, modest = played.client(), played.client()
    put = played.build(modest, "shared", [name(n) for n in range(64)])
    played.ask(modest, LookupDigests([name(n) for n in range(64)]))
    codes = set[str]()
    while not codes:
        for number in range(60):
            reply = played.reply(greedy, Reserve([f"{greedy}.{number}.{n}" for n in range(256)]))
            if isinstance(reply, Refused):
                codes.add(reply.code)
        greedy = played.client()
        assert greedy < 100
    assert codes == {"limit"}
    for each in range(1, greedy + 1):
        if each != modest:
            played.core.disconnected(1.0, each)
    assert isinstance(played.reply(modest, Reserve(["own"])), Reserved)
    played.ask(modest, Abandon(put))


def test_further_keys_of_a_layer_never_cost_its_first() -> None:
    """Where no more can be remembered, a layer has fewer of them, and other records go."""
    played = PlayedClients(Settings(1 << 20))
    client = played.client()
    played.build(client, "shared", [name(1)])
    played.ask(client, Publish(0, "old", bytes(20_000), [name(1)]))
    ledger = played.core.state.ledger
    while ledger.may_remember(40_000):
        reply = played.reply(client, Reserve([f"{ledger.remembered}"]))
        if isinstance(reply, Refused):
            client = played.client()
    played.ask(client, LookupDigests([name(1)]))
    also = [f"mark {n}".replace(" ", "-") for n in range(256)]
    published = played.reply(client, Publish(0, "layer", b"record", [name(1)], also))
    records = played.core.state.records
    assert isinstance(published, Done)
    assert 30 < published.count < 1 + len(also)
    assert published.count == len(records)
    assert "layer" in records
    assert "old" not in records


def test_status_and_metrics_say_what_is_remembered(folder: Path) -> None:
    with managers.running(folder, "--metrics", "0") as manager, manager.client() as client:
        managers.build(client, "layer", *[bytes([n]) for n in range(64)])
        totals = manager.overview().totals
        assert totals.charged > PAGE + 64 * 700
        host, port = metrics_address(manager)

        def said() -> bool:
            page = urllib.request.urlopen(f"http://{host}:{port}/metrics").read().decode()
            found = re.search(r"^tensor_dedup_bookkeeping_bytes\S* (\S+)", page, re.MULTILINE)
            return found is not None and float(found[1]) > 64 * 700

        managers.until(said)


def test_a_client_that_names_many_checkpoints_is_logged_as_it_goes() -> None:
    played = PlayedClients()
    client = played.client()
    for number in range(200):
        put = played.build(client, f"{number}", [name(number)], name=f"checkpoint {number}")
        played.ask(client, Abandon(put))
    assert len(played.core.state.connections[client].tallies) <= 64
