"""Encoded tensors come back byte for byte, cost less, and keep what they are stored against."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store_runs.stores import (
    KIB,
    MIB,
    Content,
    Tensors,
    assert_clean,
    content,
    noise,
    open_store,
    safetensors,
    stored,
    tuned,
    weights,
    write,
)
from tensor_dedup import Store
from tensor_dedup.digest import digest, leaf_digests
from tensor_dedup.formats.safetensors import DTYPE_BITS
from tensor_dedup.store.errors import (
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    UnknownNameError,
)
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.layout import StoreLayout
from tensor_dedup.store.format.tables import Record, Table
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredPieces

A, B = weights(1, 300 * KIB), weights(2, 5 * MIB)


def bf16(**tensors: bytes) -> Tensors:
    return {name: ("BF16", (len(data) // 2,), data) for name, data in tensors.items()}


def saved(folder: Path, tensors: Tensors, more: Tensors | None = None) -> Path:
    files = {"model.safetensors": safetensors(tensors)}
    if more is not None:
        files["more.safetensors"] = safetensors(more)
    return write(folder, files)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return saved(tmp_path / "base", bf16(a=A, b=B, c=noise(3, 200 * KIB)))


@pytest.fixture
def tune(tmp_path: Path) -> Path:
    return saved(tmp_path / "tune", bf16(a=tuned(A, 1), b=tuned(B, 2), c=noise(4, 200 * KIB)))


def codecs(store: Store, name: str) -> dict[str, str]:
    with store.checkpoint(name) as checkpoint:
        return {tensor.name: checkpoint.stored(tensor)[0] for tensor in checkpoint}


def bases(store: Store, name: str) -> dict[str, str | None]:
    with store.checkpoint(name) as checkpoint:
        return {tensor.name: checkpoint.stored(tensor)[2] for tensor in checkpoint}


KINDS = st.sampled_from(["noise", "weights", "zeros", "ones", "tuned", "few", "same"])


def made(kind: str, seed: int, nbytes: int, base: bytes) -> bytes:
    match kind:
        case "weights":
            return weights(seed, nbytes + nbytes % 2)[:nbytes]
        case "zeros" | "ones":
            return (b"\0" if kind == "zeros" else b"\xff") * nbytes
        case "tuned" | "few":
            share = 0.4 if kind == "tuned" else 0.001
            return (tuned(base[: nbytes // 2 * 2], seed, share) + base)[:nbytes]
        case "same":
            return base
    return noise(seed, nbytes)


_SLOW = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


@settings(_SLOW, max_examples=10)
@given(st.data())
def test_any_tensors_come_back(data: st.DataObject) -> None:
    come_back(data)


@pytest.mark.long
@settings(_SLOW, max_examples=25)
@given(st.data())
def test_any_more_tensors_come_back(data: st.DataObject) -> None:
    come_back(data)


def come_back(data: st.DataObject) -> None:
    first: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    second: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for number in range(data.draw(st.integers(1, 3))):
        dtype = data.draw(st.sampled_from(sorted(DTYPE_BITS)))
        count = data.draw(st.integers(4 * KIB, 40 * KIB)) * 4  # whole bytes, also of 6 bits
        nbytes = count * DTYPE_BITS[dtype] // 8
        under = made(data.draw(KINDS), number, nbytes, bytes(nbytes))
        over = made(data.draw(KINDS), 100 + number, nbytes, under)
        first[f"{number}"], second[f"{number}"] = (dtype, (count,), under), (dtype, (count,), over)
    compress = data.draw(st.sampled_from([None, "auto"]))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = {"a": saved(root / "a", first), "b": saved(root / "b", second)}
        store = open_store(root / "store")
        store.import_(paths["a"], compress="auto" if compress else None)
        store.import_(paths["b"], compress="auto", base="a" if data.draw(st.booleans()) else None)
        assert_clean(store, {name: content(path) for name, path in paths.items()})
        with store.checkpoint("b") as checkpoint:
            for name, (_, _, raw) in second.items():
                assert checkpoint[name].digest == digest(raw)
                start, stop = sorted(data.draw(st.integers(0, len(raw))) for _ in range(2))
                assert checkpoint.read_range(name, start, stop) == raw[start:stop]


def test_a_fine_tune_costs_what_differs(store: Store, base: Path, tune: Path) -> None:
    store.import_(base)
    result = store.import_(tune, compress="auto", base="base")
    assert codecs(store, "tune") == {"a": "nibble2", "b": "nibble2", "c": "raw"}
    assert (result.encoded_tensors, result.base) == (2, "base")
    assert result.saved_bytes > 0.8 * (len(A) + len(B))
    with store.checkpoint("base") as checkpoint:
        digests = {tensor.name: tensor.digest for tensor in checkpoint}
    assert bases(store, "tune") == {"a": digests["a"], "b": digests["b"], "c": None}
    assert_clean(store, {"base": content(base), "tune": content(tune)})
    found = store.stats().codecs
    assert (found["nibble2"].pieces, found["nibble2"].nbytes) == (2, len(A) + len(B))
    assert found["nibble2"].stored_bytes == len(A) + len(B) - result.saved_bytes


def test_the_base_is_found_by_what_it_holds(store: Store, base: Path, tune: Path) -> None:
    root = base.parent
    store.import_(saved(root / "other", bf16(a=weights(7, len(A)), b=weights(8, len(B)))))
    store.import_(base)
    store.import_(saved(root / "third", bf16(b=weights(9, len(B)))))
    assert store.import_(tune, compress="auto").base == "base"


def test_tensors_under_other_names_are_found_by_their_bits(store: Store, base: Path) -> None:
    two = weights(11, len(A))
    path = saved(base.parent / "two", bf16(x=two, y=A))
    store.import_(path)
    renamed = saved(base.parent / "renamed", bf16(p=tuned(A, 5), q=tuned(two, 6)))
    store.import_(renamed, compress="auto", base="two")
    found = bases(store, "renamed")
    assert found == {"p": digest(A), "q": digest(two)}
    assert stored(store, "renamed") == content(renamed)


def test_what_has_no_relative_is_encoded_by_itself(store: Store, base: Path) -> None:
    result = store.import_(base, compress="auto")
    assert (result.base, result.encoded_tensors) == (None, 2)
    assert codecs(store, "base") == {"a": "planes2", "b": "planes2", "c": "raw"}
    assert result.stored_bytes < 0.75 * result.new_bytes
    assert_clean(store, {"base": content(base)})


def test_noise_stays_a_whole_file(store: Store, tmp_path: Path) -> None:
    path = saved(tmp_path / "m", bf16(a=noise(1, 2 * MIB)))
    result = store.import_(path, compress="auto")
    assert [container.rpartition(".")[2] for container in result.containers] == ["raw"]
    assert (result.encoded_tensors, result.saved_bytes) == (0, 0)


def test_no_delta_is_against_a_delta(store: Store, base: Path, tune: Path) -> None:
    store.import_(base, compress="auto")
    store.import_(tune, compress="auto", base="base")
    again = bf16(a=tuned(tuned(A, 1), 5), b=tuned(tuned(B, 2), 6))
    path = saved(base.parent / "again", again)
    store.import_(path, compress="auto", base="tune")
    assert bases(store, "again") == {"a": digest(A), "b": digest(B)}
    # The anchors are encoded themselves, which is one step and never two.
    assert codecs(store, "base")["b"] == "planes2"
    assert_clean(store, {"base": content(base), "tune": content(tune), "again": content(path)})


def test_a_base_that_is_not_there_is_refused(store: Store, tune: Path) -> None:
    with pytest.raises(UnknownNameError, match="nobody"):
        store.import_(tune, compress="auto", base="nobody")
    assert store.list() == []
    assert list((store.path / "tmp").iterdir()) == []


class Counting(RealFiles):
    """Counts what is read of the data of containers."""

    def __init__(self) -> None:
        self.read: dict[str, int] = {}

    def pread(self, handle: Handle, view: memoryview, offset: int) -> int:
        suffix = handle.path.suffix
        self.read[suffix] = self.read.get(suffix, 0) + view.nbytes
        return super().pread(handle, view, offset)


def test_a_range_costs_its_leaves(store: Store, base: Path, tune: Path) -> None:
    store.import_(base)
    store.import_(tune, compress="auto", base="base")
    files = Counting()
    with open_store(store.path, files).checkpoint("tune") as checkpoint:
        stored_bytes = checkpoint.stored(checkpoint["b"])[1]
        files.read.clear()
        assert (
            checkpoint.read_range("b", 2 * MIB + 10, 2 * MIB + 30)
            == tuned(B, 2)[2 * MIB + 10 : 2 * MIB + 30]
        )
    assert files.read[".raw"] == 2 * MIB
    assert files.read[".delta"] < 0.6 * stored_bytes


def test_an_anchor_stays_as_long_as_a_delta_needs_it(store: Store, base: Path, tune: Path) -> None:
    store.import_(base)
    store.import_(tune, compress="auto", base="base")
    expected = {"tune": content(tune)}
    store.delete("base")
    assert_clean(store, expected)
    assert store.stats().containers["raw"] == 1
    store.delete("tune")
    store.gc(0)
    assert store.stats().disk_bytes < 200 * KIB
    assert store.stats().containers == {}


def test_a_delta_that_nobody_uses_keeps_no_anchor(store: Store, tmp_path: Path) -> None:
    x, y = weights(1, 2 * MIB), weights(2, 2 * MIB)
    base = saved(tmp_path / "base", bf16(x=x), bf16(y=y))
    both = saved(tmp_path / "both", bf16(x=tuned(x, 1), y=tuned(y, 2)))
    one = saved(tmp_path / "one", bf16(x=tuned(x, 1)))
    store.import_(base)
    store.import_(both, compress="auto", base="base")
    assert store.import_(one).new_tensors == 0
    assert store.stats().containers == {"raw": 2, "delta": 1, "pack": 1}
    store.delete("base")
    store.delete("both")
    assert_clean(store, {"one": content(one)})
    # One of the two raw files went: the delta against it is still in its container, and dead.
    assert store.stats().containers["raw"] == 1
    result = store.import_(both)
    assert result.new_tensors == 1  # and is not taken for a hit
    assert_clean(store, {"one": content(one), "both": content(both)})


@pytest.fixture
def expected(store: Store, base: Path, tune: Path) -> dict[str, Content]:
    store.import_(base)
    store.import_(tune, compress="auto", base="base")
    return {"base": content(base), "tune": content(tune)}


def delta(store: Store) -> tuple[Path, Table]:
    (path,) = store.path.glob("containers/*/*.delta")
    objects = Objects(RealFiles(), StoreLayout(store.path))
    (table,) = [objects.containers.table(c) for c in objects.containers if c.kind == "delta"]
    return path, table


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 16
    path.write_bytes(data)


def places(table: Table) -> Mapping[str, int]:
    record = max(table.records, key=lambda record: record.nbytes)
    head = 16 * 3
    return {
        "size of a chunk": record.offset + 1,
        "check of a chunk": record.offset + 16 + 6,
        "head of a stream": record.offset + head + 5,
        "first chunk": record.offset + head + 5000,
        "last chunk": record.offset + record.stored - 1,
        "padding": tables.gaps(table)[0][0],
        "table": table.data_bytes + 60,
    }


@pytest.mark.parametrize(
    "place",
    [
        "size of a chunk",
        "check of a chunk",
        "head of a stream",
        "first chunk",
        "last chunk",
        "padding",
        "table",
    ],
)
def test_a_flipped_bit_in_a_delta_is_found_named_and_repaired(
    place: str, store: Store, expected: dict[str, Content], base: Path, tune: Path
) -> None:
    path, table = delta(store)
    flip(path, places(table)[place])
    if place not in ("padding", "table", "check of a chunk"):
        with store.checkpoint("tune") as checkpoint, pytest.raises(CorruptTensorError) as caught:
            checkpoint.read("b")
        assert caught.value.facts["tensors"] == ["b"]
        flip(path, places(table)[place])  # right again, and believed only when verified
        store.verify(full=True)
        assert stored(store, "tune") == expected["tune"]
        flip(path, places(table)[place])
    faults = store.verify(full=True).faults
    assert str(path) in {fault.path for fault in faults}
    if place not in ("padding", "table"):
        assert {"tune: b"} == {who for fault in faults for who in fault.affected}
        with store.checkpoint("tune") as checkpoint, pytest.raises(MissingObjectError):
            checkpoint.read("b")
    assert stored(store, "base") == expected["base"]
    assert store.repair([tune]).missing == []
    assert_clean(store, expected)


@pytest.mark.parametrize("source", ["base", "tune"])
def test_a_flipped_bit_in_an_anchor_is_found_named_and_repaired(
    source: str, store: Store, expected: dict[str, Content], tmp_path: Path
) -> None:
    (path,) = store.path.glob("containers/*/*.raw")
    flip(path, path.read_bytes().index(B[:64]) + 3 * MIB)
    with store.checkpoint("tune") as checkpoint:
        # The leaf that is whole still gives the part that is against it.
        assert checkpoint.read_range("b", 0, 100) == tuned(B, 2)[:100]
        with pytest.raises(CorruptTensorError, match="stored against") as caught:
            checkpoint.read("b")
        assert caught.value.facts["tensors"] == ["b"]
        assert checkpoint.read("a") == tuned(A, 1)
    assert not list(store.path.glob("quarantine/*delta*"))
    for _ in range(2):
        faults = store.verify(full=True).faults
        who = {who for fault in faults for who in fault.affected}
        assert who == {"base: b", "tune: b"}
    with pytest.raises(MissingObjectError):
        stored(store, "base")
    store.repair([tmp_path / source])
    assert stored(store, "tune") == expected["tune"]
    assert store.repair([tmp_path / "base"]).missing == []
    assert_clean(store, expected)


def test_a_base_that_was_not_compared_makes_no_wrong_tensor(
    store: Store, expected: dict[str, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    peeked = []

    def wrong(_pieces: StoredPieces, _digest: bytes, start: int, view: memoryview) -> bool:
        peeked.append(start)
        view[:] = bytes(len(view))
        return True

    monkeypatch.setattr(StoredPieces, "peek_leaf", wrong)
    assert stored(store, "tune") == expected["tune"]
    assert {*peeked} == {0, 2 * MIB, 4 * MIB}


def test_a_lost_anchor_comes_back_from_the_trash(
    store: Store, expected: dict[str, Content]
) -> None:
    store.delete("base")
    store.gc(24)
    (path,) = store.path.glob("containers/*/*.raw.table")
    # As if gc had been wrong about it.
    objects = Objects(RealFiles(), StoreLayout(store.path))
    for file in (path, path.with_suffix("")):
        objects.set_aside(file, objects.layout.trash)
    with store.checkpoint("tune") as checkpoint, pytest.raises(MissingObjectError):
        checkpoint.read("b")
    assert {fault.kind for fault in store.verify().faults} == {"lost"}
    assert store.repair().from_trash == 1
    assert_clean(store, {"tune": expected["tune"]})


def test_an_anchor_that_lost_its_reference_is_repaired_too(
    store: Store, expected: dict[str, Content], base: Path
) -> None:
    store.delete("base")
    (path,) = store.path.glob("containers/*/*.raw")
    flip(path, path.read_bytes().index(B[:64]) + 100)
    faults = store.verify(full=True).faults
    assert {who for fault in faults for who in fault.affected} == {"tune: b"}
    assert store.repair([base]).pieces == 1
    assert_clean(store, {"tune": expected["tune"]})


def test_a_damaged_anchor_is_not_used(store: Store, base: Path, tune: Path) -> None:
    store.import_(base)
    (path,) = store.path.glob("containers/*/*.raw")
    data = bytearray(path.read_bytes())
    at = data.index(B[:64])
    for leaf in range(0, len(B), MIB):
        data[at + leaf] ^= 1
    path.write_bytes(data)
    store.import_(tune, compress="auto", base="base")
    assert codecs(store, "tune") == {"a": "nibble2", "b": "planes2", "c": "raw"}
    assert stored(store, "tune") == content(tune)


def record(**changes: object) -> Record:
    piece = weights(1, 100 * KIB)
    fields: dict[str, object] = {
        "digest": bytes.fromhex(digest(piece)),
        "offset": 0,
        "stored": 5000,
        "nbytes": len(piece),
        "codec": "planes2",
        "base": None,
        "leaves": b"".join(leaf_digests(piece)),
    }
    return Record(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"stored": 100 * KIB},
        {"stored": 1 << 50},
        {"stored": 16},
        {"stored": -1},
        {"nbytes": 1 << 50},
        {"nbytes": 0},
        {"base": b"\1" * 32},
        {"codec": "diff2"},
        {"codec": "diff2", "base": b"short"},
        {"offset": 8},
    ],
)
def test_a_table_that_contradicts_itself_is_refused(
    store: Store, changes: dict[str, object]
) -> None:
    name, blob = tables.encode(Table("delta", 9000, [record(**changes)], None))
    with pytest.raises(DamagedFileError):
        tables.decode(blob, name, "delta", Path("x"))
    good, blob = tables.encode(Table("delta", 9000, [record()], None))
    assert tables.decode(blob, good, "delta", Path("x")).records[0].nbytes == 100 * KIB
