"""Keep shared tensors shared when a module is moved or cast: `.to(...)`, `.half()`, `.cuda()`.

A resident is a tensor that lies in memory once for several models. A conversion by torch alone
would give each model a copy of its own. With this module:

* On a GPU that can map memory, the first model makes a resident of each tensor, and later models
  map it read-only (`tensor_dedup.patches.huggingface.gpu_conversions`).
* On other devices, later models use the copy that the first model made
  (`tensor_dedup.loader.unsharing.device_copies`).
* A cast in host memory makes a private tensor, which is then hashed and shared. The tensor that it
  was cast from is recorded, so that later models need neither a cast nor a hash.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from tensor_dedup.loader import report
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.cuda.manager_residents import device_manager_residents
from tensor_dedup.loader.post_load.batch import DedupContext
from tensor_dedup.loader.post_load.dedup import ModuleDedup
from tensor_dedup.loader.post_load.equal_untied import root_module
from tensor_dedup.loader.residents.compare import is_forgeable
from tensor_dedup.loader.residents.mappings import DEVICE_MAPPINGS, MAPPINGS
from tensor_dedup.loader.residents.param_data import number_of, param_data
from tensor_dedup.loader.residents.provider import host_provider_for
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import ReplicaKey, cast_key
from tensor_dedup.loader.residents.slab import SharedMemoryError
from tensor_dedup.loader.torch_dtypes import torch_dtype
from tensor_dedup.loader.unsharing.device_copies import COPIES
from tensor_dedup.loader.unsharing.lookup import is_mapped, is_on_gpu, replica_keys_of, residents_of
from tensor_dedup.loader.unsharing.private import map_shared, read_only
from tensor_dedup.patches.huggingface import in_place_writers as writers
from tensor_dedup.patches.huggingface.gpu_conversions import GpuConversion, PendingTransfer
from tensor_dedup.seams import Seam, usable

if TYPE_CHECKING:
    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.loader.residents.resident import Resident

APPLY: Final = Seam(
    "torch.nn.modules.module:Module._apply",
    "a module that is converted gets private weights",
    "every conversion of a module's parameters goes through it",
    "(self, fn, recurse=True)",
    versions=("torch 2.13",),
)
# The functions of torch that give a parameter the same values in another form. Others move
# memory to where it must stay (share_memory), or have no values (to_empty).
_TYPES: Final = ("float", "double", "half", "bfloat16")
_DEVICES: Final = ("cpu", "cuda", "xpu", "mtia", "ipu")
_CONVERSIONS: Final = frozenset(
    [
        "Module.to.<locals>.convert",
        *(f"Module.{name}.<locals>.<lambda>" for name in (*_TYPES, *_DEVICES)),
    ]
)
# How many replicas of one key are tried on a device before a tensor stays private there.
_MAX_REPLICAS: Final = 16

_WRITTEN: Final = (
    "a parameter on %s was written in place, in memory that it may share (of %s): other models of "
    "this process see the write; call unshare(model) before writing"
)
_log = logging.getLogger(__name__)

Function = Callable[[torch.Tensor], torch.Tensor]
_Form = tuple[torch.device, torch.dtype]
Guard = Callable[[], AbstractContextManager[bool]]


class _Conversions(threading.local):
    """Whether a conversion is in progress in this thread; conversions of its parts belong to it."""

    busy = False


class _Settings:
    """The configuration under which conversions share, which is that of the latest load."""

    config: TensorDedupConfig | None = None


_conversions: Final = _Conversions()
_settings: Final = _Settings()
# The resident that a cast in host memory became, by what was cast, to what.
_casts: Final[WeakValueDictionary[ReplicaKey, Resident]] = WeakValueDictionary()
# The residents that models offloaded after each use will come back to: kept in host memory
# meanwhile, so that coming back needs neither a copy nor a hash.
_kept: Final[WeakKeyDictionary[nn.Module, set[Resident]]] = WeakKeyDictionary()
# The storage that parameters on devices got, and how often they had been written then.
_versions: Final[MutableMapping[torch.Tensor, tuple[int, int]]] = WeakTensorKeyDictionary()


def watch(config: TensorDedupConfig, alone: Guard) -> None:
    """Wrap `nn.Module._apply`, which all conversions call, to keep shared tensors shared.

    `config` is used to share the tensors that a conversion makes. `alone()` returns a context
    manager that keeps other threads from converting modules. Its value is False while this thread
    loads a model, because the load shares the tensors itself.

    If the wrapper exists already, its `config` is replaced, but not its `alone`. Once nothing is
    shared any more, the next conversion removes the wrapper.
    """
    _settings.config = config
    if read_only() or len(DEVICE_MAPPINGS):
        writers.install()
    if not usable(APPLY) or hasattr(nn.Module._apply, "_tensor_dedup"):
        return
    original: Callable[..., Any] = nn.Module._apply

    @functools.wraps(original)
    def _apply(self: nn.Module, fn: Function, recurse: bool = True) -> Any:
        nothing_shared = not (len(MAPPINGS) or len(COPIES) or len(DEVICE_MAPPINGS))
        if nothing_shared and nn.Module._apply is _apply:
            nn.Module._apply = original  # type: ignore[method-assign]
        if _conversions.busy or getattr(fn, "__qualname__", "") not in _CONVERSIONS:
            return original(self, fn, recurse)
        parameters = _shared(self)
        if not parameters:
            return original(self, fn, recurse)
        with alone() as nothing_loads:
            conversion = Conversion(self, parameters, fn)
            conversion.prepare(parameters)
            result = _convert(conversion, lambda: original(self, conversion, recurse))
            if nothing_loads:
                _share_again(self, parameters)
                conversion.remember(parameters)
            _note_versions(self.parameters())  # some may be other objects by now
        return result

    _apply._tensor_dedup = True  # type: ignore[attr-defined]
    nn.Module._apply = _apply  # type: ignore[method-assign]


def _shared(model: nn.Module) -> list[nn.Parameter]:
    # Layerwise casting converts before and after every use of a layer: hashing would never end.
    if hasattr(model, "_diffusers_hook"):
        return []
    return [
        each
        for each in model.parameters()
        if is_mapped(each) or is_on_gpu(each) or COPIES.holds(param_data(each))
    ]


def _convert(conversion: Conversion, convert: Callable[[], Any]) -> Any:
    _conversions.busy = True
    try:
        result = convert()
        conversion.finish()
    finally:
        _conversions.busy = False
    return result


def _share_again(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    private = {id(p) for p in parameters if p.device.type == "cpu" and not is_mapped(p)}
    if private:
        config = _settings.config
        assert config is not None
        provider = host_provider_for(
            config.memory_manager, type(model).__name__, keep_alignment=True
        )
        ModuleDedup(model, DedupContext(config, provider)).share_again(private)


class Conversion:
    """A conversion of one model, such as `.to(...)` or `.half()`.

    torch calls this object for each tensor, in place of its own converting function `fn`. If
    another model has converted a shared tensor in the same way, the result of that conversion is
    used. All other tensors are converted by `fn`. Use the object in one thread only.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], fn: Function) -> None:
        self._model = model
        self._fn = fn
        # Forgotten when it is not offloaded any more.
        kept = _kept.pop(model, set())
        self._comes_back_to = kept if hasattr(model, "_hf_hook") else None
        self._known = _followed(each for each in parameters if type(each) is nn.Parameter)
        self._targets: dict[_Form, _Form] = {}
        # In whose queues there may still be work of this conversion.
        self._busy = {each.device for each in parameters}
        # Equal tensors of one model stay apart, wherever they are.
        whole = list(root_module(model).parameters())
        self._in_use = {_storage(each) for each in whole if COPIES.holds(param_data(each))}
        self._residents = {id(resident) for _, resident in residents_of(whole).values()}
        self._on_gpus = [k for each in whole if (k := DEVICES.known(param_data(each))) is not None]
        self._ready: dict[int, torch.Tensor] = {}
        self._casts: dict[int, ReplicaKey] = {}
        closure = inspect.getclosurevars(fn).nonlocals if inspect.isfunction(fn) else {}
        self._format = closure.get("convert_to_format")

    def prepare(self, parameters: Iterable[nn.Parameter]) -> None:
        """Transfer all shared tensors in `parameters` that will be moved to a GPU.

        Call it before the conversion begins. The conversion then uses the transferred tensors.
        """
        pending: dict[SharedGpu, list[PendingTransfer]] = {}
        for each in parameters:
            wanted = self._wanted(each)
            gpu = None if wanted is None else DEVICES.at(wanted[1])
            if wanted is None or gpu is None or gpu.holds(each, wanted[0].key):
                continue
            pending.setdefault(gpu, []).append(
                PendingTransfer(each, wanted[0], self._known[id(each)])
            )
            self._keep(self._known[id(each)])
        for gpu, items in pending.items():
            self._transfer(gpu, items)

    def _transfer(self, gpu: SharedGpu, pending: Sequence[PendingTransfer]) -> None:
        config = _settings.config
        assert config is not None
        writers.install()
        manager = device_manager_residents(
            config.memory_manager, type(self._model).__name__, gpu.gpu
        )
        views = gpu.views_of(root_module(self._model))
        conversion = GpuConversion(gpu, views, manager, self._on_gpus)
        self._ready |= conversion.transfer(pending, self._fn)
        why = conversion.failed or manager.not_lent
        if why is not None:
            report.note(str(gpu.device), why)

    def _wanted(self, tensor: torch.Tensor) -> tuple[ReplicaKey, torch.device] | None:
        """Return what a tensor becomes, and where, or None if it goes through the function."""
        known = self._known.get(id(tensor))
        reformatted = self._format is not None and tensor.dim() in (4, 5)
        if known is None or reformatted:
            return None
        device, dtype = self._target(tensor)
        key = cast_key(known.key, dtype)
        return None if key is None else (ReplicaKey(key, known.copy), device)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the converted tensor: a shared one if it exists, otherwise the result of `fn`."""
        ready = self._ready.pop(id(tensor), None)
        if ready is not None:
            return ready
        found = self._wanted(tensor)
        if found is None:
            return self._fn(tensor)
        wanted, device = found
        if (device, torch_dtype(wanted.key.dtype)) == (tensor.device, tensor.dtype):
            return self._fn(tensor)
        if tensor.is_meta and device.type != "meta":
            return self._fn(tensor)  # as torch says it: there are no values
        if device.type == "cpu":
            return self._here(tensor, wanted)
        self._keep(self._known[id(tensor)])
        why_not = DEVICES.why_not(device)
        if why_not is not None:
            report.note(str(device), why_not)
        return self._there(tensor, wanted, device)

    def _keep(self, known: ReplicaKey) -> None:
        """Keep the residents in host memory that an offloaded model comes back to."""
        if self._comes_back_to is not None:
            resident = registry.lookup(*known)
            self._comes_back_to.update(() if resident is None else (resident,))

    def _target(self, tensor: torch.Tensor) -> _Form:
        """Return the device and dtype that the function gives such a tensor."""
        form = tensor.device, tensor.dtype  # a model may be on several devices
        found = self._targets.get(form)
        if found is None:
            probe = self._fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            found = self._targets[form] = probe.device, probe.dtype
        return found

    def _here(self, tensor: torch.Tensor, known: ReplicaKey) -> torch.Tensor:
        resident = _casts.get(known) or registry.lookup(known.key, known.copy)
        if resident is not None and id(resident) not in self._residents:
            self._residents.add(id(resident))
            with suppress(SharedMemoryError):  # then it is this model's alone
                return map_shared(resident)
        self._casts[id(tensor)] = known
        return self._fn(tensor)

    def _there(self, tensor: torch.Tensor, known: ReplicaKey, device: torch.device) -> torch.Tensor:
        for replica in islice(chain([known.copy], count()), _MAX_REPLICAS):
            wanted = ReplicaKey(known.key, replica)
            found = COPIES.lookup(wanted, device)
            if found is None:
                return self._make(tensor, wanted)
            if _storage(found) not in self._in_use:
                self._in_use.add(_storage(found))
                _use_on_this_stream(found)
                return found
        return self._fn(tensor)

    def _make(self, tensor: torch.Tensor, known: ReplicaKey) -> torch.Tensor:
        made = self._fn(tensor)
        if COPIES.publish(known, made.detach()):
            self._in_use.add(_storage(made))
            self._busy.add(made.device)
            writers.install()
        return made

    def finish(self) -> None:
        """Wait until the devices have finished their work for this conversion.

        Call this after torch has passed all tensors to this object. After the wait, other models
        may use the converted tensors, and threads may hash them.

        If accelerate offloads the model, the model's residents in host memory are kept alive. The
        model can then return to them without a copy or a hash.
        """
        for device in self._busy:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(device)
        if self._comes_back_to:
            _kept[self._model] = self._comes_back_to

    def remember(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record the residents of those `parameters` that this conversion has cast.

        Later casts of the same tensors then use these residents.
        """
        cast = (each for each in parameters if id(each) in self._casts)
        for number, (_, resident) in residents_of(cast).items():
            _casts[self._casts[number]] = resident


