"""Loads that vLLM does by itself, with one warning and a line in `report()` that says why.

They are those of a version of vLLM that this package does not support, and those of load formats
whose weights are not shared. No method that reads weights is overridden.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.checkpoint_io.stub_folder import stored_in
from tensor_dedup.loader.report import ModelReport, add
from tensor_dedup.loader.unsharing.model_digests import keep as keep_digests
from tensor_dedup.patches.vllm.load_formats import (
    DEFAULT,
    KEY,
    LOAD_FORMAT,
    OTHER_LOADERS,
    split,
    why_not_shared,
)
from tensor_dedup.patches.vllm.seams import why_not

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import LoadConfig

_log = logging.getLogger(__name__)


def plain_loader(reason: str) -> type[DefaultModelLoader]:
    """Return a loader class that loads as vLLM does, and logs `reason` for not sharing.

    Its constructor raises UnsupportedError for a stored checkpoint and for `frozen_base`, which
    vLLM cannot load by itself.
    """

    class PlainLoader(DefaultModelLoader):
        def __init__(self, load_config: LoadConfig) -> None:
            extra = dict(load_config.model_loader_extra_config or {})
            mine = extra.pop(KEY, None)
            checkout = stored_in(mine)
            if checkout is not None:
                raise UnsupportedError(
                    f"{checkout.url} cannot be loaded: {reason}; export it and load the folder",
                    url=checkout.url,
                )
            config, inner = split(mine)
            if config.frozen_base is not None:
                raise UnsupportedError(
                    f"frozen_base cannot be taken at load: {reason}; write the checkpoint with "
                    "`tensor-dedup substitute` and load that",
                )
            super().__init__(
                dataclasses.replace(load_config, load_format=inner, model_loader_extra_config=extra)
            )

        def load_model(self, *args: Any, **options: Any) -> nn.Module:
            """Load as plain vLLM does, whatever it is asked with in that version."""
            return _load(super().load_model, reason, args, options)

    return PlainLoader


@functools.cache
def install() -> None:
    """Make vLLM load plainly where a format is not shared, and by us where it is. Idempotent.

    The engine's loader config has our entry then, and a load format other than ours, for one of two
    reasons:

    * `tensor_dedup.patches.vllm.arguments` left the format as it was, because it is not shared.
    * A plug-in (for bitsandbytes) has set its own format after the arguments were built. Without
      this, vLLM would ignore the configuration of this package without a message.
    """
    original: Callable[..., Any] = model_loader.get_model_loader

    @functools.wraps(original)
    def get_model_loader(load_config: LoadConfig, *args: Any, **options: Any) -> Any:
        extra: Any = load_config.model_loader_extra_config
        given = str(load_config.load_format)
        ours = given == LOAD_FORMAT or given in DEFAULT  # of the latter vLLM refuses the entry
        if ours or not isinstance(extra, dict) or KEY not in extra:
            return original(load_config, *args, **options)
        if given in OTHER_LOADERS:
            mine = {**extra[KEY], "inner": given}
            load_config.model_loader_extra_config = {**extra, KEY: mine}
            load_config.load_format = LOAD_FORMAT
            return original(load_config, *args, **options)
        rest = {name: extra[name] for name in extra if name != KEY}
        theirs = dataclasses.replace(load_config, model_loader_extra_config=rest)
        return _noted(original(theirs, *args, **options), why_not_shared(given))

    # Modules of vLLM that are imported already have the function under the same name.
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get("get_model_loader") is original:
            setattr(module, "get_model_loader", get_model_loader)  # noqa: B010 - any module


def _noted(loader: Any, reason: str) -> Any:
    """Return vLLM's own `loader`, whose loads are warned of and reported."""
    loader.load_model = functools.partial(_load_noted, loader.load_model, reason)
    return loader


def _load_noted(load: Callable[..., nn.Module], reason: str, *args: Any, **options: Any) -> Any:
    return _load(load, reason, args, options)


def _load(
    load: Callable[..., nn.Module], reason: str, args: tuple[Any, ...], options: dict[str, Any]
) -> nn.Module:
    """Call vLLM's `load` and return the model; warn, and enter the load into `report()`."""
    name, dtype = _model_config([*args, *options.values()])
    _log.warning("%s: loading without sharing: %s", name, reason)
    model = load(*args, **options)
    report = ModelReport(name=name, rank=_rank(), skipped=[("<model>", reason)])
    report.tensors_total = sum(1 for _ in model.parameters())
    report.total_bytes = _size(model, dtype)
    report.private_bytes = report.bytes_materialised = report.total_bytes
    keep_digests(report, {"": model}, None)
    add(report)
    return model


def _model_config(given: list[Any]) -> tuple[str, torch.dtype | None]:
    """Return the model's path or name and its dtype, from whichever argument has them."""
    for each in given:
        # What was pulled from object storage lies in a temporary folder, under no name.
        name = getattr(each, "model_weights", "") or getattr(each, "model", None)
        if isinstance(name, str):
            dtype = getattr(each, "dtype", None)
            return name, dtype if isinstance(dtype, torch.dtype) else None
    return "a model", None


def _size(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Return the bytes of a model; packed weights count where this vLLM packs as we know it."""
    if dtype is not None and why_not("loader") is None:
        with contextlib.suppress(ImportError):
            from tensor_dedup.patches.vllm.kernels import final_bytes

            return final_bytes(model, dtype)
    return sum(parameter.nbytes for parameter in model.parameters())


def _rank() -> int:
    """Return this worker's rank; torch knows it whatever vLLM's configuration calls it."""
    distributed = torch.distributed
    there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if there else 0
