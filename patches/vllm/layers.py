"""From deferred parameters to vLLM's final layers: hits, misses, and what may be shared how.

vLLM's own loop calls `quant_method.process_weights_after_loading(layer)`; for the time of a load
that call comes here first. A (quantisation method, kernel) pair is shared by layer key only when
it is named in `_GEMM_METHODS` or `_PREPROCESSED`, which the tests cover; every other layer is
processed as vLLM does it and its final tensors are then shared by content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from torch import nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.utils import weights_already_processed

from tensor_dedup.loader.assembly import COLLISION, Assembly, Made, raise_audit, same_bytes
from tensor_dedup.loader.deferred import DeferredParameter, replace_data
from tensor_dedup.loader.layer_key import LayerKey, attributes, class_name
from tensor_dedup.loader.recipe import RecipeBook
from tensor_dedup.loader.records import LayerRecord, Origin, same_source_bytes
from tensor_dedup.loader.registry import registry
from tensor_dedup.loader.residents import sharable
from tensor_dedup.patches.vllm.kernels import (
    holds_memory,
    packed_linear,
    processed_attributes,
    set_attributes,
)

Original = Callable[[nn.Module], None]

_GEMM_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_PREPROCESSED = (UnquantizedFusedMoEMethod,)
# Held by the layer, so that a record lives as long as a layer uses it.
RECORD = "_tensor_dedup_record"


@dataclass(slots=True)
class LayerProcessor:
    """Processes the layers of one load. `deferred` is by id of the parameter object."""

    assembly: Assembly
    deferred: dict[int, DeferredParameter]
    packed: bool
    model_dtype: torch.dtype

    def process(self, original: Original, layer: nn.Module) -> None:
        """Do what `original(layer)` does, sharing what can be."""
        method: Any = layer.quant_method
        parameters = self.parameters(layer)
        if not parameters:
            original(layer)
        elif type(method) in _GEMM_METHODS and "weight" in parameters and layer.weight.ndim == 2:
            self._gemm(original, layer, parameters)
        elif type(method) in _PREPROCESSED and method.supports_pre_processed_weights:
            self._preprocessed(original, layer, parameters)
        else:
            self._plainly(original, layer, parameters)

    def parameters(self, layer: nn.Module) -> dict[str, DeferredParameter]:
        """The layer's own parameters that were deferred, by name in the layer."""
        found = {}
        for name, parameter in layer._parameters.items():
            if parameter is not None and id(parameter) in self.deferred:
                found[name] = self.deferred[id(parameter)]
        return found

    # --- unquantised GEMM on the CPU: the weight is packed into an opaque handler, or kept plain

    def _gemm(
        self, original: Original, layer: nn.Module, parameters: dict[str, DeferredParameter]
    ) -> None:
        others = [each for name, each in parameters.items() if name != "weight"]
        keeps_weight = isinstance(layer.quant_method, UnquantizedEmbeddingMethod)
        self.assembly.share(others)
        if getattr(layer, "_cpu_skip_gemm_dispatch", False) or not self.packed:
            self.assembly.share([parameters["weight"]])
            setattr(layer, "cpu_linear", nn.functional.linear)  # noqa: B010 - modules take any
            # vLLM's own switch, so that a reload keeps the weight plain; embeddings have none.
            setattr(layer, "_cpu_skip_gemm_dispatch", not keeps_weight)  # noqa: B010
            return
        _PackedGemm(self, original, layer, parameters["weight"], keeps_weight).process()

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
        key = self.key(layer, parameters)
        record = registry.lookup_record(key.digest)
        if isinstance(record, LayerRecord) and self._acceptable(record, parameters):
            self._reuse(original, layer, parameters, record, made)
        else:
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
            _audit(layer, record)
            self._map(layer, parameters, record)
            return
        self._map(layer, parameters, record)
        with weights_already_processed():
            original(layer)
        set_attributes(layer, record.attributes)

    def _map(
        self, layer: nn.Module, parameters: dict[str, DeferredParameter], record: LayerRecord
    ) -> None:
        for name in [n for n in parameters if n not in record.residents]:
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
            self.assembly.ledger.add(label, tensor.nbytes, shared=True, sources=sources)
        for each in parameters.values():
            self._done(each)
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
            tensor = torch.empty_strided(
                each.parameter.shape, each.parameter.stride(), dtype=each.parameter.dtype
            )
            here = made.get(name) or self.assembly.make(each)
            tensor.copy_(here.tensor)
            if name not in made:
                self.assembly.give_back(here)
            replace_data(each.parameter, tensor)
            self._done(each)

    def _done(self, each: DeferredParameter) -> None:
        if not each.installed:
            each.installed = True
            if each.view is not None:
                self.assembly.evaluator.release(each.view)

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
            reason = assembly.reason(each) if each is not None else None
            if reason is None and not sharable(parameter.detach()):
                reason = "its processed form has gaps"
            if reason is not None or not parameter.numel():
                assembly.ledger.add(label, parameter.nbytes, shared=False, sources=sources)
                if reason is not None:
                    assembly.ledger.skip(label, reason)
                continue
            resident, shared = assembly.resident_for(parameter.detach())
            if resident is None:
                assembly.ledger.add(label, parameter.nbytes, shared=False, sources=sources)
                assembly.ledger.skip(label, COLLISION)
                continue
            replace_data(parameter, resident.map())
            assembly.ledger.add(label, parameter.nbytes, shared=shared, sources=sources)
            if record is not None:
                record.residents[name] = (resident, type(parameter))

    # --- keys

    def key(self, layer: nn.Module, parameters: dict[str, DeferredParameter]) -> LayerKey:
        """The layer's key. All digests must be known; asked before processing changes the layer."""
        return LayerKey.of(
            vllm=vllm.__version__,
            hash=self.assembly.config.hash_algorithm,
            layer=class_name(layer),
            configuration=attributes(layer),
            method=class_name(layer.quant_method),
            method_configuration=attributes(layer.quant_method),
            model_dtype=str(self.model_dtype),
            device="cpu",
            parameters={name: self._described(each) for name, each in parameters.items()},
        )

    def _described(self, each: DeferredParameter) -> list[Any]:
        view = each.view
        assert view is not None
        kind = class_name(type(each.parameter))
        return [kind, str(view.dtype), view.shape, view.stride, self.assembly.book.digest(view)]

    def _acceptable(self, record: LayerRecord, parameters: dict[str, DeferredParameter]) -> bool:
        """With verify_bytes: are the sources really those the record was made from?"""
        if not self.assembly.config.verifies_bytes:
            return True
        structure, _ = structure_of(list(parameters.values()))
        mine = _distinct_sources(list(parameters.values()))
        equal, read = same_source_bytes(mine, record.origins)
        self.assembly.reader.counters.bytes_read += read
        if equal and structure == record.structure:
            return True
        self.assembly.ledger.collisions += 1
        return False


