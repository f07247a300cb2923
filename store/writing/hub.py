"""A Hugging Face cache: which checkpoints lie in it, and what they are called."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tensor_dedup.store.files import Files, RealFiles
from tensor_dedup.store.format.names import name_of

_MODELS = "models--"
_SNAPSHOTS = "snapshots"
_HIDDEN = "."


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """One revision of one repository, and the name `ORG/NAME@REVISION` it has in a store."""

    path: Path
    name: str


def cache_path() -> Path:
    """Where the cache is: HF_HUB_CACHE, else HF_HOME/hub, else in the user's cache folder."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '/')}/.cache"
    return Path(cache) / "huggingface" / "hub"


def snapshots(root: Path, files: Files | None = None) -> Iterator[HubSnapshot]:
    """Every snapshot of every model in a cache, by name. Data sets and spaces are none."""
    door = files or RealFiles()
    for folder in door.listdir(root):
        if not folder.startswith(_MODELS):
            continue
        for revision in door.listdir(root / folder / _SNAPSHOTS):
            path = root / folder / _SNAPSHOTS / revision
            status = door.status(path)
            if not revision.startswith(_HIDDEN) and status is not None and status.kind == "folder":
                yield HubSnapshot(path, f"{name_of(path)}@{revision}")
