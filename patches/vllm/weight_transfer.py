"""Receive the steps of a training: vLLM's weight transfer engine `tensor_dedup`.

    llm = LLM("store://policy@latest", tensor_dedup={"store": "s3://bucket/policy"},
              weight_transfer_config={"backend": "tensor_dedup"})
    llm.update_weights({"step": "latest"})

A step is loaded beside the model that runs, by the ordinary loader, so everything that models share
is shared. The running model is not touched until `finish_weight_update`, which rebinds its tensors
(`tensor_dedup.loader.takeover`) and cannot fail half-way. Therefore an engine is at one step or at
another at all times, and if anything fails, it stays where it was. On a GPU, captured graphs would
not see that tensors were rebound, so without `enforce_eager` tensors there keep their addresses
(`tensor_dedup.loader.cuda.exchange`).

vLLM looks this module up by name in its registry of weight transfer engines.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import logging
import multiprocessing
import os
import queue
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from tensor_dedup.errors import ConfigError, TensorDedupError, UnsupportedError
from tensor_dedup.loader.checkpoint_io import stub_folder
from tensor_dedup.loader.checkpoint_io.stub_folder import Checkout, stored_in
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.load_lock import LOAD_LOCK
from tensor_dedup.loader.process_state import release_memory
from tensor_dedup.loader.residents.param_data import param_data
from tensor_dedup.loader.takeover import Takeover
from tensor_dedup.memory_manager.client import AUTO
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.client.names import checkpoint_name
from tensor_dedup.memory_manager.errors import MemoryManagerError
from tensor_dedup.memory_manager.protocol.paths import device_socket, socket_path
from tensor_dedup.patches.vllm.load_formats import KEY, LOAD_FORMAT, split
from tensor_dedup.patches.vllm.seams import why_not
from tensor_dedup.patches.vllm.sleep import is_asleep
from tensor_dedup.store.format.names import run_of_latest
from tensor_dedup.store.steps.runs import parse_step_name
from tensor_dedup.types import STORE_SCHEME

if TYPE_CHECKING:
    from vllm.config import VllmConfig, WeightTransferConfig

    from tensor_dedup.loader.cuda.gpu import DeviceMapping
    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.patches.vllm.run import BuildElsewhere

_log = logging.getLogger(__name__)

_NICE: Final = 5
_BUILT_WITHIN_S: Final = 60.0
# A former step is freed when all leases are given back: how soon and how often it is tried, and for
# how long, which another engine that still runs the step may exceed.
_FREED_AFTER_S: Final = 0.1
_FREED_EVERY_S: Final = 5.0
_FREED_WITHIN_S: Final = 60.0
# Of a checkpoint's config.json: what does not say how the model computes.
_NOT_COMPARED: Final = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})
# Settings of an engine that may lead to answers with other weights than its own, and why.
_REFUSED: Final = {
    "lora_config": "the update would not reach all weights",
    "speculative_config": "the update would not reach all weights",
    "kv_transfer_config": "a connector may bring keys and values that another step has computed",
    "ec_transfer_config": "a connector may bring what the encoder of another step has computed",
}


@dataclass
class StepInitInfo:
    """There is nothing to agree on: steps come from a store."""


@dataclass
class StepUpdateInfo:
    """The checkpoint to change to: `step` of the run that was loaded, or `url`, a `store://NAME`.

    `step` is the number of a step, or "latest" for the step that was saved last.
    """

    step: int | str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        """Check that exactly one of the two is given, and is valid.

        Raises:
            ValueError: It is not.
        """
        if (self.step is None) is (self.url is None):
            raise ValueError('give either "step" or "url"')
        if self.url is not None and not self.url.startswith(STORE_SCHEME):
            raise ValueError(f"url={self.url!r} is not {STORE_SCHEME}NAME")


class StepTransferEngine(WeightTransferEngine[Any, Any]):
    """A weight transfer engine that changes the model to another step of its run.

    `update_weights` loads the step beside the running model, and `finish_weight_update` changes to
    it. vLLM calls the methods in the thread in which the model runs.
    """

    init_info_cls = StepInitInfo
    update_info_cls = StepUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: nn.Module,
    ) -> None:
        """Prepare an engine for `model`, which was loaded with `tensor_dedup`.

        Raises:
            ConfigError: The model was loaded without `tensor_dedup`, or is not from a store.
            UnsupportedError: Something else changes the weights or modules of the model, or brings
                what other weights have computed.
        """
        super().__init__(config, vllm_config, device, model)
        if (reason := why_not("steps")) is not None:
            raise UnsupportedError(reason)
        if str(vllm_config.load_config.load_format) != LOAD_FORMAT:
            raise ConfigError(
                'the weight transfer backend "tensor_dedup" needs an engine that was loaded with '
                "tensor_dedup=...; add the argument",
                setting="weight_transfer_config",
            )
        for name, reason in _REFUSED.items():
            if getattr(vllm_config, name, None) is not None:
                raise _refused(name, reason)
        # Of replicas, that is of models without experts, each has a configuration of one.
        if vllm_config.parallel_config.data_parallel_size > 1:
            raise _refused("data_parallel_size", "one answer would use experts of two steps")
        self._gpu = DEVICES.at(device)
        if device.type != "cpu" and self._gpu is None and not self._is_eager():
            raise UnsupportedError(
                "an engine that follows steps moves its weights here, and captured graphs would "
                f"go on reading the former ones ({DEVICES.why_not(device)}); start it with "
                "enforce_eager=True",
                setting="enforce_eager",
            )
        if not self._is_eager() and any(each.opener.whole_only for each in self._mappings()):
            raise UnsupportedError(
                "an engine that follows steps keeps the addresses that captured graphs know, which "
                "memory of the backend `ipc` cannot; use the backend `vmm`, or start the engine "
                "with enforce_eager=True",
                setting="enforce_eager",
            )
        self._preparation: Preparation | None = None
        self._takeover: Takeover | None = None
        self._checkout: Checkout | None = None
        # Of memory managers, by their sockets: the URLs of earlier steps that they may have.
        self._formers: defaultdict[Path, set[str]] = defaultdict(set)
        if multiprocessing.parent_process() is not None:
            # Each update makes many objects, so some of them lead to a collection of the oldest
            # generation, for which answers would wait (0.5 s with 0.8 million objects). vLLM
            # freezes the objects of an engine's process too, but not those of its workers'.
            gc.collect()
            gc.freeze()

    def init_transfer_engine(self, init_info: StepInitInfo) -> None:
        """Do nothing: there is no connection to a trainer."""

    def start_weight_update(self) -> None:
        """Begin an update. What an earlier one has loaded, and not changed to, is dropped."""
        self._forget_loaded()

    def prepare(self, update_info: dict[str, Any]) -> None:
        """Begin to load a step in the background, for the next `update_weights` with it.

        The model runs meanwhile. Call `is_prepared` until it returns True. If the step cannot be
        loaded, `update_weights` raises the error. `update_info` is that of `update_weights`.

        Raises:
            ValueError: `update_info` is invalid.
            UnsupportedError: The engine sleeps.
        """
        update = self.parse_update_info(update_info)
        self._require_awake()
        self._forget_loaded()
        if self._preparation is None or self._preparation.update != update:
            if self._preparation is not None:
                self._preparation.cancel()
            self._preparation = Preparation(self.vllm_config, update, self.device)

    def is_prepared(self) -> bool:
        """Return whether the step is loaded, or could not be, which `update_weights` then says.

        The modules of the step's model are built in this call, by the thread of the model.
        """
        return self._preparation is None or self._preparation.is_done()

    def abandon(self) -> None:
        """End an update that failed: drop what was loaded, or is being loaded, for it."""
        if self._preparation is not None:
            self._preparation.cancel()
        self._preparation = self._takeover = self._checkout = None
        gc.collect()  # modules and parameters refer to each other

    def _forget_loaded(self) -> None:
        if self._takeover is not None:
            self._takeover = self._checkout = None
            gc.collect()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a step beside the running model, which stays as it is.

        `update_info` has the fields of StepUpdateInfo.

        Raises:
            ValueError: `update_info` is invalid.
            StoreError: The store does not have the step, or it is damaged.
            UnsupportedError: The step differs from the running model in more than its weights, or
                the engine sleeps.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StepUpdateInfo) -> None:
        """Load a step; the same as `update_weights`, with the fields in a StepUpdateInfo."""
        self._require_awake()
        self._forget_loaded()
        prepared, self._preparation = self._preparation, None
        loaded = None
        try:
            if prepared is not None and prepared.update == update_info:
                loaded = prepared.result()
            elif prepared is not None:
                # Or this load would wait for that one, which waits for this thread.
                prepared.cancel()
            if loaded is None:
                loaded = load_beside(self.vllm_config, update_info)
            takeover = Takeover.plan(self.model, loaded.model, self._keep_addresses())
        except BaseException as error:
            prepared = loaded = None
            _forget_begun(error)
            raise
        self._takeover, self._checkout = takeover, loaded.checkout

    def finish_weight_update(self) -> None:
        """Change to the step that was loaded.

        Raises:
            UnsupportedError: No step was loaded since `start_weight_update`, or the engine sleeps.
            BackendError: There is no room on the GPU for what must be copied. The engine stays at
                its step.
            LostWeightsError: The driver of the GPU fails. The engine must be ended.
        """
        takeover, checkout = self._takeover, self._checkout
        if takeover is None or checkout is None:
            raise UnsupportedError("no step was loaded: call update_weights before")
        self._require_awake()
        self._takeover = self._checkout = None
        load_config = self.vllm_config.load_config
        former = load_config.model_loader_extra_config[KEY]
        manager, held = split(former)[0].memory_manager, stored_in(former)
        extra = _extra(load_config, checkout)

        def note() -> None:  # a reload reads this step
            load_config.model_loader_extra_config = extra
            self.vllm_config.model_config.model = checkout.folder

        sockets = _sockets(os.fspath(manager) if manager else None, self._gpu)
        # Before, for what arrives during the change is raised after it.
        if held is not None:
            for socket in sockets:
                self._formers[socket].add(held.url)
        try:
            takeover.apply(note)
        finally:
            takeover = None  # or what it refers to would stay mapped
            if load_config.model_loader_extra_config is extra:
                self._free_former(sockets)

    def _free_former(self, sockets: list[Path]) -> None:
        """Free the former step beside the model, which goes on.

        Without a thread, as where a limit is reached, memory is freed later.
        """
        name, load_config = "tensor-dedup-former-step", self.vllm_config.load_config
        copied = self._keep_addresses() is not None
        with suppress(RuntimeError):
            threading.Thread(
                target=_return_memory, args=[self._gpu], name=name, daemon=True
            ).start()
            for number, socket in enumerate(sockets):  # the second is the GPU's
                gpu = self._gpu if number else None
                what = socket, self._formers[socket], load_config, gpu, copied and bool(number)
                threading.Thread(target=_evict_formers, args=what, name=name, daemon=True).start()

    def _is_eager(self) -> bool:
        """Return whether no graphs are captured, which would know the addresses of weights."""
        return bool(self.vllm_config.model_config.enforce_eager)

    def _keep_addresses(self) -> SharedGpu | None:
        """Return the GPU on which the model's tensors keep their addresses, if they do."""
        return None if self._is_eager() else self._gpu

    def _require_awake(self) -> None:
        """Check that no weights of the model are unmapped: a wake-up restores the former step's."""
        if is_asleep(self.model) or any(each.asleep for each in self._mappings()):
            raise UnsupportedError("the engine sleeps; call wake_up before update_weights")

    def _mappings(self) -> list[DeviceMapping]:
        """Return what is mapped behind the parameters, if the GPU's memory can be shared."""
        if self._gpu is None:
            return []
        places = [param_data(each).data_ptr() for each in self.model.parameters()]
        return [each for each in self._gpu.gpu.mappings_at(places) if each is not None]

    def shutdown(self) -> None:
        """Drop what was loaded and not changed to."""
        if self._preparation is not None or self._takeover is not None:
            self.abandon()


