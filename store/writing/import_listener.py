"""Who else wants to know what an import has hashed."""

from collections.abc import Mapping
from typing import Protocol

from tensor_dedup.store.files import FileStatus


class ImportListener(Protocol):
    """Is told the digests of each file that was imported, while the file is still open."""

    def imported(
        self, fd: int, before: FileStatus, began_ns: int, digests: Mapping[tuple[int, int], str]
    ) -> None:
        """The file behind `fd` was `before` when hashing began, and is so still.

        `digests` are by (start, nbytes). Must not raise.
        """


class NullListener:
    """Remembers nothing."""

    def imported(
        self, fd: int, before: FileStatus, began_ns: int, digests: Mapping[tuple[int, int], str]
    ) -> None:
        """Nothing to do."""
