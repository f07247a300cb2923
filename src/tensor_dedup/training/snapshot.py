"""A step on its way into a store: taken apart, perhaps being captured, then whole.

ExtractedStep  what an adapter makes of a model; it may share the model's memory
StepSource     what a commit is given; a background save captures it while it is committed
StepSnapshot   the whole step, in memory that stays as it is until the commit has returned
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Protocol, Self

from tensor_dedup.store.errors import NotTextError
from tensor_dedup.store.format.manifests import METADATA, RESERVED
from tensor_dedup.store.format.names import check_path
from tensor_dedup.store.gathered import FlatBytes
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.steps.runs import step_name
from tensor_dedup.store.writing.containers import Want
from tensor_dedup.store.writing.run_cache import StoredPiece
from tensor_dedup.training.errors import NamedTwiceError
from tensor_dedup.training.state import NamedValue, StateChunk, in_groups


@dataclass(frozen=True, slots=True)
class ExtractedStep:
    """A step that an adapter has taken apart. The chunks may share the model's memory."""

    notes: Notes
    chunks: Iterable[StateChunk]
    files: Mapping[str, bytes]


class StepSource(Protocol):
    """A step that is to be committed. Some of its tensors may still have to be copied."""

    @property
    def notes(self) -> Notes:
        """The notes of the step: its run, number, adapter, metrics and so on."""
        ...

    @property
    def name(self) -> str:
        """The name that the step will have in the store."""
        ...

    @property
    def new(self) -> bool:
        """Whether the commit must fail if a step of this name exists."""
        ...

    @property
    def background(self) -> bool:
        """Whether the training continues during the commit."""
        ...

    def arriving(self) -> Iterator[tuple[bytes, Want]]:
        """Yield large pieces, each with its change hash, as soon as they are copied from the model.

        A change hash is a fast hash of the content. Nothing else writes to the memory of these
        pieces. Each call begins with the first piece again.

        Raises:
            ChangedModelError: A tensor was changed before it was copied.
        """
        ...

    def whole(self) -> "StepSnapshot":
        """Wait until the step is captured completely, and return it.

        Raises:
            ChangedModelError: A tensor was changed before it was copied.
            NamedTwiceError, EscapingPathError, NotTextError: A name is invalid.
        """
        ...

    def committed(self) -> None:
        """Release resources that were needed until the step was committed."""
        ...


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """A completely captured step that is to be committed.

    * `pieces` are its tensors, and `files` its small files by their paths.
    * `hashes` maps names of pieces to change hashes (fast hashes of the content), as far as these
      are known.
    * `same` maps names of pieces to equal large pieces of an earlier step. Such a piece has a
      change hash in `hashes`, but no bytes in `pieces`.
    * `private` has the names of pieces to whose memory nothing else writes.
    * `new` is True if the commit must not replace a step.
    * `background` is True if the training continues during the commit.
    * `again(name, change_hash)` returns the bytes of a piece in `same`, and whether nothing else
      writes to their memory. If the bytes are no longer in memory, it returns None.
    * `check_unchanged()` is called when all bytes have been read. It raises ChangedModelError if
      some bytes were written to.
    * `committed()` is called when the step is committed.
    """

    notes: Notes
    pieces: Sequence[NamedValue]
    files: Mapping[str, bytes]
    hashes: Mapping[str, bytes] = field(default_factory=dict)
    same: Mapping[str, StoredPiece] = field(default_factory=dict)
    private: Collection[str] = ()
    new: bool = False
    background: bool = False
    again: Callable[[str, bytes], tuple[FlatBytes, bool] | None] = lambda _name, _key: None
    check_unchanged: Callable[[], None] = lambda: None
    committed: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, step: ExtractedStep) -> Self:
        """Return a snapshot that shares the model's memory, without any copies.

        The model must not be changed before the commit has ended.

        Raises:
            UnsupportedArrayError: A tensor or an array cannot be stored.
        """
        taken = [(chunk.piece(), chunk.group) for chunk in step.chunks]
        ordered = in_groups((piece for piece, _ in taken), (group for _, group in taken))
        return cls(step.notes, ordered, step.files)

    def arriving(self) -> Iterator[tuple[bytes, Want]]:
        """Yield nothing, because the step is captured completely."""
        return iter(())

    def whole(self) -> Self:
        """Check the names in the step, and return the step itself.

        Raises:
            NamedTwiceError: Two parts have the same name, or a part has a name that an export
                needs.
            EscapingPathError: The path of a small file leads out of the folder of an export.
            NotTextError: A name is not valid Unicode.
        """
        self._check_names()
        return self

    def _check_names(self) -> None:
        self._check_texts()
        names = {piece.name for piece in self.pieces}
        if len(names) != len(self.pieces):
            what = f"{len(self.pieces)} tensors have {len(names)} names"
            raise NamedTwiceError.at(self.name, what)
        if METADATA in names:
            what = (
                f"the tensor {METADATA!r} has the name of what a header of safetensors begins with"
            )
            raise NamedTwiceError.at(self.name, what, tensor=METADATA)
        paths = [check_path(path, PurePath(self.name)) for path in self.files]
        within = {parent for path in paths for parent in path.parents}
        taken = [path for path in paths if str(path) in RESERVED or path in within]
        if taken:
            what = f"{taken[0]} is where other files are exported to"
            raise NamedTwiceError.at(self.name, what, file=str(taken[0]))

    def _check_texts(self) -> None:
        texts = [*(piece.name for piece in self.pieces), *self.files, self.notes.part]
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            wrong = next(text for text in texts if not _is_unicode(text))
            what = f"the name {wrong!a} is not Unicode"
            raise NotTextError.at(self.name, what, text=wrong) from None

    def as_new(self) -> Self:
        """Return a copy of the snapshot that must not replace a step.

        If a step of this name exists, committing the copy raises NameTakenError.
        """
        return replace(self, new=True)

    @property
    def name(self) -> str:
        """The name that the step will have in the store."""
        return step_name(self.notes.run, self.notes.step)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
