"""The load format `tensor_dedup` in a version of vLLM that this package does not support.

Every model is loaded without sharing. No method that reads weights is overridden, because the
method could depend on a part of vLLM that has changed.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.checkpoint_io.stub_folder import stored_in
from tensor_dedup.loader.report import ModelReport, add
from tensor_dedup.patches.vllm.load_formats import KEY, split

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
            name = _model_name([*args, *options.values()])
            _log.warning("%s: loading without sharing: %s", name, reason)
            model: nn.Module = super().load_model(*args, **options)
            report = ModelReport(name=name, rank=_rank(), skipped=[("<model>", reason)])
            report.tensors_total = sum(1 for _ in model.parameters())
            report.total_bytes = sum(parameter.nbytes for parameter in model.parameters())
            report.private_bytes = report.bytes_materialised = report.total_bytes
            add(report)
            return model

    return PlainLoader


def _model_name(given: list[Any]) -> str:
    """Return the model's path or name, from whichever argument has one: only a report needs it."""
    names = (getattr(each, "model", None) for each in given)
    return next((name for name in names if isinstance(name, str)), "a model")


def _rank() -> int:
    """Return this worker's rank; torch knows it whatever vLLM's configuration calls it."""
    distributed = torch.distributed
    there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if there else 0
