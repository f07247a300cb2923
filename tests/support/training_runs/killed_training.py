"""Trainings that are killed with SIGKILL at random and resumed, until one reaches its end.

A training here is a function of its store's folder that resumes from the run's latest step, if
there is one, and calls `record` with each loss. It runs in forked children, so that frameworks are
imported once; call `killed` in a process of `fresh.call_forked`, which has computed nothing.
"""

import faulthandler
import gc
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from tensor_dedup.training import CheckpointStore

# A kill comes so many seconds, at most, after a training has got further.
_WITHIN_S = 0.1


def enough_steps(kills: int) -> int:
    """The number of steps of a small training that leaves something to do after so many kills."""
    return 10 + 20 * kills


def record(root: str, step: int, loss: float) -> None:
    """Note a loss, to the last bit, in a way that a kill cannot tear."""
    with Path(f"{root}.losses").open("ab", buffering=0) as file:
        file.write(f"{step} {loss.hex()}\n".encode())


def recorded(root: str) -> dict[int, set[str]]:
    """All losses of each step, one or several when it was trained again."""
    found: dict[int, set[str]] = {}
    for line in Path(f"{root}.losses").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


def assert_same_losses(root: str, alone: str, count: int) -> dict[int, set[str]]:
    """So many losses were recorded, the same ones by a killed and an uninterrupted training."""
    losses = recorded(alone)
    assert losses.keys() == set(range(count))
    assert recorded(root) == losses
    return losses


def run(train: Callable[[str], None], root: str) -> int:
    """Start a training in a forked child; its process id."""
    child = os.fork()
    if not child:
        code = 1
        faulthandler.dump_traceback_later(300, exit=True)  # one that hangs fails, and says where
        try:
            train(root)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    return child


def killed(train: Callable[[str], None], root: str, kills: int) -> list[int]:
    """Kill a training so many times, each time after it has got further, then let it end.

    Returns the latest step that was there after each kill.
    """
    dice, steps = random.Random(4), list[int]()
    CheckpointStore(root, "run").close()
    for _ in range(kills):
        child = run(train, root)
        while os.waitpid(child, os.WNOHANG) == (0, 0) and _latest(root) <= max(steps, default=-1):
            time.sleep(0.01)
        time.sleep(dice.uniform(0.0, _WITHIN_S))
        os.kill(child, signal.SIGKILL)  # fails if it has ended: then too little was left to train
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        latest = _latest(root)
        assert latest >= max(steps, default=-1)  # nothing that was there is gone
        steps.append(latest)
    ended(train, root)
    return steps


def killed_and_alone(train: Callable[[str], None], root: str, alone: str, kills: int) -> list[int]:
    """Kill a training as `killed` does, and let another one of its kind run to its end."""
    latest = killed(train, root, kills)
    ended(train, alone)
    return latest


def ended(train: Callable[[str], None], root: str) -> None:
    """Let a training run to its end."""
    _, status = os.waitpid(run(train, root), 0)
    assert os.waitstatus_to_exitcode(status) == 0


class Rank(Protocol):
    """A rank's training: the store's folder, the rank, and a file for the group of all ranks."""

    def __call__(self, root: str, /, *, number: int, group: str) -> None: ...


def killed_ranks(
    train: Rank, root: str, ranks: int, kills: int, progress: Callable[[str], int]
) -> list[int]:
    """Kill all ranks so many times, one after the other, then let them end.

    Returns the `progress` after each kill, which is greater each time.
    """
    dice, found = random.Random(ranks), list[int]()
    for _ in range(kills):
        before = progress(root)
        children = start_ranks(train, root, ranks)
        while progress(root) <= before and not any(map(_has_ended, children)):
            time.sleep(0.01)
        time.sleep(dice.uniform(0.0, _WITHIN_S))
        assert not any(map(_has_ended, children))  # else too little was left to train
        for child in dice.sample(children, ranks):
            os.kill(child, signal.SIGKILL)
            time.sleep(dice.choice([0.0, 0.0, 0.05]))  # the others go on for a moment
        for child in children:
            os.waitpid(child, 0)
        found.append(progress(root))
        assert found[-1] > before
    end_ranks(train, root, ranks)
    return found


def killed_ranks_and_alone(train: Rank, root: str, alone: str, ranks: int, kills: int) -> list[int]:
    """Kill all ranks as `killed_ranks` does, and let another training of their kind end."""
    for folder in (root, alone):
        CheckpointStore(folder, "run").close()  # one rank makes it
    found = killed_ranks(train, root, ranks, kills, _latest)
    end_ranks(train, alone, ranks)
    return found


def join_group(number: int, file: str, ranks: int) -> None:
    """Make this process one of several, as a launcher and a framework do it together."""
    here = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in here.items()})
    dist.init_process_group("gloo", f"file://{file}", rank=number, world_size=ranks)


def leave_group() -> None:
    """Destroy the process group. The caller has let go of every model that used it.

    A DDP model that is the last to hold a gloo group waits for the group's threads and holds the
    GIL meanwhile, for which a thread that still drops the state of an autocast waits
    (pytorch/pytorch#56297): of 150 pairs of ranks that ended with their model alive, 4 hung.
    """
    gc.collect()
    dist.destroy_process_group()


def mean_by_rank(  # type: ignore[no-untyped-def]  # torch takes no other annotation than its own
    ranks: int,
    bucket,  # noqa: ANN001
) -> torch.futures.Future[torch.Tensor]:
    """Add gradients in the order of ranks.

    DDP lays its buckets out anew after its first step, and where a gradient lies decides in which
    order more than two ranks add it up: a training that starts again would differ in last bits.
    """
    parts = [torch.empty_like(bucket.buffer()) for _ in range(ranks)]
    dist.all_gather(parts, bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(torch.stack(parts).sum(0) / ranks)
    return done


def start_ranks(train: Rank, root: str, ranks: int) -> list[int]:
    """Start all ranks of a training in forked children; their process ids."""
    group = f"{root}-group-{time.monotonic_ns()}"
    return [run(partial(train, number=n, group=group), root) for n in range(ranks)]


def end_ranks(train: Rank, root: str, ranks: int) -> None:
    """Let all ranks of a training run to their end."""
    for child in start_ranks(train, root, ranks):
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _latest(root: str) -> int:
    with CheckpointStore(root, "run") as run:
        latest = run.latest()
    return -1 if latest is None else latest
