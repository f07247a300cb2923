"""Putting deferred tensors in place of a model's parameters, and real ones back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from tensor_dedup.loader.recipe import initial_bytes, sources_of

if TYPE_CHECKING:
    from tensor_dedup.loader.sources import SourceTensor
    from tensor_dedup.loader.trace import Tracer
    from tensor_dedup.loader.virtual import View


@dataclass(eq=False, slots=True)
class DeferredParameter:
    """A parameter of the model: its first name, and after tracing what its bytes follow from.

    `view` is None when the loading code gave it real memory. `installed`: it is real now.
    """

    name: str
    parameter: nn.Parameter
    view: View | None = None
    installed: bool = False
    sources: list[SourceTensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.parameter.numel() * self.parameter.element_size()


def defer(model: nn.Module, tracer: Tracer) -> dict[int, DeferredParameter]:
    """Make every parameter of `model` a deferred tensor; the result is by id of the parameter.

    Parameter objects stay what they are (vLLM and others hold references to them); two that share
    a storage go on sharing one. A storage that a buffer is a view of stays real.
    """
    buffers = {b.untyped_storage()._cdata for b in model.buffers()}
    flat: dict[int, torch.Tensor] = {}
    deferred: dict[int, DeferredParameter] = {}
    for name, parameter in model.named_parameters():
        storage = parameter.untyped_storage()._cdata
        if parameter.is_meta or storage in buffers:
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


def conclude(deferred: dict[int, DeferredParameter], tracer: Tracer) -> None:
    """After tracing: note of every parameter what it follows from, or that it is real already."""
    for each in deferred.values():
        each.view = tracer.view(each.parameter)
        each.installed = each.view is None and not each.parameter.is_meta
        each.sources = [] if each.view is None else sources_of(each.view)


def replace_data(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Give `parameter` the data of `tensor`; its identity, class and attributes stay.

    Raises RuntimeError from torch when something holds a weak reference to the parameter.
    """
    data = tensor.detach()
    data.__class__ = parameter.__class__
    data.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, data)  # type: ignore[no-untyped-call]


def left_over(model: nn.Module) -> Iterator[str]:
    """Names of parameters that are still without memory."""
    return (name for name, parameter in model.named_parameters() if parameter.is_meta)
