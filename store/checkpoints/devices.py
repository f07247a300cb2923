"""Copies from a device to the host, on a stream of their own, while the device goes on computing.

Whoever is about to change what is copied asks the device to wait, not the host: the optimizer's
kernels begin when the copies are done, and Python goes on at once.
"""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class DeviceSnapshot(Protocol):
    """The copies of one save from one device."""

    def copy(self, tensor: "torch.Tensor", into: memoryview) -> "torch.Tensor":
        """Begin to copy a tensor; where its elements will be, in C order: memory of `into`."""
        ...

    def hold(self) -> None:
        """What the device is told from now on begins after the copies that were begun."""
        ...

    def wait(self) -> None:
        """Until all copies are done. Any thread."""
        ...


class SnapshotDevice(Protocol):
    """Where some tensors are, and a way to copy them to the host."""

    def takes(self, tensor: "torch.Tensor") -> bool:
        """Whether it is there."""
        ...

    def begin(self, tensor: "torch.Tensor") -> DeviceSnapshot:
        """Copies of this tensor and others beside it, as they are after what was asked so far."""
        ...


class CudaDevice:
    """CUDA devices, each with one stream for copies."""

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
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, tensor: "torch.Tensor", into: memoryview) -> "torch.Tensor":
        # docstring inherited
        import torch

        host = host_tensor(tensor, into)
        with torch.cuda.stream(self._stream):
            # Resolved here, not on the stream of the model: this one would not wait for that.
            host.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)
            # Recorded each time: the last one counts, and nobody has to say which that is.
            self._event.record(self._stream)
        # Its memory is not given to others before the copy is done, even if the model lets go.
        tensor.record_stream(self._stream)
        return host

    def hold(self) -> None:
        # docstring inherited
        import torch

        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        # docstring inherited
        self._event.synchronize()


def host_tensor(tensor: "torch.Tensor", memory: memoryview) -> "torch.Tensor":
    """An empty contiguous tensor on the host, of this one's dtype and shape, in this memory."""
    import torch

    nbytes = tensor.numel() * tensor.element_size()
    flat = torch.frombuffer(memory[:nbytes], dtype=torch.uint8)
    return flat.view(tensor.dtype).view(tensor.shape)
