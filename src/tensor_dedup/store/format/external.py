"""External containers: tables that index a file outside the store, which stays where it is.

The table holds the status that the file had when it was hashed. While the file still has this
status, its tensors can be read, and they are verified like any others. Otherwise they count as
absent.
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
    """The description of a file that an `external` container indexes.

    `path` is absolute. The other fields are the file's status when the file was hashed.
    """

    path: Path
    size: int
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path, status: FileStatus) -> Self:
        """Return the description of the file at `path`, whose status is `status`."""
        return cls(
            path,
            status.size,
            status.device,
            status.inode,
            status.mtime_ns,
            status.ctime_ns,
        )

    def is_still(self, status: FileStatus | None) -> bool:
        """Return whether the file, whose status is now `status`, is unchanged since it was hashed.

        The result is False if `status` is None, which means that the file does not exist.
        """
        return (
            status is not None
            and status.kind == "file"
            and ExternalFile.of(self.path, status) == self
        )

    def to_texts(self) -> list[str]:
        """Return the strings that a table stores: the path, then the numbers in decimal.

        The path is encoded as UTF-8, whatever the locale is.
        """
        numbers = (self.size, self.device, self.inode, self.mtime_ns, self.ctime_ns)
        return [os.fsencode(self.path).decode("utf-8", "surrogateescape"), *map(str, numbers)]

    @classmethod
    def from_texts(cls, texts: list[str] | None, data_bytes: int, table: PurePath) -> Self:
        """Return the file that the strings `texts` of a table describe; the inverse of `to_texts`.

        `data_bytes` is the size that the table states. Errors name `table`, the table's path.

        Raises:
            DamagedFileError: The strings are malformed or contradict `data_bytes`.
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
