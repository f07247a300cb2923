"""The notes that a step's manifest holds about its run, as strings. No I/O.

A step is a checkpoint that a training run saved. `sequence` orders the steps of a run. The time of
saving is for people only, because clocks may be set back.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import structs

from tensor_dedup.store.format.manifests import PART, Manifest, encode_manifest
from tensor_dedup.store.steps.errors import BadMetricError
from tensor_dedup.store.steps.retention import Goals

_RUN, _STEP, _ADAPTER, _METRICS = "run", "step", "adapter", "metrics"
_SEQUENCE, _GOALS, _SAVED = "sequence", "goals", "saved"
# The end of the year 9999: what is later, no calendar shows.
_END_S: Final = 253_402_300_800
# What JSON has no number for.
_TEXTS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes in a step's manifest.

    - `adapter` is the name of the adapter, the code that split the training state into tensors.
    - `part` is the prefix of the tensors that engines load as the model ("" for all tensors).
    - `sequence` orders the steps of a run by the time of saving: a step that is saved later has a
      greater number. It is 0 until it is assigned.
    - `goals` says whether the least or the greatest value of a metric is best. It covers only the
      metric in the run's `keep_best`.
    - `saved` is the time of saving, in seconds since 1970. It is 0 until it is assigned, and in
      notes without it.
    """

    run: str
    step: int
    adapter: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    part: str = ""
    sequence: int = 0
    goals: Goals = field(default_factory=dict)
    saved: int = 0

    def to_texts(self) -> dict[str, str]:
        """Return the notes as the strings that a manifest holds."""
        found = {
            _RUN: self.run,
            _STEP: str(self.step),
            _ADAPTER: self.adapter,
            _METRICS: json.dumps(
                {name: _wire(value) for name, value in self.metrics.items()}, allow_nan=False
            ),
        }
        found |= {PART: self.part} if self.part else {}
        found |= {_GOALS: json.dumps(self.goals)} if self.goals else {}
        found |= {_SAVED: str(self.saved)} if self.saved else {}
        return found | {_SEQUENCE: str(self.sequence)}

    @staticmethod
    def named(run: str) -> dict[str, str]:
        """Return the note that says whose step it is, as `to_texts` has it."""
        return {_RUN: run}

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> "Notes | None":
        """Parse the notes in `texts`, the strings that a manifest holds.

        Return None if no training run saved the manifest, or if the notes cannot be parsed.
        """
        try:
            metrics = {k: _number(v) for k, v in json.loads(texts[_METRICS]).items()}
            part = texts.get(PART, "")
            sequence = int(texts[_SEQUENCE])
            goals = _goals(json.loads(texts.get(_GOALS, "{}")))
            run, step = texts[_RUN], int(texts[_STEP])
            saved = _time(texts.get(_SAVED, ""))
            return cls(run, step, texts[_ADAPTER], metrics, part, sequence, goals, saved)
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return None


def content_name(manifest: Manifest) -> str:
    """Return a name for the content of a step's manifest, without its place in time.

    Two steps with equal content give the same name, whenever they were saved.
    """
    notes = {key: text for key, text in manifest.notes.items() if key not in (_SEQUENCE, _SAVED)}
    return encode_manifest(structs.replace(manifest, notes=notes))[0]


def _time(text: str) -> int:
    """A time that a calendar shows; 0 for any other text, for what it says is never needed."""
    seconds = int(text) if re.fullmatch(r"[1-9][0-9]{0,11}", text) else 0
    return seconds if seconds < _END_S else 0


def _goals(wire: dict[str, Any]) -> Goals:
    # What a later version may say besides is nothing that this one could use.
    return {name: mode for name, mode in wire.items() if mode in ("min", "max")}


def _wire(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _number(wire: Any) -> float:
    return _TEXTS[wire] if isinstance(wire, str) else float(wire)


def checked(metrics: Mapping[str, object] | None) -> dict[str, float]:
    """Return metrics as plain floats, sorted by name.

    Numpy and torch scalars are converted, as are arrays and tensors with a single element.

    Raises:
        BadMetricError: `metrics` is not a mapping, or a value is not a number or is too large for a
            float.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise BadMetricError.at("metrics", f"{metrics!r} has no names")
    found = {}
    for name, value in sorted((metrics or {}).items(), key=lambda each: str(each[0])):
        try:
            found[str(name)] = float(value)  # type: ignore[arg-type]
        except OverflowError as error:  # the number itself may have too many digits to be shown
            what = f"the metric {name!r} is a number too large for a float"
            raise BadMetricError.at("metrics", what, metric=str(name)) from error
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"the metric {name!r} is {value!r}"
            raise BadMetricError.at("metrics", what, metric=str(name)) from error
    return found


def shown(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics for JSON, with None in place of NaN and infinity."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
