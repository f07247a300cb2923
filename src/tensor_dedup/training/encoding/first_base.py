"""Find a base for the first step of a run: a stored checkpoint with similar tensors.

The first step is stored as differences from the base. The base is the checkpoint that the user
names. If the user does not name one, samples of tensors are compared, and the checkpoint that
differs in the fewest bits is used. A checkpoint is compared only if it has a tensor like one of the
largest in the step: of the same dtype and size, and with a similar name. Fine-tunes of a common
base, runs of a hyperparameter sweep and restarted runs usually find a base.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tensor_dedup.errors import StoreError
from tensor_dedup.store.codecs.choice import Sample, distance, places
from tensor_dedup.store.format.manifests import Piece, named_tensors
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.hashing import Hashed
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.steps.runs import parse_step_name
from tensor_dedup.store.writing.encoder import RELATED, element_width

# Bounds on the search: tensors that are compared, checkpoints that are looked at.
_LARGEST, _CHECKPOINTS = 4, 64
# The end of a name, a dtype and a size in bytes.
_Ending: TypeAlias = tuple[str, str | None, int]


class Candidate(Protocol):
    """A new tensor of which samples can be read, in memory or in a file."""

    @property
    def name(self) -> str:
        """The tensor's name in the step."""

    @property
    def dtype(self) -> str | None:
        """The tensor's dtype, or None if the piece is not a tensor."""

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""

    @property
    def hashed(self) -> Hashed:
        """The digest of the tensor and those of its leaves."""

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`, which need not be verified."""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step of a run, which is stored as differences from another checkpoint, the base.

    `name` is the name of the base. If it is None, the most similar checkpoint in the store is used.
    """

    run: str
    name: str | None

    def bases(
        self, objects: Objects, index: StoreIndex, tensors: Sequence[Candidate]
    ) -> dict[str, bytes]:
        """Return the tensors of the base that are similar to `tensors`.

        The result maps names in `tensors` to digests of tensors in the base. It is empty if no
        checkpoint in the store is related, or if the base cannot be read.
        """
        with suppress(StoreError):  # it was deleted, or is damaged
            name = self.name or _nearest(objects, index, tensors, self)
            if name is not None:
                held = _by_ending(_tensors(objects, name), tensors)
                found = ((each.name, _counterpart(each, held)) for each in tensors)
                return {name: piece.digest for name, piece in found if piece is not None}
        return {}


def _nearest(
    objects: Objects, index: StoreIndex, tensors: Sequence[Candidate], first: FirstStep
) -> str | None:
    largest = sorted(tensors, key=lambda tensor: -tensor.nbytes)[:_LARGEST]
    best: str | None = None
    least, compared = math.inf, set[tuple[bytes | None, ...]]()
    for name in _names(objects, first.run) if largest else ():
        with suppress(StoreError):  # gone or damaged: it is not used
            held = _by_ending(_tensors(objects, name), largest)
            pieces = [_counterpart(tensor, held) for tensor in largest]
            wanted = {piece.digest for piece in pieces if piece is not None}
            if not wanted:
                continue
            with closing(StoredPieces(objects, index, wanted, name)) as opened:
                # Steps around one anchor are equally far.
                anchors = [None if each is None else opened.anchor(each.digest) for each in pieces]
                if tuple(anchors) in compared:
                    continue
                compared.add(tuple(anchors))
                pairs = zip(largest, anchors, strict=True)
                far = [_distance(tensor, anchor, opened) for tensor, anchor in pairs]
            # An optimizer's state is in no base, though a tensor may be called alike. What a
            # checkpoint lacks speaks for another one.
            there = [each for each in far if each is not None and each < RELATED]
            rank = sum(there) + 0.5 * (len(far) - len(there))
            if there and rank < least:
                best, least = name, rank
    return best


def _names(objects: Objects, besides: str) -> Iterator[str]:
    """The checkpoints to look at: of each other run one step, those that were named last first."""
    steps: dict[str, tuple[int, str]] = {}
    names = []
    for name in objects.names():
        step = parse_step_name(name)
        if step is None:
            names.append(name)
        elif not step.kept and step.run != besides:
            steps[step.run] = max(steps.get(step.run, (-1, "")), (step.step, name))
    names += [name for _, name in steps.values()]
    dated = []
    for name in names:
        status = objects.files.status(objects.layout.refs / file_of(name))
        if status is not None:
            dated.append((-status.mtime_ns, name))
    return (name for _, name in sorted(dated)[:_CHECKPOINTS])


def _tensors(objects: Objects, name: str) -> dict[str, Piece]:
    manifest = objects.ref(name)
    content = objects.manifest(manifest)
    return dict(named_tensors(content, objects.pieces(manifest, content)))


def _by_ending(held: Mapping[str, Piece], tensors: Sequence[Candidate]) -> dict[_Ending, Piece]:
    """Those of the dtypes and sizes of `tensors`, by each ending of their names.

    Of several that end alike it is the one with the shortest name.

    Where the same weights are called `model.0.weight` in a step and `0.weight` in a checkpoint of
    them alone, nobody has to say that they are. A wrong pair costs the reading of a sample.
    """
    kinds = {(tensor.dtype, tensor.nbytes) for tensor in tensors}
    fit = {name: piece for name, piece in held.items() if (piece.dtype, piece.nbytes) in kinds}
    found: dict[_Ending, Piece] = {}
    for name in sorted(fit, key=len):
        for ending in _endings(name):
            found.setdefault((ending, fit[name].dtype, fit[name].nbytes), fit[name])
    return found


def _counterpart(tensor: Candidate, held: Mapping[_Ending, Piece]) -> Piece | None:
    """The tensor of the same dtype and size whose name has the longest ending in common."""
    found = (held.get((each, tensor.dtype, tensor.nbytes)) for each in _endings(tensor.name))
    return next(filter(None, found), None)


def _endings(name: str) -> Iterator[str]:
    """Yield the name, and what is left of it without its first parts, one after the other."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _distance(tensor: Candidate, anchor: bytes | None, opened: StoredPieces) -> float | None:
    """The mean share of bits in which samples differ; None where there is nothing to compare."""
    if anchor is None:
        return None
    found = []
    for start, stop in places(tensor.nbytes, element_width(tensor.dtype)):
        base = memoryview(opened.read_piece(anchor, start, stop, tensor.nbytes))
        found.append(distance(Sample(memoryview(bytes(tensor.read(start, stop))), base)))
    return sum(found) / len(found)
