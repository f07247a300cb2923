"""State that a training run keeps between saves, so that a step costs only what is new in it.

- `LastStep` holds the pieces of the last step and where they are stored. They are grouped by page
  of the step's manifest. A page lists 256 pieces. Unchanged pages are skipped.
- `RunCache` holds the connection to the index, and the hashing threads. To close and open the
  connection for each save would take longer than the save.

A forked child never uses its parent's state.
"""

import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tensor_dedup import sqlite
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import os_errors
from tensor_dedup.store.format.manifests import PAGE_ENTRIES
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import PieceLocation, StoreIndex, open_index
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.writing.containers import PACK_BELOW

Row: TypeAlias = tuple[bytes, str | None, str | None, tuple[int, ...] | None]
"""A piece: change hash, name, dtype, shape. Without the last three: a whole small file."""
Places: TypeAlias = tuple[ContainerId, ...]
"""The containers a piece is read from: its own, and those of what it is a delta against."""
# So many containers with about as much of small pieces are put together: the files of a step stay
# few, and a piece is written again as often as its ensemble has grown by as much. With sixteen, a
# run of twenty steps stored its trees twice.
_TIER = 32
_TIER_BITS = 5
_SMALLEST_BITS = 12
# What a child inherited: closing it would end what the parent is doing, so it stays as it is.
_INHERITED: list["_Kept"] = []


class StoredPiece(NamedTuple):
    """A stored piece: its digest, its size, and the containers needed to read it."""

    digest: bytes
    nbytes: int
    places: Places

    @property
    def small(self) -> bool:
        """Whether the piece is stored in a pack, together with many other small pieces."""
        return self.nbytes < PACK_BELOW


@dataclass(slots=True)
class PieceTable:
    """A list of pieces, stored by column: change hashes, names, dtypes and shapes.

    A change hash is a fast hash that only tells whether bytes have changed.
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
        """Split the rows into parts as long as the pages of a manifest."""
        starts = range(0, len(self), PAGE_ENTRIES)
        return [self._part(slice(at, at + PAGE_ENTRIES)) for at in starts]

    def _part(self, where: slice) -> "PieceTable":
        columns = self.names[where], self.dtypes[where], self.shapes[where]
        return PieceTable(self.hashes[where], *columns)


class PageState:
    """A stored page of a manifest, which lists pieces.

    - `rows` are the listed pieces.
    - `name` is the page's name, and `file_bytes` is its size on disk.
    - `held` maps the change hash of each piece to the stored piece. A change hash is a fast hash
      that only tells whether bytes have changed.
    - `weights` has the total size of small pieces, by the containers needed to read them.
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
        """Record where the pieces of the page are stored now.

        `held` maps change hashes to stored pieces.
        """
        self.held = {key: held[key] for key in self.rows.hashes}
        self.weights: Counter[Places] = Counter()
        for known in self.held.values():
            if known.small:
                self.weights[known.places] += known.nbytes
        places = {known.places for known in self.held.values()}
        self.containers = frozenset(container for each in places for container in each)


