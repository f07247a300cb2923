"""A device of torch's over the fake driver: `.to("fakegpu")` means what `.to("cuda")` means.

torch has a place for one more kind of device (PrivateUse1). Here its memory is host memory and the
CPU computes on it; a tensor of it is no tensor of the CPU all the same, and has to be moved. The
device stays for the rest of the process, which torch then takes for one with an accelerator: only
in processes of their own. No GPU is involved.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils import backend_registration

from gpu_runs.fake_driver import FakeDriver
from tensor_dedup.loader.cuda import tensors
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.shared import SharedGpu
from tensor_dedup.memory_manager.cuda.driver import Driver

NAME: Final = "fakegpu"
KIND: Final = 12  # kDLExtDev: PrivateUse1
_LIBRARIES: Final[list[torch.library.Library]] = []
# Kernels of the CPU that make another view of a storage, and look at no memory.
_VIEWS: Final = (
    "as_strided",
    "view",
    "_reshape_alias",
    "set_.source_Storage_storage_offset",
    "set_.source_Storage",
    "set_.source_Tensor",
    "set_",
)


def install(driver: Driver | None = None) -> FakeDriver:
    """Make the device, and let it be a GPU of this driver's (made if none is given)."""
    fake = FakeDriver()
    inner: Any = getattr(driver, "_inner", driver or fake)
    inner.beside_torch = True
    setup: Any = backend_registration._setup_privateuseone_for_python_backend
    setup(rename=NAME)
    library: Any = torch.library.Library
    everything = library("_", "IMPL")
    everything.fallback(_compute, "PrivateUse1")
    aten = library("aten", "IMPL")
    for name in _VIEWS:
        aten.impl(name, _as_cpu(name), "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("convolution_overrideable", _convolve, "PrivateUse1")
    _LIBRARIES.extend((everything, aten))
    _attend_on_cpu()
    torch.accelerator.synchronize = lambda *_: None  # it has no queue
    DEVICES._openers[NAME] = lambda device: SharedGpu(Gpu(driver or fake, "0"), device, KIND)
    DEVICES.reset()
    return fake


def _as_cpu(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def call(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)

    return call


def _is_here(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    place = tensors.CPU, 0
    flat = tensors._bytes_at(storage.data_ptr(), storage.nbytes(), place, storage)
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    offset = tensor.storage_offset()
    return empty.set_(flat.untyped_storage(), offset, tensor.shape, tensor.stride())


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU as one of the device, over the same memory."""
    if tensor.layout is not torch.strided:
        return tensor
    storage = tensor.untyped_storage()
    room = ctypes.create_string_buffer(1)  # a storage without bytes has an address, too
    address = storage.data_ptr() or ctypes.addressof(room)
    flat = tensors._bytes_at(address, storage.nbytes(), (KIND, 0), (room, tensor))
    made = flat.view(torch.uint8)[:0].view(tensor.dtype)
    offset = tensor.storage_offset()
    return made.set_(flat.untyped_storage(), offset, tensor.shape, tensor.stride())


def _compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation that is not listed above: the CPU does it, in the same memory."""
    mine: dict[int, torch.Tensor] = {}

    def there(value: Any) -> Any:
        if _is_here(value):
            alias = on_cpu(value)
            mine[id(alias)] = value
            held.append(alias)
            return alias
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        if isinstance(value, list | tuple):
            return type(value)(map(there, value))
        return value

    def back(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return mine[id(value)] if id(value) in mine else _here(value)
        if isinstance(value, list | tuple):
            return type(value)(map(back, value))
        return value

    held: list[torch.Tensor] = []
    kwargs = {name: there(value) for name, value in kwargs.items()}
    found = op(*there(args), **kwargs)
    for alias in held:
        resized = mine[id(alias)]
        if alias.shape != resized.shape:  # an output that was empty
            made = _here(alias)
            resized.set_(made.untyped_storage(), 0, made.shape, made.stride())
    return back(found)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    here = [on_cpu(each) if _is_here(each) else each for each in (source, target)]
    here[1].copy_(here[0])
    return target


def _convolve(*args: Any) -> Any:
    return _compute(torch.ops.aten.convolution.default, *args)


def _attend_on_cpu() -> None:
    """torch chooses among kernels by the device, and knows none for this one."""
    original = torch.nn.functional.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not any(map(_is_here, args)):
            return original(*args, **kwargs)
        return _here(original(*_there(args), **{k: _there([v])[0] for k, v in kwargs.items()}))

    torch.nn.functional.scaled_dot_product_attention = attention


def _there(values: Any) -> list[Any]:
    return [on_cpu(each) if _is_here(each) else each for each in values]
