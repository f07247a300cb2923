"""Every request of push, pull, delete and gc over real sockets, with everything that may befall it.

A case is a verb, one of its requests, a fault, and an interleaving with two others who are at work
at once: two writers and a gc, or a reader, a writer and a gc. The clock is the test's. Requests go
through obstore, with its repetitions, and through a proxy that strikes one of them; behind it are
objects in memory or, in the last test, a server of S3's protocol that others have written.

After each case nothing is lost and nothing is wrong, nothing hangs, what was told to be done is
done, and the same command again succeeds.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from remote_runs import real_servers
from remote_runs.remotes import MemoryBucket
from remote_runs.s3_faults import (
    FAULTS,
    FaultyProxy,
    MemoryS3,
    RealS3,
    Request,
    Turns,
    client,
    possible,
)
from store_runs.stores import content, open_store, stored, three
from tensor_dedup import Store
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote
from tensor_dedup.remote.errors import (
    RemoteBusyError,
    RemoteNameTakenError,
    UnknownRemoteNameError,
)

HOUR = 3600.0
VERBS = ("first push", "push", "push over", "pull", "delete", "gc")
Case = tuple[str, int, str, int]
SEEDS = range(7)
PARTS = 12  # of the long form, each of a minute or two
# What a repeated command may be told: it is done, or another has the name.
_REFUSALS: dict[str, tuple[type[Exception], ...]] = {
    "delete": (UnknownRemoteNameError,),
    "push": (RemoteNameTakenError,),
}


@pytest.fixture(autouse=True)
def one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the requests of a client come in one order; and nobody waits for chance."""
    monkeypatch.setattr("tensor_dedup.remote.buckets._THREADS", 1)
    monkeypatch.setattr("tensor_dedup.remote.push._AT_ONCE", 1)
    monkeypatch.setattr("tensor_dedup.remote.pieces._AHEAD", 1)
    monkeypatch.setattr("tensor_dedup.remote.catalog._PAUSE_S", 0.0)


