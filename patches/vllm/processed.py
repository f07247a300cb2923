"""Layers that vLLM has processed: what is left of them is shared by content, or by a record.

Processing replaces parameters, renames them, adds some and drops others. What counts is what the
layer has afterwards. `LayerContext` is the load as its layers see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch import nn

from tensor_dedup.loader.deferred.layer_key import LayerKey, attributes, class_name, process_text
from tensor_dedup.loader.deferred.layer_records import (
    RECORD,
    LayerRecord,
    OriginGoneError,
    distinct_sources,
    same_source_bytes,
    structure_of,
)
from tensor_dedup.loader.deferred.parameters import DeferredParameter, replace_data
from tensor_dedup.loader.deferred.session import SHARED_STORAGE, share_by_content, slabs
from tensor_dedup.loader.residents.compare import COLLISION, raise_audit, same_bytes
from tensor_dedup.loader.residents.resident import Resident, sharable_anywhere
from tensor_dedup.patches.vllm.kernels import dispatch, kept_by_others, linear_kernel, scales_kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.loader.checkpoint_io.sources import SourceTensor
    from tensor_dedup.loader.deferred.layer_records import LayerRecord
    from tensor_dedup.loader.deferred.session import LoadSession, ScratchTensor

Deferred = dict[str, DeferredParameter]

Original = Callable[[nn.Module], None]
Final = tuple[str, str, nn.Parameter]  # name, label, object
# What stands in a report for a layer that is packed with an address and may be written later.
UPDATED = "weight_transfer_config: scales may be written, and its kernel knows their address"


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


@dataclass(slots=True)
class ProcessedLayer:
    """One layer whose processing is vLLM's own. `deferred`: its parameters without memory."""

    context: LayerContext
    layer: nn.Module
    deferred: Deferred
    _path: str = ""
    _kept: list[int] = field(default_factory=list)  # storages that a kernel knows by address
    _others: list[nn.Parameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        first = next(iter(self.deferred.values()))
        self._path = first.name.rpartition(".")[0]

    def materialise(self, made: dict[str, ScratchTensor]) -> None:
        """Give each parameter memory of its own: processing may keep any part of it.

        What `made` brings is given back, and taken out, as soon as it is copied.
        """
        assembly = self.context.assembly
        for name, each in self.deferred.items():
            reason = assembly.reason(each)
            if reason == SHARED_STORAGE:
                assembly.keep_private(each, reason, made.get(name))
                continue
            tensor = torch.empty_strided(
                each.parameter.shape, each.parameter.stride(), dtype=each.parameter.dtype
            )
            here = made.pop(name, None) or assembly.make(each)
            tensor.copy_(here.tensor)
            assembly.give_back(here)
            replace_data(each.parameter, assembly.provider.private(tensor))
            self.context.done(each)

    def process(self, original: Original) -> None:
        """Process as vLLM does, and let go of the parameters that it put others in place of."""
        mine = {id(each.parameter) for each in self.deferred.values()}
        self._others = [p for _, p in self._parameters() if id(p) not in mine]
        with scales_kept() as self._kept:
            original(self.layer)
        held = {id(parameter) for _, parameter in self._parameters()}
        for name, each in self.deferred.items():
            if id(each.parameter) not in held:
                # Or what was loaded would last, beside what was made of it, until the load ends.
                self.context.deferred.pop(id(each.parameter), None)
                now = self.layer._parameters.get(name)
                each.parameter = nn.Parameter(torch.empty(0), False) if now is None else now

    def share(self, record: LayerRecord | None = None) -> None:
        """Replace what the layer has by residents with equal bytes; enter them into `record`.

        One slab after the other: never is the layer there twice.
        """
        finals = self._finals()
        for group in slabs([parameter.nbytes for _, _, parameter in finals]):
            self._share_slab([finals[number] for number in group], record)

    def _share_slab(self, finals: Sequence[Final], record: LayerRecord | None) -> None:
        assembly = self.context.assembly
        named = [(label, parameter.detach()) for _, label, parameter in finals]
        settled = share_by_content(assembly, named)
        named.clear()  # the memory they hold is about to be replaced
        for (name, label, parameter), (resident, made) in zip(finals, settled, strict=True):
            sources = self._sources(parameter)
            if resident is None:
                assembly.ledger.add(label, parameter.nbytes, shared=False, sources=sources)
                continue
            replace_data(parameter, assembly.provider.map(resident))
            assembly.enter(label, parameter.nbytes, resident, made=made, sources=sources)
            if record is not None and isinstance(resident, Resident):
                record.residents[name] = (resident, type(parameter))

    def complete(self, record: LayerRecord) -> bool:
        """Does `record` hold every parameter that the layer has now?"""
        return len(record.residents) == len(self._parameters())

    def audit(self, record: LayerRecord) -> None:
        """Compare the layer, just processed from its checkpoint, with the shared one."""
        for name, (resident, _) in record.residents.items():
            rebuilt = self.layer._parameters.get(name)
            if rebuilt is None or not same_bytes(rebuilt.detach(), resident.map()):
                # Processing may have made this one; then another says which layer it is.
                each = self.deferred.get(name) or next(iter(self.deferred.values()))
                raise_audit(f"{each.name} ({name})", "the resident", "the layer rebuilt")

    def map(self, record: LayerRecord) -> None:
        """Give the layer the parameters of another one that was processed alike."""
        layer, assembly = self.layer, self.context.assembly
        for name in [n for n in self.deferred if n not in record.residents]:
            if name in layer._parameters:
                delattr(layer, name)
        for name, (resident, kind) in record.residents.items():
            tensor = resident.map()
            now = layer._parameters.get(name)
            if now is not None and type(now) is kind:
                replace_data(now, tensor)
            else:
                fresh: Any = nn.Parameter(tensor, requires_grad=False)
                fresh.__class__ = kind
                if (loader := getattr(now, "weight_loader", None)) is not None:
                    fresh.weight_loader = loader  # vLLM keeps it when it replaces one
                layer.register_parameter(name, fresh)
            each = self.deferred.get(name)
            sources = each.sources if each is not None else ()
            label = each.name if each is not None else f"{self._path}.{name}"
            assembly.enter(label, tensor.nbytes, record, made=False, sources=sources)
        for each in self.deferred.values():
            self.context.done(each)
        setattr(layer, RECORD, record)

    def _finals(self) -> list[Final]:
        """Every parameter that can be shared; others are entered."""
        others = {id(parameter) for parameter in self._others}
        found = []
        for name, parameter in self._parameters():
            if parameter.is_meta or id(parameter) in others:
                continue
            each = self._deferred_of(parameter)
            label = each.name if each is not None else f"{self._path}.{name}"
            reason = self._reason(label, each, parameter)
            if reason is None and parameter.numel():
                found.append((name, label, parameter))
            elif reason != SHARED_STORAGE:  # entered when it got its memory
                sources = self._sources(parameter)
                ledger = self.context.assembly.ledger
                ledger.add(label, parameter.nbytes, shared=False, sources=sources)
                if reason is not None:
                    ledger.skip(label, reason)
        return found

    def _reason(
        self, label: str, each: DeferredParameter | None, parameter: nn.Parameter
    ) -> str | None:
        """Why a processed parameter stays private, or None.

        One that processing made may follow from any that the layer had.
        """
        of = self.deferred.values() if each is None else (each,)
        reason = next((r for one in of if (r := self.context.assembly.reason(one))), None)
        if reason is None:
            reason = self.context.assembly.provider.reason(label)
        if reason is None and not sharable_anywhere(parameter.detach()):
            return "its processed form has gaps"
        if reason is None and self._kept and self.context.updated:
            return UPDATED
        if reason is None and kept_by_others(parameter, self._kept):
            return "something beside the layer keeps its memory"
        return reason

    def _sources(self, parameter: nn.Parameter) -> list[SourceTensor]:
        each = self._deferred_of(parameter)
        return [] if each is None else each.sources

    def _deferred_of(self, parameter: nn.Parameter) -> DeferredParameter | None:
        """The one that this is now, under its name or another."""
        return next((e for e in self.deferred.values() if e.parameter is parameter), None)

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.layer._parameters.items() if p is not None]
