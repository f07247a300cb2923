"""The steps of a store that were pulled because they were the latest of their run.

A program that follows a run pulls its latest step now and then, and later ones make earlier ones
superfluous. A note beside the references tells such steps from those that were saved here or pulled
by name, which stay. The file of the note is also a lock: programs that load the step hold it
shared, so that the step is not deleted meanwhile.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

from tensor_dedup.store.errors import DamagedFileError, MissingObjectError
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.folders import StoreFolder
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.layout import is_digest
from tensor_dedup.store.format.names import STEP_FORM, file_of, name_in

_FILE_BYTES: Final = 1 << 12
_MOST_FORMER: Final = 32
_TITLE: Final = "tensor-dedup followed step"
# A deletion holds the lock for a few file operations.
_WAIT_S: Final = 10.0
# What a process that moves on from step to step may still load from: its step and the next one.
_MOST_HELD: Final = 2
_held: Final[dict[tuple[Path, str], dict[str, tuple[Files, Handle]]]] = {}


def note(folder: StoreFolder, name: str, manifest: str) -> None:
    """Write durably that the step `name` with this manifest was pulled as the latest of its run.

    Former manifests of the step stay in the note until their files are deleted.
    """
    former = [m for m in noted(folder, name) if m != manifest and is_here(folder, m)]
    lines = [_TITLE, manifest, *former[:_MOST_FORMER]]
    folder.publish(frames.encode_text(lines), _path(folder, name))


def noted(folder: StoreFolder, name: str) -> list[str]:
    """Return the manifests with which the step `name` was pulled, the last one first.

    A step that was saved anew has several. Without a note, or if it cannot be read, there are none.
    """
    path = _path(folder, name)
    with suppress(MissingObjectError, DamagedFileError, ValueError):
        title, *manifests = frames.decode_text(folder.read(path, _FILE_BYTES), path)
        if title == _TITLE and all(is_digest(each) for each in manifests):
            return manifests
    return []


def is_here(folder: StoreFolder, manifest: str) -> bool:
    """Return whether the file of a manifest has not been deleted."""
    return folder.files.status(folder.layout.manifest(manifest)) is not None


def forget(folder: StoreFolder, name: str) -> None:
    """Remove the note about the step `name`, if there is one: the step stays from now on.

    If the step is just being deleted, that comes to its end first.
    """
    handle = _locked(folder, name)
    try:
        with suppress(FileNotFoundError):
            folder.files.unlink(_path(folder, name))
    finally:
        if handle is not None:
            folder.files.close(handle)


def names(folder: StoreFolder, run: str) -> list[str]:
    """Return the names of the steps of `run` that have a note, ordered by number."""
    found = []
    for file in folder.files.listdir(folder.layout.followed):
        form = STEP_FORM.fullmatch(name_in(file) or "")
        if form is not None and form["run"] == run and not form["mark"]:
            found.append((int(form["step"]), form[0]))
    return [name for _, name in sorted(found)]


def lock_path(folder: StoreFolder, name: str) -> Path:
    """Return the path of the note about a step, which `locks.lock_of` locks to delete the step."""
    return _path(folder, name)


def hold(folder: StoreFolder, name: str) -> None:
    """Keep the step `name` from being deleted while this process uses it.

    Of the steps of a run, a process holds the two for which this was called last, until it ends. A
    step without a note is not deleted anyway.
    """
    form = STEP_FORM.fullmatch(name)
    handle = _locked(folder, name)
    if form is None or handle is None:
        return
    held = _held.setdefault((folder.layout.root, form["run"]), {})
    _release(held, name)
    held[name] = folder.files, handle
    for each in [*held][:-_MOST_HELD]:
        _release(held, each)


def _locked(folder: StoreFolder, name: str) -> Handle | None:
    files, path = folder.files, _path(folder, name)
    with suppress(FileNotFoundError, PermissionError):
        if files.status(path) is None:
            return None
        handle = files.open(path, "lock")
        # Without a note it was deleted since: what was opened is an empty file, or none any more.
        if files.flock(handle, exclusive=False, wait_s=_WAIT_S) and noted(folder, name):
            status = files.status(path)
            if status is not None and status.inode == files.status_of(handle).inode:
                return handle
        files.close(handle)
    return None


def _release(held: dict[str, tuple[Files, Handle]], name: str) -> None:
    if (found := held.pop(name, None)) is not None:
        files, handle = found
        files.close(handle)


def _path(folder: StoreFolder, name: str) -> Path:
    return folder.layout.followed / file_of(name)
