"""What is to be resident on a GPU, and who writes it."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.types import ResidentKey


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
        """The key, when `write` has returned this."""
        return replace(self.key, digest=digest) if digest else self.key


def copy_of(tensor: torch.Tensor, gpu: Gpu) -> Callable[[int], None]:
    """A writer of a gap-free tensor's bytes, from the host or that GPU. It holds the tensor."""
    nbytes = tensor.nbytes

    def write(address: int) -> None:
        copy = gpu.driver.copy_in if tensor.device.type == "cpu" else gpu.driver.copy
        copy(address, tensor.data_ptr(), nbytes)

    return write


def bytes_on_host(gpu: Gpu, address: int, nbytes: int) -> bytearray:
    """A copy of device memory, to hash or to compare. DeviceError."""
    found = bytearray(nbytes)
    buffer = (ctypes.c_char * nbytes).from_buffer(found)
    with gpu.entered():
        gpu.driver.copy_out(ctypes.addressof(buffer), address, nbytes)
    return found