class Scene:
    """A remote where something was condemned a lease ago, and three clients of it."""

    def __init__(self, root: Path) -> None:
        self._root, self._numbers = root, iter(range(10**9))
        paths = three(root)
        self.expected = {name: content(path) for name, path in paths.items()}
        self.full, self.another = open_store(root / "full"), open_store(root / "another")
        for name, path in paths.items():
            self.full.import_(path, name, compress="auto")
        self.another.import_(paths["tiny"], "tune")  # the same name for something else
        start = MemoryBucket()
        for name in ("base", "tune"):
            self.full.push(Remote(start), name)
        self.past = dict(start.objects)
        Remote(start).delete("tune")
        start.clock += 25 * HOUR
        assert Remote(start).gc(24).condemn
        start.clock += 25 * HOUR
        self.start, self.clock = dict(start.objects), start.clock
        self.bucket = MemoryBucket()
        self._server = MemoryS3(self.bucket)
        self._proxies = {each: FaultyProxy(self._server, each) for each in "abc"}
        self._remotes = {each: Remote(client(p.port)) for each, p in self._proxies.items()}

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.close()

    def reset(self, verb: str) -> None:
        first = verb == "first push"
        self.bucket.objects = {} if first else dict(self.start)
        self.bucket.clock, self.bucket._count = self.clock, 10_000

    def work(self, verb: str, here: Store) -> Callable[[Remote], object]:
        return {
            "first push": lambda remote: self.full.push(remote, "base"),
            "push": lambda remote: self.full.push(remote, "tune"),
            "push over": lambda remote: self.full.push(remote, "tune", replace=True),
            "pull": lambda remote: here.pull(remote, "base"),
            "delete": lambda remote: remote.delete("base"),
            "gc": lambda remote: remote.gc(24),
        }[verb]

    def rivals(self, verb: str, seed: int) -> dict[str, Callable[[Remote], object]]:
        """Who else is at work: a writer, and a gc or a second writer."""
        writers: list[Callable[[Remote], object]] = [
            lambda remote: self.full.push(remote, "tiny"),
            lambda remote: self.full.push(remote, "tune"),
            lambda remote: self.another.push(remote, "tune"),
        ]
        if verb == "gc":
            return {"b": writers[1], "c": writers[2 * (seed % 2)]}
        return {"b": writers[seed % 3], "c": lambda remote: remote.gc(24)}

    def requests(self, verb: str) -> list[str]:
        """The requests of a verb that nothing befalls."""
        self.reset(verb)
        proxy = self._proxies["a"]
        proxy.arm()
        self.work(verb, self.store())(self._remotes["a"])
        assert len(proxy.requests) > 1
        return proxy.requests

    def store(self) -> Store:
        return open_store(self._root / f"other-{next(self._numbers)}")

    def cases(self, seeds: range) -> Iterator[Case]:
        for verb in VERBS:
            for at, name in enumerate(self.requests(verb)):
                for fault in FAULTS:
                    # A push that is told by an old answer that its name is there has nothing to do:
                    # FORMAT.md asks of a server that a read returns the last write.
                    is_believed = (verb, at, fault) == ("push", 0, "stale")
                    if possible(name, fault) and not is_believed:
                        yield from ((verb, at, fault, seed) for seed in seeds)

    def run(self, case: Case) -> tuple[str, str, str]:
        """Run a case; its verb and struck request, its fault, and the order of all requests."""
        verb, at, fault, seed = case
        self.reset(verb)
        here, turns = self.store(), Turns("abc", seed)
        past = MemoryBucket()
        past.objects = {} if verb == "first push" else dict(self.past)
        proxy = self._proxies["a"]
        proxy.arm(at, fault, turns=turns, stale=MemoryS3(past))
        for each in "bc":
            self._proxies[each].arm(turns=turns)
        works = {"a": self.work(verb, here), **self.rivals(verb, seed)}
        done, failed = dict.fromkeys(works, False), list[Exception]()

        def run(each: str) -> None:
            try:
                works[each](self._remotes[each])
                done[each] = True
            except StoreError:
                pass  # an answer, with its name and the next step
            except Exception as error:  # noqa: BLE001 the test fails with it, in its own thread
                failed.append(error)
            finally:
                turns.done(each)

        threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), (case, "it hangs")
        assert not failed, (case, failed)
        self.check(case)
        self.check_done(case, done, here)
        for name in ("b", "c", "a"):
            self._proxies[name].arm()
        late = [each for each in proxy.late if not each.deletes]
        self.finish(case, here, late)
        return f"{verb}: {at}", fault, turns.order

    def check(self, case: Case) -> None:
        if "FORMAT" not in self.bucket.objects:
            assert not [key for key in self.bucket.objects if key.startswith("refs/")], case
            return
        found = Remote(self.bucket).verify(full=True)
        assert not [fault for fault in found.faults if fault.affected], (case, found.faults)

    def check_done(self, case: Case, done: dict[str, bool], here: Store) -> None:
        """What was told to be done is there; what was not pulled is not."""
        verb = case[0]
        if verb == "pull":
            assert here.names() == (["base"] if done["a"] else []), case
            if done["a"]:
                assert stored(here, "base") == self.expected["base"], case
        there = {}
        if "FORMAT" in self.bucket.objects:
            there = {each.name: each.manifest for each in Remote(self.bucket).checkpoints()}
        for each, name, manifest in self.claims(case, done):
            assert not done[each] or there.get(name) == manifest, (case, each, name, there)
        if verb not in ("delete", "first push"):
            assert there["base"] == self.full.manifest("base"), case

    def claims(self, case: Case, done: dict[str, bool]) -> Iterator[tuple[str, str, str | None]]:
        """Who has pushed what, if they were told so, and nobody else may have replaced it."""
        verb, *_, seed = case
        full = {name: self.full.manifest(name) for name in self.expected}
        if verb.endswith("push") or (verb == "push over" and not done["b"]):
            name = "base" if verb == "first push" else "tune"
            yield "a", name, full[name]
        if verb == "gc":
            yield "b", "tune", full["tune"]
            if seed % 2 == 0:
                yield "c", "tiny", full["tiny"]
        elif seed % 3 == 0:
            yield "b", "tiny", full["tiny"]
        elif verb != "push over":
            yield "b", "tune", full["tune"] if seed % 3 == 1 else self.another.manifest("tune")

    def finish(self, case: Case, here: Store, late: list[Request]) -> None:
        """A lease passes, a sweep comes, what was delayed arrives, and the command is repeated.

        Not so a deletion that was delayed: a server of S3's protocol refuses what was signed more
        than 15 minutes ago. Everything else is carried out here all the same.
        """
        verb, remote = case[0], Remote(self.bucket)
        self.bucket.clock += 25 * HOUR
        with suppress(StoreError):
            remote.gc(24)
        for request in late:
            self._server.answer(request)
        self.check(case)
        if "FORMAT" in self.bucket.objects:
            remote.gc(24)  # ends what a sweep that was cut short had begun
        with suppress(*_REFUSALS.get(verb, ())):
            self.work(verb, here)(self._remotes["a"])
        self.check(case)
        names = remote.names()
        assert ("base" in names) == (verb != "delete"), (case, names)
        if verb.startswith("push"):
            assert "tune" in names, case
        if verb == "pull":
            assert stored(here, "base") == self.expected["base"], case
            assert here.verify(full=True).fine, case


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


