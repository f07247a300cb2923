"""Who else wants to know what an import has hashed."""

from collections.abc import Mapping
from typing import Protocol

from tensor_dedup.store.files import Status


class Remembers(Protocol):
    """Is told the digests of each file that was imported, while the file is still open."""

    def imported(
        self, fd: int, before: Status, began_ns: int, digests: Mapping[tuple[int, int], str]
    ) -> None:
        """The file behind `fd` was `before` when hashing began, and is so still.

        `digests` are by (start, nbytes). Must not raise.
        """


class Nobody:
    """Remembers nothing."""

    def imported(
        self, fd: int, before: Status, began_ns: int, digests: Mapping[tuple[int, int], str]
    ) -> None:
        """Nothing to do."""
