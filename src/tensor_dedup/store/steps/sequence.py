"""The file with the latest sequence number of a store. Sequence numbers order the steps of runs.

All runs of the store share the file. It is overwritten in place and not synced.
"""

from collections.abc import Callable
from contextlib import suppress

from tensor_dedup.store.errors import DamagedFileError, MissingObjectError
from tensor_dedup.store.folders import StoreFolder
from tensor_dedup.store.format import frames

_FILE_BYTES = 1 << 12
_TITLE = "tensor-dedup sequence"
_LAST = "last "


def next_sequence(folder: StoreFolder, above: int, greatest: Callable[[], int]) -> int:
    """Return a new sequence number, greater than `above` and than the last number returned.

    The last number is kept in a file, which all processes share. `greatest` returns the greatest
    sequence number of the run's steps; it is called if the file is missing or damaged. The file is
    not synced, so numbers may be returned again after a crash of the machine.
    """
    with folder.naming():
        last = _last_given(folder)
        given = max(above, greatest() if last is None else last) + 1
        _write_given(folder, frames.encode_text([_TITLE, f"{_LAST}{given}"]))
    return given


def _last_given(folder: StoreFolder) -> int | None:
    path = folder.layout.sequence
    with suppress(MissingObjectError, DamagedFileError, ValueError):
        title, last = frames.decode_text(folder.read(path, _FILE_BYTES), path)
        if title == _TITLE:
            return int(last.removeprefix(_LAST))
    return None


def _write_given(folder: StoreFolder, text: bytes) -> None:
    """Write the number where the last one stands, unsynced.

    A rename over it took longer than all else that a step without changes needs: file systems
    first write the bytes of what takes the place of a file.
    """
    files, path = folder.files, folder.layout.sequence
    try:
        handle = files.open(path, "modify")
    except (FileNotFoundError, PermissionError):  # the file may be another user's
        handle = files.open(folder.tmp_path(), "create")
    try:
        files.pwrite(handle, text, 0)
        if handle.path != path:
            files.rename(handle.path, path)
        elif files.status_of(handle).size > len(text):
            files.truncate(handle, len(text))
    except BaseException:
        if handle.path != path:
            files.unlink(handle.path)
        raise
    finally:
        files.close(handle)
