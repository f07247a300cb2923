"""Checks the markers of checkpoints, and writes markers.

In a marker a checkpoint claims that some of its tensors are those of another checkpoint, its base.
"""

import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensor_dedup.analyze.tensors import Measured
from tensor_dedup.errors import ConfigError
from tensor_dedup.formats.markers import SIDECAR, Marker, content_digest
from tensor_dedup.text_table import human
from tensor_dedup.types import STORE_SCHEME


@dataclass(frozen=True, slots=True)
class CheckedMarker:
    """The result of checking a marker: a claim that tensors of `path` are those of a base.

    * `base` and `digest` are the name and digest of the base in the marker.
    * `tensors` is the number of tensors that the marker names.
    * `found` is the path of the base. It is None if the base is not among the compared checkpoints,
      or if tensors of the two were left out; nothing is checked then, and `wrong` is empty.
    * `wrong` has the names of the tensors that are missing or differ from those of the base.
    """

    path: str
    base: str
    digest: str
    found: str | None
    tensors: int
    wrong: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {
            "path": self.path,
            "base": self.base,
            "digest": self.digest,
            "found": self.found,
            "tensors": self.tensors,
            "wrong": list(self.wrong),
        }


def check_markers(checkpoints: Sequence[Measured]) -> list[CheckedMarker]:
    """Check the markers of these checkpoints by comparing digests. No I/O.

    A marker claims that tensors of a checkpoint are those of another one. It is not checked if
    tensors of either were left out.
    """
    if not any(checkpoint.markers for checkpoint in checkpoints):
        return []
    held = {_content(checkpoint): checkpoint for checkpoint in reversed(checkpoints)}
    return [
        CheckedMarker(
            checkpoint.path,
            marker.base,
            marker.digest,
            base.path if (base := _base(marker, checkpoint, held)) is not None else None,
            len(marker.tensors),
            _wrong(marker, checkpoint, base) if base is not None else (),
        )
        for checkpoint in checkpoints
        for marker in checkpoint.markers
    ]


def _base(marker: Marker, tune: Measured, held: Mapping[str, Measured]) -> Measured | None:
    base = None if tune.small else held.get(marker.digest)
    return None if base is None or base.small else base


def _wrong(marker: Marker, tune: Measured, base: Measured) -> tuple[str, ...]:
    ours = {tensor.name: tensor.fingerprint for tensor in tune.tensors}
    theirs = {tensor.name: tensor.fingerprint for tensor in base.tensors}
    return tuple(
        name
        for name, old in marker.tensors.items()
        if name not in ours or ours[name] != theirs.get(old)
    )


def _content(checkpoint: Measured) -> str:
    return content_digest((t.name, t.fingerprint.digest) for t in checkpoint.tensors)


def write_markers(checkpoints: Sequence[Measured], target: Path) -> list[Path]:
    """Write markers that say which tensors the checkpoints share with the first one, their base.

    In the new folder `target`, each checkpoint that shares tensors with the base gets a folder
    (`1-NAME`, ...) with a file `shared_from.json` and a section for its model card, `README.md`.
    Returns these folders. The checkpoints themselves are not changed.

    Raises:
        ConfigError: There is only one checkpoint, some tensors were left out of the analysis, or
            `target` exists already.
    """
    base, *others = checkpoints
    if not others:
        raise ConfigError("markers say what a checkpoint has of another; give the base first")
    if any(checkpoint.small for checkpoint in checkpoints):
        raise ConfigError(
            "a base is identified by all of its tensors; leave --min-tensor-bytes away"
        )
    if os.path.lexists(target):
        raise ConfigError(f"{target}: is there already; name a folder that is not", path=target)
    places: dict[str, list[str]] = {}
    for tensor in base.tensors:
        places.setdefault(tensor.fingerprint.digest, []).append(tensor.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    work.mkdir()
    written = []
    try:
        for number, tune in enumerate(others, 1):
            marker = _marker(base, tune, places)
            if not marker.tensors:
                continue
            name = f"{number}-{_called(tune.path).replace('/', '--')}"
            (work / name).mkdir()
            (work / name / SIDECAR).write_text(marker.text(), encoding="utf-8")
            (work / name / "README.md").write_text(_card(marker, tune), encoding="utf-8")
            written.append(target / name)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return written


def _marker(base: Measured, tune: Measured, places: dict[str, list[str]]) -> Marker:
    shapes = {tensor.name: tensor.fingerprint for tensor in base.tensors}
    names = {}
    for tensor in tune.tensors:
        same = [
            name
            for name in places.get(tensor.fingerprint.digest, [])
            if shapes[name] == tensor.fingerprint and tensor.nbytes
        ]
        if same:
            names[tensor.name] = tensor.name if tensor.name in same else same[0]
    return Marker(_called(base.path), _content(base), names)


def _called(path: str) -> str:
    return Path(path).resolve().name if os.path.lexists(path) else path.removeprefix(STORE_SCHEME)


def _card(marker: Marker, tune: Measured) -> str:
    size = sum(tensor.nbytes for tensor in tune.tensors if tensor.name in marker.tensors)
    return (
        f"## Shared weights\n\n{len(marker.tensors)} of {len(tune.tensors)} tensors "
        f"({human(size)} of {human(tune.nbytes)}) are those of `{marker.base}`, bit for bit. "
        f"`{SIDECAR}` names them; the base's content is\n`{marker.digest}`.\n"
    )
