"""Residents in memory that a memory manager lends: whole tensors, and tensors in several parts.

The manager stores a record with each tensor, which tells other processes how to read it.
`record_of` describes a whole tensor, and `record_of_parts` a tensor that consists of parts of
several leased tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec

from tensor_dedup.digest import LEAF_BYTES, StreamDigest
from tensor_dedup.loader.residents.partial import Content
from tensor_dedup.loader.residents.resident import Resident, copied_part, digest_of
from tensor_dedup.loader.residents.slab import (
    ExtentLayout,
    SharedMemoryError,
    Slab,
    SlabExtent,
    SlabUsageError,
)
from tensor_dedup.memory_manager.client import LayerFound, Lease, NewTensor, SharedSlab
from tensor_dedup.memory_manager.errors import RefusedError
from tensor_dedup.memory_manager.protocol.layout import PAGE_ALIGNED_FROM
from tensor_dedup.memory_manager.protocol.limits import MAX_RECORD, MAX_RECORD_DIGESTS
from tensor_dedup.types import ResidentKey

if TYPE_CHECKING:
    from tensor_dedup.loader.residents.leaves import LeafPiece
    from tensor_dedup.loader.residents.resident import ReadInto
    from tensor_dedup.loader.residents.slab import ByteArray
    from tensor_dedup.memory_manager.client.puts import Put, TensorSlot

_ANY_DIGEST: Final = "0" * 64
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
LeasedPart: TypeAlias = tuple[int, int, int]
"""A part of a tensor: the number of a lease, the first byte in what is leased, and how many."""


class LentResident(Resident):
    """A whole tensor in a slab of the memory manager, with the lease on the tensor.

    Every mapping of the tensor keeps this object, and so the lease, alive.
    """

    __slots__ = ("lease",)

    def __init__(self, key: ResidentKey, lease: Lease) -> None:
        """Describe the leased tensor.

        Raises:
            SlabUsageError: The lease is on a tensor with another digest or size.
        """
        if lease.digest != key.digest:
            raise SlabUsageError(
                f"a lease on {lease.digest} for a tensor of {key.digest}", digest=lease.digest
            )
        super().__init__(key, [SlabExtent(_slab(lease.slab), lease.offset, lease.nbytes)])
        self.lease: Final = lease

    @property
    def parts(self) -> tuple[LeasedPart, ...]:
        """One part, which is the whole tensor, in the form that `LentInParts.parts` has."""
        return ((0, 0, self.nbytes),)

    @property
    def lent(self) -> bool:
        """Whether the memory belongs to a memory manager."""
        return True

    @property
    def published(self) -> tuple[bytes, list[str]]:
        """The record that describes this tensor to others, and a list with the tensor's digest."""
        return record_of(self.key), [self.key.digest]


class LentInParts(Resident):
    """A tensor that consists of parts of leased tensors. It holds a lease on each of them.

    `parts` lists the parts in order. Each is (index in `leases`, first byte in the leased tensor,
    size in bytes).
    """

    __slots__ = ("leases", "parts")

    def __init__(
        self,
        key: ResidentKey,
        leases: Sequence[Lease],
        parts: Sequence[LeasedPart],
        leaf_shared_bytes: int = 0,
    ) -> None:
        """Describe the tensor `key`, which consists of `parts` of the tensors of `leases`.

        Raises:
            SlabUsageError: There are no parts, a part is of no lease or exceeds its lease, parts do
                not meet at page boundaries, or their total size is not that of the key.
        """
        if not parts:
            raise SlabUsageError(f"no parts for a tensor of {key.digest}", digest=key.digest)
        for number, offset, nbytes in parts:
            if number >= len(leases) or offset + nbytes > leases[number].nbytes:
                raise SlabUsageError(
                    f"bytes {offset} to {offset + nbytes} of lease {number} of {len(leases)}",
                    offset=offset,
                    nbytes=nbytes,
                )
        extents = [
            SlabExtent(_slab(lease.slab), lease.offset + offset, nbytes)
            for number, offset, nbytes in parts
            for lease in (leases[number],)
        ]
        super().__init__(key, extents, leaf_shared_bytes)
        self._layout = ExtentLayout(self.extents)
        self.leases: Final = tuple(leases)
        self.parts: Final = tuple(parts)

    @property
    def lent(self) -> bool:
        """Whether the memory belongs to a memory manager."""
        return True

    @property
    def published(self) -> tuple[bytes, list[str]]:
        """The record that describes this tensor to others, and the leased tensors' digests."""
        return record_of_parts(self.key, self.parts), [lease.digest for lease in self.leases]

    def has_its_digest(self) -> bool:
        """Hash the whole tensor, and return whether it has the digest of its key.

        This shows whether the list of parts is right. Another process published that list, and the
        manager does not verify it.

        Raises:
            SharedMemoryError: The tensor cannot be mapped.
        """
        return digest_of(self.map(writable=False)) == self.key.digest


