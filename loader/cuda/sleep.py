"""Sleep mode on a GPU: shared weights are unmapped and, if no model uses them, moved to the host.

The weights lie in slabs, pieces of GPU memory that several models can map. At every moment, each
tensor is held on the GPU or in host memory, so no tensor is lost if another process ends:

1. `sleep` takes new leases, which tell the memory manager that their holder sleeps (`standby`), and
   unmaps the slabs. The addresses of the slabs stay reserved.
2. A slab that no model awake uses is copied to a memory manager of host memory (`host_backup`).
   Then the leases on the GPU's memory end, and the manager evicts it.
3. `wake` maps the slab at its old address again. If the slab is no longer on the GPU, a slab with
   the same layout from another engine is used, or a new one is filled from host memory.

After a failure, a slab stays as it was: mapped if it cannot be unmapped, on the GPU if it cannot be
copied, and asleep if it cannot be mapped again.
"""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.blocks import TensorInBlocks
from tensor_dedup.loader.cuda.host_backup import HostBackup
from tensor_dedup.loader.cuda.residents import DeviceResident, DeviceSlab
from tensor_dedup.loader.cuda.sleeping_slabs import (
    SleepingMapping,
    SleepingSlab,
    SleepingTensor,
    batches_of,
)
from tensor_dedup.loader.cuda.standby import StandbyMemory
from tensor_dedup.loader.residents.resident import ReplicaKey, is_of_bytes
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from tensor_dedup.loader.cuda.gpu import DeviceMapping
    from tensor_dedup.loader.cuda.openers import MappedExtent
    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.memory_manager.client import Client, Lease

_log = logging.getLogger(__name__)
_SETTLE_S: Final = 1.0  # so long may memory stay on the GPU after the last user awake has gone
_RETRY_S: Final = 30.0  # so long at most, where copying it fails again and again
_FINAL: Final = ("mismatch", "no_room")  # refusals that the next try would meet, too


@dataclass(slots=True)
class SleepReport:
    """The result of `SleepingModel.sleep`. Sizes are in bytes.

    - `unmapped` is the size of the slabs that the model no longer maps.
    - `copied` is the size of the tensors that were written to host memory. A slab that a model
      awake uses stays on the GPU and is not copied.
    - `reasons` says why slabs could not be unmapped or copied.
    """

    unmapped: int = 0
    copied: int = 0
    reasons: list[str] = field(default_factory=list)


