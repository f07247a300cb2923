"""Reading ranges of files that may be hostile, or may be truncated while they are read."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tensor_dedup.errors import ChangedFileError, CheckpointNotFoundError
from tensor_dedup.formats.errors import CheckpointFault, CheckpointFilesError


class ReadableFile(Protocol):
    """A file whose ranges can be read: an open file, or one that is assembled from stored pieces.

    `path` is used in error messages only; `size` is in bytes.
    """

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...

    def read(self, start: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from offset `start`. The range must lie inside the file."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open regular file; `size` is its size in bytes at the time of opening."""

    path: str
    fd: int
    size: int

    def read(self, start: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from offset `start`.

        Check first that the range lies inside the file. Otherwise a huge `nbytes` from a hostile
        file allocates memory.

        Raises:
            ChangedFileError: The file has become shorter.
        """
        data = os.pread(self.fd, nbytes, start)
        while 0 < len(data) < nbytes:
            more = os.pread(self.fd, nbytes - len(data), start + len(data))
            if not more:
                break
            data += more
        if len(data) != nbytes:
            raise ChangedFileError(
                f"{self.path}: {len(data)} of {nbytes} bytes at {start} could be read, the file "
                "shrank; load it again when nobody writes it",
                path=self.path,
                expected=nbytes,
                got=len(data),
            )
        return data


@contextmanager
def opened(path: str | os.PathLike[str], fd: int | None = None) -> Iterator[OpenFile]:
    """Context manager: yield the regular file `path`, open until the `with` block ends.

    If the open descriptor `fd` is given, the file is read through it, and `path` is used in error
    messages only. `fd` stays open, and its position does not change.

    Raises:
        CheckpointNotFoundError: The file cannot be opened.
        CheckpointFilesError: `path` is a folder, a pipe or a device.
    """
    name = os.fspath(path)
    number = _open(name) if fd is None else fd
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointFilesError.at(
                CheckpointFault.NOT_A_FILE, name, "not a regular file", mode=status.st_mode
            )
        yield OpenFile(name, number, status.st_size)
    finally:
        if fd is None:
            os.close(number)


def _open(name: str) -> int:
    try:
        # Non-blocking: opening a pipe nobody writes to would wait for ever.
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointNotFoundError(
            f"{name}: {error.strerror}; check the path and its permissions", path=name
        ) from error
