"""Residents: final tensors (weights as the engine uses them) that models of this process share.

The bytes lie in slabs, sealed memory files (`tensor_dedup.loader.residents.slab`). Each model maps
them copy-on-write, so writing to a tensor never affects another model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Final, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tensor_dedup.digest import digest, submit
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.residents.mappings import (
    DEVICE_MAPPINGS,
    MAPPINGS,
    SlabRange,
    any_page_copied,
    as_mapped,
)
from tensor_dedup.loader.residents.slab import (
    ExtentLayout,
    MappingLimitError,
    Slab,
    SlabExtent,
    SlabUsageError,
    SlabWriter,
    bytes_at,
    capacity_for,
)
from tensor_dedup.loader.torch_dtypes import dtype_name, has_name, torch_dtype
from tensor_dedup.memory_manager.protocol.layout import ALIGNMENT
from tensor_dedup.types import ResidentKey

__all__ = [
    "Resident",
    "Slab",
    "SlabBuilder",
    "dense",
    "pack",
    "read_into_slab",
    "resident_key",
    "sharable",
    "shared_bytes",
    "shares_memory",
    "tensor_bytes",
]


# Fills a buffer with the bytes of a tensor from an offset on; puts bytes at an offset.
ReadInto = Callable[[memoryview, int], None]
Write = Callable[[memoryview, int], None]
# By empty parameter whose weight is packed elsewhere: a function that returns what holds it. Not an
# attribute, with which the parameter could no longer be pickled.
PACKED: Final[MutableMapping[torch.Tensor, Callable[[], object]]] = WeakTensorKeyDictionary()
# A cast of a cast of a cast is followed no further.
_MAX_CASTS: Final = 3
_CAST: Final = "cast:"
_LOSSLESS: Final = frozenset(
    {("F16", "F32"), ("BF16", "F32"), ("F16", "F64"), ("BF16", "F64"), ("F32", "F64")}
)


def dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor's elements fill one memory range without gap or overlap.

    The order of the elements does not matter, so a transposed matrix is dense. `stride` is in
    elements and is as long as `shape`. A tensor without elements is dense.
    """
    if 0 in shape:
        return True
    step = 1
    for size, distance in sorted(
        ((n, s) for n, s in zip(shape, stride, strict=True) if n != 1), key=lambda pair: pair[1]
    ):
        if distance != step:
            return False
        step *= size
    return True


