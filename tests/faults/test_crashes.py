"""A process dies in place of every single operation; nothing that was committed is lost or wrong.

Import, replace, delete, gc and repair run on a store with four references and a raw file, a slab,
a pack, a delta and a file indexed in place. After each death the disk forgets: nothing (a kill),
the bytes that were not synced, or names and bytes (a power cut); writes are torn in their middle
too. The clock of every other process that dies, and of who comes after it, is set back and forth by
hours from one operation to the next.
"""

import contextlib
import errno
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from store_runs.clocks import JUMPS, ClockedFiles, SetClock
from store_runs.disk_faults import (
    CHANGES,
    NEEDS_SPACE,
    WRITES,
    Crash,
    Faults,
    FaultyFiles,
    Loss,
    some_changes,
)
from store_runs.stores import (
    KIB,
    Content,
    assert_clean,
    content,
    noise,
    open_store,
    safetensors,
    stored,
    three,
    tuned,
    u8,
    weights,
    write,
)
from tensor_dedup import Store
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import (
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    NoSpaceError,
)

Expected = Mapping[str, Content]
_SOME = 20


@dataclass(frozen=True)
class World:
    """A store as it was before, the checkpoints it came from, and what they hold."""

    root: Path
    store: Path
    paths: Mapping[str, Path]
    content: Mapping[str, Content]

    def only(self, *names: str) -> Expected:
        """These, and the one whose weights are indexed where they are."""
        return {name: self.content[name] for name in (*names, "outside")}

    @property
    def committed(self) -> Expected:
        return self.only("base", "tune", "tiny")


@pytest.fixture(scope="module")
def world(shared_folder: Path) -> World:
    root = shared_folder
    paths = three(root)
    shared = (paths["base"] / "model.safetensors").read_bytes()[-5 * KIB :]
    new = safetensors(u8(p=noise(20, 1100 * KIB), q=noise(21, 90)))
    # Stored against a tensor of `base`, in a container beside the one of `tune`.
    delta = tuned(weights(2, 400 * KIB), 24)
    part = safetensors(u8(known=shared, r=noise(22, 80 * KIB), s=noise(23, 3 * KIB), b=delta))
    files = {"big.safetensors": new, "small.safetensors": part, "config.json": b"{}"}
    paths["new"] = write(root / "new", files)
    outside = safetensors(u8(o=noise(30, 300 * KIB), known=shared), {"format": "pt"})
    paths["outside"] = write(root / "outside", {"o.safetensors": outside, "config.json": b"[]"})
    (root / "limbo").mkdir()
    store = open_store(root / "store", FaultyFiles(root / "limbo"))
    for name in ("base", "tune", "tiny"):
        store.import_(paths[name], base="base" if name == "tune" else None)
    store.import_(paths["outside"], external=True)
    kinds = {container.suffix for container in (root / "store" / "containers").rglob("*")}
    assert kinds >= {".raw", ".slab", ".pack", ".delta", ".external"}
    return World(root, root / "store", paths, {n: content(p) for n, p in paths.items()})


class Scene:
    """Runs one operation on copies of a store, dying at each of its steps in turn."""

    points = jumps = 0

    def __init__(self, world: World, folder: Path, before: Callable[[Store], None]) -> None:
        self._folder = folder
        self._template = folder / "template"
        self._disk: ClockedFiles | None = None
        shutil.copytree(world.store, self._template)
        before(open_store(self._template, self._files(folder / "first")))
        self._numbers = itertools.count()

    def _files(self, limbo: Path, faults: Faults | None = None) -> FaultyFiles:
        limbo.mkdir(parents=True)
        return FaultyFiles(limbo, faults, inner=self._disk)

    def stage(self, faults: Faults) -> tuple[Path, FaultyFiles]:
        folder = self._folder / str(next(self._numbers))
        shutil.copytree(self._template, folder / "store")
        return folder, self._files(folder / "limbo", faults)

    def reopened(self, folder: Path) -> Store:
        """The store of a stage, through another way to the disk."""
        return open_store(folder / "store", self._files(folder / "after"))

    def steps(self, act: Callable[[Store], object]) -> list[str]:
        """The operations of one undisturbed run."""
        folder, files = self.stage(Faults())
        store = open_store(folder / "store", files)
        opened = len(files.log)
        act(store)
        shutil.rmtree(folder)
        return ["before"] * opened + files.log[opened:]

    def run(self, act: Callable[[Store], object], faults: Faults, loss: Loss) -> Iterator[Store]:
        """The store as another process finds it after the death."""
        jumps = Scene.points % 2 > 0
        self._disk = ClockedFiles(SetClock(jumps=JUMPS)) if jumps else None
        folder, files = self.stage(faults)
        with pytest.raises(Crash):
            act(open_store(folder / "store", files))
        files.lose(loss)
        if loss == "bytes":
            # The index was ahead of the disk; here it is gone altogether.
            for path in (folder / "store").glob("index.sqlite*"):
                path.unlink()
        yield self.reopened(folder)
        self._disk = None
        Scene.points += 1
        Scene.jumps += jumps
        shutil.rmtree(folder)

    def deaths(
        self, act: Callable[[Store], object], every: bool, one_in: int = 1
    ) -> Iterator[Store]:
        """At `every` step, with every kind of loss where it changes something.

        Else at one in so many of the steps that change something, in turn with one kind of loss,
        and at some of those that only read: a death there leaves what a death at the next change
        leaves.
        """
        kinds: list[Loss] = ["everything", "bytes", "nothing"]
        steps = self.steps(act)
        some = some_changes(enumerate(steps), one_in)
        turn = itertools.count()
        for number, operation in enumerate(steps):
            skipped = number not in some if operation in CHANGES else number % (_SOME * one_in)
            if operation == "before" or (skipped and not every):
                continue
            losses = kinds if every and operation in CHANGES else [kinds[next(turn) % 3]]
            for loss in losses:
                yield from self.run(act, Faults(stop_at=number), loss)
            if operation in WRITES:
                yield from self.run(act, Faults(stop_at=number, torn=True), "nothing")


