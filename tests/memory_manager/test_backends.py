"""Every kind of memory keeps the contract; what the system refuses is a typed error."""

import os
import resource
from pathlib import Path

import pytest

from manager_runs.manager_fakes import FakeBackend
from store_runs.contracts import BackendTests
from tensor_dedup.memory_manager.backends.base import Backend
from tensor_dedup.memory_manager.backends.memfd import MemfdBackend
from tensor_dedup.memory_manager.errors import (
    NoMemoryError,
    StillWritableError,
)


class TestMemfd(BackendTests):
    def make(self, folder: Path) -> Backend:
        return MemfdBackend()


class TestFake(BackendTests):
    def make(self, folder: Path) -> Backend:
        return FakeBackend(folder)


def test_slabs_are_named_for_those_who_count_memory() -> None:
    slab = MemfdBackend().reserve(4096)
    assert "/memfd:tensor-dedup" in str(Path(f"/proc/self/fd/{slab.fileno}").readlink())


def test_without_descriptors_there_is_no_slab() -> None:
    backend = MemfdBackend()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(os.devnull, os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe, before[1]))
        with pytest.raises(NoMemoryError, match="ulimit"):
            backend.reserve(4096)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(probe)


def test_the_fake_fails_when_it_is_told_to(tmp_path: Path) -> None:
    backend = FakeBackend(tmp_path)
    slab = backend.reserve(4096)
    backend.busy = True
    with pytest.raises(StillWritableError):
        backend.seal(slab)
    backend.fail_reserve = True
    with pytest.raises(NoMemoryError):
        backend.reserve(4096)
