"""Freeze layers of a model during training so that their weights stay bit-identical.

    from tensor_dedup.integrations import freeze

    frozen = freeze(model, layers="0-5,*embed*")
    ...  # train
    frozen.check()

Layers that several fine-tunes of one base leave unchanged are held once, in memory and in a store.
A layer that differs in a single bit is not shared as a whole.
"""

import threading
from typing import Any, Final, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.modules.batchnorm import _NormBase

from tensor_dedup.digest import digest
from tensor_dedup.errors import ConfigError, IntegrityError
from tensor_dedup.formats.layers.layer_names import by_layer, meant

_SHOWN: Final = 4


class FrozenLayerError(IntegrityError):
    """A tensor of a frozen layer has changed since the layer was frozen."""


class Frozen:
    """The frozen tensors of a model, with their digests. `freeze` returns this object.

    `names` has the names of the frozen parameters and saved buffers in the model's `state_dict`.
    The object does not keep the model alive. As a context manager, it calls `thaw` at the end. Use
    it from one thread at a time.
    """

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        self.names = names
        self._model = ref(model)  # which is a weak key to this
        self.note()
        self._trained: list[torch.nn.Parameter] = []
        self._hooks = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in self._were and parameter.requires_grad:
                # An optimizer skips what has no gradient: no decay, no state.
                parameter.requires_grad, parameter.grad = False, None
                self._trained.append(parameter)
        for prefix, module in model.named_modules():
            if self._keeps_statistics(prefix, module):
                # `model.train()` would have it update them again.
                self._hooks.append(module.register_forward_pre_hook(_evaluate))

    def _keeps_statistics(self, prefix: str, module: torch.nn.Module) -> bool:
        """Whether a module may change frozen buffers of its own in a forward pass.

        Another kind than torch's normalisation is asked to evaluate only if all of it is frozen:
        evaluating says more to a module than to leave its buffers alone.
        """
        within = f"{prefix}." if prefix else ""
        own = {f"{within}{name}" for name, _ in module.named_buffers(recurse=False)}
        if own.isdisjoint(self._were):
            return False
        parameters = {f"{within}{name}" for name, _ in module.named_parameters()}
        return isinstance(module, _NormBase) or parameters <= self._were.keys()

    def note(self) -> None:
        """Record the current content of the tensors, with which `check` compares from now on.

        Call this method after weights were loaded into the model.
        """
        self._were = {name: _identity(tensor) for name, tensor in self._tensors().items()}

    def check(self) -> None:
        """Compare every byte of the tensors with the recorded content.

        The content is recorded when the layers are frozen, and again by `note`. After `thaw` there
        is nothing to compare.

        Raises:
            FrozenLayerError: A tensor has other bytes, another dtype or another shape, or does not
                exist any more.
        """
        now = self._tensors()
        moved = [
            name
            for name, was in self._were.items()
            if name not in now or _identity(now[name]) != was
        ]
        if moved:
            more = f" and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
            raise FrozenLayerError(
                f"{', '.join(moved[:_SHOWN])}{more}: frozen, and changed all the same; find out "
                "what writes to it (weight averaging, tied weights, another optimizer), or thaw",
                tensors=tuple(moved),
            )

    def thaw(self) -> None:
        """Make the frozen layers trainable again, and forget their recorded content."""
        for parameter in self._trained:
            parameter.requires_grad = True
        for hook in self._hooks:
            hook.remove()
        self._trained.clear()
        self._hooks.clear()
        self._were.clear()

    def _tensors(self) -> dict[str, torch.Tensor]:
        model = self._model()
        state = model.state_dict() if model is not None else {}
        held = ((name, state.get(name)) for name in self.names)
        return {name: tensor for name, tensor in held if isinstance(tensor, torch.Tensor)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.thaw()


_lock: Final = threading.Lock()
_frozen: Final = WeakKeyDictionary[torch.nn.Module, list[Frozen]]()


def freeze(model: torch.nn.Module, layers: str) -> Frozen:
    """Keep some layers of a model bit-identical while the others are trained.

    Parameters in frozen layers get no gradient, so an optimizer neither changes nor decays them,
    and keeps no state for them. Frozen normalisation layers stay in evaluation mode even after
    `model.train()`. Call this function before the model is wrapped (as by DDP) and before the
    optimizer is made. The callbacks in `tensor_dedup.integrations` check at every save that no
    frozen tensor has changed; without these callbacks, call `check`.

    `layers` lists layers by their numbers or by patterns of their names, separated by commas: `0-5`
    or `encoder.layers.0-3` for numbered layers, `*embed*` for names. The syntax is described at
    `tensor_dedup.formats.layers.layer_names.meant`.

    Raises:
        ConfigError: A part of `layers` matches no tensor of the model, or `layers` is empty.
    """
    found = meant(by_layer(model.state_dict()), layers)
    names = tuple(name for layer in found.values() for name in sorted(layer))
    if not names:
        raise ConfigError("no layer is named; give for example layers='0-5'", layers=layers)
    frozen = Frozen(model, names)
    with _lock:
        _frozen.setdefault(model, []).append(frozen)
    return frozen


def check_frozen(model: torch.nn.Module) -> None:
    """Check all layers that `freeze` has frozen in `model` and its submodules.

    Raises:
        FrozenLayerError: A tensor in a frozen layer has changed.
    """
    with _lock:
        known = dict(_frozen)
    for module in model.modules() if known else ():
        for frozen in known.get(module, ()):
            frozen.check()


def _evaluate(module: torch.nn.Module, _: Any) -> None:
    module.training = False  # `eval` would turn off dropout in what is below it


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return tensor.dtype, tensor.shape, digest(data.data)
