"""Linear layers whose weight vLLM packs into a oneDNN handler on a CPU.

These are unquantised layers and int8 layers (w8a8). A packed weight cannot be mapped, hashed or
written. So the handler object itself is shared, within one process only. Equal layers are found by
a layer key, which is known before the weight is packed. The other tensors in an int8 layer (scales,
sums of columns) are shared one by one.

oneDNN does not allow two threads to use one handler at the same time. No lock is needed, because
engines in one process take turns: vLLM keeps its forward context in a variable of the process.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensor_dedup.loader.deferred.layer_records import RECORD, LayerRecord, structure_of
from tensor_dedup.loader.deferred.parameters import DeferredParameter, replace_data
from tensor_dedup.loader.not_shared import NotShared
from tensor_dedup.loader.residents.compare import raise_audit
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import PACKED
from tensor_dedup.loader.unsharing.model_digests import PACKED_FORMS
from tensor_dedup.patches.vllm.kernels import (
    holds_memory,
    linear_kernel,
    packed_linear,
    packed_scaled,
    unpacked_linear,
)
from tensor_dedup.patches.vllm.processed import KeyedLayer, ProcessedLayer

if TYPE_CHECKING:
    from tensor_dedup.loader.deferred.layer_key import LayerKey
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.deferred.session import ScratchTensor


@dataclass(slots=True)
class PackedGemm(KeyedLayer):
    """An unquantised linear layer, whose two-dimensional weight vLLM packs on a CPU.

    `keeps_weight` is True if the layer also needs the unpacked weight, as embeddings do.
    """

    keeps_weight: bool

    @property
    def weight(self) -> DeferredParameter:
        """The parameter that vLLM packs."""
        return self.deferred["weight"]

    def process(self) -> None:
        """Use the packed weight of an equal layer, or let vLLM pack the weight.

        Where possible, a weight that is packed here is shared with later layers.
        """
        reason = self.context.session.plan.reason(self.weight)
        if reason is not None:
            self._pack_privately(reason)
        else:
            self.share_by_key()

    def compute_unknown(self) -> dict[str, ScratchTensor]:
        """Compute the weight if its digest is not known yet, and return it by name.

        The layer key needs the digest. If the digest is known, the result is {}. If the layer also
        needs the unpacked weight and the weight is large, it is read directly into shared memory,
        and the result is {} too.
        """
        session, weight = self.context.session, self.weight
        if weight.installed or weight.known:
            return {}
        if self.keeps_weight and session.is_streamed(weight):
            session.share([weight])
            return {}
        return {"weight": session.make(weight)}

    def form_of(self, record: LayerRecord) -> Any | None:
        """Return the function that computes the layer which `record` describes.

        The function holds the packed weight, if there is one. The result is None if no layer uses
        the function any more.
        """
        return record.opaque() if record.opaque is not None else None

    def refuse(self, reason: str, key: LayerKey, made: dict[str, ScratchTensor]) -> None:
        """Pack the weight for this layer alone, and add `reason` to the load report."""
        self._pack_privately(reason)

    def reuse(self, record: LayerRecord, form: Any, made: dict[str, ScratchTensor]) -> None:
        """Use `form`, the function that computes an equal layer, for this layer.

        If an audit selects the layer, the digest of its weight is first compared with the digest in
        `record`.

        Raises:
            AuditError: The digests differ.
        """
        here = made.get("weight")
        if self.context.session.checks.sampled():
            self._audit(record, here)
        self._use(record, form, here)

    def _use(self, record: LayerRecord, linear: Any, made: ScratchTensor | None) -> None:
        session, weight, layer = self.context.session, self.weight, self.layer
        if self.keeps_weight or record.attributes["keeps_weight"]:
            session.share([weight], made)
        else:
            # What vLLM leaves behind once a weight is packed.
            layer.weight = nn.Parameter(torch.empty(0, dtype=weight.parameter.dtype), False)
            self.context.done(weight)
        layer.cpu_linear = linear
        self._follow_bias(record)
        self._enter(record.opaque_bytes, record)

    def _follow_bias(self, record: LayerRecord) -> None:
        """Convert the bias as some kernels do while packing, for a layer that skips packing."""
        bias = getattr(self.layer, "bias", None)
        dtype = record.attributes.get("bias_dtype")
        if isinstance(bias, nn.Parameter) and dtype is not None and bias.dtype != dtype:
            bias.data = bias.data.to(dtype)

    def _audit(self, record: LayerRecord, made: ScratchTensor | None) -> None:
        session = self.context.session
        here = made or session.make(self.weight)
        rebuilt = session.content_digest(self.weight, here.tensor, trusted=False)
        if rebuilt != record.plain_name:
            raise_audit(self.weight.name, "the packed weight's digest", "its checkpoint's")
        if here is not made:
            session.give_back(here)

    def build(self, key: LayerKey, made: dict[str, ScratchTensor]) -> None:
        """Let vLLM pack the weight, or use an equal weight that was packed under another key.

        The result is registered under `key` if other layers can use it. With `verify_bytes`, vLLM
        always packs the weight itself, because an equal weight would have to be compared byte by
        byte, and packed bytes cannot be compared.
        """
        lent = made.get("weight")
        session, weight = self.context.session, self.weight
        here = None
        if self.keeps_weight or weight.installed:
            session.share([weight], lent)
            plain = session.content_digest(weight, weight.parameter.detach())
        else:
            here = lent or session.make(weight)
            plain = session.content_digest(weight, here.tensor)
        content = self.context.key(self.layer, {"weight": weight}, plain)
        if not self._reuse_equal(key, content, here):
            if here is None:
                self.original(self.layer)
            else:
                self._process_borrowed(here)
            self._publish(key, content, plain)
        if here is not lent:
            session.give_back(here)

    def _reuse_equal(self, key: LayerKey, content: LayerKey, made: ScratchTensor | None) -> bool:
        """Use what was packed from the same bytes by another recipe; return whether it exists."""
        session = self.context.session
        if session.config.verifies_bytes:
            return False  # the bytes of a packed weight are nowhere to be compared with
        first = registry.lookup_record(content.digest)
        linear = first.opaque() if isinstance(first, LayerRecord) and first.opaque else None
        if not isinstance(first, LayerRecord) or linear is None:
            return False
        self._use(first, linear, made)
        alias = LayerRecord(key.digest, key.preimage, attributes=first.attributes)
        alias.opaque, alias.opaque_bytes = first.opaque, first.opaque_bytes
        alias.plain_name = first.plain_name
        alias.structure, alias.origins = structure_of([self.weight])
        first.aliases.append(alias)
        registry.register_record(key.digest, alias)
        if first in session.memory.own:
            session.memory.own.add(alias)
        return True

    def _publish(self, key: LayerKey, content: LayerKey, plain: str) -> None:
        """Register what was packed just now, by the recipe of its bytes and by the bytes."""
        session, weight, layer = self.context.session, self.weight, self.layer
        packed, unpacked = packed_linear(layer), unpacked_linear(layer)
        linear = packed or unpacked
        if unpacked is None:
            self._enter(weight.nbytes)
        if linear is None:
            session.ledger.skip(weight.name, NotShared.UNKNOWN_HANDLER)
            return
        record = LayerRecord(key.digest, key.preimage)
        record.opaque, record.plain_name = weakref.ref(linear), plain
        record.opaque_bytes = weight.nbytes if packed else 0
        bias = getattr(layer, "bias", None)
        record.attributes = {
            "bias_dtype": bias.dtype if isinstance(bias, nn.Parameter) else None,
            "keeps_weight": packed is None,
        }
        record.structure, record.origins = structure_of([weight])
        registry.register_record(key.digest, record)
        registry.register_record(content.digest, record)
        session.memory.own.add(record)
        setattr(linear, RECORD, record)

    def _process_borrowed(self, here: ScratchTensor) -> None:
        """Process from scratch memory; if a kernel kept some of it, the block is not reused."""
        weight, layer = self.weight, self.layer
        replace_data(weight.parameter, here.tensor)
        self.original(layer)
        if layer.weight is weight.parameter and unpacked_linear(layer) is not None:
            self.context.session.share([weight], here)  # nothing was packed: a plain weight
        else:
            self.context.done(weight)
        here.escaped = holds_memory(layer, here.block)

    def _pack_privately(self, reason: str) -> None:
        session, weight = self.context.session, self.weight
        nbytes = weight.nbytes
        session.ledger.skip(weight.name, reason)
        if self.keeps_weight:
            session.share([weight])  # the plain form stands for itself
        if weight.installed:
            self.original(self.layer)
        else:
            here = session.make(weight)
            self._process_borrowed(here)
            session.give_back(here)
        if unpacked_linear(self.layer) is None:
            self._enter(nbytes)

    def _enter(self, nbytes: int, record: LayerRecord | None = None) -> None:
        """Account for the packed form: of a record that was found, or made now."""
        self.context.session.memory.enter(
            self.weight.name, nbytes, record, made=record is None, sources=self.weight.sources
        )


def mark_emptied(layer: nn.Module) -> None:
    """Let the parameter that vLLM leaves empty stand for the layer's packed weight.

    It is asked anew each time, because a reload packs other weights and keeps the parameter.
    """
    weight = layer._parameters.get("weight")
    if weight is not None and weight.numel() == 0 and packed_linear(layer) is not None:
        PACKED[weight] = functools.partial(_packed_of, weakref.ref(layer))


def packed_form(layer: nn.Module) -> object | None:
    """Return what holds the packed weight of `layer` in place of a parameter, or None.

    It has a layer record if the weight was packed for other layers, too.
    """
    if not hasattr(layer, "quant_method"):
        return None
    weight = layer._parameters.get("weight")
    linear: object = getattr(layer, "cpu_linear", None)
    if linear is not None and weight is not None and weight.numel() == 0:
        return linear
    return packed_scaled(layer)


PACKED_FORMS.append(packed_form)


def _packed_of(layer: Callable[[], nn.Module | None]) -> object | None:
    here = layer()
    return None if here is None else packed_linear(here)


@dataclass(slots=True)
class ScaledGemm(KeyedLayer):
    """An int8 linear layer, whose weight vLLM may pack for oneDNN."""

    @property
    def _weight(self) -> DeferredParameter:
        return self.deferred["weight"]

    def process(self) -> None:
        """Use the handler and scales of an equal layer, or let vLLM pack the weight.

        If weights may be written in place later (`LayerContext.updated`), the weight is packed for
        this layer alone.
        """
        if self.context.updated:  # written later, scales must reach this layer's handler alone
            self._pack(None, {})
        else:
            self.share_by_key()

    def form_of(self, record: LayerRecord) -> Any | None:
        """Return the oneDNN handler that holds the packed weight of the layer in `record`.

        The result is None if no layer uses the handler any more.
        """
        return record.opaque() if record.opaque is not None else None

    def refuse(self, reason: str, key: LayerKey, made: dict[str, ScratchTensor]) -> None:
        """Pack the weight for this layer alone, and add `reason` to the load report."""
        self.context.session.ledger.skip(self._weight.name, reason)
        self._pack(None, made)

    def build(self, key: LayerKey, made: dict[str, ScratchTensor]) -> None:
        """Let vLLM pack the weight, and share the layer's other tensors.

        If all of these could be shared, they are registered under `key`, together with the packed
        weight.
        """
        self._pack(key, made)

    def reuse(self, record: LayerRecord, form: Any, made: dict[str, ScratchTensor]) -> None:
        """Give this layer the handler of an equal layer (`form`) and the scales listed in `record`.

        vLLM then need not process the layer. If an audit selects the layer, the digest of its
        weight is compared with the digest in `record`. vLLM then processes the layer all the same,
        and its other tensors are compared with those of the equal layer.

        Raises:
            AuditError: The digests or the tensors differ.
        """
        session, weight = self.context.session, self._weight
        layer = ProcessedLayer(self.context, self.layer, self.deferred)
        if session.checks.sampled():
            layer.materialise(made)
            self._audit(record)
            layer.process(self.original)
            layer.audit(record)
        layer.map(record)
        self.layer.register_parameter("weight", None)  # what vLLM leaves of it
        kernel: Any = linear_kernel(self.layer)
        kernel.dnnl_handler, kernel.linear_method = form, kernel._apply_weights_onednn
        session.memory.enter(
            weight.name, record.opaque_bytes, record, made=False, sources=weight.sources
        )

    def _audit(self, record: LayerRecord) -> None:
        """Compare what the weight was packed from, because a packed weight cannot be compared."""
        weight = self._weight
        plain = weight.parameter.detach()
        if self.context.session.content_digest(weight, plain, trusted=False) != record.plain_name:
            raise_audit(weight.name, "the packed weight's digest", "its checkpoint's")

    def _pack(self, key: LayerKey | None, made: dict[str, ScratchTensor]) -> None:
        session, weight = self.context.session, self._weight
        layer = ProcessedLayer(self.context, self.layer, self.deferred)
        layer.materialise(made)
        nbytes, record = weight.nbytes, None
        if key is not None:
            record = LayerRecord(key.digest, key.preimage)
            record.plain_name = session.content_digest(weight, weight.parameter.detach())
            record.structure, record.origins = structure_of(list(self.deferred.values()))
        layer.process(self.original)
        handler = packed_scaled(self.layer)
        layer.share(None if handler is None else record)
        if handler is None:  # another way of this kernel, which leaves ordinary parameters
            return
        session.memory.enter(weight.name, nbytes, None, made=True, sources=weight.sources)
        if self.context.updated:
            session.ledger.skip(weight.name, NotShared.SCALES_WRITTEN)
        if record is not None and layer.complete(record):
            record.opaque, record.opaque_bytes = weakref.ref(handler), nbytes
            registry.register_record(record.key, record)
            session.memory.own.add(record)
            setattr(handler, RECORD, record)
