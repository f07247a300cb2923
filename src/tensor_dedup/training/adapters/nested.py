"""Take structures apart: each tensor or array becomes a piece, all the rest two more pieces.

The piece for a tensor or an array is named by the keys that lead to it, joined by dots, so a state
dict keeps its names.

The two other pieces are `#structure` and `#values`. `#structure` is a tree of nodes, each of
which describes one value. A plain value, such as a number, is in `#values`, and its node is None.
So `#structure` stays the same from step to step while numbers change, and the store holds it once.
FORMAT.md defines both pieces.
"""

import sys
from collections import OrderedDict
from collections.abc import Collection, Generator, Hashable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Union

import msgspec

from tensor_dedup.store.gathered import flat_bytes, place_of
from tensor_dedup.training.adapters import arrays, plain
from tensor_dedup.training.adapters.base import (
    PieceSeries,
    StateProvider,
    ValuePath,
    placed,
    providers,
)
from tensor_dedup.training.adapters.plain import Wire
from tensor_dedup.training.errors import (
    CyclicStateError,
    DamagedStateError,
    StateError,
    UnsupportedArrayError,
    UnsupportedValueError,
)
from tensor_dedup.training.state import (
    LAST_GROUP,
    NamedValue,
    StateChunk,
    dtype_names,
    is_array,
    is_tensor,
    of_its_size,
    raw,
    tensor_fault,
)

if TYPE_CHECKING:
    from tensor_dedup.training.state import Value


STRUCTURE: Final = "#structure"
VALUES: Final = "#values"
FORMAT: Final = 1
_RESERVED: Final = "#"
_ALONE: Final = "tensor"
_OPTIMIZER_KEYS: Final = frozenset({"state", "param_groups"})
_KEPT_NAMES: Final = 64
# So many chunks are handed out together: to come back to where each was met takes a microsecond.
_MANY: Final = 64
# Of each end of a value, what says whether its memory was filled again.
_SAMPLE: Final = 4096
_names: Final[dict[str, list[str]]] = {}


