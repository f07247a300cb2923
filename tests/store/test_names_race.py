"""A checkpoint that is deleted while others look at it is unknown, not damaged."""

from collections.abc import Callable
from pathlib import Path

import pytest

from store_runs.stores import noise, safetensors, u8, write
from tensor_dedup import Store
from tensor_dedup.store.errors import UnknownNameError
from tensor_dedup.store.objects import Objects


@pytest.fixture
def deleting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of two, one of which is deleted each time that the names have just been read."""
    store = Store.open(tmp_path / "store")
    for name in ("stays", "goes"):
        blob = safetensors(u8(tensor=noise(len(name), 5000)))
        store.import_(write(tmp_path / name, {"a.safetensors": blob}), name)
    names: Callable[[Objects], list[str]] = Objects.references

    def names_then_delete(objects: Objects) -> list[str]:
        found = names(objects)
        if "goes" in found:
            objects.drop_ref("goes")
        return found

    monkeypatch.setattr(Objects, "references", names_then_delete)
    return store


def test_a_list_leaves_it_out(deleting: Store) -> None:
    assert [listed.name for listed in deleting.list()] == ["stays"]


def test_stats_leave_it_out(deleting: Store) -> None:
    stats = deleting.stats()
    assert (stats.checkpoints, stats.damaged_files) == (1, 0)


def test_verify_finds_no_fault(deleting: Store) -> None:
    assert deleting.verify(full=True).faults == []


def test_opening_it_says_that_it_is_unknown(deleting: Store) -> None:
    deleting.list()
    with pytest.raises(UnknownNameError):
        deleting.checkpoint("goes")
