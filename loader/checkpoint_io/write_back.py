"""Write a loaded checkpoint back into a store after the load. Imports no torch."""

import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from tensor_dedup.errors import TensorDedupError, UnsupportedError
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.loader.checkpoint_io.hints import StoreHints
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.store.errors import NameTakenError
from tensor_dedup.store.format.names import name_of, shortened
from tensor_dedup.store.store import LocalStore

_log = logging.getLogger(__name__)
# What an import may end with on a machine in trouble: the model is loaded all the same.
_FAILURES = (TensorDedupError, OSError, sqlite3.Error, RuntimeError, ValueError, MemoryError)
_MARK = 12  # digits of a manifest that tell two checkpoints of one name apart


def keep(
    store: str | None,
    folder: Path,
    report: ModelReport,
    *,
    trust: bool,
    files: Sequence[Path] = (),
) -> None:
    """Import the checkpoint in `folder` into a store and set `report.stored_as` to its name there.

    `store` is the path of the store, or None for the user's default one. The store is created if it
    does not exist. `files` are the weight files that were loaded, if they are known; if an import
    would take others of the folder, nothing is stored. With `trust`, remembered digests tell
    whether the checkpoint is stored already, so unchanged files are not read again. Failures are
    logged and added to `report.skipped`, not raised.
    """
    try:
        _require_chosen(folder, files)
        report.stored_as = _keep(LocalStore.open(store), folder, trust=trust)
    except _FAILURES as error:
        _log.warning("%s was loaded, but not written to the store: %s", folder, str(error))
        report.skipped.append(("<store>", f"not written to the store: {error}"))


def _require_chosen(folder: Path, files: Sequence[Path]) -> None:
    """Check that an import of `folder` takes the loaded `files`, and not another copy of them."""
    if not files:
        return
    imported = {file.path.name for file in open_checkpoint(folder, follow_links=True).files}
    others = sorted({path.name for path in files} - imported)
    if others:
        raise UnsupportedError(
            f"an import of the folder takes {', '.join(sorted(imported))}, and {', '.join(others)} "
            "was loaded; name another load_format, or run `tensor-dedup import`",
            path=str(folder),
            files=others,
        )


def _nothing(_path: Path, _fd: int) -> dict[tuple[int, int], str]:
    return {}


def _keep(store: LocalStore, folder: Path, *, trust: bool) -> str:
    """Return the name under which the store holds the checkpoint, and never replace another."""
    hints = StoreHints()
    name = name_of(folder.absolute())
    held = store.manifest(name)
    if held is None:
        return store.import_(folder, name, hints=hints).name
    # Where hints know the files, this reads no tensor. A hint that errs makes us keep an older
    # state of the files under its name, and nothing else.
    with store.checkpoint(name) as checkpoint:
        all_files = any(file.opaque for file in checkpoint.files)
    known = hints.known if trust else _nothing
    manifest = store.expected_manifest(folder, known, all_files=all_files)
    if held == manifest:
        return name
    marked = shortened(name, f"@{manifest[:_MARK]}")
    if store.manifest(marked) == manifest:
        return marked
    result = store.import_(folder, marked, hints=hints, all_files=all_files)
    if result.manifest != manifest:
        raise NameTakenError.at(store.path, f"{folder} changed while it was stored as {marked!r}")
    return marked
