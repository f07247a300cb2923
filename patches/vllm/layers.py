"""From deferred parameters to vLLM's final layers: hits, misses, and what may be shared how.

vLLM's own loop calls `quant_method.process_weights_after_loading(layer)`; for the time of a load
that call comes here first. A (quantisation method, kernel) pair is shared by layer key only when
it is named in `_GEMM_METHODS` or `_PREPROCESSED`, which the tests cover; every other layer is
processed as vLLM does it and its final tensors are then shared by content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from tensor_dedup.loader.assembly import SHARED_STORAGE, Assembly, Made
from tensor_dedup.loader.comparing import raise_audit, same_bytes
from tensor_dedup.loader.deferred import DeferredParameter, replace_data
from tensor_dedup.loader.layer_key import LayerKey, class_name
from tensor_dedup.loader.records import LayerRecord
from tensor_dedup.loader.registry import registry
from tensor_dedup.loader.residents import sharable
from tensor_dedup.loader.structure import structure_of
from tensor_dedup.patches.vllm.context import RECORD, LayerContext, Original
from tensor_dedup.patches.vllm.gemm import PackedGemm
from tensor_dedup.patches.vllm.kernels import (
    held_elsewhere,
    processed_attributes,
    set_attributes,
)
from tensor_dedup.patches.vllm.versions import takes_processed, weights_already_processed

_GEMM_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_PREPROCESSED = (UnquantizedFusedMoEMethod,)


@dataclass(slots=True)
class LayerProcessor:
    """Processes the layers of one load."""

    context: LayerContext

    @property
    def assembly(self) -> Assembly:
        """The load's own state."""
        return self.context.assembly

    def process(self, original: Original, layer: nn.Module) -> None:
        """Do what `original(layer)` does, sharing what can be."""
        method: Any = layer.quant_method
        parameters = self.context.parameters(layer)
        if not parameters:
            original(layer)
        elif type(method) in _GEMM_METHODS and "weight" in parameters and layer.weight.ndim == 2:
            self._gemm(original, layer, parameters)
        elif type(method) in _PREPROCESSED and takes_processed(method):
            self._preprocessed(original, layer, parameters)
        else:
            self._plainly(original, layer, parameters)

    # --- unquantised GEMM on the CPU: the weight is packed into an opaque handler, or kept plain

    def _gemm(
        self, original: Original, layer: nn.Module, parameters: dict[str, DeferredParameter]
    ) -> None:
        others = [each for name, each in parameters.items() if name != "weight"]
        keeps_weight = isinstance(layer.quant_method, UnquantizedEmbeddingMethod)
        self.assembly.share(others)
        if getattr(layer, "_cpu_skip_gemm_dispatch", False) or not self.context.packed:
            self.assembly.share([parameters["weight"]])
            setattr(layer, "cpu_linear", nn.functional.linear)  # noqa: B010 - modules take any
            # vLLM's own switch, so that a reload keeps the weight plain; embeddings have none.
            setattr(layer, "_cpu_skip_gemm_dispatch", not keeps_weight)  # noqa: B010
            return
        PackedGemm(self.context, original, layer, parameters["weight"], keeps_weight).process()

    # --- methods that can be told that their weights are processed already

    def _preprocessed(
        self, original: Original, layer: nn.Module, parameters: dict[str, DeferredParameter]
    ) -> None:
        reasons = {each.name: self.assembly.reason(each) for each in parameters.values()}
        private = next(((n, r) for n, r in reasons.items() if r is not None), None)
        if private is not None:
            self.assembly.ledger.skip(*private)
            self._plainly(original, layer, parameters)
            return
        made: dict[str, Made] = {}
        if not all(self.assembly.known(each) for each in parameters.values()):
            made = {name: self.assembly.make(each) for name, each in parameters.items()}
        key = self.context.key(layer, parameters)
        record = registry.lookup_record(key.digest)
        refusal: str | None = None
        if isinstance(record, LayerRecord):
            refusal = self.context.refusal(record, parameters)
            if refusal is None:
                self._reuse(original, layer, parameters, record, made)
            else:
                self.assembly.ledger.skip(next(iter(parameters.values())).name, refusal)
        if refusal is not None or not isinstance(record, LayerRecord):
            self._build(original, layer, parameters, made, key)
        for each in made.values():
            self.assembly.give_back(each)

    def _reuse(
        self,
        original: Original,
        layer: nn.Module,
        parameters: dict[str, DeferredParameter],
        record: LayerRecord,
        made: dict[str, Made],
    ) -> None:
        assembly = self.assembly
        if assembly.sampled():
            self._materialise(parameters, made)
            original(layer)
            _audit(layer, parameters, record)
            self._map(layer, parameters, record)
            return
        self._map(layer, parameters, record)
        assert weights_already_processed is not None  # or `takes_processed` would have said no
        with weights_already_processed():
            original(layer)
        set_attributes(layer, record.attributes)

    def _map(
        self, layer: nn.Module, parameters: dict[str, DeferredParameter], record: LayerRecord
    ) -> None:
        for name in [n for n in parameters if n not in record.residents]:
            if name in layer._parameters:
                delattr(layer, name)
        for name, (resident, kind) in record.residents.items():
            tensor = resident.map()
            if layer._parameters.get(name) is None:
                fresh = nn.Parameter(tensor, requires_grad=False)
                fresh.__class__ = kind
                layer.register_parameter(name, fresh)
            else:
                replace_data(layer.get_parameter(name), tensor)
            each = parameters.get(name)
            label = each.name if each is not None else f"{class_name(layer)}.{name}"
            sources = each.sources if each is not None else ()
            self.assembly.enter(label, tensor.nbytes, record, made=False, sources=sources)
        for each in parameters.values():
            self.context.done(each)
        setattr(layer, RECORD, record)

    def _build(
        self,
        original: Original,
        layer: nn.Module,
        parameters: dict[str, DeferredParameter],
        made: dict[str, Made],
        key: LayerKey,
    ) -> None:
        self._materialise(parameters, made)
        original(layer)
        changed = processed_attributes(layer)
        record = None if changed is None else LayerRecord(key.digest, key.preimage)
        if record is not None:
            record.attributes = changed or {}
            record.structure, record.origins = structure_of(list(parameters.values()))
        self._share_processed(layer, parameters, record)
        if record is not None and len(record.residents) == _parameter_count(layer):
            registry.publish_record(key.digest, record)
            self.assembly.own.add(record)
            setattr(layer, RECORD, record)

    # --- everything else

    def _plainly(
        self, original: Original, layer: nn.Module, parameters: dict[str, DeferredParameter]
    ) -> None:
        """Process as vLLM does, then share by content: that saves memory, not reading."""
        waiting = {name: each for name, each in parameters.items() if not each.installed}
        self._materialise(waiting, {})
        original(layer)
        if waiting:
            self._share_processed(layer, waiting, None)

    def _materialise(self, parameters: dict[str, DeferredParameter], made: dict[str, Made]) -> None:
        """Give each parameter memory of its own: processing may keep any part of it."""
        for name, each in parameters.items():
            reason = self.assembly.reason(each)
            if reason == SHARED_STORAGE:
                self.assembly.keep_private(each, reason, made.get(name))
                continue
            tensor = torch.empty_strided(
                each.parameter.shape, each.parameter.stride(), dtype=each.parameter.dtype
            )
            here = made.get(name) or self.assembly.make(each)
            tensor.copy_(here.tensor)
            if name not in made:
                self.assembly.give_back(here)
            replace_data(each.parameter, tensor)
            self.context.done(each)

    def _share_processed(
        self, layer: nn.Module, parameters: dict[str, DeferredParameter], record: LayerRecord | None
    ) -> None:
        """Replace the layer's processed parameters by residents with equal bytes."""
        assembly = self.assembly
        for name, parameter in list(layer._parameters.items()):
            if parameter is None or parameter.is_meta:
                continue
            each = parameters.get(name)
            if each is None and record is None:
                continue
            label = each.name if each is not None else f"{class_name(layer)}.{name}"
            sources = each.sources if each is not None else ()
            reason = self._reason_after(each, parameter)
            if reason == SHARED_STORAGE:
                continue  # entered when it got its memory
            if reason is not None or not parameter.numel():
                assembly.ledger.add(label, parameter.nbytes, shared=False, sources=sources)
                if reason is not None:
                    assembly.ledger.skip(label, reason)
                continue
            resident, made = assembly.resident_for(label, parameter.detach())
            if resident is None:
                assembly.ledger.add(label, parameter.nbytes, shared=False, sources=sources)
                continue
            replace_data(parameter, resident.map())
            assembly.enter(label, parameter.nbytes, resident, made=made, sources=sources)
            if record is not None:
                record.residents[name] = (resident, type(parameter))

    def _reason_after(self, each: DeferredParameter | None, parameter: nn.Parameter) -> str | None:
        """Why a processed parameter stays private, or None."""
        reason = self.assembly.reason(each) if each is not None else None
        if reason is None and not sharable(parameter.detach()):
            return "its processed form has gaps"
        if reason is None and held_elsewhere(parameter):
            return "something beside the layer keeps its memory"
        return reason


def _parameter_count(layer: nn.Module) -> int:
    return sum(p is not None for p in layer._parameters.values())


def _audit(layer: nn.Module, parameters: dict[str, DeferredParameter], record: LayerRecord) -> None:
    """Compare a layer that was just processed from its checkpoint with the shared one."""
    for name, (resident, _) in record.residents.items():
        rebuilt = layer._parameters.get(name)
        if rebuilt is None or not same_bytes(rebuilt.detach(), resident.map()):
            # Processing may have made this one; then another of the layer says which layer it is.
            each = parameters.get(name) or next(iter(parameters.values()))
            raise_audit(f"{each.name} ({name})", "the resident", "the layer rebuilt")