@pytest.fixture(params=["some losses", pytest.param("all losses", marks=pytest.mark.long)])
def every(request: pytest.FixtureRequest) -> bool:
    return str(request.param) == "all losses"


def _nothing(store: Store) -> None:
    pass


def _either(store: Store, *states: Expected) -> Expected:
    names = [listed.name for listed in store.list()]
    return next(state for state in states if sorted(state) == names)


def test_import(world: World, folder: Path, every: bool) -> None:
    scene = Scene(world, folder, _nothing)
    after = world.only("base", "tune", "tiny", "new")
    seen = set()
    for store in scene.deaths(_import_new(world), every, one_in=10):
        state = _either(store, world.committed, after)
        seen.add(len(state))
        assert_clean(store, state)
        store.import_(world.paths["new"], replace=True)
        assert_clean(store, after)
    assert seen == {4, 5}


def test_indexing_in_place(world: World, folder: Path, every: bool) -> None:
    scene = Scene(world, folder, _nothing)
    after = world.only("base", "tune", "tiny", "new")

    def act(store: Store) -> None:
        store.import_(world.paths["new"], external=True)

    for store in scene.deaths(act, every, one_in=12):
        assert_clean(store, _either(store, world.committed, after))
    assert content(world.paths["new"]) == world.content["new"]


def test_replacing(world: World, folder: Path, every: bool) -> None:
    scene = Scene(world, folder, _nothing)
    replaced = {**world.committed, "tiny": world.content["new"]}
    seen = set()

    def act(store: Store) -> None:
        store.import_(world.paths["new"], "tiny", replace=True, base="base")

    for store in scene.deaths(act, every, one_in=16):
        # One or the other, whole: never no checkpoint of that name, never a mixture.
        state = replaced if "big.safetensors" in stored(store, "tiny") else world.committed
        seen.add(state is replaced)
        assert_clean(store, state)
    assert seen == {False, True}


def test_delete(world: World, folder: Path) -> None:
    scene = Scene(world, folder, _nothing)
    left = world.only("base", "tiny")
    for store in scene.deaths(lambda store: store.delete("tune"), True):
        assert_clean(store, _either(store, world.committed, left))


def test_rename(world: World, folder: Path) -> None:
    """It has one of its names or, when that is interrupted, both."""
    scene = Scene(world, folder, _nothing)
    both = {**world.committed, "new-name": world.content["tune"]}
    states = world.committed, both, {n: held for n, held in both.items() if n != "tune"}
    seen = set()
    for store in scene.deaths(lambda store: store.rename("tune", "new-name"), True):
        state = _either(store, *states)
        seen.add(states.index(state))
        assert_clean(store, state)
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("grace", [0, 24])
def test_gc(world: World, folder: Path, grace: int, every: bool) -> None:
    def before(store: Store) -> None:
        store.import_(world.paths["new"], compress="auto")
        store.delete("new")
        (store.path / "tmp" / "left-behind").write_bytes(b"half a tensor")

    scene = Scene(world, folder, before)
    for store in scene.deaths(lambda store: store.gc(grace), every, one_in=12):
        assert_clean(store, world.committed)


