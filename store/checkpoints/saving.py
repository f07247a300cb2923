"""Committing a step: what is new goes to containers, the rest is only referred to.

    snapshot -> commit

A snapshot is a step's pieces, in memory that nobody writes to until commit has returned; commit may
run in any thread. A piece is unchanged when its bytes are: a fast hash compares them with those of
the step this handle saved last; what that does not know gets its digest and is looked up. Names and
addresses are never asked.

Order: containers, pages and manifest together, the index, then the reference; everything under the
session's lock, all of it durable before the reference appears.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from tensor_dedup.digest import digest
from tensor_dedup.store import manifests
from tensor_dedup.store.checkpoints.errors import NamedTwiceError
from tensor_dedup.store.checkpoints.fast import fast
from tensor_dedup.store.checkpoints.memory import Known, Last, PageState, Places, Row
from tensor_dedup.store.checkpoints.naming import step_name
from tensor_dedup.store.checkpoints.notes import Notes
from tensor_dedup.store.checkpoints.publishing import Batch, Settled
from tensor_dedup.store.checkpoints.state import Piece
from tensor_dedup.store.checkpoints.writing import Fresh, MemoryWriter, hash_all
from tensor_dedup.store.containers import Sealed, kind_for
from tensor_dedup.store.errors import LostHitError
from tensor_dedup.store.generated import RESERVED
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import Index, Place, open_index
from tensor_dedup.store.locks import session
from tensor_dedup.store.manifests import PAGE_ENTRIES, FileEntry, Manifest
from tensor_dedup.store.names import check_path, file_of
from tensor_dedup.store.objects import ContainerId, Objects, ref_text
from tensor_dedup.store.translating import translated

_EMPTY = bytes.fromhex(digest(b""))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A step as it is to be committed: its notes, its tensors, and small files by their paths."""

    notes: Notes
    pieces: Sequence[Piece]
    files: Mapping[str, bytes]

    def check(self) -> None:
        """NamedTwiceError: two parts have one name. EscapingPathError: a file has no fit path."""
        names = {piece.name for piece in self.pieces}
        if len(names) != len(self.pieces):
            what = f"{len(self.pieces)} tensors have {len(names)} names"
            raise NamedTwiceError.at(self.name, what)
        paths = [check_path(path, PurePath(self.name)) for path in self.files]
        within = {parent for path in paths for parent in path.parents}
        taken = [path for path in paths if str(path) in RESERVED or path in within]
        if taken:
            what = f"{taken[0]} is where other files are exported to"
            raise NamedTwiceError.at(self.name, what, file=str(taken[0]))

    @property
    def name(self) -> str:
        """What it will be called in the store."""
        return step_name(self.notes.run, self.notes.step)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save did. `new_bytes` were nowhere in the store, `stored_bytes` went to the disk for
    them, with the bookkeeping; `seconds` until it was durable.
    """

    name: str
    step: int
    manifest: str
    tensors: int
    nbytes: int
    new_tensors: int
    new_bytes: int
    stored_bytes: int
    seconds: float


class Saver:
    """Commits the steps of one handle, one at a time. Any thread."""

    def __init__(self, objects: Objects, workers: int, *, compress: Literal["auto"] | None) -> None:
        self._objects = objects
        self._compress = compress
        self._workers = workers
        self._lock = threading.Lock()
        self._last = Last()
        self._settled = Settled()

    def close(self) -> None:
        """Forget the last step: the next save asks the store."""
        with self._lock:
            self._last = Last()

    def commit(self, snapshot: Snapshot) -> Saved:
        """Store a step under its name, in place of one that has it. All or nothing.

        NoSpaceError, StoreIOError and all else that StoreError is: what was saved before is as it
        was, and the name may be there or not only when the disk failed in the very end.
        """
        began = time.monotonic()
        snapshot.check()
        with self._lock, self._session() as (index, hasher):
            work = _Commit(self._objects, index, hasher, self._settled, self._last, snapshot)
            try:
                with work:
                    manifest = work.run()
            except BaseException:
                self._last = Last()  # what is true of the store now, the next save asks it
                raise
            self._last = work.next
        return work.result(manifest, time.monotonic() - began)

    @contextmanager
    def _session(self) -> Iterator[tuple[Index, Hasher]]:
        objects = self._objects
        root = objects.layout.root
        with translated(root), session(objects.files, objects.layout), ExitStack() as undo:
            hasher = Hasher(objects.files, self._workers)
            undo.callback(hasher.close)
            first = not self._last.pages
            yield undo.enter_context(open_index(objects, update=first)), hasher


class _Commit:
    """One commit, in a session. Leaving it removes what was not published."""

    def __init__(
        self,
        objects: Objects,
        index: Index,
        hasher: Hasher,
        settled: Settled,
        last: Last,
        snapshot: Snapshot,
    ) -> None:
        self._objects, self._index, self._hasher = objects, index, hasher
        self._last, self._snapshot = last, snapshot
        self._undo = ExitStack()
        self._batch = self._undo.enter_context(Batch(objects, hasher, settled))
        self.next = Last()
        self._new_tensors = self._new_bytes = self._stored = 0

    def __enter__(self) -> "_Commit":
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def run(self) -> str:
        """Store and commit; the manifest's name."""
        rows, views = self._rows()
        alive = self._alive()
        parts = [(at, rows[at : at + PAGE_ENTRIES]) for at in range(0, len(rows), PAGE_ENTRIES)]
        kept = [self._kept(number, part, alive) for number, (_, part) in enumerate(parts)]
        changed = [part for part, page in zip(parts, kept, strict=True) if page is None]
        found, sealed = self._found(changed, views, alive)
        self.next.pages = [
            page or self._page(at, part, found, views)
            for (at, part), page in zip(parts, kept, strict=True)
        ]
        return self._publish(sealed)

    def _rows(self) -> tuple[list[Row], list[memoryview]]:
        files = self._snapshot.files.values()
        pieces = self._snapshot.pieces
        rows: list[Row] = [(fast(data), None, None, None) for data in files]
        rows += [(fast(p.data), p.name, p.dtype, p.shape) for p in pieces]
        views = [memoryview(data) for data in files]
        views += [memoryview(piece.data) for piece in pieces]
        return rows, views

    def _alive(self) -> set[ContainerId]:
        """The containers of the last step that are still what they were."""
        files, layout = self._objects.files, self._objects.layout
        bad = set(self._objects.bad_containers())
        found = set()
        for container, size in self._last.containers.items():
            status = files.status(layout.container(container.name, container.kind))
            if status is not None and status.size == size and container.name not in bad:
                found.add(container)
        return found

    def _kept(self, number: int, part: list[Row], alive: set[ContainerId]) -> PageState | None:
        """The page of the last step, when this one has the same and all of it is there."""
        page = self._last.page(number)
        if page is None or page.rows != part or not page.containers <= alive:
            return None
        status = self._objects.files.status(self._objects.layout.manifest(page.name))
        return page if status is not None and status.size == page.file_bytes else None

    def _found(
        self,
        changed: list[tuple[int, list[Row]]],
        views: list[memoryview],
        alive: set[ContainerId],
    ) -> tuple[dict[bytes, Known], list[Sealed]]:
        """Where the pieces of these pages are, by fast hash; what is nowhere is written."""
        if not changed:
            return {}, []
        found = self._last.known(alive)
        wanted = {
            row[0]: (row[1] or "(file)", views[at + number].cast("B"), row[0])
            for at, part in changed
            for number, row in enumerate(part)
            if row[0] not in found and views[at + number].nbytes
        }
        hashed = hash_all(self._hasher, [*wanted.values()])
        pieces = {piece.hashed.digest: piece for piece in hashed}
        places = self._look_up(pieces)
        fresh = [piece for digest_, piece in pieces.items() if digest_ not in places]
        sealed = self._write(fresh)
        places |= {
            record.digest: (each.container,) for each in sealed for record in each.table.records
        }
        for digest_, piece in pieces.items():
            found[piece.fast] = Known(digest_, piece.view.nbytes, places[digest_])
        return found, sealed

    def _look_up(self, digests: Mapping[bytes, Fresh]) -> dict[bytes, Places]:
        """The containers in which the store has some of these pieces."""
        held = self._index.find(digests)
        if not self._index.fresh and not self._index.still_so(_containers(held)):
            self._index.refresh()
            held = self._index.find(digests)
        bases = {place.base for places in held.values() for place in places if place.base}
        under = self._index.find(bases)
        return {digest_: _nearest(places, under) for digest_, places in held.items()}

    def _write(self, fresh: list[Fresh]) -> list[Sealed]:
        writers = {
            kind: MemoryWriter(self._objects, self._hasher, kind) for kind in ("slab", "pack")
        }
        for writer in writers.values():
            self._undo.callback(writer.abandon)
        for piece in fresh:
            writers[kind_for(piece.view.nbytes)].put(piece)
            self._new_tensors += 1
            self._new_bytes += piece.view.nbytes
        sealed = [each for writer in writers.values() if (each := writer.seal()) is not None]
        for each in sealed:
            target = self._objects.layout.container(each.container.name, each.container.kind)
            self._batch.take(each.handle, target)
            self._stored += each.file_bytes
        return sealed

    def _page(
        self, at: int, part: list[Row], found: Mapping[bytes, Known], views: list[memoryview]
    ) -> PageState:
        held = [
            found[row[0]] if views[at + number].nbytes else Known(_EMPTY, 0, ())
            for number, row in enumerate(part)
        ]
        name, blob = manifests.encode_page(
            [
                manifests.Piece(known.digest, known.nbytes, *row[1:])
                for known, row in zip(held, part, strict=True)
            ]
        )
        self._batch.write(blob, self._objects.layout.manifest(name))
        self._stored += len(blob)
        return PageState(
            part,
            name,
            len(blob),
            [known.nbytes for known in held],
            [known.digest for known in held],
            [known.places for known in held],
        )

    def _publish(self, sealed: Sequence[Sealed]) -> str:
        objects, snapshot = self._objects, self._snapshot
        manifest, blob = manifests.encode_manifest(self._manifest())
        self._batch.write(blob, objects.layout.manifest(manifest))
        text = ref_text(snapshot.name, manifest)
        reference = self._batch.write(text, None)
        self._stored += len(blob) + len(text)
        self._batch.publish()
        for each in sealed:
            # It may just have come back whole, under a name that had bad places.
            objects.set_bad_offsets(each.container.name, ())
            self._index.add(each.container, each.table, each.file_bytes)
        self._check_hits()
        with objects.naming():
            objects.files.rename(reference, objects.layout.refs / file_of(snapshot.name))
            objects.files.sync_folder(objects.layout.refs)
        return manifest

    def _manifest(self) -> Manifest:
        pages = self.next.pages
        return Manifest(
            [FileEntry(path, len(data), 1, "") for path, data in self._snapshot.files.items()],
            [bytes.fromhex(page.name) for page in pages],
            sum(len(page.rows) for page in pages),
            sum(sum(page.nbytes) for page in pages),
            self._snapshot.notes.to_texts(),
        )

    def _check_hits(self) -> None:
        """Look all containers up again. LostHitError: one is not there any more."""
        files, layout = self._objects.files, self._objects.layout
        for container in {each for page in self.next.pages for each in page.containers}:
            status = files.status(layout.container(container.name, container.kind))
            known = self._last.containers.get(container)
            if status is None or (known is not None and status.size != known):
                what = f"the container {container.name} was removed meanwhile"
                raise LostHitError.at(layout.root, what)
            self.next.containers[container] = status.size

    def result(self, manifest: str, seconds: float) -> Saved:
        """What it did."""
        return Saved(
            name=self._snapshot.name,
            step=self._snapshot.notes.step,
            manifest=manifest,
            tensors=len(self._snapshot.pieces),
            nbytes=sum(sum(page.nbytes) for page in self.next.pages),
            new_tensors=self._new_tensors,
            new_bytes=self._new_bytes,
            stored_bytes=self._stored,
            seconds=seconds,
        )


def _containers(held: Mapping[bytes, Sequence[Place]]) -> set[ContainerId]:
    return {place.container for places in held.values() for place in places}


def _nearest(places: Sequence[Place], under: Mapping[bytes, Sequence[Place]]) -> Places:
    """The containers that a piece is read from: one that needs no other, where there is one."""
    alone = next((place for place in places if place.base is None), None)
    if alone is not None:
        return (alone.container,)
    place = places[0]
    base = next(each for each in under[place.base or b""] if each.base is None)
    return (place.container, base.container)
