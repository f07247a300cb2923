"""The torch devices whose memory can be shared, and the reasons why other memory cannot."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.shared import SharedGpu
from tensor_dedup.loader.cuda.tensors import CUDA
from tensor_dedup.loader.residents.mappings import DEVICE_MAPPINGS
from tensor_dedup.memory_manager.cuda.nvidia import NvidiaDriver
from tensor_dedup.memory_manager.errors import BackendError

if TYPE_CHECKING:
    from tensor_dedup.loader.residents.resident import ReplicaKey

Open = Callable[[torch.device], SharedGpu]
_T = TypeVar("_T")


def _open_cuda(device: torch.device) -> SharedGpu:
    """Open an NVIDIA GPU.

    Raises:
        UnsupportedError: This torch sees no CUDA device.
        DeviceError: The driver cannot share the memory of this GPU.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise UnsupportedError("this torch is not built for CUDA, or sees no GPU")
    ask: Any = torch.cuda.get_device_properties  # without types
    # By UUID: the driver's numbers are torch's only as long as nobody changes the environment.
    gpu = Gpu(NvidiaDriver(), f"GPU-{ask(device).uuid}", partial(_let_go, device))
    return SharedGpu(gpu, device, CUDA)


def _let_go(device: torch.device) -> bool:
    """Let torch's allocator release what it caches of a GPU; return whether there was any."""
    if torch.cuda.is_current_stream_capturing():
        return False  # what frees memory ends the capture
    before = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()  # of what it keeps, parts of blocks that are in use stay
    return torch.cuda.memory_reserved(device) < before


class Devices:
    """The GPUs of this process by torch device, each opened at first use. Safe from any thread.

    A forked child starts with no GPU open, because CUDA does not work across a fork.
    """

    def __init__(self) -> None:
        self._openers: dict[str, Open] = {"cuda": _open_cuda}
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Forget the opened GPUs and the reasons why others could not be opened."""
        self._found: dict[torch.device, SharedGpu] = {}
        self._reasons: dict[torch.device, str] = {}
        self._lock = threading.Lock()

    @contextmanager
    def replaced(self, kind: str, opener: Open) -> Iterator[None]:
        """Context manager: while it is active, `opener` opens devices of type `kind` ("cuda").

        GPUs that are open are forgotten on entry and on exit. For tests.
        """
        before = self._openers.get(kind)
        self._openers[kind] = opener
        self.reset()
        try:
            yield
        finally:
            self._openers.pop(kind)
            if before is not None:
                self._openers[kind] = before
            self.reset()

    def at(self, device: torch.device) -> SharedGpu | None:
        """Return the GPU of the torch device `device`, opened now if necessary.

        Returns None if the memory of the device cannot be shared. For a device of type "cuda",
        `why_not` then returns the reason.
        """
        opener = self._openers.get(device.type)
        if opener is None:
            return None
        device = _numbered(device)
        with self._lock:
            if device not in self._found and device not in self._reasons:
                try:
                    self._found[device] = opener(device)
                except (BackendError, UnsupportedError) as error:
                    self._reasons[device] = str(error)
            return self._found.get(device)

    def reasons(self) -> dict[str, str]:
        """Return the reasons why the memory of devices is not shared, by device name.

        Only devices for which `at` was called are included.
        """
        return {str(device): reason for device, reason in list(self._reasons.items())}

    def why_not(self, device: torch.device) -> str | None:
        """Return why the memory of `device` is not shared.

        Returns None in these cases:

        - The memory is shared.
        - `at` has not been called for the device yet.
        - Devices of this type are never shared, for example "cpu".
        """
        return self._reasons.get(_numbered(device))

    def opened(self) -> list[SharedGpu]:
        """Return the GPUs that are open."""
        return list(self._found.values())

    def known(self, tensor: torch.Tensor) -> ReplicaKey | None:
        """Return the replica key of `tensor` if it is a shared resident on a GPU, or None."""
        if not len(DEVICE_MAPPINGS):
            return None
        return next((k for gpu in self.opened() if (k := gpu.known(tensor)) is not None), None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` begins in shared GPU memory, which must not be written to."""
        return (
            len(DEVICE_MAPPINGS) > 0
            and tensor.layout is torch.strided
            and not tensor.is_meta
            and tensor.nbytes > 0
            and DEVICE_MAPPINGS.holds(tensor.data_ptr())
        )


def _numbered(device: torch.device) -> torch.device:
    index: int | None = device.index  # None for "cuda" alone, whatever the annotation says
    if index is not None or device.type == "cpu":
        return device
    # "cuda" alone is the current one.
    here = device.type == "cuda" and torch.cuda.is_available()
    current = torch.cuda.current_device() if here else 0
    return torch.device(device.type, current)


DEVICES: Final = Devices()


def with_room(device: torch.device, do: Callable[[], _T]) -> _T:
    """Call `do`, which allocates memory of `device` through torch, and return its result.

    If `do` raises torch.OutOfMemoryError, unused memory is freed, such as the shared memory of
    models that are gone. Then `do` is called once more. If nothing could be freed, the error is
    passed on.
    """
    gpu = DEVICES.at(device)
    return do() if gpu is None else gpu.gpu.with_room(do, torch.OutOfMemoryError)
