"""What saving costs a training that goes on: ours in the background, DCP's, and torch.save.

    python scripts/bench/checkpoints_async.py [--rounds N] [--steps N] [--quick] [--write]

Trains ResNet-18 (122 tensors) on made images with its backbone frozen, and all of it, and saves
model and optimizer after every step. In each round every way to save has its turn, in an order
drawn anew. `--quick` shows that everything runs: its numbers say little. `--write` puts the section
into docs/benchmarks/tables.md instead of the one there.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import random
import shutil
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Literal

import click
import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from bench.checkpoint_models import ResNet18, images
from bench.stats import Estimate, Section, estimate, verdict
from tensor_dedup.training import CheckpointStore, PendingSave

NOTHING: Final = "no saves"
LAZY: Final = "ours, save_async, lazy"
EAGER: Final = "ours, save_async"
RAW: Final = "ours, save_async, lazy, compress=None"
SYNC: Final = "ours, save"
DCP: Final = "DCP async_save"
SNAPSHOT: Final = "torchsnapshot async_take"
TORCH: Final = "torch.save"
_SNAPSHOTS: Final = (SNAPSHOT,) if find_spec("torchsnapshot") else ()
METHODS: Final = (NOTHING, LAZY, EAGER, RAW, SYNC, DCP, *_SNAPSHOTS, TORCH)
EVERY: Final = (1, 2, 5, 10)
PACKAGES: Final = ("torch", "numpy", "blake3", "xxhash")
_LEAST_STEPS = 50
_NOTES = """\
- *Blocking* is the mean time of a step with saving minus that of a step without, of the same round:
  the calls that save, `before_update`, and what the background takes from the training on the same
  cores. *In calls* is the time in those calls alone. After a turn what is unfinished is waited for:
  *at the end* is that wait, once a turn.
- *Lazy* is what `run.hook(optimizer)` makes of it: large tensors are copied or compared during the
  next forward and backward pass, and `before_update` waits for the rest. Without it `save_async`
  returns when that is done. `save` returns when the step is durable; `torch.save` returns when it
  is in the page cache. DCP runs in one process without a process group, with one stager for all its
  saves, which took about half of what one for each takes; it waits for its save before, and writes
  over the checkpoint before the last, and syncs its files, not their folder.
- torchsnapshot takes part where it is installed (0.1.0 runs with PyTorch 2.13); it writes over the
  snapshot before the last, as DCP does here.
- Ours keeps two steps (`keep_last=2`), compresses (`auto`) unless it says otherwise, and compares
  every tensor in every step. One save is under way at a time: what takes longer than the steps in
  between is waited for by the next.
