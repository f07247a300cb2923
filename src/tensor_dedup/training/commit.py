"""Commit a step: write new pieces to containers, and only refer to pieces that are stored.

A snapshot has the pieces of a step, in memory that is not written to until the commit has returned.
A commit may run in any thread, and may store large pieces before the last one is captured.

The change hash, a fast hash of the bytes of a piece, says whether the step saved last has a piece
with the same bytes. If not, the piece is looked up in the store by its digest. Names and addresses
of tensors do not matter. `tensor_dedup.store.writing.transaction` explains the order in which files
become durable.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tensor_dedup.digest import digest
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import LostHitError, NoSpaceError, os_errors
from tensor_dedup.store.format import manifests
from tensor_dedup.store.format.manifests import (
    PAGE_ENTRIES,
    FileEntry,
    Manifest,
)
from tensor_dedup.store.gathered import FlatBytes, flat_bytes
from tensor_dedup.store.hashing import Hasher, change_hashes
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.steps.runs import (
    StepOrder,
    check_not_kept,
    check_replaceable,
    latest_digests,
    step_name,
)
from tensor_dedup.store.writing.containers import (
    PACK_BELOW,
    SealedContainer,
    Want,
    Wanted,
)
from tensor_dedup.store.writing.deltas import LeafSharing
from tensor_dedup.store.writing.run_cache import (
    LastStep,
    PageState,
    PieceTable,
    Rewritten,
    Row,
    RunCache,
    StoredPiece,
    packs_to_merge,
)
from tensor_dedup.store.writing.transaction import BatchTransaction, SyncedFolders
from tensor_dedup.training.encoding.background import BackgroundEncoder, EncodingJob
from tensor_dedup.training.encoding.decisions import Compress, Deltas, Encoding
from tensor_dedup.training.encoding.first_base import FirstStep
from tensor_dedup.training.in_flight import BaseStep, containers_there
from tensor_dedup.training.piece_writer import PieceWriter, batches
from tensor_dedup.training.reentry import SaveLock
from tensor_dedup.training.snapshot import StepSource

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


class Saver:
    """Commits the steps of one CheckpointStore, one at a time. Safe from any thread."""

    def __init__(
        self,
        objects: Objects,
        workers: int,
        order: StepOrder,
        *,
        compress: Compress,
        base: str | None,
    ) -> None:
        self._objects, self._order, self._workers = objects, order, workers
        self._compress, self._base = compress, base
        self._cache = RunCache(objects, workers)
        self._lock = SaveLock()
        self._synced = SyncedFolders()
        self.reset()

    @property
    def root(self) -> Path:
        """The folder of the store."""
        return self._objects.layout.root

    def reset(self) -> None:
        """Reset the state in a forked child, where a thread that held a lock does not exist."""
        self._lock = SaveLock()
        self._order.renew_lock()
        self._deltas = Deltas()
        self._last = self._shown = LastStep()
        self._encoder = BackgroundEncoder(
            self._objects, self._workers, self._deltas, lambda: self._shown, self._moved
        )

    def finish_encoding(self) -> None:
        """Wait until all tensors that saves have stored unencoded are encoded."""
        self._encoder.finish()

    def wait_for_encoding(self, step: int, enough: Callable[[], bool]) -> None:
        """Wait until no tensor of a step is still to be encoded, or until `enough` returns True.

        `enough` is called again and again during the wait.
        """
        self._encoder.wait_for(step_name(self._order.run, step), enough)

    def drop_encoding(self) -> None:
        """Discard the pending encoding. The tensors stay unencoded in the store."""
        self._encoder.drop()

    def close(self) -> None:
        """Wait for the encoding, and free the memory and files kept between saves.

        The next save has to look up everything in the store.
        """
        self._encoder.finish()
        with self._lock:
            self._last = self._shown = LastStep()
            self._cache.close()

    def _moved(self, change: Rewritten) -> None:
        with self._lock:
            self._last, self._shown = self._last.moved(change), self._shown.moved(change)

    def base(self) -> BaseStep:
        """Return the step committed last, with which the next save compares its large pieces.

        This method does not wait for a running commit. Call `release` on the result when the save
        has ended. Until then the retention rules do not delete the step and, if there are two
        tiers, it stays on the fast tier even if it was copied to the second tier. An explicit
        deletion still removes it.
        """
        with os_errors(self._objects.layout.root):
            return BaseStep(self._objects, self._shown)

    def commit(self, step: StepSource) -> Saved:
        """Store `step` under its name atomically, replacing an existing step of the same name.

        After any error, earlier steps are unchanged. If the disk fails at the very end, the new
        step may or may not exist.

        Raises:
            KeptStepError: The step exists and is kept, perhaps since this commit began.
            NotATrainingError: An imported checkpoint has the step's name.
            NameTakenError: The step must be new, and the name exists.
            ChangedModelError: The model was written to during the commit.
            NamedTwiceError, EscapingPathError, NotTextError: A name is invalid.
            NestedSaveError: The calling thread is already committing a step of the same
                CheckpointStore.
            StoreError: The disk failed. The error is a NoSpaceError, a StoreIOError or another
                subclass.
        """
        try:
            return self._commit(step)
        except NoSpaceError:
            if not self._encoder.busy:
                raise
            # What is being encoded takes space a second time, which a save needs more.
            self._encoder.drop()
            return self._commit(step)

    def _commit(self, step: StepSource) -> Saved:
        began = time.monotonic()
        self._lock.check(self.root)
        with self._encoder.saving(), self._lock:
            last, self._last = self._last, LastStep()  # an error leaves none: the next save asks
            with self._cache.session() as (index, hasher):
                order = self._order_of(step.notes.run)
                sharing = LeafSharing(self._objects, index, self._encoder.superseded().keys())
                encoding = self._encoding(index, last, order, step.notes, sharing)
                with (
                    closing(sharing),
                    closing(encoding) if encoding is not None else nullcontext(),
                    BatchTransaction(self._objects, index, hasher, self._synced) as transaction,
                ):
                    writer = PieceWriter(
                        self._objects, index, hasher, transaction, encoding, sharing, self._deltas
                    )
                    work = _Commit(self._objects, hasher, writer, transaction, last, order)
                    manifest = work.run(step)
            work.next.name, work.next.manifest = step.name, manifest
            self._last = self._shown = work.next
            if encoding is not None and encoding.left:
                self._encode_later(step, manifest, encoding, transaction.sealed)
        return work.result(manifest, time.monotonic() - began)

    def _encode_later(
        self,
        step: StepSource,
        manifest: str,
        encoding: Encoding,
        sealed: Sequence[SealedContainer],
    ) -> None:
        slab = next(each.container for each in sealed if each.container.kind == "slab")
        first = encoding.first if encoding.is_first else None
        job = EncodingJob(slab, step.name, manifest, encoding.left, first, step.background)
        self._encoder.add(job)

    def _order_of(self, run: str) -> StepOrder:
        """The order of the handle's own run, or of another one whose snapshot it was given."""
        return self._order if run == self._order.run else StepOrder(self._objects, run)

    def _encoding(
        self,
        index: StoreIndex,
        last: LastStep,
        order: StepOrder,
        notes: Notes,
        sharing: LeafSharing,
    ) -> Encoding | None:
        if self._compress is None:
            return None

        def before() -> Mapping[str, bytes]:
            if last.pages:
                found = last.digests()
            else:
                found = latest_digests(self._objects, order, PACK_BELOW)
            # Nothing is stored against what waits to be removed: it would stay.
            instead = self._encoder.superseded()
            return {name: instead.get(digest, digest) for name, digest in found.items()}

        defer = self._compress == "auto"
        first = FirstStep(notes.run, self._base)
        return Encoding(self._objects, index, self._deltas, before, first, sharing, defer=defer)


