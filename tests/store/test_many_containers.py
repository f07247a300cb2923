"""A checkpoint that lies in more containers than a process may hold open."""

import gc
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from processes.process_state import descriptor_limit, forked
from store_runs.stores import (
    KIB,
    Content,
    content,
    memory_folder,
    noise,
    open_store,
    safetensors,
    stored,
    u8,
    write,
)
from tensor_dedup import Store
from tensor_dedup.store.errors import StoreBusyError
from tensor_dedup.store.reading.handle_cache import HandleCache
from tensor_dedup.store.reading.tensors import iter_tensors, load_tensors

MANY = 150
SPARE = 40


def _open_files() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]


@pytest.fixture(scope="module")
def parts() -> dict[str, bytes]:
    return {f"t{number:03}": noise(number, 66 * KIB) for number in range(MANY)}


@pytest.fixture(scope="module")
def filled(parts: dict[str, bytes]) -> Iterator[Path]:
    """Each tensor in a container of its own, and one checkpoint with all of them."""
    with memory_folder() as folder:
        store = open_store(folder / "store")
        for name, data in parts.items():
            tensors = {"m.safetensors": safetensors(u8(**{name: data}))}
            store.import_(write(folder / "single" / name, tensors))
        store.import_(_all(folder, parts))
        for name in parts:
            store.delete(name)
        with store.checkpoint("all") as checkpoint:
            assert f"containers={MANY + 1}" in super(type(checkpoint), checkpoint).__repr__()
        shutil.rmtree(folder / "single")
        yield folder


@pytest.fixture
def store(tmp_path: Path, filled: Path) -> Store:
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    return open_store(tmp_path / "store")


def _all(folder: Path, parts: dict[str, bytes]) -> Path:
    return write(folder / "all", {"m.safetensors": safetensors(u8(**parts))})


@pytest.fixture
def expected(tmp_path: Path) -> Content:
    return content(tmp_path / "all")


@pytest.fixture
def few(store: Store) -> Iterator[int]:
    with few_files() as most:
        yield most


@contextmanager
def few_files() -> Iterator[int]:
    """A process that may open few files more than it has open."""
    gc.collect()  # so that what earlier tests have left is not closed meanwhile
    most = max(_open_files()) + 1 + SPARE
    assert MANY > SPARE
    # New files get the lowest numbers: none may be free below the highest that is in use.
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    while fillers[-1] < most - SPARE:
        fillers.append(os.dup(fillers[0]))
    os.close(fillers.pop())
    try:
        with descriptor_limit(most):
            yield most
    finally:
        for filler in fillers:
            os.close(filler)


def test_it_is_exported_loaded_read_and_verified(
    store: Store, parts: dict[str, bytes], tmp_path: Path
) -> None:
    """In a process of its own: nobody else opens or closes files in it meanwhile."""
    forked(lambda: export_load_read_and_verify(str(store.path), parts, str(tmp_path)))


def export_load_read_and_verify(root: str, parts: dict[str, bytes], folder: str) -> None:
    store, tmp_path = Store.open(root), Path(folder)
    expected = content(tmp_path / "all")
    with few_files():
        before = len(_open_files())
        store.export("all", tmp_path / "out")
        assert content(tmp_path / "out") == expected
        assert stored(store, "all") == expected
        with store.checkpoint("all") as checkpoint:
            for mapped in (False, True):
                found = load_tensors(checkpoint, mapped=mapped)
                assert {name: t.numpy().tobytes() for name, t in found.items()} == parts
            found = dict(iter_tensors(checkpoint, ahead=0, buffer_bytes=1 << 20))
            assert len(found) == MANY
            del found
        assert store.verify(full=True).fine
        store.import_(tmp_path / "out", "again")
        assert len(_open_files()) <= before


@pytest.mark.usefixtures("few")
def test_several_threads_and_readers_share_what_may_be_open(
    store: Store, parts: dict[str, bytes]
) -> None:
    def read(name: str) -> bool:
        return all(bytes(checkpoint.read(name)) == parts[name] for checkpoint in opened)

    with store.checkpoint("all") as one, store.checkpoint("all") as two:
        opened = (one, two)
        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(read, [*parts, *parts]))


@pytest.mark.usefixtures("few")
def test_gc_takes_nothing_from_who_opens_by_turns(
    store: Store, parts: dict[str, bytes], expected: Content
) -> None:
    with store.checkpoint("all") as checkpoint:
        store.delete("all")
        with pytest.raises(StoreBusyError):
            store.gc(0, wait_s=0.1)
        for name, data in parts.items():
            assert checkpoint.read(name) == data
    assert store.gc(0).trash
    assert not list(store.path.glob("containers/*/*"))


def test_gc_is_not_delayed_by_who_holds_all_open(store: Store, parts: dict[str, bytes]) -> None:
    with store.checkpoint("all") as checkpoint:
        store.delete("all")
        assert store.gc(0, wait_s=0.1).trash
        for name, data in parts.items():
            assert checkpoint.read(name) == data


def test_what_is_in_use_is_not_closed_and_the_rest_is(tmp_path: Path) -> None:
    files = open_store(tmp_path / "store").handle.files
    paths = sorted(write(tmp_path / "files", {str(n): b"%d" % n for n in range(9)}).iterdir())
    cache: HandleCache[Path] = HandleCache(files, lambda path: files.open(path, "read"), 2)
    started, go_on = threading.Event(), threading.Event()

    def use(path: Path) -> bytes:
        with cache.using(path) as handle:
            started.set()
            assert go_on.wait(60)
            data = bytearray(1)
            files.pread(handle, memoryview(data), 0)
            return bytes(data)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(use, paths[0])
        assert started.wait(60)
        for path in paths[1:]:
            with cache.using(path) as handle:
                assert files.status_of(handle).size == 1
            assert len(cache) == 2
        go_on.set()
        assert waiting.result() == b"0"
    cache.close()
    assert len(cache) == 0
