"""Unquantised matrix products on the CPU: vLLM packs the weight into an opaque handler.

A handler cannot be mapped, hashed or written. It is shared as the object it is, inside one
process, under a key that holds the recipe of the plain weight it was packed from.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensor_dedup.loader.assembly import COLLISION, Made, raise_audit
from tensor_dedup.loader.deferred import DeferredParameter, replace_data
from tensor_dedup.loader.records import LayerRecord
from tensor_dedup.loader.registry import registry
from tensor_dedup.loader.structure import structure_of
from tensor_dedup.patches.vllm.context import RECORD, LayerContext, Original
from tensor_dedup.patches.vllm.kernels import holds_memory, packed_linear

if TYPE_CHECKING:
    from tensor_dedup.loader.layer_key import LayerKey


@dataclass(slots=True)
class PackedGemm:
    """One layer whose 2-d weight vLLM packs for the CPU."""

    context: LayerContext
    original: Original
    layer: nn.Module
    weight: DeferredParameter
    keeps_weight: bool

    def process(self) -> None:
        assembly, weight = self.context.assembly, self.weight
        reason = assembly.reason(weight)
        if reason is not None:
            self._pack_privately(reason)
            return
        made = None
        if not weight.installed and not assembly.known(weight):
            made = assembly.make(weight)
        key = self.context.key(self.layer, {"weight": weight})
        record = registry.lookup_record(key.digest)
        linear = record.opaque() if isinstance(record, LayerRecord) and record.opaque else None
        if isinstance(record, LayerRecord) and linear is not None:
            if self.context.acceptable(record, {"weight": weight}):
                self._reuse(record, linear, made)
            else:
                self._pack_privately(COLLISION)
        else:
            self._pack(key, made)
        assembly.give_back(made)

    def _reuse(self, record: LayerRecord, linear: Any, made: Made | None) -> None:
        assembly, weight, layer = self.context.assembly, self.weight, self.layer
        if assembly.sampled():
            self._audit(record, made)
        if self.keeps_weight:
            assembly.share([weight], made)
        else:
            # What vLLM leaves behind once a weight is packed.
            layer.weight = nn.Parameter(torch.empty(0, dtype=weight.parameter.dtype), False)
            self.context.done(weight)
        layer.cpu_linear = linear
        self._follow_bias(record)
        self._enter(record.opaque_bytes, record)

    def _follow_bias(self, record: LayerRecord) -> None:
        """Some kernels convert the bias while packing; a layer that skips packing does it here."""
        bias = getattr(self.layer, "bias", None)
        dtype = record.attributes.get("bias_dtype")
        if isinstance(bias, nn.Parameter) and dtype is not None and bias.dtype != dtype:
            bias.data = bias.data.to(dtype)

    def _audit(self, record: LayerRecord, made: Made | None) -> None:
        assembly = self.context.assembly
        here = made or assembly.make(self.weight)
        if assembly.digest_of(here.tensor) != record.plain_digest:
            raise_audit(self.weight.name, "the packed weight's digest", "its checkpoint's")
        if here is not made:
            assembly.give_back(here)

    def _pack(self, key: LayerKey, made: Made | None) -> None:
        """Process as vLLM does, from borrowed memory where the plain weight is dropped anyway."""
        assembly, weight, layer = self.context.assembly, self.weight, self.layer
        nbytes = weight.nbytes
        if self.keeps_weight or weight.installed:
            assembly.share([weight], made)
            plain = assembly.digest_of_installed(weight)
            self.original(layer)
        else:
            here = made or assembly.make(weight)
            plain = assembly.content_digest(weight, here)
            self._process_borrowed(here)
            if here is not made:
                assembly.give_back(here)
        linear = packed_linear(layer)
        if linear is None:
            self._enter(nbytes)
            assembly.ledger.skip(weight.name, "its kernel does not pack into a handler we know")
            return
        record = LayerRecord(key.digest, key.preimage)
        record.opaque, record.opaque_bytes = weakref.ref(linear), nbytes
        record.plain_digest = plain
        bias = getattr(layer, "bias", None)
        record.attributes = {"bias_dtype": bias.dtype if isinstance(bias, nn.Parameter) else None}
        record.structure, record.origins = structure_of([weight])
        registry.publish_record(key.digest, record)
        assembly.own.add(record)
        setattr(linear, RECORD, record)
        self._enter(nbytes)

    def _process_borrowed(self, here: Made) -> None:
        """Process from borrowed memory; a kernel that kept some of it keeps the block."""
        parameter = self.weight.parameter
        replace_data(parameter, here.tensor)
        self.context.done(self.weight)
        self.original(self.layer)
        if holds_memory(self.layer, here.block):
            here.escaped = True

    def _pack_privately(self, reason: str) -> None:
        assembly, weight = self.context.assembly, self.weight
        nbytes = weight.nbytes
        assembly.ledger.skip(weight.name, reason)
        if self.keeps_weight:
            assembly.share([weight])  # the plain form stands for itself
        if weight.installed:
            self.original(self.layer)
        else:
            here = assembly.make(weight)
            self._process_borrowed(here)
            assembly.give_back(here)
        self._enter(nbytes)

    def _enter(self, nbytes: int, record: LayerRecord | None = None) -> None:
        """Account for the packed form: that of a record found, or one made now."""
        self.context.assembly.enter(
            self.weight.name, nbytes, record, made=record is None, sources=self.weight.sources
        )
