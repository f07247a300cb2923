"""Uploads to a GPU through a few page-locked buffers, with optional hashing.

Page-locked memory is slow to allocate and fast to copy from, so the buffers are allocated once and
reused. While one buffer is being filled, the others are hashed and copied to the GPU.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from tensor_dedup.digest import LEAF_BYTES, combine, submit_leaves
from tensor_dedup.errors import ChangedFileError
from tensor_dedup.loader.cuda.tensors import CUDA, tensor_at
from tensor_dedup.loader.residents.slab import bytes_at

if TYPE_CHECKING:
    from concurrent.futures import Future

BUFFER_BYTES: Final = 8 * LEAF_BYTES
BUFFERS: Final = 4
Fill = Callable[[memoryview, int], None]  # puts what begins at an offset into a buffer


class _Buffer:
    """Page-locked host memory, with the copy and the hashing that still read it."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.bytes = self.tensor.numpy().data
        self.hashed: Future[list[bytes]] | None = None
        self.copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until nothing reads the buffer any more."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.hashed is not None:
            self.hashed.result()


class Uploader:
    """A context manager that uploads file ranges and host tensors to a GPU. For one thread.

    `kind` and `ordinal` are the DLPack device type and number of the GPU. Leaving the context frees
    the buffers.
    """

    def __init__(
        self, ordinal: int, kind: int = CUDA, nbytes: int = BUFFER_BYTES, buffers: int = BUFFERS
    ) -> None:
        """Allocate `buffers` buffers of `nbytes` bytes each.

        `nbytes` must be a multiple of LEAF_BYTES.
        """
        self._device = (kind, ordinal)
        self._nbytes = nbytes
        pinned = kind == CUDA
        make: Any = torch.cuda.Stream  # which has no types
        self._stream = make(ordinal) if pinned else None
        self._free = [_Buffer(nbytes, pinned=pinned) for _ in range(buffers)]

    def writer(
        self, fd: int, start: int, nbytes: int, *, hashed: bool = True
    ) -> Callable[[int], str]:
        """Return a function that uploads a range of the open file `fd` to a GPU address.

        The range has `nbytes` bytes from `start` on. The function returns the digest of the range,
        or "" with `hashed=False`. It raises ChangedFileError if the file is too short, and OSError
        if the file cannot be read. The GPU may still be copying when the function returns;
        `Gpu.fill` waits for that.
        """

        return self._writer(lambda into, at: _read(fd, start + at, into), nbytes, hashed=hashed)

    def sender(self, tensor: torch.Tensor) -> Callable[[int], str]:
        """Return a function that uploads `tensor`, which lies in host memory, to a GPU address.

        The function keeps the tensor alive, does not hash it, and returns "". The GPU may still be
        copying when the function returns; `Gpu.fill` waits for that.
        """
        source = memoryview(bytes_at(tensor.data_ptr(), tensor.nbytes, tensor)).cast("B")

        def fill(into: memoryview, at: int) -> None:
            into[:] = source[at : at + len(into)]

        return self._writer(fill, tensor.nbytes, hashed=False)

    def _writer(self, fill: Fill, nbytes: int, *, hashed: bool) -> Callable[[int], str]:
        def write(address: int) -> str:
            geometry = (torch.uint8, (nbytes,), (1,))
            target = tensor_at(address, geometry, self._device, None)
            leaves = []
            for at in range(0, nbytes, self._nbytes):
                size = min(self._nbytes, nbytes - at)
                sent = self._send(fill, at, target[at : at + size], hashed=hashed)
                leaves += [] if sent is None else [sent]
            if not hashed:
                return ""
            return combine(nbytes, [leaf for part in leaves for leaf in part.result()])

        return write

    def _send(
        self, fill: Fill, at: int, target: torch.Tensor, *, hashed: bool
    ) -> "Future[list[bytes]] | None":
        buffer = self._free.pop(0)
        self._free.append(buffer)  # the one that was used longest ago comes next
        buffer.wait()
        size = target.numel()
        fill(buffer.bytes[:size], at)
        hashing = submit_leaves(buffer.bytes[:size]) if hashed else None
        buffer.hashed = hashing
        if self._stream is None:
            target.copy_(buffer.tensor[:size])
        else:
            with torch.cuda.stream(self._stream):
                target.copy_(buffer.tensor[:size], non_blocking=True)
                buffer.copied = self._stream.record_event()
        return hashing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the buffers, after the copies and hashes that still read them have ended.

        Closing twice has no effect.
        """
        for buffer in self._free:
            buffer.wait()
        self._free.clear()


def _read(fd: int, start: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], start + done)
        if not count:
            raise ChangedFileError(
                f"the file ends at byte {start + done}; it was changed, load again",
                offset=start + done,
            )
        done += count
