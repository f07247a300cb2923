"""Create torch tensors over memory that other code has mapped, without a copy.

torch accepts a foreign GPU address only through DLPack, which calls a deleter when the last storage
over the memory is gone. DLPack lacks some of torch's dtypes, so the memory is passed as bytes and
then viewed with the real dtype.
"""

import atexit
import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch.utils.dlpack import from_dlpack

from tensor_dedup.errors import UnsupportedError

CPU: Final = 1  # kDLCPU, for the fake driver's addresses
CUDA: Final = 2  # kDLCUDA
_UINT: Final = 1  # kDLUInt
_NAME: Final = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

# What torch points to, and the owner of the memory, by the address of the former.
_held: dict[int, tuple[_Managed, object, object]] = {}


def _let_go(address: int) -> None:
    _held.pop(address, None)


_let_go_of = _Deleter(_let_go)


def tensor_at(
    address: int,
    geometry: tuple[torch.dtype, Sequence[int], Sequence[int]],
    device: tuple[int, int],
    owner: object,
) -> torch.Tensor:
    """Return a tensor over the memory at `address`; its storage keeps `owner` alive.

    `geometry` is (dtype, shape, stride), where the elements fill the memory without gaps. `device`
    is DLPack's (device type, ordinal).

    Raises:
        UnsupportedError: `device` is a CUDA device, and torch sees no GPU.
    """
    if device[0] == CUDA and not torch.cuda.is_available():
        raise UnsupportedError("this torch sees no GPU; install one that is built for CUDA")
    dtype, shape, stride = geometry
    count = 1
    for size in shape:
        count *= size
    flat = _bytes_at(address, count * dtype.itemsize, device, owner)
    # set_, and not view: a view would carry its flat base along, and knows no gap-free transpose.
    empty = torch.empty(0, dtype=dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), 0, tuple(shape), tuple(stride))


def _bytes_at(address: int, nbytes: int, device: tuple[int, int], owner: object) -> torch.Tensor:
    length = (ctypes.c_int64 * 1)(nbytes)
    described = _Tensor(
        address, _Device(*device), 1, _DataType(_UINT, 8, 1), length, None, 0
    )  # no strides: contiguous
    managed = _Managed(described, None, _let_go_of)
    key = ctypes.addressof(managed)
    _held[key] = (managed, length, owner)
    try:
        found: torch.Tensor = from_dlpack(_new_capsule(key, _NAME, None))
    except BaseException:
        _let_go(key)  # nobody took it
        raise
    return found


@atexit.register
def _stay_silent() -> None:
    """Clear all deleters at exit: storages may outlive the interpreter, which runs them."""
    for managed, *_ in list(_held.values()):
        managed.deleter = _Deleter(0)


def held() -> int:
    """Return the number of storages from `tensor_at` that are still alive."""
    return len(_held)