@dataclass(slots=True)
class LastStep:
    """The step saved last: its pages, and the files of the containers that hold its pieces.

    `name` is the name of the step's checkpoint, and `manifest` is the name of its manifest.
    """

    pages: list[PageState] = field(default_factory=list)
    containers: dict[ContainerId, tuple[Path, int]] = field(default_factory=dict)
    name: str = ""
    manifest: str = ""

    def page(self, number: int) -> PageState | None:
        """Return the page with this number, or None if the step has fewer pages."""
        return self.pages[number] if number < len(self.pages) else None

    def known(self, alive: set[ContainerId]) -> dict[bytes, StoredPiece]:
        """Return the pieces that can be read from the containers in `alive`, by change hash.

        A change hash is a fast hash that only tells whether bytes have changed.
        """
        found: dict[bytes, StoredPiece] = {}
        for page in self.pages:
            found |= page.held
        if len(alive) == len(self.containers):
            return found
        return {key: known for key, known in found.items() if alive.issuperset(known.places)}

    def digests(self) -> dict[str, bytes]:
        """Return the digests of the step's tensors by name, without those of small tensors."""
        named = ((row[1], page.held[row[0]]) for page in self.pages for row in page.rows)
        return {name: known.digest for name, known in named if name and not known.small}

    def moved(self, change: "Rewritten") -> "LastStep":
        """Return this step with the new places of its pieces.

        `change` is a replacement of a container, in which pieces got new places. If the step does
        not use the replaced container, it is returned as it is.
        """
        if change.gone not in self.containers:
            return self
        pages = []
        for page in self.pages:
            if change.gone in page.containers:
                held = {
                    key: known._replace(places=change.places.get(known.digest, known.places))
                    for key, known in page.held.items()
                }
                page = PageState(page.rows, held, page.name, page.file_bytes)
            pages.append(page)
        used = {container for page in pages for container in page.containers}
        files = {**self.containers, **change.files}
        return LastStep(pages, {each: files[each] for each in used}, self.name, self.manifest)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A replacement of a container by other containers.

    - `gone` is the replaced container.
    - `places` maps the digest of each piece to the containers now needed to read it.
    - `files` maps these containers to the paths and sizes of their files.
    - `deltas` has the pieces that are now encoded against another piece. It maps the digest of each
      to the digest of the other piece.
    """

    gone: ContainerId
    places: dict[bytes, Places]
    files: dict[ContainerId, tuple[Path, int]]
    deltas: dict[bytes, bytes]


def nearest(
    places: Sequence[PieceLocation], under: Mapping[bytes, Sequence[PieceLocation]]
) -> Places:
    """Return the containers needed to read a piece, which has copies at `places`.

    A copy that is not encoded against other pieces is preferred. `under` has the locations of the
    pieces that the other copies are encoded against, by digest. If no copy can be decoded, the
    result is empty.
    """
    for place in places:
        if place.base is None:
            return (place.container,)
    for place in places:
        anchors = [
            next((each.container for each in under.get(base, ()) if each.base is None), None)
            for base in place.bases
        ]
        there = [container for container in anchors if container is not None]
        if len(there) == len(anchors):
            return (place.container, *dict.fromkeys(there))
    return ()


def packs_to_merge(held: Iterable[tuple[Places, int]]) -> set[ContainerId]:
    """Return the containers whose small pieces should be rewritten into a common container.

    `held` has a pair for each small piece: the containers needed to read it, and its size. If no
    containers should be merged, the result is empty.
    """
    weights: Counter[ContainerId] = Counter()
    for places, nbytes in held:
        if places:
            weights[places[0]] += nbytes
    tiers: dict[int, set[ContainerId]] = {}
    for container, nbytes in weights.items():
        tier = max(0, nbytes.bit_length() - _SMALLEST_BITS) // _TIER_BITS
        tiers.setdefault(tier, set()).add(container)
    return {each for tier in tiers.values() if len(tier) >= _TIER for each in tier}


@dataclass(frozen=True, slots=True)
class _Kept:
    owner: int
    index: StoreIndex
    hasher: Hasher
    undo: ExitStack

    def close(self) -> None:
        self.forsake()
        if self.owner == os.getpid():
            self.hasher.close()

    def forsake(self) -> None:
        """Close the index and tell the threads to end, without waiting for them.

        Collections of garbage call this, and one may run inside any allocation: while a thread
        starts, too, in which its own locks are held, and joining another one takes them.
        """
        if self.owner == os.getpid():
            self.undo.close()
        else:
            _INHERITED.append(self)


class RunCache:
    """The index and the hashing threads of a training run, kept open between its sessions.

    Only one session may be active at a time.
    """

    def __init__(self, objects: Objects, workers: int) -> None:
        self._objects, self._workers = objects, workers
        self._finalizer: weakref.finalize[[], RunCache] | None = None
        self._kept: _Kept | None = None

    @contextmanager
    def session(self) -> Iterator[tuple[StoreIndex, Hasher]]:
        """Context manager: while it is active, the store's main lock is held shared.

        The lock keeps garbage collection out. The context manager provides the index and the
        hasher. An OSError becomes a StoreError.

        Raises:
            StoreBusyError: Garbage collection is running and did not end within two minutes.
        """
        objects = self._objects
        with os_errors(objects.layout.root), objects.session():
            kept = self._usable()
            try:
                yield kept.index, kept.hasher
            except BaseException:
                # Whatever it was, it may have been this; that comes first, and so it is raised.
                with suppress(OSError, sqlite.Error):
                    self.close()
                raise
            if kept.index.broken:
                self.close()

    def close(self) -> None:
        """Close the index and stop the threads. The next session opens them again."""
        finalizer, self._finalizer = self._finalizer, None
        kept, self._kept = self._kept, None
        if kept is not None and finalizer is not None and finalizer.detach() is not None:
            kept.close()

    def _usable(self) -> _Kept:
        if self._kept is not None and self._kept.owner != os.getpid():
            self.close()
        if self._kept is None:
            with ExitStack() as undo:
                hasher = Hasher(self._objects.files, self._workers)
                undo.callback(hasher.close, wait=False)
                index = undo.enter_context(open_index(self._objects))
                index.relax()
                self._kept = _Kept(os.getpid(), index, hasher, undo.pop_all())
            self._finalizer = weakref.finalize(self, self._kept.forsake)
        else:
            self._kept.index.fresh = False
        return self._kept
