"""The location of a store, and its initialisation."""

import os
from pathlib import Path

import platformdirs

from tensor_dedup.store.errors import (
    DamagedFileError,
    NewerFormatError,
    NotAStoreError,
)
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.layout import FOLDERS, KNOWN, MARKER_LINES
from tensor_dedup.store.objects import Objects, make_folders

ENVIRONMENT = "TENSOR_DEDUP_STORE"
_MARKER_BYTES = 1 << 12


def default_path() -> Path:
    """Return the path of the store to use when the user names none."""
    named = os.environ.get(ENVIRONMENT)
    return Path(named) if named else own_path()


def own_path() -> Path:
    """Return the path of a user's store when the environment names none."""
    return platformdirs.user_data_path("tensor-dedup") / "store"


def workers() -> int:
    """Return the number of threads this process may run at once."""
    return len(os.sched_getaffinity(0))


def initialise(objects: Objects, *, create: bool, mend: bool) -> None:
    """Check that the folder holds a store of this version; make one if it is empty.

    Raises:
        NotAStoreError: the folder holds other files, or is empty and `create` is off.
        NewerFormatError: the store was made by a later version.
        DamagedFileError: its marker is damaged, and `mend` is off or the original cannot be
            inferred.
    """
    files, layout = objects.files, objects.layout
    marker = files.status(layout.marker)
    if marker is not None:
        _check_marker(objects, mend=mend)
        return
    names = set(files.listdir(layout.root))
    # The beginnings of a store whose making was cut short are no foreign files.
    if not create or names - KNOWN:
        what = "there is no store" if not names else "it holds other files, and no store"
        raise NotAStoreError.at(layout.root, what)
    _create(objects)


def _create(objects: Objects) -> None:
    files, layout = objects.files, objects.layout
    make_folders(files, layout.root)
    for folder in FOLDERS:
        files.mkdir(layout.root / folder)
    for lock in (layout.lock, layout.names_lock, layout.index_lock):
        files.close(files.open(lock, "lock"))
    files.sync_folder(layout.root)
    # Last: with the marker, and not before, it is a store.
    objects.publish(frames.encode_text(MARKER_LINES), layout.marker)


def _check_marker(objects: Objects, *, mend: bool) -> None:
    path = objects.layout.marker
    blob = objects.read(path, _MARKER_BYTES)
    right = frames.encode_text(MARKER_LINES)
    if blob == right:
        return
    try:
        lines = frames.decode_text(blob, path)
    except DamagedFileError:
        # Another version's marker has another checksum too, so it is never this near.
        if not mend or frames.distance(blob, right) > 4:
            raise
        objects.publish(right, path)
        return
    if lines[:1] == MARKER_LINES[:1]:
        raise NewerFormatError.at(path, f"{', '.join(lines[1:])}, this program knows version 1")
    raise NotAStoreError.at(path, "this is the marker of something else")
