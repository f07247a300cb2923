"""The sizes of a store: its checkpoints, bytes and codecs. Nothing is written."""

import contextlib
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Self

from tensor_dedup.store.errors import (
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    UnknownNameError,
    unreadable_as_damage,
)
from tensor_dedup.store.format.external import EXTERNAL
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.upkeep.gc import dead_bytes
from tensor_dedup.store.upkeep.inventory import take_inventory
from tensor_dedup.store.upkeep.live_set import Held, needed

_FLAT = ("refs", "quarantine", "trash", "tmp")


@dataclass
class Coded:
    """The pieces stored by one codec: their number, their decoded size, and their size on disk."""

    pieces: int = 0
    nbytes: int = 0
    stored_bytes: int = 0


def by_codec(held: Held, used: Collection[bytes]) -> dict[str, Coded]:
    """Group the pieces in `used` by codec. No I/O.

    `held` has the records of each container. Each piece counts once, in its smallest copy.
    """
    found: dict[str, Coded] = {}
    seen = set[bytes]()
    records = [r for pieces in held.values() for r in pieces.values() if r.digest in used]
    for record in sorted(records, key=lambda record: record.stored):
        if record.digest not in seen:
            seen.add(record.digest)
            coded = found.setdefault(record.codec_name, Coded())
            coded.pieces += 1
            coded.nbytes += record.nbytes
            coded.stored_bytes += record.stored
    return found


@dataclass(frozen=True, slots=True)
class Listed:
    """A checkpoint in a listing. `nbytes` is the size of an export.

    `imported_at` is in seconds since 1970; of a step it is the time of saving. If the reference or
    the manifest cannot be read, `damage` says why, and unknown sizes are 0. Without a readable
    reference, `manifest` is empty.
    """

    name: str
    manifest: str
    files: int
    nbytes: int
    imported_at: int
    damage: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Return all fields except `damage` as a dict for JSON.

        For a damaged checkpoint, the dict has only `name` and, under `what`, the text of `damage`.
        """
        if self.damage is not None:
            return {"name": self.name, "what": self.damage}
        document = asdict(self)
        del document["damage"]
        return document


@dataclass(frozen=True, slots=True)
class Stats:
    """The sizes of a store, in bytes.

    - `logical_bytes` is the size of exports of all checkpoints.
    - `unique_bytes` is the size of the distinct pieces among them.
    - `dedup_ratio` is unique / logical, so lower means more reuse.
    - `tensors` is the number of tensors in all checkpoints.
    - `disk_bytes` is the size of all files of the store.
    - `reclaimable_bytes` is the size of the containers that `gc` would remove.
    - `dead_bytes` is the size of the unused pieces in the containers that stay.
    - `codecs` has the pieces by codec (`raw`: unencoded), including pieces that only serve as bases
      for differences.
    """

    checkpoints: int
    tensors: int
    unique_pieces: int
    logical_bytes: int
    unique_bytes: int
    dedup_ratio: float
    disk_bytes: int
    reclaimable_bytes: int
    dead_bytes: int
    trash_bytes: int
    containers: dict[str, int]
    damaged_files: int
    codecs: dict[str, Coded]

    @classmethod
    def of_nothing(cls) -> Self:
        """Return the sizes of a store that does not exist yet: every size and count is 0."""
        return cls(0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0, {}, 0, {})

    def to_dict(self) -> dict[str, object]:
        """Return all fields as a dict for JSON."""
        return asdict(self)


def listed(objects: Objects) -> list[Listed]:
    """Return all checkpoints, sorted by name. Damaged checkpoints are included.

    Call it inside `with locks.session(...):`.
    """
    found = []
    for name in objects.names():
        with contextlib.suppress(UnknownNameError):  # deleted since the names were read
            found.append(_listed(objects, name))
    return found


def _listed(objects: Objects, name: str) -> Listed:
    path = objects.layout.refs / file_of(name)
    manifest_name, imported_at = "", 0
    try:
        with unreadable_as_damage(path):
            status = objects.files.status(path)
        imported_at = status.mtime_ns // 10**9 if status is not None else 0
        manifest_name = objects.ref(name)
        manifest = objects.manifest(manifest_name)
    except (DamagedFileError, MissingObjectError, NewerFormatError) as error:
        return Listed(name, manifest_name, 0, 0, imported_at, str(error))
    notes = Notes.from_texts(manifest.notes)
    imported_at = notes.saved or imported_at if notes is not None else imported_at
    return Listed(name, manifest_name, len(manifest.files), manifest.nbytes, imported_at)


def stats(objects: Objects) -> Stats:
    """Return the sizes of a store, without reading tensor data.

    Call it inside `with locks.session(...):`.
    """
    found = take_inventory(objects)
    held = found.readable()
    keep = needed(found.live, held)
    kinds: dict[str, int] = {}
    for container in found.tables:
        kinds[container.kind] = kinds.get(container.kind, 0) + 1
    unique = sum(found.live.values())
    used = found.live.keys() | keep.anchors
    return Stats(
        checkpoints=len(found.checkpoints),
        tensors=found.references,
        unique_pieces=len(found.live),
        logical_bytes=found.logical_bytes,
        unique_bytes=unique,
        dedup_ratio=unique / found.logical_bytes if found.logical_bytes else 1.0,
        disk_bytes=disk_bytes(objects),
        reclaimable_bytes=sum(
            found.tables[container].data_bytes
            for container in held.keys() - keep.containers
            if container.kind != EXTERNAL
        ),
        dead_bytes=dead_bytes(found, keep),
        trash_bytes=_folder_bytes(objects, "trash"),
        containers=kinds,
        damaged_files=len(found.problems),
        codecs=by_codec({c: held[c] for c in keep.containers}, used),
    )


def disk_bytes(objects: Objects) -> int:
    """Return the size in bytes of all files of a store."""
    root = objects.layout.root
    top = _folder_bytes(objects, "")
    nested = [
        f"{folder}/{part}"
        for folder in ("containers", "manifests")
        for part in objects.files.listdir(root / folder)
    ]
    return top + sum(_folder_bytes(objects, folder) for folder in (*_FLAT, *nested))


def _folder_bytes(objects: Objects, folder: str) -> int:
    root = objects.layout.root / folder
    found = [objects.files.status(root / name) for name in objects.files.listdir(root)]
    return sum(status.size for status in found if status is not None and status.kind == "file")
