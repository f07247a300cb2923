"""The names of the tensors in a pickled value: their keys, joined by dots.

`{"model": {"w": tensor}, "optimizer": {"state": {0: {"m": tensor}}}}` holds `model.w` and
`optimizer.state.0.m`; lists and tuples number their items; a tensor alone is called `tensor`. What
a value's attributes hold has no name and is not found.
"""

from collections.abc import Iterable

from tensor_dedup.formats.errors import PytorchError, PytorchFault, shorten
from tensor_dedup.formats.pytorch.values import PickledTensorView, PlainDict

# Deeper than any state dict, and shallow enough that a value that holds itself is found out.
MAX_DEPTH = 64
MAX_NAME = 1024
MAX_TENSORS = 1_000_000
# Values may be shared, so that a small pickle describes a tree of any size: how many containers and
# tensors, and how many values in all, are looked at.
MAX_HOLDERS = 1_000_000
MAX_VALUES = 10_000_000
_MAX_NAMES_BYTES = 200_000_000
_ALONE = "tensor"
_KEY_LIMIT = 1 << 64

Item = tuple[str, object]


def named_tensors(value: object, path: str) -> list[tuple[str, PickledTensorView]]:
    """Return every tensor with its name, in the order of the pickle.

    Raises:
        PytorchError: Two tensors have the same name, or a key cannot be part of a name.
    """
    found: dict[str, PickledTensorView] = {}
    waiting: list[tuple[str, object, int]] = [("", value, 0)]
    holders = values = names = 0
    while waiting:
        prefix, holder, depth = waiting.pop()
        if isinstance(holder, PickledTensorView):
            names += len(prefix)
            _keep(found, prefix or _ALONE, holder, path)
            continue
        items = _items(holder, prefix, path)
        values += len(items)
        holders += 1
        inner = [(_joined(prefix, key), held, depth + 1) for key, held in items if _holds(held)]
        if inner and depth >= MAX_DEPTH:
            raise PytorchError.at(
                PytorchFault.DEEP_NESTING,
                path,
                f"{shorten(prefix)!r} nests deeper than {MAX_DEPTH} containers",
                depth=depth,
            )
        large = names > _MAX_NAMES_BYTES or len(found) > MAX_TENSORS
        if large or values > MAX_VALUES or holders > MAX_HOLDERS:
            raise PytorchError.at(
                PytorchFault.PICKLE_BOMB,
                path,
                f"it holds {len(found)} tensors and {values} values so far",
                values=values,
            )
        _check_names(inner, path)
        waiting += reversed(inner)
    return list(found.items())


def _holds(value: object) -> bool:
    return isinstance(value, PickledTensorView | PlainDict | list | tuple) and value != ()


def _items(holder: object, prefix: str, path: str) -> list[Item]:
    if isinstance(holder, PlainDict):
        return _named_items(holder, prefix, path)
    if isinstance(holder, list | tuple):
        return [(str(number), held) for number, held in enumerate(holder)]
    return []


def _named_items(holder: PlainDict, prefix: str, path: str) -> list[Item]:
    items = [(_key(key, prefix, path), held) for key, held in holder.pairs]
    if len({key for key, _ in items}) != len(items):
        raise PytorchError.at(
            PytorchFault.REPEATED_KEY,
            path,
            f"a dict at {shorten(prefix)!r} has a key twice",
            place=shorten(prefix),
        )
    return items


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


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _check_names(items: Iterable[tuple[str, object, int]], path: str) -> None:
    for name, _, _ in items:
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
    found[name] = tensor
