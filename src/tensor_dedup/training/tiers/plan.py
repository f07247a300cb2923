"""What is to be copied, let go of or left of the steps of a run on two tiers. No I/O.

A step has a place in the order of saving (`StepPlace`). A step that is saved again gets a later
place. If the two tiers have different versions of a step, the one with the later place counts.

The fast tiers that drain a run to a second tier take turns (`tensor_dedup.training.tiers.writer`).
Each turn has a generation, and the steps of generation g have places from (g - 1) · 2²⁰. So the
steps of a later writer have later places, whatever an earlier writer has saved without draining it.

A step of the fast tier is one of these:

* *undrained*: the second tier lacks the step or has it with an earlier place, and the step's place
  belongs to the present generation. It is to be copied;
* *drained*: it is not undrained, and the second tier has a version with the same content;
* *stranded*: any other. The second tier lacks it, but another fast tier has been the writer since;
  or the second tier has a later version. It stays on the fast tier, and is neither copied nor
  deleted, because nobody can say which of the two versions is wanted.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from tensor_dedup.store.steps.runs import StepPlace, in_save_order

_TURN: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TierContent:
    """The content of a second tier, as far as it concerns one run.

    * `places` maps step numbers to places in the order of saving.
    * `kept` has the numbers of kept steps.
    * `taken` has the numbers that no step can use, because the checkpoint with the name RUN@STEP is
      not a step of this run.
    """

    places: dict[int, StepPlace]
    kept: set[int]
    taken: set[int]


def first_place(generation: int) -> int:
    """Return the place after which the steps of a generation come."""
    return (generation - 1) * _TURN


def next_generation(
    near: Mapping[int, StepPlace], there: Mapping[int, StepPlace], found: int | None
) -> int:
    """Return the generation of a fast tier that becomes the writer of a run.

    `near` and `there` have the places of the steps on the fast and on the second tier. `found` is
    the generation of the writer before, 0 if it is unknown, or None if there was none.

    The result is 1 if no other fast tier has written to the second tier.
    """
    if found is None and all(
        same(near.get(step), place) for step, place in there.items() if place.readable
    ):
        return 1
    last = max((place.sequence for place in (*near.values(), *there.values())), default=0)
    return max(found or 0, last // _TURN + 1) + 1


def same(one: StepPlace | None, other: StepPlace | None) -> bool:
    """Return whether two versions of a step can be read and have the same content.

    A version is given by its place, or by None if it does not exist. The same content may have
    been saved twice, with different places.
    """
    if one is None or other is None or not (one.readable and other.readable):
        return False
    return one.manifest == other.manifest or one.content == other.content


def ahead(one: StepPlace | None, other: StepPlace | None) -> bool:
    """Return whether the version `one` of a step is to be used instead of the version `other`.

    A version is given by its place in the order of saving, or by None if it does not exist. The
    result is True if `one` can be read, and one of these is true of `other`:

    * It does not exist.
    * It cannot be read.
    * It is different from `one` and has an earlier place.
    """
    if one is None or not one.readable:
        return False
    if other is not None and one.manifest == other.manifest:
        return False
    return other is None or not other.readable or one.sequence > other.sequence


def is_undrained(near: StepPlace | None, there: StepPlace | None, start: int) -> bool:
    """Return whether the fast tier's version of a step is to be copied to the second tier.

    `near` and `there` are the places of the versions on the fast and on the second tier. `start` is
    the `first_place` of the present generation. A version that cannot be read is to be copied if
    the second tier lacks the step: then the attempt says what is wrong with it.
    """
    if near is not None and there is None and not near.readable:
        return True
    return near is not None and near.sequence >= start and ahead(near, there)


def is_drained(near: StepPlace | None, there: StepPlace | None, start: int) -> bool:
    """Return whether the second tier has all of the fast tier's version of a step.

    The arguments are those of `is_undrained`.
    """
    return same(near, there) and not is_undrained(near, there, start)


def is_stranded(near: StepPlace | None, there: StepPlace | None, start: int) -> bool:
    """Return whether the fast tier's version of a step is neither drained nor to be drained.

    The arguments are those of `is_undrained`. The result is False if the version cannot be read.
    """
    if near is None or not near.readable:
        return False
    return not is_drained(near, there, start) and not is_undrained(near, there, start)


def counts(near: StepPlace | None, there: StepPlace | None, start: int) -> bool:
    """Return whether the fast tier's version of a step is used, rather than the second tier's.

    The arguments are those of `is_undrained`. A stranded version is used only if the second tier
    has no version that can be read.
    """
    if near is None:
        return False
    if there is None or near.manifest == there.manifest:
        return True
    if not near.readable or not there.readable:
        return near.readable
    return near.sequence > there.sequence and (near.sequence >= start or same(near, there))


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What is to be done with the steps of a run on two tiers.

    * `near` has the places of the steps on the fast tier, and `kept` its kept steps.
    * `there` is the content of the second tier.
    * `start` is the `first_place` of the present generation.
    """

    near: Mapping[int, StepPlace]
    kept: Collection[int]
    there: TierContent
    start: int

    def places(self) -> dict[int, StepPlace]:
        """Return the steps on either tier, each with the place of the version that is used.

        Stranded versions come before all others, in their order: a training that resumes from the
        latest step goes on from where the last writer has come to.
        """
        found = dict(self.there.places)
        for step, place in self.near.items():
            there = found.get(step)
            if counts(place, there, self.start):
                before = self.start if is_stranded(place, there, self.start) else 0
                found[step] = place._replace(sequence=place.sequence - before)
        return {step: found[step] for step in sorted(found)}

    def to_drain(self) -> list[int]:
        """Return the steps to copy, in the order of saving.

        A step of which only the mark is to be copied is one of them.
        """
        return [
            step
            for step in in_save_order(self.near)
            if is_undrained(self.near[step], self.there.places.get(step), self.start)
            or self._has_new_mark(step)
        ]

    def _has_new_mark(self, step: int) -> bool:
        there = self.there.places.get(step)
        is_new = step in self.kept and step not in self.there.kept
        return is_new and there is not None and there.manifest == self.near[step].manifest

    def not_drained(self) -> list[int]:
        """Return the undrained and the stranded steps that can be read, in the order of saving."""
        order = in_save_order(self.near)
        return [s for s in order if self.near[s].readable and not self._is_drained(s)]

    def _is_drained(self, step: int) -> bool:
        return is_drained(self.near.get(step), self.there.places.get(step), self.start)

    def stranded(self) -> list[int]:
        """Return the stranded steps, by number."""
        return sorted(
            step
            for step, place in self.near.items()
            if is_stranded(place, self.there.places.get(step), self.start)
        )

    def left_behind(self, keep_fast: int | None) -> list[int]:
        """Return the drained steps that the fast tier need not have any more.

        These are all but the `keep_fast` steps that were saved last, or none if that is None.
        """
        if keep_fast is None:
            return []
        drained = [step for step in in_save_order(self.near) if self._is_drained(step)]
        return drained[:-keep_fast]
