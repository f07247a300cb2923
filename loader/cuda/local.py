"""Residents on a GPU for the models of one process, without a memory manager.

The same memory, made here: it is gone when the last mapping of the last model is. Put like a
manager's, it is read-only for its writer, too.
"""

import threading
from collections.abc import Sequence
from typing import Final
from weakref import WeakValueDictionary

from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.opening import MappedExtent
from tensor_dedup.loader.cuda.requests import DeviceRequest
from tensor_dedup.loader.cuda.residents import DeviceResident, DeviceSlab
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.protocol.layout import offsets_of
from tensor_dedup.types import ResidentKey


class LocalDevice:
    """See the module. Safe from any thread; one puts at a time. BackendError: load privately."""

    def __init__(self, gpu: Gpu) -> None:
        """Raise DeviceError where the GPU has no memory of this kind."""
        self.gpu: Final = gpu
        self._backend = VmmBackend(gpu.driver, gpu.device.uuid)
        self._opener = gpu.vmm()
        self._residents: WeakValueDictionary[tuple[str, int], DeviceResident] = (
            WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def by_content(self, key: ResidentKey, copy: int = 0) -> DeviceResident | None:
        """The resident with these bytes, in this geometry; held by the caller from now on."""
        found = self._residents.get((key.digest, copy))
        return None if found is None else _as(key, found)

    def put(self, wanted: Sequence[DeviceRequest]) -> list[DeviceResident]:
        """A resident for each, in order: written now into one slab, or there already."""
        with self._lock:
            found = {
                index: resident
                for index, each in enumerate(wanted)
                if each.key.digest
                and (resident := self.by_content(each.key, each.copy)) is not None
            }
            missing = [index for index in range(len(wanted)) if index not in found]
            made = self._write([wanted[index] for index in missing]) if missing else []
            found |= dict(zip(missing, made, strict=True))
            return [found[index] for index in range(len(wanted))]

    def _write(self, wanted: Sequence[DeviceRequest]) -> list[DeviceResident]:
        layout = self._backend.capabilities.layout
        offsets, nbytes = offsets_of((max(each.nbytes, 1) for each in wanted), layout)
        memory = self.gpu.with_room(lambda: self._backend.reserve(nbytes))
        keys: list[ResidentKey] = []

        def write(address: int) -> None:
            for each, offset in zip(wanted, offsets, strict=True):
                keys.append(each.written(each.write(address + offset)))

        self.gpu.fill(MappedExtent(memory.fileno, nbytes, 0), self._opener, write)
        slab = DeviceSlab(self.gpu, self._opener, memory, nbytes)
        made = [
            DeviceResident(key, [slab], offset) for key, offset in zip(keys, offsets, strict=True)
        ]
        # Equal bytes of one slab: the first that has them is what others find, in their geometry.
        return [
            _as(each.key, self._residents.setdefault((each.key.digest, its.copy), each))
            for each, its in zip(made, wanted, strict=True)
        ]


def _as(key: ResidentKey, found: DeviceResident) -> DeviceResident:
    """The same bytes in this geometry."""
    if found.key == key:
        return found
    return DeviceResident(key, found.slabs, found.offset, found)  # which holds the first
