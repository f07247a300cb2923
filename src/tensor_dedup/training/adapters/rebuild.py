"""Reassemble structures that were taken apart, into an existing object or into new ones.

Parts of the existing object may share memory, such as tied weights or views of the same buffer.
Filling one of these parts changes the others. So every part that overlaps another part is compared
with its saved value at the end.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensor_dedup.training.adapters.nested import take_apart

if TYPE_CHECKING:
    from tensor_dedup.training.state import Value

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from tensor_dedup.store.gathered import flat_bytes
from tensor_dedup.training.adapters import arrays, nested, plain
from tensor_dedup.training.adapters.base import (
    PieceSeries,
    StateProvider,
    ValuePath,
    located,
    providers,
)
from tensor_dedup.training.errors import (
    DamagedStateError,
    MismatchedOriginalError,
    UnknownProviderError,
)
from tensor_dedup.training.state import (
    NamedValue,
    StateChunk,
    dtype_names,
    in_groups,
    is_array,
    is_tensor,
    pieces,
    raw,
    value,
)

if TYPE_CHECKING:
    from tensor_dedup.training.state import Value


_NAMED = 5


def put_together(tensors: "Mapping[str, Value]", original: object = None) -> Any:
    """Return the structure that `take_apart` has taken apart into `tensors`.

    If `original` has an object at the same place in the structure, the object is filled and kept.
    This holds for modules, optimizers and other objects with a provider, for dicts and lists, and
    for tensors and arrays of equal shape and dtype. Without `original`, modules and optimizers are
    returned as their state dicts. The values belong to the result from now on. After an error,
    parts of `original` may already be filled.

    Raises:
        MismatchedOriginalError: Two parts of `original` share memory, or are the same object, but
            their saved values differ.
        StateError: The values are damaged, or do not fit `original`.
    """
    rebuild = _Rebuild(tensors)
    root = nested.decode_structure(raw(rebuild.piece(nested.STRUCTURE)))
    result = rebuild.node(root, ValuePath(), original)
    rebuild.finish()
    return result


class _Rebuild:
    def __init__(self, tensors: "Mapping[str, Value]") -> None:
        self._tensors = tensors
        wires = nested.decode_values(raw(self.piece(nested.VALUES)))
        self._count = len(wires)
        self._wires = iter(wires)
        self._objects: dict[int, Any] = {}
        self._leaves: dict[str, Any] = {}
        # Of one memory there may be a parameter and a tensor beside it: each stays one object.
        self._faces: dict[tuple[str, bool, bool], Any] = {}
        self._originals = Originals()

    def piece(self, name: str) -> "Value":
        """Return the value of this name."""
        try:
            return self._tensors[name]
        except KeyError as error:
            raise DamagedStateError.at(name, "the piece is not there") from error

    def finish(self) -> None:
        """Check that no plain value is left over, and that no part was filled twice differently."""
        if next(self._wires, None) is not None:
            raise DamagedStateError.at(nested.VALUES, f"more values than places, {self._count}")
        self._originals.check()

    def node(self, node: nested.Node, place: ValuePath, original: object) -> Any:
        """Make what stands at one place."""
        if isinstance(original, StateChunk):
            original = original.source
        match node:
            case None:
                return plain.decode(self._wire())
            case nested.TensorLeaf():
                return self._tensor(node, place, original)
            case nested.ArrayLeaf():
                return self._array(node, place, original)
            case nested.Container():
                return self._container(node, place, original)
            case nested.ObjectNode():
                return self._object(node, place, original)
            case nested.RefNode():
                return self._known(node)
            case _:
                return self._rare(node, place, original)

    def _rare(self, node: nested.Node, place: ValuePath, original: object) -> Any:
        match node:
            case nested.SeriesLeaf():
                return self._series(node)
            case nested.ObjectArray():
                return self._object_array(node, place, original)
            case nested.InlineTensor():
                return self._inlined(node)
            case nested.PieceLeaf():
                return as_piece(node.name, self.piece(node.name))
            case nested.Fixed():
                return plain.decode(node.value)
            case _:
                raise DamagedStateError.at(str(place), "an unknown kind of node")

    def _wire(self) -> plain.Wire:
        try:
            return next(self._wires)
        except StopIteration as error:
            raise DamagedStateError.at(nested.VALUES, "fewer values than places") from error

    def _container(self, node: nested.Container, place: ValuePath, original: Any) -> Any:
        keys = [plain.decode(key) for key in node.keys]
        if len(keys) != (len(node.items) if node.kind in plain.MAPPINGS else 0):
            raise DamagedStateError.at(str(place), "keys and items differ in number")
        original = self._originals.unused(original)
        items = []
        for number, item in enumerate(node.items):
            key = keys[number] if keys else number
            at = place.key(key) if keys else place.item(number)
            items.append(self.node(item, at, _at(original, key)))
        made = _built(node, keys, items)
        try:
            filled = _filled(made, original)
        except MismatchedOriginalError as error:  # which says at length which tensors it lacks
            parts = ", ".join(repr(key) for key in keys[:_NAMED]) + ", ..." * (len(keys) > _NAMED)
            found = type(original).__qualname__
            what = f"`original` is a {found}, and what was saved there is a dict of {parts}"
            raise MismatchedOriginalError.at(str(place), what, type=found) from error
        if filled is original and hasattr(original, "load_state_dict"):
            self._originals.restored(original, place)
        return filled

    def _object(self, node: nested.ObjectNode, place: ValuePath, original: Any) -> Any:
        provider = providers.named(node.provider)
        if provider is None:
            raise UnknownProviderError.at(
                str(place), f"no provider {node.provider!r} is registered"
            )
        parts = None
        if original is not None and provider.parts is not None:
            parts = provider.parts(original)
        state = self.node(node.state, place, parts)
        if node.number in self._objects:
            raise DamagedStateError.at(str(place), "two objects of one number")
        self._objects[node.number] = restored = _restore(provider, state, original, place)
        if original is not None and restored is original:
            self._originals.restored(original, place)
        return restored

    def _known(self, node: nested.RefNode) -> Any:
        try:
            return self._objects[node.number]
        except KeyError as error:
            raise DamagedStateError.at(nested.STRUCTURE, "a reference to nothing") from error

    def _tensor(self, node: nested.TensorLeaf, place: ValuePath, original: Any) -> Any:
        make = partial(self._made_tensor, node)
        if is_tensor(original) and self._originals.fill(original, place, make):
            kept = original
        else:
            kept = make() if node.same is None else self._face(node, node.same)
        if node.same is None:
            self._leaves[node.name] = self._faces[node.name, node.parameter, node.grad] = kept
        return kept

    def _made_tensor(self, node: nested.TensorLeaf) -> Any:
        return _parameter(node, _ordered_tensor(as_tensor(self.piece(node.name)), node.order))

    def _array(self, node: nested.ArrayLeaf, place: ValuePath, original: Any) -> Any:
        make = partial(self._made_array, node)
        if is_array(original) and self._originals.fill(original, place, make):
            kept = original
        else:
            kept = make() if node.same is None else self._leaf(node.same)
        if node.same is None:
            self._leaves[node.name] = kept
        return kept

    def _made_array(self, node: nested.ArrayLeaf) -> Any:
        made = as_array(node.name, self.piece(node.name))
        if node.dtype is not None:
            made = arrays.restored(made, node.dtype)
        return made if node.order is None else arrays.ordered(made, node.order)

    def _face(self, node: nested.TensorLeaf, name: str) -> Any:
        """Return the memory of an earlier piece as the kind of tensor that stood at this place."""
        leaf, key = self._leaf(name), (name, node.parameter, node.grad)
        if key not in self._faces:
            if not is_tensor(leaf):
                raise DamagedStateError.at(name, "no tensor, but the same as one")
            self._faces[key] = _parameter(node, leaf.detach())
        return self._faces[key]

    def _leaf(self, name: str) -> Any:
        try:
            return self._leaves[name]
        except KeyError as error:
            raise DamagedStateError.at(
                name, "the same as a piece that does not come before"
            ) from error

    def _series(self, node: nested.SeriesLeaf) -> PieceSeries:
        count = self._wire()
        # The number of pieces bounds it, not what the checkpoint says.
        if type(count) is not int or not 0 <= count <= len(self._tensors):
            raise DamagedStateError.at(node.name, f"a series of {count!r} pieces")
        names = nested.series_names(node.name, count)
        return PieceSeries(node.name, [raw(self.piece(name)) for name in names])

    def _object_array(self, node: nested.ObjectArray, place: ValuePath, original: Any) -> Any:
        import numpy as np

        shape = self._wire()
        held = original.reshape(-1).tolist() if is_array(original) else None
        items = [self.node(item, place.item(i), _at(held, i)) for i, item in enumerate(node.items)]
        flat = np.empty(len(items), object)
        for number, item in enumerate(items):
            flat[number] = item
        try:
            return flat.reshape(shape)
        except (TypeError, ValueError) as error:
            raise DamagedStateError.at(str(place), f"{len(items)} objects in {shape}") from error

    def _inlined(self, node: nested.InlineTensor) -> Any:
        data = self._wire()
        if type(data) is not bytes:
            raise DamagedStateError.at(nested.VALUES, "no bytes of a tensor")
        return as_tensor(NamedValue(nested.VALUES, node.dtype, (), data))


def as_tensor(held: "Value") -> Any:
    """Return the value `held` as a torch tensor on the CPU.

    A tensor is returned unchanged. A writable numpy array shares its memory with the result, and
    any other value is copied.

    Raises:
        DamagedStateError: PyTorch lacks the dtype, or the number of bytes does not match the shape.
    """
    import torch

    if is_tensor(held):
        return held
    if is_array(held):
        array: Any = held
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    piece = as_piece("", held)
    named = {name: dtype for dtype, name in dtype_names().items()}
    if (dtype := named.get(piece.dtype)) is None:
        raise DamagedStateError.at(piece.name, f"torch has no dtype for {piece.dtype}")
    if piece.nbytes != _count(piece.shape) * dtype.itemsize:
        raise DamagedStateError.at(piece.name, f"{piece.nbytes} bytes in {piece.shape}")
    if not piece.nbytes:
        return torch.empty(piece.shape, dtype=dtype)
    data = bytearray(flat_bytes(piece.data)[:])
    return torch.frombuffer(data, dtype=dtype).view(piece.shape)


def as_array(name: str, held: "Value") -> Any:
    """Return the value `held`, called `name`, as a numpy array.

    A writable array is returned unchanged, and any other value is copied.

    Raises:
        DamagedStateError: NumPy lacks the dtype, or the number of bytes does not match the shape.
    """
    if is_array(held):
        array: Any = held
        return array if array.flags.writeable else array.copy()
    made = value(as_piece(name, held))
    if isinstance(made, NamedValue):
        raise DamagedStateError.at(name, f"numpy has no dtype for {made.dtype}")
    return made


def as_piece(name: str, held: "Value") -> NamedValue:
    """Return the value `held` as a NamedValue with the name `name`."""
    return pieces({name: held})[0]


def _restore(provider: StateProvider, state: Any, original: Any, place: ValuePath) -> Any:
    with located(place):
        try:
            return provider.restore(state, original)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            what = f"{provider.name} does not take its state: {error!r}"
            raise DamagedStateError.at("", what, provider=provider.name) from error


def _built(node: nested.Container, keys: list[Any], items: list[Any]) -> Any:
    try:
        return plain.build(node.kind, node.head, keys, items)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedStateError.at(nested.STRUCTURE, f"no container: {error}") from error


def _filled(made: Any, original: Any) -> Any:
    """Return the container that existed, filled with what was made; else what was made."""
    if original is None:
        return made
    if hasattr(original, "load_state_dict") and isinstance(made, dict):
        provider = providers.named("stateful")
        return made if provider is None else provider.restore(made, original)
    if type(original) is not type(made):
        return made
    if isinstance(made, dict):
        original.clear()
        original.update(made)
        return original
    if isinstance(made, list):
        original[:] = made
        return original
    return made


def _at(original: Any, key: Any) -> Any:
    """Return what the object that exists has at the same place."""
    if isinstance(original, Mapping):
        return original.get(key)
    if isinstance(original, list | tuple) and type(key) is int and key < len(original):
        return original[key]
    return None


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _ordered_tensor(tensor: Any, order: list[int] | None) -> Any:
    import torch

    if order is None:
        return tensor
    if sorted(order) != list(range(tensor.dim())):
        raise DamagedStateError.at(nested.STRUCTURE, f"{order} is no order of {tensor.dim()}")
    shape = [tensor.shape[number] for number in order]
    held = torch.empty(shape, dtype=tensor.dtype)
    return held.permute([order.index(number) for number in range(tensor.dim())]).copy_(tensor)


def _parameter(node: nested.TensorLeaf, tensor: Any) -> Any:
    import torch

    if node.grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise DamagedStateError.at(node.name, f"a gradient of {tensor.dtype}")
    if node.parameter:
        return torch.nn.Parameter(tensor, requires_grad=node.grad)
    return tensor.requires_grad_() if node.grad else tensor


def mismatched(original: object, kind: str) -> MismatchedOriginalError:
    """Return the error for an `original` that is not of the expected `kind`."""
    found = type(original).__qualname__
    return MismatchedOriginalError.at("", f"`original` is a {found}, not {kind}", type=found)


class _Fill(NamedTuple):
    """A part that was filled, and how to make what it was filled with again."""

    place: ValuePath
    part: Any
    make: Callable[[], Any]


class _Span(NamedTuple):
    device: str
    start: int
    stop: int
    number: int


class Originals:
    """Fills an existing object with saved values, and detects parts that were overwritten.

    The existing object is the `original` of a load. Filling one of its tensors may overwrite
    another tensor with the same memory. Use from one thread only.
    """

    def __init__(self) -> None:
        # Kept: what took the place of a part in memory would have its identity.
        self._used: Final[dict[int, object]] = {}
        self._fills: Final[list[_Fill]] = []

    def unused(self, container: Any) -> Any:
        """Return `container` if it may be filled, or None.

        A dict or list may be filled only once: the first call returns it, and later calls for the
        same object return None. Other objects are always returned.
        """
        if not isinstance(container, dict | list):
            return container
        if id(container) in self._used:
            return None
        self._used[id(container)] = container
        return container

    def restored(self, part: object, place: ValuePath) -> None:
        """Record that the existing object `part`, at the path `place`, has been restored.

        Raises:
            MismatchedOriginalError: The object has been restored before, from another saved object.
        """
        if isinstance(part, dict | list):
            return  # a state dict: what it is made of was `unused`
        if id(part) in self._used:
            what = "one object in `original`, and two objects in what was saved"
            raise MismatchedOriginalError.at(str(place), what)
        self._used[id(part)] = part

    def fill(self, part: Any, place: ValuePath, make: Callable[[], Any]) -> bool:
        """Fill the tensor or array `part` with the result of `make`; return whether that was done.

        If the result does not fit `part`, nothing is changed and False is returned. `place` is the
        path of the part.
        """
        made = make()
        put = _fill_tensor if is_tensor(made) else _fill_array
        if not put(made, part):
            return False
        self._fills.append(_Fill(place, part, make))
        return True

    def check(self) -> None:
        """Check that no part was overwritten while another part with the same memory was filled.

        Each part that shares memory with another part is compared with its saved value.

        Raises:
            MismatchedOriginalError: A part was overwritten with the value of another part.
        """
        for fill in _overlapping(self._fills):
            if not _equal(fill.part, fill.make()):
                what = "shares one memory with another part of `original`, which is another value"
                raise MismatchedOriginalError.at(str(fill.place), what)


def _overlapping(fills: Sequence[_Fill]) -> Iterator[_Fill]:
    """Yield the fills whose memory may also belong to others, in their order."""
    found: set[int] = set()
    last = None
    for span in sorted(_spans(fills)):
        if last and last.device == span.device and span.start < last.stop:
            found |= {last.number, span.number}
            last = max(last, span, key=lambda each: each.stop)
        else:
            last = span
    return (fills[number] for number in sorted(found))


def _spans(fills: Sequence[_Fill]) -> Iterator[_Span]:
    for number, (_, part, _) in enumerate(fills):
        if is_tensor(part):
            device, start, size = str(part.device), part.data_ptr(), part.element_size()
            strides = [step * size for step in part.stride()]
        else:
            device, start, size = "cpu", part.ctypes.data, part.itemsize
            strides = part.strides
        if 0 not in part.shape:
            reach = [step * (count - 1) for step, count in zip(strides, part.shape, strict=True)]
            below, above = sum(min(0, each) for each in reach), sum(max(0, each) for each in reach)
            yield _Span(device, start + below, start + above + size, number)


def _equal(part: Any, made: Any) -> bool:
    import numpy as np

    shown, meant = (np.frombuffer(_bits(held), np.uint8) for held in (part, made))
    return bool(np.array_equal(shown, meant))


def _bits(held: Any) -> memoryview:
    import numpy as np

    return raw(held if is_tensor(held) else arrays.storable(np.asarray(held))[0])


def _fill_tensor(made: Any, part: Any) -> bool:
    import torch

    if not is_tensor(part) or part.is_meta or part.layout != torch.strided:
        return False
    if (part.shape, part.dtype) != (made.shape, made.dtype):
        return False
    if any(size > 1 and not step for size, step in zip(part.shape, part.stride(), strict=True)):
        return False  # expanded: several elements are one place in memory
    with torch.no_grad():
        part.copy_(made)
    return True


def _fill_array(made: Any, part: Any) -> bool:
    if not is_array(part) or not part.flags.writeable:
        return False
    if (part.shape, part.dtype) != (made.shape, made.dtype):
        return False
    part[...] = made
    return True


class StructureAdapter:
    """The base class of the built-in adapters, which accept nested structures of objects.

    A subclass defines its name and the types of objects for which it is chosen. Safe from any
    thread.
    """

    name: str

    def extract(self, model: Any) -> "Mapping[str, Value]":
        """Return the pieces of a model, named by the keys and attributes that lead to them.

        Raises:
            StateError: A part of the model cannot be stored; the error names its path.
        """
        chunks = list(self.chunks(model))
        ordered = in_groups(chunks, [chunk.group for chunk in chunks])
        return {chunk.name: chunk.value() for chunk in ordered}

    def chunks(self, model: Any) -> Iterator[StateChunk]:
        """Yield the pieces of a model as chunks.

        A chunk has the fields (`group`, `frozen`) that the `StateProvider` of its object has set.

        Raises:
            StateError: A part of the model cannot be stored; the error names its path.
        """
        return take_apart(model)

    def reconstruct(self, tensors: "Mapping[str, Value]", original: Any = None) -> Any:
        """Return the structure rebuilt from the pieces `tensors`, in `original` if that is given.

        Raises:
            StateError: The values are damaged, or do not fit `original`.
        """
        return put_together(tensors, original)
