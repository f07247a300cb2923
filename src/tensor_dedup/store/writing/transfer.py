"""Copying of a checkpoint from a store or remote to a store. Only missing pieces are copied.

The order is that of an import: containers, index, a second look-up of the pieces found, manifest
with its pages, reference. The name never appears before its pieces, and an interrupted copy leaves
only unused files. The manifest is the same file in both stores.

A piece is copied as it is stored. If it is encoded against other pieces, those are copied first
unless the store has them. Every leaf is compared with its digest: unencoded leaves when they are
read, encoded leaves when they are decoded from the copy.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from tensor_dedup.digest import LEAF_BYTES, leaf_digests
from tensor_dedup.errors import StoreError
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    CorruptFrameError,
    CorruptTensorError,
    LostHitError,
    MissingObjectError,
)
from tensor_dedup.store.format.tables import ENCODED, PLAIN, Record
from tensor_dedup.store.hashing import Hashed, Hasher, settle
from tensor_dedup.store.index import PieceLocation, StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.decoding import base_of, decode_leaf, read_chunk, read_head
from tensor_dedup.store.writing.containers import (
    PACK_BELOW,
    ContainerWriter,
    SealedContainer,
    kind_for,
    record_of,
)
from tensor_dedup.store.writing.run_cache import packs_to_merge
from tensor_dedup.store.writing.transaction import OrderedTransaction

if TYPE_CHECKING:
    from concurrent.futures import Future

_BLOCK_BYTES = 4 * LEAF_BYTES
# So many blocks are being written while the next is read.
_BEHIND = 4
# A container is complete when it is this long: an attempt that is interrupted leaves those that
# are, and the next one finds their pieces.
_CONTAINER_BYTES = 256 << 20
# One that is complete after some time has so many bytes, and such a share of all that was sent: a
# slow transfer leaves some ten such containers behind, however large it is.
_FEWEST_BYTES = 8 << 20
_SMALLEST_SHARE = 1 / 8


class PieceSource(Protocol):
    """The source of a copy: a store (`StoredPieces`) or a remote. Safe from any thread."""

    def own_places(self, digest: bytes) -> list[tuple[ContainerId, Record]]:
        """Return the containers and records of the known copies of a piece. Nothing is read."""

    def records(self, digest: bytes) -> list[Record]:
        """Return the entries for a piece in the tables of containers, one for each copy.

        The list is empty if there is no copy.
        """

    def read_stored(self, container: ContainerId, offset: int, view: memoryview) -> bool:
        """Fill `view` with the bytes at `offset` of a container, neither decoded nor verified.

        Return False if the bytes cannot be read.
        """

    def read_leaf(self, digest: bytes, start: int, view: memoryview) -> bytes:
        """Fill `view` with the leaf at offset `start` of a piece, verified; return its digest."""

    def read_piece_into(self, digest: bytes, start: int, view: memoryview, nbytes: int) -> bytes:
        """Fill `view` with whole leaves of a piece, beginning at offset `start`, and verify them.

        `nbytes` is the size of the whole piece. Return the concatenated digests of the leaves.
        """


class Transfer:
    """A copy of a checkpoint into a store. Use it from one thread, as a context manager.

    Call `missing`, `send` the pieces that it returns, then `publish` the name. Without `publish`,
    only unused files remain. Use the transfer inside `with locks.session(...):`.
    """

    def __init__(
        self,
        objects: Objects,
        index: StoreIndex,
        hasher: Hasher,
        settled: set[ContainerId],
        container_bytes: int = _CONTAINER_BYTES,
        container_s: float = math.inf,
    ) -> None:
        """Begin a copy.

        `settled` has the containers whose names are known to be durable; more are added to it. A
        container is completed when it has `container_bytes` or, unless it is small, when it is
        `container_s` seconds old.
        """
        self._container_bytes, self._container_s = container_bytes, container_s
        self._objects, self._index, self._hasher = objects, index, hasher
        self._settled = settled
        self._undo = ExitStack()
        self._transaction = self._undo.enter_context(OrderedTransaction(objects, index))
        self._writers: dict[tuple[str, bool], _CopyWriter] = {}
        self._wanted: Mapping[bytes, int] = {}
        self._sizes: Mapping[bytes, int] = {}
        self._parts: Collection[bytes] = ()
        self._sent: dict[bytes, bool] = {}  # and whether as what a delta may be against
        self.sent_bytes = 0
        self.sizes_here: Mapping[bytes, int] = {}  # of what `missing` found to be here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def missing(self, wanted: Mapping[bytes, int], *, gather: bool = True) -> list[bytes]:
        """Return the digests of the pieces to send, which are those that the store does not have.

        `wanted` maps the digests of the checkpoint's pieces to their sizes. The result has the same
        order. With `gather`, small pieces that the store has in too many containers are included,
        so that they are stored together.
        """
        self._wanted = {digest: nbytes for digest, nbytes in wanted.items() if nbytes}
        held = self._index.find(self._wanted)
        self.sizes_here = {digest: places[0].nbytes for digest, places in held.items()}
        if not gather:
            return [digest for digest in self._wanted if digest not in held]
        scattered = _scattered({d: held[d] for d, n in self._wanted.items() if d in held}, wanted)
        return [digest for digest in self._wanted if digest not in held or digest in scattered]

    def expect(self, sizes: Mapping[bytes, int], parts: Collection[bytes]) -> None:
        """Announce pieces that are sent only because other pieces are decoded from them.

        `sizes` maps the digests of these pieces to their sizes. `parts` are the digests of pieces
        that consist of a single leaf of another piece.
        """
        self._sizes, self._parts = {**sizes}, {*parts} - self._wanted.keys()

    def complete(self) -> None:
        """Make the pieces sent so far durable and add them to the index.

        No reference is changed.
        """
        for writer in self._writers.values():
            container = writer.finish()
            if container is not None:
                self._transaction.add_container(container)
                # One that had bad places may just have come back whole, under its old name.
                self._objects.set_bad_offsets(container.name, ())
        self._writers.clear()
        self._index.refresh()

    def send(self, source: PieceSource, digests: Collection[bytes]) -> None:
        """Copy the pieces with these digests from `source`.

        Pieces that were sent before are skipped.

        Raises:
            CorruptTensorError, MissingObjectError: The source has no intact copy of a piece.
        """
        for digest in digests:
            if digest not in self._sent:
                size = self._sizes.get(digest) or self._wanted[digest]
                self._send(source, digest, size, is_part=digest in self._parts)

    def publish(
        self,
        name: str,
        manifest: str,
        blobs: Mapping[str, bytes],
        check_name: Callable[[], None],
        *,
        replace: bool = True,
    ) -> None:
        """Make everything durable and commit the checkpoint as `name`.

        `manifest` is the name of its manifest. `blobs` has the frames of the manifest and its pages
        by name, pages first. `check_name` is called just before the name changes, while the lock
        for changing references is held. If `check_name` raises, the name stays as it was.

        Raises:
            LostHitError: A piece that was in the store is gone.
            NameTakenError: The name exists, and `replace` is False.
        """
        for part, blob in blobs.items():
            self._transaction.add_object(part, blob)
        self._transaction.commit(
            name, manifest, replace=replace, check_hits=self._check_hits, check_name=check_name
        )

    def _check_hits(self) -> None:
        held = self._index.find(self._wanted)
        lost = self._wanted.keys() - held.keys()
        if lost:
            what = f"{len(lost)} of {len(self._wanted)} pieces were removed meanwhile"
            raise LostHitError.at(self._objects.layout.root, what, lost=len(lost))
        bases = {base for found in held.values() for place in found for base in place.bases}
        places = [*held.values(), *self._index.find(bases).values()]
        containers = {place.container for found in places for place in found}
        self._transaction.settle(containers - self._settled)
        self._settled |= containers

    def _send(
        self,
        source: PieceSource,
        digest: bytes,
        nbytes: int,
        *,
        as_anchor: bool = False,
        is_part: bool = False,
    ) -> None:
        encoded = [
            place
            for place in source.own_places(digest)
            if place[1].codec != PLAIN and not (as_anchor and place[1].base)
        ]
        for container, record in sorted(encoded, key=lambda place: place[1].stored)[:1]:
            with suppress(CorruptTensorError, MissingObjectError):  # then any other copy will do
                if record.base is not None:
                    self._bring_anchor(source, record.base)
                for part in record.parts.values():
                    self._bring_anchor(source, part, is_part=True)
                if self._writer(ENCODED, parts=is_part).copy_encoded(source, container, record):
                    self._sent[digest] = record.base is None
                    self.sent_bytes += record.stored
                    return
        self._writer(kind_for(nbytes), parts=is_part).copy(source, digest, nbytes)
        self._sent[digest] = True
        self.sent_bytes += nbytes

    def _bring_anchor(self, source: PieceSource, digest: bytes, *, is_part: bool = False) -> None:
        there = any(place.base is None for place in self._index.find({digest}).get(digest, ()))
        if not there and not self._sent.get(digest):
            sizes = [record.nbytes for record in source.records(digest)]
            if not sizes:
                what = f"no container holds {digest.hex()}, which others are stored against"
                raise MissingObjectError.at(self._objects.layout.root, what)
            self._send(source, digest, sizes[0], as_anchor=True, is_part=is_part)

    def _writer(self, kind: str, *, parts: bool = False) -> "_CopyWriter":
        """The writer for pieces of a kind; large parts of others have one of their own.

        A container stays as long as one of its pieces does, and parts serve many steps.
        """
        parts = parts and kind != "pack"
        writer = self._writers.get((kind, parts))
        if writer is not None and self._is_complete(writer):
            container = writer.finish()
            if container is not None:
                self._transaction.add_container(container)
            writer = None
        if writer is None:
            new = _CopyWriter(self._objects, self._hasher, kind)
            writer = self._writers[kind, parts] = self._transaction.own(new)
        return writer

    def _is_complete(self, writer: "_CopyWriter") -> bool:
        nbytes = writer.data_bytes
        if nbytes >= min(
            self._container_bytes, max(_FEWEST_BYTES, self.sent_bytes * _SMALLEST_SHARE)
        ):
            is_old = time.monotonic() - writer.began >= self._container_s
            return is_old or nbytes >= self._container_bytes
        return False


class _CopyWriter(ContainerWriter):
    """A container that is filled with pieces of another store."""

    def __init__(self, objects: Objects, hasher: Hasher, kind: str) -> None:
        super().__init__(objects, hasher, kind)
        self.began = time.monotonic()
        self._writing: deque[Future[None]] = deque()

    @property
    def data_bytes(self) -> int:
        """The bytes that were written."""
        return self._end

    def copy(self, source: PieceSource, digest: bytes, nbytes: int) -> None:
        """Copy a piece as it is, verified block by block as it is read.

        One of a single block is written while the next is read: the error of that may come later.
        """
        before = self._end
        start, handle = self._reserve(nbytes), self._opened()

        def work(at: int) -> bytes:
            view = memoryview(bytearray(min(_BLOCK_BYTES, nbytes - at)))
            leaves = source.read_piece_into(digest, at, view, nbytes)
            if nbytes < PACK_BELOW:
                self._write(bytes(view), start)
            elif nbytes <= _BLOCK_BYTES:
                self._write_behind(view, start)
            else:
                self._objects.files.pwrite(handle, view, start + at)
            return leaves

        blocks = range(0, nbytes, _BLOCK_BYTES)
        # To hand a single one to a thread takes longer than hashing it.
        try:
            found = self._hasher.each(work, blocks) if len(blocks) > 1 else map(work, blocks)
            leaves = b"".join(found)
        except StoreError:
            # What came before it may yet be kept, and it lies there whole.
            self._end = before
            self._objects.files.truncate(handle, before)
            raise
        self._records.append(record_of(start, nbytes, Hashed(digest, leaves)))

    def _write_behind(self, view: memoryview, at: int) -> None:
        files, handle = self._objects.files, self._opened()
        if len(self._writing) >= _BEHIND:
            self._writing.popleft().result()

        def work(view: memoryview) -> None:
            files.pwrite(handle, view, at)
            files.begin_writing(handle, at, view.nbytes)

        self._writing.append(self._hasher.hand(work, view, waits=True))

    def seal(self) -> SealedContainer | None:
        # docstring inherited
        while self._writing:
            self._writing.popleft().result()
        return super().seal()

    def abandon(self) -> None:
        # docstring inherited
        settle(self._writing)
        super().abandon()

    def copy_encoded(self, source: PieceSource, container: ContainerId, record: Record) -> bool:
        """Copy a piece as it is encoded; return False, and copy nothing, where it is damaged.

        Raises:
            CorruptTensorError, MissingObjectError: What it is stored against cannot be read.
        """
        files, start = self._objects.files, self._reserve(0)
        handle, copied = self._opened(), msgspec.structs.replace(record, offset=start)
        intact = False
        try:
            for at in range(0, record.stored, _BLOCK_BYTES):
                view = memoryview(bytearray(min(_BLOCK_BYTES, record.stored - at)))
                if not source.read_stored(container, record.offset + at, view):
                    return False
                files.pwrite(handle, view, start + at)
            intact = self._is_right(source, copied)
        finally:
            if not intact:
                files.truncate(handle, start)
        if intact:
            self._records.append(copied)
            self._end = start + record.stored
        return intact

    def _is_right(self, source: PieceSource, record: Record) -> bool:
        """Whether a copy is what its digest says, leaf by leaf."""
        files, handle = self._objects.files, self._opened()
        leaves = record.leaf_list
        try:
            chunks = read_head(files, handle, record)
        except CorruptFrameError:
            return False

        def work(number: int) -> bool:
            at = number * LEAF_BYTES
            stop = min(at + LEAF_BYTES, record.nbytes)
            base = base_of(record, source.read_leaf)
            leaf = memoryview(bytearray(stop - at))
            try:
                chunk = read_chunk(files, handle, record, chunks[number])
                known = decode_leaf(record.codec, chunk, at, leaf, base)
            except CorruptFrameError:
                return False
            return [known or leaf_digests(leaf)[0]] == [leaves[number]]

        return all(self._hasher.each(work, range(len(chunks))))


def _scattered(
    held: Mapping[bytes, Sequence[PieceLocation]], sizes: Mapping[bytes, int]
) -> set[bytes]:
    """Return the small pieces that lie in containers of which there are too many."""
    weights: Counter[ContainerId] = Counter()
    small = {d: [p.container for p in found] for d, found in held.items() if sizes[d] < PACK_BELOW}
    for digest, containers in small.items():
        for container in containers:
            weights[container] += sizes[digest]
    # Of several, the one that holds the most of this step: what was put together stays so.
    chosen = {d: max(found, key=lambda c: (weights[c], c)) for d, found in small.items()}
    packs = packs_to_merge(((container,), sizes[d]) for d, container in chosen.items())
    return {digest for digest, container in chosen.items() if container in packs}
