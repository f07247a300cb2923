"""What a checkpoint's folder holds and the checkpoint does not: files, and copies of tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, unique
from typing import Final

_SHOWN: Final = 8
_KEEP: Final = "keep the folder to resume"


@unique
class LeftOutReason(Enum):
    """Why a file is left out. The value is what JSON documents say."""

    OTHER_COPY = "another form or copy of the weights"
    TRAINING_STATE = "state of a training"
    NOT_WEIGHTS = "not weights"
    UNFINISHED = "a download that is not finished"
    BESIDE_MODELS = "beside several models, and part of none"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is left out. `path` is relative to the checkpoint's folder, with `/`."""

    path: str
    reason: LeftOutReason

    def to_dict(self) -> dict[str, str]:
        """Return the file and the reason as a dict for JSON."""
        return {"path": self.path, "reason": self.reason.value}


@dataclass(frozen=True, slots=True)
class NotIndexed:
    """A copy of a tensor, in a file that is not the one that the index names for it.

    `file` is relative to the checkpoint's folder. `differs` says whether dtype, shape or bytes are
    others than those of the tensor that the index names.
    """

    tensor: str
    file: str
    differs: bool

    def to_dict(self) -> dict[str, object]:
        """Return all fields as a dict for JSON."""
        return asdict(self)


def described(
    files: Iterable[LeftOut], copies: Sequence[NotIndexed] = (), otherwise: str = ""
) -> list[str]:
    """Return lines for people on the files and the copies of tensors that are left out.

    `otherwise` is added to the advice to keep the folder of a training.
    """
    state, unfinished, others = list[str](), list[str](), list[str]()
    apart = {LeftOutReason.TRAINING_STATE: state, LeftOutReason.UNFINISHED: unfinished}
    for each in files:
        apart.get(each.reason, others).append(each.path)
    lines = [f"left out: {_listed(others)}"] if others else []
    if unfinished:
        lines.append(f"left out, {LeftOutReason.UNFINISHED.value}: {_listed(unfinished)}")
    if state:
        lines.append(f"left out, state of a training: {_listed(state)}; {_KEEP}{otherwise}")
    if copies:
        lines.append(_copies(copies))
    return lines


def _copies(copies: Sequence[NotIndexed]) -> str:
    files = list(dict.fromkeys(each.file for each in copies))
    count = f"{len(copies)} tensors" if len(copies) > 1 else "1 tensor"
    line = f"{count} that the index does not name, in {_listed(files)}"
    other = [each.tensor for each in copies if each.differs]
    if not other:
        return line
    some = f"{len(other)} of them differ" if len(copies) > 1 else "it differs"
    return f"{line}; {some} from what the index names: {_listed(other)}"


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
