"""The GPU memory that a sleeping model still holds.

A lease of the GPU's memory manager keeps a tensor in memory. A stand-by lease tells the manager, in
addition, that its holder sleeps. The manager then answers which of the tensors are also leased by
engines that are awake. Without a manager, the memory belongs to this process.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Final

from tensor_dedup.loader.cuda.blocks import TensorInBlocks
from tensor_dedup.loader.cuda.manager_residents import DeviceMemory, device_session
from tensor_dedup.loader.cuda.openers import MappedExtent
from tensor_dedup.loader.cuda.sleeping_slabs import key_asleep
from tensor_dedup.memory_manager.client import Lease, NewLayer, NewTensor
from tensor_dedup.memory_manager.errors import BackendError, MemoryManagerError, RefusedError
from tensor_dedup.memory_manager.protocol.limits import MAX_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensor_dedup.loader.cuda.gpu import Gpu
    from tensor_dedup.loader.cuda.openers import Opener
    from tensor_dedup.loader.cuda.residents import DeviceResident
    from tensor_dedup.loader.cuda.sleeping_slabs import SleepingSlab
    from tensor_dedup.memory_manager.client import Client, Put, TensorSlot

    # Writes the tensors of slabs to their places in new memory.
    Restore = Callable[[Sequence[tuple[SleepingSlab, MappedExtent]], Opener], None]

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

        - If the memory manager lends a slab, this takes stand-by leases on the tensors. If it has
          one of them in another slab by now, `held` stays empty.
        - If this process allocated a slab by itself, the residents keep it on the GPU.

        Raises:
            MemoryManagerError: The manager does not answer. `held` of what it lends stays empty.
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
        held = {
            slab: self._as_laid_out(slab, [*islice(leases, len(slab.tensors))]) for slab in lent
        }
        found = {slab: its for slab, its in held.items() if its is not None}
        standing = [each.lease for its in found.values() for each in its]
        self._device.stand_by([lease for lease in standing if isinstance(lease, Lease)])
        for slab, its in found.items():
            slab.held = its

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

    def find_or_put(
        self, slabs: Sequence[SleepingSlab], restore: Restore
    ) -> dict[SleepingSlab, list[DeviceResident]]:
        """Return the tensors of `slabs`, in slabs of the manager that have the same layout.

        If another engine has put such a slab already, it is used. Otherwise a new slab is put into
        the manager's memory, and `restore` fills it. Other engines can use it when they wake. A
        slab is left out of the result in these cases:

        - There is no manager, or it fails or has no room.
        - The manager has the tensors in another layout.
        """
        found: dict[SleepingSlab, list[DeviceResident]] = {}
        if self._memory is None:
            return found
        try:
            new = self._find(slabs, found)
            contested = self._put(new, restore, found)
            for slab in contested:  # now that this client holds no reservation, it may wait
                self._put_alone(slab, restore, found)
        except MemoryManagerError as error:
            _log.debug("%s: waking without the manager: %s", self._checkpoint, str(error))
        return found

    def _find(
        self, slabs: Sequence[SleepingSlab], found: dict[SleepingSlab, list[DeviceResident]]
    ) -> list[SleepingSlab]:
        """Add to `found` what all lies in one slab as it did in this one.

        Returns the slabs that can be put, because the manager has none of their tensors.
        """
        assert self._device is not None
        wanted = [each.digest for slab in slabs for each in slab.tensors]
        leases = iter(self._device.lease(wanted, self._checkpoint))
        new = []
        for slab in slabs:
            its = [*islice(leases, len(slab.tensors))]
            residents = self._as_laid_out(slab, its)
            if residents is not None:
                found[slab] = residents
            elif not any(its) and len(slab.sizes()) == len(slab.places()) <= MAX_KEYS:
                new.append(slab)
        return new

    def _put(
        self,
        slabs: Sequence[SleepingSlab],
        restore: Restore,
        found: dict[SleepingSlab, list[DeviceResident]],
    ) -> list[SleepingSlab]:
        """Put slabs into the manager's memory for all who wake, and add them to `found`.

        Returns the slabs that others are putting, or that could not be reserved beside the rest.
        """
        assert self._memory is not None
        contested = []
        with ExitStack() as open_puts:
            puts: list[tuple[SleepingSlab, Put]] = []
            for slab in slabs:
                put = self._reserved(slab)
                if put is None:
                    contested.append(slab)
                elif _allocated(open_puts.enter_context(put), slab):
                    puts.append((slab, put))
            if puts:
                restore([(slab, _extent_of(put)) for slab, put in puts], self._memory.opener)
            for slab, put in puts:
                self._sealed(slab, put, found)
        return contested

    def _reserved(self, slab: SleepingSlab) -> Put | None:
        assert self._device is not None
        try:
            reservation = self._device.reserve(_keys(slab), self._checkpoint)
        except RefusedError:  # other models of this process hold as many puts as it may have
            return None
        if reservation.put is not None and reservation.of("granted") != _keys(slab):
            reservation.put.abandon()
            return None
        return reservation.put

    def _sealed(
        self, slab: SleepingSlab, put: Put, found: dict[SleepingSlab, list[DeviceResident]]
    ) -> None:
        leases = {lease.digest: lease for lease in put.seal()}
        for digest in leases:
            put.publish(key_asleep(digest), b"", [digest])
        residents = self._as_laid_out(slab, [leases.get(each.digest) for each in slab.tensors])
        if residents is not None:
            found[slab] = residents

    def _put_alone(
        self,
        slab: SleepingSlab,
        restore: Restore,
        found: dict[SleepingSlab, list[DeviceResident]],
    ) -> None:
        """Wait for others that put a slab, or put it after all; add it to `found`."""
        assert self._device is not None
        assert self._memory is not None
        memory = self._memory

        def fill(put: Put, slots: Sequence[TensorSlot]) -> Sequence[str]:
            if not _is_laid_out(put, slab):
                raise BackendError("a manager lays them out otherwise")
            restore([(slab, _extent_of(put))], memory.opener)
            return ()

        layers = {
            key_asleep(name): NewLayer(b"", (NewTensor(nbytes, name),))
            for _, name, nbytes in slab.places()
        }
        made = self._device.put(layers, self._checkpoint, fill=fill).layers
        keys = [key_asleep(each.digest) for each in slab.tensors]
        leases = [made[key].leases[0] if key in made else None for key in keys]
        residents = self._as_laid_out(slab, leases)
        if residents is not None:
            found[slab] = residents

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


def _keys(slab: SleepingSlab) -> list[str]:
    return [key_asleep(name) for _, name, _ in slab.places()]


def _allocated(put: Put, slab: SleepingSlab) -> bool:
    """Allocate a put's memory; return whether there is room, and it has the layout of `slab`."""
    names, sizes = zip(*((name, nbytes) for _, name, nbytes in slab.places()), strict=True)
    try:
        put.allocate(sizes, names)
    except RefusedError:
        return False
    return _is_laid_out(put, slab)


def _is_laid_out(put: Put, slab: SleepingSlab) -> bool:
    _, nbytes, offsets = put.place
    return nbytes == slab.nbytes and [*offsets] == [offset for offset, _, _ in slab.places()]


def _extent_of(put: Put) -> MappedExtent:
    fd, nbytes, _ = put.place
    return MappedExtent(fd, nbytes, 0)
