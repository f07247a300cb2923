"""Writes the pieces of a step: looks each up in the store, encodes what is new, and writes it.

A piece is looked up by its digest. Names and addresses of tensors do not matter.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import LostHitError
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import PieceLocation, StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.writing.containers import (
    ContainerWriter,
    Fresh,
    Wanted,
    hash_pieces,
    kind_for,
)
from tensor_dedup.store.writing.deltas import EncodedWriter, PartsWriter
from tensor_dedup.store.writing.run_cache import Places, StoredPiece, nearest
from tensor_dedup.store.writing.transaction import BatchTransaction
from tensor_dedup.training.encoding.in_save import StepEncoding

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
        encoding: StepEncoding,
    ) -> None:
        self._objects, self._index = objects, index
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
        for some in batches(hash_pieces(self._hasher, wanted), lambda piece: piece.nbytes):
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
        for piece in self._encoding.encode(self._encoder, pieces):
            self._writers[kind_for(piece.view.nbytes)].put(piece)

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


def batches(pieces: Iterable[_T], size: Callable[[_T], int]) -> Iterator[list[_T]]:
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
