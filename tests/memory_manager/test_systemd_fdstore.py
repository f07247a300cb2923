"""Tensors survive a restart under systemd, played here by the test."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager_runs import managers
from tensor_dedup.digest import digest
from tensor_dedup.memory_manager.client import connect
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.server.systemd_fdstore import watched

SIZE = 1 << 20
# What systemd does before it starts a service: descriptors from 3 on, and who they are for.
LAUNCHER = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
module = ["-m", "tensor_dedup.memory_manager.server"]
os.execv(sys.executable, [sys.executable, *module, *sys.argv[1:]])
"""


class Systemd:
    """Keeps the descriptors of one service."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "manager.log"
        self.room = 100  # FileDescriptorStoreMax=
        self.store: list[tuple[str, int]] = []
        self.said: list[str] = []
        self._acceptor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._acceptor.bind(str(folder / "notify"))
        self._acceptor.setblocking(False)
        self._service: subprocess.Popen[bytes] | None = None

    def listen(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._acceptor, 4096, 4)
            except BlockingIOError:
                return
            said = dict(line.split("=", 1) for line in data.decode().splitlines())
            self.said += said
            if "FDSTORE" in said and len(self.store) + len(fds) > self.room:
                for fd in fds:
                    os.close(fd)
            elif "FDSTORE" in said:
                self.store += [(said["FDNAME"], fd) for fd in fds]
            if "FDSTOREREMOVE" in said:
                for name, fd in [each for each in self.store if each[0] == said["FDNAME"]]:
                    self.store.remove((name, fd))
                    os.close(fd)

    def start(self, budget: int = 64 * SIZE) -> None:
        self.said.clear()
        names = ":".join(name for name, _ in self.store)
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(self.folder / "notify"),
            "FDSTORE": str(self.room),
            "LISTEN_FDS": str(len(self.store)),
            "LISTEN_FDNAMES": names,
        }
        # Out of the way of 3, 4, ..., where systemd puts them; whatever is free there.
        spare = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for _, fd in self.store]

        def arrange() -> None:
            for offset, fd in enumerate(spare):
                os.dup2(fd, 3 + offset)

        options = ["--socket", str(self.folder / "m.sock"), "--budget", str(budget)]
        with self.log.open("a") as log:
            self._service = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, *options],
                env=environment,
                pass_fds=range(3, 3 + len(self.store)),
                preexec_fn=arrange,
                stderr=log,
            )
        for fd in spare:
            os.close(fd)
        managers.until(self.ready)

    def ready(self) -> bool:
        self.listen()
        return "READY" in self.said

    def stop(self, number: int = signal.SIGTERM) -> None:
        assert self._service is not None
        self._service.send_signal(number)
        self._service.wait(timeout=10)
        self.listen()

    def close(self) -> None:
        if self._service is not None and self._service.poll() is None:
            self.stop(signal.SIGKILL)
        for _, fd in self.store:
            os.close(fd)
        self._acceptor.close()


def is_index(name: str) -> bool:
    return name.startswith("index-")


@pytest.fixture
def systemd(folder: Path) -> Iterator[Systemd]:
    played = Systemd(folder)
    yield played
    played.close()


def test_tensors_records_and_pins_survive_a_restart(systemd: Systemd, folder: Path) -> None:
    path = folder / "m.sock"
    first, second = managers.pattern(1, SIZE), managers.pattern(2, SIZE)
    systemd.start()
    with connect(path, keep_connected=False) as client, Admin(path) as admin:
        managers.build(client, "a", first, checkpoint="base")
        managers.build(client, "b", first, second, checkpoint="tuned")
        admin.pin("tuned")
    systemd.stop()
    assert [is_index(name) for name, _ in systemd.store] == [False, False, True]
    systemd.start()
    assert systemd.store == []  # taken out, or what is evicted later would never be free
    with connect(path, keep_connected=False) as client:
        managers.until(lambda: None not in client.get(["a", "b"]))
        [a, b] = client.get(["a", "b"])
        assert a is not None
        assert b is not None
        assert managers.bytes_of(a.leases[0]) == first
        assert [managers.bytes_of(lease) for lease in b.leases] == [first, second]
        with Admin(path) as admin:
            overview = admin.overview()
    assert overview.totals.pins == ["tuned"]
    assert {row.name: row.residents for row in overview.checkpoints} == {"base": 1, "tuned": 2}
    assert overview.totals.builds == overview.totals.lingering_bytes == 0


def test_a_record_of_many_keys_is_handed_over_once(systemd: Systemd, folder: Path) -> None:
    path = folder / "m.sock"
    record, keys = b"r" * 10_000, [f"key-{number}" for number in range(50)]
    systemd.start()
    with connect(path, keep_connected=False) as client:
        [lease] = managers.build(client, "a", managers.pattern(1, SIZE))
        assert client.publish(keys, record, [lease.digest]) == len(keys)
    systemd.stop()
    [index] = [fd for name, fd in systemd.store if is_index(name)]
    assert os.fstat(index).st_size < 2 * len(record)
    systemd.start()
    with connect(path, keep_connected=False) as client:
        managers.until(lambda: None not in client.get(keys))
        assert {each.record for each in client.get(keys) if each is not None} == {record}


def test_what_systemd_gives_back_is_not_believed(systemd: Systemd, folder: Path) -> None:
    path = folder / "m.sock"
    data = managers.pattern(3, SIZE)
    systemd.start()
    with connect(path, keep_connected=False) as client:
        managers.build(client, "a", data)
    systemd.stop()
    forged = os.memfd_create("tensor-dedup")
    os.pwrite(forged, bytes(SIZE), 0)
    for name, fd in systemd.store:
        if not is_index(name):
            os.dup2(forged, fd)  # not sealed, and other bytes
    os.close(forged)
    systemd.start()
    with connect(path, keep_connected=False) as client:
        assert client.get(["a"]) == [None]
        assert client.lease([digest(data)]) == [None]
        managers.build(client, "a", data)


def test_what_an_earlier_manager_has_left_is_no_later_managers(
    systemd: Systemd, folder: Path
) -> None:
    path = folder / "m.sock"
    left = []
    for key, data in (("a", b"a" * SIZE), ("b", b"b" * SIZE)):
        systemd.start()
        with connect(path, keep_connected=False) as client:
            managers.build(client, key, data)
        systemd.stop()
        left += systemd.store
        systemd.store = []
    assert len({name for name, _ in left}) == 4
    # systemd never heard that the first slab was taken out, and lists it before the other.
    systemd.store = [each for each in left if each != left[1]]
    os.close(left[1][1])
    systemd.start()
    with connect(path, keep_connected=False) as client:
        managers.until(lambda: client.get(["b"]) != [None])
        [found] = client.get(["b"])
        assert found is not None
        assert managers.bytes_of(found.leases[0]) == b"b" * SIZE
        assert client.get(["a"]) == [None]


def test_an_index_under_another_generations_name_is_an_empty_one(
    systemd: Systemd, folder: Path
) -> None:
    path = folder / "m.sock"
    systemd.start()
    with connect(path, keep_connected=False) as client:
        managers.build(client, "a", b"tensor")
    systemd.stop()
    systemd.store = [(name[:-1] + "x", fd) for name, fd in systemd.store]
    systemd.start()
    with Admin(path) as admin:
        assert admin.totals().residents == 0


def test_what_does_not_fit_is_left(systemd: Systemd, folder: Path) -> None:
    path = folder / "m.sock"
    systemd.start()
    with connect(path, keep_connected=False) as client:
        managers.build(client, "a", bytes(SIZE) + b"a")
        managers.build(client, "b", bytes(SIZE) + b"b")
    systemd.stop()
    systemd.start(budget=2 * SIZE)
    with Admin(path) as admin:
        managers.until(lambda: admin.totals().residents == 1)
        assert admin.totals().charged <= 2 * SIZE


def test_a_damaged_index_is_an_empty_one(systemd: Systemd, folder: Path) -> None:
    systemd.start()
    with connect(folder / "m.sock", keep_connected=False) as client:
        managers.build(client, "a", b"tensor")
    systemd.stop()
    for name, fd in systemd.store:
        if is_index(name):
            os.pwrite(fd, b"garbage", 0)
    systemd.start()
    with Admin(folder / "m.sock") as admin:
        assert admin.totals().residents == 0


def test_an_index_before_version_1_is_an_empty_one_and_the_log_says_so(
    systemd: Systemd, folder: Path
) -> None:
    path, data = folder / "m.sock", managers.pattern(1, SIZE)
    systemd.start()
    with connect(path, keep_connected=False) as client:
        managers.build(client, "a", data)
    systemd.stop()
    [(name, fd)] = [each for each in systemd.store if is_index(each[0])]
    index = os.pread(fd, 1 << 20, 0)
    assert index.startswith(b"TMHO\x01\0\0\0")
    former = index[8:]  # it was the map alone
    os.ftruncate(fd, 0)
    os.pwrite(fd, former, 0)
    systemd.start()
    assert f"{name} is no index of this version" in systemd.log.read_text()
    assert systemd.store == []
    with connect(path, keep_connected=False) as client:
        assert client.get(["a"]) == [None]
        managers.build(client, "a", data)


def test_what_systemd_has_no_room_for_is_left_and_never_the_index(
    systemd: Systemd, folder: Path
) -> None:
    path = folder / "m.sock"
    systemd.room = 3
    systemd.start()
    with connect(path, keep_connected=False) as client, Admin(path) as admin:
        for number in range(5):
            managers.build(client, f"key-{number}", managers.pattern(number, SIZE), checkpoint="m")
        admin.pin(digest(managers.pattern(1, SIZE)))
    systemd.stop()
    assert len(systemd.store) == 3
    systemd.start()
    with connect(path, keep_connected=False) as client:
        managers.until(lambda: client.get(["key-4"]) != [None])
        found = client.get([f"key-{number}" for number in range(5)])
    # The pinned one, and the one used last.
    assert [layer is not None for layer in found] == [False, True, False, False, True]


def test_the_event_loop_feeds_the_watchdog(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    systemd.start()
    assert watched()

    def fed() -> bool:
        systemd.listen()
        return systemd.said.count("WATCHDOG") > 1

    managers.until(fed)
    systemd.stop()
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert not watched()  # it is another process that is watched
    monkeypatch.delenv("WATCHDOG_USEC")
    monkeypatch.delenv("WATCHDOG_PID")
    assert not watched()
