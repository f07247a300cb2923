"""Adapters turn models of several frameworks into named tensors, and back, without pickle.

    adapter = adapter_for(model)
    tensors = adapter.extract(model)
    model = adapter.reconstruct(tensors, original=model)

There is one adapter for each framework. Each adapter also accepts objects of types that were
registered with `register_provider`, and dicts, lists and other structures of objects that any
adapter accepts. Importing this package imports no framework.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tensor_dedup.training.adapters.base import (
    ModelAdapter,
    PieceSeries,
    StateProvider,
    full_name,
    providers,
    register_provider,
)
from tensor_dedup.training.adapters.lightgbm import LightGBMAdapter
from tensor_dedup.training.adapters.numpy import NumpyAdapter
from tensor_dedup.training.adapters.plain import CONTAINERS
from tensor_dedup.training.adapters.pytorch import PyTorchAdapter
from tensor_dedup.training.adapters.sklearn import SklearnAdapter
from tensor_dedup.training.adapters.xgboost import XGBoostAdapter
from tensor_dedup.training.errors import UnknownAdapterError, UnknownModelError
from tensor_dedup.training.state import NamedValue, StateChunk, of_its_size

__all__ = [
    "LightGBMAdapter",
    "ModelAdapter",
    "NumpyAdapter",
    "PieceSeries",
    "PyTorchAdapter",
    "SklearnAdapter",
    "StateChunk",
    "StateProvider",
    "XGBoostAdapter",
    "adapter_for",
    "by_name",
    "chunks_of",
    "register_provider",
]

_ADAPTERS: Final[Mapping[str, type[ModelAdapter]]] = {
    adapter.name: adapter
    for adapter in (
        LightGBMAdapter,
        NumpyAdapter,
        PyTorchAdapter,
        SklearnAdapter,
        XGBoostAdapter,
    )
}
# A package -> the adapter of its objects. numpy's random generators are numpy's.
_PACKAGES: Final = {
    "torch": "pytorch",
    "lightgbm": "lightgbm",
    "sklearn": "sklearn",
    "xgboost": "xgboost",
    "numpy": "numpy",
    "random": "numpy",
}


def adapter_for(model: object) -> ModelAdapter:
    """Return the adapter for `model`, chosen by its type.

    For a structure such as a dict or a list, the adapter is chosen by the content. No framework is
    imported.

    Raises:
        UnknownModelError: No adapter accepts the object.
    """
    for name in _names(model, 0):
        return by_name(name)
    if type(model) in CONTAINERS or providers.find(type(model)):
        return NumpyAdapter()
    raise UnknownModelError.at("", f"no adapter for a {full_name(type(model))}")


def by_name(name: str) -> ModelAdapter:
    """Return a new adapter of the kind `name`, which is the name recorded in a step.

    Raises:
        UnknownAdapterError: No adapter has this name.
    """
    if (kind := _ADAPTERS.get(name)) is None:
        known = ", ".join(sorted(_ADAPTERS))
        raise UnknownAdapterError.at(name, f"no adapter of this name, there are {known}")
    return kind()


def chunks_of(adapter: ModelAdapter, model: object) -> Iterator[StateChunk]:
    """Return the chunks of `model` in order, as `adapter` makes them.

    They come from the adapter's method `chunks`, or from `extract` if it has no `chunks`. If a
    subclass of an adapter overrides only `extract`, they come from `extract`.
    """
    for kind in type(adapter).__mro__:
        if "chunks" in vars(kind):
            chunks: Iterator[StateChunk] = adapter.chunks(model)  # type: ignore[attr-defined]
            return chunks
        if "extract" in vars(kind):
            break
    return (
        StateChunk(of_its_size(value) if type(value) is NamedValue else value, name)
        for name, value in adapter.extract(model).items()
    )


def _names(model: Any, depth: int) -> Iterator[str]:
    """Yield the adapters of a model and of what it holds, frameworks before numpy."""
    model = model.source if isinstance(model, StateChunk) else model
    if type(model) in CONTAINERS and depth < _DEPTH:
        held = model.values() if isinstance(model, dict) else model
        found = {name for item in held for name in _names(item, depth + 1)}
        yield from sorted(found, key=lambda name: (name == "numpy", name))
        return
    roots = (base.__module__.partition(".")[0] for base in type(model).__mro__)
    if (root := next((root for root in roots if root in _PACKAGES), None)) is not None:
        yield _PACKAGES[root]
    elif all(hasattr(type(model), name) for name in ("state_dict", "load_state_dict")):
        yield "pytorch"


# Deep enough to find a framework; a circle is refused later.
_DEPTH: Final = 8
