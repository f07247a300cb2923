"""A folder that appears at once, complete and durable, or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tensor_dedup.store.errors import ExportTargetError
from tensor_dedup.store.files import Files
from tensor_dedup.store.objects import make_folders


@contextmanager
def new_folder(files: Files, target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` to be filled, which then becomes `target`.

    What is put into it must be durable when the block ends. ExportTargetError: something is at
    `target` already, other than an empty folder. A crash leaves at most a hidden folder
    `.NAME.*.partial`.
    """
    _check_free(files, target)
    make_folders(files, target.parent)
    partial = target.parent / f".{target.name}.{files.token()}.partial"
    files.mkdir(partial)
    try:
        yield partial
        files.sync_folder(partial)
        _check_free(files, target)
        files.rename(partial, target)
    except BaseException:
        with suppress(OSError):
            remove_folder(files, partial)
        raise
    files.sync_folder(target.parent)


def _check_free(files: Files, target: Path) -> None:
    status = files.status(target)
    if status is not None and (status.kind != "folder" or files.listdir(target)):
        raise ExportTargetError.at(target, "it is not an empty folder")


def remove_folder(files: Files, folder: Path) -> None:
    """Remove a folder of files."""
    for name in files.listdir(folder):
        files.unlink(folder / name)
    files.rmdir(folder)


def write_file(files: Files, path: Path, blob: bytes) -> None:
    """A new, durable file."""
    handle = files.open(path, "create")
    try:
        files.pwrite(handle, blob, 0)
        files.fsync(handle)
    finally:
        files.close(handle)
