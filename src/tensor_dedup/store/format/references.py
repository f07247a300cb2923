"""The texts of references, and of the renaming of a run, which changes many of them. No I/O."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Self

from tensor_dedup.store.errors import DamagedFileError, NewerFormatError
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.layout import is_digest
from tensor_dedup.store.format.names import name_in

REFERENCE = "tensor-dedup reference"
_RENAMING = "tensor-dedup renaming"
_RENAMED = "tensor-dedup renamed run"


def ref_text(name: str, manifest: str) -> bytes:
    """Return the content of the reference file that maps `name` to the manifest `manifest`."""
    return frames.encode_text([REFERENCE, f"name {name}", f"manifest {manifest}"])


@dataclass(frozen=True, slots=True)
class MovedReference:
    """One reference that a renaming replaces by another one, to another manifest."""

    name: str
    manifest: str
    new_name: str
    new_manifest: str


@dataclass(frozen=True, slots=True)
class Renaming:
    """The renaming of a run: its old and its new name, and all references that change.

    `token` tells this renaming from every other one.
    """

    run: str
    new_run: str
    token: str
    moves: tuple[MovedReference, ...]

    def to_text(self) -> bytes:
        """Return the content of the file that says what is to be done."""
        moves = (f"move {m.name} {m.manifest} {m.new_name} {m.new_manifest}" for m in self.moves)
        return frames.encode_text([_RENAMING, *self._head(), *moves])

    @classmethod
    def from_text(cls, blob: bytes, path: PurePath) -> Self:
        """Parse the content of the file at `path` that `to_text` made.

        Raises:
            DamagedFileError: The text is damaged.
            NewerFormatError: A later version wrote it.
        """
        lines = frames.decode_text(blob, path)
        if lines[:1] != [_RENAMING]:
            raise NewerFormatError.at(path, "a renaming of another form")
        try:
            run, new_run, token = (line.partition(" ")[2] for line in lines[1:4])
            moves = tuple(
                MovedReference(*line.removeprefix("move ").split(" ")) for line in lines[4:]
            )
        except (TypeError, ValueError) as error:
            raise DamagedFileError.at(path, "it is no list of references") from error
        found = cls(run, new_run, token, moves)
        names = [run, new_run, *(name for m in moves for name in (m.name, m.new_name))]
        digests = [digest for m in moves for digest in (m.manifest, m.new_manifest)]
        fit = all(map(is_digest, digests)) and all(name_in(name) == name for name in names)
        if not fit or found.to_text() != blob:  # no name leads out of the folder of references
            raise DamagedFileError.at(path, "it is no list of references")
        return found

    def note(self) -> bytes:
        """Return the content of the note that stays: what became of the run of the old name."""
        return frames.encode_text([_RENAMED, *self._head()])

    def _head(self) -> list[str]:
        return [f"run {self.run}", f"to {self.new_run}", f"id {self.token}"]


def renamed_to(note: bytes, path: PurePath) -> str:
    """Return the new name in a note of `Renaming.note`, read from `path`.

    Raises:
        DamagedFileError: The note is damaged.
    """
    lines = frames.decode_text(note, path)
    if lines[:1] != [_RENAMED] or len(lines) != 4:
        raise DamagedFileError.at(path, "it is no note of a renamed run")
    return lines[2].removeprefix("to ")