def test_gc_of_a_base_whose_deltas_live_on(world: World, folder: Path) -> None:
    scene = Scene(world, folder, lambda store: store.delete("base"))
    for store in scene.deaths(lambda store: store.gc(0), False):
        assert_clean(store, world.only("tune", "tiny"))


@pytest.fixture
def by_leaf(folder: Path) -> World:
    """A store with a tensor of two leaves and a bit, what that grew to, and one that it may get."""
    data = noise(50, 2 * LEAF_BYTES + 9 * KIB)
    tensors = {
        "base": data,
        "grown": data + noise(51, 3 * KIB),
        "new": data[:LEAF_BYTES] + noise(52, KIB) + data[LEAF_BYTES + KIB : 2 * LEAF_BYTES],
    }
    root = folder / "by leaf"
    paths = {
        name: write(root / name, {"m.safetensors": safetensors(u8(embedding=data))})
        for name, data in tensors.items()
    }
    store = open_store(root / "store")
    store.import_(paths["base"])
    result = store.import_(paths["grown"])
    assert result.leaf_shared_bytes == 2 * LEAF_BYTES
    return World(root, root / "store", paths, {n: content(p) for n, p in paths.items()})


def test_import_of_what_shares_leaves(by_leaf: World, folder: Path, every: bool) -> None:
    scene = Scene(by_leaf, folder, _nothing)
    before = {name: by_leaf.content[name] for name in ("base", "grown")}
    after = {**before, "new": by_leaf.content["new"]}
    seen = set()
    for store in scene.deaths(_import_by_leaf(by_leaf), every, one_in=16):
        state = _either(store, before, after)
        seen.add(len(state))
        assert_clean(store, state)
        store.import_(by_leaf.paths["new"], replace=True)
        assert {"leaves", "raw"} == set(store.stats().codecs)
        assert_clean(store, after)
    assert seen == {2, 3}


def test_gc_of_a_base_whose_leaves_live_on(by_leaf: World, folder: Path) -> None:
    scene = Scene(by_leaf, folder, lambda store: store.delete("base"))
    for store in scene.deaths(lambda store: store.gc(0), False):
        assert_clean(store, {"grown": by_leaf.content["grown"]})


def test_an_import_refers_to_no_container_that_a_power_cut_takes(tmp_path: Path) -> None:
    """An import is killed before its containers' names are durable; another one finds them."""
    files_of = {"model.safetensors": safetensors(u8(a=noise(1, 5000)))}
    source = write(tmp_path / "source", files_of)

    def killed(case: Path, point: int | None) -> FaultyFiles:
        for part in ("limbo", "again"):
            (case / part).mkdir(parents=True)
        open_store(case / "store")
        files = FaultyFiles(case / "limbo", Faults(stop_at=point))
        with contextlib.suppress(Crash):
            open_store(case / "store", files).import_(source, "first")
        return files

    log = killed(tmp_path / "whole", None).log
    points = [number for number, what in enumerate(log) if what == "sync_folder"]
    assert len(points) > 4
    for point in points:
        case = tmp_path / f"{point}"
        files = killed(case, point)
        unsynced = [*files._journal]
        files.lose("nothing")
        again = FaultyFiles(case / "again")
        again._journal += unsynced
        open_store(case / "store", again).import_(source, "second")
        again.lose("everything")
        assert stored(open_store(case / "store"), "second") == files_of


def test_gc_keeps_no_container_that_a_power_cut_takes(tmp_path: Path) -> None:
    """Of two that hold the same, the writer of one was killed before its name was durable."""
    kept = {"model.safetensors": safetensors(u8(a=noise(1, 5000)))}
    (tmp_path / "limbo").mkdir()
    files = FaultyFiles(tmp_path / "limbo")
    store = open_store(tmp_path / "store", files)
    store.import_(write(tmp_path / "kept", kept), "kept")
    [own] = (store.path / "containers").rglob("*.pack")
    for number in itertools.count():
        other = open_store(tmp_path / f"other{number}")
        more = write(tmp_path / f"in{number}", {**kept, "extra.txt": f"{number}".encode()})
        other.import_(more, "other")
        [theirs] = (other.path / "containers").rglob("*.pack")
        if theirs.name < own.name:  # then it is the one that stays
            break
    handle = files.open(store.path / "tmp" / "theirs", "create")
    files.pwrite(handle, theirs.read_bytes(), 0)
    files.fsync(handle)
    files.close(handle)
    target = store.path / "containers" / theirs.name[:2] / theirs.name
    files.mkdir(target.parent)
    files.rename(handle.path, target)
    store.gc(0)
    assert [own.exists(), target.exists()] == [False, True]
    files.lose("everything")
    assert_clean(open_store(tmp_path / "store"), {"kept": kept})


