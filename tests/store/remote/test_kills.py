"""kill -9 of either side at every request, and then the same command again.

A client is a process that runs the command line, and is killed when the proxy has read one of its
requests, or has had it answered. A server is SeaweedFS or a registry, and is killed when it has
answered a request whose answer then is lost; it is started again on what it has left.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

import real_servers
import registries
from remotes import MemoryBucket
from s3_faults import FaultyProxy, MemoryS3, RealS3, Request, client
from stores import KIB, content, open_store, stored, three
from tensor_dedup.errors import StoreError
from tensor_dedup.store import Store
from tensor_dedup.store.remote import Remote
from tensor_dedup.store.remote.errors import (
    NoConditionsError,
    RemoteUnreachableError,
    UnknownRemoteNameError,
)

HOUR = 3600.0
URL = "s3://bucket"
# The command line, with limits so small that what is left can be counted in containers.
_PROGRAM = """
import sys
from importlib import import_module
for module, name, value in (
    ("layout", "CONTAINER_BYTES", 400_000),
    ("push", "_ASKED_BYTES", 1),
    ("pull", "_CONTAINER_BYTES", 1),
):
    setattr(import_module(f"tensor_dedup.store.remote.{module}"), name, value)
from tensor_dedup.cli import main
main(sys.argv[1:])
"""
VERBS = ("first push", "push", "pull", "delete", "gc")


class Killer:
    """Kills somebody when request number `at` is there, or has been answered."""

    def __init__(self, at: int, kill: Callable[[], None]) -> None:
        self._at, self._kill = at, kill
        self.struck = False

    def __call__(self, request: Request, number: int) -> None:
        if number == self._at:
            self.struck = True
            self._kill()
            raise ConnectionResetError(request.name)


class Kit:
    """A store, objects in memory behind a proxy, and the command line as a process."""

    def __init__(self, root: Path) -> None:
        self._root, self._numbers = root, iter(range(10**9))
        self.paths = three(root)
        self.full = open_store(root / "full")
        for name, path in self.paths.items():
            self.full.import_(path, name, compress="auto")
        self.bucket = MemoryBucket()
        self.proxy = FaultyProxy(MemoryS3(self.bucket))
        self._environment = {**os.environ, **real_servers.s3_environment(self.proxy.port)}
        self.full.push(Remote(self.bucket), "base")
        self.based = dict(self.bucket.objects)
        self.full.push(Remote(self.bucket), "tune")
        self.both = dict(self.bucket.objects)

    def store(self) -> Path:
        return self._root / f"other-{next(self._numbers)}"

    def start(self, verb: str, where: Path) -> subprocess.Popen[bytes]:
        words = {
            "first push": ["push", "base", URL, "--store", str(self.full.path)],
            "push": ["push", "tune", URL, "--store", str(self.full.path)],
            "pull": ["pull", URL, "tune", "--store", str(where)],
            "delete": ["remote", "delete", URL, "tune", "--yes"],
            "gc": ["remote", "gc", URL, "--yes", "--lease", "24"],
        }[verb]
        command = [sys.executable, "-c", _PROGRAM, *words]
        return subprocess.Popen(
            command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    def reset(self, verb: str) -> None:
        self.bucket.clock = 1_000_000.0
        self.bucket.objects = dict({"first push": {}, "push": self.based}.get(verb, self.both))
        if verb == "gc":
            Remote(self.bucket).delete("tune")
            self.bucket.clock += 25 * HOUR
            assert Remote(self.bucket).gc(24).condemn
            self.bucket.clock += 25 * HOUR

    def end(self, process: subprocess.Popen[bytes]) -> int:
        _, said = process.communicate(timeout=120)
        assert process.returncode in (0, 2, -signal.SIGKILL), said.decode()
        return process.returncode


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    made = Kit(tmp_path)
    yield made
    made.proxy.close()


@pytest.mark.parametrize(
    ("verb", "kills"),
    [
        ("push", 3),
        ("pull", 3),
        *(pytest.param(verb, 10_000, marks=pytest.mark.long) for verb in VERBS),
    ],
)
def test_a_client_is_killed_at_every_request(kit: Kit, verb: str, kills: int) -> None:
    kit.reset(verb)
    kit.proxy.arm()
    assert kit.end(kit.start(verb, kit.store())) == 0
    requests, sent, got = len(kit.proxy.requests), sum(kit.proxy.bodies), kit.proxy.answered
    for number in range(0, 2 * requests, -(-2 * requests // kills)):
        kit.reset(verb)
        before, where = {*kit.bucket.objects}, kit.store()
        started: list[subprocess.Popen[bytes]] = []
        killer = Killer(number // 2, lambda held=started: held[0].kill())  # type: ignore[misc]
        if number % 2:
            kit.proxy.arm(before=killer)
        else:
            kit.proxy.arm(after=killer)
        started.append(process := kit.start(verb, where))
        assert kit.end(process) == (-signal.SIGKILL if killer.struck else 0)
        assert_whole(Remote(kit.bucket), where, kit)
        landed = sum(
            len(kit.bucket.objects[key][0])
            for key in kit.bucket.objects.keys() - before
            if key.startswith("containers/")
        )
        held = sum(path.stat().st_size for path in (where / "containers").rglob("*.*"))
        kit.proxy.arm()
        again = kit.end(kit.start(verb, where))
        assert again == 0 or verb == "delete"
        # The price of the rest; a probe of a first push is one of it.
        assert sum(kit.proxy.bodies) <= sent - landed + 2 * KIB, number
        assert kit.proxy.answered <= got - 0.8 * held + 2 * KIB, number
        assert_whole(Remote(kit.bucket), where, kit)
        names = ["base"] if verb in ("first push", "delete", "gc") else ["base", "tune"]
        assert Remote(kit.bucket).names() == names


def assert_whole(remote: Remote, where: Path, kit: Kit) -> None:
    """Nobody sees a name before its pieces, there or here."""
    if remote.bucket.get("FORMAT", 1 << 12) is not None:
        found = remote.verify(full=True)
        assert not [fault for fault in found.faults if fault.affected], found.faults
    if where.exists():
        store = open_store(where)
        assert store.verify(full=True).fine
        for name in store.names():
            assert stored(store, name) == content(kit.paths[name])


@pytest.mark.long
@pytest.mark.parametrize("verb", VERBS)
def test_a_server_is_killed_at_every_request(tmp_path: Path, full: Store, verb: str) -> None:
    with real_servers.weed(tmp_path / "weed") as server:
        proxy = FaultyProxy(RealS3(server.port))
        number = 0
        while True:
            where = open_store(tmp_path / f"other-{number}")
            remote = Remote(client(proxy.port, f"case-{number}"))
            direct = Remote(client(server.port, f"case-{number}"))
            for name in {"first push": [], "push": ["base"]}.get(verb, ["base", "tune"]):
                full.push(direct, name)
            if verb == "gc":
                direct.delete("tune")

            def work(remote: Remote = remote, where: Store = where) -> None:
                done(verb, remote, full, where)

            killer = Killer(number, server.kill)
            proxy.arm(after=killer)
            with suppress(StoreError):
                work()
            if not killer.struck:
                assert number > (1 if verb == "delete" else 8)
                break
            server.start()
            wait_for(direct)
            proxy.arm()
            found = direct.verify(full=True) if direct.bucket.get("FORMAT", 4096) else None
            assert found is None or not [f for f in found.faults if f.affected], number
            with suppress(UnknownRemoteNameError) if verb == "delete" else nullcontext():
                sooner_or_later(work)
            found = direct.verify(full=True)
            assert found.fine, (number, found.faults)
            names = ["base"] if verb in ("first push", "delete", "gc") else ["base", "tune"]
            assert direct.names() == names
            if verb == "pull":
                assert stored(where, "tune") == content(tmp_path / "tune")
            number += 1
        proxy.close()


def sooner_or_later(work: Callable[[], object]) -> None:
    """Do it, again and again while a server that has just started refuses it.

    SeaweedFS keeps no conditions then, for a moment, which a first push finds.
    """
    for _ in range(20):
        with suppress(NoConditionsError, RemoteUnreachableError):
            work()
            return
        time.sleep(0.5)
    work()


def wait_for(remote: Remote) -> None:
    """Wait until what a server has kept can be read again, some time after it first answers."""
    for _ in range(600):
        with suppress(StoreError):
            for key in ("FORMAT", "refs/base", "catalog/HEAD"):
                remote.bucket.get(key, 1 << 20)
            return
        time.sleep(0.1)
    raise AssertionError("it does not come back")


def done(verb: str, remote: Remote, full: Store, where: Store) -> None:
    """Do what a verb says, in this process."""
    if verb == "pull":
        where.pull(remote, "tune")
    elif verb == "delete":
        remote.delete("tune")
    elif verb == "gc":
        remote.gc(0)
    else:
        full.push(remote, "base" if verb == "first push" else "tune")


@pytest.mark.parametrize("verb", ["push", "pull"])
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_a_registry_is_killed_at_every_request(
    tmp_path: Path, full: Store, verb: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("oras")
    monkeypatch.setattr("tensor_dedup.store.remote.registry._PAUSE_S", 0.001)
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    with registries.program(tmp_path / "registry") as server:
        proxy = FaultyProxy(RealS3(server.port))
        number = 0
        while True:
            where = open_store(tmp_path / f"other-{number}")
            url = f"oci://127.0.0.1:{proxy.port}/case-{number}/base:v1"
            proxy.arm()
            if verb == "pull":
                full.push(url, "base")

            def work(url: str = url, where: Store = where) -> None:
                full.push(url, "base") if verb == "push" else where.pull(url, "base")

            killer = Killer(number, server.kill)
            proxy.arm(after=killer)
            with suppress(StoreError):
                work()
            if not killer.struck:
                assert number > 2
                break
            server.start()
            proxy.arm()
            assert where.verify(full=True).fine
            work()
            got = open_store(tmp_path / f"check-{number}")
            got.pull(url, "base")
            assert stored(got, "base") == content(tmp_path / "base")
            assert verb == "push" or stored(where, "base") == content(tmp_path / "base")
            number += step
        proxy.close()
