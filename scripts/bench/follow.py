"""What it costs engines that answer to follow a training: pauses, memory, and time.

    python scripts/bench/follow.py [--only KIND] [--steps N | --quick] [--millions N] [--work DIR]
                                   [--json FILE] [--write]

The steps of a Llama, of which each changes one element in a hundred, are in a store. Engines with
processes of their own answer requests all the time and change from step to step: one engine, and
two that share their weights by a memory manager. Measured are the times without a token for anybody
while an update goes on, and as long before it; how many tokens come meanwhile; and, in updates
apart, the memory of all their processes together.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import asyncio
import itertools
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import click
import psutil

from bench import options
from bench.fresh_start import own_hints
from bench.results import Figures, write_figures
from bench.stats import PACKAGES, Section, estimate
from bench.turns import say
from demonstration import models

ONE: Final = "one engine"
TWO: Final = "two engines and a manager"
KINDS: Final = {ONE: 1, TWO: 2}
HEAD: Final = (
    "| engines | longest time without a token | aim | without an update | from the call to the new"
    " step | tokens, of those before | most memory, in versions | aim | afterwards | aim |\n"
    f"{'| --- ' * 10}|"
)
_NOTES: Final = """\
- *Longest time without a token* for anybody from the call of `update_weights` to a second
  after its return, in seconds for each GB of the model; *without an update*: as long, just before.
- *Tokens*: those in a second while a step is loaded, of those just before.
- *Memory* of the processes of all engines and of the manager, beyond what it was before the first
  update: anonymous memory, and shared memory once, mapped or not.