class Container(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """The node for a container, such as a dict, in the tree that describes a saved object.

    * `kind` is the tag of the container's type.
    * `head` is the factory of a defaultdict, or the `maxlen` of a deque, and None otherwise.
    * `keys` has the encoded keys of a dict, and `items` a node for each item.

    A list or dict of plain values needs no such node, because it is a plain value itself.
    """

    kind: int
    head: Wire
    keys: list[Wire]
    items: list["Node"]


class TensorLeaf(msgspec.Struct, array_like=True, tag=1, frozen=True, omit_defaults=True):
    """The node for a torch tensor in the tree that describes a saved object.

    * `name` is the name of the piece that has the tensor's elements.
    * `same` is the name of an earlier piece with which the tensor shares its memory, or None.
    * `order` is the order of the tensor's dimensions in memory, or None for C order.
    * `grad` is the tensor's `requires_grad`.
    * `parameter` is True for an `nn.Parameter`.
    """

    name: str
    same: str | None = None
    order: list[int] | None = None
    grad: bool = False
    parameter: bool = False


class ArrayLeaf(msgspec.Struct, array_like=True, tag=2, frozen=True, omit_defaults=True):
    """The node for a numpy array in the tree that describes a saved object.

    * `name` is the name of the piece that has the array's elements.
    * `same` is the name of an earlier piece for the same array, or None.
    * `order` is the order of the array's dimensions in memory, or None for C order.
    * `dtype` is the encoded dtype of the array, or None if the piece has the same dtype.
    """

    name: str
    same: str | None = None
    order: list[int] | None = None
    dtype: Wire = None


class PieceLeaf(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """The node for a value that a load returns as a NamedValue, such as the bytes of a StateChunk.

    `name` is the name of the piece that has the bytes of the value.
    """

    name: str


class ObjectNode(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """The node for an object with a StateProvider, in the tree that describes a saved object.

    `provider` is the name of the provider, and `state` the node for the object's state. If the same
    object occurs again, its node there is a RefNode with the same `number`.
    """

    provider: str
    number: int
    state: "Node"


class RefNode(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """The node for an object that has occurred before, in an ObjectNode with the same `number`."""

    number: int


class SeriesLeaf(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """The node for a series of byte strings, in the tree that describes a saved object.

    Each byte string is a piece. The pieces are called `name`_000000, `name`_000001 and so on. The
    piece `#values` says how many there are.
    """

    name: str


class ObjectArray(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """The node for a numpy array of Python objects, in the tree that describes a saved object.

    `items` has a node for each object. The shape of the array is stored in the piece `#values`.
    """

    items: list["Node"]


class InlineTensor(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """The node for a 0-dimensional tensor whose bytes are stored in the piece `#values`."""

    dtype: str


class Fixed(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """The node for a plain value that hardly ever changes, and is stored in the node itself."""

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
    """The decoded piece `#structure`, a tree of nodes that describes a saved object."""

    format: int
    root: Node


_decoder: Final = msgspec.msgpack.Decoder(Structure)


def decode_structure(data: memoryview) -> Node:
    """Decode the piece `#structure` and return its root node.

    Raises:
        DamagedStateError: The bytes are not a structure, or were written by a later version of this
            package.
    """
    try:
        structure = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DamagedStateError.at(STRUCTURE, str(error)) from error
    if structure.format != FORMAT:
        what = f"version {structure.format}, this package reads {FORMAT}"
        raise DamagedStateError.at(STRUCTURE, what, format=structure.format)
    return structure.root


def decode_values(data: memoryview) -> list[Any]:
    """Decode the piece `#values` and return the plain values, each still encoded.

    Raises:
        DamagedStateError: The bytes are not a MessagePack array.
    """
    try:
        return msgspec.msgpack.decode(data, type=list[Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DamagedStateError.at(VALUES, str(error)) from error


def series_names(name: str, count: int) -> list[str]:
    """Return the names of the `count` pieces of the series `name`.

    The names are cached, because the next step has the same names.
    """
    known = _names.get(name, [])
    if len(known) < count:
        # A new list: another thread may be looking at the old one.
        known = known + [f"{name}_{number:06d}" for number in range(len(known), count)]
        if len(_names) >= _KEPT_NAMES:
            _names.clear()
        _names[name] = known
    return known[:count]


def take_apart(model: object) -> Iterator[StateChunk]:
    """Yield the chunks of `model` in the order in which its parts are found.

    The chunks `#structure` and `#values` come last.

    Raises:
        StateError: A part of the model cannot be stored; the error names its path.
    """
    walk = _Walk()
    nodes: list[Node] = []

    def whole() -> Iterator[None]:
        nodes.append((yield from walk.node(model, ValuePath(), 0)))

    try:
        for _ in whole():
            yield from walk.taken()
        yield from walk.taken()
    except RecursionError as error:
        raise CyclicStateError.at("", "nested too deeply for this stack") from error
    structure = Structure(FORMAT, nodes[0])
    # The nodes belong to nobody else, whereas plain values may be shared with the model.
    yield StateChunk(
        None, STRUCTURE, LAST_GROUP, frozen=True, make=lambda: msgspec.msgpack.encode(structure)
    )
    yield StateChunk(msgspec.msgpack.encode(walk.values), VALUES, LAST_GROUP)


class _Walk:
    """One walk through a model. Its generators yield when there may be new chunks to be `taken`."""

    def __init__(self) -> None:
        # By name, also kept: a tensor's address is another's when it is gone.
        self.tensors: dict[str, Value] = {}
        self.series: list[frozenset[str]] = []
        self.values: list[plain.Wire] = []
        self._ready: list[StateChunk] = []
        self._hints = StateChunk()
        # What is compared by identity is kept: what replaced it in memory would have its identity.
        self._numbers: dict[int, tuple[int, object]] = {}
        self._open: set[int] = set()
        self._memories: dict[tuple[Any, ...], str] = {}
        self._kept: list[object] = []
        self._inline = False
        # By the memory of each value that an iterator has given: its name, and some of its bytes.
        self._iterating = False
        self._samples: dict[Hashable, tuple[str, bytes]] = {}

    def taken(self) -> list[StateChunk]:
        """Return the chunks that were met since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def node(self, value: Any, place: ValuePath, depth: int) -> "_Walking":
        """Return the node for a value; None once its plain form was added to the values."""
        if plain.is_scalar(value) or (depth and plain.is_flat(value)):
            self.values.append(plain.encode(value, "", depth))
            return None
        if depth >= plain.MAX_DEPTH:
            raise CyclicStateError.at(str(place), f"nested more than {plain.MAX_DEPTH} deep")
        try:
            if is_tensor(value) and not _is_sparse(value):
                leaf = self._tensor(value, place)
            elif is_array(value) and value.dtype != object and not _is_masked(value):
                leaf = self._array(value, place)
            else:
                leaf = yield from self._other(value, place, depth)
        except StateError as error:
            if error.facts.get("place"):
                raise
            raise placed(error, place) from error
        if len(self._ready) >= _MANY:
            yield
        return leaf

    def _other(self, value: Any, place: ValuePath, depth: int) -> "_Walking":
        if isinstance(value, NamedValue):
            return PieceLeaf(self._add(place, of_its_size(value)))
        if isinstance(value, PieceSeries):
            return self._series(value, place)
        if isinstance(value, StateChunk):
            return (yield from self._hinted(value, place, depth))
        if is_array(value) and value.dtype == object and not _is_masked(value):
            return (yield from self._object_array(value, place, depth))
        if type(value) in plain.CONTAINERS and not hasattr(value, "_metadata"):
            return (yield from self._container(value, place, depth))
        if (provider := _provider_of(value)) is not None:
            return (yield from self._object(value, provider, place, depth))
        self.values.append(plain.scalar(value, str(place)))
        return None

    def _hinted(self, chunk: StateChunk, place: ValuePath, depth: int) -> "_Walking":
        """Walk through a part with hints, which hold for everything in it unless that has some."""
        outer = self._hints
        self._hints = StateChunk(
            group=chunk.group or outer.group, frozen=chunk.frozen or outer.frozen
        )
        if chunk.make is not None:
            node: Node = PieceLeaf(self._add(place, None, chunk.make))
        elif isinstance(chunk.source, bytes | bytearray | memoryview):
            node = PieceLeaf(self._add(place, chunk.source))
        else:
            node = yield from self.node(chunk.source, place, depth)
        self._hints = outer
        return node

    def _container(self, value: Any, place: ValuePath, depth: int) -> "_Walking":
        tag, head = plain.CONTAINERS[type(value)], plain.header(value)
        inline, self._inline = self._inline, self._inline or _is_optimizer_state(value)
        first = len(self.values)
        items: list[Node] = []
        if tag in plain.MAPPINGS:
            keys = _keys(value, place, depth + 1)
            for key, held in value.items():
                if self._inline and key == "params" and _are_numbers(held):
                    items.append(Fixed(plain.encode(held, "", depth + 1)))
                else:
                    items.append((yield from self.node(held, place.key(key), depth + 1)))
        else:
            keys = []
            if tag in (plain.SET, plain.FROZENSET):
                self.values.append(plain.encode(value, str(place), depth))
                return None
            for number, held in enumerate(value):
                items.append((yield from self.node(held, place.item(number), depth + 1)))
        self._inline = inline
        if any(item is not None for item in items):
            return Container(tag, head, keys, items)
        # All plain: then it is one plain value.
        self.values[first:] = [plain.wrap(value, keys, self.values[first:])]
        return None

    def _object(
        self, value: object, provider: StateProvider, place: ValuePath, depth: int
    ) -> "_Walking":
        if (known := self._numbers.get(id(value))) is not None:
            if id(value) in self._open:
                raise CyclicStateError.at(str(place), "an object that is part of its own state")
            return RefNode(known[0])
        if self._ready:  # is taken before anything is serialised
            yield
        number = len(self._numbers)
        self._numbers[id(value)] = number, value
        self._open.add(id(value))
        inline, self._inline = self._inline, provider.inline
        node = yield from self._state(provider.state(value), provider, place, depth + 1)
        self._inline = inline
        self._open.discard(id(value))
        return ObjectNode(provider.name, number, node)

    def _state(
        self, state: Any, provider: StateProvider, place: ValuePath, depth: int
    ) -> "_Walking":
        """Return the node for the state of an object, mostly a dict with keys like attributes."""
        if type(state) is not dict and not isinstance(state, Iterator):
            return (yield from self.node(state, place, depth))
        keys: list[object] = []
        items: list[Node] = []
        iterating, self._iterating = self._iterating, self._iterating or type(state) is not dict
        for key, held in state.items() if type(state) is dict else state:
            keys.append(key)
            at = place.key(key, attribute=True, flat=key in provider.flat)
            if key in provider.fixed:
                items.append(Fixed(plain.encode(held, str(at), depth)))
            else:
                items.append((yield from self.node(held, at, depth + 1)))
            if type(state) is not dict and self._ready:  # before the next part is made
                yield
        self._iterating = iterating
        wires = _keys(keys, place, depth)
        if type(state) is not dict and len(set(map(msgspec.msgpack.encode, wires))) != len(keys):
            raise UnsupportedValueError.at(str(place), "a state with two parts of one key")
        return Container(plain.DICT, None, wires, items)

    def _tensor(self, tensor: Any, place: ValuePath) -> Node:
        if fault := tensor_fault(tensor):
            raise UnsupportedArrayError.at(str(place), fault)
        if self._inline and tensor.dim() == 0 and tensor.device.type == "cpu":
            return self._inlined(tensor)
        memory = ("torch", tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        # Conjugates and negatives are other values in the same memory.
        seen = (tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
        name, same = self._leaf(place, tensor, memory + seen, tensor.numel())
        order = None
        if not tensor.is_contiguous():
            order = arrays.order_of(tensor.shape, tensor.stride(), 1)
        parameter = type(tensor).__name__ == "Parameter"
        grad = tensor.requires_grad and tensor.is_leaf
        return TensorLeaf(name, same, order, grad, parameter)

    def _inlined(self, tensor: Any) -> Node:
        if tensor.dtype not in dtype_names():
            raise UnsupportedArrayError.at("", f"a tensor of dtype {tensor.dtype}")
        self.values.append(bytes(raw(tensor)))
        return InlineTensor(dtype_names()[tensor.dtype])

    def _object_array(self, array: Any, place: ValuePath, depth: int) -> "_Walking":
        self.values.append(list(array.shape))
        children: list[Node] = []
        for number, held in enumerate(array.reshape(-1).tolist()):
            children.append((yield from self.node(held, place.item(number), depth + 1)))
        return ObjectArray(children)

    def _array(self, array: Any, place: ValuePath) -> Node:
        stored, dtype = arrays.storable(array)
        name, same = self._leaf(place, stored, ("numpy", id(array)), array.size, array)
        order = arrays.order_of(array.shape, array.strides, array.itemsize)
        return ArrayLeaf(name, same, order, dtype)

    def _leaf(
        self, place: ValuePath, held: Any, memory: tuple[Any, ...], size: int, kept: object = None
    ) -> tuple[str, str | None]:
        name = self._add(place, held)
        if not size:
            return name, None
        self._kept.append(kept)
        first = self._memories.setdefault(memory, name)
        return name, None if first == name else first

    def _series(self, series: PieceSeries, place: ValuePath) -> Node:
        base = self._free(place.key(series.name).name, series_names("", 1)[0])
        names = series_names(base, len(series.items))
        if not self.tensors.keys().isdisjoint(names):  # by a key that looks like one of its names
            return self._series(PieceSeries(f"{series.name}~", series.items), place)
        sizes = list(map(len, series.items))
        shapes = {size: (size,) for size in set(sizes)}  # many are alike: not an object for each
        made = map(NamedValue, names, repeat("U8"), map(shapes.__getitem__, sizes), series.items)
        self._ready += map(StateChunk, made, names, repeat(base), repeat(self._hints.frozen))
        self.series.append(frozenset(names))
        self.values.append(len(series.items))
        return SeriesLeaf(base)

    def _add(self, place: ValuePath, held: Any, make: Any = None) -> str:
        name = self._free(place.name or _ALONE)
        self.tensors[name] = held
        if self._iterating and make is None:
            self._check_not_refilled(name, held)
        self._ready.append(StateChunk(held, name, self._hints.group, self._hints.frozen, make))
        return name

    def _check_not_refilled(self, name: str, held: Any) -> None:
        """Check that the memory of a value has not held another value of the same iterator before.

        A save may read a value later, and loads one that has the memory of another one as that.

        Raises:
            StateError: It has, as far as the ends of the value show.
        """
        chunk = StateChunk(held, name)
        if chunk.residence == "device":
            return
        view = flat_bytes(chunk.piece().data)
        if not view.nbytes:
            return
        ends = slice(0, _SAMPLE), slice(max(view.nbytes - _SAMPLE, 0), view.nbytes)
        sample = b"".join(bytes(view[end]) for end in ends)
        first, found = self._samples.setdefault(place_of(view), (name, sample))
        if sample != found:
            what = f"its memory held {first!r} before; a provider gives each memory of its own"
            raise StateError.at(name, what, first=first)

    def _taken(self, name: str) -> bool:
        return name in self.tensors or any(name in each for each in self.series)

    def _free(self, name: str, suffix: str = "") -> str:
        """Return a name that is free: keys with dots can lead to one name from two places."""
        if not name.isascii():
            name = name.encode("utf-8", "backslashreplace").decode()
        name = f"_{name}" if name.startswith(_RESERVED) else name
        tried, number = name, 1
        while self._taken(tried + suffix):
            tried, number = f"{name}~{number}", number + 1
        return tried


# A generator that yields when chunks were met, and returns a node.
_Walking: TypeAlias = Generator[None, None, Node]


def _keys(keys: Collection[object], place: ValuePath, depth: int) -> list[plain.Wire]:
    if all(type(key) is str and key.isascii() for key in keys):
        return list(keys)  # the most, and without a word on where they are
    return [plain.encode(key, f"{place}.keys()", depth) for key in keys]


def _is_sparse(tensor: Any) -> bool:
    return tensor.layout != sys.modules["torch"].strided and not tensor.is_meta


def _is_masked(array: Any) -> bool:
    return type(array).__name__ == "MaskedArray" and providers.named("numpy.masked") is not None


def _provider_of(value: Any) -> StateProvider | None:
    if is_tensor(value):
        provider = providers.named("torch.sparse")
        if provider is None or not str(value.layout).startswith("torch.sparse"):
            raise UnsupportedArrayError.at("", f"a tensor of layout {value.layout}")
        return provider
    if is_array(value):
        return providers.named("numpy.masked")
    return providers.find(type(value)) or _by_habit(value)


def _is_optimizer_state(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == _OPTIMIZER_KEYS


def _are_numbers(held: object) -> bool:
    """Return whether these are parameter numbers of an optimizer's state dict."""
    return isinstance(held, list) and set(map(type, held)) <= {int}


def _by_habit(value: object) -> StateProvider | None:
    """Return the provider for any object with `state_dict` and `load_state_dict`."""
    if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
        return providers.named("torch.state_dict")
    methods = (getattr(type(value), name, None) for name in ("state_dict", "load_state_dict"))
    return providers.named("stateful") if all(map(callable, methods)) else None
