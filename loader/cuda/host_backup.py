"""Copies of sleeping models' GPU tensors in host memory, where equal tensors are kept once.

An engine that sleeps unmaps its weights. They are copied to a memory manager of host memory. The
manager seals and hashes each copy, and refuses a copy that does not have the tensor's digest, so a
model that wakes gets the bytes that it had.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.sleeping_slabs import key_asleep
from tensor_dedup.loader.cuda.transfers import awaited, file_part
from tensor_dedup.memory_manager.client import NewLayer, NewTensor
from tensor_dedup.memory_manager.cuda.driver import Access
from tensor_dedup.memory_manager.errors import (
    BackendError,
    ManagerGoneError,
    MemoryManagerError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensor_dedup.loader.cuda.openers import MappedExtent, Opener
    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.loader.cuda.sleeping_slabs import SleepingSlab
    from tensor_dedup.memory_manager.client import (
        Client,
        Fill,
        Lease,
        Put,
        PutResult,
        TensorSlot,
    )

_log = logging.getLogger(__name__)
# A put is one memory file. The kernel lets one thread at a time allocate and write the pages of a
# file (about 2 GB/s each), so a batch is put as several files, each over a connection of its own.
_PUT_BYTES: Final = 16 * LEAF_BYTES
_MOST_PUTS: Final = 8


class _Source(NamedTuple):
    """Where the bytes of a tensor lie on the GPU."""

    slab: SleepingSlab
    offset: int
    nbytes: int


_Sources = dict[str, _Source]  # by digest


class HostBackup:
    """The host-memory copies of one sleeping model's tensors. For one thread at a time.

    `copied` is the number of bytes that this object copied to host memory. It does not include
    tensors that were there already, for example because another sleeping model has them.
    """

    def __init__(self, gpu: SharedGpu, host: Client, checkpoint: str) -> None:
        """Use `host`, a memory manager of host memory.

        Tensors are copied from `gpu`. `checkpoint` names the model to the manager.

        Raises:
            UnsupportedError: The manager lends memory of another kind.
        """
        if not host.welcome.hashes_itself or host.welcome.device:
            raise UnsupportedError(
                f"a manager of {host.welcome.device} cannot keep what sleeps; give one of host "
                "memory",
                device=host.welcome.device,
            )
        self.copied = 0
        self._gpu: Final = gpu
        self._host: Final = host
        self._checkpoint: Final = checkpoint
        self._others: Final[list[Client]] = []  # further connections to the manager

    def keep(self, slabs: Sequence[SleepingSlab]) -> dict[SleepingSlab, Exception]:
        """Copy the tensors of `slabs`, which are still on the GPU, to host memory.

        Sets `backup` of each slab to leases on the copies. Tensors that the manager has already are
        leased and not copied. The result has the error of each slab that could not be copied. For
        example, the manager has no room, does not answer, or refuses the bytes because they do not
        have the tensor's digest.
        """
        found: dict[str, Lease] = {}
        error: Exception | None = None
        try:
            self._find_or_copy(slabs, found)
        except Exception as raised:  # noqa: BLE001  # nothing is lost: it is on the GPU
            _drop_frames(raised)
            error = raised
        failed: dict[SleepingSlab, Exception] = {}
        for slab in slabs:
            if found.keys() >= slab.sizes().keys():
                slab.backup = {name: found[name] for name in slab.sizes()}
            elif len(slabs) > 1 and not isinstance(error, ManagerGoneError):
                # What is wrong with another is no reason to leave this one there.
                failed |= self.keep([slab])
            else:
                failed[slab] = error or BackendError("another process has been copying for long")
        if error is not None and not failed:
            _log.warning("%s: all was copied, after an error: %s", self._checkpoint, str(error))
        return failed

    def _find_or_copy(self, slabs: Sequence[SleepingSlab], found: dict[str, Lease]) -> None:
        """Add leases on the tensors of `slabs` to `found`, also on some of them after an error."""
        self._lease({name: n for slab in slabs for name, n in slab.sizes().items()}, found)
        missing: _Sources = {}
        for slab in slabs:
            for offset, name, nbytes in slab.places():
                if name not in found:
                    missing.setdefault(name, _Source(slab, offset, nbytes))
        if not missing:
            return
        results: list[PutResult] = []
        try:
            with self._readable([each.slab for each in missing.values()]) as addresses:
                self._put_all(missing, addresses, results)
        finally:
            for result in results:
                _drop_frames(result.error)
            self._take_over(results, {name: each.nbytes for name, each in missing.items()}, found)
        for result in results:
            if result.error is not None:  # among others: the bytes were not those of the digest
                raise result.error

    def _take_over(
        self, results: Sequence[PutResult], sizes: dict[str, int], found: dict[str, Lease]
    ) -> None:
        """Replace the leases of all puts by leases of the connection that stays."""
        layers = [layer for each in results for layer in each.layers.values()]
        self.copied += sum(e.nbytes for layer in layers if layer.written for e in layer.leases)
        try:
            self._lease(sizes, found)
        finally:
            for layer in layers:
                for lease in layer.leases:
                    lease.close()

    def _lease(self, sizes: dict[str, int], found: dict[str, Lease]) -> None:
        leases = self._host.lease(list(sizes), self._checkpoint)
        for (name, nbytes), lease in zip(sizes.items(), leases, strict=True):
            if lease is not None:
                if lease.nbytes != nbytes:
                    raise BackendError(f"{lease.nbytes} bytes are kept for {name} of {nbytes}")
                found[name] = lease

    @contextmanager
    def _readable(self, slabs: Sequence[SleepingSlab]) -> Iterator[dict[SleepingSlab, int]]:
        """Context manager: while it is active, slabs are mapped at the addresses that it yields."""
        slabs, opener = list(dict.fromkeys(slabs)), self._gpu.gpu.vmm()
        extents = [slab.held[0].slabs[0].extent for slab in slabs]
        with self._gpu.gpu.entered():
            address = opener.open(extents, Access.READ)
            try:
                starts = accumulate((each.nbytes for each in extents), initial=address)
                yield dict(zip(slabs, starts, strict=False))
            finally:
                try:
                    # A copy may go on after an error, and must not meet an unmapped page.
                    self._gpu.gpu.transfers.fence()
                finally:
                    opener.close(address, extents)

    def _put_all(
        self, sources: _Sources, addresses: dict[SleepingSlab, int], results: list[PutResult]
    ) -> None:
        """Put tensors into the manager's memory, and add the result of each put to `results`."""
        parts = _divided(sources)
        clients = self._connections(len(parts))
        if len(clients) == 1:
            results.append(self._put(self._host, sources, addresses))
            return
        with ThreadPoolExecutor(len(clients), "tensor-dedup-sleep") as pool:
            free = [*clients]  # as many as threads

            def put(part: _Sources) -> None:
                client = free.pop()
                try:
                    results.append(self._put(client, part, addresses))
                finally:
                    free.append(client)

            tasks = [pool.submit(put, part) for part in parts]
        for task in tasks:
            task.result()

    def _connections(self, wanted: int) -> list[Client]:
        with suppress(MemoryManagerError):  # then there are fewer
            while len(self._others) + 1 < wanted:
                self._others.append(self._host.beside())
        return [self._host, *self._others[: wanted - 1]]

    def _put(
        self, client: Client, sources: _Sources, addresses: dict[SleepingSlab, int]
    ) -> PutResult:
        layers = {
            key_asleep(name): NewLayer(b"", (NewTensor(each.nbytes, name),))
            for name, each in sources.items()
        }
        places = {
            key_asleep(name): (addresses[each.slab] + each.offset, each.nbytes)
            for name, each in sources.items()
        }
        return client.put(layers, self._checkpoint, fill=self._reader(places))

    def _reader(self, places: dict[str, tuple[int, int]]) -> Fill:
        """Return a function that fills a put; `places` has address and size of each tensor."""
        transfers = self._gpu.gpu.transfers

        def fill(put: Put, slots: Sequence[TensorSlot]) -> Sequence[str]:
            with awaited(put.progress) as begun:
                for index, (key, _) in enumerate(slots):
                    begun.append(transfers.download(*places[key], partial(put.write, index)))
            return ()

        return fill

    def restore(self, slabs: Sequence[tuple[SleepingSlab, MappedExtent]], opener: Opener) -> None:
        """Copy the tensors of slabs from host memory to their offsets in new GPU memory.

        Each slab comes with its new memory, which `opener` maps. This waits once, for the copies of
        all slabs.

        Raises:
            BackendError: The GPU's driver refuses.
            OSError: The copies in host memory cannot be read.
        """
        transfers, extents = self._gpu.gpu.transfers, [extent for _, extent in slabs]
        with (
            self._gpu.gpu.writable([extents], opener, transfers.fence) as [address],
            awaited() as begun,
        ):
            for slab, extent in slabs:
                for offset, name, nbytes in slab.places():
                    lease = slab.backup[name]
                    # Read, not mapped: a fresh mapping costs a page fault for each page.
                    part = file_part(lease.slab.fileno, lease.offset, nbytes)
                    begun.append(transfers.upload(address + offset, nbytes, [part], hashed=False))
                address += extent.nbytes

    def end(self) -> None:
        """Close the further connections to the manager; later calls open them again."""
        while self._others:
            self._others.pop().close()


def _drop_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error of another thread.

    The error, that thread's future and these frames refer to each other, and the frames to leases.
    They would be held until a garbage collection, of which a process that sleeps makes none.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _divided(sources: _Sources) -> list[_Sources]:
    """Return the tensors in at most _MOST_PUTS parts of similar size, about _PUT_BYTES or more."""
    total = sum(each.nbytes for each in sources.values())
    most = max(_PUT_BYTES, -(-total // _MOST_PUTS))
    parts: list[_Sources] = []
    size = most
    for name, each in sources.items():
        if size >= most and len(parts) < _MOST_PUTS:
            parts.append({})
            size = 0
        parts[-1][name] = each
        size += each.nbytes
    return parts