def sharable(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` can become a resident in host memory.

    The tensor must lie on the CPU and have no gaps. Its dtype must be known to safetensors, and the
    tensor must not be lazily conjugated or negated.
    """
    return tensor.device.type == "cpu" and sharable_anywhere(tensor)


def sharable_anywhere(tensor: torch.Tensor) -> bool:
    """Return whether a tensor on any device has a layout and dtype that can be shared."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and has_name(tensor.dtype)
        and (tensor.is_contiguous() or dense(tensor.shape, tensor.stride()))
    )


def _require_sharable(tensor: torch.Tensor) -> None:
    if not sharable(tensor):
        raise UnsupportedError(
            f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} with shape "
            f"{tuple(tensor.shape)} and stride {_stride(tensor)} cannot be shared; keep it private",
            dtype=str(tensor.dtype),
            shape=tuple(tensor.shape),
            device=str(tensor.device),
        )


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout is torch.strided else ()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a sharable tensor in memory order, without a copy.

    The view keeps the storage alive.

    Raises:
        UnsupportedError: The tensor is not `sharable`.
    """
    _require_sharable(tensor)
    if tensor.nbytes == 0:
        return memoryview(b"")
    # Detached, or the view would keep a Parameter's graph and attributes alive too.
    return memoryview(bytes_at(tensor.data_ptr(), tensor.nbytes, tensor.detach())).cast("B")


def copied_part(
    data: memoryview, start: int, nbytes: int, read: ReadInto | None = None
) -> bytes | bytearray:
    """Return a copy of up to `nbytes` bytes of `data`, from `start` on.

    `data` is the result of `tensor_bytes`. If the tensor is mapped from a file, pass `read(into,
    offset)`, which fills a buffer with bytes of the tensor from the file. It must raise an error if
    the file has become shorter. Reading `data` would then end the process (SIGBUS).
    """
    if read is None:
        return bytes(data[start : start + nbytes])
    into = bytearray(min(nbytes, len(data) - start))
    read(memoryview(into), start)
    return into


def digest_of(
    tensor: torch.Tensor, algorithm: str = "blake3", leaves: list[bytes] | None = None
) -> str:
    """Return the digest of a gap-free tensor's bytes in memory order, on any device.

    If the list `leaves` is given, the leaf digests are added to it, as `digest.submit` does. A
    tensor on another device is copied to the host first, on torch's current stream there. Safe from
    any thread.

    Raises:
        ConfigError: The algorithm does not exist.
        UnsupportedError: The tensor has gaps.
    """
    data = tensor_bytes(tensor.cpu())
    return (
        digest(data, algorithm)
        if leaves is None
        else submit(data, algorithm, None, leaves).result()
    )


def resident_key(tensor: torch.Tensor, digest: str) -> ResidentKey:
    """Return the key of a sharable tensor whose `tensor_bytes` have this digest."""
    _require_sharable(tensor)
    return ResidentKey(dtype_name(tensor.dtype), tuple(tensor.shape), _stride(tensor), digest)


def key_anywhere(tensor: torch.Tensor, digest: str) -> ResidentKey:
    """Return the key of a gap-free tensor on any device whose bytes have this digest."""
    return ResidentKey(dtype_name(tensor.dtype), tuple(tensor.shape), _stride(tensor), digest)


def nbytes_of(key: ResidentKey) -> int:
    """Return the size in bytes of a tensor with the dtype and shape of `key`."""
    return math.prod(key.shape) * torch_dtype(key.dtype).itemsize


class ReplicaKey(NamedTuple):
    """The identity of a shared tensor: its resident key and its replica number, `copy`.

    Equal tensors of one model must not share memory, so each is a replica with another number.
    """

    key: ResidentKey
    copy: int


def cast_key(key: ResidentKey, dtype: torch.dtype) -> ResidentKey | None:
    """Return the key of a resident's tensor after a cast to `dtype`; `key` is the resident's key.

    The new digest is derived from `key`, so no byte is hashed. After a lossless cast, the cast back
    gives the original key. Returns None if `key` is the result of three casts already.
    """
    name = dtype_name(dtype)
    if name == key.dtype:
        return key
    before, _, origin = key.digest.removeprefix(_CAST).partition(":")
    is_cast = key.digest.startswith(_CAST)
    if is_cast and before == name and (before, key.dtype) in _LOSSLESS:
        return ResidentKey(name, key.shape, key.stride, origin)
    if key.digest.count(_CAST) >= _MAX_CASTS:
        return None
    return ResidentKey(name, key.shape, key.stride, f"{_CAST}{key.dtype}:{key.digest}")


def is_of_bytes(key: ResidentKey) -> bool:
    """Return whether a key's digest is a hash of the bytes and not derived by `cast_key`."""
    return not key.digest.startswith(_CAST)


def _tensor_over(
    flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    storage = flat.untyped_storage()
    # set_, and not as_strided: a view would carry its flat base along.
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape), tuple(stride))


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


class SlabBuilder:
    """A writer that fills one slab with tensors and seals it. For one thread at a time."""

    def __init__(self, capacity: int) -> None:
        """Create a slab of `capacity` bytes (see `capacity_for`).

        Sealing trims the slab to its used size.
        """
        self._writer = SlabWriter(capacity)

    def add(self, tensor: torch.Tensor, beyond: int = 0) -> int:
        """Copy a sharable tensor into the slab; return its offset in bytes.

        The tensor begins `beyond` bytes after an aligned offset.

        Raises:
            UnsupportedError: The tensor is not sharable.
            OutOfMemoryError: There is no memory left.
            SlabUsageError: The tensor does not fit, or the slab is sealed.
        """
        return self._writer.write(tensor_bytes(tensor), beyond)

    def seal(self) -> Slab:
        """Make the bytes immutable and return the slab. The builder cannot be used afterwards.

        Raises:
            SharedMemoryError: The kernel refused to trim or to seal the slab.
        """
        return self._writer.seal()


class Resident:
    """A shared tensor in memory, which lies in one or more slabs. Immutable, safe from any thread.

    A resident is freed when neither it nor any tensor from `map` is referred to; the registry
    refers to it weakly. If it shares leaves (parts of 2 MiB) with other tensors, it may lie in
    several slabs.

    - `extents` are the slab ranges that have its bytes, in order.
    - `leaf_shared_bytes` is the number of its bytes that were in memory before it was built.
    - `place` has the same ranges as `extents`, but keeps no slab alive.
    """

    __slots__ = (
        *("__weakref__", "_layout", "extents", "key", "leaf_shared_bytes", "nbytes", "place"),
    )

    def __init__(
        self, key: ResidentKey, extents: Iterable[SlabExtent], leaf_shared_bytes: int = 0
    ) -> None:
        """Describe the tensor `key`, whose bytes lie in `extents`.

        Raises:
            SlabUsageError: The total size of the extents is not what the dtype and shape of the key
                need, or an extent exceeds its slab.
        """
        self.key: Final = key
        self.extents: Final = tuple(extents)
        self.nbytes: Final = sum(extent.nbytes for extent in self.extents)
        self.leaf_shared_bytes: Final = leaf_shared_bytes
        self._layout: ExtentLayout | None = None  # made when it is first mapped
        self.place: Final = tuple(SlabRange(s.serial, at, n) for s, at, n in self.extents)
        needed = _count(key.shape) * torch_dtype(key.dtype).itemsize
        for slab, offset, nbytes in self.extents:
            if self.nbytes != needed or offset + nbytes > slab.nbytes:
                raise SlabUsageError(
                    f"{nbytes} bytes at {offset} of a slab of {slab.nbytes} for a tensor of "
                    f"{needed}",
                    nbytes=nbytes,
                    needed=needed,
                    offset=offset,
                )

    @property
    def lent(self) -> bool:
        """Whether the memory belongs to a memory manager."""
        return False

    @property
    def slab(self) -> Slab:
        """The slab of the first byte."""
        return self.extents[0].slab

    @property
    def offset(self) -> int:
        """The offset of the first byte in its slab."""
        return self.extents[0].offset

    def extents_of(self, start: int, end: int) -> Iterator[SlabExtent]:
        """Yield the slab ranges that have the bytes from `start` to `end`, in order."""
        at = 0
        for slab, offset, nbytes in self.extents:
            first, last = max(at, start), min(at + nbytes, end)
            if first < last:
                yield SlabExtent(slab, offset + first - at, last - first)
            at += nbytes

    def map(self, *, writable: bool = True) -> torch.Tensor:
        """Map the resident copy-on-write, and return the mapping as a new tensor.

        With `writable=False` the mapping is read-only, and a write ends the process (SIGSEGV). The
        mapping lives as long as the tensor's storage, and works in forked children.

        Raises:
            OutOfMemoryError: The kernel refused the mapping.
        """
        dtype = torch_dtype(self.key.dtype)
        if self.nbytes == 0:
            return torch.empty_strided(self.key.shape, self.key.stride, dtype=dtype, device="cpu")
        if self._layout is None:
            self._layout = ExtentLayout(self.extents)
        array = self._layout.map(self, writable=writable)
        flat = torch.frombuffer(array, dtype=torch.uint8)
        return _tensor_over(flat, dtype, self.key.shape, self.key.stride)

    def seen(self) -> torch.Tensor:
        """Return the resident's bytes as a tensor that must only be read.

        The tensor is a mapping or, if this process has nearly too many mappings, a copy.

        Raises:
            OutOfMemoryError: The kernel refused the mapping.
        """
        try:
            return self.map(writable=False)
        except MappingLimitError:
            return self.copied()

    def copied(self) -> torch.Tensor:
        """Return a copy of the resident in private memory, made without mapping a slab."""
        copy = torch.empty(self.nbytes, dtype=torch.uint8)
        into, at = copy.numpy().data, 0
        for slab, offset, nbytes in self.extents:
            end = at + nbytes
            while at < end:
                count = os.preadv(slab.fileno, [into[at:end]], offset + nbytes - (end - at))
                at += count
        return _tensor_over(copy, torch_dtype(self.key.dtype), self.key.shape, self.key.stride)


def pack(
    tensors: Iterable[tuple[torch.Tensor, str]], *, keep_alignment: bool = False
) -> list[Resident]:
    """Copy `tensors`, given with their digests, into one new slab; return a resident for each.

    The residents are in the order of the tensors. The digests are those of `tensor_bytes` and are
    not checked. With `keep_alignment`, each resident's address modulo 64 is that of its tensor,
    because kernels may round differently by alignment.

    Raises:
        UnsupportedError: One of the tensors is not sharable.
        OutOfMemoryError: There is no memory or descriptor for the slab.
    """
    items = list(tensors)
    keys = [resident_key(tensor, digest) for tensor, digest in items]
    beyond = [t.data_ptr() % ALIGNMENT if keep_alignment and t.nbytes else 0 for t, _ in items]
    sizes = (t.nbytes + more for (t, _), more in zip(items, beyond, strict=True))
    builder = SlabBuilder(capacity_for(sizes))
    offsets = [builder.add(t, more) for (t, _), more in zip(items, beyond, strict=True)]
    slab = builder.seal()
    return [
        Resident(key, [SlabExtent(slab, offset, tensor.nbytes)])
        for key, offset, (tensor, _) in zip(keys, offsets, items, strict=True)
    ]


def read_into_slab(geometry: ResidentKey, nbytes: int, source: Callable[[Write], str]) -> Resident:
    """Read a tensor of `nbytes` bytes straight into a new slab, and return it as a resident.

    `source(write)` calls `write(piece, offset)` for every piece of the tensor, from any thread, and
    returns the tensor's digest after the last of these calls. Errors of `source` are passed on.
    `geometry` has the tensor's dtype, shape and stride; its digest is ignored.

    Raises:
        OutOfMemoryError: There is no memory or descriptor for the slab.
    """
    writer = SlabWriter(capacity_for([nbytes]))
    start = writer.take(nbytes)
    digest = source(lambda piece, offset: writer.put(piece, start + offset))
    key = ResidentKey(geometry.dtype, geometry.shape, geometry.stride, digest)
    return Resident(key, [SlabExtent(writer.seal(), start, nbytes)])


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors lie in the same physical memory now.

    Their addresses may differ: two mappings of one resident share memory until one of them is
    written to or made private. Returns False for tensors of different sizes. If one of the tensors
    has gaps, they must also have the same shape and stride. An empty parameter whose weight vLLM
    has packed elsewhere stands for the packed weight. Safe from any thread.

    Raises:
        UnsupportedError: /proc/self/pagemap cannot be read.
    """
    if a.layout is not torch.strided or b.layout is not torch.strided or not _same_extent(a, b):
        return False
    if a.numel() == 0 and (packed := _packed(a)) is not None:
        return packed is _packed(b)
    if a.untyped_storage()._cdata == b.untyped_storage()._cdata:
        return a.storage_offset() * a.itemsize == b.storage_offset() * b.itemsize
    span = _span(a)
    if span == 0 or a.device != b.device or a.is_meta:
        return False
    first, second = a.data_ptr(), b.data_ptr()
    if not first or not second:  # of classes of their own, whose values are elsewhere
        return False
    if first == second or DEVICE_MAPPINGS.same(first, second, span):
        return True
    return a.device.type == "cpu" and _same_slab_pages(first, second, span)


def _packed(tensor: torch.Tensor) -> object | None:
    asked = PACKED.get(tensor)
    return None if asked is None else asked()


def _same_extent(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.nbytes != b.nbytes:
        return False
    if dense(a.shape, a.stride()) and dense(b.shape, b.stride()):
        return True
    return a.shape == b.shape and a.stride() == b.stride() and a.itemsize == b.itemsize


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element, both included."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.itemsize


def _same_slab_pages(first: int, second: int, nbytes: int) -> bool:
    if not MAPPINGS.same(first, second, nbytes):
        return False
    return not any_page_copied(first, nbytes) and not any_page_copied(second, nbytes)


def shared_bytes(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return how many bytes of `a` lie in physical memory that `b` uses, too.

    Tensors that differ in part may still share leaves (parts of 2 MiB). Memory pages that were
    written to in either tensor are not counted. The memory of a tensor with gaps extends from its
    first element to its last. Safe from any thread.

    Raises:
        UnsupportedError: /proc/self/pagemap cannot be read.
    """
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return 0
    if a.device != b.device or a.is_meta or not a.numel() or not b.numel():
        return 0
    first, second = a.data_ptr(), b.data_ptr()
    if not first or not second:  # of classes of their own, whose values are elsewhere
        return 0
    overlap = min(first + _span(a), second + _span(b)) - max(first, second)
    if overlap > 0:
        return overlap
    theirs: dict[int, list[SlabRange]] = {}
    for each in sorted(_slab_ranges(second, _span(b))):
        theirs.setdefault(each.slab, []).append(each)
    mine = _slab_ranges(first, _span(a))
    return sum(_common(each, theirs.get(each.slab, ())) for each in mine)


def _common(mine: SlabRange, theirs: Iterable[SlabRange]) -> int:
    """Return how many bytes of a range lie in others of its slab, which are sorted by offset.

    On a GPU a block of memory may be several parts of one tensor: what is there twice counts once.
    """
    at, common = mine.offset, 0
    for each in theirs:
        end = min(mine.offset + mine.nbytes, each.offset + each.nbytes)
        common += max(0, end - max(at, each.offset))
        at = max(at, end)
    return common


def _slab_ranges(address: int, nbytes: int) -> list[SlabRange]:
    """Return the ranges of slabs that are a range of memory, without the pages written since."""
    on_device = DEVICE_MAPPINGS.ranges(address, nbytes)
    if on_device or not MAPPINGS.ranges(address, nbytes):
        return on_device
    return [
        piece
        for start, size in as_mapped(address, nbytes)
        for piece in MAPPINGS.ranges(start, size)
    ]