class _Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The record of a layer of one tensor: the dtype and geometry of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def record_of(key: ResidentKey) -> bytes:
    """Return the encoded record of a whole tensor: the dtype, shape and stride of `key`."""
    return msgspec.msgpack.encode(_Geometry(key.dtype, tuple(key.shape), tuple(key.stride)))


class Composition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The record of a tensor that consists of parts of leased tensors: its key and its parts.

    Each part is (index of the leased tensor, first byte in it, size in bytes). The record may also
    have the digests of the ranges that fill the tensor (`contents`).
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    digest: str
    parts: tuple[tuple[_Count, _Count, _Count], ...]
    # As `Content`, with the leaf digests as bytes in one: a record has 32 KiB.
    packed: tuple[tuple[_Count, _Count, str, bytes], ...] = ()

    @property
    def key(self) -> ResidentKey:
        """The key of the tensor."""
        return ResidentKey(self.dtype, self.shape, self.stride, self.digest)

    @property
    def contents(self) -> list[Content]:
        """The ranges that fill the tensor, with their digests, or [] if these are not known."""
        return [
            Content(start, end, digest, tuple(_hex_digests(leaves)))
            for start, end, digest, leaves in self.packed
        ]


def _hex_digests(leaves: bytes) -> Iterator[str]:
    for at in range(0, len(leaves), 32):
        yield leaves[at : at + 32].hex()


def record_of_parts(
    key: ResidentKey, parts: Sequence[LeasedPart], contents: Sequence[Content] = ()
) -> bytes:
    """Return the encoded record of a tensor that consists of parts of leased tensors.

    `contents` are the ranges that fill the tensor, with their digests, or () if these are not
    known.
    """
    geometry = key.dtype, tuple(key.shape), tuple(key.stride)
    packed = tuple((*each[:3], bytes.fromhex("".join(each.leaves))) for each in contents)
    return msgspec.msgpack.encode(Composition(*geometry, key.digest, tuple(parts), packed))


def composition_in(record: bytes) -> Composition | None:
    """Decode the record of a tensor in parts; return None if `record` is another one or invalid."""
    try:
        found = msgspec.msgpack.decode(record, type=Composition)
    except msgspec.MsgspecError:
        return None
    return found if _fill(found.contents, sum(nbytes for _, _, nbytes in found.parts)) else None


def key_in(layer: LayerFound) -> ResidentKey | None:
    """Return the key of the tensor that `layer`, an entry of the manager, holds.

    The tensor may be whole or in parts. Returns None if the entry is not a single tensor.
    """
    composition = composition_in(layer.record)
    if composition is not None:
        return composition.key
    try:
        found = msgspec.msgpack.decode(layer.record, type=_Geometry)
    except msgspec.MsgspecError:
        return None
    if len(layer.leases) != 1:
        return None
    return ResidentKey(found.dtype, found.shape, found.stride, layer.leases[0].digest)


