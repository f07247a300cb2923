"""The shape of a model's state, as it stands in its checkpoint.

A node says what stands at one place; None means a plain value: the next of the list of values. So
the shape stays the same from step to step while numbers change, and the store keeps one of it.
"""

from typing import Any, Final, TypeAlias, Union

import msgspec

from tensor_dedup.store.checkpoints.adapters.plain import Wire
from tensor_dedup.store.checkpoints.state_errors import DamagedStateError

STRUCTURE: Final = "#structure"
VALUES: Final = "#values"
FORMAT: Final = 1


class Container(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """A list, dict and so on (`kind`: its tag) that holds more than plain values."""

    kind: int
    head: Wire
    keys: list[Wire]
    items: list["Node"]


class TensorLeaf(msgspec.Struct, array_like=True, tag=1, frozen=True, omit_defaults=True):
    """A torch tensor, the piece `name`.

    `same`: the piece before it that is the same memory. `order`: of its dimensions in memory, where
    it is not C's. `grad` and `parameter`: requires_grad, and whether it is an nn.Parameter.
    """

    name: str
    same: str | None = None
    order: list[int] | None = None
    grad: bool = False
    parameter: bool = False


class ArrayLeaf(msgspec.Struct, array_like=True, tag=2, frozen=True, omit_defaults=True):
    """A numpy array, the piece `name`. `dtype` where the piece cannot say it, else None."""

    name: str
    same: str | None = None
    order: list[int] | None = None
    dtype: Wire = None


class PieceLeaf(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """A Piece that stood there."""

    name: str


class ObjectNode(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """An object of a provider, made of its state; `number` is what a RefNode calls it."""

    provider: str
    number: int
    state: "Node"


class RefNode(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """An object that stands at a place before this one too."""

    number: int


class SeriesLeaf(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """Many pieces `name`_000000 and so on; how many is the next value."""

    name: str


class ObjectArray(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """A numpy array of Python objects; its shape is the next value."""

    items: list["Node"]


class InlineTensor(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """A tensor of one element without dimensions; its bytes are the next value."""

    dtype: str


class Fixed(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """A plain value that hardly ever changes."""

    value: Wire


Node: TypeAlias = Union[  # noqa: UP007 -- forward names above, and one a line
    Container,
    TensorLeaf,
    ArrayLeaf,
    PieceLeaf,
    ObjectNode,
    RefNode,
    SeriesLeaf,
    ObjectArray,
    InlineTensor,
    Fixed,
    None,
]


class Structure(msgspec.Struct, array_like=True, frozen=True):
    """The whole piece `#structure`."""

    format: int
    root: Node


_decoder: Final = msgspec.msgpack.Decoder(Structure)


def decode_structure(data: memoryview) -> Node:
    """The root. DamagedStateError when it is none, or of a later version of this package."""
    try:
        structure = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DamagedStateError.at(STRUCTURE, str(error)) from error
    if structure.format != FORMAT:
        what = f"version {structure.format}, this package reads {FORMAT}"
        raise DamagedStateError.at(STRUCTURE, what, format=structure.format)
    return structure.root


def decode_values(data: memoryview) -> list[Any]:
    """The plain values, still on the wire."""
    try:
        return msgspec.msgpack.decode(data, type=list[Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DamagedStateError.at(VALUES, str(error)) from error


_names: Final[dict[str, list[str]]] = {}
_KEPT_NAMES: Final = 64


def series_names(name: str, count: int) -> list[str]:
    """What the pieces of a series are called. They are kept: a step has those of the one before."""
    known = _names.get(name, [])
    if len(known) < count:
        # A new list: another thread may be looking at the old one.
        known = known + [f"{name}_{number:06d}" for number in range(len(known), count)]
        if len(_names) >= _KEPT_NAMES:
            _names.clear()
        _names[name] = known
    return known[:count]
