"""Layers of vLLM that are shared after, or instead of, being processed.

Processing (`process_weights_after_loading`) replaces parameters, renames them, adds some and
removes others. The parameters that the layer has afterwards are shared in one of two ways: by
content, or by a layer record, which lists the residents (shared tensors) of an equal layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch import nn

from tensor_dedup.loader.deferred.computed_tensors import share_by_content, slabs
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
from tensor_dedup.loader.not_shared import NotShared, WhyRead
from tensor_dedup.loader.residents.compare import raise_audit, same_bytes
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import Resident, sharable_anywhere
from tensor_dedup.loader.residents.slab import MappingLimitError, SharedMemoryError
from tensor_dedup.patches.vllm.kernels import dispatch, kept_by_others, linear_kernel, scales_kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.loader.checkpoint_io.sources import SourceTensor
    from tensor_dedup.loader.deferred.session import LoadSession, ScratchTensor

Deferred = dict[str, DeferredParameter]

Original = Callable[[nn.Module], None]
Final = tuple[str, str, nn.Parameter]  # name, label, object


@dataclass(slots=True)
class LayerContext:
    """The state of one load that the processing of its layers needs.

    * `deferred` maps the `id` of a parameter without memory to the deferred parameter.
    * `packed` is True if weights may be packed on a CPU.
    * `updated` is True if weights may be written in place later (`weight_transfer_config`).
    * `process` describes the state of this process, which is a part of all layer keys.
    * `records` maps the `id` of a layer to the record that it uses: from the start, if a load plan
      says so, otherwise once the layer was processed.
    * `all_keyed` is False if a layer was processed without a layer key.
    """

    session: LoadSession
    deferred: dict[int, DeferredParameter]
    packed: bool
    model_dtype: torch.dtype
    on_gpu: bool = False
    updated: bool = False
    process: str = field(default_factory=process_text)
    records: dict[int, LayerRecord] = field(default_factory=dict)
    all_keyed: bool = True

    def parameters(self, layer: nn.Module) -> dict[str, DeferredParameter]:
        """Return the deferred parameters of `layer` itself, without submodules, by name."""
        found = {}
        for name, parameter in layer._parameters.items():
            if parameter is not None and id(parameter) in self.deferred:
                found[name] = self.deferred[id(parameter)]
        return found

    def done(self, each: DeferredParameter) -> None:
        """Record that the parameter `each` has its final memory, and free its temporary memory.

        A second call for the same parameter does nothing.
        """
        if not each.installed:
            each.installed = True
            if each.view is not None:
                self.session.evaluator.release(each.view)

    def key(
        self,
        layer: nn.Module,
        parameters: Mapping[str, DeferredParameter],
        content: str | None = None,
    ) -> LayerKey:
        """Return the key of a layer that has not been processed yet.

        The key includes a digest of each parameter's recipe: how it follows from the checkpoint.
        The digests of its source tensors must be known. If the layer has only one parameter,
        `content` may be given: the digest of that parameter's bytes. It is then used instead of the
        recipe.
        """
        return LayerKey.of(
            self.process,
            vllm=vllm.__version__,
            hash=self.session.config.hash_algorithm,
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
        bytes_are = f"content {content}" if content else self.session.book.digest(view)
        return [kind, str(view.dtype), view.shape, view.stride, bytes_are]

    def refusal(
        self, record: LayerRecord, parameters: Mapping[str, DeferredParameter]
    ) -> str | None:
        """Return why a layer with these `parameters` must not use `record`, or None if it may.

        `record` describes another layer with the same key, which was processed before. Without
        `verify_bytes`, the result is None. With `verify_bytes`, the checkpoint tensors of both
        layers are read and compared. A difference is a reason, and so is a tensor that can no
        longer be read.
        """
        if not self.session.config.verifies_bytes:
            return None
        structure, _ = structure_of(list(parameters.values()))
        mine = distinct_sources(list(parameters.values()))
        try:
            equal, read = same_source_bytes(mine, record.origins)
        except OriginGoneError as error:
            return f"verify_bytes: {error}"
        self.session.reader.counters.bytes_read += read
        if equal and structure == record.structure:
            return None
        self.session.ledger.collisions += 1
        return NotShared.COLLISION


def _described(part: object) -> list[Any] | None:
    """Return the class of a layer's scheme or kernel, and what decides how it processes weights."""
    return None if part is None else [class_name(part), attributes(part)]


