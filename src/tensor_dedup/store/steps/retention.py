"""Retention: which steps of a run are deleted after a save. No I/O."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Final, Literal, TypeAlias, TypedDict

from tensor_dedup.store.steps.errors import (
    BadMetricError,
    BadOption,
    BadOptionError,
    UnknownGoalError,
    UnknownMetricError,
)
from tensor_dedup.suggestions import perhaps

Mode: TypeAlias = Literal["min", "max"]
Metrics: TypeAlias = Mapping[int, Mapping[str, float]]
"""The metrics of each step."""
Goals: TypeAlias = Mapping[str, Mode]
"""Which value of a metric is best, by its name."""

# Parts of metrics' names that say which value is best, as frameworks and papers write them.
_LEAST: Final = frozenset(
    ("err", "perplexity", "ppl", "mae", "mse", "rmse", "mape", "wer", "cer", "fid", "nll", "bpb")
)
_GREATEST: Final = frozenset(
    (
        *("acc", "accuracy", "auc", "auroc", "aucpr", "map", "f1", "precision", "recall", "bleu"),
        *("rouge", "r2", "iou", "miou", "dice", "score", "reward", "psnr", "ssim", "mcc", "ndcg"),
    )
)


class Rules(TypedDict, total=False):
    """The retention rules as keyword arguments of CheckpointStore and its wrappers."""

    keep_last: int | None
    keep_every: int | None
    keep_best: tuple[str, int, Mode] | None


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention rules: a step is deleted when no rule keeps it. Without a rule all stay."""

    last: int | None = None
    every: int | None = None
    best: tuple[str, int, Mode] | None = None

    def __post_init__(self) -> None:
        for name, count in (("keep_last", self.last), ("keep_every", self.every)):
            if count is not None and not _is_count(count):
                what = f"{count!r} is not a number of steps, from 1 on"
                raise BadOptionError.of(BadOption.RETENTION, name, what, count=count)
        if self.best is not None:
            match self.best:
                case (str(), count, "min" | "max") if _is_count(count):
                    pass
                case _:
                    what = f"{self.best!r} is not (metric, number of steps, 'min' or 'max')"
                    raise BadOptionError.of(BadOption.RETENTION, "keep_best", what)

    @property
    def any(self) -> bool:
        """Whether there is a rule."""
        return self.last is not None or self.every is not None or self.best is not None

    @property
    def goals(self) -> Goals:
        """Which value is best of the metric that the rules name."""
        return {} if self.best is None else {self.best[0]: self.best[2]}

    def dropped(
        self, metrics: Metrics, kept: Collection[int], saved: int, order: Iterable[int]
    ) -> list[int]:
        """Return the steps to delete when `saved` has just been saved.

        That one stays, and so do the `kept` ones. `order` is the order of saving; `last` keeps the
        last steps of it that are in `metrics`. While no step has a number as the metric of `best`,
        all stay: its name may be misspelt, and the other rules would delete what was to be kept.
        """
        if not self.any:
            return []
        steps = sorted(metrics)
        staying = {saved, *kept}
        if self.best is not None:
            metric, count, mode = self.best
            if not (best := ranked(metrics, metric, mode)[:count]):
                return []
            staying.update(best)
        if self.last is not None:
            staying.update([step for step in order if step in metrics][-self.last :])
        if self.every is not None:
            staying.update(step for step in steps if step % self.every == 0)
        return [step for step in steps if step not in staying]


def is_whole(value: object, least: int) -> bool:
    """Return whether an option is a whole number from `least` on, of Python's or of numpy's."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def goal(metric: str, noted: Iterable[Goals] = ()) -> Mode | None:
    """Return which value of a metric is best: as first noted, or as its name says; else None.

    A name says so by its parts: those of `eval/top1_acc` are `eval`, `top1` and `acc`. Where they
    contradict each other, it says nothing.
    """
    for goals in noted:
        if metric in goals:
            return goals[metric]
    parts = {part for part in re.split(r"[^a-z0-9]+", metric.lower()) if part}
    parts |= {part.rstrip("0123456789") for part in parts}  # acc1
    least = any(part in _LEAST or part.endswith(("loss", "error")) for part in parts)
    greatest = bool(parts & _GREATEST)
    if least == greatest:
        return None
    return "min" if least else "max"


def ranked(metrics: Metrics, metric: str, mode: Mode) -> Sequence[int]:
    """Return the steps that have a metric, the best first, and the earlier of equal ones first.

    A NaN is never the best.
    """
    sign = 1 if mode == "min" else -1
    having = [
        step for step, found in metrics.items() if metric in found and not math.isnan(found[metric])
    ]
    return sorted(having, key=lambda step: (sign * metrics[step][metric], step))


def best(metrics: Metrics, metric: str, mode: Mode | None, run: str) -> int:
    """Return the best step by a metric.

    Raises:
        UnknownMetricError: no step has that metric, or it is NaN in all that do.
        UnknownGoalError: the mode is None.
        BadMetricError: the mode is invalid.
    """
    where = f"run {run!r}"
    if mode not in ("min", "max", None):
        raise BadMetricError.at(where, f"the mode {mode!r} is neither 'min' nor 'max'")
    found = ranked(metrics, metric, mode or "min")
    if not found:
        known = sorted({name for each in metrics.values() for name in each})
        what = f"no step has the metric {metric!r}{perhaps(metric, known)}; "
        what += f"they have {', '.join(known) or 'none'}"
        if metric in known:
            what = f"the metric {metric!r} is NaN in every step that has it"
        raise UnknownMetricError.at(where, what, metric=metric)
    if mode is None:
        what = f"nothing says whether the least or the greatest {metric!r} is best"
        raise UnknownGoalError.at(where, what, metric=metric)
    return found[0]
