"""Stored checkpoints as torch tensors: the right bytes, in bounded memory, or an error."""

import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from store_runs.stores import KIB, MIB, Tensors, content, elements, noise, safetensors, write
from tensor_dedup import Store
from tensor_dedup.analyze import analyze
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.formats.safetensors import DTYPE_BITS
from tensor_dedup.store import StoredCheckpoint, StoreError
from tensor_dedup.store.buffers import HUGE_PAGE, BufferPool, allocate, allocate_all
from tensor_dedup.store.errors import (
    ClosedCheckpointError,
    CorruptTensorError,
    UnknownTensorError,
)
from tensor_dedup.store.files import PAGE, Handle, Mode, RealFiles
from tensor_dedup.store.reading.bulk_reader import BLOCK_BYTES, plan
from tensor_dedup.store.reading.tensors import TORCH_DTYPES, iter_tensors, load_tensors

LEAF = 2 * MIB
Kept = dict[str, tuple[str, tuple[int, ...], bytes]]


class Disk(RealFiles):
    """The disk, which reads past the page cache as told, and fails as told."""

    def __init__(self, *, direct: bool = True, cached: int | None = 0) -> None:
        self.direct = direct
        self.cached = cached
        self.direct_reads = 0
        self.failing: list[int] = []

    def open(self, path: Path, mode: Mode) -> Handle:
        if mode == "direct":
            if not self.direct:
                raise OSError(errno.EINVAL, "not here", str(path))
            self.direct_reads += 1
        return super().open(path, "read" if mode == "direct" else mode)

    def cached_bytes(self, handle: Handle, start: int, nbytes: int) -> int | None:
        return self.cached

    def pread(self, handle: Handle, view: memoryview, offset: int) -> int:
        if self.failing:
            raise OSError(self.failing.pop(), "broken")
        return super().pread(handle, view, offset)


