"""The argument `tensor_dedup=` of vLLM's engine arguments, and `--tensor-dedup` of its commands.

The argument is translated into a load format and an entry in vLLM's loader config, because vLLM's
`LoadConfig` is pickled and sent to every process of an engine. This module imports no vllm.
"""

import argparse
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.loader.checkpoint_io.stub_folder import stored_in
from tensor_dedup.loader.report import share_with_workers
from tensor_dedup.patches.vllm import load_formats
from tensor_dedup.patches.vllm.load_formats import BACKEND, KEY, LOAD_FORMAT, split
from tensor_dedup.patches.vllm.seams import RECORDED_VERSION, check, usable
from tensor_dedup.patches.vllm.server_names import remember_port
from tensor_dedup.patches.vllm.store_urls import (
    is_url,
    make_unresolved,
    refuse_unresolved,
    resolve,
)

_AddCliArgs = Callable[..., argparse.ArgumentParser]

# What overwrites weights in place, or moves them, after they were loaded: others read them too.
# Not `enable_eplb`: the experts that it overwrites are not shared.
MOVES_WEIGHTS: Mapping[str, str] = {
    "enable_sleep_mode": "a sleeping engine discards weights and writes them again when it wakes",
    "sleep_mode_backend": "any backend but 'cumem' frees a device's memory with the weights in it",
    "enable_elastic_ep": "scaling experts overwrites expert weights while the engine runs",
    "cpu_offload_gb": "offloading moves weights into memory of its own",
    "offload_group_size": "offloading moves weights into memory of its own",
    "weight_transfer_config": "a weight update overwrites weights while the engine runs (and on a "
    "GPU captured graphs know their addresses)",
}
_OUR_BACKEND = "cumem"  # vLLM's default, and the only one of its own in 0.33
# What only writes, and so reaches nobody where a writer gets pages of its own.
_ONLY_WRITES = frozenset({"weight_transfer_config"})


@dataclass(frozen=True, slots=True)
class _Request:
    """What the user asked for: the config, and the load format that reads the files."""

    config: TensorDedupConfig
    inner: str


def translate(
    value: object, load_format: str, extra: object, model: object = None
) -> tuple[str, dict[str, Any]]:
    """Return the `load_format` and `model_loader_extra_config` that stand for `tensor_dedup=value`.

    `load_format` and `extra` are the two arguments as the user gave them, and so is `model`, if it
    is known. The result is "tensor_dedup" and a copy of `extra` with the configuration as the item
    "tensor_dedup", except in three cases:

    * If `value` is None and `load_format` is another format, sharing was not asked for. The result
      is `load_format` and a copy of `extra`.
    * If the configuration has `enabled` off, the result makes vLLM load without this package.
    * If vLLM must load the model by itself (by a format that is not shared, or from a URL), the
      result is the format as it was given, and the copy of `extra` with the configuration. The
      load is then warned of and reported (`tensor_dedup.patches.vllm.plain_loads`).

    The result of an earlier call may be passed again, with the same `value` or None.

    Raises:
        ConfigError: The configuration is not valid, needs a load format that shares, or was given
            twice with different values.
    """
    own = _loader_config(extra)
    request = _requested(value, load_format, own)
    rest = {name: own[name] for name in own if name != KEY}
    if request is None:
        return load_format, own
    if not request.config.enabled:
        return request.inner, rest
    inner = request.inner.lower()
    plainly = inner not in load_formats.SHARED or load_formats.is_remote(model)
    if request.config.frozen_base is not None and (plainly or inner not in load_formats.DEFAULT):
        raise ConfigError(
            f"frozen_base does not combine with load_format={request.inner!r}, whose loader reads "
            "files by itself; drop one of the two arguments, or write the checkpoint with "
            "`tensor-dedup substitute`",
            load_format=request.inner,
        )
    if plainly and is_url(model):
        raise ConfigError(
            f"model={model!r} is a checkpoint in a tensor-dedup store, which "
            f"load_format={request.inner!r} does not read; drop load_format",
            load_format=request.inner,
        )
    mine = {**request.config.to_dict(), "inner": inner}
    if plainly:
        return request.inner, {**rest, KEY: mine}
    checkout = stored_in(own.get(KEY))
    if checkout is not None:
        mine["stored"] = checkout.to_dict()
    return LOAD_FORMAT, {**rest, KEY: mine}


