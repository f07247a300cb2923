"""Which engine DeepSpeed gets, by its configuration; and what its states are made of."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.seams import ReplacedSeam, Replacements, usable
from tensor_dedup.store.checkpoints.adapters import StateProvider, register_provider

KEY: Final = "tensor_dedup"
_FIELDS: Final = frozenset({"store", "run"})
_VERSIONS: Final = "DeepSpeed 0.19.8"
_SEAM: Final = ReplacedSeam(
    "deepspeed.runtime.engine:create_checkpoint_engine",
    "(config_params, groups, zero_stage, has_moe_layers, optimize_dp_state)",
    "it makes the engine that saves and loads",
    "DeepSpeed saves to its own files",
    _VERSIONS,
)


@cache
def enable() -> None:
    """Let DeepSpeed engines that are made from now on heed `tensor_dedup` in their configuration.

    Once a process; further calls do nothing. UnsupportedError: this DeepSpeed is not one of those
    that were tried.
    """
    if not usable(_SEAM):
        raise UnsupportedError(f"{_SEAM.target} is not what it was in {_VERSIONS}")
    for name in ("LossScaler", "DynamicLossScaler"):
        _register(f"deepspeed.runtime.fp16.loss_scaler.{name}", lambda held: dict(vars(held)))
    _register("deepspeed.utils.tensor_fragment.fragment_address", lambda held: dict(vars(held)))
    register_provider(
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        StateProvider("deepspeed.ZeroStageEnum", int, lambda state, _: _stage(state)),
    )
    Replacements([(_SEAM, _choose)]).__enter__()


def _choose(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(config_params: Any, *given: Any, **named: Any) -> Any:
        entry = getattr(config_params, "_param_dict", {}).get(KEY)
        if entry is None:
            return original(config_params, *given, **named)
        from tensor_dedup.integrations.deepspeed.engine import StoreEngine  # and with it DeepSpeed

        store, run = _settings(entry)
        return StoreEngine(config_params, store, run)

    return create


def _settings(entry: object) -> tuple[str, str]:
    """What DeepSpeed's JSON says. ConfigError."""
    if isinstance(entry, Mapping) and entry.keys() == _FIELDS:
        return str(entry["store"]), str(entry["run"])
    raise ConfigError(
        f"DeepSpeed's {KEY!r} is {entry!r}; write {{'store': FOLDER, 'run': NAME}} there"
    )


def _register(name: str, state: Callable[[Any], object]) -> None:
    """A class whose objects are their attributes."""
    module, _, kind = name.rpartition(".")

    def restore(held: Any, _: Any) -> Any:
        import importlib

        found = getattr(importlib.import_module(module), kind)
        made = found.__new__(found)
        made.__dict__.update(held)
        return made

    register_provider(name, StateProvider(f"deepspeed.{kind}", state, restore))


def _stage(state: int) -> Any:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum(state)
