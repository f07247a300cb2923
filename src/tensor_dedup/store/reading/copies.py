"""The copies of pieces in a store's containers, and the open files they are read from.

A piece may be stored several times: unencoded, encoded on its own, or as a delta, which is encoded
against another piece.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tensor_dedup.errors import StoreError
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    StoreBusyError,
    unreadable_as_damage,
)
from tensor_dedup.store.files import Handle
from tensor_dedup.store.format.external import EXTERNAL, ExternalFile
from tensor_dedup.store.format.tables import Record, Table
from tensor_dedup.store.index import PieceLocation, StoreIndex
from tensor_dedup.store.locks import session
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.handle_cache import HandleCache, spare_handles

# Up to so many containers are opened although fewer hold all that is wanted: for what they have
# twice. A process may have a thousand files open, and an ensemble may lie in thousands.
_SPARE = 16
# One of which less than this is wanted is opened only for what no other has: its table is long.
_DENSE = 1 / 4


@dataclass(frozen=True, slots=True)
class PieceCopy:
    """A copy of a piece: the container that holds it, and its record in the container's table."""

    container: ContainerId
    record: Record

    @property
    def may_be_base(self) -> bool:
        """Whether this copy can serve as the base from which another piece is decoded.

        It can if it is not itself encoded against another piece, and does not lie in a file that
        was indexed in place.
        """
        return self.record.base is None and self.container.kind != EXTERNAL


