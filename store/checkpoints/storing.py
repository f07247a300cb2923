"""Putting pieces into containers: what is in the store already is found, the rest is written."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Self

from tensor_dedup.store.checkpoints.memory import Known, Places
from tensor_dedup.store.checkpoints.publishing import Batch
from tensor_dedup.store.checkpoints.writing import Fresh, MemoryWriter, Wanted, hash_all
from tensor_dedup.store.containers import Sealed, kind_for
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import Index, Place
from tensor_dedup.store.objects import ContainerId, Objects


class Stocker:
    """Stores pieces for one commit, in a session. Leaving it removes what was not published."""

    def __init__(self, objects: Objects, index: Index, hasher: Hasher, batch: Batch) -> None:
        self._objects, self._index = objects, index
        self._hasher, self._batch = hasher, batch
        self._undo = ExitStack()
        self._writers = {kind: MemoryWriter(objects, hasher, kind) for kind in ("slab", "pack")}
        self.sealed: list[Sealed] = []
        self.pieces = self.nbytes = self.stored_bytes = 0

    def __enter__(self) -> Self:
        for writer in self._writers.values():
            self._undo.callback(writer.abandon)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def store(self, wanted: Wanted, again: Wanted) -> dict[bytes, Known]:
        """Where all these are, by fast hash; `again` are written wherever they are already."""
        hashed = {piece.hashed.digest: piece for piece in hash_all(self._hasher, wanted)}
        places = self._look_up(hashed)
        fresh = [piece for digest, piece in hashed.items() if digest not in places]
        self.pieces += len(fresh)
        self.nbytes += sum(piece.view.nbytes for piece in fresh)
        moved = hash_all(self._hasher, again)
        self._write([*fresh, *moved])
        for each in self.sealed:
            places |= {record.digest: (each.container,) for record in each.table.records}
        hashed |= {piece.hashed.digest: piece for piece in moved}
        return {
            piece.fast: Known(digest, piece.view.nbytes, places[digest])
            for digest, piece in hashed.items()
        }

    def _look_up(self, digests: Mapping[bytes, Fresh]) -> dict[bytes, Places]:
        """The containers in which the store has some of these pieces."""
        held = self._index.find(digests)
        if not self._index.fresh and not self._index.still_so(_containers(held)):
            self._index.refresh()
            held = self._index.find(digests)
        bases = {place.base for places in held.values() for place in places if place.base}
        under = self._index.find(bases)
        return {digest: _nearest(places, under) for digest, places in held.items()}

    def _write(self, fresh: Sequence[Fresh]) -> None:
        for piece in fresh:
            self._writers[kind_for(piece.view.nbytes)].put(piece)
        for writer in self._writers.values():
            each = writer.seal()
            if each is not None:
                target = self._objects.layout.container(each.container.name, each.container.kind)
                self._batch.take(each.handle, target)
                self.sealed.append(each)
                self.stored_bytes += each.file_bytes

    def index(self) -> None:
        """Tell the index of what was written, when it is durable."""
        for each in self.sealed:
            # It may just have come back whole, under a name that had bad places.
            self._objects.set_bad_offsets(each.container.name, ())
            self._index.add(each.container, each.table, each.file_bytes)


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
