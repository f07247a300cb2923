"""Evaluates a pickle to inert values. No class is looked up, no function called, nothing imported.

A stack of values, marks on it, and a memo, as in Python's pickle; containers are lists, tuples and
`PlainDict`s, tensors `PickledTensorView`s, and everything else that is allowed becomes `Inert`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from tensor_dedup.formats.errors import PytorchError, PytorchFault, shorten
from tensor_dedup.formats.pytorch.allowed import find
from tensor_dedup.formats.pytorch.calls import Misuse, call
from tensor_dedup.formats.pytorch.opcodes import instructions
from tensor_dedup.formats.pytorch.values import (
    Function,
    Inert,
    PickledTensorView,
    PlainDict,
    Storage,
    StorageType,
)

# A tensor takes some 45 instructions; the largest checkpoints have 100,000 tensors in a file.
MAX_INSTRUCTIONS = 10_000_000
_HIGHEST_PROTOCOL = 5


def evaluate(blob: bytes, path: str) -> object:
    """The value a pickle describes. PytorchError, and nothing else; runs no code of the pickle.

    Memory: some 100 bytes for an instruction, of which there are MAX_INSTRUCTIONS at most.
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
        """The value on top, which goes."""
        if not self.stack:
            self.fail("nothing is left to work on")
        return self.stack.pop()

    def top(self) -> Any:
        """The value on top, which stays."""
        if not self.stack:
            self.fail("nothing is left to work on")
        return self.stack[-1]

    def since_mark(self) -> list[object]:
        """All values since the last mark, which go."""
        if not self.marks:
            self.fail("no mark was set")
        found, self.stack = self.stack, self.marks.pop()
        return found

    def result(self) -> object:
        """The one value that is left."""
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
