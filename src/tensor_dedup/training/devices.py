"""Devices whose tensors a save copies to host memory while the device continues to compute.

Copies run on a separate stream. The device and not the host waits for them: the optimizer's kernels
start when the copies are complete, and Python continues at once.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class DeviceSnapshot(Protocol):
    """The copies to host memory that one save makes of the tensors on one device."""

    def copy(
        self, tensor: "torch.Tensor", into: memoryview
    ) -> "tuple[torch.Tensor, Callable[[], None]]":
        """Start to copy `tensor` into the buffer `into`.

        Returns the copy, a tensor in C order, and a function that waits until the copy is complete.
        The function is safe from any thread.
        """
        ...

    def hold(self) -> None:
        """Make the device finish the started copies before any work submitted from now on."""
        ...


class SnapshotDevice(Protocol):
    """A kind of device whose tensors can be copied to host memory during a save."""

    def takes(self, tensor: "torch.Tensor") -> bool:
        """Return whether `tensor` is on a device of this kind."""
        ...

    def begin(self, tensor: "torch.Tensor") -> DeviceSnapshot:
        """Return a new DeviceSnapshot, still without copies, of the device on which `tensor` is.

        Each copy is made after all work that has been submitted to the device before this call.
        """
        ...


class CudaDevice:
    """CUDA devices; each has one stream for copies."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}

    def takes(self, tensor: "torch.Tensor") -> bool:
        # docstring inherited
        return tensor.is_cuda

    def begin(self, tensor: "torch.Tensor") -> "DeviceSnapshot":
        # docstring inherited
        import torch

        number = tensor.device.index
        if number not in self._streams:
            stream: Any = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
            self._streams[number] = stream
        return _CudaCopies(tensor.device, self._streams[number])


class _CudaCopies:
    def __init__(self, device: "torch.device", stream: Any) -> None:
        import torch

        self._device, self._stream = device, stream
        self._event: Any = None  # of the last copy
        stream.wait_stream(torch.cuda.current_stream(device))

    def copy(
        self, tensor: "torch.Tensor", into: memoryview
    ) -> "tuple[torch.Tensor, Callable[[], None]]":
        # docstring inherited
        import torch

        host = host_tensor(tensor, into)
        with torch.cuda.stream(self._stream):
            # Resolved here, not on the stream of the model: this one would not wait for that.
            host.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(self._stream)
        # Its memory is not given to others before the copy is done, even if the model lets go.
        tensor.record_stream(self._stream)
        return host, self._event.synchronize

    def hold(self) -> None:
        # docstring inherited
        import torch

        torch.cuda.current_stream(self._device).wait_event(self._event)


def host_tensor(tensor: "torch.Tensor", memory: memoryview) -> "torch.Tensor":
    """Return a tensor in the host memory `memory`, with the dtype and shape of `tensor`.

    The result is in C order, and its content is not initialised.
    """
    import torch

    nbytes = tensor.numel() * tensor.element_size()
    flat = torch.frombuffer(memory[:nbytes], dtype=torch.uint8)
    return flat.view(tensor.dtype).view(tensor.shape)
