"""Residents on a GPU: immutable tensors in slabs, which every model maps read-only.

A slab is a piece of GPU memory that holds one or more tensors. Each model has its own mapping of
every slab that it uses. So the memory of a single model can be made private, at the addresses that
the model's CUDA graphs have captured, while other models go on sharing.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import torch

from tensor_dedup.digest import leaf_digests, submit
from tensor_dedup.loader.cuda.gpu import DeviceMapping, Gpu
from tensor_dedup.loader.cuda.openers import MappedExtent, Opener
from tensor_dedup.loader.cuda.tensors import CUDA, tensor_at
from tensor_dedup.loader.cuda.transfers import HostContent
from tensor_dedup.loader.residents.resident import dense, nbytes_of, tensor_bytes
from tensor_dedup.loader.residents.slab import HasFd, SlabUsageError
from tensor_dedup.loader.torch_dtypes import torch_dtype
from tensor_dedup.types import ResidentKey

_serials = itertools.count(1)
Write = Callable[[int], str | None]
"""Write a tensor to an address of a GPU; return its digest if that becomes known only then."""


class DeviceSlab:
    """A slab of GPU memory.

    `source` owns the descriptor of the memory, which stays open as long as this object lives.
    `serial` identifies the slab within this process. Safe from any thread.
    """

    def __init__(self, gpu: Gpu, opener: Opener, source: HasFd, nbytes: int) -> None:
        self.gpu: Final = gpu
        self.opener: Final = opener
        self.source: Final = source
        self.nbytes: Final = nbytes
        self.serial: Final = next(_serials)

    @property
    def extent(self) -> MappedExtent:
        """The descriptor, size and serial number of the slab, for an opener."""
        return MappedExtent(self.source.fileno, self.nbytes, self.serial)


class Lent(Protocol):
    """An interface for the lease that a resident holds on its tensor in a memory manager."""

    @property
    def nbytes(self) -> int:
        """The size of the leased tensor in bytes."""


class DeviceResident:
    """An immutable tensor in one slab, or in several slabs side by side.

    The tensor begins `offset` bytes after the start of the first slab. Each mapping of the tensor
    keeps this object alive, and with it the memory manager's `lease`, if there is one.
    """

    __slots__ = ("__weakref__", "key", "lease", "nbytes", "offset", "slabs")

    def __init__(
        self, key: ResidentKey, slabs: Sequence[DeviceSlab], offset: int, lease: Lent | None = None
    ) -> None:
        """Describe the tensor `key`, which lies in `slabs` from byte `offset` on.

        Raises:
            SlabUsageError: The key's shape and stride leave gaps, the tensor exceeds the slabs, or
                its size is not that of the lease.
        """
        nbytes = nbytes_of(key)
        room = sum(slab.nbytes for slab in slabs)
        if not dense(key.shape, key.stride) or offset < 0 or offset + nbytes > room:
            raise SlabUsageError(
                f"a tensor of shape {tuple(key.shape)}, stride {tuple(key.stride)} and {nbytes} "
                f"bytes at {offset} of slabs of {room}",
                nbytes=nbytes,
                offset=offset,
            )
        if lease is not None and lease.nbytes != nbytes:
            raise SlabUsageError(
                f"a tensor of {nbytes} bytes where {lease.nbytes} are lent under its digest",
                nbytes=nbytes,
                lent=lease.nbytes,
            )
        self.key: Final = key
        self.slabs: Final = tuple(slabs)
        self.offset: Final = offset
        self.nbytes: Final = nbytes
        self.lease: Final = lease

    @property
    def leaf_shared_bytes(self) -> int:
        """The number of the tensor's bytes that were resident before it was built.

        It is always 0 for a tensor that does not consist of blocks.
        """
        return 0


_Place = tuple[tuple[int, ...], ResidentKey | None, int]


class Views:
    """The mappings of residents for one model. Safe from any thread.

    A slab is unmapped after the last tensor in it is gone and no kernel can use the slab any more.
    `kind` is the DLPack device type of the tensors. With `apart`, no two tensors have one address:
    a slab is mapped once more for each tensor of equal bytes, which costs addresses and no memory.
    """

    def __init__(self, kind: int = CUDA, *, apart: bool = False) -> None:
        self._kind = kind
        self._apart = apart
        # Where tensors begin in a mapping.
        self._taken: weakref.WeakKeyDictionary[DeviceMapping, set[int]] = (
            weakref.WeakKeyDictionary()
        )
        self._mappings: weakref.WeakValueDictionary[_Place, DeviceMapping] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def tensor(self, resident: DeviceResident) -> torch.Tensor:
        """Return `resident` as a tensor in this model's mapping of it, which is made if necessary.

        The memory is read-only. If a kernel writes to it, this process can no longer use the GPU.

        Raises:
            BackendError: The resident cannot be mapped; load the tensor privately.
        """
        key, first = resident.key, resident.slabs[0]
        dtype = torch_dtype(key.dtype)
        mapping = self._mapping(resident)
        mapping.hold(resident)
        return tensor_at(
            mapping.address + resident.offset,
            (dtype, key.shape, key.stride),
            (self._kind, first.gpu.device.ordinal),
            mapping,
        )

    def _mapping(self, resident: DeviceResident) -> DeviceMapping:
        slabs, first = resident.slabs, resident.slabs[0]
        # A tensor in several slabs has them for itself here: once private, a write to it must not
        # be one to a tensor of equal bytes and another geometry.
        serials = tuple(slab.serial for slab in slabs)
        key = resident.key if len(slabs) > 1 else None
        with self._lock:
            for number in itertools.count():
                place = serials, key, number
                found = self._mappings.get(place)
                # What became private may have been written: it is the resident no longer. What
                # sleeps is nowhere. And other slabs may have been mapped at the address.
                if found is None or found.private or found.asleep or found.serials != serials:
                    break
                if not self._apart or resident.offset not in self._taken[found]:
                    self._taken[found].add(resident.offset)
                    return found
            extents = [slab.extent for slab in slabs]
            # The mapping holds the slabs, and so the descriptors, until it is unmapped.
            made = first.gpu.map(extents, first.opener, tuple(slabs))
            self._taken[made] = {resident.offset}
            self._mappings[place] = made
            return made

    def mappings(self) -> list[DeviceMapping]:
        """Return the model's mappings that are in use."""
        return list(self._mappings.values())

    def make_private(self) -> int:
        """Replace the model's shared memory by private, writable copies at the same addresses.

        Returns the number of bytes copied. Waits for all work of the GPU. The model must not run
        meanwhile. After an error, some mappings may be private, and the others are still shared.

        Raises:
            BackendError: The driver refused.
            UnsupportedError: The backend cannot put private memory at the same addresses.
        """
        done = 0
        with self._lock:
            for mapping in self.mappings():
                if not mapping.private:
                    mapping.make_private()
                    done += mapping.nbytes
        return done