class _Commit:
    """One commit of a step, in a session and a transaction."""

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
        self._last = last
        self.next = LastStep()

    def run(self, step: StepSource) -> str:
        """Store what is new and commit; return the manifest's name."""
        alive = containers_there(self._objects, self._last)
        self._stored = self._store_arriving(step, alive)
        self._snapshot = snapshot = step.whole()
        self._data = [*snapshot.files.values(), *(piece.data for piece in snapshot.pieces)]
        rows = self._rows()
        parts = rows.pages()
        kept = [self._kept(number, part, alive) for number, part in enumerate(parts)]
        known = self._known(parts, kept, alive)
        self.next.pages = [
            page or self._page(part, known) for part, page in zip(parts, kept, strict=True)
        ]
        manifest, blob = manifests.encode_manifest(self._manifest())
        self._transaction.add_object(manifest, blob)
        self._transaction.commit(
            self._snapshot.name,
            manifest,
            replace=not self._snapshot.new,
            check_hits=self._check_hits,
            check_name=self._check_name,
        )
        return manifest

    def _store_arriving(self, step: StepSource, alive: set[ContainerId]) -> set[bytes]:
        """Store pieces while others are captured; return their change hashes."""
        stored: set[bytes] = set()
        known: Mapping[bytes, StoredPiece] | None = None
        for some in batches(step.arriving(), lambda piece: piece[1].view.nbytes):
            known = self._last.known(alive) if known is None else known
            new = {key: want for key, want in some if key not in known and key not in stored}
            self._writer.write(new)
            stored.update(new)
        return stored

    def _rows(self) -> PieceTable:
        # Here all tensors are read: nothing else is done for each of them when none has changed.
        taken, whole = self._snapshot.pieces, [None] * len(self._snapshot.files)
        names = [*whole, *(piece.name for piece in taken)]
        dtypes = [*whole, *(piece.dtype for piece in taken)]
        return PieceTable(
            self._hashes(names), names, dtypes, [*whole, *(each.shape for each in taken)]
        )

    def _hashes(self, names: Sequence[str | None]) -> list[bytes]:
        known = self._snapshot.hashes
        if not known:
            return change_hashes(self._hasher, self._data)
        there = [None if name is None else known.get(name) for name in names]
        pairs = zip(self._data, there, strict=True)
        found = iter(change_hashes(self._hasher, [data for data, key in pairs if key is None]))
        return [key or next(found) for key in there]

    def _kept(self, number: int, part: PieceTable, alive: set[ContainerId]) -> PageState | None:
        """The page of the last step, when this one has the same and all of it is there."""
        page = self._last.page(number)
        if page is None or page.rows != part or not page.containers <= alive:
            return None
        status = self._objects.files.status(self._objects.layout.manifest(page.name))
        return page if status is not None and status.size == page.file_bytes else None

    def _known(
        self,
        parts: Sequence[PieceTable],
        kept: Sequence[PageState | None],
        alive: set[ContainerId],
    ) -> dict[bytes, StoredPiece]:
        """Where the pieces of the pages that are not kept are; what is nowhere is written.

        Containers that have become too many are put together, those of kept pages too.
        """
        changed = [number for number, page in enumerate(kept) if page is None]
        known = self._last.known(alive) if changed else {}
        wanted: dict[bytes, Want] = {}
        elsewhere: dict[bytes, StoredPiece] = {}
        named: dict[bytes, tuple[str, str | None]] = {}
        places = []
        for number in changed:
            for at, row in enumerate(parts[number], number * PAGE_ENTRIES):
                if row[0] in known:
                    if known[row[0]].small:
                        places.append((known[row[0]].places, known[row[0]].nbytes))
                elif row[1] is not None and row[1] in self._snapshot.same:
                    elsewhere[row[0]] = self._snapshot.same[row[1]]
                    named[row[0]] = row[1], row[2]
                else:
                    self._want(wanted, row, flat_bytes(self._data[at]), known)
        pages = [page for page in kept if page is not None]
        packs = packs_to_merge(chain(places, *(page.weights.items() for page in pages)))
        again = self._lying_in(packs, parts, known, pages)
        wanted |= self._deleted(elsewhere, named)
        if wanted or again or self._stored:
            self._writer.write(wanted)
            known |= self._writer.finish(again)
        if elsewhere := {key: each for key, each in elsewhere.items() if key not in known}:
            known |= self._writer.find(elsewhere)
        for page in pages:
            if not again.keys().isdisjoint(page.held):
                page.take({**page.held, **{key: known[key] for key in again}})
        return known

    def _deleted(
        self,
        elsewhere: Mapping[bytes, StoredPiece],
        named: Mapping[bytes, tuple[str, str | None]],
    ) -> dict[bytes, Want]:
        """What somebody else has deleted, as far as it is still in memory."""
        found = {}
        for key in self._writer.missing(elsewhere):
            there = self._snapshot.again(named[key][0], key)
            if there is not None and key not in self._stored:
                found[key] = Want(*named[key], *there)
        return found

    def _want(
        self,
        wanted: dict[bytes, Want],
        row: Row,
        view: FlatBytes,
        known: dict[bytes, StoredPiece],
    ) -> None:
        if view.nbytes and row[0] not in self._stored:
            private = row[1] in self._snapshot.private
            wanted[row[0]] = Want(row[1] or _FILE, row[2], view, private)
        elif not view.nbytes:
            known[row[0]] = _EMPTY

    def _lying_in(
        self,
        packs: set[ContainerId],
        parts: Sequence[PieceTable],
        known: Mapping[bytes, StoredPiece],
        pages: Sequence[PageState],
    ) -> Wanted:
        """The small pieces of this step that are read from some of these containers."""
        if not packs:
            return {}
        held = {key: each for page in pages for key, each in page.held.items()} | dict(known)
        rows = (row for part in parts for row in part)
        return {
            row[0]: Want(row[1] or _FILE, row[2], flat_bytes(data))
            for row, data in zip(rows, self._data, strict=True)
            if row[0] in held and held[row[0]].small and not packs.isdisjoint(held[row[0]].places)
            if row[1] not in self._snapshot.same
        }

    def _page(self, part: PieceTable, known: Mapping[bytes, StoredPiece]) -> PageState:
        name, blob = manifests.encode_page(
            [manifests.Piece(known[row[0]].digest, known[row[0]].nbytes, *row[1:]) for row in part]
        )
        self._transaction.add_object(name, blob)
        return PageState(part, known, name, len(blob))

    def _manifest(self) -> Manifest:
        pages = self.next.pages
        return Manifest(
            [FileEntry(path, len(data), 1, "") for path, data in self._snapshot.files.items()],
            [bytes.fromhex(page.name) for page in pages],
            sum(len(page.rows) for page in pages),
            sum(page.nbytes for page in pages),
            self._order.placed(self._snapshot.notes).to_texts(),
        )

    def _check_hits(self) -> None:
        """Look all containers up again, and make those durable that others have written.

        Raises:
            LostHitError: One is not there any more.
            ChangedModelError: A tensor was changed before it was stored.
        """
        self._snapshot.check_unchanged()
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

    def _check_name(self) -> None:
        self._order.check_name()
        # A new step replaces nothing, whatever it is.
        check = check_not_kept if self._snapshot.new else check_replaceable
        check(self._objects, self._snapshot.notes.run, self._snapshot.notes.step)

    def result(self, manifest: str, seconds: float) -> Saved:
        """What it did."""
        return Saved(
            name=self._snapshot.name,
            step=self._snapshot.notes.step,
            manifest=manifest,
            tensors=len(self._snapshot.pieces),
            nbytes=sum(page.nbytes for page in self.next.pages),
            new_tensors=self._writer.pieces,
            new_bytes=self._writer.nbytes,
            stored_bytes=self._writer.stored_bytes + self._transaction.object_bytes,
            seconds=seconds,
        )
