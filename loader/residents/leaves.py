"""Leaves in common: a tensor that differs from a resident in part is mapped from it in part.

A leaf is a piece of 2 MiB at a multiple of 2 MiB, as in a digest. What a new tensor has in common
with residents, each leaf at its own offset, is mapped from their slabs; the rest is copied into a
slab of its own. Every leaf is compared byte by byte with the memory that it will be, so no digest
is trusted here, and `verify_bytes` and audits have nothing left to find.
"""

from __future__ import annotations

import os
from collections import defaultdict
from operator import eq
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

from tensor_dedup import libc
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.residents.mappings import BUDGET
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM, registry
from tensor_dedup.loader.residents.resident import Resident, resident_key, tensor_bytes
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

# The first bytes of a leaf: enough to tell most leaves apart without reading them.
_SAMPLE_BYTES: Final = 32
# How many residents a tensor is compared with, and from how many it may take leaves.
_MAX_COMPARED: Final = 8
_MAX_DONORS: Final = 4
# A slab lives as long as one leaf of it is used, so it is used for this part of it or not at all.
_LEAST_PART_OF_SLAB: Final = 1 / 8
# The sample of each leaf of a resident, taken when it is first compared.
_samples: Final[WeakKeyDictionary[Resident, tuple[bytes, ...]]] = WeakKeyDictionary()


class _Piece(NamedTuple):
    """Bytes `start` to `end` of the new tensor: where they are already, or None: to be copied."""

    start: int
    end: int
    there: SlabExtent | None


def build_from_leaves(
    tensor: torch.Tensor, digest: str, own: Container[Resident] = ()
) -> Resident | None:
    """Return a resident of a sharable tensor, mapped in part from others; None if none has a part.

    `digest` is that of `tensor_bytes` and is not checked. Residents in `own` are not used: they
    belong to the model that the tensor is for.

    Raises:
        MappingLimitError: This process has too many mappings for one that consists of parts.
        OutOfMemoryError: There is no memory or descriptor for the rest.
    """
    if tensor.nbytes < LEAF_SHARED_FROM:
        return None
    key = resident_key(tensor, digest)
    residents = [each for each in registry.alike(key) if each not in own]
    data = tensor_bytes(tensor)
    taken = _leaves_in_common(tensor.data_ptr(), data, residents)
    phase = next((each.offset % PAGE for each in taken.values()), 0)
    there = _of_slabs_worth_keeping(_joined(taken, tensor.nbytes, phase))
    shared = sum(piece.end - piece.start for piece in there)
    if not shared:
        return None
    pieces = [*_with_gaps(there, tensor.nbytes)]
    why_not = BUDGET.refusal(len(pieces))
    if why_not is not None:
        raise MappingLimitError(why_not)
    return Resident(key, _filled(pieces, data, phase), shared)


def relink(resident: Resident, own: Container[Resident] = ()) -> Resident:
    """Return a resident equal to a new one, which lies in other residents as far as it can.

    Raises:
        MappingLimitError, OutOfMemoryError: As `build_from_leaves` does.
    """
    if not registry.alike(resident.key):
        return resident
    return build_from_leaves(resident.map(writable=False), resident.key.digest, own) or resident


def _leaves_in_common(
    address: int, data: memoryview, residents: Sequence[Resident]
) -> dict[int, Resident]:
    """Return the resident that has each leaf of these bytes, by number, where one has."""
    if not residents:
        return {}
    mine = tuple(
        bytes(data[start : start + _SAMPLE_BYTES]) for start in range(0, data.nbytes, LEAF_BYTES)
    )
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
        found = _equal_leaves(address, data.nbytes, each, [n for n in wanted if n not in taken])
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


def _equal_leaves(
    address: int, nbytes: int, resident: Resident, numbers: Sequence[int]
) -> list[int]:
    """Return which of these leaves of `nbytes` bytes at an address are those of a resident."""
    if not numbers:
        return []
    mapped = resident.map(writable=False)
    theirs = mapped.data_ptr()
    equal = []
    for number in numbers:
        start = number * LEAF_BYTES
        size = min(LEAF_BYTES, nbytes - start)
        inside = start + size <= resident.nbytes
        if inside and libc.equal(address + start, theirs + start, size):
            equal.append(number)
    return equal


def _joined(taken: Mapping[int, Resident], nbytes: int, phase: int) -> list[_Piece]:
    """Return what is there, joined where it lies side by side in a slab: each is a mapping.

    Pieces begin and end with pages, where the tensor begins at `phase`: a page on which two meet
    is copied.
    """
    joined: list[_Piece] = []
    for number in sorted(taken):
        at, end = number * LEAF_BYTES, min((number + 1) * LEAF_BYTES, nbytes)
        for extent in taken[number].extents_of(at, end):
            before = joined[-1] if joined else None
            if before is not None and before.end == at and _goes_on(before.there, extent):
                assert before.there is not None
                there = before.there._replace(nbytes=before.there.nbytes + extent.nbytes)
                joined[-1] = _Piece(before.start, at + extent.nbytes, there)
            else:
                joined.append(_Piece(at, at + extent.nbytes, extent))
            at += extent.nbytes
    cut = (_cut_to_pages(piece, nbytes, phase) for piece in joined)
    return [piece for piece in cut if piece.start < piece.end]


def _goes_on(before: SlabExtent | None, extent: SlabExtent) -> bool:
    return (
        before is not None
        and before.slab is extent.slab
        and before.offset + before.nbytes == extent.offset
    )


def _cut_to_pages(piece: _Piece, nbytes: int, phase: int) -> _Piece:
    start, end, there = piece
    assert there is not None
    first = round_up(phase + start) - phase if start else 0
    last = (phase + end) // PAGE * PAGE - phase if end < nbytes else nbytes
    return _Piece(first, last, SlabExtent(there.slab, there.offset + first - start, last - first))


def _of_slabs_worth_keeping(pieces: Sequence[_Piece]) -> list[_Piece]:
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


def _with_gaps(pieces: Sequence[_Piece], nbytes: int) -> Iterator[_Piece]:
    """Yield the pieces, and between them what is to be copied."""
    at = 0
    for piece in pieces:
        if at < piece.start:
            yield _Piece(at, piece.start, None)
        yield piece
        at = piece.end
    if at < nbytes:
        yield _Piece(at, nbytes, None)


def _filled(pieces: Sequence[_Piece], data: memoryview, phase: int) -> Iterator[SlabExtent]:
    """Yield the extents of the whole tensor; what nobody has is copied into a new slab."""
    new = [piece for piece in pieces if piece.there is None]
    copies = iter(_copied(new, data, phase) if new else ())
    for piece in pieces:
        yield next(copies) if piece.there is None else piece.there


def _copied(pieces: Sequence[_Piece], data: memoryview, phase: int) -> list[SlabExtent]:
    """Copy pieces into one slab, each from a page on; the tensor's first byte lies at `phase`."""
    starts: list[int] = []
    end = 0
    for piece in pieces:
        starts.append(end + (0 if piece.start else phase))
        end = round_up(starts[-1] + piece.end - piece.start)
    writer = SlabWriter(end)
    writer.take(end)
    for piece, start in zip(pieces, starts, strict=True):
        writer.put(data[piece.start : piece.end], start)
    slab = writer.seal()
    return [
        SlabExtent(slab, start, piece.end - piece.start)
        for piece, start in zip(pieces, starts, strict=True)
    ]