def _refused(name: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f'the weight transfer backend "tensor_dedup" does not combine with {name}: {reason}; drop '
        "one of the two",
        setting=name,
    )


def _sockets(manager: str | None, gpu: SharedGpu | None) -> list[Path]:
    """Return the sockets of the managers that may have tensors of a step.

    `manager` is its path or "auto". With a GPU, they are that of host memory, where sleep puts
    copies, and that of the GPU.
    """
    if manager is None:
        return []
    try:
        socket = socket_path(None if manager == AUTO else manager)
    except MemoryManagerError:
        return []  # nor had the load a manager
    return [socket] if gpu is None else [socket, device_socket(socket, gpu.gpu.device.uuid)]


def _return_memory(gpu: SharedGpu | None) -> None:
    """Return the memory of a former step to the system, and to the GPU."""
    release_memory()  # packed layers lay in the heap, which would stay as large as two steps
    _reap(gpu)


def _reap(gpu: SharedGpu | None) -> None:
    if gpu is not None:
        try:
            gpu.gpu.reap(wait=True)  # what is mapped is leased
        except MemoryManagerError as error:
            _log.debug("a former step stays mapped for now: %s", str(error))


def _evict_formers(
    socket: Path,
    formers: set[str],
    load_config: Any,
    gpu: SharedGpu | None = None,
    copied: bool = False,
) -> None:
    """Let the memory manager at `socket` free former steps.

    `formers` has the URLs of earlier steps. If another engine runs one of them, the manager keeps
    it until that one changes, too, and lets go. What a step has in common with later ones is kept
    until they change it. The URLs of steps of which nothing is left, and that of the step in
    `load_config`, which runs, are removed. If tensors of this step were `copied`, nobody may use
    what was loaded, and it is freed as well. `gpu` is the one whose memory the manager lends.
    """

    def running() -> str:
        now = stored_in(load_config.model_loader_extra_config[KEY])
        return "" if now is None else now.url

    wait, until, step = _FREED_AFTER_S, time.monotonic() + _FREED_WITHIN_S, running()
    try:
        with Admin(socket) as admin:
            # Leases are given back one by one, and on a busy host it takes a while.
            while time.monotonic() < until:
                formers.discard(now := running())  # to which the engine may have come back
                # Which leases are still to come back is not known, so while anything is there.
                also = {now} if copied and now == step else set[str]()
                if not formers | also:
                    return
                _reap(gpu)  # again, for what died since
                for url in formers | also:
                    admin.evict(checkpoint_name(url))
                rows = admin.overview(residents=False).checkpoints
                left = {row.name for row in rows if not row.pinned}
                formers -= {url for url in list(formers) if checkpoint_name(url) not in left}
                copied = copied and checkpoint_name(now) in left
                time.sleep(wait)
                wait = min(2 * wait, _FREED_EVERY_S)
    except MemoryManagerError as error:
        _log.debug("a former step is not freed: %s", str(error))


