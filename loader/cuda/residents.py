"""Residents on a GPU: tensors in slabs that every model maps for itself, read-only.

A model has one mapping of each slab it uses, whichever of its tensors lie there, and shares no
mapping with other models. One model can therefore be made private, at the addresses its graphs have
captured, while the others continue to share.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

from tensor_dedup.loader.cuda.gpu import DeviceMapping, Gpu
from tensor_dedup.loader.cuda.openers import MappedExtent, Opener
from tensor_dedup.loader.cuda.tensors import CUDA, tensor_at
from tensor_dedup.loader.residents.resident import dense
from tensor_dedup.loader.residents.slab import HasFd, SlabUsageError
from tensor_dedup.loader.torch_dtypes import torch_dtype
from tensor_dedup.types import ResidentKey

_serials = itertools.count(1)
Write = Callable[[int], str | None]
"""Write a tensor to an address of a GPU; return its digest if that becomes known only then."""


class DeviceSlab:
    """The memory behind the descriptor of `source`, which is kept open. Safe from any thread."""

    def __init__(self, gpu: Gpu, opener: Opener, source: HasFd, nbytes: int) -> None:
        self.gpu: Final = gpu
        self.opener: Final = opener
        self.source: Final = source
        self.nbytes: Final = nbytes
        self.serial: Final = next(_serials)

    @property
    def extent(self) -> MappedExtent:
        """The slab as an extent to be mapped."""
        return MappedExtent(self.source.fileno, self.nbytes, self.serial)


class Lent(Protocol):
    """A lease on memory, which a resident holds."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""


class DeviceResident:
    """An immutable tensor in slabs: `nbytes` from `offset` of the first, continued in the others.

    `lease` lives as long as this object, which is held by every mapping through which it is seen.
    """

    __slots__ = ("__weakref__", "key", "lease", "nbytes", "offset", "slabs")

    def __init__(
        self, key: ResidentKey, slabs: Sequence[DeviceSlab], offset: int, lease: Lent | None = None
    ) -> None:
        """Describe a tensor that lies in these slabs.

        Other tensors lie beside it: a tensor larger than its lease would show their bytes.

        Raises:
            SlabUsageError: The key's geometry has gaps, exceeds the slabs, or is not the lease's.
        """
        nbytes = torch_dtype(key.dtype).itemsize
        for size in key.shape:
            nbytes *= size
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
        """The bytes of it that were resident before it was made: none of one that is whole."""
        return 0


_Place = tuple[tuple[int, ...], ResidentKey | None]


class Views:
    """The mappings of one model. Safe from any thread.

    A mapping ends when the last tensor over it is gone and no kernel can use it any more. `kind` is
    DLPack's type of the device that torch is to see.
    """

    def __init__(self, kind: int = CUDA) -> None:
        self._kind = kind
        self._mappings: weakref.WeakValueDictionary[_Place, DeviceMapping] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def tensor(self, resident: DeviceResident) -> torch.Tensor:
        """Return the resident as this model sees it.

        It is read-only: a write ends the process's use of the GPU.

        Raises:
            BackendError: The resident cannot be mapped; load privately.
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
        place = tuple(slab.serial for slab in slabs), resident.key if len(slabs) > 1 else None
        with self._lock:
            found = self._mappings.get(place)
            # What became private may have been written: it is the resident no longer. And what
            # sleeps is nowhere.
            if found is None or found.private or found.asleep:
                extents = [slab.extent for slab in slabs]
                # The mapping holds the slabs, and so the descriptors, until it is unmapped.
                found = first.gpu.map(extents, first.opener, tuple(slabs))
                self._mappings[place] = found
            return found

    def mappings(self) -> list[DeviceMapping]:
        """Return the mappings in use."""
        return list(self._mappings.values())

    def make_private(self) -> int:
        """Give this model its own writable bytes at the same addresses; return how many bytes.

        Waits for all work of the GPU; nobody may start any on this model meanwhile.

        Raises:
            BackendError: The driver refused; what was not made private is shared as before.
            UnsupportedError: The backend cannot keep addresses; the same holds.
        """
        done = 0
        with self._lock:
            for mapping in self.mappings():
                if not mapping.private:
                    mapping.make_private()
                    done += mapping.nbytes
        return done


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A tensor to make resident on a GPU: its recipe, its key, and a function that writes it.

    `write(address)` writes them on any stream of the current context. It returns their digest if
    that becomes known only then, in which case the key's digest is "", and None otherwise. `copy`
    is the number of the replica: several residents with this key must not become one.
    """

    recipe: str
    key: ResidentKey
    nbytes: int
    write: Write
    copy: int = 0

    def written(self, digest: str | None) -> ResidentKey:
        """Return the resident's key, given what `write` has returned."""
        return replace(self.key, digest=digest) if digest else self.key


def copy_of(tensor: torch.Tensor, gpu: Gpu) -> Callable[[int], None]:
    """Return a function that writes a gap-free tensor's bytes, from host memory or that GPU."""
    nbytes = tensor.nbytes

    def write(address: int) -> None:
        copy = gpu.driver.copy_in if tensor.device.type == "cpu" else gpu.driver.copy
        copy(address, tensor.data_ptr(), nbytes)

    return write
