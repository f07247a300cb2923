"""One commit of a step: capture, hash, encode, write, commit (`StepCommit.run`).

Large pieces of a step may be written before the last one is captured.

The change hash, a fast hash of the bytes of a piece, says whether the step saved last has a piece
with the same bytes. If not, the piece is looked up in the store by its digest, and written if it is
not there (`piece_writer`). `tensor_dedup.store.writing.transaction` explains the order in which
files become durable.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tensor_dedup.digest import digest
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import LostHitError
from tensor_dedup.store.format import manifests
from tensor_dedup.store.format.manifests import PAGE_ENTRIES, FileEntry, Manifest
from tensor_dedup.store.gathered import FlatBytes, flat_bytes
from tensor_dedup.store.hashing import Hasher, change_hashes
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.steps.runs import StepOrder, check_not_kept, check_replaceable
from tensor_dedup.store.writing.containers import Want, Wanted
from tensor_dedup.store.writing.run_cache import (
    LastStep,
    PageState,
    PieceTable,
    Places,
    Row,
    StoredPiece,
    packs_to_merge,
)
from tensor_dedup.store.writing.transaction import BatchTransaction
from tensor_dedup.training.in_flight import containers_there
from tensor_dedup.training.piece_writer import PieceWriter, batches
from tensor_dedup.training.snapshot import StepSnapshot, StepSource

_EMPTY = StoredPiece(bytes.fromhex(digest(b"")), 0, ())
_FILE = "(small file)"


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a save. Sizes are in bytes.

    * `new_tensors` is the number of distinct pieces (tensors and small files) that were not in the
      store before, and `new_bytes` their size.
    * `stored_bytes` is the number of bytes that were written for these tensors, with tables and
      manifests. A later encoding may reduce the space that they take.
    * `seconds` is the time until everything was durable.
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


class _HashedStep:
    """A whole step as rows, files first, that are grouped as in the pages of its manifest.

    `data` has the bytes of each row.
    """

    def __init__(self, snapshot: StepSnapshot, hasher: Hasher) -> None:
        self.snapshot = snapshot
        self.data = [*snapshot.files.values(), *(piece.data for piece in snapshot.pieces)]
        self.pages = self._rows(hasher).pages()

    def _rows(self, hasher: Hasher) -> PieceTable:
        # Here all tensors are read: nothing else is done for each of them when none has changed.
        taken, whole = self.snapshot.pieces, [None] * len(self.snapshot.files)
        names = [*whole, *(piece.name for piece in taken)]
        dtypes = [*whole, *(piece.dtype for piece in taken)]
        return PieceTable(
            self._hashes(names, hasher), names, dtypes, [*whole, *(each.shape for each in taken)]
        )

    def _hashes(self, names: Sequence[str | None], hasher: Hasher) -> list[bytes]:
        known = self.snapshot.hashes
        if not known:
            return change_hashes(hasher, self.data)
        there = [None if name is None else known.get(name) for name in names]
        pairs = zip(self.data, there, strict=True)
        found = iter(change_hashes(hasher, [data for data, key in pairs if key is None]))
        return [key or next(found) for key in there]

    def want(self, row: Row, view: FlatBytes) -> Want:
        """Return a row as a piece to write, whose bytes are `view`."""
        return Want(row[1] or _FILE, row[2], view, row[1] in self.snapshot.private)


@dataclass(slots=True)
class _SortedPieces:
    """Pieces of a step by change hash, sorted by where they are.

    * `known` are in the step saved last; `small` has the places and sizes of small ones.
    * `same` are pieces that the capture has found in an earlier step, and that are not in memory;
      `names` has their names and dtypes.
    * `wanted` are to be looked up by their digests, and written if they are nowhere.
    """

    known: dict[bytes, StoredPiece]
    small: list[tuple[Places, int]] = field(default_factory=list)
    same: dict[bytes, StoredPiece] = field(default_factory=dict)
    names: dict[bytes, tuple[str, str | None]] = field(default_factory=dict)
    wanted: dict[bytes, Want] = field(default_factory=dict)


class StepCommit:
    """One commit of a step, in a session and a transaction. Call `run` once.

    `last` is the step saved last, with which the step is compared. `next` is what the next step is
    to be compared with, after `run`.
    """

    def __init__(
        self,
        objects: Objects,
        hasher: Hasher,
        writer: PieceWriter,
        transaction: BatchTransaction,
        last: LastStep,
        order: StepOrder,
    ) -> None:
        self._objects, self._hasher, self._order = objects, hasher, order
        self._writer, self._transaction = writer, transaction
        self._last, self._alive = last, containers_there(objects, last)
        # The change hashes of what was written before the step was captured as a whole.
        self._written: set[bytes] = set()
        self.next = LastStep()

    def run(self, source: StepSource, began: float) -> Saved:
        """Store what is new in a step, and let its name refer to it.

        `began` is when the save began, by `time.monotonic`. Raises the errors of `Saver.commit`.
        """
        # Capture: of a step in memory all is there already.
        self._write_arriving(source)
        snapshot = source.whole()
        # Hash: pages with the same hashes as in the last step are done.
        step = _HashedStep(snapshot, self._hasher)
        kept = [self._kept(number, part) for number, part in enumerate(step.pages)]
        # Encode and write what the store lacks.
        known = self._write_missing(step, kept)
        # Commit.
        pages = zip(step.pages, kept, strict=True)
        self.next.pages = [page or self._page(part, known) for part, page in pages]
        self.next.name, self.next.manifest = snapshot.name, self._add_manifest(snapshot)
        self._transaction.commit(
            snapshot.name,
            self.next.manifest,
            replace=not snapshot.new,
            check_hits=lambda: self._check_hits(snapshot),
            check_name=lambda: self._check_name(snapshot),
        )
        return Saved(
            name=snapshot.name,
            step=snapshot.notes.step,
            manifest=self.next.manifest,
            tensors=len(snapshot.pieces),
            nbytes=sum(page.nbytes for page in self.next.pages),
            new_tensors=self._writer.pieces,
            new_bytes=self._writer.nbytes,
            stored_bytes=self._writer.stored_bytes + self._transaction.object_bytes,
            seconds=time.monotonic() - began,
        )

    def _write_arriving(self, source: StepSource) -> None:
        """Write large pieces while others are captured."""
        known: Mapping[bytes, StoredPiece] | None = None
        for some in batches(source.arriving(), lambda piece: piece[1].view.nbytes):
            known = self._last.known(self._alive) if known is None else known
            new = {k: want for k, want in some if k not in known and k not in self._written}
            self._writer.write(new)
            self._written.update(new)

    def _kept(self, number: int, part: PieceTable) -> PageState | None:
        """The page of the last step, when this one has the same and all of it is there."""
        page = self._last.page(number)
        if page is None or page.rows != part or not page.containers <= self._alive:
            return None
        status = self._objects.files.status(self._objects.layout.manifest(page.name))
        return page if status is not None and status.size == page.file_bytes else None

    def _write_missing(
        self, step: _HashedStep, kept: Sequence[PageState | None]
    ) -> dict[bytes, StoredPiece]:
        """Write what is nowhere yet; return where the pieces of the pages not kept are.

        Containers that have become too many are put together, those of kept pages too.
        """
        pages = [page for page in kept if page is not None]
        found = self._sorted(step, [n for n, page in enumerate(kept) if page is None])
        known, wanted = found.known, found.wanted
        packs = packs_to_merge(chain(found.small, *(page.weights.items() for page in pages)))
        again = _lying_in(packs, step, known, pages)
        wanted |= self._deleted(step.snapshot, found)
        if wanted or again or self._written:
            self._writer.write(wanted)
            known |= self._writer.finish(again)
        if elsewhere := {key: each for key, each in found.same.items() if key not in known}:
            known |= self._writer.find(elsewhere)
        for page in pages:
            if not again.keys().isdisjoint(page.held):
                page.take({**page.held, **{key: known[key] for key in again}})
        return known

    def _sorted(self, step: _HashedStep, changed: Sequence[int]) -> _SortedPieces:
        """Sort the pieces of the pages that have changed by where they are."""
        found = _SortedPieces(self._last.known(self._alive) if changed else {})
        known, same = found.known, step.snapshot.same
        for number in changed:
            for at, row in enumerate(step.pages[number], number * PAGE_ENTRIES):
                key, name = row[0], row[1]
                if key in known:
                    if known[key].small:
                        found.small.append((known[key].places, known[key].nbytes))
                elif name is not None and name in same:
                    found.same[key], found.names[key] = same[name], (name, row[2])
                elif not (view := flat_bytes(step.data[at])).nbytes:
                    known[key] = _EMPTY
                elif key not in self._written:
                    found.wanted[key] = step.want(row, view)
        return found

    def _deleted(self, snapshot: StepSnapshot, found: _SortedPieces) -> dict[bytes, Want]:
        """What somebody else has deleted, as far as it is still in memory."""
        wanted = {}
        for key in self._writer.missing(found.same):
            there = snapshot.again(found.names[key][0], key)
            if there is not None and key not in self._written:
                wanted[key] = Want(*found.names[key], *there)
        return wanted

    def _page(self, part: PieceTable, known: Mapping[bytes, StoredPiece]) -> PageState:
        name, blob = manifests.encode_page(
            [manifests.Piece(known[row[0]].digest, known[row[0]].nbytes, *row[1:]) for row in part]
        )
        self._transaction.add_object(name, blob)
        return PageState(part, known, name, len(blob))

    def _add_manifest(self, snapshot: StepSnapshot) -> str:
        pages = self.next.pages
        name, blob = manifests.encode_manifest(
            Manifest(
                [FileEntry(path, len(data), 1, "") for path, data in snapshot.files.items()],
                [bytes.fromhex(page.name) for page in pages],
                sum(len(page.rows) for page in pages),
                sum(page.nbytes for page in pages),
                self._order.placed(snapshot.notes).to_texts(),
            )
        )
        self._transaction.add_object(name, blob)
        return name

    def _check_hits(self, snapshot: StepSnapshot) -> None:
        """Look all containers up again, and make those durable that others have written.

        Raises:
            LostHitError: One is not there any more.
            ChangedModelError: A tensor was changed before it was stored.
        """
        snapshot.check_unchanged()
        files, layout = self._objects.files, self._objects.layout
        for container in {each for page in self.next.pages for each in page.containers}:
            path = layout.container(container.name, container.kind)
            path, size = self._last.containers.get(container, (path, None))
            status = files.status(path)
            if status is None or size not in (None, status.size):
                what = f"the container {container.name} was removed meanwhile"
                raise LostHitError.at(layout.root, what)
            self.next.containers[container] = (path, status.size)
        own = {each.container for each in self._transaction.sealed}
        new = self.next.containers.keys() - self._last.containers.keys() - own
        self._transaction.settle(self.next.containers[container][0] for container in sorted(new))

    def _check_name(self, snapshot: StepSnapshot) -> None:
        self._order.check_name()
        # A new step replaces nothing, whatever it is.
        check = check_not_kept if snapshot.new else check_replaceable
        check(self._objects, snapshot.notes.run, snapshot.notes.step)


def _lying_in(
    packs: set[ContainerId],
    step: _HashedStep,
    known: Mapping[bytes, StoredPiece],
    pages: Iterable[PageState],
) -> Wanted:
    """The small pieces of a step that are read from some of these containers."""
    if not packs:
        return {}
    held = {key: each for page in pages for key, each in page.held.items()} | dict(known)
    rows = (row for part in step.pages for row in part)
    return {
        row[0]: Want(row[1] or _FILE, row[2], flat_bytes(data))
        for row, data in zip(rows, step.data, strict=True)
        if row[0] in held and held[row[0]].small and not packs.isdisjoint(held[row[0]].places)
        if row[1] not in step.snapshot.same
    }
