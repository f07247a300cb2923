"""Copies of sleeping models' GPU tensors in host memory, where equal tensors are kept once.

An engine that sleeps unmaps its weights. They are copied to a memory manager of host memory. The
manager seals and hashes each copy, and refuses a copy that does not have the tensor's digest, so a
model that wakes gets the bytes that it had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.sleeping_slabs import key_asleep
from tensor_dedup.loader.cuda.tensors import CUDA
from tensor_dedup.loader.cuda.upload import Uploader
from tensor_dedup.loader.residents.lent import LentResident
from tensor_dedup.memory_manager.client import NewLayer, NewTensor
from tensor_dedup.memory_manager.cuda.driver import Access
from tensor_dedup.memory_manager.errors import BackendError
from tensor_dedup.types import ResidentKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.loader.cuda.openers import MappedExtent, Opener
    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.loader.cuda.sleeping_slabs import SleepingSlab
    from tensor_dedup.memory_manager.client import Client, Fill, Put, TensorSlot

_CHUNK_BYTES: Final = 8 * LEAF_BYTES


class HostBackup:
    """The host-memory copies of one sleeping model's tensors. For one thread at a time.

    `copied` is the number of bytes that this object copied to host memory. It does not include
    tensors that were there already, for example because another sleeping model has them. Transfer
    buffers are reused until `free`.
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
        self._buffer: torch.Tensor | None = None  # of what goes there
        self._uploader: Uploader | None = None  # of what comes back

    def keep(self, slab: SleepingSlab) -> None:
        """Copy the tensors of `slab`, which is still on the GPU, to host memory.

        Sets `slab.backup` to leases on the copies. Tensors that the manager has already are leased
        and not copied.

        Raises:
            MemoryManagerError: The manager has no room, does not answer, or refuses the bytes
                because they do not have the tensor's digest.
        """
        sizes = slab.sizes()
        leases = self._host.lease(list(sizes), self._checkpoint)
        found = {name: lease for name, lease in zip(sizes, leases, strict=True) if lease}
        missing = {
            key_asleep(name): NewLayer(b"", (NewTensor(nbytes, name),))
            for name, nbytes in sizes.items()
            if name not in found
        }
        if missing:
            result = self._host.put(missing, self._checkpoint, fill=self._reader(slab))
            for name in sizes:
                if name not in found and key_asleep(name) in result.layers:
                    [found[name]] = result.layers[key_asleep(name)].leases
                    self.copied += sizes[name]
            if len(found) < len(sizes):
                # Bytes that were not those of the digest are among the errors.
                raise result.error or BackendError("another process has been copying them for long")
        for name, lease in found.items():
            if (lease.digest, lease.nbytes) != (name, sizes[name]):
                raise BackendError(f"{lease.nbytes} bytes are kept for {name} of {sizes[name]}")
        slab.backup = found

    def _reader(self, slab: SleepingSlab) -> Fill:
        places = {key_asleep(each.digest): each for each in slab.tensors}
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

    def restore(self, slab: SleepingSlab, extent: MappedExtent, opener: Opener) -> None:
        """Copy the tensors of `slab` from host memory to their offsets in new GPU memory.

        `extent` is the new memory, and `opener` maps it.

        Raises:
            BackendError: The GPU's driver refuses.
            SharedMemoryError: The copies in host memory cannot be mapped.
        """
        if self._uploader is None:
            self._uploader = Uploader(self._gpu.gpu.device.ordinal, self._gpu.kind)
        uploader = self._uploader

        def write(address: int) -> None:
            for offset, name, nbytes in slab.places():
                key = ResidentKey("U8", (nbytes,), (1,), name)
                kept = LentResident(key, slab.backup[name]).map(writable=False)
                uploader.sender(kept)(address + offset)

        self._gpu.gpu.fill(extent, opener, write)

    def free(self) -> None:
        """Free the transfer buffers; later calls allocate them again."""
        self._buffer = None
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            uploader.close()
