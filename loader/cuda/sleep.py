"""A model's weights while it sleeps: unmapped, and in host memory where nobody awake uses them.

The tensors of a sleeping model are held by leases all the time, so none is lost, whoever dies:

1. New leases on everything, which say that their holder sleeps. The old ones end with the mappings.
2. A slab that nobody awake uses is copied to a memory manager of host memory, which has one of each
   tensor for all that sleep, and hashes what it got: bytes that are not those of the digest are
   refused. Then the leases on the GPU's memory end, and the manager evicts it.
3. Waking takes the slab where it is, or one of the same layout that somebody else has made, or
   makes it from the host's memory, and maps it at the same address.

What fails to fall asleep stays as it was and is reported; copying is tried again where that may
help. What fails to wake sleeps on.
"""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.blocks import TensorInBlocks
from tensor_dedup.loader.cuda.manager_residents import DeviceMemory, device_session
from tensor_dedup.loader.cuda.openers import MappedExtent
from tensor_dedup.loader.cuda.residents import DeviceResident, DeviceSlab
from tensor_dedup.loader.cuda.tensors import CUDA
from tensor_dedup.loader.cuda.upload import Uploader
from tensor_dedup.loader.residents.lent import LentResident
from tensor_dedup.loader.residents.resident import ReplicaKey, is_of_bytes
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.client import Lease, NewLayer, NewTensor
from tensor_dedup.memory_manager.cuda.driver import Access
from tensor_dedup.memory_manager.errors import BackendError, MemoryManagerError, RefusedError
from tensor_dedup.types import ResidentKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tensor_dedup.loader.cuda.gpu import DeviceMapping
    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.memory_manager.client import Client, Fill, Put, TensorSlot

_log = logging.getLogger(__name__)
_CHUNK_BYTES: Final = 8 * LEAF_BYTES
_SETTLE_S: Final = 1.0  # so long may memory stay on the GPU after the last user awake has gone
_RETRY_S: Final = 30.0  # so long at most, where copying it fails again and again
_FINAL: Final = ("mismatch", "no_room")  # refusals that the next try would meet, too


class _Sleeper(NamedTuple):
    """One tensor of a slab: where it lies, and what it is known as."""

    offset: int
    nbytes: int
    known: ReplicaKey

    @property
    def digest(self) -> str:
        return self.known.key.digest


@dataclass(eq=False)
class _SleepingSlab:
    """The tensors of one slab of `nbytes` bytes, in the order of their offsets, or a block.

    They are on the GPU as long as `held` is not empty, and in host memory where `backup` has a
    lease for each digest; one of the two holds.
    """

    nbytes: int
    tensors: list[_Sleeper]
    held: list[DeviceResident] = field(default_factory=list)
    backup: dict[str, Lease] = field(default_factory=dict)
    given_up: bool = False  # copying it has failed for good: it stays on the GPU
    reason: str = ""  # why copying it has failed last
    asleep: bool = True

    @property
    def leases(self) -> list[Lease]:
        return [each.lease for each in self.held if isinstance(each.lease, Lease)]

    def sizes(self) -> dict[str, int]:
        """The size of each content in bytes."""
        return {each.digest: each.nbytes for each in self.tensors}

    def places(self) -> list[tuple[int, str, int]]:
        """Offset, digest and size of each content at each place, in order."""
        return sorted({(each.offset, each.digest, each.nbytes) for each in self.tensors})


@dataclass(eq=False)
class _SleepingMapping:
    """One mapping and what is to be mapped there: a slab, or the blocks of one tensor, in order.

    A block that occurs twice in the tensor is one object twice. `tensor` is what the blocks are,
    with its leaf digests.
    """

    mapping: DeviceMapping
    slabs: list[_SleepingSlab]
    tensor: tuple[ReplicaKey, tuple[bytes, ...]] | None = None

    def each_slab(self) -> list[_SleepingSlab]:
        """Return every slab once."""
        return list(dict.fromkeys(self.slabs))

    def residents(
        self, found: dict[_SleepingSlab, list[DeviceResident]]
    ) -> list[tuple[ReplicaKey, DeviceResident]]:
        """Return the tensors that are seen through the mapping, of slabs that were found."""
        if self.tensor is None:
            [slab] = self.slabs
            return [
                (each.known, resident)
                for each, resident in zip(slab.tensors, found[slab], strict=True)
            ]
        known, leaves = self.tensor
        blocks = [block for slab in self.slabs for block in found[slab]]
        return [(known, TensorInBlocks(known.key, blocks, leaves))]


@dataclass(slots=True)
class SleepReport:
    """What sleeping did, in bytes of slabs: `unmapped` here; of these `copied` to host memory.

    The others are on the GPU, because somebody awake uses them, or for one of the `reasons`, which
    also say why something is still mapped.
    """

    unmapped: int = 0
    copied: int = 0
    reasons: list[str] = field(default_factory=list)


