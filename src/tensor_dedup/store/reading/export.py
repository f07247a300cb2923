"""Writing of the files of a stored checkpoint, byte for byte as they were imported."""

from pathlib import Path, PurePath

from tensor_dedup.store.errors import ExportTargetError, PathTooLongError
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.folders import is_too_long, make_folders
from tensor_dedup.store.hashing import ProgressListener
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint, StoredFile

# Whole leaves, so that verifying a piece reads nothing twice.
_STEP = 32 << 20
_SHOWN = 60  # characters of a path


def export(
    files: Files, checkpoint: StoredCheckpoint, directory: Path, progress: ProgressListener
) -> list[Path]:
    """Write all files of an open checkpoint to `directory`, which is an empty or missing folder.

    Return the paths of the files. Each file appears under its name when it is complete and durable.
    Errors of reading the checkpoint propagate.

    Raises:
        ExportTargetError: `directory` is not empty, or is not a folder.
        PathTooLongError: The path of a file is too long for that folder; nothing is written.
    """
    status = files.status(directory)
    if status is not None and (status.kind != "folder" or files.listdir(directory)):
        raise ExportTargetError.at(directory, "it is not an empty folder")
    for file in checkpoint.files:
        if is_too_long(files, directory.absolute(), PurePath(file.path)):
            what = f"it cannot hold a file of the path {file.path[:_SHOWN]!r}..., which is too long"
            raise PathTooLongError.at(directory, what, file=file.path)
    progress.start(checkpoint.nbytes)
    written = []
    for file in checkpoint.files:
        target = directory.joinpath(file.path)
        make_folders(files, target.parent)
        _write(files, checkpoint, file, target, progress)
        written.append(target)
    return written


def _write(
    files: Files,
    checkpoint: StoredCheckpoint,
    file: StoredFile,
    target: Path,
    progress: ProgressListener,
) -> None:
    partial = target.with_name(f".{files.token()}.partial")
    handle = files.open(partial, "create")
    try:
        _fill(files, checkpoint, file, handle, progress)
        files.fsync(handle)
        files.close(handle)
        files.rename(partial, target)
        files.sync_folder(target.parent)
    except BaseException:
        files.close(handle)
        if files.status(partial) is not None:
            files.unlink(partial)
        raise


def _fill(
    files: Files,
    checkpoint: StoredCheckpoint,
    file: StoredFile,
    handle: Handle,
    progress: ProgressListener,
) -> None:
    at = 0
    for piece in file.pieces:
        for start in range(0, piece.nbytes, _STEP):
            stop = min(start + _STEP, piece.nbytes)
            data = checkpoint.read_piece(piece.digest, start, stop, piece.nbytes)
            files.pwrite(handle, memoryview(data), at + start)
            progress.advance(len(data))
        at += piece.nbytes
