"""What a process remembers of the step it saved last: enough to write only what differs. No I/O.

By page of the manifest: a page whose names and bytes are what they were is not looked at again, so
an ensemble that grows at its end costs what is new and one comparison of lists a page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tensor_dedup.store.objects import ContainerId

Row: TypeAlias = tuple[bytes, str | None, str | None, tuple[int, ...] | None]
"""A piece: fast hash, name, dtype, shape. Without the last three: a whole small file."""
Places: TypeAlias = tuple[ContainerId, ...]
"""The containers a piece is read from: its own, and that of what it is a delta against."""


@dataclass(slots=True)
class PageState:
    """A page that is in the store."""

    rows: Sequence[Row]
    name: str
    file_bytes: int
    nbytes: list[int]
    digests: list[bytes]
    places: list[Places]

    @property
    def containers(self) -> set[ContainerId]:
        """All it needs."""
        return {container for places in set(self.places) for container in places}


@dataclass(frozen=True, slots=True)
class Known:
    """Bytes that are in the store."""

    digest: bytes
    nbytes: int
    places: Places


@dataclass(slots=True)
class Last:
    """The step that was saved last, and the sizes of the containers' files that hold it."""

    pages: list[PageState] = field(default_factory=list)
    containers: dict[ContainerId, int] = field(default_factory=dict)

    def page(self, number: int) -> PageState | None:
        """The page of this number; None: there was none."""
        return self.pages[number] if number < len(self.pages) else None

    def known(self, alive: set[ContainerId]) -> dict[bytes, Known]:
        """What can be read from these containers alone, by fast hash."""
        return {row[0]: known for row, known in self._all() if alive.issuperset(known.places)}

    def _all(self) -> Iterator[tuple[Row, Known]]:
        for page in self.pages:
            held = zip(page.rows, page.digests, page.nbytes, page.places, strict=True)
            for row, digest, nbytes, places in held:
                yield row, Known(digest, nbytes, places)
