"""A training that saves every step: what saving takes from it, slower steps included."""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from bench.checkpoint_methods import OURS, RAW, emptied, size_of, sync
from bench.results import Figures, estimate_scaled
from bench.stats import estimate
from bench.turns import say, timed
from tensor_dedup import CheckpointStore

SYNCED: Final = "torch.save + fsync"
NOTES: Final = """\
- Linear layers in float32 on two threads, with Adam, whose state is saved too: all of it changes in
  each step, and each step is saved. In each round every method has a turn, in an order drawn anew,
  in a folder of its own, after a save that is not measured.
- *Blocked* is how much longer a step takes than in the turn without saves of the same round: calls,
  copies, and what the background takes from the training. Ours is `save_async` and `before_update`.
- *After the last step* is `close`, which waits for the last saves and encodes what waits for it;
  *at most* is what the files take after any step of the turn, *in the end* after `close`.
"""
_NOTHING: Final = "no saves"
_STEPS: Final = 6
_TOKENS: Final = 192
# Megabytes of a step, and the width and the number of blocks that make them.
_SIZES: Final = ((105, 370, 8), (420, 741, 8))
_QUICK: Final = ((1, 64, 3),)
_MS: Final = 1e-3


class _Training:
    """A training whose state can be saved, and changes as a whole in each step."""

    def __init__(self, width: int, blocks: int) -> None:
        torch.manual_seed(0)
        self._width = width
        self._model = nn.Sequential(*(_block(width) for _ in range(blocks)))
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)
        self.objects: dict[str, Any] = {"model": self._model, "optimizer": self._optimizer}

    def step(self, before_update: Callable[[], None]) -> None:
        self._optimizer.zero_grad()
        loss: Tensor = self._model(torch.randn(_TOKENS, self._width)).square().mean()
        torch.autograd.backward(loss)
        before_update()
        self._optimizer.step()


def _block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class _Way:
    """A way to save, of which `before_update` and `close` may wait."""

    def save(self, training: _Training, step: int) -> None:
        """Save, or begin to."""

    def before_update(self) -> None:
        """Wait until the model may change."""

    def close(self) -> None:
        """Wait until everything is saved."""


class _Synced(_Way):
    """Files of torch, of which the last two are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, training: _Training, step: int) -> None:
        path = self._folder / str(step % 2)
        torch.save({name: each.state_dict() for name, each in training.objects.items()}, path)
        sync(path)


class _Ours(_Way):
    """A run that saves in the background."""

    def __init__(self, folder: Path, *, raw: bool) -> None:
        self._run = CheckpointStore(folder, "run", compress=None if raw else "auto")

    def save(self, training: _Training, step: int) -> None:
        self._run.save_async(training.objects, step, lazy=True)

    def before_update(self) -> None:
        self._run.before_update()

    def close(self) -> None:
        self._run.close()


@dataclass(frozen=True)
class _Turn:
    """Seconds a step, seconds of `close`, and bytes: the most after a step, and in the end."""

    step: float
    close: float
    most: int
    end: int


def steps(
    work: Path, rounds: int, figures: Figures, *, quick: bool, stated: bool
) -> tuple[int, list[str]]:
    """Trainings of two sizes. Returns how many steps a turn has, and the lines of a table.

    Seconds that a step is blocked are entered in `figures`. `stated`: only what docs/results.md
    has.
    """
    torch.set_num_threads(2)
    count = 2 if quick else _STEPS
    head = ("MB a step", "a step without, ms", "method", "blocked, ms a step", "ours to it")
    more = ("after the last step, s", "at most, MB", "in the end, MB")
    lines = [f"| {' | '.join((*head, *more))} |", "| --- " * (len(head) + len(more)) + "|"]
    for size, width, blocks in _QUICK if quick else _SIZES:
        names = [_NOTHING, SYNCED, OURS, *([] if stated else [RAW])]
        turns = _in_turns(work / "steps", names, rounds, count, _Training(width, blocks))
        blocked = {
            name: [a.step - b.step for a, b in zip(turns[name], turns[_NOTHING], strict=True)]
            for name in names[1:]
        }
        figures[f"steps: {size} MB, blocked"] = blocked[SYNCED], blocked[OURS]
        lines += _rows(size, turns, blocked)
    return count, lines


def _in_turns(
    folder: Path, names: list[str], rounds: int, count: int, training: _Training
) -> dict[str, list[_Turn]]:
    """The turns of each method; the first round is dropped."""
    dice = random.Random(1)
    turns: dict[str, list[_Turn]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in dice.sample(names, len(names)):
            turns[name].append(_turn(emptied(folder), name, count, training))
            shutil.rmtree(folder)
        say(f"steps: {number} of {rounds}")
    return {name: found[1:] for name, found in turns.items()}


def _turn(folder: Path, name: str, count: int, training: _Training) -> _Turn:
    folder.mkdir(parents=True)
    way = _way(name, folder)
    most, taken = 0, 0.0
    for number in range(count + 1):
        began = time.perf_counter()
        way.save(training, number)
        training.step(way.before_update)
        taken += time.perf_counter() - began if number else 0.0
        with suppress(FileNotFoundError):  # files go while they are counted
            most = max(most, size_of(folder).allocated)
    closing = timed(way.close)
    return _Turn(taken / count, closing, most, size_of(folder).allocated)


def _way(name: str, folder: Path) -> _Way:
    if name == _NOTHING:
        return _Way()
    return _Synced(folder) if name == SYNCED else _Ours(folder, raw=name == RAW)


def _rows(
    size: int, turns: dict[str, list[_Turn]], blocked: dict[str, list[float]]
) -> Iterator[str]:
    without = estimate_scaled(estimate([turn.step for turn in turns[_NOTHING]]), _MS).text(0)
    for name, seconds in blocked.items():
        ratio = estimate([a / b for a, b in zip(blocked[OURS], seconds, strict=True)]).text(2)
        cells = (
            *(str(size), without, name, estimate_scaled(estimate(seconds), _MS).text(0)),
            "" if name == OURS else f"{ratio} x",
            estimate([turn.close for turn in turns[name]]).text(2),
            f"{max(turn.most for turn in turns[name]) / 1e6:,.0f}",
            f"{max(turn.end for turn in turns[name]) / 1e6:,.0f}",
        )
        yield f"| {' | '.join(cells)} |"
