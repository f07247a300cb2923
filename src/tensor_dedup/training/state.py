"""The values of a checkpoint: named pieces, each with a dtype, a shape and its bytes.

    for piece in pieces({"weight": tensor, "scale": array}):
        write(piece.name, piece.dtype, piece.shape, piece.data)

A StateChunk is the source of a piece, with hints. A save makes the piece when it is needed.

numpy and torch are imported only when an array or a tensor has to be processed.
"""

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from tensor_dedup.dtypes import BITS
from tensor_dedup.formats.pytorch.machine import DTYPES
from tensor_dedup.store.gathered import Gathered, GatheredArray, flat_bytes, parts_in_order
from tensor_dedup.training.errors import DamagedStateError, UnsupportedArrayError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import Buffer

    Value: TypeAlias = "np.ndarray[Any, Any]" | "torch.Tensor" | "NamedValue"
else:  # msgspec looks the names of annotations up, for `help` and `inspect.signature`
    Value = Buffer = Any

# A dtype's name -> numpy's code for it, of the byte order this format has.
NUMPY_CODES: Final[Mapping[str, str]] = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "C64": "<c8",
    "C128": "<c16",
}
_NAMES: Final = {code: name for name, code in NUMPY_CODES.items()}


class NamedValue(msgspec.Struct, frozen=True, gc=False):
    """One named value of a checkpoint.

    `dtype` is a name that safetensors uses (such as `F32`, `BF16` or `U8`), or `C128` or `C32`.
    `data` has the elements in C order, little-endian and without gaps, in host memory. During a
    save, `data` may also be an object that produces these bytes when it is read.

    `data` may share the model's memory, and is then valid as long as the model is not changed. To
    make a changed copy of the value, use `msgspec.structs.replace`.
    """

    # A Struct, for an ensemble has thousands in every step: a dataclass takes ten times as long to
    # make, and each is one more for the garbage collector to look at. They hold no circles.

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: "Buffer | Gathered"

    @property
    def nbytes(self) -> int:
        """The size of `data` in bytes."""
        return flat_bytes(self.data).nbytes


_T = TypeVar("_T")
_BYTES: Final = (bytes, bytearray, memoryview)
# The group whose pieces follow all others.
LAST_GROUP: Final = "#"


class StateChunk(msgspec.Struct, frozen=True, eq=False):
    """The source of one named value of a step, with hints for the save.

    `source` is a tensor, an array, a NamedValue or bytes. In the state that a `StateProvider`
    returns, `source` may also be an object or a container. The hints then apply to everything in
    it.

    Instead of `source`, a function `make` may be given, which returns a tensor, an array, a
    NamedValue or bytes. Each save calls `make` once.

    * `group`: the values of one group are stored next to each other. The largest group comes first,
      and values without a group form a group too.
    * `frozen`: the caller promises that the memory of `source`, or the data that `make` reads, does
      not change until the save has ended. A background save then does not copy a source in host
      memory, and calls `make` in the thread of the save. If the save notices a change, it raises a
      ChangedModelError.
    """

    source: Any = None
    name: str = ""
    group: str = ""
    frozen: bool = False
    make: "Callable[[], Value | Buffer] | None" = None

    @property
    def residence(self) -> "Literal['unmade', 'device', 'host']":
        """Where the bytes are: on a "device", in "host" memory, or "unmade" if `make` is given."""
        if self.make is not None:
            return "unmade"
        return "device" if is_tensor(self.source) and _is_elsewhere(self.source) else "host"

    @property
    def nbytes(self) -> int | None:
        """The number of bytes of `source`, or None if `make` is given instead."""
        if self.make is not None:
            return None
        held = self.source
        return int(held.nbytes if hasattr(held, "nbytes") else memoryview(held).nbytes)

    @property
    def contiguous(self) -> bool:
        """Whether the source is in C order, so that the piece can share its memory."""
        if is_tensor(self.source):
            return bool(self.source.is_contiguous())
        return not is_array(self.source) or _lies_in_order(self.source)

    def piece(self) -> NamedValue:
        """Return `source`, or the result of `make`, as a NamedValue.

        The NamedValue may share the memory of the source. If the source is not in C order, its
        bytes are rearranged when they are read.

        Raises:
            UnsupportedArrayError: The source cannot be stored, for example because it is a sparse
                tensor or an array of objects.
        """
        held = self.source  # of an ensemble there are thousands, which are pieces already
        if type(held) is NamedValue and held.name == self.name:
            return held
        return _named_value(self.name, self.value())

    def value(self) -> "Value":
        """Return `source`, or the result of `make`. Bytes are returned as a NamedValue."""
        held: Any = self.source if self.make is None else self.make()
        if isinstance(held, _BYTES):
            view = memoryview(held)
            # Views with gaps or of another order are no bytes yet.
            view = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
            return NamedValue(self.name, "U8", (view.nbytes,), view)
        found: Value = held
        return found