def test_repair_of_an_anchor(world: World, folder: Path, every: bool) -> None:
    def before(store: Store) -> None:
        store.delete("base")
        (raw,) = (store.path / "containers").rglob("*.raw")
        flip(raw, raw.read_bytes().index(weights(2, 400 * KIB)[:64]) + 9)
        assert not store.verify(full=True).fine

    def repair(store: Store) -> None:
        store.repair([world.paths["base"]])

    scene = Scene(world, folder, before)
    for store in scene.deaths(repair, every, one_in=12):
        assert store.repair([world.paths["base"]]).missing == []
        assert_clean(store, world.only("tune", "tiny"))


@pytest.mark.parametrize("gone", [False, True], ids=["of a checkpoint", "of none"])
def test_repair_of_a_leaf_that_others_have(
    by_leaf: World, folder: Path, gone: bool, every: bool
) -> None:
    """A leaf of the base is damaged, which is what the grown one has of it."""

    def before(store: Store) -> None:
        if gone:
            store.delete("base")
        (raw,) = (store.path / "containers").rglob("*.raw")
        flip(raw, raw.read_bytes().index(noise(50, 64)) + LEAF_BYTES)
        with pytest.raises(CorruptTensorError):
            stored(store, "grown")
        assert not store.verify(full=True).fine

    def repair(store: Store) -> None:
        store.repair([by_leaf.paths["base"]])

    scene = Scene(by_leaf, folder, before)
    names = ["grown"] if gone else ["base", "grown"]
    for store in scene.deaths(repair, every, one_in=12):
        assert store.repair([by_leaf.paths["base"]]).missing == []
        assert_clean(store, {name: by_leaf.content[name] for name in names})
        assert "leaves" in store.stats().codecs


def _damage(store: Store) -> None:
    """A flipped bit in the bytes of each kind of container, in a page and in a reference."""
    for suffix in ("raw", "slab", "pack", "delta", "external"):
        for path in (store.path / "containers").rglob(f"*.{suffix}"):
            flip(path, 6)
    with store.checkpoint("tiny") as checkpoint:
        manifest = store.path / "manifests" / checkpoint.manifest[:2] / checkpoint.manifest
    flip(manifest, 30)
    flip(store.path / "refs" / "tune", 60)
    assert not store.verify(full=True).fine


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_repair(world: World, folder: Path, every: bool) -> None:
    scene = Scene(world, folder, _damage)
    paths = [world.paths[name] for name in world.committed]
    for store in scene.deaths(lambda store: store.repair(paths), every, one_in=24):
        for name, files in world.committed.items():
            with contextlib.suppress(DamagedFileError, CorruptTensorError, MissingObjectError):
                assert stored(store, name) == files
        assert store.repair(paths).missing == []
        assert_clean(store, world.committed)


def _states(world: World) -> dict[str, Expected]:
    """What is there after each of the acts."""
    return {
        "import": world.only("base", "tune", "tiny", "new"),
        "replace": {**world.committed, "tiny": world.content["new"]},
        "delete": world.only("base", "tiny"),
        "rename": {**world.only("base", "tiny"), "new-name": world.content["tune"]},
        "gc": world.committed,
    }


ACTS: dict[str, Callable[[World, Store], object]] = {
    "import": lambda world, store: store.import_(world.paths["new"], base="base"),
    "replace": lambda world, store: store.import_(world.paths["new"], "tiny", True, base="base"),
    "delete": lambda world, store: store.delete("tune"),
    "rename": lambda world, store: store.rename("tune", "new-name"),
    "gc": lambda world, store: store.gc(0),
}


