"""The retention of a run: which steps its rules delete now, and what keeps a rule from working."""

import logging
import math
from collections.abc import Callable, Collection, Mapping

from tensor_dedup.store.objects import Objects
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.steps.retention import Metrics, Retention
from tensor_dedup.store.steps.runs import StepPlace, in_save_order, step_name
from tensor_dedup.suggestions import perhaps
from tensor_dedup.training.in_flight import BaseStep

_log = logging.getLogger(__name__)


class RunRetention:
    """The retention rules of a run whose steps are saved in one store. Safe from any thread."""

    def __init__(self, objects: Objects, run: str, rules: Retention) -> None:
        self.rules = rules
        self._objects, self._run = objects, run
        self._warned: set[str] = set()

    def unretained(
        self,
        places: Mapping[int, StepPlace],
        kept: Collection[int],
        metrics: Callable[[], Metrics],
        saved: int | None = None,
    ) -> list[int]:
        """Return the steps in `places` that no rule keeps.

        `saved` is the step that was saved just now, by default the last one in `places`. `kept`
        has the kept steps. `metrics` is called only if a rule needs the metrics of the steps. Left
        out are steps that cannot be read, and those with which a running save of this process
        compares its tensors: they go after a later step, which that save adds.
        """
        readable = {step: place for step, place in places.items() if place.readable}
        if not self.rules.any or not readable:
            return []
        order = in_save_order(readable)
        found = {step: {} for step in order} if self.rules.best is None else metrics()
        last = order[-1] if saved is None else saved
        needed = {base.name for base in BaseStep.in_store(self._objects)}
        return [
            step
            for step in self.rules.dropped(found, kept, last, order)
            # What is not among the places was saved since then.
            if step in readable and step_name(self._run, step) not in needed
        ]

    def warn(self, notes: Notes) -> None:
        """Warn, once for each metric, that the metrics of a step are hardly as they were meant.

        This is so if the metric of a rule is missing, or if a metric is NaN.
        """
        for name in (*self.rules.goals, *notes.metrics):
            value = notes.metrics.get(name)
            if name in self._warned or (value is not None and not math.isnan(value)):
                continue
            self._warned.add(name)
            if value is None:
                what = f"has no metric {name!r}{perhaps(name, notes.metrics)}, by which keep_best "
                what += "chooses; while no step has it, none is deleted"
            else:
                what = f"has NaN as its metric {name!r}, which is never the best"
            step = step_name(notes.run, notes.step)
            _log.warning("%s: the step %s %s", self._objects.layout.root, step, what)
