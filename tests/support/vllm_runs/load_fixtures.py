"""Fixtures of tests that load models, for their conftest."""

import gc
from collections.abc import Iterator

import pytest

from models import tiny_checkpoints as checkpoints
from tensor_dedup.loader.residents.registry import registry


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny llama: the path of its folder."""
    return str(checkpoints.make("llama", tmp_path_factory.mktemp("llama")).base)


@pytest.fixture
def others(nothing_stays: None) -> int:
    """Bytes that were resident before, from other tests. Of this one nothing stays."""
    return registry.resident_bytes()


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    """However a load ends, Python's garbage collector is what it was."""
    before = gc.isenabled(), gc.get_threshold()
    yield
    assert (gc.isenabled(), gc.get_threshold()) == before