def test_nothing_is_lost_and_nothing_hangs(scene: Scene) -> None:
    every = [*scene.cases(SEEDS)]
    assert len({*every}) == len(every) >= 10_000
    for case in every[:: len(every) // 24]:
        scene.run(case)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "delete"])
def test_those_of_the_catalog_are_among_the_requests_that_are_struck(
    scene: Scene, verb: str
) -> None:
    wanted = "GET" if verb == "pull" else "PUT"
    assert any(name.startswith(f"{wanted} catalog/") for name in scene.requests(verb))


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_all_cases(
    scene: Scene,
    part: int,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every case of the list, which is written to a file; a case is one by the order it came to."""
    found = [scene.run(case) for case in [*scene.cases(SEEDS)][part::PARTS]]
    listed = tmp_path_factory.getbasetemp() / "cases.txt"
    with listed.open("a") as file:
        file.writelines(" | ".join(case) + "\n" for case in found)
    distinct = len({*listed.read_text().splitlines()})
    with capsys.disabled():
        sys.stdout.write(
            f"\n{len(found)} cases, {distinct} distinct ones so far, listed in {listed}\n"
        )
    assert len({*found}) > 0.95 * len(found)


def works_of(verb: str, full: Store, here: Store) -> Callable[[Remote], object]:
    """What a verb does where nobody else is at work."""
    return {
        "first push": lambda remote: full.push(remote, "base"),
        "push": lambda remote: full.push(remote, "tune"),
        "pull": lambda remote: here.pull(remote, "tune"),
        "delete": lambda remote: remote.delete("tune"),
        "gc": lambda remote: remote.gc(0),
    }[verb]


def assert_whole(direct: Remote, here: Store, paths: dict[str, Path], case: object) -> None:
    """Whatever has a name, there or here, has all of its pieces."""
    if direct.bucket.get("FORMAT", 1 << 12) is not None:
        found = direct.verify(full=True)
        assert not [fault for fault in found.faults if fault.affected], (case, found.faults)
    for name in here.names():
        assert stored(here, name) == content(paths[name]), case


@pytest.mark.long
@pytest.mark.parametrize("verb", ["first push", "push", "pull", "delete", "gc"])
def test_a_server_that_others_have_written(tmp_path: Path, verb: str) -> None:
    """Every fifth case of one client, before SeaweedFS; what is stale is from before the remote.

    That server does not compare what it is sent with the checksum that comes with it.
    """
    paths, full = three(tmp_path), open_store(tmp_path / "full")
    for name, path in paths.items():
        full.import_(path, name, compress="auto")
    with real_servers.weed(tmp_path / "weed") as server:
        proxy, numbers = FaultyProxy(RealS3(server.port)), iter(range(10**6))

        def start() -> tuple[Remote, Remote, Store]:
            prefix = f"case-{next(numbers)}"
            direct = Remote(client(server.port, prefix))
            for name in {"first push": (), "push": ("base",)}.get(verb, ("base", "tune")):
                full.push(direct, name)
            if verb == "gc":
                direct.delete("tune")
            return direct, Remote(client(proxy.port, prefix)), open_store(tmp_path / prefix)

        _, remote, here = start()
        proxy.arm()
        works_of(verb, full, here)(remote)
        names = list(proxy.requests)
        every = [
            (number, fault)
            for number, name in enumerate(names)
            for fault in FAULTS
            if possible(name, fault) and not (fault.startswith("wrong") and name.startswith("PUT"))
        ]
        for number, fault in every[:: 5 if len(names) > 5 else 1]:
            case = (verb, names[number], fault)
            direct, remote, here = start()
            proxy.arm(number, fault, stale=MemoryS3(MemoryBucket()))
            with suppress(StoreError):
                works_of(verb, full, here)(remote)
            assert proxy.struck, case
            proxy.late = [request for request in proxy.late if not request.deletes]
            proxy.deliver()
            assert_whole(direct, here, paths, case)
            proxy.arm()
            try:
                with suppress(*_REFUSALS.get(verb, ())):
                    works_of(verb, full, here)(remote)
            except RemoteBusyError:
                # A gc that may still delete something, because a deletion or the catalog was not
                # answered, is taken for one at work for an hour.
                assert verb == "gc", case
                assert any(part in names[number] for part in ("DELETE", "catalog/", "trash/")), case
            assert_whole(direct, here, paths, case)
            expected = ["base", "tune"] if verb in ("push", "pull") else ["base"]
            assert direct.names() == expected, case
            assert verb != "pull" or here.names() == ["tune"], case
        proxy.close()