def in_groups(items: "Iterable[_T]", groups: Iterable[str]) -> "list[_T]":
    """Return `items` sorted by group, in the order in which a checkpoint stores them.

    `groups` has the group of each item. The largest group comes first. Among equally large groups,
    the default group "" comes first, and then the group that begins earlier. The group LAST_GROUP
    always comes last.
    """
    members: dict[str, list[_T]] = {"": []}
    for item, group in zip(items, groups, strict=True):
        if (found := members.get(group)) is None:
            found = members[group] = []
        found.append(item)
    last = members.pop(LAST_GROUP, [])
    longest_first: list[list[_T]] = sorted(members.values(), key=len, reverse=True)
    return [*chain.from_iterable(longest_first), *last]


def pieces(tensors: "Mapping[str, Value]") -> list[NamedValue]:
    """Return the values in `tensors` as NamedValues, in the same order, each named by its key.

    Arrays and CPU tensors that are little-endian and in C order are not copied. All other values
    are copied, such as tensors on a device and conjugate views. Safe from any thread as long as the
    values are not written to.

    Raises:
        UnsupportedArrayError: A value cannot be stored. This holds for arrays of objects, records,
            strings or times, for quantised, sparse and meta tensors, and for tensors of unknown
            subclasses.
    """
    return [_in_memory(_named_value(name, held)) for name, held in tensors.items()]


def _in_memory(piece: NamedValue) -> NamedValue:
    """Return a piece whose bytes lie in order, as a copy if need be."""
    return replace(piece, data=piece.data[:]) if isinstance(piece.data, Gathered) else piece


def value(piece: NamedValue) -> "np.ndarray[Any, Any] | NamedValue":
    """Return `piece` as a numpy array, which is a writable copy.

    If numpy lacks the dtype, the piece itself is returned.

    Raises:
        DamagedStateError: The number of bytes does not match the shape.
    """
    code = NUMPY_CODES.get(piece.dtype)
    if code is None:
        return piece
    import numpy as np

    try:
        flat = np.frombuffer(flat_bytes(piece.data)[:], np.dtype(code))
        return flat.reshape(piece.shape).copy()
    except ValueError as error:
        what = f"{piece.nbytes} bytes are no {piece.dtype} of shape {piece.shape}"
        raise DamagedStateError.at(piece.name, what) from error


def of_its_size(piece: NamedValue) -> NamedValue:
    """Check that the size of `piece` fits its dtype and shape, and return the piece itself.

    Raises:
        UnsupportedArrayError: The piece has fewer or more bytes, so it could not be loaded.
    """
    bits = BITS.get(piece.dtype)
    if bits is not None and bits * math.prod(piece.shape) != 8 * piece.nbytes:
        what = f"{piece.nbytes} bytes are no {piece.dtype} of shape {piece.shape}"
        raise UnsupportedArrayError.at(piece.name, what)
    return piece


def raw(held: "Value") -> memoryview:
    """Return the bytes of `held` (a NamedValue, an array or a tensor), flat and in C order."""
    return flat_bytes(_named_value("", held).data)[:]


def is_tensor(held: object) -> bool:
    """Return whether `held` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(held, torch.Tensor)


def is_array(held: object) -> bool:
    """Return whether `held` is a numpy array, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(held, numpy.ndarray)


def _named_value(name: str, held: object) -> NamedValue:
    """Return a NamedValue, an array or a tensor as a NamedValue called `name`, without a copy."""
    if isinstance(held, NamedValue):
        found = held if held.name == name else replace(held, name=name)
        return of_its_size(found)
    if is_tensor(held):
        return _of_tensor(name, held)
    if is_array(held):
        return _of_array(name, held)
    kind = type(held).__qualname__
    raise UnsupportedArrayError.at(name, f"a {kind} is no array, tensor or NamedValue", type=kind)


