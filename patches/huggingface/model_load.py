"""Share the tensors that one load by Diffusers or Transformers brings into memory.

    with deduplicated(config, name) as load:       # wrappers report each tensor that is set
        pipeline = call()                          # these are hashed and shared meanwhile
        report = load.finish(modules_of(pipeline)) # all other tensors are shared now

`tensor_dedup.loader.post_load.dedup` does the sharing, model by model.

Loading is not thread-safe in these frameworks: two loads at once leave weights on the meta device,
with or without this package. So loads that share take turns.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakSet

import torch
from torch import nn

from tensor_dedup.errors import TensorDedupError, UnsupportedError
from tensor_dedup.formats.hub_cache import locate
from tensor_dedup.loader.checkpoint_io.sources import StaleHintError
from tensor_dedup.loader.load_lock import LOAD_LOCK, MOVE_LOCK
from tensor_dedup.loader.post_load.batch import DedupContext
from tensor_dedup.loader.post_load.dedup import ModuleDedup
from tensor_dedup.loader.post_load.mapped_files import MappedFiles
from tensor_dedup.loader.process_state import release_memory, rng_restored_on_failure
from tensor_dedup.loader.report import ModelReport, add
from tensor_dedup.loader.residents.provider import host_provider_for
from tensor_dedup.loader.unsharing.model_digests import keep as keep_digests
from tensor_dedup.patches.huggingface.conversions import watch
from tensor_dedup.patches.huggingface.enabled import OPT_OUT
from tensor_dedup.seams import Replacements, usable
from tensor_dedup.text_table import BETWEEN_PROCESSES, BY_LEAF

if TYPE_CHECKING:
    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.checkpoint_io.stub_folder import Checkout
    from tensor_dedup.loader.post_load.stored_weights import StoredWeights

_log = logging.getLogger(__name__)
# Modules that some entry of the report is about.
_reported: Final[WeakSet[nn.Module]] = WeakSet()
_DIFFUSERS: Final = "diffusers.models.modeling_utils"
_OFFLOADED: Final = "accelerate moves its weights about"
_GIVEN: Final = "whoever called brought it"
_REFUSED: Final = "it was loaded with tensor_dedup=False"
_FROM_FILES: Final = "Diffusers and Transformers read files themselves; load store://NAME"
_NO_MODULES: Final = "a %s holds no module of torch"
_SUMS: Final = (
    "total_bytes",
    "shared_bytes",
    "private_bytes",
    "leaf_shared_bytes",
    "bytes_materialised",
    "tensors_total",
    "tensors_shared",
)


class _State:
    """The load in progress in the one thread that holds the load lock."""

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        # In a child the thread whose load it was does not exist.
        self.load: ModelLoad | None = None


class ModelLoad:
    """A load of one or more models by one call of `from_pretrained`, with sharing.

    Use it as a context manager. It keeps the files of the checkpoint open until its end.
    """

    def __init__(
        self,
        config: TensorDedupConfig,
        name: str,
        *,
        trust: bool = True,
        checkout: Checkout | None = None,
    ) -> None:
        """Prepare a load. `name` is the name of the load in reports.

        With `trust=False`, remembered digests of files (hints) are not used, whatever `config`
        says. `checkout` is the stored checkpoint (`store://NAME`) to load, or None for any other.
        """
        self._name = name
        self._config = config
        trust = trust and config.verify == "hint"
        self._files = MappedFiles(config.hash_algorithm, trust=trust)
        # Plain loading uses tensors where they lie in the file, and on a CPU results depend on it.
        provider = host_provider_for(config.memory_manager, name, keep_alignment=True)
        self._context = DedupContext(config, provider, self._files)
        self.stored = None if checkout is None else _stored_weights(config, checkout, trust=trust)
        if self.stored is not None:
            provider.built = self.stored.built
        self._dedups: dict[int, ModuleDedup] = {}
        self._settled: set[int] = set()
        self._left_alone: dict[int, nn.Module] = {}
        self._offloaded: set[int] = set()
        self._began = time.perf_counter()
        self._process = os.getpid()
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # A file that is still read may not be closed: its number may be another one's by then.
        for each in self._dedups.values():
            each.abandon()
        self._files.close()
        if self.stored is not None:
            self.stored.close()

    def note(self, model: nn.Module, name: str) -> None:
        """Record that a loader has set the tensor `name` of `model` to its final value.

        Calls from other threads are ignored, because those threads may load something else. Tensors
        that a loader sets in threads of its own are shared when their model is complete.
        """
        if self.is_here() and not OPT_OUT.depth:
            self._dedup(model).note(name)

    @property
    def config(self) -> TensorDedupConfig:
        """The configuration of this load."""
        return self._config

    def is_here(self) -> bool:
        """Return whether the current thread is the one that runs this load."""
        return (os.getpid(), threading.get_ident()) == (self._process, self._thread)

    def leave_alone(self, models: Iterable[nn.Module]) -> None:
        """Exclude `models` from sharing, although they are part of this load."""
        self._left_alone.update((id(model), model) for model in models)

    def _dedup(self, model: nn.Module) -> ModuleDedup:
        found = self._dedups.get(id(model))
        if found is None:  # holds the model, so that the id stays its own
            found = self._dedups[id(model)] = ModuleDedup(model, self._context)
        return found

    def settle(self, model: nn.Module) -> None:
        """Share all tensors of a complete model that are not shared yet.

        A second call for the same model does nothing. If accelerate offloads the weights of the
        model, they are not shared.
        """
        dedup = self._dedup(model)
        if id(model) in self._settled:
            return
        self._settled.add(id(model))
        if is_offloaded(model):
            self._offloaded.add(id(model))
            dedup.abandon()
            return
        dedup.settle()

    def finish(
        self, models: Mapping[str, nn.Module], skipped: Iterable[tuple[str, str]] = ()
    ) -> ModelReport:
        """Share everything that was loaded, and return the report.

        `models` maps names to the loaded models. `skipped` lists other parts of the load by name,
        each with the reason why it is not shared.

        Raises:
            ChangedFileError: A file changed while it was loaded.
        """
        refused = [(n, _REFUSED) for n, m in models.items() if id(m) in self._left_alone]
        models = {n: m for n, m in models.items() if id(m) not in self._left_alone}
        for model in [*models.values(), *(each.model for each in list(self._dedups.values()))]:
            self.settle(model)
        self._files.finish()
        report = ModelReport(name=self._name, skipped=[*skipped, *refused])
        names = {id(model): name for name, model in models.items()}
        inside = {id(part) for each in self._dedups.values() for part in _parts(each.model)}
        for key, dedup in self._dedups.items():
            if key in inside:  # the model that it is a part of accounts for it
                continue
            self._enter(report, names.get(key, type(dedup.model).__name__), dedup)
            _reported.add(dedup.model)
        report.skipped.sort()
        context = self._context
        if self.stored is not None:
            report.bytes_read = report.bytes_from_store = self.stored.bytes_read
        elif self._config.store is not None and not self._config.store_writes:
            report.skipped.append(("store", _FROM_FILES))
        if context.provider.not_lent is not None:
            report.skipped.append((BETWEEN_PROCESSES, context.provider.not_lent))
        if context.provider.not_by_leaf is not None:
            report.skipped.append((BY_LEAF, context.provider.not_by_leaf))
        report.collisions = context.collisions
        report.known = context.remembered > 0 and context.unknown == 0
        if self.stored is not None:
            report.known = self.stored.trusted
        report.bytes_hashed = context.bytes_hashed
        report.seconds["hash"] = context.hash_seconds
        report.seconds["process"] = context.process_seconds
        spent = context.hash_seconds + context.process_seconds
        report.seconds["read"] = max(0.0, time.perf_counter() - self._began - spent)
        return report

    def _enter(self, report: ModelReport, name: str, dedup: ModuleDedup) -> None:
        part = ModelReport()
        dedup.ledger.enter(part)
        if id(dedup.model) in self._offloaded:
            part.skipped.append(("", _OFFLOADED))
        sums = {key: getattr(part, key) for key in _SUMS}
        for key, value in sums.items():
            setattr(report, key, getattr(report, key) + value)
        if name:
            kind = type(dedup.model).__name__
            report.components.append({"name": name, "class": kind, **sums})
        report.skipped += [(".".join(filter(None, (name, n))), why) for n, why in part.skipped]


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    return (part for part in model.modules() if part is not model)


_state: Final = _State()


def run(
    call: Callable[[], Any],
    config: TensorDedupConfig,
    name: str,
    given: set[int],
    checkout: Checkout | None = None,
) -> Any:
    """Call a loader of Diffusers or Transformers, share the tensors it loads, and add a report.

    Return the result of `call`, which calls the loader. `name` is the name of the load in the
    report. `given` has the ids of the modules that the caller passed to the loader; these modules
    are not shared. `checkout` is the stored checkpoint (`store://NAME`) to load, or None for any
    other.

    - Only one load runs at a time: a load in another thread is waited for.
    - If this thread runs a load already, the models belong to that load and its report.
    - If a load fails at its first attempt, the random number generators are restored.
    - If a remembered digest (hint) was wrong, `call` is then called a second time, without hints.
      Other errors are passed on.

    Raises:
        StoreError: A stored tensor cannot be read, or is damaged.
        UnsupportedError: A stored checkpoint is to be loaded as a part of another load.
    """
    with LOAD_LOCK:
        if _state.load is not None:  # a model of a pipeline
            if checkout is not None:
                raise UnsupportedError(
                    f"{checkout.url} cannot be a part of what is being loaded; load it first and "
                    "pass it on",
                    url=checkout.url,
                )
            result = call()
            for model in modules_of(result).values():
                if id(model) not in given:
                    _state.load.settle(model)
            return result
        try:
            with rng_restored_on_failure():
                return _run(call, config, name, given, checkout, trust=True)
        except StaleHintError as error:
            # As text: whoever keeps log records must not keep the frames, and memory, of a load.
            _log.warning("%s; loading again without hints", str(error))
        return _run(call, config, name, given, checkout, trust=False)


def _run(
    call: Callable[[], Any],
    config: TensorDedupConfig,
    name: str,
    given: set[int],
    checkout: Checkout | None,
    *,
    trust: bool,
) -> Any:
    with deduplicated(config, name, trust=trust, checkout=checkout) as load:
        with _first_error_of(load.stored):
            result = call()
        every = modules_of(result)
        skipped = [(name, _GIVEN) for name, model in every.items() if id(model) in given]
        if not every:
            skipped.append(("", _NO_MODULES % type(result).__name__))
        models = {name: model for name, model in every.items() if id(model) not in given}
        report = load.finish(models, skipped)
        keep_digests(report, models, None if load.stored is None else load.stored.contents())
    if config.store_writes and checkout is None:
        _keep(config, name, report)
    add(report)
    return result


@contextmanager
def _first_error_of(stored: StoredWeights | None) -> Iterator[None]:
    """Raise what reading the store has raised, whatever the framework made of it.

    Diffusers replaces it by an OSError that asks whether the file is there; Transformers counts a
    tensor that it cannot read as missing, and would make numbers up.
    """
    try:
        yield
    except Exception as error:
        if stored is None or stored.error is None or stored.error is error:
            raise
        raise stored.error from error
    if stored is not None and stored.error is not None:
        raise stored.error


def _stored_weights(config: TensorDedupConfig, checkout: Checkout, *, trust: bool) -> StoredWeights:
    # Here, and in `_keep`: most loads need no store.
    from tensor_dedup.loader.post_load.stored_weights import StoredWeights

    return StoredWeights(config, checkout, trust=trust)


def _keep(config: TensorDedupConfig, name: str, report: ModelReport) -> None:
    """Write what was loaded into the store, or enter into the report why not."""
    from tensor_dedup.loader.checkpoint_io.write_back import keep

    try:
        folder = locate(name)
    except TensorDedupError:
        folder = Path(name)
    if not folder.exists():
        report.skipped.append(("<store>", f"not written to the store: {name} is no path here"))
        return
    keep(config.store_folder, folder, report, trust=config.verify == "hint")


def move(target: object, device: Any, config: TensorDedupConfig) -> None:
    """Move `target`, a pipeline or module, to `device`, and share its private tensors.

    They are shared as by `share`. If `device` is the CPU, this happens after the move, otherwise
    before it.

    Raises:
        UnsupportedError: `target` is neither a pipeline nor a module.
    """
    here = torch.device(device).type == "cpu"
    models = _require_modules(target, "move")
    if not here:
        share(target, config)
    movable: Any = target
    for each in [movable] if hasattr(target, "to") else models.values():
        each.to(device)
    if here:
        share(target, config)


def under_way() -> TensorDedupConfig | None:
    """Return the configuration of the load in progress in this thread, or None without a load."""
    load = _state.load
    return load.config if load is not None and load.is_here() else None


def leave_alone(loaded: object) -> None:
    """Exclude models that were loaded with `tensor_dedup=False` from the load in this thread.

    `loaded` is the pipeline or module that the loader returned. If this thread runs no load, the
    call does nothing.
    """
    load = _state.load
    if load is not None and load.is_here():
        load.leave_alone(modules_of(loaded).values())


def share(target: object, config: TensorDedupConfig) -> ModelReport:
    """Share the parameters of `target`, a pipeline or module in memory, and return a report.

    The report is also added to `report()`, unless all modules in `target` were reported before.

    Raises:
        UnsupportedError: `target` is neither a pipeline nor a module.
    """
    models = _require_modules(target, "sweep")
    with LOAD_LOCK:
        known = all(model in _reported for model in models.values())
        with ModelLoad(config, type(target).__name__, trust=False) as load:
            report = load.finish(models)
        del load
        release_memory()
    watch(config, alone)
    if not known:
        keep_digests(report, models, None)
        add(report)
    return report


def _require_modules(target: object, verb: str) -> dict[str, nn.Module]:
    models = modules_of(target)
    if not models:
        raise UnsupportedError(
            f"{verb} takes a pipeline or a module, not {type(target).__name__}",
            type=type(target).__name__,
        )
    return models


@contextmanager
def alone() -> Iterator[bool]:
    """Context manager: while it is active, no other thread can convert modules.

    Its value is False if a load is in progress in this thread, otherwise True.
    """
    with MOVE_LOCK:
        yield under_way() is None


@contextmanager
def deduplicated(
    config: TensorDedupConfig, name: str, *, trust: bool, checkout: Checkout | None = None
) -> Iterator[ModelLoad]:
    """Context manager: while it is active, the models that this thread loads are shared.

    Its value is the ModelLoad. Later conversions of the models, such as `.to(...)`, keep tensors
    shared, too. The caller must hold `LOAD_LOCK`.

    - `name` is the name of the load in reports.
    - With `trust=False`, remembered digests of files (hints) are not used, whatever `config` says.
    - `checkout` is the stored checkpoint (`store://NAME`) to load, or None for any other.

    Raises:
        UnsupportedError: A stored checkpoint cannot be loaded with the installed frameworks.
    """
    load = ModelLoad(config, name, trust=trust, checkout=checkout)
    with load, Replacements(_replacements(load)):
        _state.load = load
        try:
            yield load
        finally:
            _state.load = None
    watch(config, alone)
    if _DIFFUSERS in sys.modules:
        from tensor_dedup.patches.huggingface import offloading

        offloading.install()
    del load
    release_memory()


def _replacements(load: ModelLoad) -> Iterator[Any]:
    # Whichever framework loads is imported by now, and the other one needs no seam.
    if "transformers.modeling_utils" in sys.modules:
        from tensor_dedup.patches.huggingface import transformers

        yield from transformers.replacements(load.note)
    if _DIFFUSERS in sys.modules:
        from tensor_dedup.patches.huggingface import diffusers

        yield from diffusers.replacements(load.note)
    if load.stored is not None:
        from tensor_dedup.patches.huggingface import stored_files

        for seam, wrap in stored_files.replacements(load.stored):
            if not usable(seam):
                raise UnsupportedError(
                    f"{load.stored.checkout.url} cannot be loaded by these versions of the "
                    "frameworks; export it and load the folder",
                    url=load.stored.checkout.url,
                )
            yield seam, wrap


def modules_of(loaded: object) -> dict[str, nn.Module]:
    """Return the modules in `loaded`, which a loader has returned, by name.

    * A pipeline: its modules, with the names that the pipeline gives them.
    * A module: that module, with the name "".
    * A tuple: the modules in its first item.
    * Any other object: an empty dict.
    """
    if isinstance(loaded, tuple) and loaded:
        loaded = loaded[0]  # with output_loading_info the model comes with other things
    if isinstance(loaded, nn.Module):
        return {"": loaded}
    components = getattr(loaded, "components", None)
    if not isinstance(components, Mapping):
        return {}
    found = {id(m): (str(n), m) for n, m in components.items() if isinstance(m, nn.Module)}
    return dict(found.values())


def is_offloaded(model: nn.Module) -> bool:
    """Return whether accelerate offloads a model's weights and loads them again for each use."""
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    every = (each for hook in hooks for each in getattr(hook, "hooks", (hook,)))
    return any(getattr(each, "offload", False) for each in every)
