"""Text files about tiers: which one a tier is, which second tier a run has, and who writes it.

A run can save its steps to a fast local store, which is the fast tier. From there they can be
copied, or drained, to another store or a remote, which is the second tier. No I/O.
"""

import json
import secrets
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from tensor_dedup.store.errors import DamagedFileError
from tensor_dedup.store.format import frames

TEXT_BYTES: Final = 1 << 14
_TITLE: Final = "tensor-dedup identity"
_NOTE_TITLE: Final = "tensor-dedup second tier"
_WRITER_TITLE: Final = "tensor-dedup writer"
_ID, _RUN, _WHERE, _GENERATION, _HOLDER = "id ", "run ", "where ", "generation ", "holder "


@dataclass(frozen=True, slots=True)
class TierNote:
    """A note about the second tier of a run, the store or remote to which its steps were copied.

    `identity` is the identity of the second tier, and `where` is its path or address when the note
    was written.
    """

    identity: str
    where: str


@dataclass(frozen=True, slots=True)
class Writer:
    """The writer of a run on a second tier: the fast tier that may drain the run to it.

    `holder` is the identity of the fast tier, and `where` says on which machine and in which folder
    it was then. `generation` is 1 for the first writer, and greater for each later one.
    """

    generation: int
    holder: str
    where: str


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


def writer_text(run: str, writer: Writer) -> bytes:
    """Return the content for the file on a second tier that names the `writer` of `run`."""
    return frames.encode_text(
        [
            _WRITER_TITLE,
            f"{_RUN}{run}",
            f"{_GENERATION}{writer.generation}",
            f"{_HOLDER}{writer.holder}",
            f"{_WHERE}{json.dumps(writer.where)}",
        ]
    )


def writer_in(text: bytes, run: str) -> Writer | None:
    """Return the writer in `text`, the content of the file that names the writer of `run`.

    Return None if the text is damaged or belongs to another run. Additional lines, which later
    versions may write, are ignored.
    """
    lines = _lines(text)
    if len(lines) < 5 or lines[:2] != [_WRITER_TITLE, f"{_RUN}{run}"]:
        return None
    generation, holder, where = (
        line.removeprefix(prefix)
        for line, prefix in zip(lines[2:5], (_GENERATION, _HOLDER, _WHERE), strict=True)
    )
    try:
        return Writer(int(generation), holder, str(json.loads(where)))
    except (ValueError, RecursionError):
        return None


def _lines(text: bytes) -> list[str]:
    try:
        return frames.decode_text(text, PurePath())
    except DamagedFileError:
        return []