@pytest.mark.parametrize("verb", ACTS)
def test_a_clock_that_jumps_at_any_operation_loses_nothing(
    world: World, folder: Path, verb: str, every: bool
) -> None:
    """By hours, in the middle of it: for good, or set right when it has returned."""
    scene = Scene(world, folder, _nothing)
    operations = len(scene.steps(lambda store: ACTS[verb](world, store)))
    kept = set()
    for turn, number in enumerate(range(0, operations, max(1, operations // (12 if every else 3)))):
        for hours in (-30, 49):
            clock = SetClock()
            scene._disk = ClockedFiles(clock)
            stage, files = scene.stage(Faults(at={number: partial(_set, clock, hours)}))
            ACTS[verb](world, open_store(stage / "store", files))
            clock.hours = 0 if turn % 2 else clock.hours
            for store in (scene.reopened(stage), open_store(stage / "store")):
                assert_clean(store, _states(world)[verb])
            kept.add(clock.hours)
            scene._disk = None
            Scene.points += 1
            Scene.jumps += 1
            shutil.rmtree(stage)
    assert kept == {0, -30, 49}


def _set(clock: SetClock, hours: float) -> None:
    clock.hours = hours


@pytest.mark.parametrize("loss", ["bytes", "everything"])
@pytest.mark.parametrize("verb", ACTS)
def test_what_has_returned_survives_a_power_cut(
    world: World, folder: Path, verb: str, loss: Loss
) -> None:
    scene = Scene(world, folder, _nothing)
    stage, files = scene.stage(Faults())
    ACTS[verb](world, open_store(stage / "store", files))
    files.lose(loss)
    Scene.points += 1
    assert_clean(scene.reopened(stage), _states(world)[verb])


@pytest.mark.parametrize("loss", ["bytes", "everything"])
def test_what_was_repaired_survives_a_power_cut(world: World, folder: Path, loss: Loss) -> None:
    scene = Scene(world, folder, _damage)
    stage, files = scene.stage(Faults())
    store = open_store(stage / "store", files)
    store.repair([world.paths[name] for name in world.committed])
    files.lose(loss)
    Scene.points += 1
    assert_clean(scene.reopened(stage), world.committed)


@pytest.mark.parametrize("loss", ["bytes", "everything"])
def test_a_new_store_survives_a_power_cut(folder: Path, loss: Loss) -> None:
    (folder / "limbo").mkdir()
    files = FaultyFiles(folder / "limbo")
    open_store(folder / "a" / "b" / "store", files)
    files.lose(loss)
    assert Store.open(folder / "a" / "b" / "store", create=False).list() == []


def test_dying_while_a_store_is_made(folder: Path) -> None:
    for number in itertools.count():
        stage = folder / str(number)
        (stage / "limbo").mkdir(parents=True)
        files = FaultyFiles(stage / "limbo", Faults(stop_at=number))
        try:
            open_store(stage / "store", files)
        except Crash:
            files.lose("everything" if number % 2 else "nothing")
            Scene.points += 1
            assert_clean(open_store(stage / "store"), {})
        else:
            break
    assert number > 10


def test_that_was_often_enough(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        jumps = f"{Scene.jumps} of them with a clock that jumps"
        print(f"\ncrash points: {Scene.points}, {jumps}")  # noqa: T201 (the number is a result)
    assert Scene.points >= 200
    assert Scene.jumps >= 100


def _import_by_leaf(world: World) -> Callable[[Store], object]:
    return lambda store: store.import_(world.paths["new"])


def _import_new(world: World) -> Callable[[Store], object]:
    return lambda store: store.import_(world.paths["new"], base="base")


@pytest.mark.parametrize("code", [errno.EIO, pytest.param(errno.EACCES, marks=pytest.mark.long)])
def test_an_operation_that_fails_once_can_be_done_again(
    world: World, folder: Path, code: int, every: bool
) -> None:
    scene = Scene(world, folder, _nothing)
    after = world.only("base", "tune", "tiny", "new")
    act = _import_new(world)
    steps = scene.steps(act)
    some = some_changes(enumerate(steps), 20)
    for number, operation in enumerate(steps):
        skipped = number not in some if operation in CHANGES else number % (4 * _SOME)
        if operation == "before" or (skipped and not every):
            continue
        stage, files = scene.stage(Faults(fail={number: code}))
        store = open_store(stage / "store", files)
        with contextlib.suppress(StoreError):  # some failures can be lived with
            act(store)
        state = _either(store, world.committed, after)
        assert_clean(store, state)
        store.import_(world.paths["new"], replace=True)
        assert_clean(store, after)
        files.lose("nothing")
        shutil.rmtree(stage)


@pytest.mark.parametrize("verb", ["import", "gc"])
def test_a_full_disk_loses_nothing(world: World, folder: Path, verb: str, every: bool) -> None:
    def before(store: Store) -> None:
        if verb == "gc":
            store.delete("tune")

    scene = Scene(world, folder, before)
    expected = world.committed if verb == "import" else world.only("base", "tiny")
    act = _import_new(world) if verb == "import" else (lambda store: store.gc(24))
    tried = 0
    steps = scene.steps(act)
    some = some_changes(enumerate(steps), 4)
    for number, operation in enumerate(steps):
        if operation in NEEDS_SPACE and (every or number in some):
            stage, files = scene.stage(Faults(full_from=number))
            with pytest.raises(NoSpaceError, match="gc"):
                act(open_store(stage / "store", files))
            assert_clean(scene.reopened(stage), expected)
            shutil.rmtree(stage)
            tried += 1
    assert tried >= 3