class SleepingModel:
    """The shared weights of one model on one GPU, which can sleep and wake. Safe from any thread.

    The model must not run between the start of `sleep` and the return of `wake`. The model's
    tensors keep their addresses, so captured graphs stay valid.
    """

    def __init__(
        self, gpu: SharedGpu, host: Client, device: Client | None = None, checkpoint: str = ""
    ) -> None:
        """Use the memory manager `host` of host memory, and `device`, that of the GPU.

        `device` is None if the GPU has no manager. `checkpoint` names the model to the managers and
        in messages.

        Raises:
            UnsupportedError: A manager lends memory of another kind or device.
        """
        self._gpu: Final = gpu
        self._backup: Final = HostBackup(gpu, host, checkpoint)
        self._standby: Final = StandbyMemory(gpu.gpu, device, checkpoint)
        self._checkpoint: Final = checkpoint
        self._mappings: list[SleepingMapping] = []
        self._lock = threading.RLock()
        self._watch: threading.Event | None = None  # ends the thread that settles
        self._waking = threading.Event()  # somebody waits for the lock to wake the model

    @property
    def asleep(self) -> int:
        """The number of bytes of this model that are unmapped now."""
        with self._lock:
            return sum(each.mapping.nbytes for each in self._mappings)

    # Falling asleep.

    def sleep(self, tensors: Iterable[torch.Tensor]) -> SleepReport:
        """Unmap the slabs behind `tensors`, and copy those that no model awake uses to the host.

        Waits for all work of the GPU. Private tensors are left alone. Failures are not raised. A
        slab that cannot be unmapped stays mapped, and a slab that cannot be copied stays on the
        GPU, unmapped. The report has the reasons.
        """
        report = SleepReport()
        with self._lock:
            behind = (self._gpu.mapping_behind(tensor) for tensor in tensors)
            awake = dict.fromkeys(each for each in behind if each is not None and not each.asleep)
            waited = False  # once is enough: the model does not run
            for mapping, sleeping in self._stood_by(awake, report).items():
                try:
                    try:
                        mapping.sleep(waited=waited)
                        waited = True
                    finally:
                        if mapping.asleep:
                            self._mappings.append(sleeping)
                            report.unmapped += mapping.nbytes
                except Exception as error:  # noqa: BLE001  # or the others would stay unmapped
                    report.reasons.append(f"{mapping.nbytes} bytes: {_said(error)}")
            before = self._backup.copied
            report.reasons += self.settle()
            report.copied = self._backup.copied - before
            self._watch_on()
        return report

    def _stood_by(
        self, mappings: Iterable[DeviceMapping], report: SleepReport
    ) -> dict[DeviceMapping, SleepingMapping]:
        """Hold the memory of mappings otherwise than by their own residents.

        Mappings for which that fails are left out, and `report` says why.
        """
        found: dict[DeviceMapping, SleepingMapping] = {}
        residents: dict[SleepingSlab, list[DeviceResident]] = {}
        for mapping in mappings:
            try:
                found[mapping], its = self._laid_out(mapping)
                residents |= its
            except UnsupportedError as error:
                report.reasons.append(f"{mapping.nbytes} bytes: {_said(error)}")
        why = "the manager has them elsewhere by now"
        try:
            self._standby.hold(residents)
        except Exception as error:  # noqa: BLE001  # they stay mapped
            why = _said(error)
        for mapping, sleeping in list(found.items()):
            if not all(slab.held for slab in sleeping.slabs):
                report.reasons.append(f"{mapping.nbytes} bytes: {why}")
                del found[mapping]
        return found

    def _laid_out(
        self, mapping: DeviceMapping
    ) -> tuple[SleepingMapping, dict[SleepingSlab, list[DeviceResident]]]:
        """Return the slabs of a mapping, and the tensors in each."""
        residents = sorted(
            (each for each in mapping.owners() if isinstance(each, DeviceResident) and each.nbytes),
            key=lambda each: each.offset,
        )
        if mapping.private or not residents:
            raise UnsupportedError("they are this model's alone")
        first = residents[0]
        if not all(is_of_bytes(each.key) and each.slabs == first.slabs for each in residents):
            raise UnsupportedError("a tensor was cast on the GPU, or lies in several slabs")
        sleepers = [
            SleepingTensor(
                each.offset, each.nbytes, self._gpu.known_as(each) or ReplicaKey(each.key, 0)
            )
            for each in residents
        ]
        if not isinstance(first, TensorInBlocks):
            slab = SleepingSlab(first.slabs[0].nbytes, sleepers)
            return SleepingMapping(mapping, [slab]), {slab: residents}
        blocks: dict[str, tuple[SleepingSlab, DeviceResident]] = {}
        for each in first.blocks:
            if each.key.digest not in blocks:
                tensors = [SleepingTensor(0, each.nbytes, ReplicaKey(each.key, 0))]
                blocks[each.key.digest] = SleepingSlab(each.slabs[0].nbytes, tensors), each
        slabs = [blocks[each.key.digest][0] for each in first.blocks]
        whole = sleepers[0].known, first.leaves
        return SleepingMapping(mapping, slabs, whole), {s: [block] for s, block in blocks.values()}

    def settle(self) -> list[str]:
        """Copy sleeping slabs that no model awake uses any more from the GPU to host memory.

        Returns the reasons why slabs could not be copied. A background thread calls this method
        again and again while slabs sleep on the GPU. If the manager of host memory has no room for
        a slab, or refuses its bytes, the slab is not tried again until the model has woken.
        """
        reasons = []
        with self._lock:
            waiting = self._waiting()
        if not waiting:
            return []
        self._reap()
        with self._lock:
            waiting = self._waiting()
            try:
                used = self._standby.used_awake(waiting)
            except Exception as error:  # noqa: BLE001  # nothing is lost: it is on the GPU
                return [self._not_copied(slab, error) for slab in waiting]
        for batch in batches_of(slab for slab in waiting if slab not in used):
            if self._waking.is_set():
                break  # it waits for one batch at most
            with self._lock:
                reasons += self._let_go([slab for slab in batch if slab.asleep and slab.held])
        with self._lock:
            self._backup.end()
        return reasons

    def _let_go(self, slabs: list[SleepingSlab]) -> list[str]:
        """Copy slabs to host memory and free them on the GPU; return the reasons of failures."""
        failed = self._backup.keep(slabs)
        for slab in slabs:
            if slab not in failed:
                self._standby.let_go(slab)
        return [self._not_copied(slab, error) for slab, error in failed.items()]

    def _waiting(self) -> list[SleepingSlab]:
        return [
            slab
            for each in self._mappings
            for slab in each.each_slab()
            if slab.held and not slab.given_up
        ]

    def _not_copied(self, slab: SleepingSlab, error: Exception) -> str:
        slab.given_up = isinstance(error, RefusedError) and error.code in _FINAL
        reason = f"{slab.nbytes} bytes sleep on the GPU: {_said(error)}"
        if reason != slab.reason:
            _log.warning("%s: %s", self._checkpoint, reason)
        slab.reason = reason
        return reason

    def _reap(self) -> None:
        """Unmap what models that are gone had mapped: until then its leases look like a user's.

        Nobody else would in a process that sleeps, for otherwise the next mapping does.
        """
        try:
            self._gpu.gpu.reap()
        except Exception as error:  # noqa: BLE001  # the thread that settles goes on
            _log.debug("%s: nothing was unmapped now: %s", self._checkpoint, str(error))

    def _watch_on(self) -> None:
        if self._watch is None and self._waiting():
            end = threading.Event()
            thread = threading.Thread(
                target=_settle_on,
                args=(weakref.ref(self), end),
                name="tensor-dedup-sleep",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:
                _log.warning("%s: what sleeps stays on the GPU: %s", self._checkpoint, str(error))
                return
            self._watch = end

    def _watch_off(self) -> None:
        if self._watch is not None:
            self._watch.set()
            self._watch = None

    def still_settling(self) -> bool:
        """Return whether the background thread that calls `settle` should go on.

        If no sleeping slab is left to copy to host memory, the result is False, and the thread must
        end.
        """
        with self._lock:
            if not self._waiting():
                self._watch_off()
            return self._watch is not None

    # Waking up.

    def wake(self) -> int:
        """Map every sleeping slab at its address again; return how many bytes were mapped.

        Returns 0 if no slab sleeps. After an error, some slabs are mapped and the others still
        sleep; call `wake` again.

        Raises:
            MemoryManagerError: The GPU has no room, or its driver refuses.
            OSError: The copies in host memory cannot be read.
        """
        done = 0
        self._waking.set()
        try:
            self._lock.acquire()
        finally:  # also where Ctrl-C ends the waiting
            self._waking.clear()
        try:
            self._watch_off()
            try:
                while self._mappings:
                    batch = self._next_to_wake()
                    found = self._memory_of(batch)
                    done += self._wake(batch, found)
            finally:
                self._watch_on()  # for what sleeps on
        finally:
            self._lock.release()
        return done

    def _next_to_wake(self) -> list[SleepingMapping]:
        """Return the last mappings: those whose missing slabs are one batch, or a single one.

        No tensor is missing in two of them, or it would be copied twice.
        """
        batch: list[SleepingMapping] = []
        missing: list[SleepingSlab] = []
        digests: set[str] = set()
        for sleeping in reversed(self._mappings):
            new = [slab for slab in sleeping.each_slab() if not slab.held]
            tensors = {each.digest for slab in new for each in slab.tensors}
            if batch and (tensors & digests or len([*batches_of([*missing, *new])]) > 1):
                break
            batch.append(sleeping)
            missing += new
            digests |= tensors
        return batch

    def _memory_of(
        self, mappings: Iterable[SleepingMapping]
    ) -> dict[SleepingSlab, list[DeviceResident]]:
        """Return the tensors in each slab of the mappings, which are copied if they must be."""
        slabs = [slab for each in mappings for slab in each.each_slab()]
        found = {slab: slab.held for slab in slabs if slab.held}
        for batch in batches_of(slab for slab in slabs if slab not in found):
            lent = self._standby.find_or_put(batch, self._backup.restore)
            found |= lent | self._made([slab for slab in batch if slab not in lent])
        return found

    def _wake(
        self, batch: Sequence[SleepingMapping], found: dict[SleepingSlab, list[DeviceResident]]
    ) -> int:
        """Map the last mappings again, in the order of `batch`; return how many bytes."""
        done = 0
        self._standby.say(_leases_of(batch), asleep=False)
        try:
            for sleeping in batch:
                try:
                    self._map(sleeping, found)
                finally:
                    if not sleeping.mapping.asleep:
                        self._mappings.pop()
                        for slab in sleeping.slabs:
                            slab.asleep = False
                        done += sleeping.mapping.nbytes
        finally:
            asleep = [each for each in batch if each.mapping.asleep]
            self._standby.say(_leases_of(asleep), asleep=True)
        return done

    def _map(
        self, sleeping: SleepingMapping, found: dict[SleepingSlab, list[DeviceResident]]
    ) -> None:
        residents = sleeping.residents(found)
        memory = [found[slab][0].slabs[0] for slab in sleeping.slabs]
        try:
            extents = [each.extent for each in memory]
            sleeping.mapping.wake(extents, memory[0].opener, tuple(memory))
        finally:
            if not sleeping.mapping.asleep:
                for known, resident in residents:
                    sleeping.mapping.hold(resident)
                    self._gpu.enter(known, resident)
                    self._standby.publish(resident)

    def _made(self, slabs: list[SleepingSlab]) -> dict[SleepingSlab, list[DeviceResident]]:
        """Make slabs of this process's own, unless it has the tensors in a slab laid out so."""
        gpu, alive = self._gpu.gpu, dict(self._gpu.alive())
        found: dict[SleepingSlab, list[DeviceResident]] = {}
        new: list[tuple[SleepingSlab, MappedExtent]] = []
        backend = VmmBackend(gpu.driver, gpu.device.uuid)
        for slab in slabs:
            there = [alive.get(e.known) or self._gpu.block(e.digest) for e in slab.tensors]
            if slab.is_of(there):
                found[slab] = [each for each in there if each is not None]
                continue
            memory = gpu.with_room(partial(backend.reserve, slab.nbytes))
            made = DeviceSlab(gpu, gpu.vmm(), memory, slab.nbytes)
            new.append((slab, made.extent))
            found[slab] = [DeviceResident(e.known.key, [made], e.offset) for e in slab.tensors]
        if new:
            self._backup.restore(new, gpu.vmm())
        return found


def _leases_of(mappings: Iterable[SleepingMapping]) -> list[Lease]:
    """Return the leases on the GPU memory of mappings that is still there."""
    return [lease for each in mappings for slab in each.each_slab() for lease in slab.leases]


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _settle_on(model: weakref.ref[SleepingModel], end: threading.Event) -> None:
    pause = _SETTLE_S
    while not end.wait(pause):
        found = model()
        if found is None:
            return
        pause = min(2 * pause, _RETRY_S) if found.settle() else _SETTLE_S
        if not found.still_settling():
            return
        del found
