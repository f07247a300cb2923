"""Encode plain Python values as MessagePack with their exact types. Decoding runs no code.

None, bool, 64-bit integers, float, str, bytes, and dicts with str keys are written as the same
types of MessagePack. Every other value is written as an array that begins with the tag of its type.
"""

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec

from tensor_dedup.training.errors import CyclicStateError, DamagedStateError, UnsupportedValueError

# What msgpack can say; Any, since it holds itself.
Wire: TypeAlias = Any

# Well within Python's limit: a level takes several calls.
MAX_DEPTH: Final = 100
# Tags are part of the format: never given another meaning.
LIST, TUPLE, DICT, SET, FROZENSET, ORDERED, COUNTER, DEFAULT, DEQUE = range(9)
_BYTEARRAY, _INT, _COMPLEX, _TEXT, _RANGE, _SLICE = range(16, 22)
_SCALAR, _DTYPE, _SCALAR_TYPE, _UFUNC = range(32, 36)
_TORCH_DTYPE, _TORCH_SIZE, _TORCH_DEVICE = range(48, 51)

CONTAINERS: Final[dict[type, int]] = {
    list: LIST,
    tuple: TUPLE,
    dict: DICT,
    set: SET,
    frozenset: FROZENSET,
    OrderedDict: ORDERED,
    Counter: COUNTER,
    defaultdict: DEFAULT,
    deque: DEQUE,
}
MAPPINGS: Final = frozenset({DICT, ORDERED, COUNTER, DEFAULT})
# What a defaultdict may make: they take no argument and do nothing else.
_FACTORIES: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (list, dict, OrderedDict, set, tuple, int, float, str, bytes, bool)
}
# numpy's isbuiltin of a type that another package has added: its code says nothing elsewhere.
_OF_OTHERS: Final = 2
_INT_RANGE: Final = range(-(1 << 63), 1 << 64)


def encode(value: object, place: str, depth: int = 0) -> Wire:
    """Convert the plain value `value` to values that MessagePack can represent.

    `place` is the path of the value, for messages. `depth` is the number of containers around it.

    Raises:
        UnsupportedValueError: The value, or a value in it, cannot be stored. The error has its
            path.
        CyclicStateError: Containers are nested too deeply.
    """
    tag = CONTAINERS.get(type(value))
    if tag is None:
        return scalar(value, place)
    if depth >= MAX_DEPTH:
        raise CyclicStateError.at(place, f"nested more than {MAX_DEPTH} deep")
    if is_flat(value):
        return [tag, *value]  # type: ignore[misc]
    if isinstance(value, dict):
        keys = [encode(key, f"{place}.keys()", depth + 1) for key in value]
        named = ((f"{place}[{key!r}]", held) for key, held in value.items())
        return wrap(value, keys, [encode(held, at, depth + 1) for at, held in named])
    items: Sequence[object] = list(value)  # type: ignore[call-overload]
    return wrap(value, [], [encode(x, f"{place}[{i}]", depth + 1) for i, x in enumerate(items)])


def is_flat(value: object) -> bool:
    """Return whether `value` is a list or a tuple of numbers that need no further encoding.

    It must have at least four items, all of one type: int (in the range of 64 bits), float or bool.
    """
    if not isinstance(value, list | tuple) or len(value) < 4:
        return False
    kinds = set(map(type, value))
    if kinds == {int}:
        return bool(min(value) >= _INT_RANGE.start and max(value) < _INT_RANGE.stop)
    return kinds in ({float}, {bool})


def scalar(value: object, place: str) -> Wire:
    """Encode `value`, which contains no other values. `place` is its path, for messages.

    Raises:
        UnsupportedValueError: The value cannot be stored.
    """
    encoder = _SCALARS.get(type(value))
    if encoder is not None:
        return encoder(value)
    for package, known in (("numpy", _of_numpy), ("torch", _of_torch)):
        if package in sys.modules and (found := known(sys.modules[package], value)) is not None:
            return found
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UnsupportedValueError.at(place, f"a {kind} has no form in a checkpoint", type=kind)


def is_scalar(value: object) -> bool:
    """Return whether the type of `value` is a built-in type that cannot contain other values."""
    return type(value) in _SCALARS


def header(container: object) -> Wire:
    """Return the extra argument that a container's type needs, encoded.

    This is the factory of a defaultdict, or the `maxlen` of a deque; for other containers it is
    None.

    Raises:
        UnsupportedValueError: The factory of the defaultdict cannot be stored.
    """
    if isinstance(container, deque):
        return container.maxlen
    if isinstance(container, defaultdict):
        factory = container.default_factory
        known = next((name for name, kind in _FACTORIES.items() if kind is factory), None)
        if factory is not None and known is None:
            raise UnsupportedValueError.at("", f"a defaultdict that calls {factory!r}")
        return known
    return None


