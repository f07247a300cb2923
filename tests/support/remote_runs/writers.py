"""Three writers of one remote that do what comes, and die of kill -9; and what must hold of it.

A writer is a process with a store of its own, which notes in a journal what it begins and what came
of it. Between rounds nobody writes, and the journals are held against what the server has kept of
each reference: that is a register, and all that writers were told of it must fit into one order.

    PYTHONPATH=src:tests/support python -m remote_runs --server weed --minutes 20 --number 7

does slices of a minute until the time is over, each with the next number, and says what it found.
A slice of the same number draws the same operations; at what moments writers die, it does not say.
"""

import hashlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from remote_runs import real_servers
from remote_runs.histories import GRACE_S, Operation, deleted, journal, misfits, operations
from remote_runs.real_servers import s3_environment
from remote_runs.s3_faults import FaultyProxy, Request
from remote_runs.versioned import SERVERS, VersionedServer
from store_runs.stores import (
    KIB,
    Content,
    memory_folder,
    noise,
    open_store,
    safetensors,
    stored,
    tuned,
    u8,
    weights,
    write,
)
from tensor_dedup import Store
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.errors import (
    NotARemoteError,
    RemoteBusyError,
    RemoteNameTakenError,
    RemoteUnreachableError,
    UnknownRemoteNameError,
)
from tensor_dedup.remote.sweep import RemoteGcPlan
from tensor_dedup.store.format.names import file_of

URL: Final = "s3://bucket"
WRITERS: Final = 3
NAMES: Final = ("a", "b", "c", "d")
NORMAL_LEASE_S: Final = 24 * 3600.0
# One round, and how long it is between two kills at most.
_ROUND_S: Final = 10.0
_PAUSE_S: Final = 2.0
# Of so many requests one is late, by a part of the lease at most, and so many times as many of
# those that commit something: so pushes and sweeps overlap where it counts.
_LATE: Final = 32
_COMMITS: Final = 8
_LATE_SHARE: Final = 1 / 6
# Who is to be killed is so at one of its next requests.
_REQUESTS: Final = 24
_SERVER: Final = multiprocessing.get_context("forkserver")
# What an operation may meet where others write; all else is a finding.
_EXPECTED: Final = (
    NotARemoteError,
    RemoteBusyError,
    RemoteNameTakenError,
    UnknownRemoteNameError,
)
_VERBS: Final = {
    "push": 34,
    "pull": 18,
    "delete": 8,
    "gc": 16,
    "gc, normal lease": 3,
    "gc, dry run": 2,
    "verify": 4,
    "verify full": 4,
    "list": 3,
    "tidy": 4,
}


def limits(lease_s: float) -> list[tuple[str, str, float]]:
    """Constants of the package for a lease of seconds, and containers of a few tensors."""
    return [
        ("push", "LEASE_S", lease_s),
        ("sweep", "_DELETING_S", lease_s / 2),
        ("sweep", "_DEAD_S", lease_s),
        ("layout", "CONTAINER_BYTES", 100 * KIB),
        ("push", "_ASKED_BYTES", 1),
    ]


@contextmanager
def limited(lease_s: float) -> Iterator[None]:
    """The package with these limits, in this process."""
    before: list[tuple[Any, str, Any]] = []
    for name, constant, value in limits(lease_s):
        module = importlib.import_module(f"tensor_dedup.remote.{name}")
        before.append((module, constant, getattr(module, constant)))
        setattr(module, constant, value)
    try:
        yield
    finally:
        for module, constant, value in before:
            setattr(module, constant, value)


def made(number: int) -> Content:
    """The files of content `number`, which no other number has; tensors are shared with others."""
    dice = random.Random(number)
    tensors: dict[str, bytes] = {"own": noise(number, 200)}
    for slot in range(3):
        data, change = weights(slot, 64 * KIB), dice.randrange(6)
        # A difference, as far as its base is in the store.
        tensors[f"large{slot}"] = tuned(data, 10 * slot + change) if change else data
        tensors[f"small{slot}"] = noise(1000 * slot + dice.randrange(8), 8 * KIB)
    if not dice.randrange(4):
        tensors["new"] = noise(5000 + dice.randrange(12), 70 * KIB)
    config = json.dumps({"number": number}).encode()
    return {"model.safetensors": safetensors(u8(**tensors)), "config.json": config}


