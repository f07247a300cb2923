"""vLLM's engines in two processes that share a GPU's memory, sleep, wake and die.

Left out where vLLM is not installed. In a rehearsal each is a model of a few tensors, of which the
same code shares, unmaps, copies and maps what vLLM's would have.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpu_runs import gpu_world
from gpu_runs.answers import Worker
from gpu_runs.engine_worker import NAMES
from gpu_runs.gpu_world import Manager
from manager_runs import managers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not gpu_world.REHEARSAL and find_spec("vllm") is None, reason="vLLM is not installed"
    ),
]


@contextmanager
def pair(folder: Path) -> Iterator[tuple[Manager, dict[str, Worker]]]:
    """The manager of the GPU, and a process for each of the two models."""
    with (
        gpu_world.running(folder) as gpu,
        managers.running(folder),
        gpu_world.started("engine_worker", len(NAMES)) as processes,
    ):
        yield gpu, dict(zip(NAMES, processes, strict=True))


def checkpoints(folder: Path) -> dict[str, str]:
    if gpu_world.REHEARSAL:
        return {name: name for name in NAMES}
    from models import tiny_checkpoints

    made = tiny_checkpoints.make("llama", folder)
    return dict(zip(NAMES, (str(made.base), str(made.fine_tune)), strict=True))


def test_engines_sleep_and_wake_in_any_order_and_one_that_is_killed_harms_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `scripts/test-gpu --gather` does not bring FlashInfer.
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    paths = checkpoints(folder)
    with pair(folder) as (gpu, engines):

        def resident() -> int:
            return gpu.overview().totals.resident_bytes

        for name, each in engines.items():
            each.tell("plain", paths[name])
        right = {name: each.value() for name, each in engines.items()}
        for name, each in engines.items():  # both at once, as servers start
            each.tell("load", paths[name], str(folder))
        nbytes = sum(each.value() for each in engines.values())
        assert 0 < resident() < nbytes, "nothing is shared"
        answers = {name: each.do("answer") for name, each in engines.items()}
        assert gpu_world.REHEARSAL or answers == right
        assert answers["base"] != answers["tuned"]

        # What neither of vLLM's engines uses may stay: the manager drops it when it needs the room.
        left = 0 if gpu_world.REHEARSAL else resident() // 2
        for first, second in (NAMES, NAMES[::-1]):
            for order in (NAMES, NAMES[::-1]):
                engines[first].do("sleep")
                assert engines[second].do("answer") == answers[second]
                engines[second].do("sleep")
                managers.until(lambda: resident() <= left, patience_s=20)
                for name in order:
                    engines[name].do("wake")
                    assert engines[name].do("answer") == answers[name], (first, order)
                assert engines[order[0]].do("answer") == answers[order[0]]

        engines["base"].do("sleep")
        leases = gpu.overview().totals.leases
        engines["tuned"].kill()
        managers.until(lambda: gpu.overview().totals.leases < leases)
        engines["base"].do("wake")
        assert engines["base"].do("answer") == answers["base"]
