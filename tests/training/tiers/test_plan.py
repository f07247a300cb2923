"""What is to be copied, deleted or left on two tiers, from the places of the steps alone."""

import pytest

from tensor_dedup.store.steps.runs import StepPlace, in_save_order
from tensor_dedup.training.tiers.plan import (
    TierContent,
    TierPlan,
    counts,
    first_place,
    is_drained,
    is_stranded,
    is_undrained,
    next_generation,
    same,
)

TURN = 1 << 20


def at(sequence: int, manifest: str | None = "here", content: str | None = None) -> StepPlace:
    return StepPlace(sequence, object(), manifest, content or manifest)


HERE, DAMAGED = at(5), at(5, None)
CASES = {
    "not there": (HERE, None, "undrained", True),
    "the same": (HERE, at(5), "drained", True),
    "the same content, saved later there": (HERE, at(9, "there", "here"), "drained", False),
    "the same content, saved earlier there": (HERE, at(1, "there", "here"), "undrained", True),
    "earlier there": (HERE, at(4, "there"), "undrained", True),
    "later there": (HERE, at(6, "there"), "stranded", False),
    "at the same place there": (HERE, at(5, "there"), "stranded", False),
    "damaged there": (HERE, at(9, None), "undrained", True),
    "damaged here and not there": (DAMAGED, None, "undrained", True),
    "damaged here": (DAMAGED, at(4, "there"), "", False),
    "not here": (None, at(4, "there"), "", False),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_step_is(case: str) -> None:
    near, there, state, used = CASES[case]
    found = {
        "undrained": is_undrained(near, there, 0),
        "stranded": is_stranded(near, there, 0),
        "drained": is_drained(near, there, 0),
    }
    assert [name for name, holds in found.items() if holds] == ([state] if state else [])
    assert counts(near, there, 0) is used


@pytest.mark.parametrize("case", CASES)
def test_what_a_step_of_an_earlier_writer_is(case: str) -> None:
    near, there, state, used = CASES[case]
    assert is_undrained(near, there, TURN) is (near is DAMAGED and there is None)
    only_here = near is HERE and not same(near, there)
    assert is_stranded(near, there, TURN) is only_here
    if state == "undrained" and case == "earlier there":
        used = False  # nobody can say which of the two is wanted
    assert counts(near, there, TURN) is used


@pytest.mark.parametrize(
    ("near", "there", "found", "generation"),
    [
        ({}, {}, None, 1),
        ({1: at(7), 2: at(TURN * 9)}, {}, None, 1),
        ({1: at(7)}, {1: at(7)}, None, 1),
        ({1: at(7)}, {1: at(3, "there", "here")}, None, 1),
        ({}, {1: at(7, None)}, None, 1),
        ({}, {1: at(7)}, None, 2),
        ({1: at(7)}, {1: at(3, "there")}, None, 2),
        ({1: at(7)}, {1: at(7)}, 0, 2),
        ({1: at(7)}, {1: at(7)}, 1, 2),
        ({}, {}, 4, 5),
        ({}, {1: at(6 * TURN + 1)}, 4, 8),
        ({1: at(6 * TURN + 1)}, {}, 4, 8),
    ],
)
def test_the_next_generation(
    near: dict[int, StepPlace], there: dict[int, StepPlace], found: int | None, generation: int
) -> None:
    assert next_generation(near, there, found) == generation
    if generation > 1:
        places = [place.sequence for place in (*near.values(), *there.values())]
        assert all(place < first_place(generation) for place in places)


def test_a_plan() -> None:
    near = {8: at(1, "a"), 2: at(2, "b"), 3: at(3, "c"), 4: at(4, "d"), 5: at(5, "e")}
    there = {8: at(1, "a"), 2: at(2, "b"), 3: at(9, "x"), 4: at(4, "d"), 7: at(8, "y")}
    plan = TierPlan(near, {2, 3}, TierContent(there, {7}, {6}), 0)
    assert plan.to_drain() == [2, 5]  # of 2 only the mark
    assert (plan.stranded(), plan.not_drained()) == ([3], [3, 5])
    assert {step: place.manifest for step, place in plan.places().items()} == {
        **{2: "b", 3: "x", 4: "d"},
        **{5: "e", 7: "y", 8: "a"},
    }
    assert plan.left_behind(None) == []
    assert (plan.left_behind(1), plan.left_behind(2)) == ([8, 2], [8])
    # Saved as it was: it counts as the latest one when it is drained, and stays until then.
    again = {**near, 8: at(7, "a2", "a")}
    later = TierPlan(again, set(), TierContent(there, set(), set()), 0)
    assert (later.to_drain(), later.left_behind(1)) == ([5, 8], [2])
    later = TierPlan(near, {2, 3}, TierContent(there, {7}, {6}), TURN)
    assert (later.to_drain(), later.stranded()) == ([2], [3, 5])
    assert in_save_order(later.places()) == [5, 8, 2, 4, 7, 3]
    damaged = TierPlan(near, set(), TierContent({**there, 3: at(9, None)}, set(), set()), TURN)
    assert in_save_order(damaged.places()) == [3, 5, 8, 2, 4, 7]
