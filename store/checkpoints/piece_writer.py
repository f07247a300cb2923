"""Putting pieces into containers: what is in the store already is found, the rest is written."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Self, TypeAlias

from tensor_dedup.store.checkpoints.deltas import DeltaWriter, Encoding
from tensor_dedup.store.checkpoints.memory_writer import Fresh, MemoryWriter, Wanted, hash_all
from tensor_dedup.store.checkpoints.publish_batch import PublishBatch
from tensor_dedup.store.checkpoints.run_cache import Places, StoredPiece
from tensor_dedup.store.errors import LostHitError
from tensor_dedup.store.index import PieceLocation, StoreIndex
from tensor_dedup.store.objects import ContainerId, Objects
from tensor_dedup.store.writing.containers import SealedContainer, kind_for
from tensor_dedup.store.writing.hashing import Hasher

_Held: TypeAlias = Mapping[bytes, Sequence[PieceLocation]]


class PieceWriter:
    """Stores pieces for one commit, in a session. Leaving it removes what was not published."""

    def __init__(
        self,
        objects: Objects,
        index: StoreIndex,
        hasher: Hasher,
        batch: PublishBatch,
        encoding: Encoding | None,
    ) -> None:
        self._objects, self._index = objects, index
        self._hasher, self._batch, self._encoding = hasher, batch, encoding
        self._undo = ExitStack()
        self._writers = {kind: MemoryWriter(objects, hasher, kind) for kind in ("slab", "pack")}
        self._encoder = DeltaWriter(objects, hasher)
        self.sealed: list[SealedContainer] = []
        self.pieces = self.nbytes = self.stored_bytes = 0

    def __enter__(self) -> Self:
        for writer in (*self._writers.values(), self._encoder):
            self._undo.callback(writer.abandon)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def store(self, wanted: Wanted, again: Wanted) -> dict[bytes, StoredPiece]:
        """Where all these are, by fast hash; `again` are written wherever they are already."""
        hashed = {piece.hashed.digest: piece for piece in hash_all(self._hasher, wanted)}
        places = self._look_up(hashed)
        fresh = [piece for digest, piece in hashed.items() if digest not in places]
        self.pieces += len(fresh)
        self.nbytes += sum(piece.view.nbytes for piece in fresh)
        moved = hash_all(self._hasher, again)
        left = [*fresh, *moved]
        if self._encoding is not None:
            left = self._encoding.encode(self._encoder, left)
        self._write(left)
        places |= self._places()
        hashed |= {piece.hashed.digest: piece for piece in moved}
        return {
            piece.fast: StoredPiece(digest, piece.view.nbytes, places[digest])
            for digest, piece in hashed.items()
        }

    def find(self, elsewhere: Mapping[bytes, StoredPiece]) -> dict[bytes, StoredPiece]:
        """Where pieces are whose bytes are not here. LostHitError: they are nowhere any more."""
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
        held, under = self._find(digests)
        containers = _containers(held) | _containers(under)
        if not self._index.fresh and not self._index.still_so(containers):
            self._index.refresh()
            held, under = self._find(digests)
        found = {digest: _nearest(places, under) for digest, places in held.items()}
        return {digest: places for digest, places in found.items() if places}

    def _find(self, digests: Collection[bytes]) -> tuple[_Held, _Held]:
        """The places of these pieces, and of what some of them are stored against."""
        held = self._index.find(digests)
        bases = {place.base for places in held.values() for place in places if place.base}
        return held, self._index.find(bases)

    def _write(self, fresh: Sequence[Fresh]) -> None:
        for piece in fresh:
            self._writers[kind_for(piece.view.nbytes)].put(piece)
        for writer in (*self._writers.values(), self._encoder):
            each = writer.seal()
            if each is not None:
                target = self._objects.layout.container(each.container.name, each.container.kind)
                self._batch.take(each.handle, target)
                self.sealed.append(each)
                self.stored_bytes += each.file_bytes

    def _places(self) -> dict[bytes, Places]:
        """Where what was written lies."""
        records = [(each.container, r) for each in self.sealed for r in each.table.records]
        under = self._index.find({record.base for _, record in records if record.base})
        found = {}
        for container, record in records:
            place = PieceLocation(container, record.offset, record.nbytes, record.base)
            places = found[record.digest] = _nearest([place], under)
            if not places:
                what = f"what {record.digest.hex()} is stored against was removed meanwhile"
                raise LostHitError.at(self._objects.layout.root, what)
        return found

    def index(self) -> None:
        """Tell the index of what was written, when it is durable."""
        for each in self.sealed:
            # It may just have come back whole, under a name that had bad places.
            self._objects.set_bad_offsets(each.container.name, ())
            self._index.add(each.container, each.table, each.file_bytes)


def _containers(held: _Held) -> set[ContainerId]:
    return {place.container for places in held.values() for place in places}


def _nearest(places: Sequence[PieceLocation], under: _Held) -> Places:
    """The containers that a piece is read from: one that needs no other, where there is one.

    None where what it is stored against is nowhere.
    """
    for place in places:
        if place.base is None:
            return (place.container,)
    for place in places:
        for anchor in under.get(place.base or b"", ()):
            if anchor.base is None:
                return (place.container, anchor.container)
    return ()