def number_of(files: Content) -> int:
    """The number of a content, all of whose bytes must be right."""
    number = int(json.loads(files["config.json"])["number"])
    assert files == made(number), f"content {number} is not what it was"
    return number


def state_here(store: Store, name: str) -> str:
    """The state that the reference of a checkpoint of this store has on a remote."""
    return hashlib.md5((store.path / "refs" / file_of(name)).read_bytes()).hexdigest()


class Writer:
    """One life of a writer: operations until the file `stop` is there, or it is killed."""

    def __init__(self, root: Path, writer: int, number: int, lease_s: float) -> None:
        self._root, self._writer, self._lease_s = root, writer, lease_s
        self._journal = os.open(journal(root, writer), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._lines = len(journal(root, writer).read_text().splitlines())
        self._dice = random.Random(f"{number} {writer} {self._lines}")
        self._store = open_store(root / f"store-{writer}")
        self._remote = Remote.open(URL)

    def live(self) -> None:
        while not (self._root / "stop").exists():
            verb = self._dice.choices([*_VERBS], [*_VERBS.values()])[0]
            name = self._dice.choice(NAMES)
            if verb == "push":
                self._push(name)
            elif verb == "pull":
                self._pull(name)
            else:
                self._other(verb, name)

    def _note(self, **entry: Any) -> None:
        os.write(self._journal, json.dumps({"at": time.monotonic(), **entry}).encode() + b"\n")
        self._lines += 1

    def _did(self, verb: str, name: str, act: Callable[[], Any], **entry: Any) -> Any:
        """Do it, and note when it began and what came of it."""
        self._note(verb=verb, name=name, **entry)
        try:
            result = act()
        except _EXPECTED as error:
            self._note(outcome=type(error).__name__)
            return error
        except StoreError as error:
            self._note(outcome=type(error).__name__, said=traceback.format_exc())
            return error
        except BaseException:
            self._note(outcome="crash", said=traceback.format_exc())
            raise
        return result

    def _push(self, name: str) -> None:
        store, dice = self._store, self._dice
        number = self._writer * 1_000_000 + self._lines
        path = write(self._root / f"path-{self._writer}", made(number))

        def imported() -> None:
            store.import_(path, name, replace=True, compress=dice.choice(["auto", None]))
            self._note(outcome="done", number=number)

        self._did("import", name, imported, number=number)
        state = state_here(store, name)
        for replace in (dice.random() < 0.7, *([True] if dice.random() < 0.2 else [])):

            def pushed(replace: bool = replace) -> None:
                result = store.push(self._remote, name, replace=replace)
                self._note(outcome="done", unchanged=result.unchanged)

            self._did("push", name, pushed, state=state, number=number, replace=replace)

    def _pull(self, name: str) -> None:
        def pulled() -> None:
            self._store.pull(self._remote, name, replace=True)
            number = number_of(stored(self._store, name))
            self._note(outcome="done", state=state_here(self._store, name), number=number)

        self._did("pull", name, pulled)

    def _other(self, verb: str, name: str) -> None:
        remote = self._remote
        acts: dict[str, Callable[[], Any]] = {
            "delete": lambda: remote.delete(name),
            "gc": lambda: remote.gc(self._lease_s / 3600),
            "gc, normal lease": lambda: remote.gc(NORMAL_LEASE_S / 3600),
            "gc, dry run": lambda: remote.gc(self._lease_s / 3600, dry_run=True),
            "verify": remote.verify,
            "verify full": lambda: remote.verify(full=True),
            "list": remote.checkpoints,
            "tidy": lambda: self._store.gc(0),
        }

        def done() -> None:
            result = acts[verb]()
            more: dict[str, Any] = {}
            if verb == "delete":
                more["state"] = deleted(name)
            elif verb.startswith("gc") and result.done:
                more["counts"] = [len(result.condemn), len(result.delete)]
            elif verb.startswith("verify"):
                more["faults"] = [[each.url, each.what, each.affected] for each in result.faults]
            elif verb == "list":
                more["faults"] = [
                    [each.name, each.damage, [each.name]] for each in result if each.damage
                ]
            self._note(outcome="done", **more)

        self._did(verb, name, done)


def live(
    root: Path, writer: int, number: int, lease_s: float, environment: Mapping[str, str]
) -> None:
    """The process of a writer."""
    os.environ.update(environment)
    with limited(lease_s):
        Writer(root, writer, number, lease_s).live()


def is_commit(request: Request) -> bool:
    """Whether a request writes under a condition."""
    return "if-match" in request.headers or "if-none-match" in request.headers


class Slice:
    """Rounds of writers on one server, with one number for all that is drawn.

    Of so many answers as `lost` says one gets lost, more of those to commits; none if it is 0.
    """

    def __init__(
        self, root: Path, server: VersionedServer, number: int, lease_s: float, lost: int
    ) -> None:
        self._root, self._server, self._number = root, server, number
        self._lease_s, self._lost = lease_s, lost
        self._dice = random.Random(number)
        self._processes: list[Any] = []
        # For each writer that is to be killed, how many requests are left to it.
        self._left: dict[int, int] = {}
        self.kills = self.rounds = 0
        self.findings: list[str] = []
        self.counts: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """Do rounds for about so many seconds, or until something is found."""
        until = time.monotonic() + seconds
        with ExitStack() as undo:
            self._ports = []
            for writer in (*range(WRITERS), None):
                proxy = FaultyProxy(self._server.upstream)
                undo.callback(proxy.close)
                if writer is not None:
                    proxy.arm(before=self._before(writer), after=self._after(writer))
                self._ports.append(proxy.port)
            undo.enter_context(real_servers.environment(s3_environment(self._ports[-1])))
            undo.enter_context(limited(self._lease_s))
            while time.monotonic() < until and not self.findings:
                self._round(min(_ROUND_S, max(3.0, until - time.monotonic())))
                try:
                    self.findings += self._misfits()
                    self.findings += self._faults(sweeping=self.rounds % 2 == 0)
                except StoreError:
                    self.findings.append(traceback.format_exc())
                self.rounds += 1

    def _before(self, writer: int) -> Callable[[Request, int], None]:
        """What happens to a writer or its request before that is carried out."""
        dice = random.Random(f"{self._number} requests of {writer}")

        def strike(request: Request, number: int) -> None:
            self._count_down(writer)
            if dice.randrange(_LATE // _COMMITS if is_commit(request) else _LATE) == 0:
                # That of a process that was killed is carried out, too.
                time.sleep(dice.random() ** 2 * self._lease_s * _LATE_SHARE)

        return strike

    def _after(self, writer: int) -> Callable[[Request, int], None]:
        """What happens when it has been carried out."""
        dice = random.Random(f"{self._number} answers to {writer}")

        def strike(request: Request, number: int) -> None:
            self._count_down(writer)
            lost = self._lost // _COMMITS if is_commit(request) else self._lost
            if self._lost and dice.randrange(lost) == 0:
                raise ConnectionResetError(request.name)

        return strike

    def _count_down(self, writer: int) -> None:
        if writer in self._left:
            self._left[writer] -= 1
            if self._left[writer] < 0:
                self._processes[writer].kill()

    def _start(self, writer: int) -> Any:
        environment = s3_environment(self._ports[writer])
        arguments = (self._root, writer, self._number, self._lease_s, environment)
        process = _SERVER.Process(target=live, args=arguments)
        process.start()
        return process

    def _round(self, seconds: float) -> None:
        self._processes = [self._start(writer) for writer in range(WRITERS)]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(self._dice.uniform(0, _PAUSE_S))
            victim = self._dice.randrange(WRITERS)
            self._kill(victim)
            self._processes[victim] = self._start(victim)
        (self._root / "stop").touch()
        if self._dice.random() < 0.5:
            self._kill(self._dice.randrange(WRITERS))
        for writer, process in enumerate(self._processes):
            process.join(120)
            if process.exitcode is None:
                self.findings.append(f"writer {writer} does not end: {self._last(writer)}")
                self._kill(writer)
            elif process.exitcode not in (0, -signal.SIGKILL):
                self.findings.append(f"writer {writer} ended with {process.exitcode}")
        (self._root / "stop").unlink()

    def _kill(self, writer: int) -> None:
        """Kill it, at a request or in between, and note when it was dead."""
        process = self._processes[writer]
        self._left[writer] = self._dice.randrange(2 * _REQUESTS)
        process.join(1)
        process.kill()
        process.join()
        del self._left[writer]
        if process.exitcode == -signal.SIGKILL:
            self.kills += 1
            with journal(self._root, writer).open("a") as file:
                entry = {"at": time.monotonic(), "outcome": "killed"}
                file.write(json.dumps(entry) + "\n")

    def _last(self, writer: int) -> Operation:
        return operations(self._root, writer)[-1]

    def _misfits(self) -> Iterator[str]:
        done = [each for writer in range(WRITERS) for each in operations(self._root, writer)]
        history = self._server.history(layout.REFS)
        self.states = {key: [str(s) for s in held] for key, held in history.items()}
        for name in NAMES:
            yield from misfits(name, self.states.get(layout.ref_key(name), []), done)
        self.counts = Counter(f"{each.verb}: {each.outcome}" for each in done)
        for each in done:
            is_told = self._lost and each.outcome == RemoteUnreachableError.__name__
            if "said" in each.facts and not is_told:
                yield f"{each}\n{each.facts['said']}"
            for url, what, affected in each.facts.get("faults", ()):
                if affected:
                    yield f"{each}: {url}: {what}: {affected}"
        for key, held in self._server.history("").items():
            place = key.partition("/")[0]
            if place in ("containers", "manifests") and len({*held} - {None}) > 1:
                yield f"{key} had several contents: {held}"
            if key == layout.HEAD and len({*held}) < len(held):
                yield f"{key} had a state again: {Counter(held).most_common(3)}"

    def _faults(self, *, sweeping: bool) -> Iterator[str]:
        """What is wrong with the remote and the stores, of which nobody writes now."""
        time.sleep(GRACE_S if self._server.forward is None else 0.2)
        remote = Remote.open(URL)
        yield from self._unlike(remote, "as it was left")
        yield from self._verified(remote, "as it was left", strict=False)
        yield from self._verified(remote, "when it was verified", strict=True)
        if sweeping:
            yield from self._swept(remote)
        for writer in range(WRITERS):
            yield from self._lost_of(writer)

    def _there(self) -> dict[str, str]:
        """The last states of names that were not deleted."""
        last = {name: self.states.get(layout.ref_key(name), [deleted(name)])[-1] for name in NAMES}
        return {name: state for name, state in last.items() if state != deleted(name)}

    def _unlike(self, remote: Remote, when: str) -> Iterator[str]:
        there = self._there()
        if not there and remote.bucket.get(layout.MARKER, 1 << 12) is None:
            return
        if remote.names() != sorted(there):
            yield f"{when}: names {remote.names()}, and not {sorted(there)}"
        with memory_folder() as folder:
            other = open_store(folder / "other")
            for name, state in there.items():
                try:
                    other.pull(remote, name)
                    number_of(stored(other, name))
                except (StoreError, AssertionError) as error:
                    yield f"{when}: {name} cannot be pulled: {type(error).__name__}: {error}"
                    continue
                if state_here(other, name) != state:
                    yield f"{when}: {name} was pulled in another state than its last, {state}"
            if not other.verify(full=True).fine:
                yield f"{when}: what was pulled is damaged"

    def _verified(self, remote: Remote, when: str, *, strict: bool) -> Iterator[str]:
        if remote.bucket.get(layout.MARKER, 1 << 12) is None:
            return
        for fault in remote.verify(full=True).faults:
            self.counts[f"fault {when}: {fault.what}"] += 1
            if fault.affected or strict:
                yield f"{when}: {fault}"

    def _swept(self, remote: Remote) -> Iterator[str]:
        """Sweep all that is nobody's: then all is there that is somebody's, and no more."""
        if remote.bucket.get(layout.MARKER, 1 << 12) is None:
            return
        # What a sweep that was killed has listed counts for as long as a lease here.
        if self._server.forward is not None:
            self._server.forward(self._lease_s + 1)
            for _ in range(2):
                self._server.forward(NORMAL_LEASE_S + 1)
                self._sweep(remote, NORMAL_LEASE_S / 3600)
        else:
            time.sleep(self._lease_s + 1)
            self._sweep(remote, 0)
        yield from self._unlike(remote, "swept")
        yield from self._verified(remote, "swept", strict=True)
        again = self._sweep(remote, 0)
        # Segments and lists that the head named until it was written are the next sweep's to take.
        left = [key for key in (*again.condemn, *again.delete) if not layout.is_passing(key)]
        if left or again.waiting or again.young:
            yield f"a sweep has left {left}, {again.waiting} waiting and {again.young} young"
        yield from self._unlike(remote, "swept again")

    def _sweep(self, remote: Remote, lease_hours: float) -> RemoteGcPlan:
        """Sweep; where that takes longer than a sweep may, another one does the rest."""
        for _ in range(10):
            with suppress(RemoteBusyError):
                return remote.gc(lease_hours)
            time.sleep(self._lease_s + 1)
        return remote.gc(lease_hours)

    def _lost_of(self, writer: int) -> Iterator[str]:
        """What a writer's own store has lost."""
        path = self._root / f"store-{writer}"
        if not path.exists():
            return
        store, done = open_store(path), operations(self._root, writer)
        for fault in store.verify(full=True).faults:
            yield f"store of writer {writer}: {fault}"
        for name in NAMES:
            mine = [each for each in done if each.name == name and each.verb in ("import", "pull")]
            acknowledged = [n for n, each in enumerate(mine) if each.outcome == "done"]
            later = mine[acknowledged[-1] :] if acknowledged else mine
            if name not in store.names():
                if acknowledged:
                    yield f"store of writer {writer}: {name} is lost"
                continue
            try:
                number = number_of(stored(store, name))
            except (StoreError, AssertionError) as error:
                yield f"store of writer {writer}: {name} cannot be read: {error}"
                continue
            # Of a pull that was killed it is not known what it would have brought.
            if number not in [each.number for each in later] and not any(
                each.verb == "pull" and each.outcome == "killed" for each in later
            ):
                yield f"store of writer {writer}: {name} is {number}, after {later[0]}"


def run(
    kind: str, number: int, seconds: float, lease_s: float, lost: int, keep: Path | None = None
) -> Slice:
    """Do a slice on a server of its own; keep what it leaves, where something is found."""
    _SERVER.set_forkserver_preload(["obstore.store", __name__])
    with (
        memory_folder() as root,
        SERVERS[kind](root / "server") as server,
    ):
        found = Slice(root, server, number, lease_s, lost)
        found.run(seconds)
        if found.findings and keep is not None:
            ignored = shutil.ignore_patterns("server")
            shutil.copytree(root, keep / f"{kind}-{number}", ignore=ignored, dirs_exist_ok=True)
            (keep / f"{kind}-{number}" / "states").write_text(json.dumps(found.states, indent=1))
            (keep / f"{kind}-{number}" / "findings").write_text("\n\n".join(found.findings))
    return found
