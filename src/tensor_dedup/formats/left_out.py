"""Why a file of weights, or one that looks like it, is not part of the checkpoint in its folder."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final

_SHOWN: Final = 8


@unique
class LeftOutReason(Enum):
    """Why a file is left out. The value is what JSON documents say."""

    OTHER_COPY = "another form or copy of the weights"
    TRAINING_STATE = "state of a training"
    NOT_WEIGHTS = "not weights"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is left out. `path` is relative to the checkpoint's folder, with `/`."""

    path: str
    reason: LeftOutReason

    def to_dict(self) -> dict[str, str]:
        """Return the file and the reason as a dict for JSON."""
        return {"path": self.path, "reason": self.reason.value}


def described(files: Iterable[LeftOut]) -> list[str]:
    """Return up to two lines for people on the files that are left out."""
    state, others = list[str](), list[str]()
    for each in files:
        (state if each.reason is LeftOutReason.TRAINING_STATE else others).append(each.path)
    lines = [f"left out: {_listed(others)}"] if others else []
    if state:
        lines.append(f"left out, state of a training: {_listed(state)}; keep the folder to resume")
    return lines


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
