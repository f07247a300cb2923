"""A push and a pull of a fine-tune cost what is missing, whatever else the remote holds."""

from collections.abc import Iterator
from typing import TypeAlias

import pytest

from remote_runs import many_checkpoints
from remote_runs.bounds import KINDS, Scene
from remote_runs.remotes import MemoryBucket
from store_runs.stores import KIB, memory_folder
from tensor_dedup.remote import layout
from tensor_dedup.remote.catalog import catalog_of

LAYERS = 36
ONE, MANY = "one container", "many containers"
Scenes: TypeAlias = dict[str, Scene]
LISTED = pytest.mark.xfail(
    strict=True, reason="a list of 28,000 containers is 28 requests, 40 of 33 in all"
)


@pytest.fixture(scope="module")
def scenes() -> Iterator[Scenes]:
    """A base in one container, and one in as many as it has layers."""
    with memory_folder() as root, pytest.MonkeyPatch.context() as patch:
        found = {ONE: Scene(root / "one", LAYERS, 256 * KIB)}
        patch.setattr(layout, "CONTAINER_BYTES", 1)
        found[MANY] = Scene(root / "many", LAYERS, 256 * KIB)
        patch.undo()
        counts = [len(catalog_of(scene.start).containers) for scene in found.values()]
        assert counts == [1, LAYERS + 1]  # and the header
        yield found


@pytest.mark.parametrize(
    ("base", "count", "swept"),
    [
        *((base, *past) for base in (ONE, MANY) for past in ((0, True), (100, True), (100, False))),
        pytest.param(ONE, 10_000, True, marks=pytest.mark.long),
        pytest.param(MANY, 10_000, True, marks=[pytest.mark.long, LISTED]),
        pytest.param(ONE, 10_000, False, marks=pytest.mark.long),
        pytest.param(MANY, 10_000, False, marks=[pytest.mark.long, LISTED]),
    ],
)
def test_a_fine_tune_costs_what_is_missing(
    scenes: Scenes, base: str, count: int, swept: bool
) -> None:
    """Counted at a proxy, headers included; where nothing is new, in at most two requests."""

    def past(bucket: MemoryBucket) -> None:
        if count:
            many_checkpoints.add(bucket, count, swept=swept)
        assert len(catalog_of(bucket).containers) > 2.7 * count

    found = [*scenes[base].costs(past)]
    assert len(found) == 4 * len(KINDS)
    assert [cost for cost in found if not cost.is_met] == []
    most = {"one layer": 0.05, "merged LoRA": 0.18, "all of it": 0.6}
    for kind in KINDS:
        pushed, pulled = (cost.missing for cost in found if cost.kind == kind and cost.missing)
        assert 100 * KIB < pushed == pulled < most[kind] * LAYERS * 256 * KIB
