"""One load of one vLLM model, from open files to the report.

On a GPU, constructors run with the GPU as torch's default device, so buffers and tables are
computed there as in plain vLLM. Each parameter is moved to host memory as soon as it is registered.
So the GPU never has to hold a second copy of weights that are shared with another model.
"""

from __future__ import annotations

import functools
import gc
import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import utils as loader_utils

from tensor_dedup.errors import IncompleteCheckpointError, UnsupportedError
from tensor_dedup.formats.errors import PytorchError
from tensor_dedup.formats.pytorch.reader import PytorchHeader
from tensor_dedup.loader.checkpoint_io.checkpoint_contents import CheckpointContents
from tensor_dedup.loader.checkpoint_io.marker_report import marked
from tensor_dedup.loader.checkpoint_io.sources import SourceReader, SourceTensor
from tensor_dedup.loader.cuda.manager_residents import device_manager_residents
from tensor_dedup.loader.cuda.new_slabs import TINY_BYTES
from tensor_dedup.loader.cuda.provider import GpuProvider
from tensor_dedup.loader.deferred.evaluate import Evaluator, Scratch
from tensor_dedup.loader.deferred.layer_records import distinct_sources
from tensor_dedup.loader.deferred.load_plan import PLANS
from tensor_dedup.loader.deferred.parameters import (
    DeferredParameter,
    conclude,
    defer,
    replace_data,
    settle_strays,
)
from tensor_dedup.loader.deferred.recipe import whole_source
from tensor_dedup.loader.deferred.session import LoadSession
from tensor_dedup.loader.deferred.storage import within
from tensor_dedup.loader.deferred.trace import Tracer, UntraceableError
from tensor_dedup.loader.deferred.uninitialised import UninitialisedStorages, surely_unwritten
from tensor_dedup.loader.not_shared import NotShared
from tensor_dedup.loader.process_state import release_memory, rng_restored_on_failure
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.loader.residents.provider import host_provider_for
from tensor_dedup.loader.residents.slab import SharedMemoryError
from tensor_dedup.loader.torch_dtypes import torch_dtype
from tensor_dedup.loader.unsharing.model_digests import keep
from tensor_dedup.patches.vllm import weight_iterators
from tensor_dedup.patches.vllm.layers import CONSTANT_METHODS, LayerProcessor
from tensor_dedup.patches.vllm.load_formats import is_draft, is_written_later
from tensor_dedup.patches.vllm.planned import LoadInputs, Planning
from tensor_dedup.patches.vllm.post_load import (
    QuantisedWhileLoadedError,
    eplb_parameters,
)
from tensor_dedup.patches.vllm.processed import LayerContext
from tensor_dedup.patches.vllm.versions import untied_lm_head
from tensor_dedup.text_table import BETWEEN_PROCESSES, BY_LEAF

if TYPE_CHECKING:
    from types import TracebackType

    from vllm.config import CompilationConfig, ModelConfig, VllmConfig

    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.checkpoint_io.from_store import OpenCheckpoint
    from tensor_dedup.loader.checkpoint_io.frozen_layers import FrozenLayers
    from tensor_dedup.loader.checkpoint_io.sources import SourceFile
    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.loader.deferred.load_plan import HeldPlan, LoadPlan
    from tensor_dedup.loader.deferred.storage import View
    from tensor_dedup.loader.residents.provider import ResidentProvider
    from tensor_dedup.patches.vllm.planned import Named, Weights


_PROCESS = "process_weights_after_loading"
_LARGEST = 16
# What a model's loading code may raise when it meets a tensor without content.
_TRACING_ERRORS = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError,
    AssertionError,
)  # fmt: skip


BuildElsewhere = Callable[[Callable[[], nn.Module]], nn.Module]