def many() -> Kept:
    """Tensors around every edge: of leaves, of blocks, of pages; equal ones; of any dtype."""
    sizes = {
        "leaf": LEAF,
        "less": LEAF - 1,
        "more": LEAF + 1,
        "block": BLOCK_BYTES,
        "large": 2 * BLOCK_BYTES + 12345,
        "page": PAGE,
        "byte": 1,
        "none": 0,
    }
    found: Kept = {
        name: ("U8", (size,), noise(seed, size)) for seed, (name, size) in enumerate(sizes.items())
    }
    for seed, dtype in enumerate(sorted(DTYPE_BITS)):
        nbytes = elements(dtype, (3, 8))
        data = bytes(nbytes) if dtype == "BOOL" else noise(100 + seed, nbytes)
        found[dtype] = (dtype, (3, 8), data)
    found["scalar"] = ("BF16", (), b"\x80\x3f")
    found["twin"] = found["more"]
    found["small twin"] = found["F32"]
    return found


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(found: dict[str, torch.Tensor], expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name, (dtype, shape, data) in expected.items():
        tensor = found[name]
        assert raw(tensor) == data
        if dtype in TORCH_DTYPES:
            assert (tensor.dtype, tuple(tensor.shape)) == (TORCH_DTYPES[dtype], shape)
        assert tensor.data_ptr() % tensor.dtype.itemsize == 0


def expected(name: str) -> Kept:
    """`raw` has no two equal tensors; `mixed` has all of them, and new ones."""
    known = many()
    if name == "raw":
        return {key: tensor for key, tensor in known.items() if "twin" not in key}
    for key in ("leaf", "page", "byte"):
        dtype, shape, data = known[key]
        known[f"new {key}"] = (dtype, shape, noise(7, len(data)))
    return known


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with `raw`, one whole file, and `mixed`: a slab, a pack, and parts of that file."""
    root = tmp_path_factory.mktemp("tensors")
    store = Store.open(root / "store")
    for name in ("raw", "mixed"):
        store.import_(write(root / name, {"m.safetensors": safetensors(expected(name))}))
    assert set(store.stats().containers) == {"raw", "slab", "pack"}
    return root


WAYS: list[dict[str, Any]] = [
    {},
    {"verify": False},
    {"mapped": True},
    {"mapped": True, "verify": False},
    {"pool": BufferPool(1 << 30)},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way) or "default")
@pytest.mark.parametrize("name", ["raw", "mixed"])
def test_every_tensor_comes_back(folder: Path, name: str, way: dict[str, Any]) -> None:
    with Store.open(folder / "store").checkpoint(name) as checkpoint:
        found = load_tensors(checkpoint, **way)
    assert list(found) == [tensor.name for tensor in checkpoint]
    assert_same(found, expected(name))
    # Nobody else sees what is written, not even a name with the same bytes.
    found["more"][0] ^= 1
    if "twin" in found:
        assert raw(found["twin"]) == many()["twin"][2]
    with Store.open(folder / "store").checkpoint(name) as checkpoint:
        assert_same(load_tensors(checkpoint), expected(name))


@pytest.mark.parametrize("cached", [None, 0, 1 << 40])
@pytest.mark.parametrize("direct", [True, False])
def test_the_page_cache_makes_no_difference(folder: Path, direct: bool, cached: int | None) -> None:
    disk = Disk(direct=direct, cached=cached)
    with Store.open(folder / "store", files=disk).checkpoint("mixed") as checkpoint:
        assert_same(load_tensors(checkpoint), expected("mixed"))
    assert (disk.direct_reads > 0) == direct


def test_an_empty_tensor_that_is_too_large_for_torch_is_refused_by_name(tmp_path: Path) -> None:
    huge: Tensors = {"e": ("F32", (0, 1 << 63), b""), "w": ("U8", (1,), b"w")}
    write(tmp_path / "m", {"model.safetensors": safetensors(huge)})
    store = Store.open(tmp_path / "store")
    assert store.import_(tmp_path / "m").tensors == 2
    store.export("m", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "m")
    assert analyze([tmp_path / "m", "store://m"], store=store.path).pairs[0].shared_tensors == 2
    with pytest.raises(UnsupportedError, match=r"'e' has the shape \[0, 9223372036854775808\]"):
        store.load("m")
    with store.checkpoint("m") as checkpoint:
        with pytest.raises(UnsupportedError, match="no dimension above 9223372036854775807"):
            list(iter_tensors(checkpoint))
        assert load_tensors(checkpoint, names=["w"]).keys() == {"w"}


def test_some_tensors_are_read_alone(folder: Path) -> None:
    with Store.open(folder / "store").checkpoint("mixed") as checkpoint:
        names = ["new page", "more", "more", "none"]
        found = load_tensors(checkpoint, names)
        assert_same(found, {name: expected("mixed")[name] for name in names})
        spans = plan(checkpoint, [bytes.fromhex(checkpoint[n].digest) for n in names[:2]], 1 << 30)
        assert sum(span.stop - span.start for span in spans) < LEAF + 4 * PAGE
        with pytest.raises(UnknownTensorError):
            load_tensors(checkpoint, ["more", "missing"])


@pytest.mark.parametrize("buffer_bytes", [PAGE, MIB, 1 << 30])
def test_one_by_one_they_are_the_same(folder: Path, buffer_bytes: int) -> None:
    with Store.open(folder / "store").checkpoint("mixed") as checkpoint:
        found = dict(iter_tensors(checkpoint, buffer_bytes=buffer_bytes))
    assert_same(found, expected("mixed"))


def test_one_by_one_they_take_few_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"{n:02}": ("U8", (MIB,), noise(n, MIB)) for n in range(24)}
    (tmp_path / "m.safetensors").write_bytes(safetensors(tensors))
    store = Store.open(tmp_path / "store")
    store.import_(tmp_path / "m.safetensors")
    pools: list[BufferPool] = []

    def pool(keep_bytes: int) -> BufferPool:
        pools.append(BufferPool(keep_bytes))
        return pools[-1]

    monkeypatch.setattr("tensor_dedup.store.reading.tensors.BufferPool", pool)
    with store.checkpoint("m") as checkpoint:
        for name, tensor in iter_tensors(checkpoint, buffer_bytes=2 * MIB, ahead=2):
            assert raw(tensor) == tensors[name][2]
            del tensor
        first = pools.pop().allocated
        held = dict(iter_tensors(checkpoint, buffer_bytes=2 * MIB, ahead=2))
        second = pools.pop().allocated
    # Two in advance, the one that is looked at, and those that a thread has just not let go of.
    assert first <= 8
    assert second >= 12
    assert_same(held, tensors)


def test_an_iteration_may_be_left(folder: Path) -> None:
    with Store.open(folder / "store").checkpoint("mixed") as checkpoint:
        tensors = iter_tensors(checkpoint, buffer_bytes=MIB)
        name, tensor = next(tensors)
        del tensors
        gc.collect()
        assert raw(tensor) == expected("mixed")[name][2]


@pytest.fixture
def own(tmp_path: Path) -> tuple[Store, Path, Path]:
    """A store of one raw container: the store, that file, and what it was made of."""
    tensors = {"a": ("U8", (5 * MIB,), noise(1, 5 * MIB)), "b": ("U8", (70 * KIB,), b"x" * 71680)}
    source = write(tmp_path / "m", {"m.safetensors": safetensors(tensors)})
    store = Store.open(tmp_path / "store")
    store.import_(source)
    return store, next((tmp_path / "store" / "containers").rglob("*.raw")), source


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("place", [PAGE, 3 * MIB, 5 * MIB + PAGE])
def test_a_flipped_bit_is_never_returned(
    own: tuple[Store, Path, Path], place: int, mapped: bool
) -> None:
    store, container, source = own
    flip(container, place)
    with store.checkpoint("m") as checkpoint, pytest.raises(CorruptTensorError):
        load_tensors(checkpoint, mapped=mapped)
    assert store.repair([source]).pieces
    with store.checkpoint("m") as checkpoint:
        found = load_tensors(checkpoint, mapped=mapped)
        assert raw(found["a"]) == noise(1, 5 * MIB)


def test_another_container_stands_in(own: tuple[Store, Path, Path]) -> None:
    store, container, source = own
    with store.checkpoint("m") as early:
        flip(container, 3 * MIB)
        store.verify(full=True)
        store.repair([source])  # a second container with what was damaged in the first
        with store.checkpoint("m") as checkpoint:
            assert raw(load_tensors(checkpoint)["a"]) == noise(1, 5 * MIB)
        # Opened before there was another: it looks for one when it meets the damage.
        assert raw(load_tensors(early)["a"]) == noise(1, 5 * MIB)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_container_that_was_cut_is_an_error(own: tuple[Store, Path, Path], mapped: bool) -> None:
    store, container, _ = own
    with store.checkpoint("m") as checkpoint:
        with container.open("r+b") as file:
            file.truncate(4 * MIB)
        with pytest.raises((CorruptTensorError, StoreError)):
            load_tensors(checkpoint, mapped=mapped)


def test_an_error_that_does_not_come_again_is_none(own: tuple[Store, Path, Path]) -> None:
    disk = Disk()
    store = Store.open(own[0].path, files=disk)
    with store.checkpoint("m") as checkpoint:
        disk.failing = [errno.EIO] * 2
        assert raw(load_tensors(checkpoint)["a"]) == noise(1, 5 * MIB)
        disk.failing = [errno.EIO] * 1000
        with pytest.raises(StoreError, match="broken"):
            load_tensors(checkpoint)


def test_what_was_loaded_outlives_its_checkpoint(own: tuple[Store, Path, Path]) -> None:
    store, _, _ = own
    with store.checkpoint("m") as checkpoint:
        found = [load_tensors(checkpoint, mapped=mapped) for mapped in (True, False)]
    store.delete("m")
    store.gc(0)
    assert [raw(tensors["a"]) for tensors in found] == [noise(1, 5 * MIB)] * 2
    with pytest.raises(ClosedCheckpointError):
        load_tensors(checkpoint)


def test_memory_is_used_again(own: tuple[Store, Path, Path]) -> None:
    pool = BufferPool(1 << 30)

    def load(checkpoint: StoredCheckpoint) -> dict[str, torch.Tensor]:
        return load_tensors(checkpoint, pool=pool)

    with own[0].checkpoint("m") as checkpoint:
        part = load(checkpoint)["a"][100:200].view(10, 10)
        gc.collect()
        other = load(checkpoint)  # not in memory that somebody looks at
        assert pool.allocated == 2
        assert raw(part) == noise(1, 5 * MIB)[100:200]
        del part, other
        gc.collect()
        for _ in range(3):
            assert raw(load(checkpoint)["a"]) == noise(1, 5 * MIB)
    assert pool.allocated == 2


def test_a_pool_keeps_no_more_than_it_may() -> None:
    pool = BufferPool(3 * PAGE)
    regions = [pool.take(2 * PAGE) for _ in range(3)]
    del regions
    gc.collect()
    again = [pool.take(2 * PAGE) for _ in range(2)]
    assert pool.allocated == 4
    assert len(again) == 2


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, HUGE_PAGE, HUGE_PAGE + 1])
def test_memory_comes_in_zeroed_pages(nbytes: int) -> None:
    region = allocate(nbytes)
    assert region.nbytes == max(PAGE, -(-nbytes // PAGE) * PAGE)
    assert not any(region[:PAGE])
    region[-1] = 1
    assert torch.frombuffer(region, dtype=torch.uint8).data_ptr() % PAGE == 0


def test_memory_for_many_comes_in_few_regions() -> None:
    sizes = [0, 1, 64, 65, 100, *[1000] * 70_000, 65 * MIB, 1, 64 * MIB, 7]
    views = allocate_all(sizes)
    assert [view.nbytes for view in views] == sizes
    starts = [torch.frombuffer(v, dtype=torch.uint8).data_ptr() for v in views if v.nbytes]
    assert all(start % 64 == 0 for start in starts)
    assert len({id(view.obj) for view in views}) <= 6
    views[5][:] = b"x" * 1000
    assert not any(views[4])
    assert not any(views[6])


def test_threads_share_a_checkpoint(folder: Path, run_all: Callable[..., list[Any]]) -> None:
    with Store.open(folder / "store").checkpoint("mixed") as checkpoint:
        for found in run_all(lambda: load_tensors(checkpoint), 3):
            assert_same(found, expected("mixed"))


@pytest.fixture
def run_all() -> Callable[..., list[Any]]:
    from concurrent.futures import ThreadPoolExecutor

    def run(work: Callable[[], Any], count: int) -> list[Any]:
        with ThreadPoolExecutor(count) as pool:
            return [future.result() for future in [pool.submit(work) for _ in range(count)]]

    return run


def test_files_indexed_in_place_and_deltas_come_back(tmp_path: Path) -> None:
    base = {"w": ("BF16", (3 * MIB,), noise(1, 6 * MIB)), "b": ("F32", (9,), noise(2, 36))}
    near = bytearray(base["w"][2])
    near[::1000] = bytes(len(near[::1000]))
    tuned = {**base, "w": ("BF16", (3 * MIB,), bytes(near))}
    store = Store.open(tmp_path / "store")
    for name, tensors in (("base", base), ("tuned", tuned)):
        write(tmp_path / name, {"m.safetensors": safetensors(tensors)})
    store.import_(tmp_path / "base")
    store.import_(tmp_path / "tuned", compress="auto", base="base")
    assert store.stats().containers["delta"] == 1
    other = Store.open(tmp_path / "other")
    other.import_(tmp_path / "tuned", external=True)
    for opened in (store, other):
        with opened.checkpoint("tuned") as checkpoint:
            assert_same(load_tensors(checkpoint), tuned)
            assert_same(load_tensors(checkpoint, mapped=True, verify=False), tuned)
            assert_same(dict(iter_tensors(checkpoint, buffer_bytes=PAGE)), tuned)
    flip(tmp_path / "tuned" / "m.safetensors", 3 * MIB)
    with pytest.raises(StoreError), other.checkpoint("tuned") as checkpoint:
        load_tensors(checkpoint, verify=False)
