"""Control sharing for Diffusers and Transformers: `enable`, `disable`, `sweep` and `move`.

This module also adds the argument `tensor_dedup=` to the loaders of both frameworks. Importing it
imports neither a framework nor torch: the loaders are wrapped when their modules are imported.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any, Final

import wrapt

from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.patches.huggingface.enabled import OPT_OUT, SWITCH
from tensor_dedup.types import STORE_SCHEME

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from tensor_dedup.loader.report import ModelReport

_KEYWORD: Final = "tensor_dedup"
# Imported with the first load, for it needs torch.
_LOADS: Final = "tensor_dedup.patches.huggingface.model_load"
# The loaders: class methods whose first argument says what to load, by module. A class that is
# gone is left out.
_ENTRIES: Final = {
    "transformers.modeling_utils": ("PreTrainedModel", "from_pretrained"),
    "diffusers.models.modeling_utils": ("ModelMixin", "from_pretrained"),
    "diffusers.pipelines.pipeline_utils": ("DiffusionPipeline", "from_pretrained"),
    "diffusers.loaders.single_file_model": ("FromOriginalModelMixin", "from_single_file"),
    "diffusers.loaders.single_file": ("FromSingleFileMixin", "from_single_file"),
}
# What looks at a checkpoint before a loader above does, or reads what is beside the weights: these
# are wrapped for store:// alone.
_AUTO: Final = {
    "transformers.models.auto.auto_factory": ("_BaseAutoModelClass", "from_pretrained"),
    "transformers.models.auto.configuration_auto": ("AutoConfig", "from_pretrained"),
    "transformers.models.auto.tokenization_auto": ("AutoTokenizer", "from_pretrained"),
    "transformers.models.auto.processing_auto": ("AutoProcessor", "from_pretrained"),
    "transformers.models.auto.image_processing_auto": ("AutoImageProcessor", "from_pretrained"),
}
_MODELS: Final = "_BaseAutoModelClass"
# Loaders pass it on to each other even where their caller gave none.
_DEFAULT_REVISION: Final = "main"


class Enabled:
    """The result of `enable`, which can be used as a context manager.

    At the end of the `with` block, the setting from before the call of `enable` is restored.
    """

    def __init__(self, config: TensorDedupConfig, before: TensorDedupConfig | None) -> None:
        self.config: Final = config
        self._before = before

    def __enter__(self) -> TensorDedupConfig:
        return self.config

    def __exit__(self, *_: object) -> None:
        SWITCH.set(self._before)


def enable(config: object = True) -> Enabled:
    """Share the tensors of all pipelines and models that are loaded from now on, in any thread.

    To end sharing, call `disable`, or use the result as a context manager. `config` is anything
    that `TensorDedupConfig.from_any` takes. Models that were loaded before are not changed; call
    `sweep` to share them.

    Raises:
        ConfigError: `config` is not valid.
        UnsupportedError: `config` has `frozen_base`, which is for models of vLLM only.
    """
    chosen = _without_base(TensorDedupConfig.from_any(config))
    install()
    return Enabled(chosen, SWITCH.set(chosen))


def disable() -> None:
    """Load without sharing from now on. Tensors that are shared stay shared."""
    SWITCH.set(None)


def sweep(target: object, config: object = None) -> ModelReport:
    """Share the parameters of `target`, a pipeline or module in memory, and return a report.

    Each parameter stays the same object but gets other memory: that of a shared tensor with equal
    bytes or, if there is none, that of a new shared tensor. During the call no thread may write to
    the models or run them. `config` defaults to the configuration set by `enable`.

    The report is also added to `report()`, unless all modules in `target` were reported before.

    Raises:
        UnsupportedError: `target` is neither a pipeline nor a module, or `config` has
            `frozen_base`.
    """
    from tensor_dedup.patches.huggingface import model_load

    return model_load.share(target, _chosen(config))


def move(target: object, device: object, config: object = None) -> None:
    """Move `target`, a pipeline or module, to `device` like `.to(device)`, and share its tensors.

    If another model has an equal tensor on that device, that tensor is used and nothing is copied.
    Tensors that are not shared yet are shared as by `sweep`: after a move to the CPU, otherwise
    before the move. They stay private if they are then on a device whose memory cannot be shared.
    `config` defaults to the configuration set by `enable`.

    On a device other than the CPU, shared memory must not be written in place. peft,
    `load_state_dict`, textual inversion and optimizers get private memory before they write. Call
    `unshare` before any other write in place.

    No thread may use the models during the call. Errors of `.to` are passed on.

    Raises:
        UnsupportedError: `target` is neither a pipeline nor a module, or `config` has
            `frozen_base`.
    """
    from tensor_dedup.patches.huggingface import model_load

    model_load.move(target, device, _chosen(config))


def _chosen(config: object) -> TensorDedupConfig:
    chosen = SWITCH.config if config is None else TensorDedupConfig.from_any(config)
    return _without_base(chosen or TensorDedupConfig())


def _without_base(config: TensorDedupConfig) -> TensorDedupConfig:
    if config.frozen_base is not None:
        raise UnsupportedError(
            "frozen_base is for models of vLLM; write the checkpoint with `tensor-dedup "
            "substitute` and load that",
            field="frozen_base",
        )
    return config


def install() -> None:
    """Wrap the loaders of Diffusers and Transformers. Idempotent.

    A loader in a module that is not imported yet is wrapped when the module is imported.
    """
    for name in (*_ENTRIES, *_AUTO):
        module = sys.modules.get(name)
        if module is None:
            _await(name)
        else:
            _patch(module)


@functools.cache
def _await(name: str) -> None:
    wrapt.register_post_import_hook(_patch, name)


def _patch(module: ModuleType) -> None:
    owner, method = _ENTRIES.get(module.__name__) or _AUTO[module.__name__]
    found = vars(module).get(owner)
    # Absent while the module is only half imported; `enable` comes here again.
    entry = vars(found).get(method) if isinstance(found, type) else None
    if isinstance(entry, classmethod) and not hasattr(entry.__func__, "_tensor_dedup"):
        if module.__name__ in _ENTRIES:
            wrapped = _wrapped(entry.__func__)
        else:
            wrapped = _wrapped_for_store(entry.__func__, weights=owner == _MODELS)
        setattr(found, method, classmethod(wrapped))


def _wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def entry(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if (url := _url(args, kwargs)) is not None:
            return _stored(original, cls, args, kwargs, url)
        asked = kwargs.pop(_KEYWORD, None)
        config = _in_force() if asked is None else TensorDedupConfig.from_any(asked)
        if asked is not None and config is not None and not config.enabled:
            return _refused(lambda: original(cls, *args, **kwargs))
        if config is None or not config.enabled or OPT_OUT.depth:
            return original(cls, *args, **kwargs)
        _without_base(config)
        from tensor_dedup.patches.huggingface import model_load

        return model_load.run(
            lambda: original(cls, *args, **kwargs), config, _name(cls, args, kwargs), _given(kwargs)
        )

    entry._tensor_dedup = True  # type: ignore[attr-defined]
    return entry


def _wrapped_for_store(original: Any, *, weights: bool) -> Any:
    """Wrap a loader for store:// alone; without `weights` it reads what is in the stub folder."""

    @functools.wraps(original)
    def entry(cls: Any, *args: Any, **kwargs: Any) -> Any:
        url = _url(args, kwargs)
        if url is None:
            return original(cls, *args, **kwargs)
        return _stored(original, cls, args, kwargs, url, weights=weights)

    entry._tensor_dedup = True  # type: ignore[attr-defined]
    return entry