@dataclass(slots=True)
class _PackedGemm:
    """One layer whose 2-d weight vLLM packs for the CPU."""

    processor: LayerProcessor
    original: Original
    layer: nn.Module
    weight: DeferredParameter
    keeps_weight: bool

    def process(self) -> None:
        assembly, weight = self.processor.assembly, self.weight
        reason = assembly.reason(weight)
        if reason is not None:
            self._pack_privately(reason)
            return
        made = None
        if not weight.installed and not assembly.known(weight):
            made = assembly.make(weight)
        key = self.processor.key(self.layer, {"weight": weight})
        record = registry.lookup_record(key.digest)
        if isinstance(record, LayerRecord):
            if self.processor._acceptable(record, {"weight": weight}):
                self._reuse(record, made)
            else:
                self._pack_privately(COLLISION)
        else:
            self._pack(key, made)
        assembly.give_back(made)

    def _reuse(self, record: LayerRecord, made: Made | None) -> None:
        assembly, weight, layer = self.processor.assembly, self.weight, self.layer
        if assembly.sampled():
            self._audit(record, made)
        if self.keeps_weight:
            assembly.share([weight], made)
        else:
            # What vLLM leaves behind once a weight is packed.
            layer.weight = nn.Parameter(torch.empty(0, dtype=weight.parameter.dtype), False)
            self.processor._done(weight)
        layer.cpu_linear = record.opaque
        self._follow_bias(record)
        setattr(layer, RECORD, record)
        self._enter(record.opaque_bytes, shared=True)

    def _follow_bias(self, record: LayerRecord) -> None:
        """Some kernels convert the bias while packing; a layer that skips packing does it here."""
        bias = getattr(self.layer, "bias", None)
        dtype = record.attributes.get("bias_dtype")
        if isinstance(bias, nn.Parameter) and dtype is not None and bias.dtype != dtype:
            bias.data = bias.data.to(dtype)

    def _audit(self, record: LayerRecord, made: Made | None) -> None:
        assembly = self.processor.assembly
        here = made or assembly.make(self.weight)
        if assembly.digest_of(here.tensor) != record.plain_digest:
            raise_audit(self.weight.name, "the packed weight's digest", "its checkpoint's")
        if here is not made:
            assembly.give_back(here)

    def _pack(self, key: LayerKey, made: Made | None) -> None:
        """Process as vLLM does, from borrowed memory where the plain weight is dropped anyway."""
        assembly, weight, layer = self.processor.assembly, self.weight, self.layer
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
            self._enter(nbytes, shared=False)
            assembly.ledger.skip(weight.name, "its kernel does not pack into a handler we know")
            return
        record = LayerRecord(key.digest, key.preimage, opaque=linear, opaque_bytes=nbytes)
        record.plain_digest = plain
        bias = getattr(layer, "bias", None)
        record.attributes = {"bias_dtype": bias.dtype if isinstance(bias, nn.Parameter) else None}
        record.structure, record.origins = structure_of([weight])
        registry.publish_record(key.digest, record)
        setattr(layer, RECORD, record)
        self._enter(nbytes, shared=False)

    def _process_borrowed(self, here: Made) -> None:
        """Process from borrowed memory; a kernel that kept some of it keeps the block."""
        parameter = self.weight.parameter
        replace_data(parameter, here.tensor)
        self.processor._done(self.weight)
        self.original(self.layer)
        if holds_memory(self.layer, here.block):
            here.escaped = True

    def _pack_privately(self, reason: str) -> None:
        assembly, weight = self.processor.assembly, self.weight
        nbytes = weight.nbytes
        assembly.ledger.skip(weight.name, reason)
        if self.keeps_weight and not weight.installed:
            assembly.keep_private(weight, reason)
        if weight.installed:
            self.original(self.layer)
        else:
            here = assembly.make(weight)
            self._process_borrowed(here)
            assembly.give_back(here)
        self._enter(nbytes, shared=False)

    def _enter(self, nbytes: int, *, shared: bool) -> None:
        ledger = self.processor.assembly.ledger
        ledger.add(self.weight.name, nbytes, shared=shared, sources=self.weight.sources)


def structure_of(parameters: list[DeferredParameter]) -> tuple[str, tuple[Origin, ...]]:
    """The recipes with sources numbered instead of named, and where the sources are."""
    sources = _distinct_sources(parameters)
    numbers = {id(source): number for number, source in enumerate(sources)}
    book = RecipeBook(lambda source: ("source", numbers[id(source)], source.spec.dtype))
    names = [book.digest(each.view) for each in parameters if each.view is not None]
    return " ".join(names), tuple(Origin.of(source) for source in sources)


def _distinct_sources(parameters: list[DeferredParameter]) -> list[Any]:
    return list({id(s): s for each in parameters for s in each.sources}.values())


def _parameter_count(layer: nn.Module) -> int:
    return sum(p is not None for p in layer._parameters.values())


def _audit(layer: nn.Module, record: LayerRecord) -> None:
    """Compare a layer that was just processed from its checkpoint with the shared one."""
    for name, (resident, _) in record.residents.items():
        rebuilt = layer._parameters.get(name)
        if rebuilt is None or not same_bytes(rebuilt.detach(), resident.map()):
            raise_audit(f"{class_name(layer)}.{name}", "the resident", "the layer rebuilt")