- Intervals are of the median over rounds, 95 %.
- No GPU was used: the copies of both are from host memory to host memory.
"""
Times = dict[str, list[float]]


class Training:
    """A training whose steps can be timed in parts."""

    def __init__(self, *, frozen: bool) -> None:
        torch.manual_seed(0)
        self.model = ResNet18()
        self._frozen = frozen
        moving = [*(self.model.fc if frozen else self.model).parameters()]
        self.model.requires_grad_(requires_grad=not frozen)
        self.model.fc.requires_grad_(requires_grad=True)
        self.model.train(not frozen)
        self.optimizer = torch.optim.SGD(moving, lr=1e-3, momentum=0.9)
        self._data = images(1, 16)

    @property
    def objects(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def state(self) -> dict[str, Any]:
        """The same as others take it."""
        return {name: each.state_dict() for name, each in self.objects.items()}

    def step(self, before_update: Callable[[], None]) -> float:
        """Forward, backward, update; seconds in `before_update`."""
        x, classes = self._data
        self.optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(self.model(x), classes)
        loss.backward()
        began = time.perf_counter()
        before_update()
        taken = time.perf_counter() - began
        self.optimizer.step()
        return taken


@dataclass
class Method:
    """A way to save: what is called after each step, after each turn, and before updates."""

    save: Callable[[Training, int], None]
    settle: Callable[[], None]
    before_update: Callable[[], None] = lambda: None


@dataclass
class Turns:
    """Seconds by method, one value a round: of a step, in the calls of a step, at the end."""

    step: Times
    calls: Times
    end: Times


class Ours:
    """A run of ours, and what its saves in the background took."""

    def __init__(self, folder: Path, name: str) -> None:
        compress: Literal["auto"] | None = None if name == RAW else "auto"
        self.run = CheckpointStore(folder, "run", keep_last=2, compress=compress)
        self.pending: list[PendingSave] = []

    def method(self, name: str) -> Method:
        """One of the ways to save into it."""

        def begin(training: Training, step: int) -> None:
            self.pending.append(self.run.save_async(training.objects, step, lazy=name != EAGER))

        def sync(training: Training, step: int) -> None:
            self.run.save(training.objects, step)

        return Method(sync if name == SYNC else begin, self._settle, self.run.before_update)

    def _settle(self) -> None:
        for each in self.pending[-1:]:
            each.wait()

    def parts(self) -> dict[str, list[float]]:
        """Seconds of each part of each save."""
        names = ("metadata", "copy", "write")
        return {name: [getattr(each.times, name) for each in self.pending] for name in names}


class Dcp:
    """PyTorch Distributed Checkpoint in one process; one save at a time, as it is used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # What else there is to choose needs a GPU.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._pending: Any = None

    def save(self, training: Training, step: int) -> None:
        """Begin to save; waits for the save before."""
        self.settle()
        path = self._folder / str(step % 2)
        self._pending = async_save(
            training.state, checkpoint_id=str(path), no_dist=True, async_stager=self._stager
        )

    def settle(self) -> None:
        """Wait for what was begun."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None


class Torchsnapshot:
    """torchsnapshot in one process, where it is installed; one save at a time, as DCP."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library: Any = import_module("torchsnapshot")
        self._pending: Any = None

    def save(self, training: Training, step: int) -> None:
        """Begin to save; waits for the save before."""
        self.settle()
        path = str(self._folder / str(step % 2))
        self._pending = self._library.Snapshot.async_take(path, training.objects)

    def settle(self) -> None:
        """Wait for what was begun."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


def made(name: str, folder: Path) -> tuple[Method, Ours | None]:
    """A way to save, into a folder."""
    folder.mkdir()
    if name in (LAZY, EAGER, RAW, SYNC):
        ours = Ours(folder, name)
        return ours.method(name), ours
    if name == DCP:
        dcp = Dcp(folder)
        return Method(dcp.save, dcp.settle), None
    if name == SNAPSHOT:
        snapshots = Torchsnapshot(folder)
        return Method(snapshots.save, snapshots.settle), None
    if name == TORCH:
        return Method(lambda t, _: torch.save(t.state, folder / "model"), lambda: None), None
    return Method(lambda *_: None, lambda: None), None


class Bench:
    """One training, and every way to save it."""

    def __init__(self, folder: Path, *, frozen: bool) -> None:
        folder.mkdir()
        self._training, self._count = Training(frozen=frozen), 0
        both = {name: made(name, folder / str(n)) for n, name in enumerate(METHODS)}
        self._methods = {name: method for name, (method, _) in both.items()}
        self.ours = {name: ours for name, (_, ours) in both.items() if ours is not None}
        for method in self._methods.values():  # first steps cost more
            self._turn(method, 2, 1)
        for ours in self.ours.values():
            ours.pending.clear()

    def _turn(self, method: Method, steps: int, every: int) -> tuple[float, float, float]:
        """Mean seconds of a step, those in its calls, and those until all is saved."""
        began, calls = time.perf_counter(), 0.0
        for number in range(steps):
            calls += self._training.step(method.before_update)
            if number % every == every - 1:
                self._count += 1
                calls -= time.perf_counter()
                method.save(self._training, self._count)
                calls += time.perf_counter()
        done = time.perf_counter()
        method.settle()
        return (done - began) / steps, calls / steps, time.perf_counter() - done

    def rounds(self, names: Sequence[str], rounds: int, steps: int, every: int) -> Turns:
        """Turns of each method in each round."""
        dice = random.Random(every)
        turns = Turns(defaultdict(list), defaultdict(list), defaultdict(list))
        for _ in range(rounds):
            for name in dice.sample(names, len(names)):
                step, calls, end = self._turn(self._methods[name], steps, every)
                turns.step[name].append(step)
                turns.calls[name].append(calls)
                turns.end[name].append(end)
            for ours in self.ours.values():
                ours.run.gc(0)
        return turns

    def close(self) -> None:
        """Let go of everything."""
        for ours in self.ours.values():
            ours.run.close()


def blocking(turns: Turns, name: str) -> list[float]:
    """Milliseconds by which a step is longer with saving, by round."""
    pairs = zip(turns.step[name], turns.step[NOTHING], strict=True)
    return [1e3 * (with_ - without) for with_, without in pairs]


def beyond(turns: Turns, name: str, share: float, other: str) -> Estimate:
    """Milliseconds by which one blocks longer than a share of what the other one does."""
    pairs = zip(blocking(turns, name), blocking(turns, other), strict=True)
    return estimate([one - share * two for one, two in pairs])


def _ms(seconds: Sequence[float]) -> Estimate:
    return estimate([1e3 * each for each in seconds])


def _measured(title: str, bench: Bench, rounds: int, steps: int) -> Iterator[str]:
    turns = bench.rounds(METHODS, rounds, steps, 1)
    yield f"**{title}**, {rounds} rounds of {steps} steps, every step saved."
    yield f"A step without saving: {_ms(turns.step[NOTHING]).text(1, ' ms')}."
    yield ""
    yield "| | blocking, ms a step | in calls, ms a step | at the end, ms |"
    yield "| --- | --- | --- | --- |"
    for name in METHODS[1:]:
        cells = (estimate(blocking(turns, name)).text(1), _ms(turns.calls[name]).text(1))
        yield f"| {name} | {' | '.join(cells)} | {_ms(turns.end[name]).median:.0f} |"
    yield ""
    yield from _aims(turns, aimed="frozen" in title)
    yield ""
    yield "| ours, ms | metadata | copy | write |"
    yield "| --- | --- | --- | --- |"
    for name in (LAZY, EAGER, RAW):
        parts = bench.ours[name].parts().values()
        yield f"| {name} | {' | '.join(_ms(part).text(1) for part in parts)} |"


def _aims(turns: Turns, *, aimed: bool) -> Iterator[str]:
    for name, share, other in ((LAZY, 0.5, DCP), (EAGER, 0.5, DCP), (SYNC, 1.0, TORCH)):
        found = beyond(turns, name, share, other)
        aim = f"; aim ≤ 0: {verdict(found, most=0.0)}" if aimed else ""
        yield f"- blocking of {name} minus {share:g} x {other}: {found.text(1, ' ms')}{aim}"


def _swept(bench: Bench, rounds: int, steps: int) -> Iterator[str]:
    names = (NOTHING, LAZY, RAW, DCP, TORCH)
    yield "| saved every | " + " | ".join(f"{name}, ms a step" for name in names) + " |"
    yield f"|{' --- |' * (len(names) + 1)}"
    for every in EVERY if rounds > 1 else EVERY[:2]:
        turns = bench.rounds(names, rounds, max(steps, every), every)
        yield f"| {every} | {' | '.join(_ms(turns.step[name]).text(1) for name in names)} |"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=12, show_default=True, type=click.IntRange(min=1))
@click.option("--steps", default=10, show_default=True, type=click.IntRange(min=1))
@click.option("--quick", is_flag=True, help="Two rounds of few steps.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Where to save.")
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks/tables.md.")
def main(rounds: int, steps: int, quick: bool, work: Path | None, write: bool) -> None:
    """Measure what saving takes from a training."""
    rounds, steps = (2, 2) if quick else (rounds, steps)
    # DCP's words on one process and on writing over what is there, each of its saves.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
    section = Section("checkpoints_async.py", "Saving in the background", PACKAGES)
    body: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="tensor-dedup-", dir=work))
    try:
        for title, frozen in (("Backbone frozen, eval mode", True), ("All trained", False)):
            bench = Bench(folder / title.split()[0], frozen=frozen)
            parts = _measured(title, bench, rounds, steps), _swept(bench, rounds // 2, steps)
            for part in parts:
                found = list(part)
                click.echo("\n".join(found), err=True)  # it takes a while
                body += [*found, ""]
            bench.close()
    finally:
        shutil.rmtree(folder)
    if rounds * steps < _LEAST_STEPS:
        body += [f"Fewer than {_LEAST_STEPS} steps of each: for a look only.", ""]
    how = f"{rounds} rounds of {steps} steps"
    section.finish("checkpoints-async", how, body[:-1], _NOTES, write=write)


if __name__ == "__main__":
    main()
