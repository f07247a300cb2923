"""Tensors that share leaves with stored ones: what they cost, and that nothing of them is lost."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from store_runs.stores import (
    KIB,
    assert_clean,
    assert_same,
    content,
    handle,
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
from tensor_dedup.digest import LEAF_BYTES, digest, leaf_digests
from tensor_dedup.store import LocalStore
from tensor_dedup.store import index as index_module
from tensor_dedup.store.codecs.interface import AGAINST_BASE
from tensor_dedup.store.codecs.records import entry
from tensor_dedup.store.errors import CorruptTensorError, UnfitForCollectionError
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.tables import Record, Table
from tensor_dedup.store.hashing import Hashed
from tensor_dedup.store.writing.deltas import LeafSharing

ROW = 1792  # bytes; leaves do not end where rows do
BASE = noise(1, 6 * LEAF_BYTES + 300 * ROW)


def changed(data: bytes, *places: int, nbytes: int = ROW) -> bytes:
    found = bytearray(data)
    for number, at in enumerate(places):
        found[at : at + nbytes] = noise(100 + number + at, nbytes)
    return bytes(found)


CHANGED = changed(BASE, 3 * LEAF_BYTES + 5)
SPREAD = changed(BASE, *(number * LEAF_BYTES + 5 for number in (0, 1, 2, 4)))
GROWN = BASE + noise(2, 256 * ROW)
SHRUNK = BASE[: 4 * LEAF_BYTES]


def saved(folder: Path, data: bytes, **more: bytes) -> Path:
    return write(folder, {"model.safetensors": safetensors(u8(embedding=data, **more))})


def container_bytes(store: LocalStore) -> int:
    return sum(p.stat().st_size for p in (store.path / "containers").rglob("*") if p.is_file())


def codec_of(store: Store, name: str) -> tuple[str, str | None]:
    with store.checkpoint(name) as checkpoint:
        codec, _, base = checkpoint.stored(checkpoint["embedding"])
        return codec, base


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(tmp_path / "store")
    store.import_(saved(tmp_path / "base", BASE))
    return store


@pytest.mark.parametrize("compress", [None, "auto"])
@pytest.mark.parametrize(
    ("data", "leaves"),
    [(CHANGED, 1), (SPREAD, 4), (GROWN, 1), (SHRUNK, 0), (changed(GROWN, 7, 2 * LEAF_BYTES), 3)],
    ids=["one row changed", "four rows changed", "grown", "shrunk", "grown and changed"],
)
def test_a_tensor_costs_the_leaves_that_differ(
    tmp_path: Path, store: Store, data: bytes, leaves: int, compress: str | None
) -> None:
    before = container_bytes(store)
    tune = saved(tmp_path / "tune", data)
    result = store.import_(tune, compress="auto" if compress else None)
    assert codec_of(store, "tune") == ("leaves", digest(BASE))
    most = leaves * LEAF_BYTES + max(0, len(data) - len(BASE)) + 8 * KIB
    assert container_bytes(store) - before <= most
    assert result.leaf_shared_bytes >= len(data) - most
    assert_clean(store, {"base": content(tmp_path / "base"), "tune": content(tune)})
    with store.checkpoint("tune") as checkpoint:
        for start, stop in [(0, len(data)), (5, 9), (3 * LEAF_BYTES - 1, len(data) - 1)]:
            assert checkpoint.read_range("embedding", start, stop) == data[start:stop]


def test_what_codecs_make_smaller_they_make_smaller_by_leaf_too(tmp_path: Path) -> None:
    """A fine-tune of a grown vocabulary: no leaf is equal but one, and all are near the base's."""
    base = weights(1, 5 * LEAF_BYTES)
    near = tuned(base, 2)[: 4 * LEAF_BYTES] + base[4 * LEAF_BYTES :]
    near += weights(3, 256 * KIB)
    store = open_store(tmp_path / "store")
    bf16 = {"w": ("BF16", (len(base) // 2,), base)}
    store.import_(write(tmp_path / "base", {"model.safetensors": safetensors(bf16)}))
    tune = {"w": ("BF16", (len(near) // 2,), near)}
    path = write(tmp_path / "tune", {"model.safetensors": safetensors(tune)})
    before = container_bytes(store)
    store.import_(path, compress="auto")
    assert store.stats().codecs["leaves"].pieces == 1
    assert container_bytes(store) - before < 0.4 * len(near)
    assert stored(store, "tune") == content(path)
    assert store.verify(full=True).faults == []


def test_the_base_stays_for_as_long_as_it_is_needed(tmp_path: Path, store: Store) -> None:
    grown = saved(tmp_path / "grown", GROWN)
    store.import_(grown)
    whole = container_bytes(store)
    store.delete("base")
    assert_clean(store, {"grown": content(grown)})
    assert container_bytes(store) > len(BASE)
    store.export("grown", tmp_path / "out")
    assert content(tmp_path / "out") == content(grown)
    # It comes back from what is there: nothing of it is stored again.
    store.import_(tmp_path / "base")
    assert container_bytes(store) <= whole
    for name in ("base", "grown"):
        store.delete(name)
    store.gc(0)
    assert container_bytes(store) == 0


def test_a_delta_is_no_anchor(tmp_path: Path, store: Store) -> None:
    """What shares leaves with a tensor that is stored so itself is stored against its anchor."""
    store.import_(saved(tmp_path / "grown", GROWN))
    more = saved(tmp_path / "more", changed(GROWN, 5) + noise(3, 256 * ROW))
    store.import_(more)
    assert codec_of(store, "more") == ("leaves", digest(BASE))
    assert stored(store, "more") == content(more)


def test_files_of_others_are_no_anchors(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.import_(saved(tmp_path / "base", BASE), external=True)
    store.import_(saved(tmp_path / "grown", GROWN))
    assert codec_of(store, "grown") == ("raw", None)


def test_what_shares_little_is_stored_whole(tmp_path: Path, store: Store) -> None:
    other = noise(7, 20 * LEAF_BYTES)
    little = saved(tmp_path / "little", BASE[: 2 * LEAF_BYTES] + other[2 * LEAF_BYTES :])
    result = store.import_(little)
    assert (codec_of(store, "little"), result.leaf_shared_bytes) == (("raw", None), 0)


def test_damage_to_the_base_is_said_of_the_base(tmp_path: Path, store: Store) -> None:
    grown = saved(tmp_path / "grown", GROWN)
    store.import_(grown)
    (raw,) = (store.path / "containers").rglob("*.raw")
    flip(raw, raw.read_bytes().index(BASE[:64]) + 9)
    with store.checkpoint("grown") as checkpoint:
        # Of leaves that are not the base's, the base is not asked.
        assert checkpoint.read_range("embedding", len(BASE), len(GROWN)) == GROWN[len(BASE) :]
        with pytest.raises(CorruptTensorError):
            checkpoint.read("embedding")
    faults = store.verify(full=True).faults
    assert {fault.kind for fault in faults} == {"lost"}
    with pytest.raises(UnfitForCollectionError):
        store.gc(0)
    store.repair([tmp_path / "base"])
    expected = {"base": content(tmp_path / "base"), "grown": content(grown)}
    assert_clean(store, expected)


def test_a_damaged_tensor_is_no_anchor(tmp_path: Path, store: Store) -> None:
    """The index lists no leaf of a record that is marked, now and when it is made anew."""
    (raw,) = (store.path / "containers").rglob("*.raw")
    flip(raw, raw.read_bytes().index(BASE[:64]) + 9)
    grown, more = saved(tmp_path / "grown", GROWN), saved(tmp_path / "more", CHANGED)
    hashed = Hashed(bytes.fromhex(digest(GROWN)), b"".join(leaf_digests(GROWN)))
    with store.handle.session() as (index, _):
        assert index.find_alike(hashed.leaves)
    assert store.verify(full=True).faults
    with store.handle.session() as (index, _):
        assert index.find_alike(hashed.leaves) == []
    (store.path / "index.sqlite").unlink()
    again = open_store(store.path)
    with again.handle.session() as (index, _):
        assert index.find_alike(hashed.leaves) == []
    again.import_(grown)
    assert codec_of(again, "grown") == ("raw", None)
    # What is whole beside it is an anchor as ever.
    again.import_(more)
    assert codec_of(again, "more") == ("leaves", digest(GROWN))
    assert stored(again, "grown") == content(grown)
    assert stored(again, "more") == content(more)


def test_damage_to_a_leaf_of_its_own_is_found(tmp_path: Path, store: Store) -> None:
    grown = saved(tmp_path / "grown", GROWN)
    store.import_(grown)
    (delta,) = (store.path / "containers").rglob("*.delta")
    flip(delta, delta.read_bytes().index(GROWN[-64:]) + 9)
    [fault] = [each for each in store.verify(full=True).faults if each.kind == "tensor"]
    assert Path(fault.path) == delta
    store.repair([grown])
    assert_clean(store, {"base": content(tmp_path / "base"), "grown": content(grown)})


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.chmod(0o600)
    path.write_bytes(data)


def crafted(store: Store, data: bytes, base: bytes, chunks: list[bytes]) -> None:
    """A container with one record of the codec `leaves`, as no writer of ours makes it."""
    body = b"".join(map(entry, chunks)) + b"".join(chunks)
    leaves = b"".join(leaf_digests(data))
    whole = bytes.fromhex(digest(data))
    record = Record(whole, 0, len(body), len(data), "leaves", bytes.fromhex(digest(base)), leaves)
    name, blob = tables.encode(Table("delta", len(body), [record], None))
    path = store.handle.objects.layout.container(name, "delta")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body + blob + tables.tail(len(body)))


@pytest.mark.parametrize(
    "chunk",
    [b"", b"\0", b"\0" + bytes(9), b"\6leaves", b"\7planes", b"\4xor1" + bytes(40), b"\377"],
    ids=["not in the base", "empty", "short", "itself", "unknown", "not of this size", "no name"],
)
def test_a_lying_record_is_damage_and_the_base_is_not(
    tmp_path: Path, store: Store, chunk: bytes
) -> None:
    """The last leaf of what has grown is not the base's."""
    data = BASE + noise(5, LEAF_BYTES)
    numbers = range(0, len(data), LEAF_BYTES)
    whole = [
        b"" if at + LEAF_BYTES <= len(BASE) else b"\0" + data[at:][:LEAF_BYTES] for at in numbers
    ]
    right, wrong = open_store(tmp_path / "right"), store
    right.import_(tmp_path / "base")
    crafted(right, data, BASE, whole)
    crafted(wrong, data, BASE, [*whole[:-1], chunk])
    for each in (right, wrong):
        with each.open_pieces([digest(data), digest(BASE)]) as pieces:
            key = bytes.fromhex(digest(data))
            if each is right:
                assert pieces.read_piece(key, 0, len(data), len(data)) == data
                continue
            with pytest.raises(CorruptTensorError):
                pieces.read_piece(key, 0, len(data), len(data))
            base = bytes.fromhex(digest(BASE))
            assert pieces.read_piece(base, 0, len(BASE), len(BASE)) == BASE
    assert stored(store, "base") == content(tmp_path / "base")
    assert {each.kind for each in store.verify(full=True).faults} <= {"tensor"}


def test_a_reader_that_does_not_know_leaves_deletes_nothing(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What FORMAT.md asks of readers of an unknown codec holds for this one too."""
    store.import_(saved(tmp_path / "grown", GROWN))
    older = {name: base for name, base in AGAINST_BASE.items() if name != "leaves"}
    with monkeypatch.context() as before:
        before.setattr(tables, "AGAINST_BASE", older)
        older_store = open_store(store.path)
        faults = older_store.verify(full=True).faults
        assert "tensor" not in {fault.kind for fault in faults}
        assert any("leaves" in fault.what for fault in faults)
        with pytest.raises(UnfitForCollectionError):
            older_store.gc(0)
        assert stored(older_store, "base") == content(tmp_path / "base")
    assert stored(open_store(store.path), "grown") == content(tmp_path / "grown")


@pytest.mark.parametrize("number", range(7))
def test_every_leaf_leads_to_what_has_it(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """However many leaves are asked for, and wherever the one in common is."""
    monkeypatch.setattr(index_module, "_BATCH", 2)
    leaves = leaf_digests(BASE)
    assert len(leaves) == 7
    asked = b"".join(each if at == number else bytes(32) for at, each in enumerate(leaves))
    with store.handle.session() as (index, _):
        assert len(index.find_alike(asked)) == 1


def test_the_index_forgets_the_leaves_of_containers_that_are_gone(
    tmp_path: Path, store: Store
) -> None:
    def listed() -> int:
        with store.handle.session() as (index, _):
            return int(index._rows("SELECT count(*) FROM leaf")[0][0])

    other = noise(9, 3 * LEAF_BYTES)
    store.import_(saved(tmp_path / "grown", GROWN))
    store.import_(saved(tmp_path / "other", other))
    assert listed() == 7 + 3
    for name, left in [("grown", 7 + 3), ("base", 3), ("other", 0)]:
        store.delete(name)
        store.gc(0)
        assert listed() == left


def test_leaves_that_are_gone_are_not_found(tmp_path: Path, store: Store) -> None:
    """The index of a handle that stays open may speak of what another one has deleted."""
    hashed = Hashed(bytes.fromhex(digest(GROWN)), b"".join(leaf_digests(GROWN)))
    with store.handle.session() as (index, _):
        index.fresh = False
        sharing = LeafSharing(store.handle.objects, index)
        assert hashed.digest in sharing.find([(hashed, len(GROWN))])
    with store.handle.session() as (index, _):
        for path in (store.path / "containers").rglob("*.raw*"):
            path.unlink()
        index.fresh = False
        assert LeafSharing(store.handle.objects, index).find([(hashed, len(GROWN))]) == {}


# Runs.


def model(data: bytes) -> dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"]:
    return {"embedding": np.frombuffer(data, np.uint8).copy()}


@pytest.mark.parametrize("compress", [None, "auto", "always"])
@pytest.mark.parametrize("background", [False, True])
def test_steps_cost_the_leaves_that_differ(
    tmp_path: Path, compress: str | None, background: bool
) -> None:
    steps = [BASE, CHANGED, changed(CHANGED, 9), GROWN, SHRUNK]
    costs = []
    with handle(tmp_path / "store", compress=compress) as run:
        for step, data in enumerate(steps):
            before = container_bytes(run.store)
            if background:
                run.save_async(model(data), step).wait()
            else:
                run.save(model(data), step)
            costs.append(container_bytes(run.store) - before)
        for step, data in enumerate(steps):
            assert_same(run.load(step), model(data))
            run.store.export(f"run@{step}", tmp_path / "out" / f"{step}")
            [file] = (tmp_path / "out" / f"{step}").glob("*.safetensors")
            assert_same(load_file(file), model(data))
    extra = len(GROWN) - len(BASE) + 8 * KIB
    most = [LEAF_BYTES + extra, 2 * LEAF_BYTES + extra, LEAF_BYTES + extra, extra]
    assert all(cost <= bound for cost, bound in zip(costs[1:], most, strict=True)), costs
    assert run.store.verify(full=True).faults == []


def test_an_anchor_is_replaced_when_little_is_left_of_it(tmp_path: Path) -> None:
    """Steps that touch other leaves cost these; one that leaves nothing alone is stored whole."""
    data = noise(3, 8 * LEAF_BYTES)
    codecs = []
    with handle(tmp_path / "store", compress="auto") as run:
        for step in range(10):
            if step:
                at = (step - 1) % 8 * LEAF_BYTES
                data = data[:at] + noise(20 + step, LEAF_BYTES) + data[at + LEAF_BYTES :]
            run.save(model(data), step)
            with run.store.checkpoint(f"run@{step}") as checkpoint:
                codecs.append(checkpoint.stored(checkpoint["embedding"])[0])
        assert_same(run.load(9), model(data))
        assert codecs == ["raw", *["parts"] * 7, "raw", "parts"]
        # Two whole ones, and eight leaves.
        assert container_bytes(run.store) < 3 * len(data) + LEAF_BYTES
        assert run.store.verify(full=True).faults == []


def test_a_drain_brings_a_base_of_another_size(tmp_path: Path) -> None:
    with handle(tmp_path / "fast", compress=None, keep_last=1, drain=tmp_path / "slow") as run:
        run.save(model(BASE), 0)
        run.save(model(GROWN), 1)
        run.drain()
    slow = open_store(tmp_path / "slow")
    with slow.checkpoint("run@1") as checkpoint:
        assert checkpoint.stored(checkpoint["embedding"])[0] == "parts"
        assert checkpoint.read("embedding") == GROWN
    assert slow.verify(full=True).faults == []


# Everything together.

_PARTS = 4


@st.composite
def tensors(draw: st.DrawFn) -> tuple[int, ...]:
    """The leaves of a tensor, each one of a few contents, and how long the last one is."""
    leaves = draw(st.lists(st.integers(0, 3), min_size=1, max_size=_PARTS))
    return (*leaves, draw(st.sampled_from([1, 5000, LEAF_BYTES])))


_CONTENTS = [noise(40 + number, LEAF_BYTES) for number in range(4)]


def made(tensor: tuple[int, ...]) -> bytes:
    *leaves, last = tensor
    return b"".join(_CONTENTS[n] for n in leaves[:-1]) + _CONTENTS[leaves[-1]][:last]


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_anything_that_grows_shrinks_and_goes_comes_back(data: st.DataObject) -> None:
    """Imports with and without codecs, deletions and gc, beside plain copies of what is there."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store, held = open_store(root / "store"), dict[str, dict[str, bytes]]()
        for number in range(data.draw(st.integers(2, 6))):
            name = f"c{number}"
            path = saved(root / name, made(data.draw(tensors())), other=made(data.draw(tensors())))
            store.import_(path, compress=data.draw(st.sampled_from([None, "auto"])))
            held[name] = content(path)
            shutil.rmtree(path)
            if data.draw(st.booleans()):
                gone = data.draw(st.sampled_from(sorted(held)))
                store.delete(gone)
                del held[gone]
            if data.draw(st.booleans()):
                store.gc(0)
        assert_clean(store, held)
        for name, files in held.items():
            store.export(name, root / "out" / name)
            assert content(root / "out" / name) == files
