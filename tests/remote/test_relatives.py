"""What a push does not send or ask for, since a checkpoint that is there leads to it.

A fine-tune of many tensors has most pages of its manifest in common with its base, and most pieces.
"""

from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from remote_runs.remotes import FAULTS, READ_FAULTS, Faulty, Killed, MemoryBucket
from remote_runs.s3_faults import FaultyProxy, MemoryS3, Wire, client
from store_runs.stores import (
    KIB,
    MIB,
    content,
    noise,
    open_store,
    safetensors,
    stored,
    tuned,
    u8,
    weights,
    write,
)
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote, catalog, layout, relatives
from tensor_dedup.store.format import manifests

HOUR = 3600.0


def checkpoint(tmp_path: Path, name: str, count: int, changed: dict[int, bytes]) -> Path:
    """Small tensors of one content, but for those that are `changed`."""
    tensors = {f"layers.{n:04}.w": changed.get(n, noise(n, 64)) for n in range(count)}
    return write(tmp_path / name, {"model.safetensors": safetensors(u8(**tensors))})


@pytest.mark.parametrize(("count", "containers", "more"), [(1600, 25, 0), (3000, 24, 1)])
def test_a_fine_tune_of_many_tensors_costs_what_is_missing(
    tmp_path: Path,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    containers: int,
    more: int,
) -> None:
    """As with tensors of a mebibyte each, but for what of these does not travel.

    Of 3,000 pieces the catalog has short prefixes, so the base is asked for twice.
    """
    here, there = open_store(tmp_path / "here"), open_store(tmp_path / "there")
    base = checkpoint(tmp_path, "base", count, {700: noise(6, MIB)})
    here.import_(base, "base")
    with monkeypatch.context() as patch:
        patch.setattr(layout, "CONTAINER_BYTES", count * 64 // containers)
        here.push(Remote(wire.bucket), "base")
    assert sum(key.startswith("containers/") for key in wire.bucket.objects) >= containers
    there.pull(wire.remote, "base")
    tune = checkpoint(tmp_path, "tune", count, {700: noise(7, MIB)})
    here.import_(tune, "tune")
    before = {*wire.bucket.objects}
    for work in (here.push, there.pull):
        wire.reset()
        done = work(wire.remote, "tune")
        assert (done.moved_pieces, done.moved_bytes) == (1, MIB)
        assert wire.proxy.requests <= 30 + more, wire.server.requests
        assert wire.proxy.nbytes <= 1.02 * MIB + 64 * KIB
    added = [key for key in wire.bucket.objects.keys() - before if key.startswith("manifests/")]
    assert len(added) == 1 + 1  # a page and the manifest
    assert stored(there, "tune") == content(tune)
    assert wire.remote.verify(full=True).fine


@pytest.mark.parametrize("reused", [pytest.param(4, marks=pytest.mark.long)])
def test_a_push_that_relies_on_a_few_of_many_containers_lists_them(
    tmp_path: Path, wire: Wire, reused: int
) -> None:
    """To ask for each would be more requests than it may make, and the list fits."""
    here = open_store(tmp_path / "here")
    for number in range(100):
        one = safetensors(u8(**{f"t{number}": noise(number, 4 * KIB)}))
        here.import_(write(tmp_path / f"one-{number}", {"model.safetensors": one}), f"one-{number}")
        here.push(Remote(wire.bucket), f"one-{number}")
    names = [f"t{number}" for number in range(reused)]
    tensors = u8(new=noise(1000, 4 * KIB), **{n: noise(k, 4 * KIB) for k, n in enumerate(names)})
    path = write(tmp_path / "all", {"model.safetensors": safetensors(tensors)})
    here.import_(path, "all")
    wire.reset()
    done = here.push(wire.remote, "all")
    assert done.moved_pieces == 2  # the new tensor, and the header
    assert wire.proxy.requests <= 30, wire.server.requests
    assert wire.proxy.nbytes <= 1.02 * done.moved_bytes + 64 * KIB
    assert wire.server.requests.count("LIST containers/") == 1
    there = open_store(tmp_path / "there")
    there.pull(wire.remote, "all")
    assert stored(there, "all") == content(path)


class Scene:
    """A store with a base of many pages and its fine-tune, and a remote that has the base."""

    def __init__(self, root: Path) -> None:
        self._root, self._numbers = root, iter(range(10**6))
        self.full = open_store(root / "full")
        self.base = checkpoint(root, "base", 40, {})
        self.tune = checkpoint(root, "tune", 40, {33: noise(1000, 64)})
        self.other = checkpoint(root, "other", 40, {n: noise(2000 + n, 64) for n in range(40)})
        self.paths = {"base": self.base, "tune": self.tune, "other": self.other}
        for name, path in self.paths.items():
            self.full.import_(path, name)
        self.start = MemoryBucket()
        self.full.push(Remote(self.start), "base")
        self.start.clock += 25 * HOUR

    def bucket(self) -> MemoryBucket:
        return self.start.copied()

    def calls(self) -> list[str]:
        """What a push of the fine-tune asks for."""
        return self.pushed(self.bucket())

    def pushed(self, bucket: MemoryBucket, *, replace: bool = False) -> list[str]:
        """Push the fine-tune, and return what that asked for."""
        gate = Faulty(bucket)
        self.full.push(Remote(gate), "tune", replace=replace)
        return gate.calls

    def check(self, bucket: MemoryBucket, case: object) -> None:
        """Whatever has a name is whole, now and when what nothing leads to has gone."""
        for _ in range(3):
            found = Remote(bucket).verify(full=True)
            assert found.fine, (case, found.faults)
            for name in Remote(bucket).names():
                store = open_store(self._root / f"other-{next(self._numbers)}")
                store.pull(Remote(bucket), name)
                assert stored(store, name) == content(self.paths[name])
            bucket.clock += 25 * HOUR
            Remote(bucket).gc(24)


WIDTHS = ("short", "whole")


@pytest.fixture(params=WIDTHS)
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Scene:
    """With prefixes as a large catalog has them, and as a small one does."""
    monkeypatch.setattr(manifests, "PAGE_ENTRIES", 8)
    if request.param == "short":
        monkeypatch.setattr(catalog, "_WHOLE", 0)
    return Scene(tmp_path)


short = pytest.mark.parametrize("scene", ["short"], indirect=True)


@short
def test_short_prefixes_that_two_pieces_of_a_container_share_need_no_table(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3,000 tensors in one container two have the same prefix of 3 bytes, one time in four."""
    monkeypatch.setattr(catalog, "_SHORTEST", 1)
    monkeypatch.setattr(catalog, "_MISTAKEN_BITS", 0)
    bucket = MemoryBucket()
    scene.full.push(Remote(bucket), "base")
    [entry] = catalog.catalog_of(bucket).containers.values()
    assert entry.width == 1
    assert len({*catalog.prefixes(entry)}) < entry.pieces
    calls = scene.pushed(bucket)
    assert sent(calls) == 1 + 1
    assert not [call for call in calls if call.startswith("get tables/")]


def test_a_prefix_of_a_difference_and_of_another_piece_assures_nothing() -> None:
    """Which of them the piece is says whether anything can be stored against it."""
    for alone, deltas, assured in ((2, 0, True), (0, 2, True), (1, 1, False)):
        entry = catalog.ListedContainer(
            bytes([alone]) * 32, "mixed", 9, bytes(3 * alone), bytes(3 * deltas), 3
        )
        found = catalog.Catalog()
        found.add(entry)
        found.assure({bytes(32)})
        assert found.is_assured(bytes(32)) is assured
        assert not found.is_assured(bytes([1]) * 32)


def test_what_two_containers_may_hold_is_not_assured_once_one_cannot_be_read() -> None:
    """It may have been in that one; what the other has is another piece of the same prefix."""
    bucket, found = MemoryBucket(), catalog.Catalog()
    for number in (1, 2):
        found.add(catalog.ListedContainer(bytes([number]) * 32, "pack", 9, bytes(3), b"", 3))
    found.assure({bytes(32)})
    gate = Faulty(bucket)
    assert catalog.unheld(gate, found, {bytes(32)}) == {bytes(32)}
    assert sum(call.startswith("get tables/") for call in gate.calls) == 2


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(
    ("scene", "lost"),
    [
        (width, lost)
        for width in WIDTHS
        # No push looks for tables, unless it mends: a pull reads those in containers.
        for lost in ("a page", "a manifest", "all pages", "tables")
    ],
    indirect=["scene"],
)
def test_what_the_remote_has_lost_of_the_base_is_sent(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, lost: str, listed: bool
) -> None:
    """Its reference leads to it, and it is not there: as in a copy that was cut short."""
    if not listed:
        monkeypatch.setattr(relatives, "_LIST_BYTES", -(10**9))
    bucket = scene.bucket()
    read = Remote(bucket).read("base")
    pages = [layout.manifest_key(part) for part in read.blobs]
    pages.sort(key=lambda key: key == layout.manifest_key(scene.full.handle.objects.ref("base")))
    gone = {"a page": pages[:1], "a manifest": pages[-1:], "all pages": pages[:-1]}.get(lost)
    for key in gone or [key for key in bucket.objects if key.startswith("tables/")]:
        del bucket.objects[key]
    calls = scene.pushed(bucket)
    other = open_store(scene.full.path.parent / f"other-{lost}-{listed}")
    other.pull(Remote(bucket), "tune")
    assert stored(other, "tune") == content(scene.tune)
    assert ("list manifests/" in calls) is listed
    scene.full.push(Remote(bucket), "base", replace=True)
    scene.check(bucket, lost)


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_a_table_that_is_lost_is_read_in_its_container_and_written_by_a_mend(
    scene: Scene, damage: str
) -> None:
    bucket = scene.bucket()
    for key in [key for key in bucket.objects if key.startswith("tables/")]:
        blob, tag, when = bucket.objects.pop(key)
        if damage == "damaged":
            bucket.objects[key] = (blob[:-1] + b"?", tag, when)
    assert scene.full.push(Remote(bucket), "tune").moved_pieces == 1
    other = open_store(scene.full.path.parent / f"reader-{damage}")
    other.pull(Remote(bucket), "tune")
    assert stored(other, "tune") == content(scene.tune)
    if damage == "gone":  # that it is damaged, nobody knows who has not read it
        for name in ("tune", "base"):
            assert scene.full.push(Remote(bucket), name, replace=True).moved_pieces
    faults = Remote(bucket).verify(full=True).faults
    assert faults or damage == "gone"
    assert not any(fault.affected for fault in faults)
    scene.check(bucket, damage)


def test_what_was_assured_is_sent_once_another_table_shows_its_container_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base of a difference is looked for in the table that was to be read for no piece."""
    monkeypatch.setattr(manifests, "PAGE_ENTRIES", 8)
    monkeypatch.setattr(catalog, "_WHOLE", 0)
    store, bucket, weights_ = open_store(tmp_path / "here"), MemoryBucket(), weights(7, MIB)
    small = u8(**{f"t{n:05}": noise(n, 64) for n in range(40)})

    def path(name: str, **more: bytes) -> Path:
        tensors = dict(small)
        tensors |= {key: ("BF16", (len(each) // 2,), each) for key, each in more.items()}
        return write(tmp_path / name, {"model.safetensors": safetensors(tensors, {"n": name})})

    store.import_(path("base", w=weights_), "base")
    store.import_(path("related"), "related")
    tune = path("tune", w=tuned(weights_, 8, 0.02))
    store.import_(tune, "tune", compress="auto", base="base")
    for name in ("base", "related"):
        store.push(Remote(bucket), name)
    Remote(bucket).delete("base")
    entries = catalog.catalog_of(bucket).containers
    [lost] = [each for each, entry in entries.items() if entry.width < catalog.PREFIX_BYTES]
    del bucket.objects[layout.table_key(lost.name)]
    assert store.push(Remote(bucket), "tune").moved_pieces > 40
    other = open_store(tmp_path / "there")
    other.pull(Remote(bucket), "tune")
    assert stored(other, "tune") == content(tune)


@pytest.mark.parametrize("condemned", [0, 200])
def test_what_is_condemned_is_in_a_list_too(condemned: int) -> None:
    """A list that would be too long for it is not asked for."""
    bucket, found = MemoryBucket(), catalog.Catalog()
    for number in range(6):
        entry = catalog.ListedContainer(bytes([number]) * 32, "pack", 9, bytes(16), b"", 16)
        found.add(entry)
        for key in map(layout.container_key, found.containers):
            bucket.put(key, [memoryview(bytes(9))])
    names = [f"{number:064x}" for number in range(condemned)]
    keys = [key(name) for name in names for key in (layout.table_key, layout.manifest_key)]
    keys += [f"containers/{name[:2]}/{name}.pack" for name in names]
    found.trash = catalog.Trash(dict.fromkeys(keys, 1), {})
    gate = Faulty(bucket)
    relatives.lost(gate, found, {*found.containers}, 0, 32 * KIB, mending=False)
    pages = [f"{number:064x}" for number in range(1000, 1020)]
    base = relatives.Relative("base", pages[0], pages, tuple)
    relatives.pages_there(gate, found, base, pages, 0)
    for folder in (layout.CONTAINERS, layout.MANIFESTS):
        assert (f"list {folder}" in gate.calls) is (condemned == 0)


def test_pages_that_are_there_are_not_sent_and_no_table_is_read(scene: Scene) -> None:
    calls = scene.calls()
    bucket = scene.bucket()
    [entry] = catalog.catalog_of(bucket).containers.values()
    asked = 2 if entry.width < catalog.PREFIX_BYTES else 1
    assert [call for call in calls if "refs/base" in call] == ["get refs/base"] * asked
    assert not [call for call in calls if call.startswith("get tables/")]
    assert sent(calls) == 1 + 1  # a page and the manifest
    scene.pushed(bucket)
    scene.check(bucket, "pushed")


def sent(calls: list[str]) -> int:
    """The number of pages and manifests that were sent."""
    return sum(call.startswith("put manifests/") for call in calls)


@pytest.mark.parametrize("why", ["deleted", "another", "damaged", "noted", "replaced"])
def test_where_the_base_is_not_surely_there_all_is_sent(scene: Scene, why: str) -> None:
    bucket = scene.bucket()
    if why == "deleted":
        Remote(bucket).delete("base")
    elif why == "another":
        other = open_store(scene.full.path.parent / "another")
        other.import_(scene.tune, "base")
        other.push(Remote(bucket), "base", replace=True)
    elif why == "damaged":
        bucket.put("refs/base", [memoryview(b"nothing")])
    elif why == "noted":
        catalog.drop(bucket, [*catalog.catalog_of(bucket).containers])
    assert sent(scene.pushed(bucket, replace=why == "replaced")) == 6 + 1
    if why == "noted":
        (fault,) = Remote(bucket).verify(full=True).faults  # which takes the note back
        assert "it is whole" in fault.what
    if why not in ("damaged", "another"):
        scene.check(bucket, why)


@short
def test_an_old_answer_that_the_base_is_there_is_not_believed(scene: Scene) -> None:
    """Its pages have gone since: a sweep has condemned them, and another has deleted them.

    What is left there has short prefixes, so it may seem to hold pieces of the base.
    """
    scene.full.push(Remote(scene.start), "other")
    past, bucket = scene.bucket(), scene.bucket()
    Remote(bucket).delete("base")
    for _ in range(2):
        Remote(bucket).gc(24)
        bucket.clock += 25 * HOUR
    assert sum(key.startswith("manifests/") for key in bucket.objects) == 6 + 1
    server = FaultyProxy(MemoryS3(bucket))
    server.arm()
    scene.full.push(Remote(client(server.port)), "tune")
    at = server.requests.index("GET refs/base")
    bucket.objects = dict(past.objects)
    Remote(bucket).delete("base")
    for _ in range(2):
        Remote(bucket).gc(24)
        bucket.clock += 25 * HOUR
    server.arm(at, "stale", stale=MemoryS3(past))
    scene.full.push(Remote(client(server.port)), "tune")
    assert server.requests[at : at + 2] == ["GET refs/base", "GET refs/base if-match"]
    scene.check(bucket, "stale")
    server.close()


@pytest.mark.parametrize(
    ("scene", "now"),
    [
        ("short", "the base has gone"),
        ("whole", "the base has come"),
        pytest.param("short", "the base has come", marks=pytest.mark.long),
        pytest.param("whole", "the base has gone", marks=pytest.mark.long),
    ],
    indirect=["scene"],
)
def test_one_old_answer_of_any_request_loses_nothing(scene: Scene, now: str) -> None:
    """The remote was a lease ago what it is not any longer."""
    scene.full.push(Remote(scene.start), "other")
    there, gone = scene.bucket(), scene.bucket()
    Remote(gone).delete("base")
    for _ in range(2):
        Remote(gone).gc(24)
        gone.clock += 25 * HOUR
    assert sum(key.startswith("manifests/") for key in gone.objects) == 6 + 1
    present, past = (gone, there) if now == "the base has gone" else (there, gone)
    asked = list[str]()
    at = 0
    while at <= len(asked):
        bucket = present.copied()
        server = FaultyProxy(MemoryS3(bucket))
        server.arm(at, "stale", stale=MemoryS3(past.copied()))
        with suppress(StoreError):
            scene.full.push(Remote(client(server.port)), "tune")
        asked = server.requests
        server.close()
        if at < len(asked) and asked[at].startswith(("GET", "HEAD", "LIST")):
            scene.check(bucket, (at, asked[at]))
            scene.full.push(Remote(bucket), "tune")
            assert Remote(bucket).verify(full=True).fine, (at, asked[at])
        at += 1
    assert at > 12


@pytest.mark.parametrize(
    ("scene", "rival"),
    [
        ("short", "condemned"),
        ("short", "deleted"),
        ("short", "swept twice"),
        ("whole", "swept twice"),
        pytest.param("whole", "condemned", marks=pytest.mark.long),
        pytest.param("whole", "deleted", marks=pytest.mark.long),
    ],
    indirect=["scene"],
)
def test_a_base_that_is_deleted_at_any_moment_of_a_push(scene: Scene, rival: str) -> None:
    for number, call in enumerate(scene.calls()):
        if rival == "swept twice" and call == "put_if refs/tune":
            continue  # a lease that a push outlasts is refused by its own clock
        inner = scene.bucket()

        def meanwhile(inner: MemoryBucket = inner) -> None:
            Remote(inner).delete("base")
            if rival != "deleted":
                assert Remote(inner).gc(24).done
            if rival == "swept twice":
                inner.clock += 25 * HOUR
                Remote(inner).gc(24)

        gate = Faulty(inner, number, meanwhile=meanwhile)
        with suppress(StoreError) if rival == "swept twice" else nullcontext():
            scene.full.push(Remote(gate), "tune")
        assert gate.struck
        scene.check(inner, (number, call))
        scene.full.push(Remote(inner), "tune")
        scene.check(inner, (number, call))
        assert Remote(inner).names() == ["tune"]


@pytest.mark.parametrize("faults", [(*FAULTS, *READ_FAULTS)])
def test_such_a_push_is_whole_or_is_not(scene: Scene, faults: tuple[str, ...]) -> None:
    for number, call in enumerate(scene.calls()):
        for fault in faults:
            inner = scene.bucket()
            gate = Faulty(inner, number, fault)
            with suppress(StoreError, Killed):
                scene.full.push(Remote(gate), "tune")
            found = Remote(inner).verify(full=True)
            assert found.fine, (call, fault, found.faults)
            scene.full.push(Remote(inner), "tune")
            assert Remote(inner).verify(full=True).fine, (call, fault)
            assert Remote(inner).names() == ["base", "tune"]


def test_a_page_that_is_lost_is_sent_where_others_write_the_catalog(scene: Scene) -> None:
    """What was relied on in vain is not again: or each attempt would end the same way."""
    inner = scene.bucket()
    calls = scene.calls()
    kept = {key for key in inner.objects if key.startswith("manifests/")}
    probe = scene.bucket()
    scene.pushed(probe)
    read = Remote(probe).read("tune")
    [page] = [p for p in read.blobs if layout.manifest_key(p) in kept][:1]

    def meanwhile() -> None:
        del inner.objects[layout.manifest_key(page)]
        blob = inner.objects[layout.HEAD][0]
        inner.put(layout.HEAD, [memoryview(blob)])

    gate = Faulty(inner, calls.index(f"put_if {layout.HEAD}"), meanwhile=meanwhile)
    scene.full.push(Remote(gate), "tune")
    scene.check(inner, "lost")
