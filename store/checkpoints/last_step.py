"""What a process remembers of the step it saved last: enough to write only what differs. No I/O.

By page of the manifest: a page whose names and bytes are what they were is not looked at again, so
an ensemble that grows at its end costs what is new and one comparison of lists a page.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tensor_dedup.store.format.manifests import PAGE_ENTRIES
from tensor_dedup.store.objects import ContainerId
from tensor_dedup.store.writing.containers import PACK_BELOW

Row: TypeAlias = tuple[bytes, str | None, str | None, tuple[int, ...] | None]
"""A piece: fast hash, name, dtype, shape. Without the last three: a whole small file."""
Places: TypeAlias = tuple[ContainerId, ...]
"""The containers a piece is read from: its own, and that of what it is a delta against."""

# So many containers with about as much of small pieces are put together: the files of a step stay
# few, and a piece is written again as often as its ensemble has grown by as much.
_TIER = 32
_TIER_BITS = 5
_SMALLEST_BITS = 12


class StoredPiece(NamedTuple):
    """Bytes that are in the store."""

    digest: bytes
    nbytes: int
    places: Places

    @property
    def small(self) -> bool:
        """Whether it shares a container with many others."""
        return self.nbytes < PACK_BELOW


@dataclass(slots=True)
class PieceTable:
    """The rows of pieces, in order, by column: of thousands in every step none is an object that
    the garbage collector has to look at.
    """

    hashes: list[bytes]
    names: list[str | None]
    dtypes: list[str | None]
    shapes: list[tuple[int, ...] | None]

    def __len__(self) -> int:
        return len(self.hashes)

    def __iter__(self) -> Iterator[Row]:
        return zip(self.hashes, self.names, self.dtypes, self.shapes, strict=True)

    def pages(self) -> "list[PieceTable]":
        """As many at a time as a page has."""
        starts = range(0, len(self), PAGE_ENTRIES)
        return [self._part(slice(at, at + PAGE_ENTRIES)) for at in starts]

    def _part(self, where: slice) -> "PieceTable":
        columns = self.names[where], self.dtypes[where], self.shapes[where]
        return PieceTable(self.hashes[where], *columns)


class PageState:
    """A page that is in the store: its pieces, its name, the size of its file.

    `held` are its pieces by fast hash, `weights` the bytes of the small ones in each place.
    """

    __slots__ = ("containers", "file_bytes", "held", "name", "nbytes", "rows", "weights")

    def __init__(
        self, rows: PieceTable, held: Mapping[bytes, StoredPiece], name: str, file_bytes: int
    ) -> None:
        self.rows = rows
        self.name, self.file_bytes = name, file_bytes
        self.nbytes = sum(held[key].nbytes for key in rows.hashes)
        self.take(held)

    def take(self, held: Mapping[bytes, StoredPiece]) -> None:
        """Its pieces, wherever they are by now."""
        self.held = {key: held[key] for key in self.rows.hashes}
        self.weights: Counter[Places] = Counter()
        for known in self.held.values():
            if known.small:
                self.weights[known.places] += known.nbytes
        places = {known.places for known in self.held.values()}
        self.containers = frozenset(container for each in places for container in each)


@dataclass(slots=True)
class LastStep:
    """The step that was saved last, and the files of the containers that hold it."""

    pages: list[PageState] = field(default_factory=list)
    containers: dict[ContainerId, tuple[Path, int]] = field(default_factory=dict)

    def page(self, number: int) -> PageState | None:
        """The page of this number; None: there was none."""
        return self.pages[number] if number < len(self.pages) else None

    def known(self, alive: set[ContainerId]) -> dict[bytes, StoredPiece]:
        """What can be read from these containers alone, by fast hash."""
        found: dict[bytes, StoredPiece] = {}
        for page in self.pages:
            found |= page.held
        if len(alive) == len(self.containers):
            return found
        return {key: known for key, known in found.items() if alive.issuperset(known.places)}

    def digests(self) -> dict[str, bytes]:
        """The digest of each tensor, by name."""
        return {
            row[1]: page.held[row[0]].digest for page in self.pages for row in page.rows if row[1]
        }


def crowded(held: Iterable[tuple[Places, int]]) -> set[ContainerId]:
    """The containers whose small pieces are to be put together, of those that hold these bytes."""
    weights: Counter[ContainerId] = Counter()
    for places, nbytes in held:
        if places:
            weights[places[0]] += nbytes
    tiers: dict[int, set[ContainerId]] = {}
    for container, nbytes in weights.items():
        tier = max(0, nbytes.bit_length() - _SMALLEST_BITS) // _TIER_BITS
        tiers.setdefault(tier, set()).add(container)
    return {each for tier in tiers.values() if len(tier) >= _TIER for each in tier}
