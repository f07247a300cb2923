"""Evaluates a pickle of torch.save to plain data, without importing or calling anything it names.

The evaluation has a stack of values with marks, and a memo, as in Python's pickle module.
Containers become lists, tuples and `PlainDict`s, tensors become `PickledTensorView`s, and
everything else that is allowed becomes an `Inert` value.

`ALLOWED` lists the globals that a pickle may name: those that torch.save writes for tensors and
plain containers. torch.load(weights_only=True) accepts these, too. It also accepts quantised,
nested and wrapped tensors, which are refused here.

Arguments that torch.save does not write are refused even if torch would accept them, because torch
may give them another meaning. For example, the instruction BUILD can move a finished tensor to
another storage, and an attribute called `data` replaces the bytes of a tensor.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from sys import getsizeof
from types import MappingProxyType
from typing import Any, NoReturn

from tensor_dedup.dtypes import BITS, TORCH_NAMES
from tensor_dedup.formats.errors import PytorchError, PytorchFault, shorten
from tensor_dedup.formats.pytorch.budget import Budget
from tensor_dedup.formats.pytorch.opcodes import instructions
from tensor_dedup.formats.pytorch.values import (
    Dtype,
    Function,
    Inert,
    PickledTensorView,
    PlainDict,
    SparseParts,
    Storage,
    StorageType,
)

# A tensor takes some 45 instructions; the largest checkpoints have 100,000 tensors in a file.
MAX_INSTRUCTIONS = 10_000_000
# PyTorch's own limit is 64 in most operations.
MAX_DIMENSIONS = 64
_USUAL_DIMENSIONS = 8

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
    """Return the value that stands for the global `name` of `module`, or None if it is forbidden.

    Nothing is imported.
    """
    # A dot in the name would reach through an object: `find("torch", "storage.UntypedStorage")`.
    return None if "." in name else ALLOWED.get(f"{_OLD.get(module, module)}.{name}")


def evaluate(blob: bytes, path: str, budget: Budget | None = None) -> object:
    """Return the value that the pickle `blob` describes, without running code from it.

    The memory that the evaluation takes is charged to `budget`, by default a new budget in
    proportion to the pickle's size. `path` is used in error messages only. PytorchError is the only
    error that a malformed pickle can cause.

    Raises:
        PytorchError: The pickle is malformed, names a forbidden global, exceeds the budget, or has
            more than MAX_INSTRUCTIONS.
    """
    budget = budget or Budget(len(blob), path)
    machine = _Machine(path, budget)
    for count, (name, argument, at) in enumerate(instructions(blob, path)):
        if count >= MAX_INSTRUCTIONS:
            raise PytorchError.at(
                PytorchFault.PICKLE_BOMB,
                path,
                f"its pickle has more than {MAX_INSTRUCTIONS} instructions",
            )
        machine.at = at
        cost, action = _STEPS[name]
        if action is not None:
            budget.charge(cost)
            action(machine, argument)
        elif name in _CONSTANTS:
            budget.charge(cost)
            machine.stack.append(_CONSTANTS[name])
        else:
            budget.charge(cost + getsizeof(argument))
            machine.stack.append(argument)
    return machine.result()


class _Machine:
    """The state of an evaluation; `at` is the place of the instruction that is being done.

    Values below `floor` lie under the last mark, out of reach of everything that takes values.
    """

    def __init__(self, path: str, budget: Budget) -> None:
        self.path = path
        self.budget = budget
        self.at = 0
        self.stack: list[object] = []
        self.floor = 0
        # The floors of the marks before: a mark is a byte, so that a list for each costs too much.
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        self.storages: dict[str, Storage] = {}

    def fail(self, what: str) -> NoReturn:
        raise PytorchError.at(
            PytorchFault.PICKLE_STACK,
            self.path,
            f"{what} at {self.at} of its pickle",
            offset=self.at,
        )

    def pop(self) -> Any:
        """Return the value on top and take it off."""
        if len(self.stack) <= self.floor:
            self.fail("nothing is left to work on")
        return self.stack.pop()

    def top(self) -> Any:
        """Return the value on top and leave it there."""
        if len(self.stack) <= self.floor:
            self.fail("nothing is left to work on")
        return self.stack[-1]

    def since_mark(self) -> list[object]:
        """Return all values since the last mark and take them off."""
        if not self.marks:
            self.fail("no mark was set")
        found = self.stack[self.floor :]
        del self.stack[self.floor :]
        self.floor = self.marks.pop()
        return found

    def result(self) -> object:
        """Return the one value that is left."""
        value = self.pop()
        if self.stack or self.marks:
            self.fail("more than one value is left")
        return value

    def drop(self, _: Any) -> None:
        if len(self.stack) > self.floor:
            self.stack.pop()
        else:  # a mark is a value to this instruction
            self.since_mark()

    def drop_mark(self, _: Any) -> None:
        self.since_mark()

    # Containers

    def mark(self, _: Any) -> None:
        self.marks.append(self.floor)
        self.floor = len(self.stack)

    def list_of(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append(items)

    def tuple_of(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append(tuple(items))

    def frozen_set(self, _: Any) -> None:
        self.since_mark()
        self.stack.append(_FROZENSET)

    def short_tuple(self, length: int) -> None:
        if (found := len(self.stack) - self.floor) < length:
            self.fail(f"{found} values for a tuple of {length}")
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
        target.items += items

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
        # Some arguments are looked at item by item, and one that is remembered serves many calls.
        for argument in arguments:
            if type(argument) is PlainDict and argument.items:
                self.budget.charge(_SLOT * len(argument.items))
            elif type(argument) is tuple and len(argument) > _USUAL_DIMENSIONS:
                self.budget.charge(_SLOT * len(argument))
        try:
            self.stack.append(call(function.name, arguments))
        except Misuse as error:
            self.refuse(str(error))

    def new_object(self, _: Any) -> None:
        # `OrderedDict.__new__(OrderedDict, items)` is empty, and torch.save writes nothing this way
        # that a file may name.
        arguments, function = self.pop(), self.pop()
        self.refuse(f"{_kind(function)} is made without a call, of {_kind(arguments)}")

    def build(self, _: Any) -> None:
        # The attributes of a state dict, such as its versions. Those of a tensor are arguments of
        # the call that makes it.
        state, target = self.pop(), self.top()
        if not isinstance(target, PlainDict) or not target.ordered:
            self.refuse(f"attributes for {_kind(target)}")
        if isinstance(state, PlainDict):
            self.budget.charge(_SLOT * len(state.items))
        if (wrong := wrong_attribute(state, _DICT_ATTRIBUTES)) is not None:
            self.refuse(f"{wrong} for {_kind(target)}")

    def refuse(self, what: str) -> NoReturn:
        raise PytorchError.at(
            PytorchFault.FORBIDDEN_CALL,
            self.path,
            f"{what} at {self.at} of its pickle",
            offset=self.at,
        )

    def storage(self, _: Any) -> None:
        identity = self.pop()
        if type(identity) is tuple and len(identity) == 5:
            kind, type_, key, place, count = identity
            texts = kind == "storage" and type(key) is str and type(place) is str
            counted = type(type_) is StorageType and type(count) is int and count >= 0
            # One on "meta" has no bytes to torch.
            if texts and counted and place != "meta":
                self.stack.append(self.same_storage(key, type_, count))
                return
        raise PytorchError.at(
            PytorchFault.STORAGE_ID,
            self.path,
            f"no storage is named at {self.at} of its pickle",
            offset=self.at,
        )

    def same_storage(self, key: str, type_: StorageType, count: int) -> Storage:
        """Return the storage of this key, which has to be what it was the first time.

        torch goes by the first time, also where what was made of it has been thrown away.
        """
        first = self.storages.get(key)
        if first is None:
            first = self.storages[key] = Storage(key, type_, count)
        elif (first.type, first.count) != (type_, count):
            raise PytorchError.at(
                PytorchFault.STORAGE_TYPE,
                self.path,
                f"its storage {shorten(key)!r} is {count} of {type_.called} at {self.at} of its "
                f"pickle and {first.count} of {first.type.called} before",
                offset=self.at,
            )
        return first

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


# What an instruction takes of memory at most, in bytes: a place on the stack and later one in a
# container, both for a moment; and what it makes. The sizes are CPython's. A dict of numbers takes
# up to 120 bytes for each while it grows.
_SLOT = 26
_REMEMBERED = 120
_MADE = 112
_COSTS: Mapping[str, int] = MappingProxyType(
    {
        "MARK": 44,
        **dict.fromkeys(("EMPTY_LIST", "LIST"), _SLOT + 56),
        **dict.fromkeys(("EMPTY_DICT", "DICT"), _SLOT + _MADE),
        **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), 64),
        **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _REMEMBERED),
        "REDUCE": _MADE,
        "BINPERSID": _MADE,
    }
)
_FROZENSET, _SET = Inert("frozenset"), Inert("set")
_CONSTANTS: Mapping[str, object] = MappingProxyType(
    {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "EMPTY_SET": _SET}
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
        "NEWOBJ": _Machine.new_object,
        "BUILD": _Machine.build,
        "BINPERSID": _Machine.storage,
    }
)
# One look-up for each instruction. A mapping proxy takes twice the time.
_STEPS = {
    name: (_COSTS.get(name, _SLOT), _ACTIONS.get(name))
    for name in (*_CONSTANTS, *_LITERALS, *_ACTIONS)
}


# Calls

Arguments = tuple[Any, ...]


class Misuse(Exception):
    """A pickle calls a function with arguments that torch.save never writes."""


def call(name: str, arguments: Arguments) -> object:
    """Return a value that stands for the result of the allowed function `name`. Nothing is called.

    Raises:
        Misuse: `torch.save` does not write a call with these arguments.
    """
    made = _CALLS[name](arguments) if name in _CALLS else _inert(name, arguments)
    if made is None:
        shown = ", ".join(type(argument).__name__ for argument in arguments[:9])
        raise Misuse(f"{name} is called with ({shown})")
    return made


def _inert(name: str, arguments: Arguments) -> Inert | None:
    return _INERT_VALUES[name] if len(arguments) <= 2 else None


def _ordered_dict(arguments: Arguments) -> PlainDict | None:
    # Its items follow, one by one.
    return PlainDict(ordered=True) if not arguments else None


def _counter(arguments: Arguments) -> Inert | None:
    """(counts): to torch a dict, in which tensors would have names."""
    match arguments:
        case (PlainDict() as counts,) if all(type(count) is int for count in counts.items[1::2]):
            return _INERT_VALUES["collections.Counter"]
    return None


def _size(arguments: Arguments) -> tuple[object, ...] | None:
    return arguments[0] if len(arguments) == 1 and _sizes(arguments[0]) else None


def _sizes(value: object) -> bool:
    # No list, which would have to be copied at every call.
    return (
        isinstance(value, tuple)
        and len(value) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < _LIMIT for size in value)
    )


def _tensor(arguments: Arguments) -> PickledTensorView | None:
    """(storage, offset, size, stride)"""
    if len(arguments) != 4 or not isinstance(arguments[0], Storage):
        return None
    storage = arguments[0]
    return _view(arguments, storage.type.dtype, ())


def _tensor_v2(arguments: Arguments) -> PickledTensorView | None:
    """(storage, offset, size, stride, requires_grad, hooks[, metadata])"""
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], Storage):
        return None
    if not _are_usual(arguments[4], arguments[5]):
        return None
    return _view(arguments[:4], arguments[0].type.dtype, arguments[6:])


def _tensor_v3(arguments: Arguments) -> PickledTensorView | None:
    """(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])"""
    if len(arguments) not in (7, 8) or not isinstance(arguments[6], Dtype):
        return None
    if not _are_usual(arguments[4], arguments[5]):
        return None
    return _view(arguments[:4], arguments[6], arguments[7:])


def _are_usual(requires_grad: object, hooks: object) -> bool:
    empty = isinstance(hooks, PlainDict) and hooks.ordered and not hooks.items
    return empty and isinstance(requires_grad, bool)


def _view(
    arguments: Arguments, dtype: Dtype | None, metadata: Arguments
) -> PickledTensorView | None:
    storage, offset, shape, stride = arguments
    if not isinstance(storage, Storage) or dtype is None or not _sizes((offset,)):
        return None
    if not _sizes(shape) or not _sizes(stride) or len(shape) != len(stride):
        return None
    flags = _flags(metadata[0]) if metadata else frozenset()
    if flags is None or ("conj" in flags and not dtype.name.startswith("C")):
        return None
    if "neg" in flags and dtype.name not in _WITH_SIGN:
        return None
    return PickledTensorView(storage, dtype, offset, shape, stride, "conj" in flags, "neg" in flags)


# What torch can negate when it is read: the imaginary parts of numbers, and those numbers.
_WITH_SIGN = frozenset({"F64", "F32", "F16", "BF16", "C128", "C64", "C32"})


def _flags(metadata: object) -> frozenset[str] | None:
    """Return the flags that are set, or None for what torch.save does not write.

    torch sets a flag that is there as a key, whatever the value.
    """
    if not isinstance(metadata, PlainDict) or metadata.ordered:
        return None
    match metadata.items:
        case [("conj" | "neg") as flag, True]:
            return frozenset({flag})
        case [("conj" | "neg") as one, True, ("conj" | "neg") as other, True] if one != other:
            return frozenset({one, other})
    return None


# Attributes of a tensor that are not merely kept when they are set: most change what the tensor is.
# Names with two underscores at both ends are refused without being listed.
TENSOR_ATTRIBUTES = frozenset(
    {
        *("H", "T", "data", "device", "dtype", "grad", "grad_dtype", "grad_fn", "imag", "itemsize"),
        *("is_cpu", "is_cuda", "is_ipu", "is_leaf", "is_maia", "is_meta", "is_mkldnn", "is_mps"),
        *("is_mtia", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan"),
        *("is_xla", "is_xpu", "layout", "mH", "mT", "name", "names", "nbytes", "ndim", "output_nr"),
        *("real", "requires_grad", "retains_grad", "shape", "volatile"),
        *("_backward_hooks", "_base", "_cdata", "_grad", "_grad_fn", "_has_symbolic_sizes_strides"),
        *("_post_accumulate_grad_hooks", "_python_dispatch", "_version"),
    }
)
# Such as `items`, by which a dict is read.
_DICT_ATTRIBUTES = frozenset(dir(OrderedDict))


def wrong_attribute(state: object, taken: frozenset[str]) -> str | None:
    """Return what is wrong with the attributes that a pickle sets on a dict or tensor.

    The result is None if nothing is wrong. `state` must be None or a plain dict from names of
    attributes to values. These names are wrong:

    * the names in `taken`, which already have a meaning in every dict or tensor;
    * names that begin with two underscores.
    """
    if state is None:
        return None
    if not isinstance(state, PlainDict) or state.ordered:
        return f"{_kind(state)} as attributes"
    for name in state.items[::2]:
        if not isinstance(name, str):
            return f"{_kind(name)} as an attribute"
        if name in taken or name.startswith("__"):
            return f"the attribute {shorten(name)!r}"
    return None


def _parameter(arguments: Arguments) -> PickledTensorView | None:
    """(data, requires_grad, hooks)"""
    if len(arguments) != 3 or not isinstance(arguments[0], PickledTensorView):
        return None
    return arguments[0] if _are_usual(arguments[1], arguments[2]) else None


def _parameter_with_state(arguments: Arguments) -> PickledTensorView | None:
    """(data, requires_grad, hooks, attributes)"""
    fits = len(arguments) == 4 and wrong_attribute(arguments[3], TENSOR_ATTRIBUTES) is None
    return _parameter(arguments[:3]) if fits else None


def _sparse(arguments: Arguments) -> SparseParts | None:
    """(layout, (indices, values, size, ...)): its parts, as tensors of their own."""
    match arguments:
        case (Inert("torch.serialization._get_layout"), tuple(parts)) if 3 <= len(parts) <= 4:
            held = parts[:2]
            if all(
                isinstance(t, PickledTensorView) and not (t.conjugated or t.negated) for t in held
            ):
                return SparseParts(parts)
    return None


def _with_attributes(arguments: Arguments) -> object | None:
    """(function, class, its arguments, attributes)"""
    match arguments:
        case (Function(name), Inert("torch.Tensor"), tuple(inner), state) if (
            name in _REBUILT and wrong_attribute(state, TENSOR_ATTRIBUTES) is None
        ):
            return call(name, inner)
    return None


_INERT_VALUES: Mapping[str, Inert] = MappingProxyType({name: Inert(name) for name in _FUNCTIONS})
_CALLS: Mapping[str, Callable[[Arguments], object | None]] = MappingProxyType(
    {
        "collections.OrderedDict": _ordered_dict,
        "collections.Counter": _counter,
        "torch.Size": _size,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor_v2,
        "torch._utils._rebuild_tensor_v3": _tensor_v3,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
        "torch._utils._rebuild_sparse_tensor": _sparse,
        "torch._tensor._rebuild_from_type_v2": _with_attributes,
    }
)
_REBUILT = frozenset(name for name in _CALLS if "_rebuild_tensor" in name)
