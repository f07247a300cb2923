"""What a store would keep of a model, and what it would give back: bytes, and new memory."""

from collections.abc import Mapping
from typing import Any

from tensor_dedup.store.checkpoints.adapters.base import ModelAdapter
from tensor_dedup.store.checkpoints.state import NamedValue, pieces, value

Stored = dict[str, NamedValue]


def stored(adapter: ModelAdapter, model: object) -> Stored:
    """Every piece, with bytes of its own: what the model does later changes none of them."""
    found = pieces(adapter.extract(model))
    assert len({piece.name for piece in found}) == len(found)
    return {
        piece.name: NamedValue(piece.name, piece.dtype, piece.shape, bytes(piece.data))
        for piece in found
    }


def loaded(adapter: ModelAdapter, held: Mapping[str, NamedValue], original: object = None) -> Any:
    """The model that is put together of stored pieces."""
    return adapter.reconstruct({name: value(piece) for name, piece in held.items()}, original)


def there_and_back(adapter: ModelAdapter, model: object, original: object = None) -> Any:
    """A model that has been through bytes."""
    return loaded(adapter, stored(adapter, model), original)


def unchanged(before: Stored, after: Stored) -> set[str]:
    """Names of the pieces that are byte for byte in both."""
    return {name for name, piece in before.items() if after.get(name) == piece}


def new_bytes(before: Stored, after: Stored) -> int:
    """Bytes of the contents in `after` that are not in `before` under any name."""
    known = {piece.data for piece in before.values()}
    return sum(len(bytes(data)) for data in {piece.data for piece in after.values()} - known)