@dataclass(frozen=True, slots=True)
class DeviceContent:
    """A gap-free tensor that lies on a GPU already, to be copied to another address there.

    - `place` is the DLPack device type and number of the GPU.
    - `known_leaves` are the tensor's leaf digests, or are empty if they are not known.

    The copies go in the order of torch's current stream.
    """

    tensor: torch.Tensor
    place: tuple[int, int]
    known_leaves: Sequence[bytes] = ()
    _computed: list[bytes] = field(default_factory=list, compare=False)

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.tensor.nbytes

    @property
    def leaves(self) -> Sequence[bytes]:
        """The leaf digests of the tensor, which are computed if they are not known.

        The tensor is then copied to host memory.
        """
        if self.known_leaves:
            return self.known_leaves
        if not self._computed:
            data = tensor_bytes(self.tensor.cpu())
            submit(data, leaves=self._computed).result()
            if not self._computed:
                self._computed.extend(leaf_digests(data))
        return self._computed

    def __call__(self, address: int) -> None:
        """Copy the whole tensor to `address`."""
        self.part(0, self.nbytes)(address)

    def part(self, start: int, end: int) -> Write:
        """Return a function that copies bytes `start` to `end` of the tensor to an address.

        `start` and `end` count the bytes in memory order.
        """
        whole, nbytes = self.tensor.detach(), end - start
        flat = torch.empty(0, dtype=torch.uint8, device=whole.device)
        first = whole.storage_offset() * whole.itemsize + start
        piece = flat.set_(whole.untyped_storage(), first, (nbytes,), (1,))

        def write(address: int) -> None:
            # By torch, in the order of its stream: what made the tensor may be under way there.
            tensor_at(address, (torch.uint8, (nbytes,), (1,)), self.place, None).copy_(piece)

        return write


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A tensor to make resident on a GPU: its recipe, its key, and its content.

    - `content` is the tensor in host memory or files, or on the GPU, or a function that writes it
      to an address on any stream of the current context. If the key's digest is "", that function
      must return the tensor's digest.
    - `copy` is the replica number: residents with equal keys and different numbers have separate
      memory.
    """

    recipe: str
    key: ResidentKey
    nbytes: int
    content: HostContent | DeviceContent | Write
    copy: int = 0

    def written(self, digest: str | None) -> ResidentKey:
        """Return the resident's key, completed by the `digest` that was found when it was written.

        If `digest` is None or "", the key is returned unchanged.
        """
        return replace(self.key, digest=digest) if digest else self.key


@dataclass(frozen=True, slots=True)
class UnreadTensor:
    """A tensor in files, to make resident on a GPU, whose digest its upload gives.

    - `geometry` is its dtype, shape and stride, as a resident key without a digest.
    - `learned()` is called once, when the digests of `content` are known. It returns the tensor's
      recipe.
    """

    geometry: ResidentKey
    content: HostContent
    learned: Callable[[], str]


def copy_of(tensor: torch.Tensor, gpu: Gpu) -> Callable[[int], None]:
    """Return a function that copies a gap-free tensor to an address of `gpu`.

    The tensor lies in host memory or on `gpu`.
    """
    nbytes = tensor.nbytes

    def write(address: int) -> None:
        copy = gpu.driver.copy_in if tensor.device.type == "cpu" else gpu.driver.copy
        copy(address, tensor.data_ptr(), nbytes)

    return write