def wrap(container: object, keys: Sequence[Wire], items: Sequence[Wire]) -> Wire:
    """Return the encoding of `container`, given its keys and items, which are encoded already.

    `keys` is empty if the container is not a mapping.
    """
    tag = CONTAINERS[type(container)]
    if tag == DICT and all(type(key) is str for key in keys):
        return dict(zip(keys, items, strict=True))
    content = list(chain.from_iterable(zip(keys, items, strict=True))) if keys else list(items)
    if tag in (SET, FROZENSET):  # their order differs from process to process
        content.sort(key=msgspec.msgpack.encode)
    return [tag, header(container), *content] if tag in (DEFAULT, DEQUE) else [tag, *content]


def decode(wire: Wire) -> Any:
    """Return the value that `encode` has encoded as `wire`.

    Raises:
        DamagedStateError: The encoding is not valid.
    """
    try:
        return _decoded(wire)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise DamagedStateError.at("#values", f"no plain value: {error}") from error


def build(tag: int, head: Wire, keys: Sequence[Any], items: Sequence[Any]) -> Any:
    """Return a container of the type `tag`, built from its decoded keys and items.

    `head` is the extra argument that `header` returns.

    Raises:
        KeyError, TypeError, ValueError: The arguments do not fit the container's type.
    """
    if tag == DEFAULT:
        factory = None if head is None else _FACTORIES[head]
        return defaultdict(factory, zip(keys, items, strict=True))
    if tag == DEQUE:
        return deque(items, head)
    if tag in MAPPINGS:
        return _KINDS[tag](dict(zip(keys, items, strict=True)))
    return _KINDS[tag](items)


def _decoded(wire: Wire) -> Any:
    if isinstance(wire, dict):
        return {key: _decoded(held) for key, held in wire.items()}
    if not isinstance(wire, list):
        return wire
    tag = wire[0]
    if tag in _DECODERS:
        return _DECODERS[tag](*wire[1:])
    head, content = (wire[1], wire[2:]) if tag in (DEFAULT, DEQUE) else (None, wire[1:])
    if tag in MAPPINGS:
        return build(tag, head, _all(content[::2]), _all(content[1::2]))
    return build(tag, head, (), _all(content))


def _all(wires: Sequence[Wire]) -> list[Any]:
    return [_decoded(wire) if isinstance(wire, list | dict) else wire for wire in wires]


def _of_int(value: int) -> Wire:
    if value in _INT_RANGE:
        return value
    size = value.bit_length() // 8 + 1
    return [_INT, value.to_bytes(size, "little", signed=True)]


def _of_text(value: str) -> Wire:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return [_TEXT, value.encode("utf-8", "surrogatepass")]
    return value


def _same(value: Any) -> Wire:
    return value


def _of_slice(value: slice) -> Wire:
    return [_SLICE, *(encode(part, "slice") for part in (value.start, value.stop, value.step))]


_SCALARS: Final[dict[type, Callable[[Any], Wire]]] = {
    type(None): _same,
    bool: _same,
    float: _same,
    bytes: _same,
    int: _of_int,
    str: _of_text,
    bytearray: lambda value: [_BYTEARRAY, bytes(value)],
    complex: lambda value: [_COMPLEX, value.real, value.imag],
    range: lambda value: [_RANGE, *map(_of_int, (value.start, value.stop, value.step))],
    slice: _of_slice,
}


def _of_numpy(numpy: Any, value: object) -> Wire | None:
    if isinstance(value, numpy.generic):
        return _of_numpy_scalar(numpy, value)
    if isinstance(value, numpy.dtype):
        try:
            return None if value.hasobject else [_DTYPE, dtype_wire(value)]
        except ValueError:
            return None
    if isinstance(value, numpy.ufunc):
        name = str(value.__name__)
        return [_UFUNC, name] if vars(numpy).get(name) is value else None
    if isinstance(value, type) and issubclass(value, numpy.generic):
        return [_SCALAR_TYPE, value.__name__] if _type_of(value.__name__) is value else None
    return None


def _of_numpy_scalar(numpy: Any, value: Any) -> Wire | None:
    if value.dtype.hasobject or value.dtype == numpy.longdouble or value.dtype.kind in "VTG":
        return None
    if value.dtype == numpy.clongdouble or value.dtype.isbuiltin == _OF_OTHERS:
        return None
    little = value.dtype.newbyteorder("<")
    # A text of no length is an array of one zero to asarray.
    return [_SCALAR, little.str, numpy.asarray(value, little).tobytes()[: little.itemsize]]


