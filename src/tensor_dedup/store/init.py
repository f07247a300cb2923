"""The location of a store, and its initialisation."""

import os
import re
from pathlib import Path

import platformdirs

from tensor_dedup.settings import configured_path
from tensor_dedup.store.errors import (
    DamagedFileError,
    NewerFormatError,
    NoStoreError,
    NotAStoreError,
)
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.layout import FOLDERS, KNOWN, MARKER_LINES
from tensor_dedup.store.objects import Objects, make_folders

ENVIRONMENT = "TENSOR_DEDUP_STORE"
_MARKER_BYTES = 1 << 12
_NEAR_BYTES = 4
# What is left of a marker that names another version.
_LATER = re.compile(rb"tensor-dedup store\nversion (?!1\n)[0-9]+\n")


def default_path() -> Path:
    """Return the path of the store to use when the user names none."""
    named = os.environ.get(ENVIRONMENT)
    return Path(named) if named else configured_path("store") or own_path()


def own_path() -> Path:
    """Return the path of a user's store when the environment names none."""
    return platformdirs.user_data_path("tensor-dedup") / "store"


def workers() -> int:
    """Return the number of threads this process may run at once."""
    return len(os.sched_getaffinity(0))


def initialise(objects: Objects, *, create: bool, mend: bool) -> None:
    """Check that the folder holds a store of this version; make one if it is empty.

    Raises:
        NotAStoreError: the folder holds other files.
        NoStoreError: it is empty or missing, or nobody has ended its making, and `create` is off.
        NewerFormatError: the store was made by a later version.
        DamagedFileError: its marker is gone or damaged, and `mend` is off or it may have been that
            of a later version.
    """
    files, layout = objects.files, objects.layout
    names = set(files.listdir(layout.root))
    if layout.marker.name in names:
        _check_marker(objects, mend=mend)
        return
    # The beginnings of a store are no foreign files: another process is making it, or died while it
    # did. Its marker may have been in `tmp` by then.
    filled = (folder for folder in FOLDERS if folder != layout.tmp.name)
    begun = not names - KNOWN and all(_is_empty(objects, folder) for folder in filled)
    if begun and create:
        _create(objects)
        return
    if begun and not mend:
        raise NoStoreError.at(layout.root, "there is no store yet")
    # Whoever makes a store fills it after the marker is there: by now it may be.
    if _is_plainly_a_store(objects) and files.status(layout.marker) is None:
        _mend_marker(objects, "it is gone", mend=mend)
        return
    if files.status(layout.marker) is not None:
        _check_marker(objects, mend=mend)
        return
    if not names:  # nor is there anything to mend
        raise NoStoreError.at(layout.root, "there is no store yet")
    raise NotAStoreError.at(layout.root, "it holds other files, and no store")


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
    right, blob = frames.encode_text(MARKER_LINES), b""
    try:
        blob = objects.read(path, _MARKER_BYTES)
        if blob == right:
            return
        lines = frames.decode_text(blob, path)
    except DamagedFileError as error:
        later = _LATER.match(blob)
        # Another version's marker has another checksum too, so it is never this near.
        if later is not None and frames.distance(blob, right) > _NEAR_BYTES:
            raise
        lost = isinstance(error.__cause__, OSError)
        what = "the disk cannot read it" if lost else f"{len(blob)} bytes that are not its own"
        _mend_marker(objects, what, mend=mend)
        return
    if lines[:1] == MARKER_LINES[:1]:
        raise NewerFormatError.at(path, f"{', '.join(lines[1:])}, this program knows version 1")
    raise NotAStoreError.at(path, "this is the marker of something else")


def _mend_marker(objects: Objects, what: str, *, mend: bool) -> None:
    """Write the marker anew: all stores of a version have the same.

    Raises:
        DamagedFileError: `mend` is off, or nothing but the marker says that this is a store.
    """
    path = objects.layout.marker
    if not _is_plainly_a_store(objects):
        raise DamagedFileError.at(path, f"{what}, and beside it there is not all that a store has")
    if not mend:
        raise DamagedFileError(
            f"{path}: {what}; run `tensor-dedup repair`, which writes it anew", path=str(path)
        )
    objects.publish(frames.encode_text(MARKER_LINES), path)


def _is_empty(objects: Objects, folder: str) -> bool:
    path = objects.layout.root / folder
    status = objects.files.status(path)
    return status is None or (status.kind == "folder" and not objects.files.listdir(path))


def _is_plainly_a_store(objects: Objects) -> bool:
    """Whether the folder has all folders that a store has: nobody else's has."""
    root = objects.layout.root
    kinds = [objects.files.status(root / folder) for folder in FOLDERS]
    return all(status is not None and status.kind == "folder" for status in kinds)
