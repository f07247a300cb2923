"""Residents that this process builds on one GPU in memory of its own, without a memory manager."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from tensor_dedup.loader.cuda.new_slabs import SlabTensor, rounds, slab_bytes, slabs_of, write_slabs
from tensor_dedup.loader.cuda.openers import MappedExtent
from tensor_dedup.loader.cuda.residents import DeviceResident, DeviceSlab
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.protocol.layout import offsets_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.loader.cuda.gpu import Gpu
    from tensor_dedup.loader.cuda.residents import DeviceRequest
    from tensor_dedup.memory_manager.backends.vmm import VmmAllocation
    from tensor_dedup.types import ResidentKey


class LocalDevice:
    """Residents that this process builds on one GPU without a memory manager.

    After it is written, a resident is mapped read-only. Its memory is freed when the last mapping
    ends. Safe from any thread; calls of `put` run one at a time. After a BackendError, load the
    tensors privately.
    """

    def __init__(self, gpu: Gpu) -> None:
        """Prepare to allocate memory of `gpu`.

        Raises:
            DeviceError: The driver cannot allocate shareable memory on this GPU.
        """
        self.gpu: Final = gpu
        self._backend = VmmBackend(gpu.driver, gpu.device.uuid)
        self.opener: Final = gpu.vmm()
        self._residents: WeakValueDictionary[tuple[str, int], DeviceResident] = (
            WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def by_content(self, key: ResidentKey, copy: int = 0) -> DeviceResident | None:
        """Return the resident with this `key` and the replica number `copy`, or None.

        Keep a reference to the result, because the table keeps none.
        """
        found = self._residents.get((key.digest, copy))
        return None if found is None else _as(key, found)

    def put(self, wanted: Sequence[DeviceRequest]) -> list[tuple[DeviceResident, bool]]:
        """Return a resident for each request of `wanted`, in order, and whether it is new.

        Large tensors get a slab each, and small ones share slabs. They are written in rounds of 256
        MiB, with one wait for the GPU each.

        Raises:
            BackendError: The GPU has no room, or its driver refuses.
        """
        with self._lock:
            found = {
                index: (resident, False)
                for index, each in enumerate(wanted)
                if each.key.digest
                and (resident := self.by_content(each.key, each.copy)) is not None
            }
            missing = [index for index in range(len(wanted)) if index not in found]
            made = self._write([wanted[index] for index in missing]) if missing else []
            found |= dict(zip(missing, made, strict=True))
            return [found[index] for index in range(len(wanted))]

    def open_slab(self, sizes: Sequence[int]) -> LocalNewSlab:
        """Allocate a slab for tensors of these sizes, which the caller fills and seals.

        Raises:
            BackendError: The GPU has no room, or its driver refuses.
        """
        layout = self._backend.capabilities.layout
        offsets, nbytes = offsets_of((max(each, 1) for each in sizes), layout)
        memory = self.gpu.with_room(lambda: self._backend.reserve(nbytes))
        return LocalNewSlab(self, memory, offsets)

    def enter(
        self, slab: LocalNewSlab, keys: Sequence[ResidentKey], copies: Sequence[int] = ()
    ) -> list[tuple[DeviceResident, bool]]:
        """Make residents of the tensors of a slab, which are written.

        Returns, in order, each resident with one of the `keys` and a replica number of `copies`, by
        default 0, and whether it lies in this slab.
        """
        shared = DeviceSlab(self.gpu, self.opener, slab.memory, slab.memory.nbytes)
        made = [
            DeviceResident(key, [shared], offset)
            for key, offset in zip(keys, slab.offsets, strict=True)
        ]
        # Equal bytes of one slab: the first that has them is what others find, in their geometry.
        first = [
            self._residents.setdefault((each.key.digest, copy), each)
            for each, copy in zip(made, copies or [0] * len(made), strict=True)
        ]
        return [
            (_as(each.key, found), found.slabs[0] is shared)
            for each, found in zip(made, first, strict=True)
        ]

    def _write(self, wanted: Sequence[DeviceRequest]) -> list[tuple[DeviceResident, bool]]:
        made: dict[int, tuple[DeviceResident, bool]] = {}
        for slabs in rounds(slabs_of(wanted), slab_bytes):
            opened = [self.open_slab([each.nbytes for each in these]) for these in slabs]
            places = [
                (
                    slab.extent,
                    slab.offsets,
                    [SlabTensor(each.content, each.key, 0, each.nbytes) for each in these],
                )
                for slab, these in zip(opened, slabs, strict=True)
            ]
            written = write_slabs(self.gpu, self.opener, places)
            for slab, these, digests in zip(opened, slabs, written, strict=True):
                keys = [each.written(one) for each, one in zip(these, digests, strict=True)]
                entered = self.enter(slab, keys, [each.copy for each in these])
                made.update((id(e), (r, True)) for e, (r, _) in zip(these, entered, strict=True))
        return [made[id(each)] for each in wanted]


class LocalNewSlab:
    """A slab of this process's own, which is to be filled. For one thread."""

    def __init__(self, local: LocalDevice, memory: VmmAllocation, offsets: Sequence[int]) -> None:
        self.memory: Final = memory
        self.offsets: Final = offsets
        self.opener: Final = local.opener
        self.extent: Final = MappedExtent(memory.fileno, memory.nbytes, 0)
        self._local = local

    def progress(self) -> None:
        """Do nothing, because nobody waits for this slab."""

    def seal(self, keys: Sequence[ResidentKey]) -> list[tuple[DeviceResident, bool]]:
        """Make residents of the tensors, and return each, and whether it lies in this slab."""
        return self._local.enter(self, keys)

    def abandon(self) -> None:
        """Do nothing: the slab is freed with this object."""


def _as(key: ResidentKey, found: DeviceResident) -> DeviceResident:
    """Return a resident of the same bytes in this geometry."""
    if found.key == key:
        return found
    return DeviceResident(key, found.slabs, found.offset, found)  # which holds the first
