"""The GPU memory that a sleeping model still holds.

A lease of the GPU's memory manager keeps a tensor in memory. A stand-by lease tells the manager, in
addition, that its holder sleeps. The manager then answers which of the tensors are also leased by
engines that are awake. Without a manager, the memory belongs to this process.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Final

from tensor_dedup.loader.cuda.blocks import TensorInBlocks
from tensor_dedup.loader.cuda.manager_residents import DeviceMemory, device_session
from tensor_dedup.loader.cuda.openers import MappedExtent
from tensor_dedup.loader.cuda.sleeping_slabs import key_asleep
from tensor_dedup.memory_manager.client import Lease, NewLayer, NewTensor
from tensor_dedup.memory_manager.errors import BackendError, MemoryManagerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensor_dedup.loader.cuda.gpu import Gpu
    from tensor_dedup.loader.cuda.openers import Opener
    from tensor_dedup.loader.cuda.residents import DeviceResident
    from tensor_dedup.loader.cuda.sleeping_slabs import SleepingSlab
    from tensor_dedup.memory_manager.client import Client, Put, TensorSlot

    # Writes the tensors of a slab to their places in new memory.
    Restore = Callable[[MappedExtent, Opener], None]

_log = logging.getLogger(__name__)


class StandbyMemory:
    """The GPU memory that one sleeping model holds. For one thread at a time."""

    def __init__(self, gpu: Gpu, device: Client | None, checkpoint: str) -> None:
        """Use `device`, the memory manager of `gpu`, or no manager if it is None.

        `checkpoint` names the model to the manager.

        Raises:
            UnsupportedError: The manager lends the memory of another device.
        """
        self._gpu: Final = gpu
        self._device: Final = device
        self._memory: Final = None if device is None else DeviceMemory(gpu, device)
        self._session: Final = None if device is None else device_session(device, gpu, checkpoint)
        self._checkpoint: Final = checkpoint

    def hold(self, residents: dict[SleepingSlab, list[DeviceResident]]) -> None:
        """Keep the tensors of slabs on the GPU while the model sleeps. Sets `held` of each slab.

        `residents` maps each slab to its tensors on the GPU.

        - If the memory manager lends a slab, this takes stand-by leases on the tensors.
        - If this process allocated a slab by itself, the residents keep it on the GPU.

        Raises:
            MemoryManagerError: The manager does not answer, or now has a tensor in another slab.
        """
        lent = []
        for slab, each in residents.items():
            if any(isinstance(one.lease, Lease) for one in each):
                lent.append(slab)
            else:
                slab.held = each  # made by this process, without a manager
        if not lent:
            return
        if self._device is None:
            raise BackendError("the memory manager that they are leased from does not answer")
        wanted = [each.digest for slab in lent for each in slab.tensors]
        leases = iter(self._device.lease(wanted, self._checkpoint))
        for slab in lent:
            held = self._as_laid_out(slab, [*islice(leases, len(slab.tensors))])
            if held is None:
                raise BackendError("the manager has them elsewhere by now")
            slab.held = held
        self._device.stand_by([lease for slab in lent for lease in slab.leases])

    def _as_laid_out(
        self, slab: SleepingSlab, leases: Sequence[Lease | None]
    ) -> list[DeviceResident] | None:
        assert self._memory is not None
        residents = []
        for each, lease in zip(slab.tensors, leases, strict=True):
            first = leases[0]
            if lease is None or first is None or lease.slab is not first.slab:
                return None
            if (lease.offset, lease.nbytes, lease.slab.nbytes) != (
                each.offset,
                each.nbytes,
                slab.nbytes,
            ):
                return None
            residents.append(self._memory.resident(each.known.key, lease))
        return residents or None

    def used_awake(self, slabs: Sequence[SleepingSlab]) -> set[SleepingSlab]:
        """Return those of `slabs` that a model awake uses, in this process or in another engine.

        If the manager does not answer, all slabs that it lends count as used.
        """
        mapped = self._gpu.mapped()
        used = {each for each in slabs if each.held[0].slabs[0].serial in mapped}
        asked = [each for each in slabs if each not in used and each.leases]
        if not asked:
            return used
        assert self._device is not None
        try:
            awake = iter(self._device.stand_by([lease for each in asked for lease in each.leases]))
            used.update(each for each in asked if any([*islice(awake, len(each.leases))]))
        except MemoryManagerError as error:
            # Until the next manager has taken the leases over nobody can say.
            _log.debug("%s: who is awake is not known: %s", self._checkpoint, str(error))
            used.update(asked)
        return used

    def let_go(self, slab: SleepingSlab) -> None:
        """End the leases on a slab's GPU memory, and have the manager evict it.

        If the manager fails, the failure is only logged.
        """
        leases, slab.held = slab.leases, []
        for lease in leases:
            lease.close()
        if leases and self._device is not None:
            try:
                self._device.evict(leases[0].digest)
            except MemoryManagerError as error:
                _log.debug("%s: not evicted: %s", self._checkpoint, str(error))

    def say(self, leases: Sequence[Lease], *, asleep: bool) -> None:
        """Tell the manager whether the holder of `leases` sleeps.

        Does nothing without a manager. Errors are only logged.
        """
        if not leases or self._device is None:
            return
        try:
            self._device.stand_by(leases, asleep=asleep)
        except MemoryManagerError as error:
            # It only keeps others from sparing themselves a copy.
            _log.debug("%s: the manager was not told: %s", self._checkpoint, str(error))

    def find_or_put(self, slab: SleepingSlab, restore: Restore) -> list[DeviceResident] | None:
        """Return the tensors of `slab`, in a slab of the manager that has the same layout.

        If another engine has put such a slab already, it is used. Otherwise a new slab is put into
        the manager's memory, and `restore` fills it. Other engines can use it when they wake.
        Returns None in these cases:

        - There is no manager, or it fails or has no room.
        - The manager has the tensors in another layout.
        """
        if self._memory is None:
            return None
        try:
            return self._lent(slab) or self._put(slab, restore)
        except MemoryManagerError as error:
            _log.debug("%s: waking without the manager: %s", self._checkpoint, str(error))
            return None

    def _lent(self, slab: SleepingSlab) -> list[DeviceResident] | None:
        """Lease the tensors where they all lie in one slab as they did in this one, or None."""
        assert self._device is not None
        leases = self._device.lease([each.digest for each in slab.tensors], self._checkpoint)
        return self._as_laid_out(slab, leases)

    def _put(self, slab: SleepingSlab, restore: Restore) -> list[DeviceResident] | None:
        """Put the slab into the manager's memory for all who wake, or return None."""
        assert self._device is not None
        assert self._memory is not None
        memory, places = self._memory, slab.places()
        layers = {key_asleep(name): NewLayer(b"", (NewTensor(n, name),)) for _, name, n in places}
        resident = self._device.lease([name for _, name, _ in places])
        if len(layers) < len(places) or any(resident):
            return None

        def fill(put: Put, slots: Sequence[TensorSlot]) -> Sequence[str]:
            fd, nbytes, offsets = put.place
            wanted = [offset for offset, _, _ in places]
            if nbytes != slab.nbytes or list(offsets) != wanted or len(slots) != len(places):
                raise BackendError("a manager lays them out otherwise")
            restore(MappedExtent(fd, nbytes, 0), memory.opener)
            put.progress()
            return ()

        result = self._device.put(layers, self._checkpoint, fill=fill)
        leases = [
            result.layers[key_asleep(each.digest)].leases[0]
            if key_asleep(each.digest) in result.layers
            else None
            for each in slab.tensors
        ]
        return self._as_laid_out(slab, leases)

    def publish(self, resident: DeviceResident) -> None:
        """Publish the list of blocks of `resident`, so that other engines find it again.

        The manager forgets this list when it evicts one of the blocks (pieces of 16 MiB). Does
        nothing without a manager, or if `resident` is not in blocks. Errors are only logged.
        """
        if self._session is None or not isinstance(resident, TensorInBlocks):
            return
        try:
            self._session.publish_parts("", resident)
        except MemoryManagerError as error:
            _log.debug("%s: not found as a whole: %s", self._checkpoint, str(error))
