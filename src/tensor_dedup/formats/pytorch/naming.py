"""The names of the tensors in a pickled value: the keys that lead to them, joined by dots.

`{"model": {"w": tensor}, "optimizer": {"state": {0: {"m": tensor}}}}` holds `model.w` and
`optimizer.state.0.m`; lists and tuples number their items; a value that is a single tensor is
called `tensor`. Tensors in the attributes of an object get no name and are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from sys import getsizeof

from tensor_dedup.formats.errors import PytorchError, PytorchFault, shorten
from tensor_dedup.formats.pytorch.budget import Budget
from tensor_dedup.formats.pytorch.values import PickledTensorView, PlainDict, SparseParts

# Deeper than any state dict, and shallow enough that a value that holds itself is found out.
MAX_DEPTH = 64
MAX_NAME = 1024
MAX_TENSORS = 1_000_000
_ALONE = "tensor"
_KEY_LIMIT = 1 << 64
# What is charged: for a value that is passed, for a key that is compared, for a container that is
# entered, and for a tensor until it is placed in the file.
_VALUE_BYTES = 16
_KEY_BYTES = 96
_HOLDER_BYTES = 96
_TENSOR_BYTES = 1024

Item = tuple[str, object]


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """The tensors of a pickled value with their names, in the order of the pickle.

    A sparse tensor NAME is listed as two tensors: its indices NAME.0 and its values NAME.1.
    `sparse` maps these names to NAME.
    """

    tensors: list[tuple[str, PickledTensorView]]
    sparse: dict[str, str]


def named_tensors(value: object, path: str, budget: Budget) -> NamedTensors:
    """Return every tensor in a pickled value with its name.

    The memory that the names and tensors take is charged to `budget`; `path` is used in error
    messages only.

    Raises:
        PytorchError: Two tensors have the same name, a key cannot be part of a name, or a limit is
            exceeded.
    """
    found: dict[str, PickledTensorView] = {}
    sparse: dict[str, str] = {}
    waiting: list[tuple[str, object, int]] = [("", value, 0)]
    while waiting:
        prefix, holder, depth = waiting.pop()
        if isinstance(holder, PickledTensorView):
            budget.charge(_TENSOR_BYTES)
            _keep(found, prefix or _ALONE, holder, path)
            continue
        budget.charge(_HOLDER_BYTES)
        inner = []
        for key, held in _holders(holder, prefix, path, budget):
            if depth >= MAX_DEPTH:
                raise PytorchError.at(
                    PytorchFault.DEEP_NESTING,
                    path,
                    f"{shorten(prefix)!r} nests deeper than {MAX_DEPTH} containers",
                    depth=depth,
                )
            name = f"{prefix}.{key}" if prefix else key
            _check_length(name, path)
            budget.charge(_HOLDER_BYTES + getsizeof(name))
            inner.append((name, held, depth + 1))
            if isinstance(holder, SparseParts):
                sparse[name] = prefix or _ALONE
        waiting += reversed(inner)
    return NamedTensors(list(found.items()), sparse)


# Exactly the types that are made here. What may hold a tensor, or is one.
_HOLDERS = frozenset({PickledTensorView, SparseParts, PlainDict, list, tuple})


def _holders(holder: object, prefix: str, path: str, budget: Budget) -> Iterator[Item]:
    """Yield what may hold tensors in a container, with its key."""
    if isinstance(holder, PlainDict):
        for key, held in _named_items(holder, prefix, path, budget):
            if type(held) in _HOLDERS:
                yield key, held
        return
    holder = holder.parts if isinstance(holder, SparseParts) else holder
    if isinstance(holder, list | tuple):
        budget.charge(_VALUE_BYTES * len(holder))
        found = (item for item in enumerate(holder) if type(item[1]) in _HOLDERS)
        for number, held in found:
            yield str(number), held


def _named_items(holder: PlainDict, prefix: str, path: str, budget: Budget) -> Iterator[Item]:
    seen: set[str] = set()
    keys = iter(holder.items)
    for key, held in zip(keys, keys, strict=True):
        name = _key(key, prefix, path)
        budget.charge(_KEY_BYTES + (0 if name is key else getsizeof(name)))
        if name in seen:
            raise PytorchError.at(
                PytorchFault.REPEATED_KEY,
                path,
                f"a dict at {shorten(prefix)!r} has a key twice",
                place=shorten(prefix),
            )
        seen.add(name)
        yield name, held


def _key(key: object, prefix: str, path: str) -> str:
    """Return a key as a part of a name. Keys equal to Python, as 1 and True, become one."""
    if isinstance(key, str):
        return key
    if isinstance(key, int) and abs(key) < _KEY_LIMIT:
        return str(int(key))
    if isinstance(key, float):
        return str(int(key)) if key.is_integer() and abs(key) < _KEY_LIMIT else repr(key)
    if key is None:
        return "None"
    raise PytorchError.at(
        PytorchFault.UNUSABLE_KEY,
        path,
        f"a dict at {shorten(prefix)!r} has a {type(key).__name__} as a key",
        place=shorten(prefix),
    )


def _check_length(name: str, path: str) -> None:
    if len(name) > MAX_NAME:
        raise PytorchError.at(
            PytorchFault.TENSOR_NAME,
            path,
            f"a name of {len(name)} characters",
            name,
            length=len(name),
        )


def _keep(
    found: dict[str, PickledTensorView], name: str, tensor: PickledTensorView, path: str
) -> None:
    if name in found:
        raise PytorchError.at(PytorchFault.REPEATED_NAME, path, "two tensors have this name", name)
    if len(found) >= MAX_TENSORS:
        raise PytorchError.at(
            PytorchFault.PICKLE_BOMB, path, f"it holds more than {MAX_TENSORS} tensors"
        )
    found[name] = tensor
