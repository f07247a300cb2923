"""Notes of a fast tier about its second tier, and the rules for which version of a step counts.

    tiers/RUN    the identity of the second tier to which the run was drained
    drains/RUN   for each second tier: the place in the order of saving up to which all steps were
                 drained, and the last places that were seen there

If drained steps may be deleted from the fast tier, the run must be drained to the second tier that
is noted in tiers/RUN, and to no other.

A step that is saved again gets a later place. If the two tiers have different versions of a step,
the version with the later place counts, provided that it was saved with knowledge of the other.

This condition does not always hold. A fast tier may die before its last steps are drained. Another
fast tier that then continues from the second tier does not know of these steps. To make this
visible, a fast tier that continues the steps of another one takes places from a later range
(`next_turn`). Before it saves anything, it notes which places it has seen on the second tier. So
three cases can be detected:

1. The second tier has a later version of a step than the fast tier, whose version is undrained. The
   later version was saved without knowledge of the undrained one.
2. The second tier has an earlier version of a step than the fast tier, which has never seen the
   earlier one. The later version was saved without knowledge of it.
3. The second tier has steps that the fast tier has never seen, with places between the last place
   seen and those of undrained steps. Another fast tier has continued the run, without knowledge of
   the undrained steps.

The first two cases concern a single step: the version on the second tier is used, both are kept,
and the step is reported (case 1: `DivergedStepError`, case 2: `DivergedTierError`). The third case
concerns the order of all steps, so nothing is drained until the user has decided
(`DivergedTierError`).

A note may be incomplete but is never wrong. If a fact is missing, the content of the tiers is
compared. A version that both tiers have was drained. Versions that differ only in their place are
the same.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import StoreIOError
from tensor_dedup.store.format.identity import (
    SeenPlaces,
    TierNote,
    note_in,
    note_text,
    seen_in,
    seen_text,
)
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.locks import draining
from tensor_dedup.store.steps.runs import StepPlace
from tensor_dedup.store.store import LocalStore
from tensor_dedup.training.errors import DivergedTierError, OtherTierError
from tensor_dedup.training.tiers.second_tier import SecondTier, TierContent, ahead, text_at

# So many places are one fast tier's, from when it goes on from another one's last. How many steps
# that one has not drained is unknown, and they must not get the later places.
_TURN: Final = 1 << 20
# Of so many turns the last places are noted.
_TURNS: Final = 64
_RECORD_WAIT_S: Final = 2.0
_SENT: Final = 16  # copies go one by one, so few are under way or have failed


class TierNotes:
    """Facts that a fast tier has noted about the second tier of a run. Safe from any thread."""

    def __init__(self, fast: LocalStore, second: SecondTier, run: str, *, lets_go: bool) -> None:
        """Read the notes of the fast tier `fast` about the run `run`.

        `lets_go` says whether drained steps may be deleted from the fast tier.

        Raises:
            OtherTierError: The second tier is not the one to which the run was drained.
        """
        self._fast, self._second, self._run, self._lets_go = fast, second, run, lets_go
        self._note, self._noted = self._read_note(), False
        self.check()
        self._identity = None if self._note is None else self._note.identity
        with suppress(StoreError):  # it may be that nothing can be written there
            self._identity = second.identity(make=True)
        self._seen = self._recorded() or SeenPlaces()

    # Which one it is

    def _read_note(self) -> TierNote | None:
        """Read the note on the fast tier; one that lets go of nothing may be drained anywhere."""
        return tier_note(self._fast, self._run) if self._lets_go else None

    def check(self) -> None:
        """Check that the second tier is still the one to which the run was drained.

        For example, another disk may be mounted at the same path.

        Raises:
            OtherTierError: The second tier is another one.
        """
        if self._note is not None and self._second.identity() != self._note.identity:
            raise other_tier(self._fast, self._run, self._note, self._second.where)

    def identify(self) -> None:
        """Check the identity of the second tier.

        If nothing was drained yet, the identity is read from the second tier, or written there.

        Raises:
            OtherTierError: The second tier is not the one to which the run was drained.
            StoreIOError: No identity could be written to the second tier.
        """
        self._note = self._note or self._read_note()
        if self._note is None:
            identity = self._second.identity(make=True)
            if identity is None:
                what = f"no identity could be written to {self._second.where}"
                raise StoreIOError.at(self._fast.path, what)
            self._note = TierNote(identity, self._second.where)
        self.check()
        if self._note.identity != self._identity:
            self._identity = self._note.identity
            self._seen = self._recorded() or SeenPlaces()

    def bind(self) -> None:
        """Write the note of the second tier's identity, so that the run stays bound to that tier.

        Call this method before drained steps are deleted from the fast tier. If they are never
        deleted, no note is needed, and nothing is written.
        """
        if not self._noted and self._note is not None and self._lets_go:
            if self._read_note() is None:
                _publish(self._fast, note_text(self._run, self._note), self._path)
            self._noted = True

    @property
    def _path(self) -> Path:
        return note_path(self._fast, self._run)

    # What is known of it

    @property
    def drained(self) -> int:
        """The place in the order of saving up to which all steps were copied to the second tier.

        Steps that have been deleted from the fast tier since are included.
        """
        return self._seen.drained

    def meet(self, near: Mapping[int, StepPlace], there: TierContent) -> None:
        """Record which steps the second tier has.

        `there` is the content of the second tier. `near` has the places of the steps on the fast
        tier in the order of saving. Read `there` first, then `near`.

        Raises:
            DivergedTierError: The second tier has new steps from another fast tier, and this fast
                tier has undrained steps that would come after them.
        """
        recorded = self._recorded()  # by now: what has left the fast tier was recorded before
        known = _merged(self._seen, recorded or SeenPlaces())
        places = {step: place for step, place in there.places.items() if place.readable}
        own = {place.manifest for place in near.values()} | {*known.sent}
        known = _with(known, (p.sequence for p in places.values() if p.manifest in own))
        new = {s: p for s, p in places.items() if not _has(known, p.sequence)}
        waiting = {s: p for s, p in near.items() if ahead(p, places.get(s))}
        last = max((p.sequence for s, p in places.items() if s not in new), default=0)
        theirs = sorted(step for step, place in new.items() if place.sequence > last)
        if theirs:
            first = min(new[step].sequence for step in theirs)
            late = sorted(step for step, place in waiting.items() if place.sequence >= first)
            if recorded is None:
                # Never used with this second tier: nothing says what was seen there, so it is
                # refused only where something would be replaced.
                late = [step for step in late if step in new]
            if late:
                where = self._second.where
                raise DivergedTierError.of(self._fast.path, self._run, late, where, theirs)
        # What one here would replace stays unseen: it was made without that.
        kept = {new[step].sequence // _TURN for step in waiting if step in new}
        learned = (place.sequence for place in new.values())
        self._seen = _with(known, (each for each in learned if each // _TURN not in kept))
        self._record()

    def sending(self, place: StepPlace) -> None:
        """Record that the step at `place` is about to be copied to the second tier.

        The record is the name of the step's manifest. It later shows that the copy came from this
        fast tier.
        """
        assert place.manifest is not None, "what cannot be read is not copied"
        self._seen = _merged(SeenPlaces(sent=(place.manifest,)), self._seen)
        self._record()

    def copied(self, place: int) -> None:
        """Record, in memory only, the place that a copied step has on the second tier."""
        self._seen = _with(self._seen, [place])

    def note_drained(self, drained: int) -> None:
        """Record that all steps up to the place `drained` are durable on the second tier."""
        self._seen = _merged(self._seen, SeenPlaces(drained))
        self._record()

    def _recorded(self) -> SeenPlaces | None:
        """Read what was seen of this second tier; None where nothing is noted."""
        with self._fast.handle.translated():
            return _seen_of(self._fast, self._run).get(self._identity or "")

    def _record(self) -> None:
        """Make what is known durable.

        A full disk must not keep its drained steps for want of it: the next step tries again. What
        is not recorded is found by content while one of the last drained steps is here.
        """
        if self._identity is None or self._seen == self._recorded():
            return
        objects = self._fast.handle.objects
        # No save takes that lock: it would wait for the disk here. Who changes a name on a remote
        # holds it until that answers; what is not recorded then is found by content.
        with (
            suppress(StoreError),
            self._fast.handle.translated(),
            draining(objects.files, objects.layout, wait_s=_RECORD_WAIT_S),
            self._fast.handle.locked(),
        ):
            found = _seen_of(self._fast, self._run)
            self._seen = _merged(self._seen, found.pop(self._identity, SeenPlaces()))
            text = seen_text(self._run, {**found, self._identity: self._seen})
            objects.publish(text, _seen_path(self._fast, self._run))

    # Which state counts

    def diverged(self, near: StepPlace | None, there: StepPlace | None) -> bool:
        """Return whether the two tiers have different versions of a step, saved independently.

        This means that the later version was saved without knowledge of the earlier one. `near` and
        `there` are the places of the versions on the fast tier and on the second tier. If one tier
        has no readable version, the result is False.
        """
        if near is None or there is None or not (near.readable and there.readable):
            return False
        if near.manifest == there.manifest or near.content == there.content:
            return False
        if near.sequence > there.sequence:
            return there.manifest not in self._seen.sent and not self._knows(there.sequence)
        return near.sequence > self.drained or near.sequence == there.sequence

    def _knows(self, place: int) -> bool:
        """Whether a place there was seen, by this handle or by another one of this fast tier."""
        if not _has(self._seen, place):
            self._seen = _merged(self._seen, self._recorded() or SeenPlaces())
        return _has(self._seen, place)

    def counts(self, near: StepPlace | None, there: StepPlace | None) -> bool:
        """Return whether the fast tier's version of a step is used, rather than the second tier's.

        The result is False if the second tier's version is later, was saved independently, or is
        the only one that can be read. The arguments are as for `diverged`.
        """
        return not ahead(there, near) and not self.diverged(near, there)

    def undrained(self, near: StepPlace | None, there: StepPlace | None) -> bool:
        """Return whether the fast tier must keep its version of a step.

        This is so if the second tier has no readable version of the step, only an earlier one, or
        one that was saved independently. The arguments are as for `diverged`.
        """
        return ahead(near, there) or self.diverged(near, there)


def next_turn(last: int) -> int:
    """Return the first place of the next range, after the range that contains the place `last`.

    Places in the order of saving are divided into ranges of equal size. A fast tier that continues
    the steps of another one begins a new range, because the other one may have saved further steps
    in the old range that were never drained.
    """
    return (last // _TURN + 1) * _TURN


def _with(seen: SeenPlaces, places: Iterable[int]) -> SeenPlaces:
    """Add places that are known: of each turn the last one is kept."""
    last = {place // _TURN: place for place in sorted([*seen.last, *places])}
    return replace(seen, last=tuple(last.values())[-_TURNS:])


def _merged(one: SeenPlaces, other: SeenPlaces) -> SeenPlaces:
    sent = tuple(dict.fromkeys([*other.sent, *one.sent]))[-_SENT:]
    return _with(replace(one, drained=max(one.drained, other.drained), sent=sent), other.last)


def _has(seen: SeenPlaces, place: int) -> bool:
    """Whether the second tier was seen to have a place of this turn that is no earlier.

    Drains go in order: one that comes later has a later place, among those of its fast tier.
    """
    last = seen.last
    at = bisect_left(last, place)
    if at < len(last) and last[at] // _TURN == place // _TURN:
        return True
    return len(last) == _TURNS and place < last[0]  # of those nothing is noted any more


def tier_note(fast: LocalStore, run: str) -> TierNote | None:
    """Return the note about the second tier to which the fast tier has drained a run.

    Returns None if there is no readable note.
    """
    with fast.handle.translated():
        text = text_at(fast.handle.objects, note_path(fast, run))
    return None if text is None else note_in(text, run)


def note_path(fast: LocalStore, run: str) -> Path:
    """Return the path of the note about a run's second tier, which is on the fast tier."""
    return fast.handle.objects.layout.tiers / file_of(run)


def other_tier(fast: LocalStore, run: str, note: TierNote, where: str) -> OtherTierError:
    """Return the error about a second tier at `where` that is not the one in `note`."""
    return OtherTierError.of(fast.path, run, note.where, where, note_path(fast, run))


def _seen_path(fast: LocalStore, run: str) -> Path:
    return fast.handle.objects.layout.drains / file_of(run)


def _seen_of(fast: LocalStore, run: str) -> dict[str, SeenPlaces]:
    """Read what was seen on each second tier of a run."""
    text = text_at(fast.handle.objects, _seen_path(fast, run))
    return {} if text is None else seen_in(text, run)


def _publish(fast: LocalStore, text: bytes, path: Path) -> None:
    with fast.handle.locked(), fast.handle.objects.naming():
        fast.handle.objects.publish(text, path)