class LoadedStep(NamedTuple):
    """A step that was loaded: the stored checkpoint, and the model with its weights."""

    checkout: Checkout
    model: nn.Module


def _find(vllm_config: VllmConfig, update: StepUpdateInfo) -> Checkout:
    """Find a step in the store, or pull it, and check that it is the model that runs."""
    extra: Mapping[str, Any] = vllm_config.load_config.model_loader_extra_config
    config, _ = split(extra[KEY])
    url = update.url if update.url is not None else step_url(extra, update.step)
    if run_of_latest(url.removeprefix(STORE_SCHEME)) is not None:
        raise ConfigError(
            f"{url} may be one step to one worker and another to the next; give the number of a "
            "step, or call the engine's update_weights, which finds it out",
            url=url,
        )
    checkout = stub_folder.resolve(url, config.store_folder, config.remote)
    now, then = (_config_of(each) for each in (vllm_config.model_config.model, checkout.folder))
    odd = {key for key in now.keys() | then.keys() if now.get(key) != then.get(key)}
    if odd - _NOT_COMPARED:
        key = min(odd - _NOT_COMPARED)
        raise UnsupportedError(
            f"{checkout.url} is another model than the one that runs: in its config.json {key} is "
            f"{then.get(key)!r}, not {now.get(key)!r}; start an engine with it",
            url=checkout.url,
        )
    return checkout