def refuse_moving_weights(settings: object) -> None:
    """Refuse engine arguments with which vLLM would overwrite or move shared weights.

    `settings` are the engine arguments, and `MOVES_WEIGHTS` lists those that are refused. There are
    three exceptions:

    * `sleep_mode_backend` may be "cumem", vLLM's default.
    * `weight_transfer_config` is allowed on a CPU. On a GPU, this package's own backend is allowed.
    * `enable_sleep_mode` is allowed on a GPU with a memory manager, if this vLLM's sleep mode is
      supported.

    Raises:
        ConfigError: An argument in `MOVES_WEIGHTS` is set, and is not allowed here.
    """
    for name, reason in MOVES_WEIGHTS.items():
        value = getattr(settings, name, None)
        if value and not _is_handled(name, settings):
            raise ConfigError(
                f"tensor_dedup does not combine with {name}={value!r} in this version: {reason}, "
                f"and other models may share them; drop {name} or tensor_dedup",
                setting=name,
            )


def _is_handled(name: str, settings: object) -> bool:
    """Return whether what moves or writes weights is taken care of here."""
    if name == "enable_sleep_mode":
        return _may_sleep(settings)
    if name == "sleep_mode_backend":
        return bool(getattr(settings, name) == _OUR_BACKEND)
    return name in _ONLY_WRITES and (_copied_on_write() or _follows_on_gpu(settings))


def _may_sleep(settings: object) -> bool:
    """Return whether engines of this vLLM sleep on a GPU, and shared weights with them.

    Raises:
        ConfigError: They would, with a memory manager to keep the weights.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or not usable("sleep"):
        return False
    config, _ = split(_loader_config(getattr(settings, "model_loader_extra_config", None)).get(KEY))
    if config.memory_manager is None:
        raise ConfigError(
            "with tensor_dedup, enable_sleep_mode needs a memory manager, which keeps the weights "
            "of all sleeping engines once: add memory_manager='auto' to tensor_dedup, or drop "
            "enable_sleep_mode",
            setting="enable_sleep_mode",
        )
    return True


def _copied_on_write() -> bool:
    """Return whether engines of this vLLM keep weights in host memory."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _follows_on_gpu(settings: object) -> bool:
    """Return whether engines of this vLLM follow the steps of a run on a GPU.

    What is shared is not written to.
    """
    from vllm.platforms import current_platform

    backend = getattr(getattr(settings, "weight_transfer_config", None), "backend", None)
    return backend == BACKEND and current_platform.is_cuda() and usable("steps")


def parse_flag(text: str) -> dict[str, Any]:
    """Parse `text`, the value of `--tensor-dedup`, and return the configuration as a dict.

    argparse calls this function as the type of the option.

    Raises:
        ArgumentTypeError: The value is not valid; argparse then exits with status 2.
    """
    try:
        return TensorDedupConfig.from_any(text).to_dict()
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def patch(arg_utils: ModuleType) -> None:
    """Add the argument `tensor_dedup` to vLLM's classes of engine arguments. Idempotent.

    `arg_utils` is the module vllm.engine.arg_utils. In a version of vLLM that is not supported, the
    classes still accept the argument. They then log a warning once and load without sharing. For
    `frozen_base` and `store://` they raise UnsupportedError instead.
    """
    matches = not check("arguments")
    for name in ("EngineArgs", "AsyncEngineArgs"):
        cls = getattr(arg_utils, name, None)
        if cls is not None and not _is_ours(cls.__init__):
            cls.__init__ = _init(cls.__init__) if matches else _plain_init(cls.__init__)
    if matches and not _is_ours(arg_utils.EngineArgs.add_cli_args):
        engine_args = arg_utils.EngineArgs
        engine_args.add_cli_args = staticmethod(_add_cli_args(engine_args.add_cli_args))
        engine_args.from_cli_args = classmethod(_from_cli_args(engine_args.from_cli_args.__func__))
        engine_args.create_engine_config = refuse_unresolved(engine_args.create_engine_config)


def patch_load_config(load: ModuleType) -> None:
    """Make `from vllm.config.load import TensorDedupConfig` work.

    `load` is the module vllm.config.load.
    """
    load.TensorDedupConfig = TensorDedupConfig  # type: ignore[attr-defined]


def _is_ours(function: Callable[..., Any]) -> bool:
    return function.__code__.co_filename == __file__


def _loader_config(extra: object) -> dict[str, Any]:
    if extra is None:
        return {}
    if hasattr(extra, "to_serializable"):  # a TensorizerConfig; vLLM replaces it by this dict, too
        extra = extra.to_serializable()
    if isinstance(extra, Mapping):
        return dict(extra)
    raise ConfigError(
        f"model_loader_extra_config is a {type(extra).__name__}; with tensor_dedup give a dict",
        value=repr(extra),
    )


