"""What the built-in adapters have in common: all take structures of whatever has a provider."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensor_dedup.store.checkpoints.adapters.nested import take_apart
from tensor_dedup.store.checkpoints.adapters.rebuild import put_together

if TYPE_CHECKING:
    from tensor_dedup.store.checkpoints.state import Value


class StructureAdapter:
    """An adapter that is a name and the types it is chosen for. Safe from several threads."""

    name: str

    def extract(self, model: Any) -> "Mapping[str, Value]":
        """Tensors, arrays and trees by the keys and attributes that lead to them. StateError."""
        return take_apart(model)

    def reconstruct(self, tensors: "Mapping[str, Value]", original: Any = None) -> Any:
        """The same structure, put into `original` where one is given. StateError."""
        return put_together(tensors, original)
