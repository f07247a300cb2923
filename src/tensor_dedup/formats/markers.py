"""Markers: metadata in which a checkpoint says which of its tensors come from which base.

A marker is JSON in the metadata of a safetensors file, under the key `shared_from`, or in a file
`shared_from.json` beside the weights. It has these fields:

- `version`, which is 1;
- `base`, the base's name and a `digest` of its tensors;
- `tensors`, which maps each name in this checkpoint to the name in the base, or to null if the
  names are equal.

docs/reference/markers.md specifies the format. A marker is only a hint: its claims are checked by
digest before they are used, and an unreadable marker is ignored.
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
    """A marker: a claim that tensors of a checkpoint are those of its base.

    `base` is the name of the base and `digest` the digest of its tensors. `tensors` maps names in
    the checkpoint to names in the base.
    """

    base: str
    digest: str
    tensors: Mapping[str, str]

    def text(self) -> str:
        """Return the marker as JSON; equal markers give equal text."""
        names = {name: old if old != name else None for name, old in sorted(self.tensors.items())}
        document: dict[str, Any] = {
            "version": VERSION,
            "base": {"name": self.base, "digest": self.digest},
            "tensors": names,
        }
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str | bytes) -> "Marker | None":
        """Return the marker in a JSON text, or None if it is malformed or of another version."""
        try:
            found = msgspec.json.decode(text, type=_Document)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        names = {name: old if old is not None else name for name, old in found.tensors.items()}
        return cls(found.base.name, found.base.digest, names)


def content_digest(tensors: Iterable[tuple[str, str]]) -> str:
    """Return a digest of a whole checkpoint, from the (name, digest) pairs of its tensors.

    The pairs are written as a text with a line "DIGEST NAME" for each tensor, in the order of
    names. The text is hashed in the same way as a tensor.
    """
    return digest("".join(f"{found} {name}\n" for name, found in sorted(tensors)).encode())


def in_header(header: object) -> Marker | None:
    """Return the marker in the metadata of a safetensors header, or None if there is no valid one.

    The result is None for headers of other formats.
    """
    text = header.metadata.get(KEY) if isinstance(header, SafetensorsHeader) else None
    return None if text is None else Marker.parse(text)


def in_files(paths: Iterable[Path]) -> list[Marker]:
    """Return the markers in the safetensors files and `shared_from.json` files among `paths`.

    Other files, and files that cannot be read, are skipped.
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