def _bias(layer: nn.Module) -> str | None:
    bias = getattr(layer, "bias", None)
    return str(bias.dtype) if isinstance(bias, torch.Tensor) else None


@dataclass(slots=True)
class KeyedLayer(ABC):
    """A layer that may use the processed form of another layer with the same layer key.

    `deferred` maps names to the layer's parameters without memory. A subclass defines how a
    processed form is found, reused and built; `share_by_key` calls its methods. The arguments of
    these methods have the same meaning everywhere:

    * `record` describes the other layer.
    * `made` maps names to tensors of this layer that were computed already.
    """

    context: LayerContext
    original: Original
    layer: nn.Module
    deferred: Deferred

    def share_by_key(self) -> None:
        """Reuse the processed form of a layer with the same key, or process this layer."""
        planned = self.context.records.get(id(self.layer))
        if planned is not None:
            self.reuse(planned, self.form_of(planned), {})
            return
        made = self.compute_unknown()
        key = self.context.key(self.layer, self.deferred)
        found = registry.lookup_record(key.digest)
        record = found if isinstance(found, LayerRecord) else None
        form = self.form_of(record) if record is not None else None  # held from here on
        if record is None or form is None:
            self.build(key, made)
        elif (reason := self.context.refusal(record, self.deferred)) is not None:
            self.refuse(reason, key, made)
        else:
            self.reuse(record, form, made)
        for each in made.values():
            self.context.session.give_back(each)
        used = registry.lookup_record(key.digest)
        if isinstance(used, LayerRecord):
            self.context.records[id(self.layer)] = used

    def compute_unknown(self) -> dict[str, ScratchTensor]:
        """Compute the layer's tensors and return them by name, or {} if all digests are known.

        The layer key needs the digests of the tensors.
        """
        session = self.context.session
        if all(each.known for each in self.deferred.values()):
            return {}
        return {name: session.make(each) for name, each in self.deferred.items()}

    @abstractmethod
    def form_of(self, record: LayerRecord) -> Any | None:
        """Return the processed form that `record` refers to, or None if it no longer exists."""

    @abstractmethod
    def reuse(self, record: LayerRecord, form: Any, made: dict[str, ScratchTensor]) -> None:
        """Give this layer `form`, the processed form of an equal layer."""

    @abstractmethod
    def build(self, key: LayerKey, made: dict[str, ScratchTensor]) -> None:
        """Process the layer as vLLM does, and register the result under `key`."""

    @abstractmethod
    def refuse(self, reason: str, key: LayerKey, made: dict[str, ScratchTensor]) -> None:
        """Process this layer without reusing the other one, because `reason` forbids that."""


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