def _stored(
    original: Any,
    cls: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    url: str,
    *,
    weights: bool = True,
) -> Any:
    """Load a stored checkpoint: from its stub folder, with the weights of the store."""
    asked = kwargs.pop(_KEYWORD, None)
    config = _in_force() if asked is None else TensorDedupConfig.from_any(asked)
    if config is None or not config.enabled or OPT_OUT.depth:
        raise ConfigError(
            f"{url} is a checkpoint in a tensor-dedup store: call enable(), or add "
            "tensor_dedup=True",
            url=url,
        )
    _without_base(config)
    from tensor_dedup.loader.checkpoint_io.stub_folder import resolve  # and with it the store

    checkout = resolve(url, config.store_folder, config.remote, folders=True)
    here = [checkout.folder if each is url else each for each in args]
    named = {key: checkout.folder if each is url else each for key, each in kwargs.items()}

    def call() -> Any:
        return original(cls, *here, **named)

    if not weights:
        return call()
    from tensor_dedup.patches.huggingface import model_load

    return model_load.run(call, config, checkout.url, _given(kwargs), checkout)


def _url(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the `store://NAME` that a loader is given for what to load, or None."""
    named = (each for key, each in kwargs.items() if key.startswith("pretrained_model"))
    first = next(iter(args), next(named, None))
    return first if isinstance(first, str) and first.startswith(STORE_SCHEME) else None


def _in_force() -> TensorDedupConfig | None:
    """Return what is enabled, or else the configuration of the load in progress."""
    loads = sys.modules.get(_LOADS)
    return SWITCH.config or (None if loads is None else loads.under_way())


def _refused(call: Callable[[], Any]) -> Any:
    """Load with `tensor_dedup=False`, perhaps as part of a load that shares."""
    with OPT_OUT:
        result = call()
    loads = sys.modules.get(_LOADS)
    if loads is not None:
        loads.leave_alone(result)
    return result


def _name(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the name of what is loaded: a path, an identifier with its revision, or the class."""
    named = (each for key, each in kwargs.items() if key.startswith("pretrained_model"))
    first, revision = next(iter(args), next(named, None)), kwargs.get("revision")
    if not isinstance(first, str | os.PathLike):
        return cls.__name__
    name = os.fspath(first)
    if not isinstance(revision, str) or revision == _DEFAULT_REVISION or os.path.lexists(name):
        return name
    return f"{name}@{revision}"


def _given(kwargs: Mapping[str, Any]) -> set[int]:
    return {id(value) for value in kwargs.values()}
