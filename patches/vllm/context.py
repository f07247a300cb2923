"""What every kind of layer needs to know of the load it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch import nn

from tensor_dedup.loader.deferred.layer_key import LayerKey, attributes, class_name, process_text
from tensor_dedup.loader.deferred.layer_records import (
    LayerRecord,
    OriginGoneError,
    same_source_bytes,
)
from tensor_dedup.loader.deferred.structure import distinct_sources, structure_of
from tensor_dedup.loader.residents.compare import COLLISION
from tensor_dedup.patches.vllm.kernels import dispatch
from tensor_dedup.patches.vllm.quantised import linear_kernel

if TYPE_CHECKING:
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.deferred.session import LoadSession

Original = Callable[[nn.Module], None]


@dataclass(slots=True)
class LayerContext:
    """One load, as its layers see it. `deferred` is by id of the parameter object.

    `updated`: somebody may write weights in place later (`weight_transfer_config`).
    """

    assembly: LoadSession
    deferred: dict[int, DeferredParameter]
    packed: bool
    model_dtype: torch.dtype
    on_gpu: bool = False
    updated: bool = False
    process: str = field(default_factory=process_text)

    def parameters(self, layer: nn.Module) -> dict[str, DeferredParameter]:
        """The layer's own parameters that were deferred, by name in the layer."""
        found = {}
        for name, parameter in layer._parameters.items():
            if parameter is not None and id(parameter) in self.deferred:
                found[name] = self.deferred[id(parameter)]
        return found

    def done(self, each: DeferredParameter) -> None:
        """Note that a parameter has its memory, and let go of what only it needed."""
        if not each.installed:
            each.installed = True
            if each.view is not None:
                self.assembly.evaluator.release(each.view)

    def key(
        self,
        layer: nn.Module,
        parameters: Mapping[str, DeferredParameter],
        content: str | None = None,
    ) -> LayerKey:
        """The layer's key. All digests must be known; asked before processing changes the layer.

        With `content`, the digest of the only parameter's bytes, that stands for its recipe.
        """
        return LayerKey.of(
            self.process,
            vllm=vllm.__version__,
            hash=self.assembly.config.hash_algorithm,
            layer=class_name(layer),
            configuration=attributes(layer),
            method=class_name(layer.quant_method),
            method_configuration=attributes(layer.quant_method),
            scheme=_described(getattr(layer, "scheme", None)),
            kernel=_described(linear_kernel(layer)),
            model_dtype=str(self.model_dtype),
            device="cpu",
            dispatch=dispatch(),
            bias=_bias(layer),  # some kernels convert it while they pack the weight
            parameters={n: self._described(each, content) for n, each in parameters.items()},
        )

    def _described(self, each: DeferredParameter, content: str | None) -> list[Any]:
        view = each.view
        assert view is not None
        kind = class_name(type(each.parameter))
        bytes_are = f"content {content}" if content else self.assembly.book.digest(view)
        return [kind, str(view.dtype), view.shape, view.stride, bytes_are]

    def refusal(
        self, record: LayerRecord, parameters: Mapping[str, DeferredParameter]
    ) -> str | None:
        """With verify_bytes: why the record must not be used, or None.

        Its sources are other bytes, or cannot be compared any more.
        """
        if not self.assembly.config.verifies_bytes:
            return None
        structure, _ = structure_of(list(parameters.values()))
        mine = distinct_sources(list(parameters.values()))
        try:
            equal, read = same_source_bytes(mine, record.origins)
        except OriginGoneError as error:
            return f"verify_bytes: {error}"
        self.assembly.reader.counters.bytes_read += read
        if equal and structure == record.structure:
            return None
        self.assembly.ledger.collisions += 1
        return COLLISION


def _described(part: object) -> list[Any] | None:
    """The class of a layer's scheme or kernel, and what decides how it processes weights."""
    return None if part is None else [class_name(part), attributes(part)]


def _bias(layer: nn.Module) -> str | None:
    bias = getattr(layer, "bias", None)
    return str(bias.dtype) if isinstance(bias, torch.Tensor) else None
