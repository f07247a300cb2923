"""Processing of a model's layers during a load, with sharing.

vLLM calls `quant_method.process_weights_after_loading(layer)` for each layer. During a load with
this package, the call comes here. Layers are shared in one of two ways:

* By layer key, before they are processed. The key identifies the processed result. This is done
  only for combinations of quantisation method and kernel that tests cover.
* By content, afterwards. vLLM processes the layer, and its final tensors are hashed and replaced by
  shared tensors with equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from tensor_dedup.loader.deferred.layer_records import RECORD, LayerRecord, structure_of
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.patches.vllm.kernels import (
    is_plain_fp8,
    packs_int8,
    processed_attributes,
    set_attributes,
)
from tensor_dedup.patches.vllm.packed import PackedGemm, ScaledGemm, mark_emptied
from tensor_dedup.patches.vllm.processed import Deferred, KeyedLayer, ProcessedLayer
from tensor_dedup.patches.vllm.versions import (
    KEEP_PLAIN,
    takes_processed,
    weights_already_processed,
)

if TYPE_CHECKING:
    from tensor_dedup.loader.deferred.layer_key import LayerKey
    from tensor_dedup.loader.deferred.session import LoadSession, ScratchTensor
    from tensor_dedup.patches.vllm.processed import LayerContext, Original

# Everywhere but on a CPU, where weights may be packed, processing leaves their weights alone.
CONSTANT_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_PREPROCESSED = (UnquantizedFusedMoEMethod,)


def _takes_processed(layer: nn.Module) -> bool:
    """Return whether the method accepts weights that are processed already, and tests cover it."""
    method: Any = layer.quant_method
    return takes_processed(method) and (type(method) in _PREPROCESSED or is_plain_fp8(layer))


@dataclass(slots=True)
class PreprocessedLayer(KeyedLayer):
    """A layer whose quantisation method accepts weights that have been processed already."""

    def form_of(self, record: LayerRecord) -> LayerRecord:
        """Return `record`, which itself lists the shared tensors of the processed layer."""
        return record

    def refuse(self, reason: str, key: LayerKey, made: dict[str, ScratchTensor]) -> None:
        """Process the layer without reusing an equal one, and add `reason` to the load report."""
        self.context.session.ledger.skip(next(iter(self.deferred.values())).name, reason)
        self.build(key, made)

    def reuse(self, record: LayerRecord, form: Any, made: dict[str, ScratchTensor]) -> None:
        """Use the shared tensors that `record` lists as the parameters of this layer.

        If an audit selects the layer, vLLM first processes the layer, and the result is compared
        with the shared tensors.

        Raises:
            AuditError: A parameter differs from its shared tensor.
        """
        layer = ProcessedLayer(self.context, self.layer, self.deferred)
        if self.context.session.checks.sampled():
            layer.materialise(made)
            layer.process(self.original)
            layer.audit(record)
            layer.map(record)
            return
        layer.map(record)
        assert weights_already_processed is not None  # or `takes_processed` would have said no
        with weights_already_processed():
            self.original(self.layer)
        set_attributes(self.layer, record.attributes)

    def build(self, key: LayerKey, made: dict[str, ScratchTensor]) -> None:
        """Process the layer and share its parameters by content.

        If all parameters could be shared, and the kernel's attributes can be copied to other
        layers, the result is registered under `key`, so that equal layers can use it.
        """
        layer = ProcessedLayer(self.context, self.layer, self.deferred)
        layer.materialise(made)
        layer.process(self.original)
        changed = processed_attributes(self.layer)
        record = None if changed is None else LayerRecord(key.digest, key.preimage)
        if record is not None:
            record.attributes = changed or {}
            record.structure, record.origins = structure_of(list(self.deferred.values()))
        layer.share(record)
        if record is not None and layer.complete(record):
            registry.register_record(key.digest, record)
            self.context.session.memory.own.add(record)
            setattr(self.layer, RECORD, record)


@dataclass(slots=True)
class LayerProcessor:
    """The replacement for vLLM's `process_weights_after_loading` for all layers in one load."""

    context: LayerContext

    @property
    def session(self) -> LoadSession:
        """The session of the load, which all layers use."""
        return self.context.session

    def process(self, original: Original, layer: nn.Module) -> None:
        """Process `layer` as `original(layer)`, vLLM's own method, would, and share its tensors.

        Tensors that cannot be shared stay private.
        """
        self._process(original, layer)
        mark_emptied(layer)

    def _process(self, original: Original, layer: nn.Module) -> None:
        method: Any = layer.quant_method
        parameters = self.context.parameters(layer)
        if not parameters:
            original(layer)
        elif type(method) in CONSTANT_METHODS and "weight" in parameters and layer.weight.ndim == 2:
            self._gemm(original, layer, parameters)
        elif self.context.on_gpu or not (_takes_processed(layer) or packs_int8(layer)):
            self._plainly(original, layer, parameters)
        elif (private := self._private(layer, parameters)) is not None:
            self.session.ledger.skip(*private)
            self._plainly(original, layer, parameters)
        elif packs_int8(layer):
            ScaledGemm(self.context, original, layer, parameters).process()
        else:
            PreprocessedLayer(self.context, original, layer, parameters).share_by_key()

    def _private(self, layer: nn.Module, parameters: Deferred) -> tuple[str, str] | None:
        """Return a parameter that no layer key can cover, and the reason, or None."""
        for each in parameters.values():
            if (reason := self.session.plan.reason(each)) is not None:
                return each.name, reason
        strangers = [
            n for n, p in layer._parameters.items() if p is not None and n not in parameters
        ]
        if not strangers:
            return None
        first = next(iter(parameters.values()))
        return first.name, f"{strangers[0]} of its layer was not loaded as the others"

    # --- unquantised GEMM on the CPU: the weight is packed into an opaque handler, or kept plain

    def _gemm(self, original: Original, layer: nn.Module, parameters: Deferred) -> None:
        others = [each for name, each in parameters.items() if name != "weight"]
        keeps_weight = isinstance(layer.quant_method, UnquantizedEmbeddingMethod)
        self.session.share(others)
        if not current_platform.is_cpu():
            self.session.share([parameters["weight"]])
            original(layer)  # which leaves the weight as it is on every other platform we know
            return
        if getattr(layer, KEEP_PLAIN, False) or not self.context.packed:
            self.session.share([parameters["weight"]])
            setattr(layer, "cpu_linear", nn.functional.linear)  # noqa: B010 - modules take any
            setattr(layer, KEEP_PLAIN, True)  # for a reload
            return
        weight = {"weight": parameters["weight"]}
        PackedGemm(self.context, original, layer, weight, keeps_weight).process()

    # --- everything else

    def _plainly(self, original: Original, layer: nn.Module, parameters: Deferred) -> None:
        """Process as vLLM does, then share by content, which saves memory but no reading."""
        self.context.all_keyed = False
        waiting = {name: each for name, each in parameters.items() if not each.installed}
        if not waiting:
            original(layer)
            return
        processed = ProcessedLayer(self.context, layer, waiting)
        processed.materialise({})
        processed.process(original)
        processed.share()
