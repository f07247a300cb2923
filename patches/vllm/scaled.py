"""Int8 matrix products on the CPU (compressed-tensors w8a8): vLLM packs the weight into a handler.

As the unquantised handler (`gemm.py`) it is shared as the object it is, under a layer key. What
the layer has beside it (scales, sums of columns) is shared tensor by tensor, in the same record.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensor_dedup.loader.deferred.layer_records import RECORD, LayerRecord
from tensor_dedup.loader.deferred.structure import structure_of
from tensor_dedup.loader.residents.compare import raise_audit
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.patches.vllm.kernels import packed_scaled
from tensor_dedup.patches.vllm.processed import UPDATED, Deferred, ProcessedLayer
from tensor_dedup.patches.vllm.quantised import linear_kernel

if TYPE_CHECKING:
    from torch import nn

    from tensor_dedup.loader.deferred.layer_key import LayerKey
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.deferred.scratch_tensor import ScratchTensor
    from tensor_dedup.patches.vllm.context import LayerContext, Original


@dataclass(slots=True)
class ScaledGemm:
    """One layer whose int8 weight vLLM may pack for oneDNN."""

    context: LayerContext
    original: Original
    layer: nn.Module
    deferred: Deferred

    @property
    def _weight(self) -> DeferredParameter:
        return self.deferred["weight"]

    def process(self) -> None:
        """Take the handler and the scales of a layer processed alike, or pack and publish."""
        assembly = self.context.assembly
        if self.context.updated:  # written later, scales must reach this layer's handler alone
            self._build(None, {})
            return
        made: dict[str, ScratchTensor] = {}
        if not all(assembly.known(each) for each in self.deferred.values()):
            made = {name: assembly.make(each) for name, each in self.deferred.items()}
        key = self.context.key(self.layer, self.deferred)
        record = registry.lookup_record(key.digest)
        handler = record.opaque() if isinstance(record, LayerRecord) and record.opaque else None
        if isinstance(record, LayerRecord) and handler is not None:
            refusal = self.context.refusal(record, self.deferred)
            if refusal is None:
                self._reuse(record, handler, made)
            else:
                assembly.ledger.skip(self._weight.name, refusal)
                self._build(None, made)
        else:
            self._build(key, made)
        for each in made.values():
            assembly.give_back(each)

    def _reuse(self, record: LayerRecord, handler: Any, made: dict[str, ScratchTensor]) -> None:
        assembly, weight = self.context.assembly, self._weight
        layer = ProcessedLayer(self.context, self.layer, self.deferred)
        if assembly.sampled():
            layer.materialise(made)
            self._audit(record)
            layer.process(self.original)
            layer.audit(record)
        layer.map(record)
        self.layer.register_parameter("weight", None)  # what vLLM leaves of it
        kernel: Any = linear_kernel(self.layer)
        kernel.dnnl_handler, kernel.linear_method = handler, kernel._apply_weights_onednn
        assembly.enter(weight.name, record.opaque_bytes, record, made=False, sources=weight.sources)

    def _audit(self, record: LayerRecord) -> None:
        """A packed weight cannot be compared; what it was packed from can."""
        weight = self._weight
        plain = weight.parameter.detach()
        if self.context.assembly.content_name(weight, plain, trusted=False) != record.plain_name:
            raise_audit(weight.name, "the packed weight's digest", "its checkpoint's")

    def _build(self, key: LayerKey | None, made: dict[str, ScratchTensor]) -> None:
        assembly, weight = self.context.assembly, self._weight
        layer = ProcessedLayer(self.context, self.layer, self.deferred)
        layer.materialise(made)
        nbytes, record = weight.nbytes, None
        if key is not None:
            record = LayerRecord(key.digest, key.preimage)
            record.plain_name = assembly.content_name(weight, weight.parameter.detach())
            record.structure, record.origins = structure_of(list(self.deferred.values()))
        layer.process(self.original)
        handler = packed_scaled(self.layer)
        layer.share(None if handler is None else record)
        if handler is None:  # another way of this kernel, which leaves ordinary parameters
            return
        assembly.enter(weight.name, nbytes, None, made=True, sources=weight.sources)
        if self.context.updated:
            assembly.ledger.skip(weight.name, UPDATED)
        if record is not None and layer.complete(record):
            record.opaque, record.opaque_bytes = weakref.ref(handler), nbytes
            registry.register_record(record.key, record)
            assembly.own.add(record)
            setattr(handler, RECORD, record)
