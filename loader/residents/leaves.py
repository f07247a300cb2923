"""Build a tensor from leaves of other tensors: equal leaves share memory, the others are copied.

A *leaf* is a part of 2 MiB of a tensor that begins at a multiple of 2 MiB. A *resident* is a shared
tensor in memory. If residents have leaves of a new tensor at the same offset, these leaves are
mapped from the residents' slabs (pieces of shared memory). The other leaves are copied into a new
slab. Each leaf is compared byte by byte before it is shared, so no digest is trusted.

Of a tensor whose contents are known by digest, common leaves are found by digest, and only the
other leaves are read (`pieces_of_known`, `build_known`). Digests are trusted then, as in every
look-up by digest. These are the pieces of `tensor_dedup.loader.residents.partial` in host memory.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace
from operator import eq
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from blake3 import blake3

from tensor_dedup import libc
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.residents.mappings import BUDGET
from tensor_dedup.loader.residents.partial import Content, Unit, units_in_common, units_of
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM, registry
from tensor_dedup.loader.residents.resident import (
    Resident,
    copied_part,
    resident_key,
    tensor_bytes,
)
from tensor_dedup.loader.residents.slab import (
    MappingLimitError,
    Slab,
    SlabExtent,
    SlabWriter,
)
from tensor_dedup.memory_manager.protocol.layout import PAGE, round_up

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    import torch

    from tensor_dedup.loader.residents.partial import KnownTensor, Progress
    from tensor_dedup.loader.residents.resident import ReadInto
    from tensor_dedup.types import ResidentKey

# The first bytes of a leaf: enough to tell most leaves apart without reading them.
_SAMPLE_BYTES: Final = 32
# How many residents a tensor is compared with, and from how many it may take leaves.
_MAX_COMPARED: Final = 8
_MAX_DONORS: Final = 4
# A slab lives as long as one leaf of it is used, so it is used for this part of it or not at all.
_LEAST_PART_OF_SLAB: Final = 1 / 8
# The sample of each leaf of a resident, taken when it is first compared.
_samples: Final[WeakKeyDictionary[Resident, tuple[bytes, ...]]] = WeakKeyDictionary()


# What a mark is of: enough to tell most leaves of two tensors apart, wherever they are compared.
_MARK_BYTES: Final = PAGE
_MARK_CONTEXT: Final = "tensor-dedup leaf mark v1"
# At least so many leaves of a tensor have marks, or all: as many as `_LEAST_PART_OF_SLAB` asks for.
_LEAST_MARKS: Final = 8

# What residents consist of, where that is known.
_contents: Final[WeakKeyDictionary[Resident, tuple[Content, ...]]] = WeakKeyDictionary()
_T = TypeVar("_T")


class LeafPiece(NamedTuple):
    """Bytes `start` to `end` of a new tensor.

    `there` is the range of a slab that already has these bytes, or None if they must be copied.
    """

    start: int
    end: int
    there: SlabExtent | None


class LeafPlan(NamedTuple):
    """The `pieces` of a known tensor, and the resident that has each unit in `taken`, in order.

    A unit that is taken and lies in no piece that is there is copied from its resident.
    """

    pieces: Sequence[LeafPiece]
    taken: Mapping[Unit, Resident]

    @property
    def there(self) -> list[tuple[int, int, Resident]]:
        """Which bytes residents have, in order: the first byte, the end, and the resident."""
        return [(unit.start, unit.end, each) for unit, each in self.taken.items()]


class _Leaves:
    """The leaves of a sharable tensor: in memory or, with `read`, in the file that backs it.

    Memory that is mapped from a file which has become shorter ends the process that looks at it, so
    each leaf is looked at there only when `read`, which raises, has just read its end.
    """

    def __init__(self, tensor: torch.Tensor, read: ReadInto | None) -> None:
        self.nbytes: Final = tensor.nbytes
        self._address, self._data, self._read = tensor.data_ptr(), tensor_bytes(tensor), read

    def samples(self) -> tuple[bytes, ...]:
        starts = range(0, self.nbytes, LEAF_BYTES)
        return tuple(
            bytes(copied_part(self._data, start, _SAMPLE_BYTES, self._read)) for start in starts
        )

    def equals(self, start: int, size: int, address: int) -> bool:
        """Return whether a leaf holds the bytes at an address."""
        if self._read is not None:
            # To read all of it takes 1.3 times as long as to compare it where it is mapped.
            self._read(memoryview(bytearray(1)), start + size - 1)
        return libc.equal(self._address + start, address, size)


def build_from_leaves(
    tensor: torch.Tensor, digest: str, own: Container[Resident] = (), read: ReadInto | None = None
) -> Resident | None:
    """Build a resident of `tensor` that shares leaves (pieces of 2 MiB) with other residents.

    Returns None if the tensor is smaller than 8 MiB, or if no resident has leaves of it that are
    worth sharing.

    - `digest` is the digest of the tensor's `tensor_bytes` and is not checked.
    - `own` has the residents of the same model, which are not used.
    - `read(into, offset)` fills a buffer with bytes of the tensor from its file. Pass it if the
      tensor is mapped from a file. Its errors are passed on.

    Raises:
        UnsupportedError: The tensor cannot be shared (see `sharable`).
        MappingLimitError: This process has too many mappings already.
        OutOfMemoryError: There is no memory or descriptor for the leaves that are copied.
    """
    if tensor.nbytes < LEAF_SHARED_FROM:
        return None
    key = resident_key(tensor, digest)
    residents = [each for each in registry.alike(key) if each not in own]
    data = tensor_bytes(tensor)
    taken = _taken(_Leaves(tensor, read), residents)
    pieces = _planned(taken, data.nbytes)
    if pieces is None:
        return None
    rest = _Rest(pieces, _phase(taken))
    for start, end in rest.gaps():
        rest.put(data[start:end], start)
    return Resident(key, rest.extents(), shared_in(pieces))


def pieces_in_common(
    tensor: torch.Tensor, residents: Sequence[Resident], read: ReadInto | None = None
) -> list[LeafPiece] | None:
    """Find out which pieces of `tensor` the `residents` have; return all its pieces, in order.

    Returns None if nothing that `tensor` has in common with the residents is worth sharing. Leaves
    (pieces of 2 MiB) are compared byte by byte. The residents must begin at a page boundary of
    their slabs. If the tensor is mapped from a file, `read(into, offset)` fills a buffer with bytes
    of the tensor from the file.

    Raises:
        MappingLimitError: This process has too many mappings already.
    """
    return _planned(_taken(_Leaves(tensor, read), residents), tensor.nbytes)


def _taken(leaves: _Leaves, residents: Sequence[Resident]) -> list[tuple[int, int, Resident]]:
    common = _leaves_in_common(leaves, residents)
    return [
        (n * LEAF_BYTES, min((n + 1) * LEAF_BYTES, leaves.nbytes), each)
        for n, each in sorted(common.items())
    ]


def leaf_marks(key: ResidentKey, data: memoryview, read: ReadInto | None = None) -> list[str]:
    """Return the marks of a tensor: look-up keys by which tensors with equal leaves are found.

    A mark is a hash of the first memory page of a leaf, the offset of the leaf, and the dtype,
    stride and row shape of the tensor. At most 16 leaves have a mark. `key` is the tensor's
    resident key, and `data` has its bytes. If the tensor is mapped from a file, `read(into,
    offset)` fills a buffer with bytes of the tensor from the file.
    """
    starts = _marked(range(0, data.nbytes, LEAF_BYTES))
    return [_mark(key, each, copied_part(data, each, _MARK_BYTES, read)) for each in starts]


def content_marks(key: ResidentKey, contents: Sequence[Content]) -> list[str]:
    """Return look-up keys by which tensors with equal contents are found.

    The look-up keys are computed from the digests in `contents`, so the tensor need not be in
    memory. `key` has the tensor's dtype, shape and stride; its digest is ignored.
    """
    digests = (
        (unit, contents[unit.content].digest)
        if unit.leaf is None
        else (unit, contents[unit.content].leaves[unit.leaf])
        for unit in _marked([*units_of(contents)])
    )
    return [_mark(key, unit.start, digest.encode()) for unit, digest in digests]


def _marked(items: Sequence[_T]) -> Sequence[_T]:
    # Powers of two, so that the marks of the smaller of two tensors have those of the larger.
    step = 1
    while len(items) // (2 * step) >= _LEAST_MARKS:
        step *= 2
    return items[::step]


def _mark(key: ResidentKey, start: int, what: bytes | bytearray) -> str:
    rows = f"{key.dtype} {tuple(key.shape[1:])} {tuple(key.stride)} {start} "
    return blake3(rows.encode() + what, derive_key_context=_MARK_CONTEXT).hexdigest()


def may_have_parts(
    tensor: torch.Tensor, own: Container[Resident] = (), read: ReadInto | None = None
) -> bool:
    """Return whether `tensor` may have leaves (pieces of 2 MiB) in common with residents.

    Only the first bytes of each leaf are compared. Returns False for a tensor smaller than 8 MiB.
    `own` has residents of the same model, which are not considered. If the tensor is mapped from a
    file, `read(into, offset)` fills a buffer with bytes of the tensor from the file.
    """
    if tensor.nbytes < LEAF_SHARED_FROM:
        return False
    residents = [each for each in registry.alike(resident_key(tensor, "")) if each not in own]
    mine = _Leaves(tensor, read).samples() if residents else ()
    return any(any(map(eq, mine, _samples_of(each))) for each in residents)


def note_contents(resident: Resident, contents: Sequence[Content]) -> None:
    """Register the `contents` of `resident`, so that known tensors can share its parts.

    The registration lasts as long as the resident. The digests of the contents are trusted. Does
    nothing for a resident smaller than 8 MiB.
    """
    if resident.nbytes >= LEAF_SHARED_FROM:
        _contents[resident] = tuple(contents)


def pieces_of_known(tensor: KnownTensor, residents: Sequence[Resident]) -> LeafPlan | None:
    """Find out by digest which pieces of `tensor` the `residents` have.

    The contents of the residents were registered by `note_contents`; others are ignored. Returns
    None if nothing that the tensor has in common with the residents is worth sharing.

    Raises:
        MappingLimitError: This process has too many mappings already.
    """
    taken = _contents_in_common(tensor.contents, [each for each in residents if each in _contents])
    found = LeafPlan((), taken)
    pieces = _planned(found.there, tensor.nbytes)
    return None if pieces is None else found._replace(pieces=pieces)


def build_known(tensor: KnownTensor, plan: LeafPlan, progress: Progress) -> Resident | None:
    """Build a resident of `tensor` as `plan` says; only what no resident has is read.

    `progress` is called during reading, from any thread. The result is hashed, which gives it its
    key. Returns None if a content of it does not have its digest (`KnownTensor.is_as_known`).
    Errors of reading are passed on.

    Raises:
        OutOfMemoryError: There is no memory or descriptor for the missing parts.
    """
    contents, taken = tensor.contents, plan.taken
    rest = _Rest(plan.pieces, _phase(plan.there))
    _copy_seams(rest, plan.there)

    def write(piece: memoryview, offset: int) -> None:
        rest.put(piece, offset)
        progress()

    units = [*units_of(contents)]
    tensor.read_units([unit for unit in units if unit not in taken], write)
    unnamed = Resident(tensor.geometry, rest.extents(), shared_in(plan.pieces))
    seen = unnamed.map(writable=False)
    data = tensor_bytes(seen)
    # A leaf digest that is wrong would be noticed in nothing else: that of the whole names what was
    # made. Of one content it is the digest that is known.
    by_leaf = {unit.content for unit in units if _is_by_leaf(unit, taken, contents)}
    for number in sorted(by_leaf) if len(contents) > 1 else ():
        start, end, _, _ = contents[number]
        if not tensor.is_as_known(number, tensor.hashed(data[start:end])):
            return None
    whole = tensor.hashed(data)
    if len(contents) == 1 and not tensor.is_as_known(0, whole):
        return None
    key = replace(tensor.geometry, digest=whole)
    return Resident(key, unnamed.extents, unnamed.leaf_shared_bytes)


def _is_by_leaf(unit: Unit, taken: Mapping[Unit, Resident], contents: Sequence[Content]) -> bool:
    """Return whether a unit was taken for its own digest, and not for that of its content."""
    if unit not in taken:
        return False
    mine = contents[unit.content]
    return all(
        each.digest != mine.digest for each in _contents[taken[unit]] if each.start == mine.start
    )


def _contents_in_common(
    contents: Sequence[Content], residents: Sequence[Resident]
) -> dict[Unit, Resident]:
    """Return the resident that has each unit of a tensor at the same place, where one has."""
    units = [*units_of(contents)]
    found = []
    for each in residents:
        has = units_in_common(contents, units, _contents[each])
        found.append((sum(unit.end - unit.start for unit in has), has, each))
    found.sort(key=lambda one: -one[0])
    taken: dict[Unit, Resident] = {}
    donors: list[Resident] = []
    for _, has, each in found:
        new = [unit for unit in has if unit not in taken]
        if not new or len(donors) == _MAX_DONORS:
            break
        if donors and each.offset % PAGE != donors[0].offset % PAGE:
            continue  # its pages do not lie beside the others'
        donors.append(each)
        taken.update(dict.fromkeys(new, each))
    return {unit: taken[unit] for unit in units if unit in taken}


def _copy_seams(rest: _Rest, there: Sequence[tuple[int, int, Resident]]) -> None:
    """Copy what residents have and what is not mapped from them: the pages on which pieces meet."""
    gaps = rest.gaps()
    for donor in {each for _, _, each in there}:
        data = tensor_bytes(donor.map(writable=False))
        for start, end, each in there:
            for first, last in gaps if each is donor else ():
                if max(start, first) < min(end, last):
                    rest.put(data[max(start, first) : min(end, last)], max(start, first))


def relink(resident: Resident, own: Container[Resident] = ()) -> Resident:
    """Build a resident with the bytes of `resident` that shares leaves with other residents.

    Returns the new resident, or `resident` itself if no other resident has leaves of it that are
    worth sharing. `own` has the residents of the same model, which are not used.

    Raises:
        MappingLimitError: This process has too many mappings already.
        OutOfMemoryError: There is no memory or descriptor for the leaves that are copied.
    """
    if not registry.alike(resident.key):
        return resident
    return build_from_leaves(resident.map(writable=False), resident.key.digest, own) or resident


def _leaves_in_common(leaves: _Leaves, residents: Sequence[Resident]) -> dict[int, Resident]:
    """Return the resident that has each leaf of a tensor, by number, where one has."""
    if not residents:
        return {}
    mine = leaves.samples()
    likely = [(sum(map(eq, mine, _samples_of(each))), each) for each in residents]
    # Who has most is compared first; the sort is stable, so the older of two equals.
    likely.sort(key=lambda pair: -pair[0])
    taken: dict[int, Resident] = {}
    donors: list[Resident] = []
    for alike, each in likely[:_MAX_COMPARED]:
        if not alike or len(donors) == _MAX_DONORS or len(taken) == len(mine):
            break
        if donors and each.offset % PAGE != donors[0].offset % PAGE:
            continue  # its pages do not lie beside the others'
        wanted = [n for n, (a, b) in enumerate(zip(mine, _samples[each], strict=False)) if a == b]
        found = _equal_leaves(leaves, each, [n for n in wanted if n not in taken])
        if found:
            donors.append(each)
            taken.update(dict.fromkeys(found, each))
    return taken


def _samples_of(resident: Resident) -> tuple[bytes, ...]:
    known = _samples.get(resident)
    if known is None:
        leaves = range(0, resident.nbytes, LEAF_BYTES)
        extents = (next(resident.extents_of(at, resident.nbytes)) for at in leaves)
        known = tuple(
            os.pread(slab.fileno, min(_SAMPLE_BYTES, nbytes), offset)
            for slab, offset, nbytes in extents
        )
        _samples[resident] = known
    return known


def _equal_leaves(leaves: _Leaves, resident: Resident, numbers: Sequence[int]) -> list[int]:
    """Return which of these leaves of a tensor are those of a resident."""
    if not numbers:
        return []
    mapped = resident.map(writable=False)
    theirs = mapped.data_ptr()
    equal = []
    for number in numbers:
        start = number * LEAF_BYTES
        size = min(LEAF_BYTES, leaves.nbytes - start)
        inside = start + size <= resident.nbytes
        if inside and leaves.equals(start, size, theirs + start):
            equal.append(number)
    return equal


def _planned(taken: Sequence[tuple[int, int, Resident]], nbytes: int) -> list[LeafPiece] | None:
    """Return the pieces of a tensor of which residents have parts; None if none is worth it.

    Raises:
        MappingLimitError: This process has too many mappings for these.
    """
    there = _of_slabs_worth_keeping(_joined(taken, nbytes, _phase(taken)))
    if not there:
        return None
    pieces = [*_with_gaps(there, nbytes)]
    why_not = BUDGET.refusal(len(pieces))
    if why_not is not None:
        raise MappingLimitError(why_not)
    return pieces


def _phase(taken: Sequence[tuple[int, int, Resident]]) -> int:
    """Return where in a page a tensor begins that takes these from residents."""
    return taken[0][2].offset % PAGE if taken else 0


def shared_in(pieces: Sequence[LeafPiece]) -> int:
    """Return the number of bytes in `pieces` that are shared and so need not be copied."""
    return sum(piece.end - piece.start for piece in pieces if piece.there is not None)


def _joined(taken: Sequence[tuple[int, int, Resident]], nbytes: int, phase: int) -> list[LeafPiece]:
    """Return what is there, joined where it lies side by side in a slab: each is a mapping.

    Pieces begin and end with pages, where the tensor begins at `phase`: a page on which two meet
    is copied.
    """
    joined: list[LeafPiece] = []
    for at, end, donor in taken:
        for extent in donor.extents_of(at, end):
            before = joined[-1] if joined else None
            if before is not None and before.end == at and _goes_on(before.there, extent):
                assert before.there is not None
                there = before.there._replace(nbytes=before.there.nbytes + extent.nbytes)
                joined[-1] = LeafPiece(before.start, at + extent.nbytes, there)
            else:
                joined.append(LeafPiece(at, at + extent.nbytes, extent))
            at += extent.nbytes
    cut = (_cut_to_pages(piece, nbytes, phase) for piece in joined)
    return [piece for piece in cut if piece.start < piece.end]


def _goes_on(before: SlabExtent | None, extent: SlabExtent) -> bool:
    return (
        before is not None
        and before.slab is extent.slab
        and before.offset + before.nbytes == extent.offset
    )


def _cut_to_pages(piece: LeafPiece, nbytes: int, phase: int) -> LeafPiece:
    start, end, there = piece
    assert there is not None
    first = round_up(phase + start) - phase if start else 0
    last = (phase + end) // PAGE * PAGE - phase if end < nbytes else nbytes
    return LeafPiece(
        first, last, SlabExtent(there.slab, there.offset + first - start, last - first)
    )


def _of_slabs_worth_keeping(pieces: Sequence[LeafPiece]) -> list[LeafPiece]:
    """Return the pieces without those of slabs that would be kept for a small part of them.

    What is left is never more than the tensor and one slab, should nobody else use the slabs.
    """
    used: defaultdict[Slab, int] = defaultdict(int)
    for start, end, there in pieces:
        if there is not None:
            used[there.slab] += end - start
    keep: list[Slab] = []
    for slab in sorted(used, key=lambda each: used[each] / each.nbytes, reverse=True):
        some = [*keep, slab]
        beside_one = sum(each.nbytes for each in some) - max(each.nbytes for each in some)
        if used[slab] < _LEAST_PART_OF_SLAB * slab.nbytes:
            break
        if beside_one <= sum(used[each] for each in some):
            keep = some
    return [piece for piece in pieces if piece.there is not None and piece.there.slab in keep]


def _with_gaps(pieces: Sequence[LeafPiece], nbytes: int) -> Iterator[LeafPiece]:
    """Yield the pieces, and between them what is to be copied."""
    at = 0
    for piece in pieces:
        if at < piece.start:
            yield LeafPiece(at, piece.start, None)
        yield piece
        at = piece.end
    if at < nbytes:
        yield LeafPiece(at, nbytes, None)


class _Rest:
    """The slab for what no resident has of a tensor that begins at `phase` of a page.

    `put` is safe from several threads.
    """

    def __init__(self, pieces: Sequence[LeafPiece], phase: int) -> None:
        self._pieces = pieces
        self._offsets: dict[int, int] = {}  # in the slab, by where in the tensor a piece begins
        end = 0
        for piece in pieces:
            if piece.there is None:
                offset = end + (0 if piece.start else phase)
                self._offsets[piece.start] = offset
                end = round_up(offset + piece.end - piece.start)
        self._starts = list(self._offsets)
        self._writer = SlabWriter(end) if end else None
        if self._writer is not None:
            self._writer.take(end)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges of the tensor that are to be put, in order."""
        return [(piece.start, piece.end) for piece in self._pieces if piece.there is None]

    def put(self, data: memoryview, at: int) -> None:
        """Copy bytes of the tensor from `at` on, which lie in one gap.

        Raises:
            OutOfMemoryError: There is no memory left.
        """
        start = self._starts[bisect_right(self._starts, at) - 1]
        assert self._writer is not None
        self._writer.put(data, self._offsets[start] + at - start)

    def extents(self) -> list[SlabExtent]:
        """Seal the slab, and return the extents of the whole tensor."""
        slab = self._writer.seal() if self._writer is not None else None
        found = []
        for start, end, there in self._pieces:
            if there is None:
                assert slab is not None
                there = SlabExtent(slab, self._offsets[start], end - start)
            found.append(there)
        return found
