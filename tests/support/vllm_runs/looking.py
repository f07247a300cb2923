"""What the weights in a worker's own process are, said over the engine's calls.

    llm = LLM(..., worker_extension_cls="vllm_runs.looking.Looking")
    by_rank = llm.collective_rpc("look")

A worker imports this before it loads, so that plain weights can be looked at before vLLM packs
them: of what is nothing but packed there is no byte left afterwards.
"""

import functools
import gc
import os
import signal
from typing import Any
from unittest import mock

from torch import nn
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tensor_dedup.loader.takeover import Takeover
from vllm_runs import engines

_assembled: dict[str, str] = {}


def _noting(original: Any) -> Any:
    @functools.wraps(original)
    def load_weights(self: Any, model: nn.Module, model_config: Any) -> None:
        original(self, model, model_config)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.is_meta:  # as it is while a load of ours is deferred
                _assembled[name] = engines.fingerprint(parameter)

    return load_weights


class Looking:
    """Becomes a base class of the worker's class."""

    def look(self) -> dict[str, Any]:
        """By name, SHA-256 of each parameter; where it lies; and those that nobody can check."""
        worker: Any = self
        named = dict(worker.get_model().named_parameters(remove_duplicate=False))
        kept = {name: engines.fingerprint(p) for name, p in named.items() if p.numel()}
        return {
            "rank": worker.rank,
            "digests": {name: kept.get(name, _assembled.get(name)) for name in named},
            "addresses": {name: named[name].data_ptr() for name in kept},
        }

    def frozen(self) -> int:
        """How many objects a garbage collection of this worker leaves out."""
        return gc.get_freeze_count()

    def die_in_the_change(self, rank: int) -> None:
        """Let the worker of this rank be killed when it is to exchange its weights."""

        def rebind(_: Takeover) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == getattr(self, "rank", None):
            mock.patch.object(Takeover, "_rebind", rebind).start()


DefaultModelLoader.load_weights = _noting(DefaultModelLoader.load_weights)  # type: ignore[method-assign]