def load(
    run: LoadRun,
    vllm_config: VllmConfig,
    model_config: ModelConfig,
    device: torch.device,
    *,
    create: Callable[[], nn.Module],
    load_weights: Callable[[nn.Module], bool],
    weights: Weights | None = None,
    build_elsewhere: BuildElsewhere | None = None,
) -> tuple[nn.Module, ModelReport]:
    """Load a model onto `device`, share its tensors, and return the model and a report.

    `run` is the state of this load. `create` builds the module tree. `load_weights` runs the
    model's own loading code, and returns whether that code has reported which weights it loaded.
    `weights` returns the iterator of the checkpoint's tensors that the loading code gets, or is
    None if a load plan must not be used or made. `build_elsewhere` calls a function that builds the
    module tree, in another thread, and returns its result; without it, this thread calls the
    function. If the load fails, `vllm_config` may have changed.

    Raises:
        UnsupportedError: The model must be loaded without sharing.
        IncompleteCheckpointError: The checkpoint has no tensor for a parameter.
        StaleHintError: A remembered digest (hint) was wrong; load again without hints.
        ChangedFileError: A file of the checkpoint changed during the load.
        AuditError: An audit found a shared tensor that differs from its checkpoint.
    """
    build = functools.partial(run.build, create, device)
    model = build() if build_elsewhere is None else build_elsewhere(build)
    planned = weights is not None and run.follow_plan(model, vllm_config, model_config, weights)
    if not planned:
        updated = is_written_later(vllm_config)
        told = run.trace(model, load_weights, updated=updated)
        if told and not is_draft(vllm_config, model_config):
            run.require_filled(model_config.model)
    began = time.perf_counter()
    if not planned:
        run.bring_the_rest(model)
        run.find_residents(model)
        run.share_outside_layers(model)
    with run.retied(model, model_config), run.layers_taken_over(model):
        run.share_constant_layers(model)
        loader_utils.process_weights_after_loading(model, model_config, device)
    run.share_left_over(model)
    run.finish(model)
    report = run.report(vllm_config.parallel_config.rank)
    keep(report, {"": model}, run.contents())
    waited = report.seconds["read"] + report.seconds["hash"]
    report.seconds["process"] = max(0.0, time.perf_counter() - began - waited)
    return model.eval(), report


