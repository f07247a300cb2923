"""How the references of a run change their names together, however a process that does it ends.

The list of all changes is written first. From then on the run has its new name: before the store is
used again, what is left of the changes is made. They are made while nothing else uses the store, so
no reader sees some of the steps under one name and some under the other.
"""

import logging
from contextlib import suppress
from pathlib import Path

from tensor_dedup.store.errors import DamagedFileError, MissingObjectError
from tensor_dedup.store.folders import StoreFolder
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.format.references import Renaming, ref_text

_log = logging.getLogger(__name__)
_NOTE_BYTES = 1 << 12


def is_cut_short(folder: StoreFolder) -> bool:
    """Return whether a process died while it renamed a run, so that changes are left to be made.

    Ask with the store's main lock held: another process may be making them otherwise.
    """
    return folder.files.status(folder.layout.renaming) is not None


def carry_out(folder: StoreFolder, renaming: Renaming) -> None:
    """Make all changes of a renaming, durably. The new manifests must be durable already.

    The caller must hold the store's main lock exclusively.
    """
    folder.publish(renaming.to_text(), folder.layout.renaming)
    _make(folder, renaming)


def go_on(folder: StoreFolder) -> None:
    """Make the changes that a process left which died. Do nothing if there are none.

    The caller must hold the store's main lock exclusively. A list that is damaged is set aside: the
    steps that have the old name keep it, and none is lost.
    """
    path = folder.layout.renaming
    try:
        renaming = Renaming.from_text(folder.read(path), path)
    except MissingObjectError:
        return
    except DamagedFileError as error:
        folder.set_aside(path, folder.layout.quarantine)
        _log.warning("the renaming of a run was not completed: %s", str(error))
        return
    _make(folder, renaming)


def _make(folder: StoreFolder, renaming: Renaming) -> None:
    files, layout = folder.files, folder.layout
    # A list may come back with a power cut when all of it was done: what is not as it was then has
    # been saved since.
    left = [
        move
        for move in renaming.moves
        if folder.holds(layout.refs / file_of(move.name), ref_text(move.name, move.manifest))
    ]
    folder.publish(renaming.note(), note_path(folder, renaming.run))
    for move in left:
        text = ref_text(move.new_name, move.new_manifest)
        folder.publish(text, layout.refs / file_of(move.new_name))
    for move in left:
        files.unlink(layout.refs / file_of(move.name))
    files.sync_folder(layout.refs)
    with suppress(FileNotFoundError):
        files.unlink(layout.renaming)
    files.sync_folder(layout.root)


def note_path(folder: StoreFolder, run: str) -> Path:
    """Return the path of the note that says what a run was renamed to, if it was."""
    return folder.layout.renamed / file_of(run)


def note_of(folder: StoreFolder, run: str) -> bytes | None:
    """Return the note that a run was renamed, or None. Another renaming makes another note."""
    with suppress(MissingObjectError, DamagedFileError):
        return folder.read(note_path(folder, run), _NOTE_BYTES)
    return None