@dataclass(slots=True)
class ProcessedLayer:
    """A layer that vLLM processes, and whose tensors are shared afterwards.

    `deferred` maps names to the layer's parameters that have no memory yet.
    """

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
        """Give each parameter its content in private memory, so that vLLM can process the layer.

        `made` maps names to tensors that were computed already. They are copied, removed from
        `made` and freed. A tensor stays in `made` only if its parameter shares a storage with
        another one.
        """
        session = self.context.session
        for name, each in self.deferred.items():
            reason = session.plan.reason(each)
            if reason is NotShared.SHARED_STORAGE:
                shared = made.get(name)
                content = None if shared is None else shared.tensor
                session.memory.keep_private(each, reason, content)
                continue
            session.ledger.why_read[each.name] = WhyRead.PROCESSED
            here = made.pop(name, None) or session.make(each)
            # A GPU gets its copy from the scratch memory itself.
            tensor = here.tensor if self.context.on_gpu else _copy(here.tensor)
            replace_data(each.parameter, session.provider.private(tensor))
            session.give_back(here)
            self.context.done(each)

    def process(self, original: Original) -> None:
        """Process the layer by vLLM's `original`, and free the parameters that it replaces."""
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
        """Replace the layer's parameters by shared tensors with equal bytes.

        A parameter without an equal shared tensor becomes a new shared tensor. A parameter that
        cannot be shared stays private. If `record` is given, the shared tensors are entered into
        `record`. Parameters are replaced slab by slab, so that the layer is never in memory twice.
        """
        finals = self._finals()
        for group in slabs([parameter.nbytes for _, _, parameter in finals]):
            self._share_slab([finals[number] for number in group], record)

    def _share_slab(self, finals: Sequence[Final], record: LayerRecord | None) -> None:
        session = self.context.session
        named = [(label, parameter.detach()) for _, label, parameter in finals]
        settled = share_by_content(session, named)
        named.clear()  # the memory they hold is about to be replaced
        for (name, label, parameter), (resident, made) in zip(finals, settled, strict=True):
            sources = self._sources(parameter)
            if resident is None:
                session.ledger.add(label, parameter.nbytes, shared=False, sources=sources)
                continue
            try:
                tensor = session.provider.map(resident)
            except SharedMemoryError as error:  # it keeps the memory that it has
                session.ledger.add(label, parameter.nbytes, shared=False, sources=sources)
                session.ledger.skip(label, str(error))
                continue
            replace_data(parameter, tensor)
            session.memory.enter(label, parameter.nbytes, resident, made=made, sources=sources)
            if record is not None and isinstance(resident, Resident):
                record.residents[name] = (resident, type(parameter))

    def complete(self, record: LayerRecord) -> bool:
        """Return whether `record` lists a shared tensor for each parameter of the layer."""
        return len(record.residents) == len(self._parameters())

    def audit(self, record: LayerRecord) -> None:
        """Compare the processed layer with the shared tensors that `record` lists.

        Raises:
            AuditError: A parameter differs.
        """
        for name, (resident, _) in record.residents.items():
            rebuilt = self.layer._parameters.get(name)
            if rebuilt is None or not same_bytes(rebuilt.detach(), resident.seen()):
                # Processing may have made this one; then another says which layer it is.
                each = self.deferred.get(name) or next(iter(self.deferred.values()))
                raise_audit(f"{each.name} ({name})", "the resident", "the layer rebuilt")

    def map(self, record: LayerRecord) -> None:
        """Use the shared tensors that `record` lists as the layer's parameters.

        Deferred parameters that `record` does not list are removed. If this process has too many
        mappings, a tensor is copied instead of mapped.
        """
        layer, session = self.layer, self.context.session
        for name in [n for n in self.deferred if n not in record.residents]:
            if name in layer._parameters:
                delattr(layer, name)
        for name, (resident, kind) in record.residents.items():
            reason = None
            try:
                tensor = resident.map()
            except MappingLimitError as error:
                tensor, reason = resident.copied(), str(error)
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
            used = record if reason is None else None
            session.memory.enter(label, tensor.nbytes, used, made=False, sources=sources)
            if reason is not None:
                session.ledger.skip(label, reason)
        for each in self.deferred.values():
            self.context.done(each)
        setattr(layer, RECORD, record)

    def _finals(self) -> list[Final]:
        """Return every parameter that can be shared; enter the others as private."""
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
            elif reason is not NotShared.SHARED_STORAGE:  # entered when it got its memory
                sources = self._sources(parameter)
                ledger = self.context.session.ledger
                ledger.add(label, parameter.nbytes, shared=False, sources=sources)
                if reason is not None:
                    ledger.skip(label, reason)
        return found

    def _reason(
        self, label: str, each: DeferredParameter | None, parameter: nn.Parameter
    ) -> str | None:
        """Return why a processed parameter stays private, or None.

        A parameter that processing created may follow from any that the layer had.
        """
        of = self.deferred.values() if each is None else (each,)
        reason = next((r for one in of if (r := self.context.session.plan.reason(one))), None)
        if reason is None:
            reason = self.context.session.provider.reason(label)
        if reason is None and not sharable_anywhere(parameter.detach()):
            return NotShared.GAPS
        if reason is None and self._kept and self.context.updated:
            return NotShared.SCALES_WRITTEN
        if reason is None and kept_by_others(parameter, self._kept):
            return NotShared.KEPT_ELSEWHERE
        return reason

    def _sources(self, parameter: nn.Parameter) -> list[SourceTensor]:
        each = self._deferred_of(parameter)
        return [] if each is None else each.sources

    def _deferred_of(self, parameter: nn.Parameter) -> DeferredParameter | None:
        """Return the deferred parameter that this is now, under its name or another, or None."""
        return next((e for e in self.deferred.values() if e.parameter is parameter), None)

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.layer._parameters.items() if p is not None]
