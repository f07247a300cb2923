"""Evaluating a pickle to inert values: no class is looked up, no function called.

A stack of values, marks on it, and a memo, as in Python's pickle; containers are lists, tuples and
`PlainDict`s, tensors `PickledTensorView`s, and everything else that is allowed becomes `Inert`.

`ALLOWED` lists the globals that a pickle may name: what torch.save writes for tensors and plain
containers, which is what torch.load(weights_only=True) takes, less quantised, nested and wrapped
tensors. Each stands for an inert value; the functions at the end of this module say what a call of
one of them would make of its arguments.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from tensor_dedup.dtypes import BITS, TORCH_NAMES
from tensor_dedup.formats.errors import PytorchError, PytorchFault, shorten
from tensor_dedup.formats.pytorch.opcodes import instructions
from tensor_dedup.formats.pytorch.values import (
    Dtype,
    Function,
    Inert,
    PickledTensorView,
    PlainDict,
    Storage,
    StorageType,
)

# A tensor takes some 45 instructions; the largest checkpoints have 100,000 tensors in a file.
MAX_INSTRUCTIONS = 10_000_000
# PyTorch's own limit is 64 in most operations.
MAX_DIMENSIONS = 64

_HIGHEST_PROTOCOL = 5
_LIMIT = 1 << 63

# What a file may name, by our names: a list of its own, so that a type which torch or this package
# learns is not read from a pickle before somebody has looked at it.
_DTYPES = (
    *("F64", "F32", "F16", "BF16"),
    *("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"),
    *("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"),
    *("C128", "C64", "C32"),
)
# torch's name -> ours: safetensors' where it has one.
DTYPES: Mapping[str, Dtype] = MappingProxyType(
    {
        **{TORCH_NAMES[name]: Dtype(name, BITS[name]) for name in _DTYPES},
        # Two numbers are one element to torch: `geometry` doubles the last dimension.
        "float4_e2m1fn_x2": Dtype("F4", 8),
    }
)
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_FUNCTIONS = (
    "collections.OrderedDict",
    "collections.Counter",
    "torch.Size",
    "torch.device",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_sparse_tensor",
    "torch._tensor._rebuild_from_type_v2",
    "torch.serialization._get_layout",
    "_codecs.encode",
    "builtins.bytearray",
    "builtins.set",
    "builtins.complex",
)
_INERT = ("torch.Tensor", "torch.nn.parameter.Parameter")
# How Python 2, and protocol 2, call the builtins.
_OLD = {"__builtin__": "builtins"}

ALLOWED: Mapping[str, object] = MappingProxyType(
    {
        **{f"torch.{kind}": dtype for kind, dtype in DTYPES.items()},
        **{f"torch.{kind}": StorageType(DTYPES[dtype]) for kind, dtype in _STORAGES.items()},
        "torch.storage.UntypedStorage": StorageType(None),
        "torch.UntypedStorage": StorageType(None),
        **{function: Function(function) for function in _FUNCTIONS},
        **{inert: Inert(inert) for inert in _INERT},
    }
)


def find(module: str, name: str) -> object | None:
    """Return what a global stands for, or None if it is not allowed. Nothing is imported."""
    # A dot in the name would reach through an object: `find("torch", "storage.UntypedStorage")`.
    return None if "." in name else ALLOWED.get(f"{_OLD.get(module, module)}.{name}")


def evaluate(blob: bytes, path: str) -> object:
    """Return the value that a pickle describes, without running any code of it.

    It takes about 100 bytes of memory for each instruction; at most MAX_INSTRUCTIONS are accepted.

    Raises:
        PytorchError: The pickle is malformed, exceeds a limit, or names a forbidden global. No
            other error is raised.
    """
    machine = _Machine(path)
    for count, (name, argument, at) in enumerate(instructions(blob, path)):
        if count >= MAX_INSTRUCTIONS:
            raise PytorchError.at(
                PytorchFault.PICKLE_BOMB,
                path,
                f"its pickle has more than {MAX_INSTRUCTIONS} instructions",
            )
        machine.at = at
        if name in _CONSTANTS:
            machine.stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            machine.stack.append(argument)
        else:
            _ACTIONS[name](machine, argument)
    return machine.result()


class _Machine:
    """The state of an evaluation; `at` is the place of the instruction that is being done."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.at = 0
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def fail(self, what: str) -> NoReturn:
        raise PytorchError.at(
            PytorchFault.PICKLE_STACK,
            self.path,
            f"{what} at {self.at} of its pickle",
            offset=self.at,
        )

    def pop(self) -> Any:
        """Return the value on top and take it off."""
        if not self.stack:
            self.fail("nothing is left to work on")
        return self.stack.pop()

    def top(self) -> Any:
        """Return the value on top and leave it there."""
        if not self.stack:
            self.fail("nothing is left to work on")
        return self.stack[-1]

    def since_mark(self) -> list[object]:
        """Return all values since the last mark and take them off."""
        if not self.marks:
            self.fail("no mark was set")
        found, self.stack = self.stack, self.marks.pop()
        return found

    def result(self) -> object:
        """Return the one value that is left."""
        value = self.pop()
        if self.stack or self.marks:
            self.fail("more than one value is left")
        return value

    def drop(self, _: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:  # a mark is a value to this instruction
            self.since_mark()

    def drop_mark(self, _: Any) -> None:
        self.since_mark()

    # Containers

    def mark(self, _: Any) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def list_of(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append(items)

    def tuple_of(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append(tuple(items))

    def frozen_set(self, _: Any) -> None:
        self.since_mark()
        self.stack.append(Inert("frozenset"))

    def short_tuple(self, length: int) -> None:
        if len(self.stack) < length:
            self.fail(f"{len(self.stack)} values for a tuple of {length}")
        self.stack[-length:] = [tuple(self.stack[-length:])]

    def dict_of(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append(PlainDict())
        self.put(items)

    def append(self, _: Any) -> None:
        self.extend([self.pop()])

    def appends(self, _: Any) -> None:
        self.extend(self.since_mark())

    def extend(self, items: list[object]) -> None:
        target = self.top()
        if not isinstance(target, list):
            self.fail(f"items for {_kind(target)}")
        target += items

    def set_item(self, _: Any) -> None:
        value = self.pop()
        self.put([self.pop(), value])

    def set_items(self, _: Any) -> None:
        self.put(self.since_mark())

    def put(self, items: list[object]) -> None:
        target = self.top()
        if not isinstance(target, PlainDict) or len(items) % 2:
            self.fail(f"{len(items)} keys and values for {_kind(target)}")
        target.pairs += zip(items[::2], items[1::2], strict=True)

    def add_items(self, _: Any) -> None:
        self.since_mark()
        if not isinstance(self.top(), Inert):
            self.fail(f"items for {_kind(self.top())}")

    # The memo

    def put_memo(self, number: int) -> None:
        self.memo[number] = self.top()

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.top()

    def get_memo(self, number: int) -> None:
        if number not in self.memo:
            raise PytorchError.at(
                PytorchFault.PICKLE_MEMO,
                self.path,
                f"number {number} is recalled at {self.at} of its pickle and was never remembered",
                number=number,
                offset=self.at,
            )
        self.stack.append(self.memo[number])

    # Globals and calls

    def find_global(self, names: tuple[str, str]) -> None:
        found = find(*names)
        if found is None:
            shown = shorten(".".join(names))
            raise PytorchError.at(
                PytorchFault.FORBIDDEN_GLOBAL,
                self.path,
                f"its pickle names {shown!r} at {self.at}",
                name=shown,
                offset=self.at,
            )
        self.stack.append(found)

    def find_stacked_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            self.fail(f"a global named by {_kind(module)} and {_kind(name)}")
        self.find_global((module, name))

    def reduce(self, _: Any) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Function) or not isinstance(arguments, tuple):
            self.refuse(f"{_kind(function)} is called with {_kind(arguments)}")
        try:
            self.stack.append(call(function.name, arguments))
        except Misuse as error:
            self.refuse(str(error))

    def build(self, _: Any) -> None:
        # Attributes: of a state dict its versions, of a tensor what nobody asked for.
        self.pop()
        target = self.top()
        if not (
            isinstance(target, PickledTensorView)
            or (isinstance(target, PlainDict) and target.ordered)
        ):
            self.refuse(f"attributes for {_kind(target)}")

    def refuse(self, what: str) -> NoReturn:
        raise PytorchError.at(
            PytorchFault.FORBIDDEN_CALL,
            self.path,
            f"{what} at {self.at} of its pickle",
            offset=self.at,
        )

    def storage(self, _: Any) -> None:
        identity = self.pop()
        match identity:
            case ("storage", StorageType() as type_, str(key), str(), int(count)) if count >= 0:
                self.stack.append(Storage(key, type_, int(count)))
            case _:
                raise PytorchError.at(
                    PytorchFault.STORAGE_ID,
                    self.path,
                    f"no storage is named at {self.at} of its pickle",
                    offset=self.at,
                )

    # What is only checked

    def protocol(self, version: int) -> None:
        if not 2 <= version <= _HIGHEST_PROTOCOL:
            raise PytorchError.at(
                PytorchFault.PICKLE_OPCODE,
                self.path,
                f"its pickle has the protocol {version}",
                protocol=version,
            )


def _kind(value: object) -> str:
    return value.name if isinstance(value, Function | Inert) else f"a {type(value).__name__}"


_CONSTANTS: Mapping[str, object] = MappingProxyType(
    {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
)
_LITERALS = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINSTRING", "BINSTRING"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
_ACTIONS: Mapping[str, Callable[[_Machine, Any], None]] = MappingProxyType(
    {
        "PROTO": _Machine.protocol,
        "FRAME": lambda machine, _: None,
        "STOP": lambda machine, _: None,
        "MARK": _Machine.mark,
        "POP": _Machine.drop,
        "POP_MARK": _Machine.drop_mark,
        "DUP": lambda machine, _: machine.stack.append(machine.top()),
        "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
        "EMPTY_DICT": lambda machine, _: machine.stack.append(PlainDict()),
        "EMPTY_SET": lambda machine, _: machine.stack.append(Inert("set")),
        "LIST": _Machine.list_of,
        "TUPLE": _Machine.tuple_of,
        "TUPLE1": lambda machine, _: machine.short_tuple(1),
        "TUPLE2": lambda machine, _: machine.short_tuple(2),
        "TUPLE3": lambda machine, _: machine.short_tuple(3),
        "DICT": _Machine.dict_of,
        "FROZENSET": _Machine.frozen_set,
        "APPEND": _Machine.append,
        "APPENDS": _Machine.appends,
        "SETITEM": _Machine.set_item,
        "SETITEMS": _Machine.set_items,
        "ADDITEMS": _Machine.add_items,
        "BINPUT": _Machine.put_memo,
        "LONG_BINPUT": _Machine.put_memo,
        "MEMOIZE": _Machine.memoize,
        "BINGET": _Machine.get_memo,
        "LONG_BINGET": _Machine.get_memo,
        "GLOBAL": _Machine.find_global,
        "STACK_GLOBAL": _Machine.find_stacked_global,
        "REDUCE": _Machine.reduce,
        "NEWOBJ": _Machine.reduce,
        "BUILD": _Machine.build,
        "BINPERSID": _Machine.storage,
    }
)


# Calls

Arguments = tuple[Any, ...]


class Misuse(Exception):
    """Arguments that torch.save never writes; the caller turns it into a FORBIDDEN_CALL."""


def call(name: str, arguments: Arguments) -> object:
    """Return the value of a call of the allowed function `name`.

    Raises:
        Misuse: The function does not take these arguments.
    """
    made = _CALLS[name](arguments) if name in _CALLS else _inert(name, arguments)
    if made is None:
        shown = ", ".join(type(argument).__name__ for argument in arguments[:9])
        raise Misuse(f"{name} is called with ({shown})")
    return made


def _inert(name: str, arguments: Arguments) -> Inert | None:
    return Inert(name) if len(arguments) <= 2 else None


def _ordered_dict(arguments: Arguments) -> PlainDict | None:
    match arguments:
        case ():
            return PlainDict(ordered=True)
        case (list(items),) if all(
            isinstance(item, list | tuple) and len(item) == 2 for item in items
        ):
            return PlainDict([(key, value) for key, value in items], ordered=True)
    return None


def _size(arguments: Arguments) -> tuple[object, ...] | None:
    return tuple(arguments[0]) if len(arguments) == 1 and _sizes(arguments[0]) else None


def _sizes(value: object) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < _LIMIT for size in value)
    )


def _tensor(arguments: Arguments) -> PickledTensorView | None:
    """(storage, offset, size, stride)"""
    if len(arguments) != 4 or not isinstance(arguments[0], Storage):
        return None
    storage = arguments[0]
    return _view(arguments, storage.type.dtype, lazy=False)


def _tensor_v2(arguments: Arguments) -> PickledTensorView | None:
    """(storage, offset, size, stride, requires_grad, hooks[, metadata])"""
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], Storage):
        return None
    return _view(arguments[:4], arguments[0].type.dtype, lazy=_is_lazy(arguments[6:]))


