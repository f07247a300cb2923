"""The default location of a store, and the creation and the checks of its folder."""

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
from tensor_dedup.store.folders import StoreFolder, make_folders
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.layout import FOLDERS, KNOWN, MARKER_LINES

ENVIRONMENT = "TENSOR_DEDUP_STORE"
_MARKER_BYTES = 1 << 12
_NEAR_BYTES = 4
# What is left of a marker that names another version.
_LATER = re.compile(rb"tensor-dedup store\nversion (?!1\n)[0-9]+\n")


def default_path() -> Path:
    """Return the path of the store that is used when no path is given.

    It is the first of these:

    1. the value of the environment variable TENSOR_DEDUP_STORE, if it is set
    2. the path in the configuration, if there is one
    3. `own_path()`
    """
    named = os.environ.get(ENVIRONMENT)
    return Path(named) if named else configured_path("store") or own_path()


def own_path() -> Path:
    """Return the default path of a store, a folder in the user's data folder."""
    return platformdirs.user_data_path("tensor-dedup") / "store"


def workers() -> int:
    """Return the number of CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def initialise(store: StoreFolder, *, create: bool, mend: bool) -> None:
    """Check that the folder holds a store of this format version.

    With `create`, make a store if the folder is empty or missing. With `mend`, write a missing or
    damaged marker file anew.

    Raises:
        NotAStoreError: The folder holds other files.
        NoStoreError: The folder is empty, missing or not completely initialised, and `create` is
            False.
        NewerFormatError: A later version of this program made the store.
        DamagedFileError: The marker file is missing or damaged. Either `mend` is False, or the file
            cannot be restored safely.
    """
    files, layout = store.files, store.layout
    names = set(files.listdir(layout.root))
    if layout.marker.name in names:
        _check_marker(store, mend=mend)
        return
    # The beginnings of a store are no foreign files: another process is making it, or died while it
    # did. Its marker may have been in `tmp` by then.
    filled = (folder for folder in FOLDERS if folder != layout.tmp.name)
    begun = not names - KNOWN and all(_is_empty(store, folder) for folder in filled)
    if begun and create:
        _create(store)
        return
    if begun and not mend:
        raise NoStoreError.at(layout.root, "there is no store yet")
    # Whoever makes a store fills it after the marker is there: by now it may be.
    if _is_plainly_a_store(store) and files.status(layout.marker) is None:
        _mend_marker(store, "it is gone", mend=mend)
        return
    if files.status(layout.marker) is not None:
        _check_marker(store, mend=mend)
        return
    if begun:  # nor is there anything to mend
        raise NoStoreError.at(layout.root, "there is no store yet")
    raise NotAStoreError.at(layout.root, "it holds other files, and no store")


def _create(store: StoreFolder) -> None:
    files, layout = store.files, store.layout
    make_folders(files, layout.root)
    for folder in FOLDERS:
        files.mkdir(layout.root / folder)
    for lock in (layout.lock, layout.names_lock, layout.index_lock):
        files.close(files.open(lock, "lock"))
    files.sync_folder(layout.root)
    # Last: with the marker, and not before, it is a store.
    store.publish(frames.encode_text(MARKER_LINES), layout.marker)


def _check_marker(store: StoreFolder, *, mend: bool) -> None:
    path = store.layout.marker
    right, blob = frames.encode_text(MARKER_LINES), b""
    try:
        blob = store.read(path, _MARKER_BYTES)
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
        _mend_marker(store, what, mend=mend)
        return
    if lines[:1] == MARKER_LINES[:1]:
        raise NewerFormatError.at(path, f"{', '.join(lines[1:])}, this program knows version 1")
    raise NotAStoreError.at(path, "this is the marker of something else")


def _mend_marker(store: StoreFolder, what: str, *, mend: bool) -> None:
    """Write the marker anew: all stores of a version have the same.

    Raises:
        DamagedFileError: `mend` is off, or nothing but the marker says that this is a store.
    """
    path = store.layout.marker
    if not _is_plainly_a_store(store):
        raise DamagedFileError.at(path, f"{what}, and beside it there is not all that a store has")
    if not mend:
        raise DamagedFileError(
            f"{path}: {what}; run `tensor-dedup repair`, which writes it anew", path=str(path)
        )
    store.publish(frames.encode_text(MARKER_LINES), path)


def _is_empty(store: StoreFolder, folder: str) -> bool:
    path = store.layout.root / folder
    status = store.files.status(path)
    return status is None or (status.kind == "folder" and not store.files.listdir(path))


def _is_plainly_a_store(store: StoreFolder) -> bool:
    """Whether the folder has all folders that a store has: nobody else's has."""
    root = store.layout.root
    kinds = [store.files.status(root / folder) for folder in FOLDERS]
    return all(status is not None and status.kind == "folder" for status in kinds)
