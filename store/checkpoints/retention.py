"""Retention: which steps of a run are deleted after a save. No I/O."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from tensor_dedup.store.checkpoints.errors import BadMetricError, BadOption, BadOptionError

Mode: TypeAlias = Literal["min", "max"]
Metrics: TypeAlias = Mapping[int, Mapping[str, float]]
"""The metrics of each step."""


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
            if count is not None and count < 1:
                raise BadOptionError.of(BadOption.RETENTION, name, f"{count} steps", count=count)
        if self.best is not None:
            metric, count, mode = self.best
            if count < 1 or mode not in ("min", "max"):
                what = f"{(metric, count, mode)!r}"
                raise BadOptionError.of(BadOption.RETENTION, "keep_best", what, metric=metric)

    @property
    def any(self) -> bool:
        """Whether there is a rule."""
        return self.last is not None or self.every is not None or self.best is not None

    def dropped(
        self, metrics: Metrics, kept: Collection[int], saved: int, order: Iterable[int]
    ) -> list[int]:
        """Return the steps to delete when `saved` has just been saved.

        That one stays, and so do the `kept` ones. `order` is the order of saving; `last` keeps the
        last steps of it that are in `metrics`.
        """
        if not self.any:
            return []
        steps = sorted(metrics)
        staying = {saved, *kept}
        if self.last is not None:
            staying.update([step for step in order if step in metrics][-self.last :])
        if self.every is not None:
            staying.update(step for step in steps if step % self.every == 0)
        if self.best is not None:
            metric, count, mode = self.best
            staying.update(ranked(metrics, metric, mode)[:count])
        return [step for step in steps if step not in staying]


def ranked(metrics: Metrics, metric: str, mode: Mode) -> Sequence[int]:
    """Return the steps that have a metric, the best first, and the earlier of equal ones first.

    A NaN is never the best.
    """
    sign = 1 if mode == "min" else -1
    having = [
        step for step, found in metrics.items() if metric in found and not math.isnan(found[metric])
    ]
    return sorted(having, key=lambda step: (sign * metrics[step][metric], step))


def best(metrics: Metrics, metric: str, mode: Mode, run: str) -> int:
    """Return the best step by a metric.

    Raises:
        BadMetricError: no step has that metric, or the mode is unknown.
    """
    if mode not in ("min", "max"):
        raise BadMetricError.at(f"run {run!r}", f"the mode {mode!r}, not 'min' or 'max'")
    found = ranked(metrics, metric, mode)
    if not found:
        known = sorted({name for each in metrics.values() for name in each})
        what = f"no step has the metric {metric!r}, they have {', '.join(known) or 'none'}"
        raise BadMetricError.at(f"run {run!r}", what, metric=metric)
    return found[0]
