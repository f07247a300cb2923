"""Markers: a checkpoint says which of its tensors come from which base.

In the metadata of a safetensors file, under the key `shared_from`, or in a file `shared_from.json`
beside the weights: JSON with `version` 1, `base` (what the base is called, and `digest`, which
identifies its tensors whatever it is called) and `tensors`, from the names in this checkpoint to
those in the base where they are called otherwise, else to null. docs/reference/markers.md is the
convention. A marker is a hint: nobody takes its word for what bytes are, and one that cannot be
read counts as none.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from tensor_dedup.digest import digest
from tensor_dedup.errors import CheckpointError
from tensor_dedup.formats.safetensors import SafetensorsHeader, read_header

KEY: Final = "shared_from"
SIDECAR: Final = "shared_from.json"
VERSION: Final = 1
# As much as the header of a safetensors file may have.
_MOST_BYTES: Final = 100_000_000


class _Base(msgspec.Struct):
    name: str
    digest: str


class _Document(msgspec.Struct):
    version: Literal[1]
    base: _Base
    tensors: dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Marker:
    """What one marker says: `tensors` are names in the checkpoint, with those in the base."""

    base: str
    digest: str
    tensors: Mapping[str, str]

    def text(self) -> str:
        """Return the JSON text of it, which is the same for equal markers."""
        names = {name: old if old != name else None for name, old in sorted(self.tensors.items())}
        document: dict[str, Any] = {
            "version": VERSION,
            "base": {"name": self.base, "digest": self.digest},
            "tensors": names,
        }
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str | bytes) -> "Marker | None":
        """Return the marker that a text is, or None if it is none of a known version."""
        try:
            found = msgspec.json.decode(text, type=_Document)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        names = {name: old if old is not None else name for name, old in found.tensors.items()}
        return cls(found.base.name, found.base.digest, names)


def content_digest(tensors: Iterable[tuple[str, str]]) -> str:
    """Return what identifies a checkpoint's content, from its tensors' names and digests.

    It is the digest, made as a tensor's, of a text with a line "DIGEST NAME" for each tensor, in
    the order of their names.
    """
    return digest("".join(f"{found} {name}\n" for name, found in sorted(tensors)).encode())


def in_header(header: object) -> Marker | None:
    """Return the marker in the metadata of a file's header, or None."""
    text = header.metadata.get(KEY) if isinstance(header, SafetensorsHeader) else None
    return None if text is None else Marker.parse(text)


def in_files(paths: Iterable[Path]) -> list[Marker]:
    """Return the markers in these files: safetensors files, and files called `shared_from.json`.

    Files of other kinds, and those that cannot be read, have none.
    """
    found: list[Marker | None] = []
    for path in paths:
        try:
            if path.name == SIDECAR and path.stat().st_size <= _MOST_BYTES:
                found.append(Marker.parse(path.read_bytes()))
            elif path.suffix == ".safetensors":
                found.append(in_header(read_header(path)))
        except (OSError, CheckpointError):
            continue
    return [marker for marker in found if marker is not None]
