"""Text files about tiers: the identity of a second tier, and a store's notes about it. No I/O.

A run can save its steps to a fast local store, which is the fast tier. From there they can be
copied, or drained, to another store or a remote, which is the second tier.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from tensor_dedup.store.errors import DamagedFileError
from tensor_dedup.store.format import frames

TEXT_BYTES: Final = 1 << 14
_TITLE: Final = "tensor-dedup identity"
_NOTE_TITLE: Final = "tensor-dedup second tier"
_SEEN_TITLE: Final = "tensor-dedup seen places"
_ID, _RUN, _WHERE, _TIER = "id ", "run ", "where ", "tier "
# So many second tiers are remembered, those that were used last.
_TIERS: Final = 8


@dataclass(frozen=True, slots=True)
class TierNote:
    """A note about the second tier of a run, the store or remote to which its steps were copied.

    `identity` is the identity of the second tier, and `where` is its path or address when the note
    was written.
    """

    identity: str
    where: str


@dataclass(frozen=True, slots=True)
class SeenPlaces:
    """A fast tier's notes about the steps of a run on one second tier.

    A step's place is its number in the order of saving.

    - `drained` is a place. All steps of the fast tier up to it were copied to the second tier.
    - `last` has one place for each fast tier that copied steps to the second tier: the greatest
      place seen there. The places are in ascending order.
    - `sent` has the names of the manifests copied last. Some of these copies may be incomplete.
    """

    drained: int = 0
    last: tuple[int, ...] = ()
    sent: tuple[str, ...] = ()


def new_text() -> bytes:
    """Return the content for an identity file, with a new random identity."""
    return frames.encode_text([_TITLE, f"{_ID}{secrets.token_hex(16)}"])


def identity_in(text: bytes) -> str | None:
    """Return the identity in `text`, the content of an identity file.

    Return None if the text is not valid.
    """
    lines = _lines(text)
    if len(lines) != 2 or lines[0] != _TITLE or not lines[1].startswith(_ID):
        return None
    return lines[1].removeprefix(_ID)


def note_text(run: str, note: TierNote) -> bytes:
    """Return the content for the file that stores `note` about the second tier of `run`."""
    where = json.dumps(note.where)  # a path may hold anything
    return frames.encode_text(
        [_NOTE_TITLE, f"{_RUN}{run}", f"{_ID}{note.identity}", f"{_WHERE}{where}"]
    )


def note_in(text: bytes, run: str) -> TierNote | None:
    """Return the note in `text`, the content of the file with the note about `run`.

    Return None if the text is damaged or belongs to another run. Additional lines, which later
    versions may write, are ignored.
    """
    lines = _lines(text)
    if len(lines) < 4 or lines[:2] != [_NOTE_TITLE, f"{_RUN}{run}"]:
        return None
    identity, where = lines[2].removeprefix(_ID), lines[3].removeprefix(_WHERE)
    try:
        return TierNote(identity, str(json.loads(where)))
    except (ValueError, RecursionError):
        return None


def seen_text(run: str, seen: Mapping[str, SeenPlaces]) -> bytes:
    """Return the content for the file with a fast tier's notes about the steps of `run`.

    `seen` maps the identity of each second tier to the notes, with the most recently used tier
    last. Only the last eight are kept.
    """
    tiers = [*seen.items()][-_TIERS:]
    lines = [
        f"{_TIER}{identity} {each.drained} {','.join(map(str, each.last))} {','.join(each.sent)}"
        for identity, each in tiers
    ]
    return frames.encode_text([_SEEN_TITLE, f"{_RUN}{run}", *lines])


def seen_in(text: bytes, run: str) -> dict[str, SeenPlaces]:
    """Return the notes about the steps of `run` in `text`, which `seen_text` made.

    The result maps the identity of each second tier to the notes about it. It is empty if the text
    is damaged or belongs to another run.
    """
    lines, found = _lines(text), dict[str, SeenPlaces]()
    if lines[:2] != [_SEEN_TITLE, f"{_RUN}{run}"]:
        return {}
    try:
        for line in lines[2:]:
            identity, drained, last, sent = line.removeprefix(_TIER).split(" ")
            places = sorted(int(place) for place in last.split(",") if place)
            manifests = tuple(each for each in sent.split(",") if each)
            found[identity] = SeenPlaces(int(drained), tuple(places), manifests)
    except ValueError:
        return {}
    return found


def _lines(text: bytes) -> list[str]:
    try:
        return frames.decode_text(text, PurePath())
    except DamagedFileError:
        return []
