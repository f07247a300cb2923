"""Turns of a training of one or several ranks, each engine saving its steps in turn."""

import contextlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from bench import datastates_engines as engines
from bench.datastates_engines import (
    DECOUPLED,
    NOTHING,
    SAVE,
    SAVE_RAW,
    Engine,
    Training,
    made,
    tensors,
)
from tensor_dedup.training.capture import HostPool

_STUCK = timedelta(minutes=5)


@dataclass(frozen=True)
class Setup:
    """What is measured: `steps` a turn, rounds until `least` and then until its time is over.

    Every engine has a turn in every round, in an order drawn anew. A save follows the first of each
    `every` steps, so that the last save of a turn has the other steps to end in.
    """

    name: str
    nbytes: int  # of a step over all ranks
    engines: Sequence[str]
    share: float  # of the time
    steps: int = 8
    least: int = 1
    most: int = 7
    ranks: int = 1
    every: int = 1
    frozen: bool = False
    parts: int = 0  # how often each engine's save is taken apart


@dataclass
class Turn:
    """Seconds of a turn, those of the slowest rank."""

    steps: int
    saves: int
    wall: float  # with the last wait
    calls: float  # of these, in calls that save, and before updates
    wait: float  # of these, for the last save
    flush: float  # afterwards, until what was left to the kernel is durable
    tidy: float  # afterwards, deleting; with what is left to be done at leisure


@dataclass
class Found:
    """What a setup gave; all of it goes into the raw results."""

    setup: dict[str, Any]
    rank_bytes: list[int] = field(default_factory=list)
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    restored: dict[str, bool] = field(default_factory=dict)
    parts: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def measure(setup: Setup, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a setup for a time, each rank in a process of its own; `Found` as JSON has it."""
    folder.mkdir(parents=True)
    answer = folder / "found.json"
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(
            target=_rank, args=(number, setup, folder, answer, time.monotonic() + seconds)
        )
        for number in range(setup.ranks)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise SystemExit(f"{setup.name}: the ranks ended with {codes}; their errors are above")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _rank(number: int, setup: Setup, folder: Path, answer: Path, deadline: float) -> None:
    here = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": setup.ranks}
    os.environ.update({name: str(value) for name, value in here.items()})
    os.environ["LOCAL_WORLD_SIZE"] = str(setup.ranks)
    engines.quiet()
    # Threads of OpenMP spin for each other where other programs have the cores (thirty times longer
    # steps were seen). A training on a GPU leaves its host's cores to saving, as this does one.
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'group'}",
        rank=number,
        world_size=setup.ranks,
        timeout=_STUCK,
    )
    # DeepSpeed tells of each checkpoint.
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        found = _Rank(number, setup, folder, deadline).run()
    if number == 0:
        answer.write_text(json.dumps(found, default=vars))
    distributed.barrier()
    distributed.destroy_process_group()


class _Rank:
    def __init__(self, number: int, setup: Setup, folder: Path, deadline: float) -> None:
        self._number, self._setup, self._folder = number, setup, folder
        self._deadline = deadline
        self._training = self._made_training()
        self._step = 0
        self._found = Found({**vars(setup), "engines": list(setup.engines)})

    def _made_training(self) -> Training:
        setup = self._setup
        return Training(setup.nbytes, self._number, setup.ranks, frozen=setup.frozen)

    def run(self) -> Found:
        """All rounds; then each engine's last step is restored, and compared."""
        each: list[Any] = [None] * self._setup.ranks
        distributed.all_gather_object(each, self._training.nbytes)
        self._found.rank_bytes = each
        using = dict(self._made_engines())
        for engine in using.values():  # first steps cost more
            self._turn(engine, 1, 1)
        self._found.turns = {name: [] for name in using}  # in this order, not in that of turns
        dice, rounds = random.Random(self._setup.every), 0
        while rounds < self._setup.least or (rounds < self._setup.most and not self._late()):
            rounds += 1
            for name in dice.sample(list(using), len(using)):
                turn = self._turn(using[name], self._setup.steps, self._setup.every)
                self._found.turns[name].append(turn)
        saving = {name: engine for name, engine in using.items() if name != NOTHING}
        # `save` of ours has the parts of its save_async, one after the other.
        apart = [name for name in saving if name not in (SAVE, SAVE_RAW)]
        self._found.parts = {name: [] for name in apart if self._setup.parts}
        for number in range(self._setup.parts):
            if number and self._late():
                break
            for name in dice.sample(apart, len(apart)):
                self._step += 1
                saving[name].training.step(lambda: None)
                self._found.parts[name].append(saving[name].parts(self._step))
                saving[name].tidy()
        for name, engine in saving.items():
            self._found.restored[name] = self._restores(engine)
        for engine in using.values():
            engine.close()
        return self._found

    def _made_engines(self) -> Iterator[tuple[str, Engine]]:
        """Each engine in a folder of its own, unless its package is not there or does not run."""
        pool = HostPool(2 * self._training.nbytes)
        for number, name in enumerate(self._setup.engines):
            # DeepSpeed's decoupled engine moves what it saves into shared memory for good.
            training = self._made_training() if name == DECOUPLED else self._training
            try:
                yield name, made(name, self._folder / str(number), training, pool)
            except ImportError as error:
                self._found.skipped[name] = str(error)

    def _late(self) -> bool:
        """Whether the time is over, by the clock of the first rank."""
        late = torch.tensor(float(time.monotonic() > self._deadline))
        distributed.broadcast(late, 0)
        return bool(late)

    def _turn(self, engine: Engine, steps: int, every: int) -> Turn:
        distributed.barrier()
        began, calls, saves = time.perf_counter(), 0.0, 0
        for number in range(steps):
            calls += engine.training.step(engine.before_update)
            if number % every == 0:
                self._step, saves = self._step + 1, saves + 1
                calls -= time.perf_counter()
                engine.save(self._step)
                calls += time.perf_counter()
        done = time.perf_counter()
        engine.settle()
        wait = time.perf_counter() - done
        distributed.barrier()
        wall = time.perf_counter() - began
        flush = engines.sync_all(engine.folder) if self._number == 0 else 0.0
        tidy = engines.seconds(engine.tidy)
        slowest = torch.tensor([calls, wait], dtype=torch.float64)
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        calls, wait = slowest.tolist()
        return Turn(steps, saves, wall, calls, wait, flush, tidy)

    def _restores(self, engine: Engine) -> bool:
        """Save once more, restore that into a training that differs, and compare every tensor."""
        self._step += 1
        engine.save(self._step)
        engine.settle()
        distributed.barrier()
        saved, other = tensors(engine.training.state), self._made_training()
        differ = any(not torch.equal(saved[n], t) for n, t in tensors(other.state).items())
        engine.load(self._step, other)
        there = tensors(other.state)
        same = saved.keys() == there.keys()
        same = same and all(torch.equal(saved[name], each) for name, each in there.items())
        both: list[Any] = [None] * self._setup.ranks
        distributed.all_gather_object(both, differ and same)
        engine.tidy()
        return all(both)
