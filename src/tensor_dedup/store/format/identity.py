"""The identity of a second tier, and a fast tier's notes of it. No I/O."""

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
    """Which second tier a run was drained to: its identity, and where it was."""

    identity: str
    where: str


@dataclass(frozen=True, slots=True)
class SeenPlaces:
    """What a fast tier knows of the steps of a run on one second tier.

    Each step of the fast tier with a place up to `drained` was drained there. `last` has, in order,
    the last place that was seen there of each fast tier that had drained; `sent` the manifests of
    steps that were copied there last, or perhaps were.
    """

    drained: int = 0
    last: tuple[int, ...] = ()
    sent: tuple[str, ...] = ()


def new_text() -> bytes:
    """Return the text of an identity that nothing else has."""
    return frames.encode_text([_TITLE, f"{_ID}{secrets.token_hex(16)}"])


def identity_in(text: bytes) -> str | None:
    """Return the identity of a text, or None if it is damaged or none."""
    lines = _lines(text)
    if len(lines) != 2 or lines[0] != _TITLE or not lines[1].startswith(_ID):
        return None
    return lines[1].removeprefix(_ID)


def note_text(run: str, note: TierNote) -> bytes:
    """Return the text of a run's note."""
    where = json.dumps(note.where)  # a path may hold anything
    return frames.encode_text(
        [_NOTE_TITLE, f"{_RUN}{run}", f"{_ID}{note.identity}", f"{_WHERE}{where}"]
    )


def note_in(text: bytes, run: str) -> TierNote | None:
    """Return the note of a run, or None if the text is damaged or another one.

    Lines that are not known say more about the same tier: one that is ignored protects nothing.
    """
    lines = _lines(text)
    if len(lines) < 4 or lines[:2] != [_NOTE_TITLE, f"{_RUN}{run}"]:
        return None
    identity, where = lines[2].removeprefix(_ID), lines[3].removeprefix(_WHERE)
    try:
        return TierNote(identity, str(json.loads(where)))
    except ValueError:
        return None


def seen_text(run: str, seen: Mapping[str, SeenPlaces]) -> bytes:
    """Return the text of what was seen on second tiers, by identity, the last used one last."""
    tiers = [*seen.items()][-_TIERS:]
    lines = [
        f"{_TIER}{identity} {each.drained} {','.join(map(str, each.last))} {','.join(each.sent)}"
        for identity, each in tiers
    ]
    return frames.encode_text([_SEEN_TITLE, f"{_RUN}{run}", *lines])


def seen_in(text: bytes, run: str) -> dict[str, SeenPlaces]:
    """Return what was seen on second tiers; nothing if the text is damaged or another run's."""
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
