"""External containers: a table that indexes a file elsewhere, in place, never changing it.

The table holds the status of the file when it was hashed. While the file system still reports that
status for the path, the table's records can be read from it, verified like any others; otherwise
they count as absent.
"""

import os
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Self

from tensor_dedup.store.errors import DamagedFileError
from tensor_dedup.store.files import FileStatus

EXTERNAL = "external"
_FIELDS = 6
_MAX_DIGITS = 20  # of 64 bits


@dataclass(frozen=True, slots=True)
class ExternalFile:
    """The file that an external container indexes: its absolute path and status when hashed."""

    path: Path
    size: int
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path, status: FileStatus) -> Self:
        """Describe the file at `path`, which has this status."""
        return cls(
            path,
            status.size,
            status.device,
            status.inode,
            status.mtime_ns,
            status.ctime_ns,
        )

    def is_still(self, status: FileStatus | None) -> bool:
        """Return whether the file still has the status it was hashed with."""
        return (
            status is not None
            and status.kind == "file"
            and ExternalFile.of(self.path, status) == self
        )

    def to_texts(self) -> list[str]:
        """Return its form in a table: numbers in decimal, since an inode may need 64 bits.

        The path is text in UTF-8 whatever the locale is, so that every locale finds the file.
        """
        numbers = (self.size, self.device, self.inode, self.mtime_ns, self.ctime_ns)
        return [os.fsencode(self.path).decode("utf-8", "surrogateescape"), *map(str, numbers)]

    @classmethod
    def from_texts(cls, texts: list[str] | None, data_bytes: int, table: PurePath) -> Self:
        """Parse its form in a table.

        Raises:
            DamagedFileError: this program never wrote it.
        """
        path, *numbers = texts or [""]
        fit = all(text.removeprefix("-").isdecimal() for text in numbers)
        short = all(len(text) <= _MAX_DIGITS for text in numbers)
        if len(numbers) != _FIELDS - 1 or not fit or not short or "\0" in path:
            raise DamagedFileError.at(table, "its origin has another form")
        try:
            native = os.fsdecode(path.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError as error:
            raise DamagedFileError.at(table, "its origin is no path", origin=path) from error
        found = cls(Path(native), *map(int, numbers))
        if not found.path.is_absolute() or found.size != data_bytes:
            raise DamagedFileError.at(table, "its origin contradicts it", origin=path)
        return found