def step_url(extra: Mapping[str, Any], step: int | str | None) -> str:
    """Return the `store://` URL of another step of the run that an engine has loaded.

    `extra` is the engine's `model_loader_extra_config`.

    Raises:
        ConfigError: The engine's model is no step of a run.
    """
    checkout = stored_in(extra.get(KEY))
    loaded = None if checkout is None else parse_step_name(checkout.name)
    if loaded is None:
        raise ConfigError(
            f"the engine's model is no step of a run, so step={step!r} says too little; give "
            f'{{"url": "{STORE_SCHEME}RUN@STEP"}}',
            step=step,
        )
    return f"{STORE_SCHEME}{loaded.run}@{step}"


def _config_of(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "config.json").read_bytes())
    return found


def _extra(load_config: Any, checkout: Checkout) -> dict[str, Any]:
    extra: Mapping[str, Any] = load_config.model_loader_extra_config
    return {**extra, KEY: {**extra[KEY], "stored": checkout.to_dict()}}


class Preparation:
    """A load in the background, in a thread of its own, beside the model that runs.

    The thread of the model must call `is_done` again and again, because it builds the modules, or
    `cancel`.
    """

    def __init__(
        self, vllm_config: VllmConfig, update: StepUpdateInfo, device: torch.device
    ) -> None:
        """Begin to load a step for the engine with this configuration, onto its `device`."""
        self.update = update
        self._vllm_config = vllm_config
        self._device = device
        self._builds: queue.SimpleQueue[tuple[Callable[[], nn.Module], Future[nn.Module]]]
        self._builds = queue.SimpleQueue()
        self._result: Future[LoadedStep] = Future()
        self._cancelled = False
        self._ending = threading.Lock()
        # A daemon: a process that ends does not wait for weights that nobody will use.
        threading.Thread(target=self._run, name="tensor-dedup-step", daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            # Of this thread alone, and those that it starts: answers come first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            if self._device.type != "cpu":
                # A thread begins with the first GPU, whichever the engine runs on.
                torch.accelerator.set_device_index(self._device)
            made = load_beside(self._vllm_config, self.update, self._build_elsewhere)
        except BaseException as error:  # noqa: BLE001  # for the thread that asks
            _forget_begun(error)
            self._result.set_exception(error)
            return
        with self._ending:
            if not self._cancelled:
                self._result.set_result(made)
                return
        del made
        gc.collect()

    def _build_elsewhere(self, build: Callable[[], nn.Module]) -> nn.Module:
        built: Future[nn.Module] = Future()
        self._builds.put((build, built))
        if self._cancelled:
            self._refuse()
        try:
            return built.result(_BUILT_WITHIN_S)
        except TimeoutError:
            if built.cancel():  # the engine has gone, and with it who asks
                raise
            return built.result()  # it is being built

    def cancel(self) -> None:
        """Give the load up: its thread ends by itself, and drops what it has loaded."""
        with self._ending:
            self._cancelled = True
        self._refuse()

    def _refuse(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._builds.get_nowait()[1].cancel()

    def is_done(self) -> bool:
        """Build what is to be built, and return whether the load has ended."""
        with suppress(queue.Empty):
            build, built = self._builds.get_nowait()
            if built.set_running_or_notify_cancel():
                try:
                    built.set_result(_built(self._vllm_config, build, self._device))
                except BaseException as error:  # noqa: BLE001  # for the thread that loads
                    built.set_exception(error)
        return self._result.done()

    def result(self) -> LoadedStep | None:
        """Wait for the end of the load, and return what was loaded.

        Return None if the step may be loaded while the model does not run.

        Raises:
            TensorDedupError: The step cannot be loaded.
        """
        while not self.is_done():
            time.sleep(0.001)
        error = self._result.exception()
        if error is None:
            return self._result.result()
        if isinstance(error, TensorDedupError) and not isinstance(error, UnsupportedError):
            raise error  # again, it would fail while nothing is answered
        _log.warning("a step could not be loaded while the model runs: %s", str(error))
        return None


def _forget_begun(error: BaseException) -> None:
    """Let go of a model that was begun when `error` was raised. Its frames hold it."""
    held: list[BaseException | None] = [error]
    while held:
        each = held.pop()
        if each is not None:
            traceback.clear_frames(each.__traceback__)
            held += [each.__cause__, each.__context__]
    gc.collect()  # modules and parameters refer to each other


def _built(
    vllm_config: VllmConfig, build: Callable[[], nn.Module], device: torch.device
) -> nn.Module:
    """Call `build` with the settings of the process that constructors need."""
    dtype = cast("torch.dtype", vllm_config.model_config.dtype)
    # Constructors fill what the checkpoint then overwrites; samplers draw from the same generators.
    generators = (
        torch.random.fork_rng(devices=[])
        if device.type == "cpu"
        else torch.random.fork_rng(devices=[device], device_type=device.type)
    )
    with set_default_torch_dtype(dtype), generators:
        return build()


def load_beside(
    vllm_config: VllmConfig, update: StepUpdateInfo, build_elsewhere: BuildElsewhere | None = None
) -> LoadedStep:
    """Load a step as another model of the engine with this configuration.

    With `build_elsewhere`, this thread loads while another one runs the engine's model. The
    function then calls its argument, which builds the modules, in that thread. The configuration
    is left as it is.

    Raises:
        StoreError: The store does not have the step, or it is damaged.
        UnsupportedError: The step is of another model.
    """
    checkout = _find(vllm_config, update)
    other = copy.copy(vllm_config)
    # Layers enter themselves there under their names, of which there can be one each.
    other.compilation_config = copy.copy(vllm_config.compilation_config)
    other.compilation_config.static_forward_context = {}
    other.compilation_config.static_all_moe_layers = []
    other.compilation_config.enabled_custom_ops = Counter()
    other.compilation_config.disabled_custom_ops = Counter()
    other.model_config = copy.copy(vllm_config.model_config)
    other.model_config.model = checkout.folder
    other.load_config = dataclasses.replace(
        vllm_config.load_config,
        model_loader_extra_config=_extra(vllm_config.load_config, checkout),
    )
    loader: Any = get_model_loader(other.load_config)
    loader.build_elsewhere = build_elsewhere
    try:
        # For the whole process: no other load may be under way. What the engine's thread does
        # meanwhile does not look at it, or finds there what it would set.
        with LOAD_LOCK, set_current_vllm_config(other):
            made: nn.Module = loader.load_model(vllm_config=other, model_config=other.model_config)
            return LoadedStep(checkout, made)
    finally:
        other.compilation_config.static_forward_context.clear()
