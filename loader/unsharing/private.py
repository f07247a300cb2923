"""Memory that is shared without copy-on-write, and private copies of it for writers.

An ordinary mapping of a resident (shared tensor) needs no private copy, because the kernel copies a
page when it is written. Three kinds of memory need one: residents on a GPU, where a write makes the
GPU unusable for the process; copies on other devices, where other models would see the write; and
mappings made under TENSOR_DEDUP_READ_ONLY=1, where a write ends the process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import torch

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.devices import DEVICES, with_room
from tensor_dedup.loader.residents import slab
from tensor_dedup.loader.residents.mappings import MAPPINGS
from tensor_dedup.loader.residents.param_data import (
    WeakStorage,
    number_of,
    param_data,
    set_param_data,
)
from tensor_dedup.loader.residents.slab import OutOfMemoryError
from tensor_dedup.loader.unsharing.device_copies import COPIES
from tensor_dedup.memory_manager.errors import BackendError

if TYPE_CHECKING:
    from tensor_dedup.loader.residents.resident import Resident

_log = logging.getLogger(__name__)
READ_ONLY_VARIABLE: Final = "TENSOR_DEDUP_READ_ONLY"


def read_only() -> bool:
    """Return whether TENSOR_DEDUP_READ_ONLY=1 is set: residents are then mapped read-only.

    A write to one ends the process, which helps to find the code that writes.
    """
    return os.environ.get(READ_ONLY_VARIABLE) == "1"


def map_shared(resident: Resident) -> torch.Tensor:
    """Map a resident for a model: copy-on-write, or read-only if `read_only` returns True."""
    return resident.map(writable=not read_only())


def needs_private_copy(tensor: torch.Tensor) -> bool:
    """Return whether a tensor must get private memory before it is written to.

    Otherwise other models would see the write, or it would end the process or its use of the GPU.
    """
    if tensor.layout is not torch.strided or not tensor.nbytes:
        return False
    data = param_data(tensor)
    if DEVICES.holds(data):
        return True
    if data.device.type == "cpu":
        return MAPPINGS.is_read_only(data.data_ptr())
    return COPIES.holds(data)


def make_private(tensors: Iterable[torch.Tensor]) -> int:
    """Give private memory to each tensor that `needs_private_copy`; return the bytes copied.

    Tensors remain the same objects with the same values, and those that share a storage still do.
    On the CPU addresses do not change. No other thread may use the tensors meanwhile.
    """
    own = PrivateCopies()
    for tensor in tensors:
        if needs_private_copy(tensor):
            own.give(tensor)
    return own.nbytes


def make_private_in_place(tensor: torch.Tensor) -> int:
    """Make the shared GPU memory of a tensor private at its address; return the bytes copied.

    The whole mapping becomes private, and with it other tensors in it. Returns 0 if the tensor is
    not in shared GPU memory, or if the memory cannot be replaced at its address (then use
    `PrivateCopies`). Waits for all work of the GPU.
    """
    try:
        return _replaced_in_place(tensor)
    except (BackendError, UnsupportedError) as error:
        _log.debug("not in place: %s", str(error))
        return 0


def require_private_in_place(tensors: Sequence[torch.Tensor]) -> int:
    """Make the shared GPU memory of these tensors private in place; return the bytes copied.

    Addresses do not change, so captured graphs stay valid.

    Raises:
        OutOfMemoryError: Some memory could not be copied. No address and no value has changed,
            but some of the memory may be private already.
    """
    done = 0
    try:
        for each in tensors:
            done += _replaced_in_place(each)
    except (BackendError, UnsupportedError) as error:
        missing = sum({_end(t): t.nbytes for t in tensors if DEVICES.holds(param_data(t))}.values())
        raise OutOfMemoryError(
            f"weights that are shared on a GPU cannot be written, and {missing} bytes of them not "
            f"be copied where they are: {error.message}. Nothing was written and nothing moved; "
            "free memory there, or start engines that are to be written with tensor_dedup=False",
            nbytes=missing,
            copied=done,
        ) from error
    return done


def _end(tensor: torch.Tensor) -> int:
    return param_data(tensor).data_ptr() + tensor.nbytes


def _replaced_in_place(tensor: torch.Tensor) -> int:
    """Make the mapping private and return its bytes, 0 if there is none.

    Raises:
        BackendError: The driver refused; the mapping is as it was.
        UnsupportedError: The backend cannot keep the address; the mapping is as it was.
    """
    data = param_data(tensor)
    if not DEVICES.holds(data):
        return 0
    found = (gpu.mapping_behind(data) for gpu in DEVICES.opened())
    mapping = next((each for each in found if each is not None), None)
    if mapping is None:
        return 0
    mapping.make_private()
    return mapping.nbytes


class PrivateCopies:
    """Private copies of shared storages, one for each storage. For one thread.

    `nbytes` is the number of bytes copied. On the CPU, a copy replaces the mapping at its address.
    """

    def __init__(self) -> None:
        # The first keeps its number from being given to another storage, and no memory.
        self._copies: dict[int, tuple[WeakStorage, torch.UntypedStorage]] = {}
        self.nbytes = 0

    def give(self, tensor: torch.Tensor) -> None:
        """Give a tensor private memory: its part of the copy of its storage.

        The tensor remains the same object.
        """
        data = param_data(tensor)
        if data.device.type == "cpu" and not DEVICES.holds(data):
            self.nbytes += slab.make_private(data.data_ptr(), data.nbytes)
            return
        empty = torch.empty(0, dtype=data.dtype, device=data.device)
        storage = self._copy(data.untyped_storage())
        set_param_data(
            tensor, empty.set_(storage, data.storage_offset(), data.shape, data.stride())
        )

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        found = self._copies.get(number_of(storage))
        if found is None:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            found = WeakStorage(storage), with_room(whole.device, whole.clone).untyped_storage()
            self._copies[number_of(storage)] = found
            self.nbytes += storage.nbytes()
        return found[1]
