"""An engine in a process of its own that shares, sleeps and wakes; `answers` tells it what to do.

On a GPU it is vLLM's. In a rehearsal it is a model of a few tensors over the fake driver, which
shares and sleeps by the same code; its answer is the digests of the bytes that it sees.
"""

import ctypes
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch

from gpu_runs import answers, gpu_world

NAMES = ("base", "tuned")


class Engine(Protocol):
    """What the tests ask of either."""

    def answer(self) -> list[Any]:
        """Tokens, or what stands for them."""

    def nbytes(self) -> int:
        """Of its weights."""

    def sleep(self) -> None:
        """At level 1."""

    def wake(self) -> None:
        """All of it."""


class VllmEngine:
    """vLLM's, in this process."""

    def __init__(self, path: str, **options: Any) -> None:
        from vllm_runs import plain

        self._plain = plain
        # Every engine wants so much to be free when it starts, whatever it takes.
        options |= {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.25}
        self.llm: Any = plain.engine(path, **options)

    def answer(self) -> list[Any]:
        return self._plain.tokens(self._plain.outputs(self.llm))

    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._plain.model(self.llm).parameters())

    def sleep(self) -> None:
        # vLLM asserts that no process has taken memory of the GPU meanwhile, and others do.
        with mock.patch.object(torch.accelerator, "get_memory_info", return_value=(1, 2)):
            self.llm.sleep(level=1)

    def wake(self) -> None:
        self.llm.wake_up()

    def end(self) -> None:
        self._plain.let_go(self.llm)


class FakeEngine:
    """Tensors of the fake GPU; one group of two is the same in both models."""

    def __init__(self, name: str, folder: str) -> None:
        from gpu_runs.gpu_loads import weights
        from manager_runs.sleepers import SleepyEngine

        own = 10 * (1 + NAMES.index(name))
        groups = [weights(1, 200_000)], [weights(own, 100), weights(own + 1, 70_000)]
        self.engine = SleepyEngine(Path(folder)).load(*groups)

    def answer(self) -> list[Any]:
        from tensor_dedup.digest import digest

        assert self.engine.is_right()
        tensors = self.engine.tensors
        return [digest(ctypes.string_at(t.data_ptr(), t.nbytes)) for t in tensors]

    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.engine.wanted)

    def sleep(self) -> None:
        self.engine.sleep()
        assert self.engine.is_unmapped()

    def wake(self) -> None:
        self.engine.model.wake()


STATE: dict[str, Any] = {}


def plain(path: str) -> list[Any]:
    """What a model answers that shares nothing."""
    if gpu_world.REHEARSAL:
        return []
    engine = VllmEngine(path)
    found = engine.answer()
    engine.end()
    return found


def load(path: str, folder: str) -> int:
    """An engine with the managers of this folder, that can sleep; the bytes of its weights."""
    if gpu_world.REHEARSAL:
        STATE["engine"] = FakeEngine(path, folder)
    else:
        config = {"memory_manager": str(Path(folder) / "m.sock")}
        STATE["engine"] = VllmEngine(path, tensor_dedup=config, enable_sleep_mode=True)
    return engine().nbytes()


def engine() -> Engine:
    found: Engine = STATE["engine"]
    return found


def answer() -> list[Any]:
    return engine().answer()


def sleep() -> None:
    engine().sleep()


def wake() -> None:
    engine().wake()


if __name__ == "__main__":
    answers.serve(globals())