def _followed(parameters: Iterable[nn.Parameter]) -> dict[int, ReplicaKey]:
    """Return, by id, the keys of parameters whose key alone determines what they become.

    It does not where hits are compared: what was made of another resident with the same digest may
    have other bytes. Casts are hashed then, and copies on devices stay private.
    """
    if _settings.config is not None and _settings.config.verifies_bytes:
        return {}
    followed = {}
    for parameter, known in _with_known(parameters):
        if is_forgeable(known.key.digest):
            continue
        storage, version = _state(parameter)
        noted = _versions.get(parameter)
        if noted is not None and noted[0] == storage and noted[1] != version:
            _log.warning(_WRITTEN, parameter.device, known.key.digest)
        else:
            followed[id(parameter)] = known
    return followed


def _with_known(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, ReplicaKey]]:
    every = list(parameters)
    known = replica_keys_of(every)
    return ((each, known[id(each)]) for each in every if id(each) in known)


def _note_versions(parameters: Iterable[nn.Parameter]) -> None:
    for each in parameters:
        if COPIES.holds(param_data(each)):
            noted, now = _versions.get(each), _state(each)
            if noted is None or noted[0] != now[0]:
                _versions[each] = now
        else:
            _versions.pop(each, None)


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    """Return the storage, and how often torch has seen it written through this object."""
    return _storage(parameter), 0 if parameter.is_inference() else parameter._version


def _use_on_this_stream(tensor: torch.Tensor) -> None:
    # The allocator must not hand the memory out again before what runs on this stream is done.
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    return number_of(param_data(tensor).untyped_storage())