def _tensor_v3(arguments: Arguments) -> PickledTensorView | None:
    """(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])"""
    if len(arguments) not in (7, 8) or not isinstance(arguments[6], Dtype):
        return None
    return _view(arguments[:4], arguments[6], lazy=_is_lazy(arguments[7:]))


def _view(arguments: Arguments, dtype: Dtype | None, *, lazy: bool) -> PickledTensorView | None:
    storage, offset, shape, stride = arguments
    if not isinstance(storage, Storage) or dtype is None or not _sizes((offset,)):
        return None
    if not _sizes(shape) or not _sizes(stride) or len(shape) != len(stride):
        return None
    return PickledTensorView(storage, dtype, offset, tuple(shape), tuple(stride), lazy)


def _is_lazy(metadata: Arguments) -> bool:
    """Whether the metadata says that elements are conjugated or negated only when read."""
    return any(
        value is not False
        for found in metadata
        if isinstance(found, PlainDict)
        for _, value in found.pairs
    )


def _parameter(arguments: Arguments) -> PickledTensorView | None:
    """(data, requires_grad, hooks[, state])"""
    fits = len(arguments) in (3, 4) and isinstance(arguments[0], PickledTensorView)
    return arguments[0] if fits else None


def _sparse(arguments: Arguments) -> tuple[object, ...] | None:
    """(layout, (indices, values, size, ...)): its parts, as tensors of their own."""
    fits = len(arguments) == 2 and isinstance(arguments[1], tuple)
    return arguments[1] if fits else None


def _with_attributes(arguments: Arguments) -> object | None:
    """(function, class, its arguments, attributes)"""
    match arguments:
        case (Function(name), Inert(), tuple(inner), _) if name in _REBUILT:
            return call(name, inner)
    return None


_CALLS: Mapping[str, Callable[[Arguments], object | None]] = MappingProxyType(
    {
        "collections.OrderedDict": _ordered_dict,
        "torch.Size": _size,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor_v2,
        "torch._utils._rebuild_tensor_v3": _tensor_v3,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._utils._rebuild_sparse_tensor": _sparse,
        "torch._tensor._rebuild_from_type_v2": _with_attributes,
    }
)
_REBUILT = frozenset(name for name in _CALLS if "_rebuild_tensor" in name)
