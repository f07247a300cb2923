"""Options that make no sense are refused before anything is opened or made."""

from pathlib import Path
from typing import Any

import pytest

from store_runs.stores import Arrays
from tensor_dedup.store.steps.errors import BadOption, BadOptionError
from tensor_dedup.training import CheckpointStore, HostPool
from tensor_dedup.training.host_pool import default_bytes

DRAINED: dict[str, Any] = {"drain": "second"}


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"in_flight": 0}, BadOption.LIMIT),
        ({"in_flight": True}, BadOption.LIMIT),
        ({"pool_bytes": -1}, BadOption.LIMIT),
        ({"pool_bytes": HostPool(-1)}, BadOption.LIMIT),
        ({"compress": "none"}, BadOption.COMPRESS),
        ({"compress": True}, BadOption.COMPRESS),
        ({"config": 5}, BadOption.FILES),
        ({"weights": None}, BadOption.WEIGHTS),
        ({"keep_last": 0}, BadOption.RETENTION),
        ({"keep_fast": 2}, BadOption.FAST),
        ({"keep_fast": None}, BadOption.FAST),
        ({"drain_backlog": 9}, BadOption.FAST),
        ({"drain": 5}, BadOption.DRAIN),
        (DRAINED | {"keep_fast": 0}, BadOption.FAST),
        (DRAINED | {"keep_fast": 1.0}, BadOption.FAST),
        (DRAINED | {"drain_backlog": 0}, BadOption.FAST),
        (DRAINED | {"drain_backlog": None}, BadOption.FAST),
    ],
    ids=str,
)
def test_what_makes_no_sense_makes_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kind: BadOption
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadOptionError) as caught:
        CheckpointStore("fast", "run", Arrays(), **options)
    assert caught.value.kind is kind
    assert list(tmp_path.iterdir()) == []
    assert [*options][-1] in str(caught.value)


def test_what_a_second_tier_has_by_default_needs_none(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "store", "run", Arrays(), keep_fast=1, drain_backlog=8).close()


@pytest.mark.parametrize("given", [None, 0, 1 << 20])
def test_the_pool_has_the_given_capacity(tmp_path: Path, given: int | None) -> None:
    pool = CheckpointStore(tmp_path, "run", Arrays(), pool_bytes=given)._saves._pool
    assert pool.capacity == (default_bytes() if given is None else given)
    assert CheckpointStore(tmp_path, "run", Arrays(), pool_bytes=pool)._saves._pool is pool
