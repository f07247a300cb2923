"""The adapter for PyTorch: modules, state dicts, optimizers, schedulers and random generators.

The pieces of a module have the names in its state dict. Tied weights are pieces with equal bytes,
which the store holds once, and they are restored as one tensor. This module imports torch only when
it is needed.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from tensor_dedup.training.adapters.base import StateProvider, register_provider
from tensor_dedup.training.adapters.rebuild import StructureAdapter, mismatched
from tensor_dedup.training.errors import DamagedStateError, MismatchedOriginalError

_STATE: Final = "state"
_METADATA: Final = "metadata"
# Layout -> what its two index tensors are called.
_COMPRESSED: Final = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}


class PyTorchAdapter(StructureAdapter):
    """The adapter for modules, optimizers, schedulers, RNG states, and structures of them.

        adapter.extract({"model": model, "optimizer": optimizer, "epoch": 3})

    State dicts, and nested dicts and lists of all these, are accepted too. Values are named as in
    the state dict and share the model's memory.

    `original` may be a structure of the same form, which is then filled and returned. Its objects
    that have `load_state_dict` are restored by that method. Its tensors are filled if the saved
    tensors have the same shape and dtype. Without `original`, modules, optimizers and schedulers
    are returned as state dicts, with tensors on the CPU.

    Raises:
        UnsupportedArrayError: A tensor is quantised, on the meta device or distributed.
        UnsupportedValueError: A value has a type without a registered provider.
    """

    name = "pytorch"


def _module_state(module: Any) -> dict[str, object]:
    return _split(module.state_dict())


def _split(state_dict: Any) -> dict[str, object]:
    """Return a state dict, and the attribute it carries: the versions of its modules."""
    metadata = getattr(state_dict, "_metadata", None) or {}
    plain = {str(name): dict(held) for name, held in metadata.items()}
    return {_STATE: OrderedDict(state_dict), _METADATA: plain}


def _joined(state: Any) -> Any:
    state_dict = state[_STATE]
    if not isinstance(state_dict, dict):
        raise DamagedStateError.at("", "no state dict")
    if isinstance(state_dict, OrderedDict):
        state_dict._metadata = OrderedDict(state[_METADATA])  # type: ignore[attr-defined]
    return state_dict


def _load_module(state: Any, original: Any) -> Any:
    return _load(_joined(state), original)


def _load(state: Any, original: Any) -> Any:
    """Call `load_state_dict`, its complaints as one error; without original, return the state."""
    if original is None or original is state:
        return state
    if not hasattr(original, "load_state_dict"):
        raise mismatched(original, "anything with load_state_dict")
    with _mismatches():
        original.load_state_dict(state)
    return original


@contextmanager
def _mismatches() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise MismatchedOriginalError.at("", f"`original` does not take it: {error}") from error


def _mapping_parts(original: Any) -> dict[str, object] | None:
    return {_STATE: original} if isinstance(original, Mapping) else None


def _load_state_dict(state: Any, original: Any) -> Any:
    return _load(_joined(state), None if isinstance(original, Mapping) else original)


def _generator_state(generator: Any) -> dict[str, object]:
    return {"device": generator.device, _STATE: generator.get_state()}


def _load_generator(state: Any, original: Any) -> Any:
    import torch

    if original is not None and not isinstance(original, torch.Generator):
        raise mismatched(original, "a torch.Generator")
    with _mismatches():
        generator = torch.Generator(state["device"]) if original is None else original
        generator.set_state(state[_STATE])
    return generator


def _sparse_state(tensor: Any) -> dict[str, object]:
    layout = str(tensor.layout).removeprefix("torch.")
    state = {"layout": layout, "shape": tensor.shape, "grad": tensor.requires_grad}
    tensor = tensor.detach()
    if layout == "sparse_coo":
        indices: tuple[Any, ...] = (tensor._indices(),)
        return {
            **state,
            "sorted": tensor.is_coalesced(),
            "indices": indices,
            "values": tensor._values(),
        }
    names = _COMPRESSED[layout]
    indices = tuple(getattr(tensor, name)() for name in names)
    return {**state, "indices": indices, "values": tensor.values()}


def _load_sparse(state: Any, original: Any) -> Any:
    import torch

    layout, shape, indices, values = (
        state[key] for key in ("layout", "shape", "indices", "values")
    )
    try:
        if layout == "sparse_coo":
            tensor = torch.sparse_coo_tensor(
                indices[0], values, shape, is_coalesced=state["sorted"], check_invariants=True
            )
        else:
            # No name from a checkpoint is looked up that is not on the list.
            kind = getattr(torch, next(name for name in _COMPRESSED if name == layout))
            tensor = torch.sparse_compressed_tensor(
                indices[0], indices[1], values, shape, layout=kind, check_invariants=True
            )
    except (RuntimeError, TypeError, IndexError, StopIteration) as error:
        raise DamagedStateError.at("", f"no sparse tensor: {error}") from error
    return tensor.requires_grad_(state["grad"])


register_provider(
    "torch.nn.modules.module.Module",
    StateProvider(
        "torch.module",
        _module_state,
        _load_module,
        flat=frozenset({_STATE}),
        fixed=frozenset({_METADATA}),
    ),
)
register_provider(
    "a state dict with the versions of its modules",
    StateProvider(
        "torch.state_dict",
        _split,
        _load_state_dict,
        _mapping_parts,
        flat=frozenset({_STATE}),
        fixed=frozenset({_METADATA}),
    ),
)
register_provider(
    "anything with state_dict and load_state_dict",
    StateProvider("stateful", lambda held: held.state_dict(), _load, inline=True),
)
register_provider(
    "torch._C.Generator", StateProvider("torch.generator", _generator_state, _load_generator)
)
register_provider("a sparse tensor", StateProvider("torch.sparse", _sparse_state, _load_sparse))
