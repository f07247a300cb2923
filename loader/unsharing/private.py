"""Private copies of memory that is shared without copy-on-write, for models that write to it.

An ordinary mapping of a resident (shared tensor) needs no private copy, because the kernel copies a
page when it is written. Three kinds of memory need a private copy before a write:

- Residents on a GPU, where a write makes the GPU unusable for the process.
- Copies on other devices, where other models would see the write.
- Mappings made under `TENSOR_DEDUP_READ_ONLY=1`, where a write ends the process.
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
    """Return whether residents are mapped read-only, as `TENSOR_DEDUP_READ_ONLY=1` requests.

    A write to a resident then ends the process, which helps to find the code that writes.
    """
    return os.environ.get(READ_ONLY_VARIABLE) == "1"


def map_shared(resident: Resident) -> torch.Tensor:
    """Map `resident` for a model, and return it as a tensor.

    The mapping is copy-on-write, or read-only if `read_only` returns True.
    """
    return resident.map(writable=not read_only())


def needs_private_copy(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` must get private memory before it is written to.

    If so, a write without private memory would be seen by other models, or would end the process or
    its use of the GPU.
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
    """Give private memory to those `tensors` that need it before a write; return the bytes copied.

    These are the tensors for which `needs_private_copy` returns True. Each remains the same object
    with the same values, and tensors that share a storage still share one. On the CPU, addresses do
    not change. No other thread may use the tensors meanwhile.
    """
    own = PrivateCopies()
    for tensor in tensors:
        if needs_private_copy(tensor):
            own.give(tensor)
    return own.nbytes


def make_private_in_place(tensor: torch.Tensor) -> int:
    """Make the shared GPU memory of `tensor` private at its address; return the bytes copied.

    The whole mapping becomes private, and with it the memory of other tensors in the mapping. The
    call waits until the GPU has finished its work. It copies nothing and returns 0 in two cases:

    - `tensor` is not in shared GPU memory.
    - The memory cannot be replaced at its address. Use `PrivateCopies` then.
    """
    try:
        return _replaced_in_place(tensor)
    except (BackendError, UnsupportedError) as error:
        _log.debug("not in place: %s", str(error))
        return 0


def require_private_in_place(tensors: Sequence[torch.Tensor]) -> int:
    """Make the shared GPU memory of `tensors` private in place; return the bytes copied.

    Addresses do not change, so captured graphs stay valid. Tensors that are not in shared GPU
    memory are left as they are.

    Raises:
        OutOfMemoryError: Some memory could not be copied. No address and no value has changed, but
            some of the memory may be private already.
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

    `nbytes` is the number of bytes copied so far. On the CPU, a private copy replaces the shared
    mapping at the same address.
    """

    def __init__(self) -> None:
        # The first keeps its number from being given to another storage, and no memory.
        self._copies: dict[int, tuple[WeakStorage, torch.UntypedStorage]] = {}
        self.nbytes = 0

    def give(self, tensor: torch.Tensor) -> None:
        """Give `tensor` private memory with the same bytes.

        The tensor remains the same object. Tensors that share a storage share the private copy,
        too.

        Raises:
            OutOfMemoryError: There is no host memory for the copy.
            torch.OutOfMemoryError: There is no GPU memory for the copy.
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