def _requested(value: object, load_format: str, own: Mapping[str, Any]) -> _Request | None:
    if load_format.lower() != LOAD_FORMAT:
        if value is None:
            return None
        return _Request(TensorDedupConfig.from_any(value), load_format)
    config, inner = split(own.get(KEY))
    if value is None:
        return _Request(config, inner)
    asked = TensorDedupConfig.from_any(value)
    if KEY in own and asked != config:
        raise ConfigError(
            f"tensor_dedup is given twice and differs: {asked.to_dict()} as an argument, "
            f"{config.to_dict()} in model_loader_extra_config; give it once",
        )
    return _Request(asked, inner)


def _init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)
    default_format: str = signature.parameters["load_format"].default

    @functools.wraps(original)
    def __init__(
        self: object, *args: object, tensor_dedup: object = None, **kwargs: object
    ) -> None:
        try:
            given = signature.bind(self, *args, **kwargs)
        except TypeError:
            # Plain vLLM's own message names its class and the argument.
            return original(self, *args, **kwargs)
        load_format = given.arguments.get("load_format", default_format)
        model, extra = (given.arguments.get(n) for n in ("model", "model_loader_extra_config"))
        stored = is_url(model)
        asked_before = isinstance(extra, Mapping) and KEY in extra
        if tensor_dedup is None and str(load_format).lower() != LOAD_FORMAT and not asked_before:
            if stored:
                return make_unresolved(original, self, given)
            return original(self, *args, **kwargs)
        load_format, extra = translate(tensor_dedup, load_format, extra, model)
        given.arguments.update(load_format=load_format, model_loader_extra_config=extra)
        if KEY not in extra:  # it is switched off
            return make_unresolved(original, self, given) if stored else _call(original, given)
        if stored:
            resolve(given.arguments)
        _call(original, given)
        if load_format == LOAD_FORMAT:
            refuse_moving_weights(self)
        share_with_workers()
        return None

    return __init__


def _call(original: Callable[..., None], given: inspect.BoundArguments) -> None:
    original(*given.args, **given.kwargs)


def _plain_init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `__init__` to accept the argument and load plainly."""

    @functools.wraps(original)
    def __init__(
        self: object, *args: object, tensor_dedup: object = None, **kwargs: object
    ) -> None:
        config = TensorDedupConfig.from_any(False if tensor_dedup is None else tensor_dedup)
        if config.enabled:
            usable("arguments")  # says what is missing, once in this process
            if config.frozen_base is not None:
                raise UnsupportedError(
                    "frozen_base cannot be taken at load in this vLLM: "
                    f"{'; '.join(map(str, check('arguments')))}; install vLLM {RECORDED_VERSION}, "
                    "or write the checkpoint with `tensor-dedup substitute` and load that",
                )
        if is_url(kwargs.get("model")):
            raise UnsupportedError(
                f"model={kwargs['model']!r} is a checkpoint in a tensor-dedup store, which this "
                f"vLLM cannot be taught to load: {'; '.join(map(str, check('arguments')))}; "
                f"install vLLM {RECORDED_VERSION}, or export the checkpoint and load the folder",
            )
        original(self, *args, **kwargs)

    return __init__


def _add_cli_args(original: _AddCliArgs) -> _AddCliArgs:
    @functools.wraps(original)
    def add_cli_args(
        parser: argparse.ArgumentParser, *more: object, **options: object
    ) -> argparse.ArgumentParser:
        parser = original(parser, *more, **options)
        group = parser.add_argument_group(
            "TensorDedupConfig", "One copy of every tensor that several models have in common."
        )
        group.add_argument(
            "--tensor-dedup",
            nargs="?",
            const="{}",  # argparse passes text through `type`, defaults and constants included
            type=parse_flag,
            metavar="JSON",
            help="Share identical weights with other models. Without a value: the defaults; "
            "else fields of TensorDedupConfig, for example '{\"min_tensor_bytes\": 4194304}'.",
        )
        return parser

    return add_cli_args


def _from_cli_args(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def from_cli_args(
        cls: type, args: argparse.Namespace, *more: object, **options: object
    ) -> object:
        value = getattr(args, "tensor_dedup", None)
        if value is not None:
            # A copy: `vllm serve` builds engine arguments from one namespace more than once.
            args = argparse.Namespace(**vars(args))
            args.load_format, args.model_loader_extra_config = translate(
                value,
                getattr(args, "load_format", "auto"),
                getattr(args, "model_loader_extra_config", None),
            )
        if str(getattr(args, "load_format", "")).lower() == LOAD_FORMAT:
            remember_port(args)
        return original(cls, args, *more, **options)

    return from_cli_args
