"""What each step of a run costs on a remote; no data of a container is read for it."""

from pathlib import Path

import numpy as np
import pytest

from remote_runs.remotes import Faulty, MemoryBucket
from store_runs.stores import Model, noise
from tensor_dedup import Store
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.errors import RemoteUnreachableError, UnknownRemoteNameError
from tensor_dedup.training import CheckpointStore

SIZE = 1 << 19


def model_at(step: int) -> Model:
    """Each step changes other numbers, one in a hundred, and a small tensor."""
    large = np.frombuffer(noise(1, SIZE), "<u2").copy()
    for each in range(step):
        large[np.random.default_rng(each).integers(0, large.size, large.size // 100)] += 1
    return {"large": large, "small": np.full(3, step)}


def published(tmp_path: Path, bucket: MemoryBucket, **rules: int | None) -> list[int]:
    """Steps 0 to 4 of the run `policy`; what each stored where it was saved."""
    given = {"drain": Remote(bucket), "direct": True, "compress": "always", **rules}
    with CheckpointStore(tmp_path / "work", "policy", **given) as run:  # type: ignore[arg-type]
        stored = []
        for step in range(5):
            stored.append(run.save(model_at(step), step, {"loss": 1 / (step + 1)}).stored_bytes)
            run.drain()
            if step == 3:
                run.keep(3)
    return stored


def test_each_step_is_shown_with_its_cost_and_no_data_is_read(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    stored = published(tmp_path, bucket)
    Remote(bucket).delete("policy@1")
    asked = Faulty(bucket)
    found = Remote(asked).step_costs("policy")
    assert (found.run, found.damaged) == ("policy", {})
    assert [each.step.step for each in found.steps] == [0, 2, 3, 4]
    assert [each.step.kept for each in found.steps] == [False, False, True, False]
    assert [each.kind for each in found.steps] == ["whole", "delta", "delta", "delta"]
    assert [each.anchor for each in found.steps] == [None, *["policy@0"] * 3]
    assert found.steps[1].step.metrics == {"loss": 1 / 3}
    costs = [each.growth.stored_bytes for each in found.steps if each.growth is not None]
    expected = [stored[0], *stored[2:]]
    assert len(costs) == 4
    assert costs[0] > 10 * costs[1] > 0
    for cost, saved in zip(costs, expected, strict=True):
        assert cost == pytest.approx(saved, rel=0.02, abs=2048)  # without tables and padding
    first, *others = found.steps
    assert first.direct_bytes is None
    for each in others:
        keys = layout.step_key(each.step.manifest), layout.step_data_key(each.step.manifest)
        held = [len(bucket.objects[key][0]) for key in keys if key in bucket.objects]
        assert each.direct_bytes == (sum(held) if held else None)
    assert found.steps[-1].direct_bytes
    assert not [call for call in asked.calls if layout.CONTAINERS in call]
    assert [call for call in asked.calls if "get " in call]


def test_what_a_store_says_of_a_run_a_remote_says_too(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    published(tmp_path, bucket, keep_fast=None)
    store, found = Store.open(tmp_path / "work"), Remote(bucket).step_costs("policy").steps
    assert [each.step for each in found] == store.steps("policy")
    assert [each.growth for each in found] == store.run_growth("policy")
    assert len(found) == 5


def test_an_anchor_that_was_deleted_counts_for_the_first_that_needs_it(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    stored = published(tmp_path, bucket, keep_last=2)
    found = Remote(bucket).step_costs("policy").steps
    assert [each.step.step for each in found] == [3, 4]
    assert [(each.kind, each.anchor) for each in found] == [("delta", None)] * 2
    first, second = (each.growth for each in found)
    assert first is not None
    assert second is not None
    assert first.stored_bytes > 0.9 * stored[0] > 10 * second.stored_bytes


def test_a_step_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    published(tmp_path, bucket)
    manifest = Remote(bucket).step_costs("policy").steps[3].step.manifest
    del bucket.objects[layout.manifest_key(manifest)]
    found = Remote(bucket).step_costs("policy")
    assert [each.step.step for each in found.steps] == [0, 1, 2, 4]
    assert found.damaged.keys() == {"policy@3"}
    assert "gone" in found.damaged["policy@3"]


def test_what_a_lost_table_would_say_is_not_known(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    published(tmp_path, bucket)
    for key in [key for key in bucket.objects if key.startswith(layout.TABLES)]:
        del bucket.objects[key]
    found = Remote(bucket).step_costs("policy")
    assert len(found.steps) == 5
    for each in found.steps:
        assert (each.growth, each.kind, each.anchor) == (None, None, None)
        assert each.to_dict()["stored_bytes"] is None
        assert each.step.nbytes > SIZE


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    published(tmp_path, bucket)
    with pytest.raises(UnknownRemoteNameError, match="no step of a run 'other'"):
        Remote(bucket).step_costs("other")
    with pytest.raises(RemoteUnreachableError):
        Remote(Faulty(bucket, 5, "lost before")).step_costs("policy")
