"""Retention rules: which steps of a run are deleted after a save. No I/O."""

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
    """The retention rules of a run. A step is deleted if no rule keeps it.

    - `last` is the number of most recently saved steps to keep.
    - `every` keeps the steps whose number is a multiple of it.
    - `best` is a tuple of a metric, a count, and "min" or "max". The rule keeps that number of
      steps, those with the best values of the metric.

    If all three are None, all steps are kept.
    """

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
        """Whether there is at least one rule."""
        return self.last is not None or self.every is not None or self.best is not None

    @property
    def goals(self) -> Goals:
        """The metric in the rule `best`, mapped to "min" or "max". Empty without that rule."""
        return {} if self.best is None else {self.best[0]: self.best[2]}

    def dropped(
        self, metrics: Metrics, kept: Collection[int], saved: int, order: Iterable[int]
    ) -> list[int]:
        """Return the steps to delete after the step `saved` was saved.

        `metrics` maps each step to its metrics. `order` has the steps in the order of saving, which
        the rule `last` needs. `saved` and the steps in `kept` are never deleted. If there is a rule
        `best`, but no step has a number for its metric, nothing is deleted: the metric may be
        misspelt.
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
    """Return whether `value` is an integer and at least `least`.

    Integers of Python and numpy count, but not bool.
    """
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def goal(metric: str, noted: Iterable[Goals] = ()) -> Mode | None:
    """Return whether "min" or "max" of a metric is best, or None if that is unknown.

    `noted` has mappings from metrics to "min" or "max"; the first that has the metric decides. If
    none has it, the parts of the metric's name decide: the parts of `eval/top1_acc` are `eval`,
    `top1` and `acc`. If the parts contradict each other, the result is None.
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
    """Return the steps that have `metric`, best first. Of equal steps, the smaller number is first.

    `mode` says whether "min" or "max" is best. Steps whose value is NaN are left out.
    """
    sign = 1 if mode == "min" else -1
    having = [
        step for step, found in metrics.items() if metric in found and not math.isnan(found[metric])
    ]
    return sorted(having, key=lambda step: (sign * metrics[step][metric], step))


def best(metrics: Metrics, metric: str, mode: Mode | None, run: str) -> int:
    """Return the number of the step with the best value of `metric`.

    `mode` says whether "min" or "max" is best. `run` is the run's name for error messages.

    Raises:
        UnknownMetricError: No step has this metric, or its value is NaN in every step.
        UnknownGoalError: `mode` is None.
        BadMetricError: `mode` is invalid.
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