class LoadRun:
    """The state of one load; as a context manager, it closes the load's files at the end.

    Use it in one thread only, which must hold `LOAD_LOCK`.
    """

    def __init__(
        self,
        config: TensorDedupConfig,
        model_dtype: torch.dtype,
        opening: OpenCheckpoint,
        name: str,
        gpu: SharedGpu | None = None,
        frozen: FrozenLayers | None = None,
        *,
        apart: bool = False,
    ) -> None:
        """Prepare a load; no file is opened yet.

        `opening` opens the checkpoint. `name` is used in reports and in the manager's tables. `gpu`
        is the GPU to load onto, or None for host memory. `frozen` are the layers that are taken
        from a base; they are closed at the end of the load. With `apart`, tensors of equal bytes
        have addresses of their own on the GPU.
        """
        reader = SourceReader(config.hash_algorithm)
        scratch = Scratch()
        evaluator = Evaluator(reader, scratch)
        self._gpu = gpu
        provider: ResidentProvider
        straight = None
        if gpu is None:
            provider = host_provider_for(config.memory_manager, name)
        else:
            manager = device_manager_residents(config.memory_manager, name, gpu.gpu)
            provider = straight = GpuProvider(gpu, manager, apart=apart)
        self.session = LoadSession(config, reader, scratch, evaluator, provider, straight)
        self.tracer = Tracer(evaluator.value, torch.device("cpu"))
        self.plan_seconds = 0.0
        self.uninitialised = UninitialisedStorages()
        self._config = config
        self._model_dtype = model_dtype
        self._opening = opening
        self._frozen = frozen
        self._files: list[SourceFile] = []
        self._opened_ahead: dict[str, SourceFile] = {}
        self._sources: list[SourceTensor] = []
        self._named: list[Named] = []  # what the loading code got, in order
        self._planning: Planning | None = None
        self._plan: LoadPlan | None = None
        self._held: HeldPlan | None = None
        self._largest: list[SourceTensor] = []
        self._deferred: dict[int, DeferredParameter] = {}
        self._without_memory: set[int] = set()
        self._without_content: set[int] = set()
        self._processor: LayerProcessor | None = None
        self._name = name
        self._known = False
        self._packed = config.cpu_weights != "plain" and not self.session.provider.plain

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.session.close()
        for file in self._files:
            file.close()
        self._opening.close()
        if self._frozen is not None:
            self._frozen.close()
        self.session.scratch.close()
        # What is left in circles would need a collection of the whole process, which takes longer
        # than loading a model that is resident.
        self._deferred.clear()
        self.tracer.close()
        if self.session.scratch.peak:
            release_memory()  # blocks of the heap, under what will stay

    def build(self, create: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        """Build the module tree by `create` on `device`, with its parameters in host memory."""
        with device, parameters_on_host(device, self.uninitialised), self.uninitialised.watching():
            return create()

    def follow_plan(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        model_config: ModelConfig,
        weights: Weights,
    ) -> bool:
        """Do what the plan of an equal load says, instead of tracing; return whether there is one.

        `weights(model)` is vLLM's iterator of the checkpoint's tensors. If there is no plan, the
        model is as it was, and this load may make a plan.
        """
        if self._gpu is not None or self._frozen is not None:
            return False
        began = time.perf_counter()
        inputs = LoadInputs(self._config, vllm_config, model_config)
        self._planning = Planning.of(inputs, model)
        if self._planning is None:
            return False
        found = self._planning.find(model, weights, self._named_ahead)
        if found is None:
            return False
        held, named = found
        provider = self.session.provider
        try:  # all of them before the first is used
            tensors = {name: provider.map(each) for name, each in held.residents.items()}
        except SharedMemoryError:
            return False  # met again, and said, on the ordinary way
        for name, parameter in model.named_parameters():
            each = DeferredParameter(name, parameter, planned=True)
            self._deferred[id(parameter)] = each
            if name in tensors:
                self.session.memory.use(each, held.residents[name], tensors[name])
        layers = dict(model.named_modules())
        self._processor = LayerProcessor(
            LayerContext(
                self.session,
                self._deferred,
                self._packed,
                self._model_dtype,
                records={id(layers[name]): record for name, record in held.records.items()},
            )
        )
        self._planning, self._plan, self._held = None, held.plan, held
        self._opened_ahead.clear()
        self._sources = list({id(source): source for _, source, _ in named}.values())
        used = [named[place][1] for place in held.plan.sources]
        self.session.ledger.share_sources(used)
        self._note_largest(used)
        self._known = True
        self.plan_seconds = time.perf_counter() - began
        return True

    def _named_ahead(self, paths: list[str], wanted: Callable[[str], bool]) -> Iterator[Named]:
        """Open files as `open_files` does, which need not open them again."""
        for path in paths:
            file = self._opened_ahead[path] = self._open(Path(path))
            yield from (each for each in file.named() if wanted(each[0]))

    def trace(
        self, model: nn.Module, load_weights: Callable[[nn.Module], bool], *, updated: bool
    ) -> bool:
        """Run the model's loading code on deferred tensors, and prepare the sharing.

        A deferred tensor has a shape but no data; the operations on it are recorded.
        `load_weights(model)` runs the loading code, and its result is returned. `updated` is True
        if weights may be written in place later.

        Raises:
            UntraceableError: The loading code cannot be run in this way.
        """
        for module in model.modules():
            if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
                raise QuantisedWhileLoadedError(
                    "weights are quantised while they are loaded; shared afterwards"
                )
        began = time.perf_counter()
        try:
            self.defer(model)
            if self._planning is not None:
                self._planning.before_loading(model)
            with weight_iterators.deferring(self.open_files), self.tracer.recording():
                told = load_weights(model)
            if self._planning is not None:
                self._planning.after_loading(model)
            self.conclude(model, updated=updated)
        except _TRACING_ERRORS as error:
            # A checkpoint that does not fit the model fails again, plainly, with vLLM's own words.
            raise UntraceableError(f"its loading code cannot be deferred ({error})") from error
        self.plan_seconds = time.perf_counter() - began
        return told

    def defer(self, model: nn.Module) -> None:
        """Replace the parameters of `model` by deferred ones, which have a shape but no data."""
        self._without_memory = {id(p) for p in model.parameters() if p.is_meta}
        self._without_content = {id(p) for p in model.parameters() if self.uninitialised.holds(p)}
        self._deferred = defer(model, self.tracer)

    def open_files(
        self, paths: list[str], wanted: Callable[[str], bool]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Open the files at `paths`, and yield the name of each tensor with a deferred tensor.

        Tensors are left out if `wanted(name)` is False.

        Raises:
            UntraceableError: A file cannot be read here, although vLLM may be able to.
        """
        ahead = self._opened_ahead
        files = [ahead.pop(p) if p in ahead else self._open(Path(p)) for p in paths]
        if self._frozen is not None:
            with self.tracer.own_work():
                self._frozen.choose(files)
        for file in files:
            deferred: dict[int, torch.Tensor] = {}  # tied names are one tensor, read once
            for name, own, lies in file.named():
                if not wanted(name):
                    continue
                source, placed = own, lies
                if self._frozen is not None:
                    source, placed = self._frozen.source(file, name, own, lies)
                if id(source) not in deferred:
                    self._sources.append(source)
                    deferred[id(source)] = self.tracer.source(source, _dtype(source))
                self._named.append((name, source, placed))
                whole = deferred[id(source)]
                yield name, whole if placed is None else within(whole, placed)

    def _open(self, path: Path) -> SourceFile:
        try:
            with self.tracer.own_work():  # what is remembered may be hashed by several threads
                file = self._opening.open(path)
        except PytorchError as error:
            # What torch.load reads and we do not, or neither does: vLLM's own words, then.
            raise UntraceableError(
                f"a file of torch.save that is not read here ({error})"
            ) from error
        self._files.append(file)
        header = file.header
        if isinstance(header, PytorchHeader) and not header.flat:
            raise UntraceableError(f"{path.name} holds more than names and their tensors")
        return file

    def conclude(self, model: nn.Module, *, updated: bool = False) -> None:
        """Determine from the recorded operations which parameters can be shared.

        `updated` is True if weights may be written in place later.
        """
        session = self.session
        conclude(model, self._deferred, self.tracer)
        strays = settle_strays(
            model,
            self.tracer,
            lambda view: session.provider.private(session.evaluator.value(view)),
        )
        if self._planning is not None:
            self._planning.expect(model, self._deferred)
            self._planning.ruled_out |= strays
        for parameter in eplb_parameters(model):
            if (each := self._deferred.get(id(parameter))) is not None:
                each.private = NotShared.EPLB
        parameters = list(self._deferred.values())
        session.expect(parameters)
        self._note_largest(distinct_sources(parameters))
        shareable = [p for p in parameters if p.sources and session.plan.reason(p) is None]
        self._known = bool(shareable) and all(p.known for p in shareable)
        on_gpu = self._gpu is not None
        self._processor = LayerProcessor(
            LayerContext(session, self._deferred, self._packed, self._model_dtype, on_gpu, updated)
        )

    def require_filled(self, path: str) -> None:
        """Check that the checkpoint fills all parameters, so that none keeps uninitialised memory.

        `path` is the path of the checkpoint, for the error's message.

        Raises:
            IncompleteCheckpointError: Some parameters are not filled, or not completely.
        """
        lacking = [
            (each.name, missing)
            for key, each in self._deferred.items()
            if key in self._without_content and each.view is not None
            if (missing := surely_unwritten(each.view.storage))
        ]
        if lacking:
            raise IncompleteCheckpointError.of(path, lacking)

    @contextmanager
    def layers_taken_over(self, model: nn.Module) -> Iterator[None]:
        """Context manager: while it is active, this package processes the model's layers.

        When vLLM calls `process_weights_after_loading` for a layer, the call goes to a
        `LayerProcessor`. Call `conclude` first.
        """
        processor = self._processor
        assert processor is not None
        hooked: list[QuantizeMethodBase] = []
        try:
            for module in model.modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, QuantizeMethodBase) and _PROCESS not in vars(method):
                    original = method.process_weights_after_loading
                    setattr(method, _PROCESS, functools.partial(processor.process, original))
                    hooked.append(method)
            yield
        finally:
            for method in hooked:
                vars(method).pop(_PROCESS, None)

    def find_residents(self, model: nn.Module) -> None:
        """Look up, all at once, the shared tensors for parameters that processing does not change.

        All other parameters are looked up later, layer by layer. So are parameters whose digests
        are not known yet.
        """
        parameters = self._outside_layers(model)
        if not self._packed:
            parameters += self._of_constant_layers(model)
        self.session.lookup.find(parameters)

    def share_outside_layers(self, model: nn.Module) -> None:
        """Share the parameters of modules without a quantisation method, such as norms.

        Only modules with a quantisation method count as layers.
        """
        self.session.share(self._outside_layers(model))

    def _outside_layers(self, model: nn.Module) -> list[DeferredParameter]:
        outside: dict[int, DeferredParameter] = {}
        inside: set[int] = set()
        for module in model.modules():
            has_method = isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)
            for parameter in module._parameters.values():
                if parameter is None or id(parameter) not in self._deferred:
                    continue
                if has_method:
                    inside.add(id(parameter))
                else:
                    outside[id(parameter)] = self._deferred[id(parameter)]
        return [each for key, each in outside.items() if key not in inside]

    def share_constant_layers(self, model: nn.Module) -> None:
        """On a GPU, share the parameters of all layers that processing does not change.

        They are shared in one step, so that small tensors of several layers fill the same units of
        GPU memory, and tiny ones first, which have units of their own. Without a GPU nothing is
        done.
        """
        if self._gpu is not None:
            found = self._of_constant_layers(model)
            self.session.share(sorted(found, key=lambda each: each.nbytes >= TINY_BYTES))

    def _of_constant_layers(self, model: nn.Module) -> list[DeferredParameter]:
        every = (
            self._deferred.get(id(parameter))
            for module in model.modules()
            if type(getattr(module, "quant_method", None)) in CONSTANT_METHODS
            for parameter in module._parameters.values()
        )
        unique = {id(each): each for each in every if each is not None and not each.installed}
        return list(unique.values())

    def bring_the_rest(self, model: nn.Module) -> None:
        """Move parameters that the loading code has created in host memory to the GPU.

        Without a GPU nothing is done.
        """
        if self._gpu is not None:
            for parameter in model.parameters():
                if not parameter.is_meta and parameter.device.type != self._gpu.device.type:
                    replace_data(parameter, self.session.provider.private(parameter.detach()))

    def share_left_over(self, model: nn.Module) -> None:
        """Share the parameters that are left over after all layers were processed.

        Raises:
            UntraceableError: A parameter still has no content afterwards.
        """
        remaining = [p for p in model.parameters() if p.is_meta and id(p) in self._deferred]
        self.session.share([self._deferred[id(p)] for p in remaining])
        for name, parameter in model.named_parameters():
            if parameter.is_meta and id(parameter) not in self._without_memory:
                raise UntraceableError(f"{name} was left without content")
        for each in self._deferred.values():
            if each.planned and not each.installed:
                raise UntraceableError(f"{each.name} was left without content by a load plan")

    @contextmanager
    def retied(self, model: nn.Module, model_config: ModelConfig) -> Iterator[None]:
        """Context manager: at its start, tie the output head to the embeddings if both are equal.

        Both are compared by digest where possible, otherwise by value. Until the context manager
        ends, vLLM does not try to tie them itself.
        """
        if not getattr(model_config, "word_embeddings_untied_by_checkpoint", False):
            yield
            return
        self._retie(model)
        model_config.word_embeddings_untied_by_checkpoint = False
        try:
            yield
        finally:
            model_config.word_embeddings_untied_by_checkpoint = True

    def _retie(self, model: nn.Module) -> None:
        untied = untied_lm_head(model) if untied_lm_head is not None else None
        if untied is None:
            return
        head = self._deferred.get(id(untied.lm_head.weight))
        embedding = self._deferred.get(id(untied.embed_tokens.weight))
        if head is None or embedding is None or not self._equal(head, embedding):
            return
        untied.tie(model)
        assert head.view is not None
        self.session.evaluator.release(head.view)

    def _equal(self, a: DeferredParameter, b: DeferredParameter) -> bool:
        if a.view is None or b.view is None:
            return False
        session = self.session
        if session.plan.reason(a) is not None or session.plan.reason(b) is not None:
            return self._equal_values(a.view, b.view)
        session.evaluator.digest_sources(a.view)
        session.evaluator.digest_sources(b.view)
        if session.book.digest(a.view) == session.book.digest(b.view):
            return not self._config.verifies_bytes or self._equal_values(a.view, b.view)
        if whole_source(a.view) is not None and whole_source(b.view) is not None:
            return False  # two digests
        return self._equal_values(a.view, b.view)

    def _equal_values(self, a: View, b: View) -> bool:
        """Return whether the values are equal, compared as vLLM does."""
        return torch.equal(self.session.evaluator.value(a), self.session.evaluator.value(b))

    def finish(self, model: nn.Module) -> None:
        """Check that no file has changed, and store the computed digests for later loads.

        A load whose parameters all became shared leaves a plan, for as long as `model` lives.

        Raises:
            ChangedFileError: A file has changed since it was opened.
            UntraceableError: The model's code still holds a deferred tensor, which has no data.
        """
        self._make_plan(model)
        self._deferred.clear()
        self.session.ahead.close()
        self._processor = self._held = None
        if self.tracer.held():
            gc.collect()
        if self.tracer.held():
            raise UntraceableError("its loading code keeps checkpoint tensors out of sight")
        for file in self._read_files():
            file.check_unchanged()
        for file in self._read_files():
            file.remember()
        if self._plan is not None:
            PLANS.keep(model, self._plan)

    def _make_plan(self, model: nn.Module) -> None:
        planning, processor, session = self._planning, self._processor, self.session
        if planning is None or processor is None or not processor.context.all_keyed:
            return
        traced = self.tracer
        if traced.data_reads or traced.wrote_memory or session.ledger.skipped:
            return
        residents, records = dict(session.memory.residents), processor.context.records
        self._plan = planning.outcome(model, residents, records, self._named)

    def _read_files(self) -> list[SourceFile]:
        return [*self._files, *(self._frozen.files if self._frozen is not None else ())]

    def contents(self) -> CheckpointContents:
        """Return the tensors of the checkpoint, those of frozen layers in place of its own.

        All ranks see the same, whatever they use. Call it before the files are closed.
        """
        named = {}
        for file in {file.path: file for file in self._files}.values():
            for name, own, lies in file.named():
                source, placed = own, lies
                if self._frozen is not None:
                    source, placed = self._frozen.source(file, name, own, lies)
                named[file.path, name] = name, source, placed
        trust = self._config.verify == "hint"
        return CheckpointContents(named.values(), self._config.hash_algorithm, trust=trust)

    def report(self, rank: int) -> ModelReport:
        """Return a report of what was read, hashed, built and shared.

        `rank` is the rank of this worker.
        """
        counters = self.session.reader.counters
        shared = {id(source) for source in self.session.ledger.shared_sources()}
        report = ModelReport(name=self._name, rank=rank, known=self._known)
        self.session.ledger.enter(report)
        report.marked = marked(self._files, lambda source: id(source) in shared)
        report.checkpoint_bytes = sum(source.spec.nbytes for source in self._sources)
        report.header_bytes = sum(file.header.header_bytes for file in self._read_files())
        report.source_tensors_total = len(self._sources)
        report.bytes_read = counters.bytes_read
        report.known_reads = self.session.ledger.known_reads(
            self.session.reader.known_reads.values()
        )
        report.bytes_from_store = self._opening.bytes_from_store
        if self._frozen is not None:
            report.bytes_from_store += self._frozen.bytes_from_store
            report.frozen_base = self._frozen.to_dict()
        report.bytes_hashed = counters.bytes_hashed
        report.seconds["plan"] = self.plan_seconds
        report.seconds["read"] = counters.read_seconds
        report.seconds["hash"] = counters.hash_seconds
        self.say_not_lent(report)
        return report

    def _note_largest(self, used: Iterable[SourceTensor]) -> None:
        self._largest = heapq.nlargest(_LARGEST, used, key=lambda source: source.spec.nbytes)

    def largest(self) -> tuple[str, ...]:
        """Return the digests of the largest source tensors used, as far as they are known."""
        return tuple(each.digest for each in self._largest if each.digest is not None)

    def say_not_lent(self, report: ModelReport) -> None:
        """Add to `report` why tensors are not shared with other processes, or not by leaf.

        Sharing by leaf means that two different tensors share those pieces of 2 MiB (leaves) that
        are equal. If there is no such reason, `report` is not changed.
        """
        reason = self.session.provider.not_lent
        if reason is not None:
            report.skipped.append((BETWEEN_PROCESSES, reason))
        if self.session.provider.not_by_leaf is not None:
            report.skipped.append((BY_LEAF, self.session.provider.not_by_leaf))


def _dtype(source: SourceTensor) -> torch.dtype:
    try:
        return torch_dtype(source.spec.dtype)
    except UnsupportedError as error:
        raise UntraceableError(f"{source.place} is of {source.spec.dtype}: {error}") from error


@contextmanager
def restored_on_failure(vllm_config: VllmConfig) -> Iterator[None]:
    """Context manager: if its block fails, restore `vllm_config` and the random generators.

    A second attempt at a load then starts as the first did. Without this, vLLM would refuse the
    second attempt, because `vllm_config` already lists attention and MoE layers of the same names.
    """
    compilation = vllm_config.compilation_config
    layers = dict(compilation.static_forward_context)
    experts = list(compilation.static_all_moe_layers)
    counted = [Counter(ops) for ops in _counted_ops(compilation)]
    try:
        with rng_restored_on_failure():
            yield
    except BaseException:
        compilation.static_forward_context.clear()
        compilation.static_forward_context.update(layers)
        compilation.static_all_moe_layers[:] = experts
        for ops, before in zip(_counted_ops(compilation), counted, strict=True):
            ops.clear()
            ops.update(before)
        raise


def _counted_ops(compilation: CompilationConfig) -> tuple[Counter[str], Counter[str]]:
    return compilation.enabled_custom_ops, compilation.disabled_custom_ops


@contextmanager
def parameters_on_host(
    device: torch.device, uninitialised: UninitialisedStorages
) -> Iterator[None]:
    """Context manager: while it is active, parameters of new modules go to host memory.

    When the calling thread creates a module on `device`, each parameter is moved to host memory.
    Its content is copied, unless `uninitialised` lists its storage. Create the modules inside
    `with uninitialised.watching():`, which fills this list. If `device` is a CPU, nothing is done.
    """
    if device.type == "cpu":
        yield
        return
    original = nn.Module.register_parameter
    thread = threading.get_ident()

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        here = threading.get_ident() == thread
        if here and param is not None and param.device.type == device.type:
            param.data = _on_host(param, uninitialised)
        original(self, name, param)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _on_host(parameter: nn.Parameter, uninitialised: UninitialisedStorages) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        as_it_is = parameter.is_meta or uninitialised.holds(parameter)
        shape, stride = tuple(parameter.shape), tuple(parameter.stride())
        host = torch.empty_strided(shape, stride, dtype=parameter.dtype, device="cpu")
        if not as_it_is:
            host.copy_(parameter.detach())
    return host
