"""vLLM's loader for the load format `tensor_dedup`.

It runs the default loader over deferred tensors, which have a shape but no data, to learn how the
model's tensors follow from the checkpoint. Tensors that other models have in memory already are
then shared.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import torch
from torch import nn
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.utils.torch_utils import set_default_torch_dtype

from tensor_dedup.errors import FormatError, TensorDedupError, UnsupportedError
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.loader.checkpoint_io.checkpoint_contents import CheckpointContents
from tensor_dedup.loader.checkpoint_io.from_store import (
    FromDisk,
    FromStore,
    OpenCheckpoint,
    store_behind,
)
from tensor_dedup.loader.checkpoint_io.frozen_layers import FrozenLayers
from tensor_dedup.loader.checkpoint_io.hints import FileIdentity, HintIndex
from tensor_dedup.loader.checkpoint_io.sources import StaleHintError
from tensor_dedup.loader.checkpoint_io.stub_folder import Checkout, stored_in
from tensor_dedup.loader.checkpoint_io.write_back import keep
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.load_lock import LOAD_LOCK
from tensor_dedup.loader.process_state import WITHOUT_FULL_COLLECTIONS
from tensor_dedup.loader.report import ModelReport, add, loaded_beside
from tensor_dedup.loader.residents.manager import call_this_process
from tensor_dedup.loader.residents.slab import SharedMemoryError
from tensor_dedup.loader.takeover import Built, note_loaded
from tensor_dedup.loader.thread_dtype import ThreadDtype
from tensor_dedup.loader.unsharing.model_digests import keep as keep_digests
from tensor_dedup.memory_manager.client import AUTO
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.client.names import checkpoint_name
from tensor_dedup.memory_manager.errors import MemoryManagerError
from tensor_dedup.memory_manager.protocol.paths import device_socket, socket_path
from tensor_dedup.patches.vllm import (
    load_formats,
    post_load,
    sleep,
    versions,
    weight_iterators,
    writers,
)
from tensor_dedup.patches.vllm.kernels import final_bytes, scales_kept
from tensor_dedup.patches.vllm.load_formats import KEY, split
from tensor_dedup.patches.vllm.plain_loads import plain_loader
from tensor_dedup.patches.vllm.run import BuildElsewhere, LoadRun, load, restored_on_failure
from tensor_dedup.patches.vllm.seams import usable, why_not
from tensor_dedup.patches.vllm.server_names import server_name
from tensor_dedup.store.store import LocalStore

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

    from tensor_dedup.patches.vllm.planned import Weights

_Loaded: TypeAlias = tuple[nn.Module, ModelReport]
_log = logging.getLogger(__name__)

# What an engine casts to its own dtype; others stay as they are.
_CAST: Final = frozenset({"F64", "F32", "F16", "BF16"})


class ReadingLoader(DefaultModelLoader):
    """A loader that reads files as vLLM's loader for the inner load format does.

    The inner load format is the format of vLLM that is used to read the files. The loader also
    records whether the model reports which weights it has loaded.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        self._format = str(load_config.load_format)
        self._tracked = False
        self._inner = load_formats.loader_of(self._format, load_config)
        if self._inner is not None:  # it has taken its own settings
            load_config = dataclasses.replace(
                load_config, load_format="auto", model_loader_extra_config={}
            )
        super().__init__(load_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the weights of `model` with vLLM's loader for the inner load format."""
        if self._inner is None:
            super().load_weights(model, model_config)
        else:
            self._inner.load_weights(model, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield each tensor in the checkpoint with its name, for a reload.

        Raises:
            AttributeError: vLLM's loader for the inner format has no `get_all_weights`.
        """
        if self._inner is None:
            return super().get_all_weights(model_config, model)
        found: Generator[tuple[str, torch.Tensor], None, None]
        found = cast("Any", self._inner).get_all_weights(model_config, model)
        return found

    def track_weights_loading(
        self, model: nn.Module, loaded_weights: set[str] | None, *args: Any, **more: Any
    ) -> None:
        """Call vLLM's method, and record whether the model has reported which weights it loaded."""
        super().track_weights_loading(model, loaded_weights, *args, **more)
        quantized = args[0] if args else more.get("quantized")  # of newer versions
        self._tracked = loaded_weights is not None and not quantized


class TensorDedupLoader(ReadingLoader):
    """The loader for the format `tensor_dedup`, which shares final tensors with other models.

    Weights that cannot be shared are loaded as vLLM does without this package, and `report()` has
    the reason. Loads in one process take turns.

    Raises:
        ConfigError: The configuration is not valid.
        FormatError: A stored checkpoint is not valid.
        ChangedFileError: A file of the checkpoint changed during the load.
        AuditError: An audit found a shared tensor that differs from its checkpoint.
    """

    _said_apart = False  # in this process

    def __new__(cls, load_config: LoadConfig) -> Any:
        """Return a loader.

        In a version of vLLM that is not supported, the result is another loader, which loads
        without sharing and logs the reason.
        """
        reason = why_not("loader", "reload")
        return super().__new__(cls) if reason is None else plain_loader(reason)(load_config)

    def __init__(self, load_config: LoadConfig) -> None:
        extra: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        mine = extra.pop(KEY, None)
        self.dedup, inner_format = split(mine)
        self.checkout = stored_in(mine)
        self._folders: dict[str, str] = {}  # where vLLM found a model's weights
        self._paths: dict[str, list[str]] = {}  # and which files they are
        self._seen: dict[Path, FileIdentity] = {}  # as they were before they were read
        self._began_ns = time.time_ns()
        self._prepared: dict[str, tuple[Any, ...]] | None = None  # what a load has found so far
        self._largest: tuple[str, ...] = ()  # of what was loaded: digests
        self._with_base: str | None = None  # the model that takes layers from a base
        self._frozen: FrozenLayers | None = None  # what it took when nothing was deferred
        # Set it to load in a thread beside the one in which a model runs. That one then builds the
        # modules, because vLLM's constructors need settings of the whole process.
        self.build_elsewhere: BuildElsewhere | None = None
        self._built: Built | None = None  # the model as it was before its weights
        super().__init__(
            dataclasses.replace(
                load_config, load_format=inner_format, model_loader_extra_config=extra
            )
        )
        weight_iterators.install()
        writers.install()
        sleep.install()
        versions.install()

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """Build the model, load its weights, enter the load into `report()`, and return the model.

        `prefix` is passed on to vLLM.
        """
        self._note_base(model_config, draft=load_formats.is_draft(vllm_config, model_config))
        call_this_process(server_name(vllm_config))
        with LOAD_LOCK:
            model, report = self._load(vllm_config, model_config, prefix)
        built, self._built = self._built, None
        if built is not None:
            note_loaded(model, built)
        self._keep(model_config, report)
        add(report, self._largest)
        self._say_apart(vllm_config, report)
        return model

    def create_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """Build the module tree as vLLM does; it has no weights yet."""
        model = versions.create_model(super(), vllm_config, model_config, prefix)
        if load_formats.follows_steps(vllm_config):
            self._built = Built(model)
        return model

    def _say_apart(self, vllm_config: VllmConfig, report: ModelReport) -> None:
        """Warn, once in an engine, if only a process of its own keeps it from sharing."""
        if self.dedup.memory_manager is not None or TensorDedupLoader._said_apart or report.rank:
            return
        beside = loaded_beside(report.rank, self._largest)
        if beside is None:
            return
        TensorDedupLoader._said_apart = True
        parallel = vllm_config.parallel_config
        ways = "give both tensor_dedup={'memory_manager': 'auto'}"
        if parallel.world_size == 1 and parallel.data_parallel_size == 1:
            ways += ", or set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm is imported"
        _log.warning(
            "%s has weights in common with %s, which is in memory in process %d, and shares none "
            "of them, because each engine is a process of its own: %s",
            *(report.name, *beside, ways),
        )

    def _load(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str) -> _Loaded:
        load_formats.tie_again(self._format, model_config)
        refusal = self._refusal(vllm_config)
        if refusal is not None:
            return self._load_plainly(refusal, vllm_config, model_config, prefix)
        other = post_load.other_format(self.load_config.load_format, model_config)
        if other is not None:
            self._refuse_frozen_base(other)
            reason = f"{other} has a loader of its own; shared afterwards"
            return self._load_plainly(reason, vllm_config, model_config, prefix, share=True)
        share = False
        try:
            return self._load_trusting_hints(vllm_config, model_config, prefix)
        except (UnsupportedError, SharedMemoryError) as error:
            _log.debug("sharing was given up here", exc_info=True)
            refusal, share = str(error), isinstance(error, post_load.QuantisedWhileLoadedError)
        except (FormatError, OSError) as error:
            # vLLM has errors of its own for files that lie or do not open: let it raise those.
            if self._stored(model_config.model) is not None or self._with_base is not None:
                raise
            _log.debug("the checkpoint cannot be read", exc_info=True)
            refusal, share = str(error), False
        # Outside the handler: the error's frames hold the model that was begun.
        return self._load_plainly(refusal, vllm_config, model_config, prefix, share=share)

    # --- where the weights are

    def _stored(self, model: str) -> Checkout | None:
        """Return the stored checkpoint that `model` stands for, or None."""
        checkout = self.checkout
        return checkout if checkout is not None and checkout.folder == model else None

    def _opening(self, model: str, *, trust: bool) -> OpenCheckpoint:
        checkout = self._stored(model)
        if checkout is not None:
            return FromStore(LocalStore.open(checkout.store, create=False), checkout, trust=trust)
        store = store_behind(self.dedup)
        return FromDisk(HintIndex(), self.dedup.hash_algorithm, trust=trust, store=store)

    def _prepare_weights(
        self,
        model_name_or_path: str,
        subfolder: str | None,
        revision: str | None,
        fall_back_to_pt: bool,
        allow_patterns_overrides: list[str] | None,
    ) -> tuple[Any, ...]:
        """Find the files as vLLM does, and record the folder, also of a model downloaded now.

        Within one load, files that were found are not looked for again: a hub would be asked twice.
        """
        how = (model_name_or_path, subfolder, revision, fall_back_to_pt, allow_patterns_overrides)
        before = self._prepared or {}
        found: tuple[Any, ...] = before.get(repr(how)) or super()._prepare_weights(*how)
        if self._prepared is not None:
            self._prepared[repr(how)] = found
        if subfolder is None:
            self._folders[model_name_or_path] = found[0]
            self._paths[model_name_or_path] = list(found[1])
            self._note_identities(*found[1])
        return found

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Read as vLLM does; the tensors of a stored checkpoint come from its store."""
        checkout = self._stored(source.model_or_path)
        opening = partial(self._opening, source.model_or_path, trust=True)
        if checkout is None:
            found = super()._get_weights_iterator(source)
            paths = self._paths.get(source.model_or_path, [])
        else:
            if self.counter_before_loading_weights == 0.0:
                self.counter_before_loading_weights = time.perf_counter()
            paths = self._stored_paths(checkout, source)
            stored = weight_iterators.stored_tensors(
                paths, opening, lambda name: not should_skip_weight(name, self.local_expert_ids)
            )
            found = ((source.prefix + name, tensor) for name, tensor in stored)
        if source.model_or_path != self._with_base or weight_iterators.active() is not None:
            return found
        self._frozen = FrozenLayers(self.dedup, trust=False)
        return weight_iterators.with_frozen_layers(found, self._frozen, paths, opening)

    def _stored_paths(self, checkout: Checkout, source: DefaultModelLoader.Source) -> list[str]:
        """Return the files that vLLM reads of a stored checkpoint, chosen as in any other folder.

        The files in the stub folder have only their headers, and vLLM chooses by name.
        """
        if source.subfolder is not None:
            raise UnsupportedError(
                f"{checkout.url}: this model reads weights from the folder {source.subfolder!r} "
                "too, which a stored checkpoint does not give; export it and load the folder",
                url=checkout.url,
            )
        how = (source.revision, source.fall_back_to_pt, source.allow_patterns_overrides)
        chosen: tuple[Any, ...] = super()._prepare_weights(checkout.folder, None, *how)
        return weight_iterators.in_order(chosen[1])

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield each tensor with its name, for a reload.

        If the model takes layers from a base (`frozen_base`), the tensors in those layers are read
        from the base again.
        """
        self._note_base(model_config, draft=getattr(model_config, "runner_type", "") == "draft")
        return super().get_all_weights(model_config, model)

    def _note_base(self, model_config: ModelConfig, *, draft: bool) -> None:
        if self.dedup.frozen_base is not None and not draft:
            self._with_base = model_config.model

    def _refuse_frozen_base(self, load_format: str) -> None:
        """Check that nothing is to be taken from a base where another loader reads the files."""
        if self._with_base is not None:
            raise UnsupportedError(
                f"frozen_base takes layers from a base where vLLM's default loader reads files, "
                f"and {load_format} has a loader of its own; write the checkpoint with "
                "`tensor-dedup substitute` and load that",
                load_format=load_format,
            )

    def _keep(self, model_config: ModelConfig, report: ModelReport) -> None:
        """Write what was loaded into the store, if asked to, on rank 0 only."""
        folder = self._folders.get(model_config.model)
        if not self.dedup.store_writes or report.rank != 0 or folder is None:
            return
        files = [Path(path) for path in self._paths[model_config.model]]
        trust = self.dedup.verify == "hint"
        keep(self.dedup.store_folder, Path(folder), report, trust=trust, files=files)

    def _refusal(self, vllm_config: VllmConfig) -> str | None:
        """Return why this model is loaded plainly from the start, or None."""
        device = self._device(vllm_config)
        if not self.dedup.enabled:
            return "tensor_dedup is switched off"
        if DEVICES.at(device) is not None:
            usable("profile")  # says so, once, where vLLM plans a GPU's memory in another way
        elif device.type != "cpu":
            return DEVICES.why_not(device) or f"sharing on {device.type} is not in this version"
        return None

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of this model that a memory manager has in memory already.

        The result is 0 without a manager, or if the model is not shared. vLLM calls this method on
        GPUs before it measures free memory, because these bytes are not part of the engine's own
        memory.
        """
        manager = self.dedup.memory_manager
        if manager is None or self._refusal(vllm_config) is not None:
            return 0
        gpu = DEVICES.at(self._device(vllm_config))
        model = vllm_config.model_config
        name = checkpoint_name(self._name(model))
        held = held_by_manager(manager, name, "" if gpu is None else gpu.gpu.device.uuid)
        return at_most(held, post_load.weights_of(model), cast("torch.dtype", model.dtype))

    def _device(self, vllm_config: VllmConfig) -> torch.device:
        device = self.load_config.device or vllm_config.device_config.device
        return torch.device(device or "cpu")

    def _load_plainly(
        self,
        reason: str,
        vllm_config: VllmConfig,
        model_config: ModelConfig,
        prefix: str,
        *,
        share: bool = False,
    ) -> _Loaded:
        """Load with vLLM's own loader of this model; with `share`, share the result."""
        if self.build_elsewhere is not None:
            raise UnsupportedError(f"not while another model runs: {reason}")
        _log.warning("%s: loading without sharing: %s", model_config.model, reason)
        if post_load.other_format(self.load_config.load_format, model_config) is not None:
            self._note_identities(*_weights_files(post_load.weights_of(model_config)))
        with scales_kept():
            model = self._loaded_by_vllm(vllm_config, model_config, prefix)
        name = self._name(model_config)
        report = ModelReport(name=name, rank=vllm_config.parallel_config.rank)
        report.tensors_total = sum(1 for _ in model.parameters())
        dtype = cast("torch.dtype", model_config.dtype)
        report.total_bytes = report.private_bytes = final_bytes(model, dtype)
        report.bytes_materialised = report.total_bytes
        read = self._paths.get(model_config.model)
        _describe_checkpoint(report, read or [post_load.weights_of(model_config)])
        report.skipped = [("<model>", reason)]
        if self._frozen is not None:
            report.frozen_base = self._frozen.to_dict()
        if share:
            self._share_afterwards(model, model_config, report)
        keep_digests(report, {"": model}, self._contents(model_config.model, read))
        return model, report

    def _note_identities(self, *paths: str) -> None:
        """Note the identity of files, before they are read, unless it was noted already."""
        for path in map(Path, paths):
            with suppress(OSError):
                if path not in self._seen and path.is_file():
                    self._seen[path] = FileIdentity.at(path)

    def _contents(self, model: str, read: list[str] | None) -> CheckpointContents | None:
        """Return the tensors of a checkpoint that vLLM has read by itself, if they can be told."""
        algorithm, trust = self.dedup.hash_algorithm, self.dedup.verify == "hint"
        checkout = self._stored(model)
        if self._frozen is not None:
            return None
        if checkout is not None:
            with closing(self._opening(model, trust=trust)) as opening:
                files = [opening.open(Path(checkout.folder, name)) for name in checkout.weights]
                named = chain.from_iterable(file.named() for file in files)
                return CheckpointContents(named, algorithm, trust=trust)
        seen = self._seen if read is None else {p: self._seen.get(p) for p in map(Path, read)}
        if None in seen.values():
            return None
        return CheckpointContents.of_files(
            cast("dict[Path, FileIdentity]", seen), self._began_ns, algorithm, trust=trust
        )

    def _loaded_by_vllm(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str
    ) -> nn.Module:
        loaded: nn.Module
        if self._inner is not None:
            loaded = self._inner.load_model(vllm_config, model_config, prefix)
            return loaded
        other = post_load.other_format(self.load_config.load_format, model_config)
        if other is None:
            loaded = super().load_model(vllm_config, model_config, prefix)
            return loaded
        config = dataclasses.replace(
            self.load_config, load_format=other, model_loader_extra_config={}
        )
        theirs = get_model_loader(config)
        made: nn.Module = theirs.load_model(
            vllm_config=vllm_config, model_config=model_config, prefix=prefix
        )
        return made

    def _share_afterwards(
        self, model: nn.Module, model_config: ModelConfig, report: ModelReport
    ) -> None:
        skipped = report.skipped
        dtype = cast("torch.dtype", model_config.dtype)
        opening = self._opening(model_config.model, trust=False)
        with LoadRun(self.dedup, dtype, opening, report.name) as run:
            post_load.share_loaded(model, run.session, report.total_bytes)
            run.session.ledger.enter(report)
            run.say_not_lent(report)
        report.skipped = skipped + report.skipped

    def _name(self, model_config: ModelConfig) -> str:
        """Return the name by which the user called this model."""
        checkout = self._stored(model_config.model)
        return checkout.url if checkout is not None else str(model_config.model)

    def _load_trusting_hints(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str
    ) -> _Loaded:
        """Load the model, and once more without hints if one of them turned out to be wrong."""
        trust = self.dedup.verify == "hint"
        try:
            return self._load_shared(vllm_config, model_config, prefix, trust_hints=trust)
        except StaleHintError as error:
            _log.warning("%s; loading again without hints", str(error))
        return self._load_shared(vllm_config, model_config, prefix, trust_hints=False)

    def _load_shared(
        self,
        vllm_config: VllmConfig,
        model_config: ModelConfig,
        prefix: str,
        *,
        trust_hints: bool,
    ) -> _Loaded:
        device = self._device(vllm_config)
        dtype = cast("torch.dtype", model_config.dtype)  # vLLM has resolved "auto" by now
        beside = self.build_elsewhere is not None  # another thread computes with another model
        with (
            WITHOUT_FULL_COLLECTIONS,
            nullcontext() if beside else restored_on_failure(vllm_config),
            LoadRun(
                self.dedup,
                dtype,
                self._opening(model_config.model, trust=trust_hints),
                self._name(model_config),
                DEVICES.at(device),
                FrozenLayers(self.dedup, trust=trust_hints) if self._with_base else None,
                apart=load_formats.keeps_addresses(vllm_config),
            ) as run,
            ThreadDtype(dtype) if beside else set_default_torch_dtype(dtype),
            self._finding_once(),
        ):
            loaded = load(
                run,
                vllm_config,
                model_config,
                device,
                create=lambda: versions.create_model(self, vllm_config, model_config, prefix),
                load_weights=lambda model: self._weights_told(model, model_config),
                weights=self._plannable_weights(model_config),
                build_elsewhere=self.build_elsewhere,
            )
            self._largest = run.largest()
            return loaded

    @contextmanager
    def _finding_once(self) -> Iterator[None]:
        """Context manager: while it is active, files that were found are not looked for again."""
        self._prepared = {}
        try:
            yield
        finally:
            self._prepared = None

    def _plannable_weights(self, model_config: ModelConfig) -> Weights | None:
        """Return what yields the checkpoint's tensors, if nothing else decides what is loaded."""
        if self._inner is not None or self._format not in load_formats.DEFAULT:
            return None
        return lambda model: self.get_all_weights(model_config, model)

    def _weights_told(self, model: nn.Module, model_config: ModelConfig) -> bool:
        """Run the model's own loading code; return whether it reported which weights it loaded."""
        self._tracked = False
        self.load_weights(model, model_config)
        return self._tracked


def _weights_files(path: str) -> list[str]:
    """Return the files of the checkpoint at `path`, or [] if it cannot be read."""
    try:
        return [str(file.path) for file in open_checkpoint(path, follow_links=True).files]
    except (TensorDedupError, OSError):
        return []


def _describe_checkpoint(report: ModelReport, paths: list[str]) -> None:
    """Enter the sizes of local files or folders that vLLM read by itself, if they can be read."""
    try:
        # vLLM itself has followed every link.
        read = [open_checkpoint(path, follow_links=True) for path in paths]
    except (TensorDedupError, OSError):
        return
    report.checkpoint_bytes = report.bytes_read = sum(each.nbytes for each in read)
    report.source_tensors_total = sum(each.tensor_count for each in read)
    files = [file for each in read for file in each.files]
    report.header_bytes = sum(file.header.header_bytes for file in files)


def held_by_manager(where: str | os.PathLike[str], checkpoint: str, device: str = "") -> int:
    """Return the bytes of a checkpoint that a memory manager has in memory, or 0 if none answers.

    `where` is the path of the manager's socket, or "auto" for the default path. If `device` is the
    UUID of a GPU, the manager of that GPU is asked instead. No manager is started.

    Only tensors listed under the name `checkpoint` count. For a fine-tune that was never loaded,
    the result is 0 even if its base is in memory.
    """
    try:
        beside = socket_path(None if os.fspath(where) == AUTO else where)
        with Admin(device_socket(beside, device)) as admin:
            rows = admin.overview(residents=False).checkpoints
    except MemoryManagerError:
        return 0
    return sum(row.nbytes for row in rows if row.name == checkpoint)


def at_most(held: int, path: str, dtype: torch.dtype) -> int:
    """Return `held`, or the size of the checkpoint at `path` loaded as `dtype`, if that is less.

    `held` is the number of bytes that a memory manager holds of the checkpoint. It may be too high,
    because it may include copies in another dtype. If the checkpoint cannot be read, `held` is
    returned.
    """
    try:
        tensors = open_checkpoint(path, follow_links=True).tensors()
        most = sum(
            math.prod(spec.shape) * dtype.itemsize if spec.dtype in _CAST else spec.nbytes
            for _, _, spec in tensors
        )
    except (TensorDedupError, OSError):
        return held
    return min(held, most)