class PieceCopies:
    """The copies of some pieces in a store's containers. Safe from any thread.

    The containers are held open until `close`, so they stay readable during garbage collection. In
    two cases, the store's main lock is held shared until `close`, which delays garbage collection:

    - There are more containers than a reader may hold open. They are opened when needed.
    - No known copy of a piece is intact. All containers are then searched for other copies.
    """

    def __init__(self, objects: Objects, index: StoreIndex, wanted: set[bytes]) -> None:
        """Open the containers of the pieces whose digests are in `wanted`.

        Call it inside `with locks.session(...):`.
        """
        self._objects = objects
        self._lock = threading.Lock()
        # The containers that were found, and the files that they index in place, if they do.
        self._origins: dict[ContainerId, ExternalFile | None] = {}
        self._handles = HandleCache(objects.files, self._open_data, spare_handles(objects.files))
        self._session = ExitStack()
        self._wanted = wanted
        self._given_up: list[PieceCopy] = []
        self._searching = threading.Lock()
        self._searched: set[bytes] | None = None  # None until a session is held
        self._copies: dict[bytes, list[PieceCopy]] = {}
        try:
            self._open_containers(index, wanted)
            if len(self._handles) < len(self._origins):
                self._hold_session()  # within the caller's: no gc can come in between
        except BaseException:
            self.close()
            raise

    def _hold_session(self) -> set[bytes]:
        if self._searched is None:
            files, layout = self._objects.files, self._objects.layout
            self._handles.with_room(lambda: self._session.enter_context(session(files, layout)))
            self._searched = set()
        return self._searched

    def _open_data(self, container: ContainerId) -> Handle:
        return self._objects.containers.open_origin(container, self._origins[container])

    def _open_containers(self, index: StoreIndex, wanted: set[bytes]) -> None:
        self._open_known(index, wanted)
        if not index.fresh and not all(digest in self for digest in wanted):
            index.refresh()
            self._handles.close()
            self._origins, self._copies = {}, {}
            self._open_known(index, wanted)

    def _open_known(self, index: StoreIndex, wanted: set[bytes]) -> None:
        # More than one, also where one would do: it may turn out to be damaged.
        records = self._open_all(index, wanted)
        bases = {base for _, r in records if r.digest in wanted for base in r.bases}
        for container, record in [*records, *self._open_all(index, bases, anchors=True)]:
            if record.digest in wanted or record.digest in bases:
                copy = PieceCopy(container, record)
                self._copies.setdefault(record.digest, []).append(copy)

    def _open_all(
        self, index: StoreIndex, wanted: set[bytes], *, anchors: bool = False
    ) -> list[tuple[ContainerId, Record]]:
        """Open the containers that hold these pieces; all good records of those newly opened.

        With `anchors`, only such in which others may be stored against them.
        """
        found: list[tuple[ContainerId, Record]] = []
        places = index.find(wanted, external=not anchors)
        if anchors:
            alone = {d: [p for p in held if p.base is None] for d, held in places.items()}
            places = {digest: held for digest, held in alone.items() if held}
        for container in choose_containers(places):
            if container in self._origins:
                continue
            with suppress(
                MissingObjectError, DamagedFileError, NewerFormatError, FileNotFoundError
            ):
                table, bad = self._handles.with_room(partial(self._looked_up, container))
                self._origins[container] = self._objects.containers.origin(container, table)
                try:
                    with unreadable_as_damage(self.path(container)), self.using(container):
                        pass  # it is there, and open
                except BaseException:
                    del self._origins[container]
                    raise
                found += [(container, r) for r in table.records if r.offset not in bad]
        return found

    def _looked_up(self, container: ContainerId) -> tuple[Table, frozenset[int]]:
        return self._objects.containers.table(container), self._objects.bad_offsets(container.name)

    def close(self) -> None:
        """Close the containers and release the store's lock. A second call has no effect."""
        self._handles.close()
        self._session.close()

    @property
    def counts(self) -> tuple[int, int]:
        """The number of pieces found, and the number of containers they are in."""
        return len(self._copies), len(self._origins)

    def __contains__(self, digest: bytes) -> bool:
        """Return whether a container was found that should hold the piece with this digest."""
        return any(
            all(map(self._is_anchor, copy.record.bases)) for copy in self._copies.get(digest, ())
        )

    def using(self, container: ContainerId) -> AbstractContextManager[Handle]:
        """Return a context manager: while it is active, a container's data file is open.

        It provides a handle for reading.

        Raises:
            OSError: The file was removed or cannot be opened.
            ChangedExternalError: The file was indexed in place and has changed.
        """
        return self._handles.using(container)

    def path(self, container: ContainerId) -> Path:
        """Return the path of the data file of a container that this object uses."""
        origin = self._origins[container]
        own = self._objects.layout.container(container.name, container.kind)
        return own if origin is None else origin.path

    def known(self, digest: bytes) -> list[PieceCopy]:
        """Return the known copies of a piece in the order in which to try them."""
        with self._lock:
            return list(self._copies.get(digest, ()))

    def may_have(self, digest: bytes, nbytes: int) -> bool:
        """Return whether reading a piece with this digest and size may succeed.

        The result is False in two cases:

        - No copy of the piece is known, and this object was made for other pieces.
        - A known copy has another size.
        """
        with self._lock:
            copies = self._copies.get(digest)
        unknown = copies is None and digest not in self._wanted
        return not unknown and all(copy.record.nbytes == nbytes for copy in copies or ())

    def anchor(self, digest: bytes) -> bytes | None:
        """Return the digest of an anchor for new pieces that resemble the piece `digest`, or None.

        An anchor is a piece against which other pieces can be encoded. It has a copy in the store
        that is not itself encoded against another piece. The anchor is the piece `digest` itself,
        if possible, or else a piece against which it is encoded.
        """
        bases = [copy.record.base for copy in self.known(digest) if copy.record.base is not None]
        # One step, never more: two deltas may be against each other when no plain copy is left.
        return next((each for each in (digest, *bases) if self._is_anchor(each)), None)

    def _is_anchor(self, digest: bytes) -> bool:
        return any(copy.may_be_base for copy in self.known(digest))

    def all_of(self, digest: bytes) -> Iterator[PieceCopy]:
        """Iterate over all copies of a piece: first the known copies, then those found by a search.

        The search reads the tables of all containers. If garbage collection keeps the store locked,
        there is no search.
        """
        known = self.known(digest)
        yield from known
        with suppress(StoreBusyError):  # a gc that does not end: what was found is all there is
            self._search(digest)
        yield from (copy for copy in self.known(digest) if copy not in known)

    def _search(self, digest: bytes) -> None:
        """Look for a piece in all containers: few were opened, and the index may be wrong."""
        with self._searching:
            searched = self._hold_session()
            if digest in searched:
                return
            # With it all else that is missing: to look is to read all tables.
            with self._lock:
                missing = {other for other in self._wanted if not self._copies.get(other)}
            missing = {digest, *missing} - searched
            bases = self._find_all(missing) - searched - missing
            if bases:
                self._find_all(bases)
            searched |= missing | bases

    def _find_all(self, wanted: set[bytes]) -> set[bytes]:
        """Add every good record of these pieces; return all that deltas are against."""
        bases = set[bytes]()
        for container in sorted(self._objects.containers, key=lambda c: c.kind, reverse=True):
            with suppress(StoreError, FileNotFoundError):  # it is for verify to say so
                table, bad = self._handles.with_room(partial(self._looked_up, container))
                held = [r for r in table.records if r.digest in wanted and r.offset not in bad]
                if held and container not in self._origins:
                    self._origins[container] = self._objects.containers.origin(container, table)
                bases |= {base for record in held for base in record.bases}
                with self._lock:
                    for record in held:
                        copy = PieceCopy(container, record)
                        copies = self._copies.setdefault(record.digest, [])
                        if copy not in copies and copy not in self._given_up:
                            copies.append(copy)
        return bases

    def give_up(self, copy: PieceCopy) -> None:
        """Mark a copy as damaged, here and in the store, so that it is not read again."""
        with self._lock:
            self._copies[copy.record.digest] = [
                other for other in self._copies[copy.record.digest] if other is not copy
            ]
            self._given_up.append(copy)
        # Where no note of it can be kept (the store may only be read, the disk is full, the list
        # is damaged itself), it is still not believed.
        with suppress(OSError, StoreError):
            self._objects.add_bad_offset(copy.container.name, copy.record.offset)


def choose_containers(places: Mapping[bytes, Sequence[PieceLocation]]) -> list[ContainerId]:
    """Choose the containers to open for reading pieces: a small set that holds every piece.

    `places` maps the digest of each piece to its locations. A few containers with second copies may
    be added, in case a first copy is damaged.
    """
    wanted: Counter[ContainerId] = Counter()
    sizes: dict[ContainerId, int] = {}
    for held in places.values():
        for place in held:
            wanted[place.container] += place.nbytes
            sizes[place.container] = place.file_bytes
    ranked = sorted(wanted, key=lambda c: (wanted[c] < sizes[c] * _DENSE, -wanted[c], c))
    ranks = {container: rank for rank, container in enumerate(ranked)}
    chosen = {min(ranks[place.container] for place in held) for held in places.values()}
    spare = (
        rank
        for rank, container in enumerate(ranked)
        if rank not in chosen and wanted[container] >= sizes[container] * _DENSE
    )
    for rank in spare:
        if len(chosen) >= _SPARE:
            break
        chosen.add(rank)
    # What is not encoded is read first, what others own late.
    return sorted((ranked[rank] for rank in sorted(chosen)), key=lambda c: c.kind, reverse=True)