def _fill(contents: Sequence[Content], nbytes: int) -> bool:
    """Return whether contents lie one beside the other in a tensor and fill it, or are unknown."""
    at = 0
    for start, end, _, leaves in contents:
        if start != at or end < start:
            return False
        if leaves and len(leaves) != -(-(end - start) // LEAF_BYTES):
            return False
        at = end
    return not contents or at == nbytes


def leases_of(resident: Resident) -> tuple[Lease, ...]:
    """Return the leases that `resident` holds, or () if it lies in memory of this process."""
    if isinstance(resident, LentResident):
        return (resident.lease,)
    return resident.leases if isinstance(resident, LentInParts) else ()


def is_of(lease: Lease, slab: Slab) -> bool:
    """Return whether the tensor of `lease` lies in `slab`."""
    return _slab(lease.slab) is slab


class PartsPlan:
    """A plan to put a tensor that has parts in common with leased tensors into the manager.

    In the manager, the tensor becomes a layer (an entry) that consists of several tensors.

    - `needed` has the leases on those leased tensors that have a part of the whole tensor.
    - `tensors` are the tensors of the layer: those in `needed` and, if parts are missing, one more
      tensor, in which all missing parts lie side by side.
    - `parts` lists the parts of the whole tensor, each as a part of one of `tensors`.
    - `rest_bytes` is the total size of the missing parts.
    - `unfit` is the reason why the manager cannot hold the tensor in parts, or None.
    """

    def __init__(
        self, geometry: ResidentKey, pieces: Sequence[LeafPiece], leases: Sequence[Lease]
    ) -> None:
        """Plan the tensor that consists of `pieces`, each of them leased or missing.

        A piece is missing if it has no slab extent; the others lie in the tensors of `leases`.
        `geometry` has the tensor's dtype, shape and stride; its digest is ignored.
        """
        self._pieces = pieces
        used: dict[str, int] = {}  # the number of each lease, by its digest
        self.needed: list[Lease] = []
        self.rest_bytes = 0
        parts: list[LeasedPart] = []
        for start, end, there in pieces:
            if there is None:
                parts.append((-1, self.rest_bytes, end - start))
                self.rest_bytes += end - start
                continue
            for lease, offset, nbytes in _leased(there, leases):
                if lease.digest not in used:
                    used[lease.digest] = len(self.needed)
                    self.needed.append(lease)
                parts.append((used[lease.digest], offset, nbytes))
        rest = len(self.needed)
        self.parts = tuple((rest if n < 0 else n, at, nbytes) for n, at, nbytes in parts)
        self.tensors = tuple(NewTensor(each.nbytes, each.digest) for each in self.needed)
        if self.rest_bytes:
            # What is smaller need not begin with a page where others have the same bytes.
            self.tensors += (NewTensor(max(self.rest_bytes, PAGE_ALIGNED_FROM)),)
        key = replace(geometry, digest=_ANY_DIGEST)  # as long as every other
        nbytes = len(record_of_parts(key, self.parts))
        self.unfit: str | None = None  # why a manager cannot have it so
        if sum(size for _, _, size in parts) < pieces[-1].end:
            self.unfit = "a part of it lies in memory that is not leased"
        elif nbytes > MAX_RECORD:
            need = f"its {len(self.parts)} parts need a record of {nbytes} bytes"
            self.unfit = f"{need}, and a manager takes {MAX_RECORD}"
        elif len(self.tensors) > MAX_RECORD_DIGESTS:
            need = f"its parts are of {len(self.tensors)} tensors"
            self.unfit = f"{need}, and a record names {MAX_RECORD_DIGESTS}"

    def fill(
        self,
        data: memoryview,
        read: ReadInto | None,
        digest: str,
        put: Put,
        missing: Sequence[TensorSlot],
    ) -> Sequence[str]:
        """Write the missing parts to `put`, and check the digest of the whole tensor.

        The manager's client calls this method. `data` has the tensor's bytes, and `missing` are the
        tensors that the manager lacks. If `data` is a mapping of a file, `read(into, offset)` fills
        a buffer with bytes of the tensor from the file. Returns an empty sequence: the manager
        computes the digests of the tensors itself.

        Raises:
            RefusedError: A leased tensor is no longer resident (code "not_resident"), a leased part
                cannot be mapped ("no_memory"), or the whole tensor does not have `digest`
                ("mismatch").
        """
        if [index for _, index in missing] != [len(self.tensors) - 1] or not self.rest_bytes:
            raise RefusedError(
                "a tensor that was leased is not resident; load privately", code="not_resident"
            )
        whole = StreamDigest(nbytes=data.nbytes)
        self.write_rest(data, put, whole, read)
        if whole.hexdigest() != digest:
            raise RefusedError(
                f"a tensor of {digest} has changed since it was hashed; load it again",
                code="mismatch",
            )
        return ()

    def write_rest(
        self,
        data: memoryview,
        put: Put,
        whole: StreamDigest | None = None,
        read: ReadInto | None = None,
    ) -> None:
        """Write the missing parts of `data` into the first tensor of `put`.

        If the running digest `whole` is given, it is updated with all bytes of the tensor, in
        order. If `data` is a mapping of a file, `read(into, offset)` fills a buffer with bytes of
        the tensor from the file.
        """
        at = 0
        for start, end, there in self._pieces:
            if there is not None:
                if whole is not None:
                    whole.update(_mapped(there))
                continue
            for first in range(start, end, LEAF_BYTES):
                piece = copied_part(data, first, min(LEAF_BYTES, end - first), read)
                put.write(0, piece, at)
                if whole is not None:
                    whole.update(piece)
                at += len(piece)
            put.progress()


def _mapped(there: SlabExtent) -> ByteArray:
    try:
        return there.slab.map(there.offset, there.nbytes, None, writable=False)
    except SharedMemoryError as error:
        raise RefusedError(str(error), code="no_memory") from error


def _leased(there: SlabExtent, leases: Sequence[Lease]) -> Iterator[tuple[Lease, int, int]]:
    """Yield what an extent is of leased tensors: the lease, the first byte in it, how many."""
    slab, at, nbytes = there
    inside = [each for each in leases if is_of(each, slab)]
    end = at + nbytes
    for lease in sorted(inside, key=lambda each: each.offset):
        first, last = max(at, lease.offset), min(end, lease.offset + lease.nbytes)
        if first < last:
            yield lease, first - lease.offset, last - first
            at = last


_slabs: weakref.WeakValueDictionary[int, Slab] = weakref.WeakValueDictionary()


def _slab(shared: SharedSlab) -> Slab:
    """Return one slab object per slab of the manager, so that equal mappings are recognised."""
    slab = _slabs.get(id(shared))
    if slab is None:
        slab = _slabs[id(shared)] = Slab(shared, shared.nbytes)  # holds it, so the id stays its own
    return slab
