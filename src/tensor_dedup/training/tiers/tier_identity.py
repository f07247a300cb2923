"""Which second tier a run is bound to: the one to which its steps have gone.

    tiers/RUN    on the fast tier: the identity of the second tier to which the run was drained

If drained steps may be deleted from the fast tier, the run must be drained to the second tier that
is noted there, and to no other. So an empty disk that is mounted in its place is noticed.
"""

from contextlib import suppress
from pathlib import Path

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import StoreIOError
from tensor_dedup.store.format.identity import TierNote, note_in, note_text
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.store import LocalStore
from tensor_dedup.training.errors import OtherTierError
from tensor_dedup.training.tiers.second_tier import SecondTier, text_at


class TierBond:
    """The bond of a run to its second tier. Safe from any thread."""

    def __init__(self, fast: LocalStore, second: SecondTier, run: str, *, lets_go: bool) -> None:
        """Read the note of the fast tier `fast` about the run `run`.

        `lets_go` says whether drained steps may be deleted from the fast tier.

        Raises:
            OtherTierError: The second tier is not the one to which the run was drained.
        """
        self._fast, self._second, self._run, self._lets_go = fast, second, run, lets_go
        self._note, self._noted = self._read_note(), False
        self.check()
        with suppress(StoreError):  # it may be that nothing can be written there
            second.identity(make=True)

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


def _publish(fast: LocalStore, text: bytes, path: Path) -> None:
    with fast.handle.naming():
        fast.handle.objects.publish(text, path)