class SleepingModel:
    """The shared weights of one model on one GPU, which sleep and wake. Safe from any thread.

    Nobody may use the model from `sleep` until `wake` has returned. Its tensors keep their
    addresses, so captured graphs stay valid.
    """

    def __init__(
        self, gpu: SharedGpu, host: Client, device: Client | None = None, checkpoint: str = ""
    ) -> None:
        """`host` is the manager of host memory that all sleepers share, `device` that of the GPU.

        Raises:
            UnsupportedError: The managers lend other memory than that.
        """
        if not host.welcome.hashes_itself or host.welcome.device:
            raise UnsupportedError(
                f"a manager of {host.welcome.device} cannot keep what sleeps; give one of host "
                "memory",
                device=host.welcome.device,
            )
        self._gpu: Final = gpu
        self._host: Final = host
        self._device: Final = device
        self._memory: Final = None if device is None else DeviceMemory(gpu.gpu, device)
        self._session: Final = (
            None if device is None else device_session(device, gpu.gpu, checkpoint)
        )
        self._checkpoint: Final = checkpoint
        self._mappings: list[_SleepingMapping] = []
        self._uploader: Uploader | None = None  # while it wakes
        self._buffer: torch.Tensor | None = None  # while it settles
        self._copied = 0
        self._lock = threading.RLock()
        self._watch: threading.Event | None = None  # ends the thread that settles

    @property
    def asleep(self) -> int:
        """The bytes of slabs that are unmapped."""
        with self._lock:
            return sum(each.mapping.nbytes for each in self._mappings)

    # Falling asleep.

    def sleep(self, tensors: Iterable[torch.Tensor]) -> SleepReport:
        """Unmap every slab behind these tensors; what nobody awake uses goes to host memory.

        Waits for all work of the GPU. A tensor that shares nothing is left alone. Whatever fails is
        not raised: that part stays mapped, or on the GPU, and the report says why.
        """
        report = SleepReport()
        with self._lock:
            behind = (self._gpu.mapping_behind(tensor) for tensor in tensors)
            awake = dict.fromkeys(each for each in behind if each is not None and not each.asleep)
            for mapping in awake:
                try:
                    sleeping = self._stood_by(mapping)
                    try:
                        mapping.sleep()
                    finally:
                        if mapping.asleep:
                            self._mappings.append(sleeping)
                            report.unmapped += mapping.nbytes
                except Exception as error:  # noqa: BLE001  # or the others would stay unmapped
                    report.reasons.append(f"{mapping.nbytes} bytes: {_said(error)}")
            before = self._copied
            report.reasons += self.settle()
            report.copied = self._copied - before
            self._watch_on()
        return report

    def _stood_by(self, mapping: DeviceMapping) -> _SleepingMapping:
        """Hold a mapping's memory otherwise than by its own residents."""
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
            _Sleeper(each.offset, each.nbytes, self._gpu.known_as(each) or ReplicaKey(each.key, 0))
            for each in residents
        ]
        if not isinstance(first, TensorInBlocks):
            slab = _SleepingSlab(first.slabs[0].nbytes, sleepers)
            self._hold({slab: residents})
            return _SleepingMapping(mapping, [slab])
        blocks: dict[str, tuple[_SleepingSlab, DeviceResident]] = {}
        for each in first.blocks:
            if each.key.digest not in blocks:
                tensors = [_Sleeper(0, each.nbytes, ReplicaKey(each.key, 0))]
                blocks[each.key.digest] = _SleepingSlab(each.slabs[0].nbytes, tensors), each
        self._hold({slab: [block] for slab, block in blocks.values()})
        slabs = [blocks[each.key.digest][0] for each in first.blocks]
        return _SleepingMapping(mapping, slabs, (sleepers[0].known, first.leaves))

    def _hold(self, residents: dict[_SleepingSlab, list[DeviceResident]]) -> None:
        """Hold the memory of these slabs by leases that say that their holder sleeps."""
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

    def _lent(self, slab: _SleepingSlab) -> list[DeviceResident] | None:
        """Lease the tensors where they all lie in one slab as they did in this one, or None."""
        assert self._device is not None
        leases = self._device.lease([each.digest for each in slab.tensors], self._checkpoint)
        return self._as_laid_out(slab, leases)

    def _as_laid_out(
        self, slab: _SleepingSlab, leases: Sequence[Lease | None]
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

    def settle(self) -> list[str]:
        """Copy to host memory what nobody awake uses by now; return why something was not copied.

        `sleep` calls it, and a thread every second, or every 30 s where that fails, while something
        sleeps on the GPU. What the manager has no room for, or refuses as other bytes than those of
        the digest, is not tried again before the model has woken.
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
                used = self._used_awake(waiting)
            except Exception as error:  # noqa: BLE001  # nothing is lost: it is on the GPU
                return [self._not_copied(slab, error) for slab in waiting]
        for slab in waiting:
            with self._lock:  # so that `wake` waits for one slab at most
                if slab.asleep and slab.held and slab not in used:
                    try:
                        self._copy_out(slab)
                    except Exception as error:  # noqa: BLE001  # as above
                        reasons.append(self._not_copied(slab, error))
        with self._lock:
            self._buffer = None
        return reasons

    def _waiting(self) -> list[_SleepingSlab]:
        return [
            slab
            for each in self._mappings
            for slab in each.each_slab()
            if slab.held and not slab.given_up
        ]

    def _not_copied(self, slab: _SleepingSlab, error: Exception) -> str:
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

    def _used_awake(self, slabs: Sequence[_SleepingSlab]) -> set[_SleepingSlab]:
        """Return those of these slabs that somebody awake uses, or may use."""
        mapped = self._gpu.gpu.mapped()
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

    def _copy_out(self, slab: _SleepingSlab) -> None:
        """Put the tensors into host memory, and let go of the GPU's."""
        sizes = slab.sizes()
        leases = self._host.lease(list(sizes), self._checkpoint)
        found = {name: lease for name, lease in zip(sizes, leases, strict=True) if lease}
        missing = {
            _key(name): NewLayer(b"", (NewTensor(nbytes, name),))
            for name, nbytes in sizes.items()
            if name not in found
        }
        if missing:
            result = self._host.put(missing, self._checkpoint, fill=self._reader(slab))
            for name in sizes:
                if name not in found and _key(name) in result.layers:
                    [found[name]] = result.layers[_key(name)].leases
                    self._copied += sizes[name]
            if len(found) < len(sizes):
                # Bytes that were not those of the digest are among the errors.
                raise result.error or BackendError("another process has been copying them for long")
        for name, lease in found.items():
            if (lease.digest, lease.nbytes) != (name, sizes[name]):
                raise BackendError(f"{lease.nbytes} bytes are kept for {name} of {sizes[name]}")
        slab.backup = found
        self._let_go(slab)

    def _reader(self, slab: _SleepingSlab) -> Fill:
        places = {_key(each.digest): each for each in slab.tensors}
        gpu, memory = self._gpu.gpu, slab.held[0].slabs[0]

        def fill(put: Put, slots: Sequence[TensorSlot]) -> Sequence[str]:
            if self._buffer is None:  # page-locked memory is slow to allocate
                pinned = self._gpu.kind == CUDA
                self._buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)
            buffer = self._buffer
            view = buffer.numpy().data
            with gpu.entered():
                address = memory.opener.open([memory.extent], Access.READ)
                try:
                    for index, (key, _) in enumerate(slots):
                        each = places[key]
                        for at in range(0, each.nbytes, _CHUNK_BYTES):
                            size = min(_CHUNK_BYTES, each.nbytes - at)
                            source = address + each.offset + at
                            gpu.driver.copy_out(buffer.data_ptr(), source, size)
                            put.write(index, view[:size], at)
                            put.progress()
                finally:
                    memory.opener.close(address, [memory.extent])
            return ()

        return fill

    def _let_go(self, slab: _SleepingSlab) -> None:
        """End the leases on the GPU's memory, which is then nobody's, and is evicted."""
        leases, slab.held = slab.leases, []
        for lease in leases:
            lease.close()
        if leases and self._device is not None:
            try:
                self._device.evict(leases[0].digest)
            except MemoryManagerError as error:
                _log.debug("%s: not evicted: %s", self._checkpoint, str(error))

    def _watch_on(self) -> None:
        if self._watch is None and self._may_settle():
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

    def _may_settle(self) -> bool:
        return bool(self._waiting())

    def still_settling(self) -> bool:
        """Return whether something may have to go to host memory later; if not, end the thread."""
        with self._lock:
            if not self._may_settle():
                self._watch_off()
            return self._watch is not None

    # Waking up.

    def wake(self) -> int:
        """Map everything at its address again; return the bytes of slabs.

        Raises:
            MemoryManagerError: The GPU has no room, or its driver refuses.
            SharedMemoryError: The system refuses to map what host memory has kept.

        What is mapped by then stays mapped, the rest sleeps on; call it again.
        """
        done = 0
        with self._lock:
            self._watch_off()
            try:
                while self._mappings:
                    sleeping = self._mappings[-1]
                    try:
                        self._wake(sleeping)
                    finally:
                        if not sleeping.mapping.asleep:
                            self._mappings.pop()
                            for slab in sleeping.slabs:
                                slab.asleep = False
                            done += sleeping.mapping.nbytes
            finally:
                uploader, self._uploader = self._uploader, None
                self._watch_on()  # for what sleeps on
                if uploader is not None:
                    uploader.close()
        return done

    def _wake(self, sleeping: _SleepingMapping) -> None:
        found = {slab: slab.held or self._lent_or_made(slab) for slab in sleeping.each_slab()}
        residents = sleeping.residents(found)
        memory = [found[slab][0].slabs[0] for slab in sleeping.slabs]
        leases = [lease for slab in sleeping.each_slab() for lease in slab.leases]
        self._say_asleep(leases, asleep=False)
        try:
            extents = [each.extent for each in memory]
            sleeping.mapping.wake(extents, memory[0].opener, tuple(memory))
        finally:
            if sleeping.mapping.asleep:
                self._say_asleep(leases, asleep=True)
            else:
                for known, resident in residents:
                    sleeping.mapping.hold(resident)
                    self._gpu.enter(known, resident)
                    self._publish(resident)

    def _publish(self, resident: DeviceResident) -> None:
        """Have others find a tensor in blocks by its digest: its record went with its memory."""
        if self._session is None or not isinstance(resident, TensorInBlocks):
            return
        try:
            self._session.publish_parts("", resident)
        except MemoryManagerError as error:
            _log.debug("%s: not found as a whole: %s", self._checkpoint, str(error))

    def _say_asleep(self, leases: Sequence[Lease], *, asleep: bool) -> None:
        if not leases or self._device is None:
            return
        try:
            self._device.stand_by(leases, asleep=asleep)
        except MemoryManagerError as error:
            # It only keeps others from sparing themselves a copy.
            _log.debug("%s: the manager was not told: %s", self._checkpoint, str(error))

    def _lent_or_made(self, slab: _SleepingSlab) -> list[DeviceResident]:
        """Return the tensors in a slab laid out as theirs was: somebody else's, or a new one."""
        if self._memory is not None:
            try:
                found = self._lent(slab) or self._put(slab)
            except MemoryManagerError as error:
                _log.debug("%s: waking without the manager: %s", self._checkpoint, str(error))
                found = None
            if found is not None:
                return found
        return self._made(slab)

    def _put(self, slab: _SleepingSlab) -> list[DeviceResident] | None:
        """Put the slab into the manager's memory for all who wake, or return None."""
        assert self._device is not None
        assert self._memory is not None
        memory, places = self._memory, slab.places()
        layers = {_key(name): NewLayer(b"", (NewTensor(n, name),)) for _, name, n in places}
        resident = self._device.lease([name for _, name, _ in places])
        if len(layers) < len(places) or any(resident):
            return None

        def fill(put: Put, slots: Sequence[TensorSlot]) -> Sequence[str]:
            fd, nbytes, offsets = put.place
            wanted = [offset for offset, _, _ in places]
            if nbytes != slab.nbytes or list(offsets) != wanted or len(slots) != len(places):
                raise BackendError("a manager lays them out otherwise")
            self._fill(slab, MappedExtent(fd, nbytes, 0), memory)
            put.progress()
            return ()

        result = self._device.put(layers, self._checkpoint, fill=fill)
        leases = [
            result.layers[_key(each.digest)].leases[0]
            if _key(each.digest) in result.layers
            else None
            for each in slab.tensors
        ]
        return self._as_laid_out(slab, leases)

    def _made(self, slab: _SleepingSlab) -> list[DeviceResident]:
        """Make a slab of this process's own, unless it has that block."""
        gpu = self._gpu.gpu
        first, *others = slab.tensors
        there = self._gpu.block(first.digest)
        if (
            there is not None
            and not others
            and there.key == first.known.key
            and there.slabs[0].nbytes == slab.nbytes  # a manager's may be larger
        ):
            return [there]
        backend = VmmBackend(gpu.driver, gpu.device.uuid)
        memory = gpu.with_room(lambda: backend.reserve(slab.nbytes))
        made = DeviceSlab(gpu, gpu.vmm(), memory, slab.nbytes)
        self._fill(slab, made.extent, made)
        return [DeviceResident(each.known.key, [made], each.offset) for each in slab.tensors]

    def _fill(
        self, slab: _SleepingSlab, extent: MappedExtent, memory: DeviceMemory | DeviceSlab
    ) -> None:
        """Write the tensors from host memory, which is sealed and was hashed, to their places."""
        if self._uploader is None:
            self._uploader = Uploader(self._gpu.gpu.device.ordinal, self._gpu.kind)
        uploader = self._uploader

        def write(address: int) -> None:
            for offset, name, nbytes in slab.places():
                key = ResidentKey("U8", (nbytes,), (1,), name)
                kept = LentResident(key, slab.backup[name]).map(writable=False)
                uploader.sender(kept)(address + offset)

        self._gpu.gpu.fill(extent, memory.opener, write)


def _key(digest: str) -> str:
    return f"asleep:{digest}"


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
