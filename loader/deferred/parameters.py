"""Replace a model's parameters by deferred tensors without memory, and later by real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from tensor_dedup.loader.deferred.recipe import initial_bytes, sources_of
from tensor_dedup.loader.deferred.source_parts import narrow_sources
from tensor_dedup.loader.deferred.trace import UntraceableError
from tensor_dedup.loader.torch_dtypes import dtype_name
from tensor_dedup.types import ResidentKey

if TYPE_CHECKING:
    from tensor_dedup.loader.checkpoint_io.sources import SourceTensor
    from tensor_dedup.loader.deferred.storage import View
    from tensor_dedup.loader.deferred.trace import Tracer


@dataclass(eq=False, slots=True)
class DeferredParameter:
    """A parameter whose tensor was replaced by a deferred one, which has no memory.

    - `name` is the first of the parameter's names in the model.
    - `view` describes, after tracing, how the bytes are computed. It is None if the loading code
      gave the parameter real memory.
    - `sources` has, after tracing, the source tensors from which the bytes are computed.
    - `installed` is True once the parameter has real memory.
    - `private` is a reason not to share the parameter, or None.
    - `planned` is True if a load plan says what becomes of the parameter. The parameter is not
      traced then, and has no `view` and no `sources`.
    """

    name: str
    parameter: nn.Parameter
    view: View | None = None
    installed: bool = False
    private: str | None = None
    planned: bool = False
    sources: list[SourceTensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The size of the parameter in bytes."""
        return self.parameter.numel() * self.parameter.element_size()

    @property
    def geometry(self) -> ResidentKey:
        """The dtype, shape and stride of the parameter, as a resident key without a digest.

        The dtype must have a safetensors name.
        """
        shape, stride = tuple(self.parameter.shape), tuple(self.parameter.stride())
        return ResidentKey(dtype_name(self.parameter.dtype), shape, stride, "")

    @property
    def known(self) -> bool:
        """Whether the digests of all source tensors of the parameter are known."""
        return all(source.digest is not None for source in self.sources)

    def require_view(self) -> View:
        """Return `view`, which must not be None."""
        assert self.view is not None, f"{self.name} was not deferred"
        return self.view


def defer(model: nn.Module, tracer: Tracer) -> dict[int, DeferredParameter]:
    """Replace the tensors of a model's parameters by deferred tensors, which have no memory.

    Returns the deferred parameters by id of the parameter. The parameters remain the same objects,
    and those that share a storage still share one. If a buffer, or another module attribute that is
    not a parameter, also uses the storage of a parameter, the parameter keeps its real memory.
    """
    viewed = {tensor.untyped_storage()._cdata for tensor in _beside_parameters(model)}
    flat: dict[int, torch.Tensor] = {}
    deferred: dict[int, DeferredParameter] = {}
    for name, parameter in model.named_parameters():
        storage = parameter.untyped_storage()._cdata
        if parameter.is_meta or storage in viewed:
            continue
        if storage not in flat:
            flat[storage] = tracer.parameter(initial_bytes(parameter.detach()))
        size = parameter.element_size()
        usable = flat[storage].numel() - flat[storage].numel() % size
        meta = torch.as_strided(
            flat[storage][:usable].view(parameter.dtype),
            parameter.shape,
            parameter.stride(),
            parameter.storage_offset(),
        )
        replace_data(parameter, meta)
        deferred[id(parameter)] = DeferredParameter(name, parameter)
    return deferred


def _beside_parameters(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers, and the tensors that are attributes of modules."""
    for module in model.modules():
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)
        for _, value in _own_attributes(module):
            tensors = (value,) if isinstance(value, torch.Tensor) else _inside(value)
            yield from (each for each in tensors if not isinstance(each, nn.Parameter))


def conclude(model: nn.Module, deferred: dict[int, DeferredParameter], tracer: Tracer) -> None:
    """Complete the deferred parameters after tracing: set `view`, `sources` and `installed`.

    Parameters that the loading code created are added, and those that it removed are dropped. A
    source tensor of which they use parts only is replaced by these parts.
    """
    for name, parameter in model.named_parameters():
        if tracer.find(parameter) is not None:
            deferred.setdefault(id(parameter), DeferredParameter(name, parameter))
    alive = {id(parameter) for parameter in model.parameters()}
    for key in [key for key in deferred if key not in alive]:
        del deferred[key]
    for each in deferred.values():
        each.view = tracer.view(each.parameter)
        each.installed = each.view is None and not each.parameter.is_meta
    narrow_sources([each.view for each in deferred.values() if each.view is not None])
    for each in deferred.values():
        each.sources = [] if each.view is None else sources_of(each.view)


def settle_strays(
    model: nn.Module, tracer: Tracer, evaluate: Callable[[View], torch.Tensor]
) -> bool:
    """Give real, private memory to the deferred tensors of `model` that are not parameters.

    These are buffers and other attributes of modules. `evaluate` returns the content of a view as a
    tensor. Returns whether there were any.

    Raises:
        UntraceableError: A module has a deferred tensor inside a list or another container, where
            it cannot be replaced.
    """
    settled = False
    for name, module in model.named_modules():
        for held, items in (
            (module._buffers, list(module._buffers.items())),
            (vars(module), _own_attributes(module)),
        ):
            for key, value in items:
                if isinstance(value, torch.Tensor):
                    view = tracer.view(value)
                    if view is not None:
                        held[key] = evaluate(view).clone()
                        settled = True
                elif any(tracer.find(each) is not None for each in _inside(value)):
                    raise UntraceableError(f"{name}.{key} keeps checkpoint tensors in a container")
    return settled


# What every module has: parameters, buffers and modules, looked at by themselves, flags and hooks.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device)


def _own_attributes(module: nn.Module) -> list[tuple[str, object]]:
    """Return the attributes that may hold a tensor, apart from parameters and buffers."""
    return [
        (key, value)
        for key, value in vars(module).items()
        if key not in _OF_EVERY_MODULE and type(value) not in _PLAIN
    ]


def _inside(value: object) -> Iterable[torch.Tensor]:
    held: Iterable[object] = ()
    if isinstance(value, dict):
        held = value.values()
    elif isinstance(value, (list, tuple, set)):
        held = value
    return [each for each in held if isinstance(each, torch.Tensor)] if held else ()


def replace_data(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Give `parameter` the data of `tensor`; it remains the same object with its attributes.

    Raises:
        UntraceableError: torch cannot swap the data, because a weak reference to the parameter
            exists.
    """
    data = tensor.detach()
    data.__class__ = parameter.__class__
    data.__dict__.update(parameter.__dict__)
    try:
        torch.utils.swap_tensors(parameter, data)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UntraceableError(f"a parameter cannot be given other memory ({error})") from error
