"""vLLM engines on a GPU in processes of their own: how they sleep, and what memory two take.

`Engines` is one such process. The functions below run in it.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from bench.gpu_place import fake_gpu
from bench.process_memory import pss
from bench.results import MIB, Row
from bench.stats import estimate, verdict
from bench.turns import in_pairs

SLEEP_MOST: Final = 0.15  # seconds a GB
WAKE_MOST: Final = 0.05
_T = TypeVar("_T")
_here: dict[str, Any] = {}  # of the process: its engines, and what ends with it


class Engines:
    """A process with engines of vLLM, by name."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def begin(self, work: Callable[..., _T], *arguments: Any, **options: Any) -> "Future[_T]":
        """Begin to run one of the functions below there, after those begun before."""
        return self._pool.submit(work, *arguments, **options)

    def do(self, work: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
        """Run one of the functions below there."""
        return self.begin(work, *arguments, **options).result()


@contextmanager
def process(*, rehearsal: bool) -> Iterator[Engines]:
    """Context manager: a process that has loaded nothing. In a rehearsal, with a fake GPU."""
    # Not forked: a process that has used CUDA cannot be.
    with ProcessPoolExecutor(1, get_context("spawn"), _begin, (rehearsal,)) as pool:
        try:
            yield Engines(pool)
        finally:
            pool.submit(_end)


def _begin(rehearsal: bool) -> None:
    _here["stack"] = ExitStack()
    if rehearsal:
        _here["stack"].enter_context(fake_gpu())
    elif torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the context is no model's


def _end() -> None:
    os._exit(0)  # engines that are taken apart in some order say things of no interest


def prepare() -> None:
    """Import what an engine needs: in two processes at once, and no memory of a model."""
    from bench import gpu_loads

    gpu_loads.engine_options()


def start(name: str, path: Path, *, dedup: bool | dict[str, Any], **options: Any) -> float:
    """Start an engine; its seconds."""
    from bench import gpu_loads, loading

    began = time.perf_counter()
    _here[name] = loading.engine(path, dedup=dedup, **gpu_loads.engine_options(), **options)
    return time.perf_counter() - began


def asleep(name: str) -> float:
    """Send an engine to sleep; the seconds that took."""
    began = time.perf_counter()
    _here[name].sleep(level=1)
    return time.perf_counter() - began


def awake(name: str) -> float:
    """Wake an engine up; the seconds that took."""
    began = time.perf_counter()
    _here[name].wake_up()
    return time.perf_counter() - began


def used() -> int:
    """Bytes of the GPU's memory that are in use; in a rehearsal those of this process."""
    gc.collect()
    if not torch.cuda.is_available():
        return pss()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def sleep(base: Path, nbytes: int, rounds: int, socket: Path, *, rehearsal: bool) -> Iterator[Row]:
    """An engine that is the last one awake, against one of plain vLLM, in turns."""
    options: dict[str, Any] = {} if rehearsal else {"enable_sleep_mode": True}
    with process(rehearsal=rehearsal) as plain, process(rehearsal=rehearsal) as ours:
        mine = ours.begin(start, "m", base, dedup={"memory_manager": str(socket)}, **options)
        plain.do(start, "m", base, dedup=False, **options)
        mine.result()

        def one(engines: Engines) -> tuple[float, float]:
            return engines.do(asleep, "m"), engines.do(awake, "m")

        first, *_ = (in_pairs(1, "first sleep", lambda: one(plain), lambda: one(ours)),)
        sides = in_pairs(rounds, "sleep", lambda: one(plain), lambda: one(ours))
    for number, (what, most) in enumerate((("sleep", SLEEP_MOST), ("wake", WAKE_MOST))):
        of_first = [each[0][number] for each in first]
        yield Row(f"{what}, the first time", f"{of_first[0]:.3f} s", f"{of_first[1]:.3f} s", "",
                  "", "", [[each] for each in of_first])  # fmt: skip
        yield per_gb(what, [[each[number] for each in side] for side in sides], nbytes, most)


def per_gb(what: str, seconds: list[list[float]], nbytes: int, most: float) -> Row:
    """Seconds of both sides; ours, for each GB of the weights, is held to the aim."""
    plain, ours = (estimate(each) for each in seconds)
    found = estimate([1e9 * each / nbytes for each in seconds[1]])
    return Row(
        f"{what} of the last engine awake, {nbytes / 1e9:.1f} GB",
        f"{plain.text()} s",
        f"{ours.text()} s",
        f"{found.text()} s a GB",
        f"≤ {most} s a GB",
        verdict(found, most=most),
        seconds,
    )


def memory(base: Path, *, rehearsal: bool) -> Iterator[Row]:
    """The same model in two engines of one process: memory of the GPU, as the article counts it."""
    with process(rehearsal=rehearsal) as one, process(rehearsal=rehearsal) as other:
        for each in [one.begin(prepare), other.begin(prepare)]:
            each.result()
        found = [_taken(one, base, dedup=False), _taken(other, base, dedup=True)]
    for number, what in enumerate(("the first engine", "both engines")):
        sides = [each[number] for each in found]
        plain, ours = (f"{each / MIB:,.0f} MiB" for each in sides)
        less = f"{1 - sides[1] / sides[0]:.1%} less"
        yield Row(f"memory of {what}", plain, ours, less, "", "", [[each] for each in sides])


def _taken(engines: Engines, base: Path, *, dedup: bool) -> list[float]:
    before = engines.do(used)
    found = list[float]()
    for name in ("one", "other"):
        engines.do(start, name, base, dedup=dedup)
        found.append(engines.do(used) - before)
    return found
