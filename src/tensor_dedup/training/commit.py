"""Commit a step: write new pieces to containers, and only refer to pieces that are stored.

A snapshot has the pieces of a step, in memory that is not written to until the commit has returned.
A commit may run in any thread, and may store large pieces before the last one is captured.

The change hash, a fast hash of the bytes of a piece, says whether the step saved last has a piece
with the same bytes. If not, the piece is looked up in the store by its digest. Names and addresses
of tensors do not matter. `tensor_dedup.store.writing.transaction` explains the order in which files
become durable.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePath
from typing import Protocol, Self, TypeAlias, TypeVar

from tensor_dedup.digest import digest
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import LostHitError, NoSpaceError, NotTextError, os_errors
from tensor_dedup.store.format import manifests
from tensor_dedup.store.format.manifests import (
    METADATA,
    PAGE_ENTRIES,
    RESERVED,
    FileEntry,
    Manifest,
)
from tensor_dedup.store.format.names import check_path
from tensor_dedup.store.gathered import FlatBytes, flat_bytes
from tensor_dedup.store.hashing import Hasher, change_hashes
from tensor_dedup.store.index import PieceLocation, StoreIndex
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
    ContainerWriter,
    Fresh,
    SealedContainer,
    Want,
    Wanted,
    hash_pieces,
    kind_for,
)
from tensor_dedup.store.writing.deltas import EncodedWriter, LeafSharing, PartsWriter
from tensor_dedup.store.writing.run_cache import (
    LastStep,
    PageState,
    PieceTable,
    Places,
    Rewritten,
    Row,
    RunCache,
    StoredPiece,
    nearest,
    packs_to_merge,
)
from tensor_dedup.store.writing.transaction import BatchTransaction, SyncedFolders
from tensor_dedup.training.encoding.background import BackgroundEncoder, EncodingJob
from tensor_dedup.training.encoding.decisions import Compress, Deltas, Encoding, checked_compress
from tensor_dedup.training.encoding.first_base import FirstStep
from tensor_dedup.training.errors import NamedTwiceError, NestedSaveError
from tensor_dedup.training.in_flight import BaseStep, containers_there
from tensor_dedup.training.state import NamedValue

_EMPTY = StoredPiece(bytes.fromhex(digest(b"")), 0, ())
_FILE = "(small file)"
_BATCH = 16 << 20
_Held: TypeAlias = Mapping[bytes, Sequence[PieceLocation]]
_T = TypeVar("_T")


class PieceWriter:
    """Writes the pieces of one step, its tensors and small files, to the store."""

    def __init__(
        self,
        objects: Objects,
        index: StoreIndex,
        hasher: Hasher,
        transaction: BatchTransaction,
        encoding: Encoding | None,
        sharing: LeafSharing,
        deltas: Deltas,
    ) -> None:
        self._objects, self._index = objects, index
        self._sharing, self._deltas = sharing, deltas
        self._hasher, self._transaction, self._encoding = hasher, transaction, encoding
        self._writers = {
            kind: transaction.own(ContainerWriter(objects, hasher, kind))
            for kind in ("slab", "pack")
        }
        parts = PartsWriter(
            transaction.own(ContainerWriter(objects, hasher, "slab")),
            self._writers["pack"],
            transaction.own(EncodedWriter(objects, hasher)),
        )
        self._encoder = transaction.own(EncodedWriter(objects, hasher, parts))
        self.pieces = self.nbytes = self.stored_bytes = 0
        # By digest: what was given to `write`, and where the store has it already.
        self._hashed: dict[bytes, Fresh] = {}
        self._known: dict[bytes, Places] = {}

    def write(self, wanted: Wanted) -> None:
        """Store the pieces in `wanted`, except for those that the store has already.

        `finish` returns the places of all these pieces.
        """
        # What was hashed is written while more is hashed.
        for some in _batches(hash_pieces(self._hasher, wanted), lambda piece: piece.nbytes):
            found = self._look_up({piece.hashed.digest for piece in some})
            fresh = [piece for piece in some if piece.hashed.digest not in found]
            self.pieces += len(fresh)
            self.nbytes += sum(piece.view.nbytes for piece in fresh)
            self._write(fresh)
            self._hashed |= {piece.hashed.digest: piece for piece in some}
            self._known |= found

    def finish(self, again: Wanted) -> dict[bytes, StoredPiece]:
        """Store the pieces in `again`, even if the store has them already, and end the writing.

        The result has all pieces given to `write` and `finish`, and where they are stored. Its keys
        are change hashes (fast hashes of the content). Call this method only once.
        """
        moved = list(hash_pieces(self._hasher, again))
        self._write(moved)
        self.stored_bytes += self._transaction.seal()
        places = self._known | self._places()
        hashed = self._hashed | {piece.hashed.digest: piece for piece in moved}
        return {
            piece.change_hash: StoredPiece(digest, piece.view.nbytes, places[digest])
            for digest, piece in hashed.items()
        }

    def _write(self, pieces: list[Fresh]) -> None:
        if self._encoding is not None:
            pieces = self._encoding.encode(self._encoder, pieces)
        else:
            pieces = self._write_by_leaf(pieces)
        for piece in pieces:
            self._writers[kind_for(piece.view.nbytes)].put(piece)

    def _write_by_leaf(self, pieces: list[Fresh]) -> list[Fresh]:
        """Store the pieces of which most is stored already; return the others."""
        wanted = ((piece.hashed, piece.nbytes) for piece in pieces)
        alike = self._sharing.find(wanted, parts=True)
        others = []
        for piece in pieces:
            anchor = alike.get(piece.hashed.digest)
            plan = (
                None if anchor is None else self._deltas.plan_by_leaf(piece, anchor, self._sharing)
            )
            if plan is None:
                others.append(piece)
            else:
                stored = self._encoder.put_by_leaf(piece, plan)
                self._deltas.stored(piece, plan, stored)
        return others

    def missing(self, elsewhere: Mapping[bytes, StoredPiece]) -> list[bytes]:
        """Return the change hashes of the pieces in `elsewhere` that the store no longer has.

        `elsewhere` maps change hashes (fast hashes of the content) to pieces that an earlier step
        has stored.
        """
        places = self._look_up({known.digest for known in elsewhere.values()}) if elsewhere else {}
        return [key for key, known in elsewhere.items() if known.digest not in places]

    def find(self, elsewhere: Mapping[bytes, StoredPiece]) -> dict[bytes, StoredPiece]:
        """Return the pieces in `elsewhere` with the places that they have in the store now.

        `elsewhere` maps change hashes (fast hashes of the content) to pieces that an earlier step
        has stored, with the places that they had then.

        Raises:
            LostHitError: Some of the pieces are no longer in the store.
        """
        places = self._look_up({known.digest for known in elsewhere.values()})
        gone = [key for key, known in elsewhere.items() if known.digest not in places]
        if gone:
            what = f"{len(gone)} tensors that did not change were removed meanwhile"
            raise LostHitError.at(self._objects.layout.root, what, tensors=len(gone))
        return {
            key: known._replace(places=places[known.digest]) for key, known in elsewhere.items()
        }

    def _look_up(self, digests: Collection[bytes]) -> dict[bytes, Places]:
        """The containers in which the store has some of these pieces."""
        held, under = self._there(digests)
        found = {digest: nearest(places, under) for digest, places in held.items()}
        return {digest: places for digest, places in found.items() if places}

    def _there(self, digests: Collection[bytes]) -> tuple[_Held, _Held]:
        """What `_find` returns, in containers that are there.

        The index is kept open between saves, and may have containers that were removed since: the
        background encoding removes some without it.
        """
        held, under = self._find(digests)
        containers = _containers(held) | _containers(under)
        if not self._index.fresh and not self._index.still_so(containers):
            self._index.refresh()
            held, under = self._find(digests)
        return held, under

    def _find(self, digests: Collection[bytes]) -> tuple[_Held, _Held]:
        """The places of these pieces, and of what some of them are stored against."""
        held = self._index.find(digests)
        bases = {base for places in held.values() for place in places for base in place.bases}
        return held, self._index.find(bases)

    def _places(self) -> dict[bytes, Places]:
        """Where what was written lies."""
        sealed = self._transaction.sealed
        records = [(each.container, r) for each in sealed for r in each.table.records]
        bases, _ = self._there({base for _, record in records for base in record.bases})
        under = dict(bases)
        placed = [
            PieceLocation(each, r.offset, r.nbytes, r.base, parts=tuple(r.parts.values()))
            for each, r in records
        ]
        for (_, record), place in zip(records, placed, strict=True):
            if record.base is None:
                under[record.digest] = [place]  # of what others are against, the newest is nearest
        found = {}
        for (_, record), place in zip(records, placed, strict=True):
            places = found[record.digest] = nearest([place], under)
            if not places:
                what = f"what {record.digest.hex()} is stored against was removed meanwhile"
                raise LostHitError.at(self._objects.layout.root, what)
        return found


def _batches(pieces: Iterable[_T], size: Callable[[_T], int]) -> Iterator[list[_T]]:
    """The pieces in order, so many together that looking them up takes no time beside the rest."""
    batch: list[_T] = []
    nbytes = 0
    for piece in pieces:
        batch.append(piece)
        nbytes += size(piece)
        if nbytes >= _BATCH:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _containers(held: _Held) -> set[ContainerId]:
    return {place.container for places in held.values() for place in places}


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class StepSource(Protocol):
    """A step that is to be committed. Some of its tensors may still have to be copied."""

    @property
    def notes(self) -> Notes:
        """The notes of the step: its run, number, adapter, metrics and so on."""
        ...

    @property
    def name(self) -> str:
        """The name that the step will have in the store."""
        ...

    @property
    def new(self) -> bool:
        """Whether the commit must fail if a step of this name exists."""
        ...

    @property
    def background(self) -> bool:
        """Whether the training continues during the commit."""
        ...

    def arriving(self) -> Iterator[tuple[bytes, Want]]:
        """Yield large pieces, each with its change hash, as soon as they are copied from the model.

        A change hash is a fast hash of the content. Nothing else writes to the memory of these
        pieces. Each call begins with the first piece again.

        Raises:
            ChangedModelError: A tensor was changed before it was copied.
        """
        ...

    def whole(self) -> "StepSnapshot":
        """Wait until the step is captured completely, and return it.

        Raises:
            ChangedModelError: A tensor was changed before it was copied.
            NamedTwiceError, EscapingPathError, NotTextError: A name is invalid.
        """
        ...

    def committed(self) -> None:
        """Release resources that were needed until the step was committed."""
        ...


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """A completely captured step that is to be committed.

    * `pieces` are its tensors, and `files` its small files by their paths.
    * `hashes` maps names of pieces to change hashes (fast hashes of the content), as far as these
      are known.
    * `same` maps names of pieces to equal large pieces of an earlier step. Such a piece has a
      change hash in `hashes`, but no bytes in `pieces`.
    * `private` has the names of pieces to whose memory nothing else writes.
    * `new` is True if the commit must not replace a step.
    * `background` is True if the training continues during the commit.
    * `again(name, change_hash)` returns the bytes of a piece in `same`, and whether nothing else
      writes to their memory. If the bytes are no longer in memory, it returns None.
    * `check_unchanged()` is called when all bytes have been read. It raises ChangedModelError if
      some bytes were written to.
    * `committed()` is called when the step is committed.
    """

    notes: Notes
    pieces: Sequence[NamedValue]
    files: Mapping[str, bytes]
    hashes: Mapping[str, bytes] = field(default_factory=dict)
    same: Mapping[str, StoredPiece] = field(default_factory=dict)
    private: Collection[str] = ()
    new: bool = False
    background: bool = False
    again: Callable[[str, bytes], tuple[FlatBytes, bool] | None] = lambda _name, _key: None
    check_unchanged: Callable[[], None] = lambda: None
    committed: Callable[[], None] = lambda: None

    def arriving(self) -> Iterator[tuple[bytes, Want]]:
        """Yield nothing, because the step is captured completely."""
        return iter(())

    def whole(self) -> Self:
        """Check the names in the step, and return the step itself.

        Raises:
            NamedTwiceError: Two parts have the same name, or a part has a name that an export
                needs.
            EscapingPathError: The path of a small file leads out of the folder of an export.
            NotTextError: A name is not valid Unicode.
        """
        self._check_names()
        return self

    def _check_names(self) -> None:
        self._check_texts()
        names = {piece.name for piece in self.pieces}
        if len(names) != len(self.pieces):
            what = f"{len(self.pieces)} tensors have {len(names)} names"
            raise NamedTwiceError.at(self.name, what)
        if METADATA in names:
            what = (
                f"the tensor {METADATA!r} has the name of what a header of safetensors begins with"
            )
            raise NamedTwiceError.at(self.name, what, tensor=METADATA)
        paths = [check_path(path, PurePath(self.name)) for path in self.files]
        within = {parent for path in paths for parent in path.parents}
        taken = [path for path in paths if str(path) in RESERVED or path in within]
        if taken:
            what = f"{taken[0]} is where other files are exported to"
            raise NamedTwiceError.at(self.name, what, file=str(taken[0]))

    def _check_texts(self) -> None:
        texts = [*(piece.name for piece in self.pieces), *self.files, self.notes.part]
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            wrong = next(text for text in texts if not _is_unicode(text))
            what = f"the name {wrong!a} is not Unicode"
            raise NotTextError.at(self.name, what, text=wrong) from None

    def as_new(self) -> Self:
        """Return a copy of the snapshot that must not replace a step.

        If a step of this name exists, committing the copy raises NameTakenError.
        """
        return replace(self, new=True)

    @property
    def name(self) -> str:
        """The name that the step will have in the store."""
        return step_name(self.notes.run, self.notes.step)


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


class SaveLock:
    """A lock for saves. `check` detects that the calling thread holds the lock already.

    This happens if a signal handler or a provider starts a save in the middle of another save.
    """

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), 0

    def check(self, root: Path) -> None:
        """Check that the calling thread does not hold the lock.

        Call this before `with lock:`. `root` is the folder of the store, for the message.

        Raises:
            NestedSaveError: The calling thread holds the lock.
        """
        if self._owner == threading.get_ident():
            raise NestedSaveError.at(root, "a save was begun in the middle of another one")

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = 0
        self._lock.release()


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
        self._compress, self._base = checked_compress(compress), base
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
        has ended. Until then, if there are two tiers, the step stays on the fast tier even if it
        was copied to the second tier. An explicit deletion still removes it.
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
        for some in _batches(step.arriving(), lambda piece: piece[1].view.nbytes):
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
