"""From deferred parameters to vLLM's final layers: hits, misses, and what may be shared how.

vLLM's own loop calls `quant_method.process_weights_after_loading(layer)`; for the time of a load
that call comes here first. A (quantisation method, kernel) pair is shared by layer key only when
it is named in `CONSTANT_METHODS`, `_PREPROCESSED` or `quantised.py`, which the tests cover; every
other layer is processed as vLLM does it and its final tensors are then shared by content.
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
from tensor_dedup.patches.vllm.packed import PackedGemm, ScaledGemm
from tensor_dedup.patches.vllm.processed import Deferred, ProcessedLayer
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
    """Has it a method that can be told that its weights are processed, and that tests cover?"""
    method: Any = layer.quant_method
    return takes_processed(method) and (type(method) in _PREPROCESSED or is_plain_fp8(layer))


@dataclass(slots=True)
class LayerProcessor:
    """Processes the layers of one load."""

    context: LayerContext

    @property
    def assembly(self) -> LoadSession:
        """The load's own state."""
        return self.context.assembly

    def process(self, original: Original, layer: nn.Module) -> None:
        """Do what `original(layer)` does, sharing what can be."""
        method: Any = layer.quant_method
        parameters = self.context.parameters(layer)
        if not parameters:
            original(layer)
        elif type(method) in CONSTANT_METHODS and "weight" in parameters and layer.weight.ndim == 2:
            self._gemm(original, layer, parameters)
        elif self.context.on_gpu or not (_takes_processed(layer) or packs_int8(layer)):
            self._plainly(original, layer, parameters)
        elif (private := self._private(layer, parameters)) is not None:
            self.assembly.ledger.skip(*private)
            self._plainly(original, layer, parameters)
        elif packs_int8(layer):
            ScaledGemm(self.context, original, layer, parameters).process()
        else:
            self._preprocessed(original, layer, parameters)

    def _private(self, layer: nn.Module, parameters: Deferred) -> tuple[str, str] | None:
        """A parameter that no layer key can hold, and why; None when all can be held."""
        for each in parameters.values():
            if (reason := self.assembly.reason(each)) is not None:
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
        self.assembly.share(others)
        if not current_platform.is_cpu():
            self.assembly.share([parameters["weight"]])
            original(layer)  # which leaves the weight as it is on every other platform we know
            return
        if getattr(layer, KEEP_PLAIN, False) or not self.context.packed:
            self.assembly.share([parameters["weight"]])
            setattr(layer, "cpu_linear", nn.functional.linear)  # noqa: B010 - modules take any
            # vLLM's own switch, so that a reload keeps the weight plain; embeddings have none.
            setattr(layer, KEEP_PLAIN, not keeps_weight)
            return
        PackedGemm(self.context, original, layer, parameters["weight"], keeps_weight).process()

    # --- methods that can be told that their weights are processed already

    def _preprocessed(self, original: Original, layer: nn.Module, parameters: Deferred) -> None:
        processed = ProcessedLayer(self.context, layer, parameters)
        made: dict[str, ScratchTensor] = {}
        if not all(self.assembly.known(each) for each in parameters.values()):
            made = {name: self.assembly.make(each) for name, each in parameters.items()}
        key = self.context.key(layer, parameters)
        record = registry.lookup_record(key.digest)
        refusal: str | None = None
        if isinstance(record, LayerRecord):
            refusal = self.context.refusal(record, parameters)
            if refusal is None:
                self._reuse(original, processed, record, made)
            else:
                self.assembly.ledger.skip(next(iter(parameters.values())).name, refusal)
        if refusal is not None or not isinstance(record, LayerRecord):
            self._build(original, processed, made, key)
        for each in made.values():
            self.assembly.give_back(each)

    def _reuse(
        self,
        original: Original,
        layer: ProcessedLayer,
        record: LayerRecord,
        made: dict[str, ScratchTensor],
    ) -> None:
        if self.assembly.sampled():
            layer.materialise(made)
            layer.process(original)
            layer.audit(record)
            layer.map(record)
            return
        layer.map(record)
        assert weights_already_processed is not None  # or `takes_processed` would have said no
        with weights_already_processed():
            original(layer.layer)
        set_attributes(layer.layer, record.attributes)

    def _build(
        self,
        original: Original,
        layer: ProcessedLayer,
        made: dict[str, ScratchTensor],
        key: LayerKey,
    ) -> None:
        layer.materialise(made)
        layer.process(original)
        changed = processed_attributes(layer.layer)
        record = None if changed is None else LayerRecord(key.digest, key.preimage)
        if record is not None:
            record.attributes = changed or {}
            record.structure, record.origins = structure_of(list(layer.deferred.values()))
        layer.share(record)
        if record is not None and layer.complete(record):
            registry.register_record(key.digest, record)
            self.assembly.own.add(record)
            setattr(layer.layer, RECORD, record)

    # --- everything else

    def _plainly(self, original: Original, layer: nn.Module, parameters: Deferred) -> None:
        """Process as vLLM does, then share by content: that saves memory, not reading."""
        waiting = {name: each for name, each in parameters.items() if not each.installed}
        if not waiting:
            original(layer)
            return
        processed = ProcessedLayer(self.context, layer, waiting)
        processed.materialise({})
        processed.process(original)
        processed.share()
