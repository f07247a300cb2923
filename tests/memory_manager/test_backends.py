"""Every kind of memory keeps the contract; what the system refuses is a typed error."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager_runs.manager_fakes import FakeBackend
from processes.process_state import descriptor_limit
from store_runs.contracts import BackendTests
from tensor_dedup.digest import leaf_digests
from tensor_dedup.memory_manager.backends.base import Backend
from tensor_dedup.memory_manager.backends.memfd import MemfdBackend
from tensor_dedup.memory_manager.errors import (
    NoMemoryError,
    StillWritableError,
)
from tensor_dedup.memory_manager.protocol.layout import PAGE


class TestMemfd(BackendTests):
    def make(self, folder: Path) -> Backend:
        return MemfdBackend()


class TestFake(BackendTests):
    def make(self, folder: Path) -> Backend:
        return FakeBackend(folder)


def test_slabs_are_named_for_those_who_count_memory() -> None:
    slab = MemfdBackend().reserve(4096)
    assert "/memfd:tensor-dedup" in str(Path(f"/proc/self/fd/{slab.fileno}").readlink())


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    probe = os.open(os.devnull, os.O_RDONLY)
    try:
        with descriptor_limit(probe):
            yield
    finally:
        os.close(probe)


def test_without_descriptors_there_is_no_slab() -> None:
    with no_descriptor_left(), pytest.raises(NoMemoryError, match="ulimit"):
        MemfdBackend().reserve(4096)


def test_without_descriptors_a_slab_is_hashed() -> None:
    backend = MemfdBackend()
    slab = backend.reserve(3 * PAGE)
    os.pwrite(slab.fileno, b"x" * 100, PAGE + 50)
    backend.seal(slab)
    with no_descriptor_left():
        found = backend.leaves(slab, [(PAGE + 50, 100), (2 * PAGE, PAGE)])
    assert found == [leaf_digests(b"x" * 100), leaf_digests(bytes(PAGE))]


def test_the_fake_fails_when_it_is_told_to(tmp_path: Path) -> None:
    backend = FakeBackend(tmp_path)
    slab = backend.reserve(4096)
    backend.busy = True
    with pytest.raises(StillWritableError):
        backend.seal(slab)
    backend.fail_reserve = True
    with pytest.raises(NoMemoryError):
        backend.reserve(4096)