def _of_array(name: str, array: Any) -> NamedValue:
    import numpy as np

    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedArrayError.at(name, "a masked array")
    dtype = array.dtype if _is_little(array.dtype) else array.dtype.newbyteorder("<")
    known = _NAMES.get(dtype.str)
    if known is None:
        raise UnsupportedArrayError.at(name, f"an array of dtype {array.dtype}", dtype=dtype.str)
    plain = np.asarray(array)  # of a subclass, too
    data = plain.reshape(-1).view(np.uint8).data if _lies_in_order(plain) else GatheredArray(plain)
    return NamedValue(name, known, tuple(array.shape), data)


def _lies_in_order(array: Any) -> bool:
    return bool(array.flags.c_contiguous) and _is_little(array.dtype)


def _is_little(dtype: Any) -> bool:
    return dtype.byteorder != ">" and (dtype.byteorder != "=" or sys.byteorder == "little")


def _of_tensor(name: str, tensor: Any) -> NamedValue:
    known = dtype_names().get(tensor.dtype)
    if fault := tensor_fault(tensor):
        raise UnsupportedArrayError.at(name, fault)
    if known is None:
        raise UnsupportedArrayError.at(name, f"a tensor of dtype {tensor.dtype}")
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return NamedValue(name, known, shape, memoryview(b""))
    import torch

    held = tensor.detach()
    if _is_elsewhere(held) or held.is_conj() or held.is_neg():
        return NamedValue(name, known, shape, GatheredTensor(held))
    if not held.is_contiguous():
        # numpy lacks some dtypes. It has the one of 16 bytes.
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        kind = whole.get(held.element_size())
        bits = held if kind is None else held.view(kind)
        return NamedValue(name, known, shape, GatheredArray(bits.numpy()))
    # Not view(-1): one element is contiguous whatever its stride, and would keep it.
    flat = held.as_strided((held.numel(),), (1,), held.storage_offset())
    return NamedValue(name, known, shape, memoryview(flat.view(torch.uint8).numpy()))


class GatheredTensor(Gathered):
    """The bytes of a tensor in C order, which are produced when they are read.

    The tensor may be on any device, and may be a conjugate or negative view. A read of a CUDA
    tensor runs in the stream that was current when this object was created, and returns when the
    bytes are copied.
    """

    __slots__ = ("_stream", "_tensor")

    def __init__(self, tensor: "torch.Tensor") -> None:
        self._tensor, self._stream = tensor.detach(), None
        if tensor.is_cuda:
            import torch

            # That of the model: other threads have the device's first one.
            self._stream = torch.cuda.current_stream(tensor.device)
        super().__init__(tensor.numel(), tensor.element_size())

    @property
    def place(self) -> Hashable:
        # docstring inherited
        held = self._tensor
        seen = held.is_conj(), held.is_neg()
        return held.device, held.data_ptr(), held.shape, held.stride(), held.dtype, *seen

    def _gather(self, memory: memoryview, first: int) -> None:
        # docstring inherited
        import torch

        flat = torch.frombuffer(memory, dtype=torch.uint8).view(self._tensor.dtype)
        at = 0
        with self._in_order():
            for part in parts_in_order(self._tensor, first, first + flat.numel()):
                flat[at : at + part.numel()].view(part.shape).copy_(part)
                at += part.numel()

    def _in_order(self) -> AbstractContextManager[object]:
        import torch

        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _is_elsewhere(tensor: Any) -> bool:
    """Return whether a tensor's memory is not the host's."""
    return bool(tensor.device.type != "cpu")


@cache
def dtype_names() -> "Mapping[torch.dtype, str]":
    """Return a mapping from torch dtypes to their names in checkpoints.

    Dtypes that cannot be stored are left out. This function imports torch.
    """
    import torch

    # Two numbers in a byte have a shape of their own in other formats: not here.
    named = {name: dtype.name for name, dtype in DTYPES.items() if dtype.name != "F4"}
    return {getattr(torch, name): our for name, our in named.items() if hasattr(torch, name)}


def tensor_fault(tensor: "torch.Tensor") -> str | None:
    """Return the reason why a tensor cannot be stored as dense bytes, or None if it can."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return (
            f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a kind of tensor of its own"
        )
    if tensor.is_quantized:
        return "a quantised tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_meta:
        return "a meta tensor, which has no bytes"
    return None