"""
_PAUSE_AIM: Final = 0.3  # seconds for each GB
_PEAK_AIM: Final = 1.05  # versions
_AFTER_AIM: Final = 0.05
_SAMPLES_S: Final = 0.01
_AFTERWARDS_S: Final = 1.0
_TOKENS: Final = 200


def pause(kind: str) -> str:
    """The name of the figure of times without a token."""
    return f"{kind}: longest time without a token, for each GB"


def peak(kind: str) -> str:
    """The name of the figure of memory during an update."""
    return f"{kind}: most memory during an update"


def after(kind: str) -> str:
    """The name of the figure of memory after an update."""
    return f"{kind}: memory after an update"


@dataclass(frozen=True)
class Update:
    """One update: seconds, seconds without a token before it and around it, and tokens a second."""

    seconds: float
    quiet: float
    pause: float
    rate_before: float
    rate: float


@dataclass(frozen=True)
class Growth:
    """Memory beyond what it was before the first update, at its most in another and after it."""

    most: float
    after: float


@click.command(context_settings=options.CONTEXT)
@options.repeats("--steps", 9)
@options.only(list(KINDS))
@click.option("--millions", default=250, show_default=True, help="Parameters of the model.")
@options.work("the steps")
@options.json_file("what each update costs")
@options.write
def main(
    steps: int,
    quick: bool,
    only: tuple[str, ...],
    millions: int,
    work: Path | None,
    json_file: Path | None,
    write: bool,
) -> None:
    """Let engines follow a training."""
    steps, millions = (options.QUICK, 5) if quick else (steps, millions)
    folder = work or models.default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    figures, lines = Figures(), [HEAD]
    section = Section("follow.py", "Engines that follow a training", PACKAGES)
    with tempfile.TemporaryDirectory(dir=folder, prefix="follow-bench-") as root, own_hints(folder):
        # Engines have processes of their own, as those of a server have.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        size = publish(Path(root, "store"), steps, millions)
        for kind in only or KINDS:
            with _manager(Path(root), wanted=KINDS[kind] > 1) as manager:
                found = asyncio.run(_measure(Path(root, "store"), KINDS[kind], manager, steps))
            updates, growths = found
            figures[pause(kind)] = (
                [each.quiet / size * 1e9 for each in updates],
                [each.pause / size * 1e9 for each in updates],
            )
            figures[peak(kind)] = ([], [each.most / size for each in growths])
            figures[after(kind)] = ([], [each.after / size for each in growths])
            lines.append(_line(kind, figures, updates))
            say(lines[-1])
    how = f"{steps} updates of a model of {size / 1e9:.2f} GB"
    section.finish("follow", how, lines, _NOTES, write=write)
    if json_file is not None:
        write_figures(json_file, figures)


def publish(store: Path, steps: int, millions: int) -> int:
    """Publish step 0 and so many steps after it; return the bytes of the model."""
    import torch

    from bench.publish_training import SETUPS, Training
    from tensor_dedup import Publisher

    model = Training(SETUPS[-1], millions).model.to(torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    with Publisher(store, run="policy", keep_last=None) as policy:
        for step in range(steps + 1):
            for each in model.parameters() if step else ():
                held = each.data.view(torch.int16).view(-1)
                held[torch.randint(len(held), (len(held) // 100,), generator=draw)] += 1
            policy.publish(model, step)
            say(f"published step {step} of {steps}")
    return sum(each.nbytes for each in model.parameters())


@contextmanager
def _manager(root: Path, *, wanted: bool) -> Iterator[Path | None]:
    """The socket of a memory manager, or None."""
    if not wanted:
        yield None
        return
    command = [str(Path(sys.executable).with_name("tensor-dedup")), "serve"]
    command += ["--socket", str(root / "m.sock")]
    with subprocess.Popen(command) as process:
        try:
            while not (root / "m.sock").exists():
                time.sleep(0.05)
            yield root / "m.sock"
        finally:
            process.terminate()


class Answering:
    """Engines that answer two requests each at any time, and when each token came."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self.engines = engines
        self.times: list[float] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer until the block ends."""
        tasks = [
            asyncio.create_task(self._ask(engine, f"{number}-{each}"))
            for number, engine in enumerate(self.engines)
            for each in range(2)
        ]
        try:
            while len(self.times) < _TOKENS:
                await asyncio.sleep(_SAMPLES_S)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, engine: Any, name: str) -> None:
        from vllm import SamplingParams

        how = SamplingParams(max_tokens=_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
        number = 0
        while True:
            number += 1
            prompt = {"prompt_token_ids": [number % 1000 + 3, 2, 3, 4]}
            async for _ in engine.generate(prompt, how, f"{name}-{number}"):
                self.times.append(time.perf_counter())

    async def update(self, step: int) -> Update:
        """Let all engines change to a step, and return what was seen meanwhile."""
        began = time.perf_counter()
        await self.change(step)
        ended = time.perf_counter()
        await asyncio.sleep(_AFTERWARDS_S)
        until = time.perf_counter()
        before = 2 * began - until
        took = ended - began
        return Update(
            took,
            self._longest(before, began),
            self._longest(began, until),
            self._count(began - took, began) / took,
            self._count(began, ended) / took,
        )

    async def change(self, step: int) -> None:
        """Let all engines change to a step."""
        await asyncio.gather(*(each.update_weights({"step": step}) for each in self.engines))

    def _longest(self, began: float, until: float) -> float:
        times = [began, *(each for each in self.times if began <= each <= until), until]
        return max(b - a for a, b in itertools.pairwise(times))

    def _count(self, began: float, until: float) -> int:
        return sum(began <= each <= until for each in self.times)


async def _measure(
    store: Path, count: int, manager: Path | None, steps: int
) -> tuple[list[Update], list[Growth]]:
    engines = [_engine(store, manager) for _ in range(count)]
    updates, growths = list[Update](), list[Growth]()
    try:
        answering = Answering(engines)
        async with answering.running():
            before = memory(_pids())
            await answering.change(1)  # what happens once
            for step in range(2, steps + 1):
                await asyncio.sleep(2 * updates[-1].seconds if updates else 3)
                updates.append(await answering.update(step))
                say(f"{updates[-1]}")
            for step in range(steps):
                await asyncio.sleep(1)
                with _Memory() as seen:
                    await answering.change(step)
                    await asyncio.sleep(_AFTERWARDS_S)
                growths.append(Growth(seen.most - before, memory(_pids()) - before))
                say(f"{growths[-1]}")
    finally:
        for each in engines:
            each.shutdown()
    return updates, growths


def _engine(store: Path, manager: Path | None) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config: dict[str, Any] = {"store": str(store)}
    if manager is not None:
        config["memory_manager"] = str(manager)
    settings: dict[str, Any] = {
        "model": "store://policy@0",
        "tensor_dedup": config,
        "weight_transfer_config": {"backend": "tensor_dedup"},
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": 64 << 20,
        "seed": 0,
    }
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))


class _Memory:
    """The most memory of the engines' processes and the manager's until the block ends."""

    def __init__(self) -> None:
        self.most = 0
        self._pids = _pids()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "_Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLES_S):
            self.most = max(self.most, memory(self._pids))


def _pids() -> list[int]:
    """The processes that this one has started: those of engines, and the manager's."""
    return [each.pid for each in psutil.Process().children(recursive=True)]


def memory(pids: Sequence[int]) -> int:
    """Bytes of memory that processes have together, but for files on disks; what they share once.

    It is cheap, so that what is there for a moment is seen.
    """
    own, files = 0, dict[tuple[int, int], int]()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            status = Path(f"/proc/{pid}/status").read_text()
            own += int(status.partition("RssAnon:")[2].split()[0]) * 1024
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if str(entry.readlink()).startswith("/memfd:"):
                        found = entry.stat()
                        files[found.st_dev, found.st_ino] = found.st_blocks * 512
    return own + sum(files.values())


def _line(kind: str, figures: Figures, updates: Sequence[Update]) -> str:
    quiet, paused = figures[pause(kind)]
    seconds = estimate([each.seconds for each in updates])
    rate = statistics.median(each.rate / each.rate_before for each in updates)
    most, left = (estimate(figures[name(kind)][1]) for name in (peak, after))
    cells = (
        kind,
        f"{estimate(paused).text()} s/GB",
        f"≤ {_PAUSE_AIM} s/GB",
        f"{estimate(quiet).text()} s/GB",
        f"{seconds.text(2)} s",
        f"{rate:.0%}".replace("%", " %"),
        most.text(2),
        f"≤ {_PEAK_AIM}",
        left.text(2),
        f"≤ {_AFTER_AIM}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
