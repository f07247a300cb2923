"""kill -9 of either side at every request, and then the same command again.

A client is a process that runs the command line, and is killed when the proxy has read one of its
requests, or has had it answered. A server is SeaweedFS or a registry, and is killed when it has
answered a request whose answer then is lost; it is started again on what it has left.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path, PurePath

import pytest

from processes import commands
from remote_runs import real_servers, registries
from remote_runs.remotes import MemoryBucket
from remote_runs.s3_faults import FaultyProxy, MemoryS3, RealS3, Request, client
from store_runs.stores import KIB, content, noise, open_store, safetensors, stored, three, u8, write
from tensor_dedup import Store
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote
from tensor_dedup.remote.buckets import ObjectStatus
from tensor_dedup.remote.errors import (
    NoConditionsError,
    RemoteBusyError,
    RemoteUnreachableError,
    UnknownRemoteNameError,
)
from tensor_dedup.store.errors import DamagedFileError
from tensor_dedup.store.format.tables import TAIL_BYTES, table_start

HOUR = 3600.0
URL = "s3://bucket"
# Limits so small that what is left can be counted in containers.
SMALL = (
    ("layout", "CONTAINER_BYTES", 400_000),
    ("push", "_ASKED_BYTES", 1),
    ("pull", "_CONTAINER_BYTES", 1),
    ("server_bucket", "_CHUNK_BYTES", 10_000),
)
CONSTANTS = [(f"tensor_dedup.remote.{module}", name, value) for module, name, value in SMALL]
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


class Victim:
    """A command that is to be killed, perhaps before it is known that it has started."""

    command: commands.Started | None = None

    def kill(self) -> None:
        while self.command is None:
            time.sleep(0.001)
        self.command.kill()


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

    def start(self, verb: str, where: Path) -> commands.Started:
        words = {
            "first push": ["push", "base", URL, "--store", str(self.full.path)],
            "push": ["push", "tune", URL, "--store", str(self.full.path)],
            "pull": ["pull", URL, "tune", "--store", str(where)],
            "delete": ["remote", "delete", URL, "tune", "--yes"],
            "gc": ["remote", "gc", URL, "--yes", "--lease", "24"],
        }[verb]
        return commands.start(*words, environ=self._environment, constants=CONSTANTS)

    def reset(self, verb: str) -> None:
        self.bucket.clock = 1_000_000.0
        self.bucket.objects = dict({"first push": {}, "push": self.based}.get(verb, self.both))
        if verb == "gc":
            Remote(self.bucket).delete("tune")
            self.bucket.clock += 25 * HOUR
            assert Remote(self.bucket).gc(24).condemn
            self.bucket.clock += 25 * HOUR

    def end(self, command: commands.Started) -> int:
        done = command.end()
        assert done.returncode in (0, 2, -signal.SIGKILL), done.stderr
        return done.returncode


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    made = Kit(tmp_path)
    yield made
    made.proxy.close()


@pytest.mark.parametrize(
    ("verb", "kills"),
    [
        ("push", 2),
        ("pull", 2),
        *(pytest.param(verb, 10_000, marks=pytest.mark.long) for verb in VERBS),
    ],
)
def test_a_client_is_killed_at_every_request(kit: Kit, verb: str, kills: int) -> None:
    kit.reset(verb)
    kit.proxy.arm()
    assert kit.end(kit.start(verb, kit.store())) == 0
    requests, sent, got = len(kit.proxy.requests), sum(kit.proxy.bodies), kit.proxy.answered
    wanted = objects_of(Remote(kit.bucket))
    for number in range(0, 2 * requests, -(-2 * requests // kills)):
        kit.reset(verb)
        before, where = {*kit.bucket.objects}, kit.store()
        started = Victim()
        killer = Killer(number // 2, started.kill)
        if number % 2:
            kit.proxy.arm(before=killer)
        else:
            kit.proxy.arm(after=killer)
        started.command = kit.start(verb, where)
        assert kit.end(started.command) == (-signal.SIGKILL if killer.struck else 0)
        assert_whole(Remote(kit.bucket), where, kit)
        landed = sum(
            len(kit.bucket.objects[key][0])
            for key in kit.bucket.objects.keys() - before
            if key.startswith("containers/")
        )
        held = held_in(where)
        kit.proxy.arm()
        if verb == "gc":  # what was being deleted is left to the next one an hour later
            kit.bucket.clock += HOUR
        again = kit.end(kit.start(verb, where))
        assert again == 0 or verb == "delete"
        # The price of the rest; a probe of a first push is one of it.
        assert sum(kit.proxy.bodies) <= sent - landed + 2 * KIB, number
        assert kit.proxy.answered <= got - 0.8 * held + 2 * KIB, number
        assert_whole(Remote(kit.bucket), where, kit)
        assert objects_of(Remote(kit.bucket)) == wanted, number
        names = ["base"] if verb in ("first push", "delete", "gc") else ["base", "tune"]
        assert Remote(kit.bucket).names() == names


def objects_of(remote: Remote) -> set[str]:
    """The keys of what references lead to or led to."""
    places = ("refs/", "manifests/", "containers/", "tables/")
    return {status.key for place in places for status in remote.bucket.list(place)}


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


class Stuck(FaultyProxy):
    """Sends three quarters of each container while `stuck`, and no more."""

    stuck = False

    def _handled(self, request: Request) -> tuple[bytes, bool]:
        blob, ends = super()._handled(request)
        if not self.stuck or "/containers/" not in request.target:
            return blob, ends
        return blob[: len(blob) * 3 // 4], False


def test_a_pull_that_is_killed_while_ranges_arrive_keeps_what_arrived(tmp_path: Path) -> None:
    full, bucket = open_store(tmp_path / "full"), MemoryBucket()
    tensors = {f"t{n:02}": noise(n, 50 * KIB) for n in range(32)}
    full.import_(write(tmp_path / "model", {"m.safetensors": safetensors(u8(**tensors))}), "base")
    for module, name, value in SMALL[:1]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"tensor_dedup.remote.{module}.{name}", value)
            full.push(Remote(bucket), "base")
    sizes = [len(o[0]) for key, o in bucket.objects.items() if key.startswith("containers/")]
    assert len(sizes) <= 4 + 1, "all that is fetched at once, and the header"
    proxy, where = Stuck(MemoryS3(bucket)), tmp_path / "here"
    words = ["pull", URL, "base", "--store", str(where)]
    env = {**os.environ, **real_servers.s3_environment(proxy.port)}
    proxy.stuck = True

    command = commands.start(*words, environ=env, constants=CONSTANTS)
    until_it_holds(where, 0.5 * sum(sizes))
    command.kill()
    assert command.end().returncode == -signal.SIGKILL
    kept = held_in(where)
    assert kept >= 0.5 * sum(sizes)
    proxy.stuck = False
    proxy.arm()
    assert commands.start(*words, environ=env, constants=CONSTANTS).end().returncode == 0
    assert proxy.answered <= sum(sizes) - 0.9 * kept + 16 * KIB
    assert stored(open_store(where), "base") == content(tmp_path / "model")
    proxy.close()


@pytest.mark.parametrize(
    ("verb", "kills"),
    [
        ("push", 1),
        *(pytest.param(verb, 10_000, marks=pytest.mark.long) for verb in VERBS),
    ],
)
def test_a_server_is_killed_at_every_request(
    tmp_path: Path, full: Store, verb: str, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in (*SMALL, ("sweep", "_DELETING_S", 1.0), ("sweep", "_DEAD_S", 2.0)):
        monkeypatch.setattr(f"tensor_dedup.remote.{module}.{name}", value)
    with real_servers.weed(tmp_path / "weed") as server:
        proxy = FaultyProxy(RealS3(server.port))

        def start(case: str) -> tuple[Remote, Remote, Store]:
            direct = Remote(client(server.port, case))
            for name in {"first push": [], "push": ["base"]}.get(verb, ["base", "tune"]):
                full.push(direct, name)
            if verb == "gc":
                direct.delete("tune")
            return direct, Remote(client(proxy.port, case)), open_store(tmp_path / f"of-{case}")

        _, remote, where = start("whole")
        proxy.arm()
        done(verb, remote, full, where)
        requests, sent, got = len(proxy.requests), sum(proxy.bodies), proxy.answered
        wanted = objects_of(remote)
        assert requests > (1 if verb == "delete" else 5)
        for number in range(requests - 1, -1, -requests // kills):
            direct, remote, where = start(f"case-{number}")
            before = {status.key for status in direct.bucket.list("containers/")}
            killer = Killer(number, server.kill)
            proxy.arm(after=killer)
            with suppress(StoreError):
                done(verb, remote, full, where)
            assert killer.struck
            server.start()
            wait_for(direct)
            proxy.arm()
            found = direct.verify(full=True) if direct.bucket.get("FORMAT", 4096) else None
            assert found is None or not [f for f in found.faults if f.affected], number
            there = [s for s in direct.bucket.list("containers/") if s.key not in before]
            # One whose table is not there may have been cut, and is sent again if it was.
            landed = sum(status.size for status in there if whole(direct, status))
            held = held_in(where.path)

            def again(remote: Remote = remote, where: Store = where) -> None:
                proxy.arm()
                done(verb, remote, full, where)

            with suppress(UnknownRemoteNameError) if verb == "delete" else nullcontext():
                sooner_or_later(again)
            while verb == "gc" and objects_of(direct) != wanted:  # until the one that died is over
                time.sleep(0.5)
                sooner_or_later(again)
            # The price of the rest; a probe of a first push is one of it.
            assert sum(proxy.bodies) <= sent - landed + 2 * KIB, number
            assert proxy.answered <= got - 0.8 * held + 4 * KIB, number
            found = direct.verify(full=True)
            assert found.fine, (number, found.faults)
            names = ["base"] if verb in ("first push", "delete", "gc") else ["base", "tune"]
            assert direct.names() == names
            if verb == "pull":
                assert stored(where, "tune") == content(tmp_path / "tune")
        proxy.close()


def whole(remote: Remote, status: ObjectStatus) -> bool:
    """Whether a container is there to its last bytes, which say where its table begins."""
    ending = remote.bucket.get_range(status.key, status.size - TAIL_BYTES, status.size)
    try:
        table_start(bytes(ending), status.size, PurePath(status.key))
    except DamagedFileError:
        return False
    return True


def sooner_or_later(work: Callable[[], object]) -> None:
    """Do it, again and again while a server that has just started refuses it.

    SeaweedFS keeps no conditions then, for a moment, which a first push finds. What a gc that was
    cut short was deleting, the next one waits for.
    """
    for _ in range(20):
        with suppress(NoConditionsError, RemoteBusyError, RemoteUnreachableError):
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


def held_in(store: Path) -> int:
    """The bytes of the containers in the folder of a store."""
    return sum(path.stat().st_size for path in (store / "containers").rglob("*.*"))


def until_it_holds(store: Path, nbytes: float) -> None:
    """Wait for containers of so many bytes in the folder of a store, but for a minute at most."""
    until = time.monotonic() + 60
    while held_in(store) < nbytes and time.monotonic() < until:
        time.sleep(0.05)


def settle(proxy: FaultyProxy) -> None:
    """Wait until what somebody has asked for who is dead is answered."""
    while True:
        before = (proxy.answered, len(proxy.requests))
        time.sleep(0.2)
        if (proxy.answered, len(proxy.requests)) == before:
            return


FILES = 5


@pytest.fixture
def shards(tmp_path: Path) -> Store:
    """A store with a checkpoint of several files, each of which is a layer."""
    store = open_store(tmp_path / "shards")
    files = {
        f"{n}.safetensors": safetensors(u8(**{f"t{n}": noise(n, 150 * KIB)})) for n in range(FILES)
    }
    store.import_(write(tmp_path / "base-of-shards", files), "base")
    return store


def linked(root: Path, case: str) -> int:
    """The bytes of the blobs that a registry has in a repository."""
    place = root / "data/docker/registry/v2"
    names = [path.name for path in (place / f"repositories/{case}/base/_layers/sha256").glob("*")]
    paths = [place / f"blobs/sha256/{name[:2]}/{name}/data" for name in names]
    return sum(path.stat().st_size for path in paths if path.exists())


@pytest.mark.parametrize(
    ("verb", "side", "kills"),
    [
        ("push", "registry", 1),
        ("pull", "client", 1),
        *(
            pytest.param(verb, side, 10_000, marks=pytest.mark.long)
            for verb in ("push", "pull")
            for side in ("registry", "client")
        ),
    ],
)
def test_a_registry_and_its_client_are_killed_at_every_request(
    tmp_path: Path, shards: Store, verb: str, side: str, kills: int
) -> None:
    pytest.importorskip("requests")
    files = content(tmp_path / "base-of-shards")
    root = tmp_path / "registry"
    with registries.program(root) as server:
        proxy = FaultyProxy(RealS3(server.port))

        def start(case: str, where: Path) -> commands.Started:
            url = f"oci://127.0.0.1:{proxy.port}/{case}/base:v1"
            words = {
                "push": ["push", "base", url, "--store", str(shards.path)],
                "pull": ["pull", url, "base", "--store", str(where)],
            }[verb]
            # Of another case, nothing would have to be sent: it is mounted from there.
            own = {**os.environ, "TENSOR_DEDUP_CACHE": str(tmp_path / f"cache-{case}")}
            return commands.start(*words, environ=own, constants=CONSTANTS)

        def prepared(case: str) -> Path:
            proxy.arm()
            if verb == "pull":
                shards.push(f"oci://127.0.0.1:{proxy.port}/{case}/base:v1", "base")
            proxy.arm()
            return tmp_path / f"of-{case}"

        def end(command: commands.Started) -> int:
            done = command.end()
            assert done.returncode in (0, 3, -signal.SIGKILL), done.stderr
            return done.returncode

        assert end(start("whole", prepared("whole"))) == 0
        requests, sent, got = len(proxy.requests), sum(proxy.bodies), proxy.answered
        assert requests > FILES
        assert (sent if verb == "push" else got) > FILES * 150 * KIB
        kept = 0
        for number in range(2 * requests - 1, -1, -2 * requests // kills):
            case = f"case-{number}"
            where = prepared(case)
            started = Victim()

            def kill(
                started: Victim = started,
                where: Path = where,
                least: int = verb == "pull" and number // 2 == requests - 1,
            ) -> None:
                until_it_holds(where, least)  # before the last request, all others were answered
                server.kill() if side == "registry" else started.kill()

            killer = Killer(number // 2, kill)
            if number % 2:
                proxy.arm(after=killer)
            else:
                proxy.arm(before=killer)
            started.command = start(case, where)
            status = end(started.command)
            settle(proxy)
            assert killer.struck or number // 2 >= requests - 1
            if side == "registry" and killer.struck:
                assert status in (0, 3)
                server.start()
            landed = linked(root, case) if verb == "push" else 0
            held = held_in(where)
            kept += landed + held
            proxy.arm()
            assert end(start(case, where)) == 0
            assert sum(proxy.bodies) <= sent - landed + 2 * KIB, number
            assert proxy.answered <= got - 0.8 * held + 2 * KIB, number
            checked = open_store(tmp_path / f"check-{case}")
            checked.pull(f"oci://127.0.0.1:{proxy.port}/{case}/base:v1", "base")
            assert stored(checked, "base") == files
            if verb == "pull":
                store = open_store(where)
                assert store.verify(full=True).fine
                assert stored(store, "base") == files
        assert kept
        proxy.close()