def _type_of(name: str) -> Any:
    import numpy as np

    found = vars(np).get(name)  # getattr would import packages of this name
    return found if isinstance(found, type) and issubclass(found, np.generic) else None


def dtype_wire(dtype: Any) -> Wire:
    """Encode a numpy dtype with its byte order and, for records, its fields and their offsets.

    Raises:
        ValueError: The dtype cannot be made again from the description that numpy gives of it.
    """
    import numpy as np

    described = np.lib.format.dtype_to_descr(dtype)  # type: ignore[no-untyped-call]
    # Of what another package has added, and of arrays in arrays, it gives the size only.
    try:
        same = np.lib.format.descr_to_dtype(described) == dtype  # type: ignore[no-untyped-call]
    except TypeError:
        same = False
    if not same:
        raise ValueError(f"numpy describes it as {described}")
    return encode(described, "dtype")


def dtype_of(wire: Wire) -> Any:
    """Return the numpy dtype that `dtype_wire` has encoded as `wire`.

    Raises:
        DamagedStateError: `wire` does not encode a dtype, or the dtype holds Python objects.
    """
    import numpy as np

    try:
        dtype = np.lib.format.descr_to_dtype(_decoded(wire))  # type: ignore[no-untyped-call]
    except (TypeError, ValueError, KeyError, IndexError, SyntaxError, RecursionError) as error:
        raise DamagedStateError.at("#structure", f"no dtype: {error}") from error
    if dtype.hasobject:
        raise DamagedStateError.at("#structure", f"a dtype of Python objects: {dtype}")
    return dtype


def _numpy_scalar(code: str, data: bytes) -> Any:
    import numpy as np

    dtype = dtype_of(code)
    if dtype.itemsize != len(data):
        raise DamagedStateError.at("#values", f"{len(data)} bytes are no {code}")
    # From their bytes: taken from an array, texts lose the zeros at their ends.
    if dtype.kind == "S":
        return np.bytes_(data)
    if dtype.kind == "U":
        order = "be" if dtype.str.startswith(">") else "le"
        try:
            return np.str_(data.decode(f"utf-32-{order}", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise DamagedStateError.at("#values", f"no text: {error}") from error
    # Not frombuffer: it refuses records of no length.
    return np.ndarray((), dtype, data)[()]


def _scalar_type(name: str) -> Any:
    if (found := _type_of(name)) is None:
        raise DamagedStateError.at("#values", f"numpy has no type {name}")
    return found


def _ufunc(name: str) -> Any:
    import numpy as np

    found = vars(np).get(name)
    if not isinstance(found, np.ufunc):
        raise DamagedStateError.at("#values", f"numpy has no function {name}")
    return found


def _of_torch(torch: Any, value: object) -> Wire | None:
    if isinstance(value, torch.dtype):
        return [_TORCH_DTYPE, str(value).removeprefix("torch.")]
    if isinstance(value, torch.Size):
        return [_TORCH_SIZE, *map(int, value)]
    if isinstance(value, torch.device):
        return [_TORCH_DEVICE, value.type, value.index]
    return None


def _torch_dtype(name: str) -> Any:
    import torch

    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise DamagedStateError.at("#values", f"torch has no dtype {name}")
    return found


def _torch_size(*sizes: int) -> Any:
    import torch

    return torch.Size(sizes)


def _torch_device(kind: str, index: int | None) -> Any:
    import torch

    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except RuntimeError as error:
        raise DamagedStateError.at("#values", f"torch knows no device {kind}") from error


def _big_int(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_KINDS: Final[dict[int, Any]] = {tag: kind for kind, tag in CONTAINERS.items()}
_DECODERS: Final[dict[int, Callable[..., Any]]] = {
    _BYTEARRAY: lambda data: bytearray(memoryview(data)),  # of a number it would make room
    _INT: _big_int,
    _COMPLEX: complex,
    _TEXT: lambda data: data.decode("utf-8", "surrogatepass"),
    _RANGE: lambda *parts: range(*_all(parts)),
    _SLICE: lambda *parts: slice(*_all(parts)),
    _SCALAR: _numpy_scalar,
    _DTYPE: dtype_of,
    _SCALAR_TYPE: _scalar_type,
    _UFUNC: _ufunc,
    _TORCH_DTYPE: _torch_dtype,
    _TORCH_SIZE: _torch_size,
    _TORCH_DEVICE: _torch_device,
}
