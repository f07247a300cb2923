"""What writes weights of a running engine: shared memory is taken out of its way first.

Copy-on-write already keeps neighbours safe. But a model that overwrites all its weights would hold
its own pages and, through its mappings, the shared ones behind them too, for as long as it lives.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import wrapt

from tensor_dedup.loader.sharing import unshare

if TYPE_CHECKING:
    from types import ModuleType

# Both generations of runners; the CPU runners inherit from them.
_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")


@functools.cache
def install() -> None:
    """Wrap `reload_weights` of every runner, loaded already or later. Once a process."""
    for name in _RUNNERS:
        wrapt.when_imported(name)(_patch)


def _patch(module: ModuleType) -> None:
    runner: Any = module.GPUModelRunner
    original = runner.reload_weights

    @functools.wraps(original)
    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        unshare(self.get_model())
        return original(self, *args, **kwargs)

    runner.reload_weights = reload_weights
