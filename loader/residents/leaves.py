"""Leaves in common: a tensor that differs from a resident in part is mapped from it in part.

A leaf is a piece of 2 MiB at a multiple of 2 MiB, as in a digest. What a new tensor has in common
with residents, each leaf at its own offset, is mapped from their slabs; the rest is copied into a
slab of its own. Every leaf is compared byte by byte with the memory that it will be, so no digest
is trusted here, and `verify_bytes` and audits have nothing left to find.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from operator import eq
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

from tensor_dedup import libc
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM, registry
from tensor_dedup.loader.residents.resident import Resident, resident_key, tensor_bytes
from tensor_dedup.loader.residents.slab import Slab, SlabExtent, SlabWriter
from tensor_dedup.memory_manager.protocol.layout import PAGE, round_up

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    import torch

# The first bytes of a leaf: enough to tell most leaves apart without reading them.
_SAMPLE_BYTES: Final = 32
# How many residents a tensor may take leaves from.
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
        OutOfMemoryError: There is no memory or descriptor for the rest.
    """
    if tensor.nbytes < LEAF_SHARED_FROM:
        return None
    key = resident_key(tensor, digest)
    residents = [each for each in registry.alike(key) if each not in own]
    data = tensor_bytes(tensor)
    taken = _leaves_in_common(tensor.data_ptr(), data, residents)
    phase = next((each.offset % PAGE for each in taken.values()), 0)
    pieces = _of_slabs_worth_keeping(_pieces(taken, tensor.nbytes, phase))
    shared = sum(piece.end - piece.start for piece in pieces if piece.there is not None)
    if not shared:
        return None
    return Resident(key, _merged(_filled(pieces, data, phase)), shared)


def relink(resident: Resident, own: Container[Resident] = ()) -> Resident:
    """Return a resident equal to a new one, which lies in other residents as far as it can.

    Raises:
        OutOfMemoryError: There is no memory or descriptor for the rest.
    """
    if not registry.alike(resident.key):
        return resident
    return build_from_leaves(resident.map(writable=False), resident.key.digest, own) or resident


def _leaves_in_common(
    address: int, data: memoryview, residents: Sequence[Resident]
) -> dict[int, Resident]:
    """Return the resident that has each leaf of these bytes, by number, where one has."""
    mine = _samples_of(data)
    likely: list[tuple[int, Resident]] = []
    for each in residents:
        theirs = _samples.get(each)
        if theirs is None:
            theirs = _samples[each] = _samples_of(tensor_bytes(each.map(writable=False)))
        likely.append((sum(map(eq, mine, theirs)), each))
    # Who has most is compared first; the sort is stable, so the older of two equals.
    likely.sort(key=lambda pair: -pair[0])
    taken: dict[int, Resident] = {}
    donors: list[Resident] = []
    for alike, each in likely:
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


def _samples_of(data: memoryview) -> tuple[bytes, ...]:
    starts = range(0, data.nbytes, LEAF_BYTES)
    return tuple(bytes(data[start : start + _SAMPLE_BYTES]) for start in starts)


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


def _pieces(taken: Mapping[int, Resident], nbytes: int, phase: int) -> Iterator[_Piece]:
    """Yield the pieces of a tensor, which begin and end with pages where it begins at `phase`.

    A page on which two meet is copied.
    """
    leaves = range(-(-nbytes // LEAF_BYTES))
    at = 0
    for donor, numbers in groupby(leaves, taken.get):
        if donor is None:
            continue
        first, *_, last = [*numbers] * 2
        start, end = first * LEAF_BYTES, min((last + 1) * LEAF_BYTES, nbytes)
        start = round_up(phase + start) - phase if start else 0
        end = (phase + end) // PAGE * PAGE - phase if end < nbytes else nbytes
        if start >= end:
            continue
        if at < start:
            yield _Piece(at, start, None)
        for extent in donor.extents_of(start, end):
            yield _Piece(start, start + extent.nbytes, extent)
            start += extent.nbytes
        at = end
    if at < nbytes:
        yield _Piece(at, nbytes, None)


def _of_slabs_worth_keeping(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Return the pieces; those are to be copied that would keep a slab for a small part of it."""
    found = list(pieces)
    used: defaultdict[Slab, int] = defaultdict(int)
    for start, end, there in found:
        if there is not None:
            used[there.slab] += end - start
    keep = {slab for slab, part in used.items() if part >= _LEAST_PART_OF_SLAB * slab.nbytes}
    return [
        piece if piece.there is None or piece.there.slab in keep else piece._replace(there=None)
        for piece in found
    ]


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


def _merged(extents: Iterable[SlabExtent]) -> list[SlabExtent]:
    """Join extents that lie side by side in their slab too: each that is left is a mapping."""
    found: list[SlabExtent] = []
    for slab, offset, nbytes in extents:
        before = found[-1] if found else None
        if before and before.slab is slab and before.offset + before.nbytes == offset:
            found[-1] = SlabExtent(slab, before.offset, before.nbytes + nbytes)
        else:
            found.append(SlabExtent(slab, offset, nbytes))
    return found
