"""Residents on a GPU: tensors in slabs that every model maps for itself, read-only.

A model has one mapping of each slab it uses, whichever of its tensors lie there, and mappings of
its own: so one model can be made private, at the addresses its graphs have captured, and the others
go on sharing.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

from tensor_dedup.loader.cuda.gpu import DeviceMapping, Gpu
from tensor_dedup.loader.cuda.opening import MappedExtent, Opener
from tensor_dedup.loader.cuda.tensors import CUDA, tensor_at
from tensor_dedup.loader.residents.resident import dense
from tensor_dedup.loader.residents.slab import HasFd, SlabUsageError
from tensor_dedup.loader.torch_dtypes import torch_dtype
from tensor_dedup.types import ResidentKey

_serials = itertools.count(1)


class DeviceSlab:
    """Memory that `source`'s descriptor stands for. `source` is held; safe from any thread."""

    def __init__(self, gpu: Gpu, opener: Opener, source: HasFd, nbytes: int) -> None:
        self.gpu: Final = gpu
        self.opener: Final = opener
        self.source: Final = source
        self.nbytes: Final = nbytes
        self.serial: Final = next(_serials)

    @property
    def extent(self) -> MappedExtent:
        """The slab, to be mapped."""
        return MappedExtent(self.source.fileno, self.nbytes, self.serial)


class Lent(Protocol):
    """The right to use memory, which a resident holds."""

    @property
    def nbytes(self) -> int:
        """Its size."""


class DeviceResident:
    """A tensor in slabs: `nbytes` from `offset` of the first, and on into the others. Immutable.

    `lease`: held as long as this is, which every mapping that it is seen through holds.
    """

    __slots__ = ("__weakref__", "key", "lease", "nbytes", "offset", "slabs")

    def __init__(
        self, key: ResidentKey, slabs: Sequence[DeviceSlab], offset: int, lease: Lent | None = None
    ) -> None:
        """SlabUsageError when the key's geometry has gaps or does not fit, or is not the lease's.

        Beside a tensor lie others: one that is larger than its lease would show their bytes.
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


class Views:
    """The mappings of one model. Safe from any thread.

    A mapping goes when the last tensor over it has gone and no kernel can use it any more. `kind`
    is DLPack's, of the device that torch is to see.
    """

    def __init__(self, kind: int = CUDA) -> None:
        self._kind = kind
        self._mappings: weakref.WeakValueDictionary[tuple[int, ...], DeviceMapping] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def tensor(self, resident: DeviceResident) -> torch.Tensor:
        """The resident as this model sees it: read-only, a write ends the process's use of the GPU.

        BackendError when it cannot be mapped: load privately.
        """
        key, first = resident.key, resident.slabs[0]
        dtype = torch_dtype(key.dtype)
        mapping = self._mapping(resident.slabs)
        mapping.hold(resident)
        return tensor_at(
            mapping.address + resident.offset,
            (dtype, key.shape, key.stride),
            (self._kind, first.gpu.device.ordinal),
            mapping,
        )

    def _mapping(self, slabs: Sequence[DeviceSlab]) -> DeviceMapping:
        serials = tuple(slab.serial for slab in slabs)
        first = slabs[0]
        with self._lock:
            found = self._mappings.get(serials)
            # What became private may have been written: it is the resident no longer.
            if found is None or found.private:
                extents = [slab.extent for slab in slabs]
                # The mapping holds the slabs, and so the descriptors, until it is unmapped.
                found = first.gpu.map(extents, first.opener, tuple(slabs))
                self._mappings[serials] = found
            return found

    def mappings(self) -> list[DeviceMapping]:
        """Return the mappings in use."""
        return list(self._mappings.values())

    def make_private(self) -> int:
        """Give this model bytes of its own at the same addresses, writable; how many.

        Waits for all work of the GPU; nobody may begin any on this model meanwhile. BackendError or
        UnsupportedError: what was not made private is shared as before.
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
    """A tensor to be resident on a GPU: what it follows from, its key, and who writes its bytes.

    `write(address)` puts them there, on any stream of the current context. It returns their digest
    when it is known only then, the key's is "" in that case; else None. `copy`: which of
    several residents with this key that must not become one.
    """

    recipe: str
    key: ResidentKey
    nbytes: int
    write: Callable[[int], str | None]
    copy: int = 0

    def written(self, digest: str | None) -> ResidentKey:
        """Return the key, given what `write` has returned."""
        return replace(self.key, digest=digest) if digest else self.key


def copy_of(tensor: torch.Tensor, gpu: Gpu) -> Callable[[int], None]:
    """Return a writer of a gap-free tensor's bytes, from the host or that GPU."""
    nbytes = tensor.nbytes

    def write(address: int) -> None:
        copy = gpu.driver.copy_in if tensor.device.type == "cpu" else gpu.driver.copy
        copy(address, tensor.data_ptr(), nbytes)

    return write
