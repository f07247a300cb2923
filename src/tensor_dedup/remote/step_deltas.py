"""Direct differences: what changed in a step since the step before, beside the step on a remote.

A step is stored as differences from an anchor, which grow with each step after the anchor. A store
that has the step before needs less: what changed since then.

    steps/ab/MANIFEST         the table of what changed in the checkpoint MANIFEST
    steps/ab/MANIFEST.mixed   the data, as in a container of this kind

The records of the table say by digest which tensors they are differences from. So they are of use
to every store that has these tensors, whatever its steps are called. Nothing refers to the two
objects, and either may be deleted at any time: a pull then fetches the tensors from containers. The
table is written after the data, and both before the name of the step.
"""

import logging
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from tensor_dedup.digest import LEAF_BYTES, digest, leaf_digests
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.errors import remote_damage
from tensor_dedup.remote.pieces import Places, RemotePieces
from tensor_dedup.remote.results import TransferListener
from tensor_dedup.store.codecs.interface import FAMILIES, WORTH
from tensor_dedup.store.codecs.records import chunks, entry, head_bytes
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import CorruptFrameError
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.manifests import Piece, named_tensors
from tensor_dedup.store.format.tables import ALIGNMENT, MIXED, PLAIN, Record, Table
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.decoding import base_of, decode_leaf, leaves_of
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.writing.containers import PACK_BELOW
from tensor_dedup.store.writing.deltas import Anchor, encoded_leaf, plan_of
from tensor_dedup.store.writing.encoder import element_width
from tensor_dedup.store.writing.transfer import Transfer

_log = logging.getLogger(__name__)
# They are written where they take at most this share of what is fetched without them.
_WORTH_WRITING: Final = 0.8
# All of it is in memory at once. What is larger has mostly changed.
_MOST_BYTES: Final = 1 << 30
_FAMILY: Final = "sparse"


@dataclass(frozen=True, slots=True)
class StepDelta:
    """What changed in a step since another one: the frame of a table, and the data."""

    blob: bytes
    data: list[bytes]

    @property
    def nbytes(self) -> int:
        """The size of both in bytes."""
        return len(self.blob) + sum(map(len, self.data))

    def put(self, bucket: Bucket, manifest: str) -> None:
        """Write the differences of the step `manifest` to a remote."""
        bucket.put(layout.step_data_key(manifest), [memoryview(each) for each in self.data])
        bucket.put(layout.step_key(manifest), [memoryview(self.blob)])


def delete(bucket: Bucket, manifest: str) -> None:
    """Delete the direct differences of the step `manifest`, if there are any."""
    bucket.delete(layout.step_key(manifest))
    bucket.delete(layout.step_data_key(manifest))


def step_delta(
    objects: Objects, index: StoreIndex, hasher: Hasher, old: str, new: str
) -> StepDelta | None:
    """Return what changed from the step with the manifest `old` to that with the manifest `new`.

    Call it in a session of the store, which has both steps. The result is None if it would be
    hardly smaller than what has to be fetched without it, or if `old` is the anchor of all that
    changed. What is returned was decoded and compared. A tensor is left out if the store has lost
    it in either step.

    Raises:
        StoreError: The store has no intact copy of a tensor.
    """
    before, after = _tensors(objects, old), _tensors(objects, new)
    known = {piece.digest for piece in before.values()}
    changed = {
        name: piece
        for name, piece in after.items()
        if piece.nbytes and piece.digest not in known and name in before
    }
    wanted = {piece.digest for name in changed for piece in (before[name], after[name])}
    builder = _Builder(hasher)
    with closing(StoredPieces(objects, index, wanted)) as pieces:
        lost = {each for each in wanted if not pieces.records(each)}
        changed = {
            name: piece
            for name, piece in changed.items()
            if lost.isdisjoint((piece.digest, before[name].digest))
        }
        stored = {each.digest: _stored(pieces, each) for each in changed.values()}
        anchors = [
            before[name]
            for name, piece in changed.items()
            if stored[piece.digest].base == before[name].digest
        ]
        if len(anchors) == len(changed):
            return None  # the step is stored as just these differences
        # A store that followed may have a new anchor as differences itself, and must then fetch it.
        fetched = [*stored.values(), *(_stored(pieces, each) for each in anchors)]
        limit = min(_MOST_BYTES, _WORTH_WRITING * sum(each.stored for each in fetched))
        for name, piece in changed.items():
            builder.add(pieces, piece, before[name])
            if builder.nbytes > limit:
                return None
    return builder.finish()


def _tensors(objects: Objects, manifest: str) -> dict[str, Piece]:
    content = objects.manifest(manifest)
    return dict(named_tensors(content, objects.pieces(manifest, content)))


def _stored(pieces: StoredPieces, piece: Piece) -> Record:
    """The record of a piece where it takes least."""
    return min(pieces.records(piece.digest), key=lambda record: record.stored)


class _Builder:
    """Collects the records of a table, and their data."""

    def __init__(self, hasher: Hasher) -> None:
        self._hasher = hasher
        self._records: list[Record] = []
        self._data: list[bytes] = []
        self.nbytes = 0

    def add(self, pieces: StoredPieces, new: Piece, old: Piece) -> None:
        """Add what changed from `old` to `new`, unless that is hardly less than all of it."""
        leaves = pieces.records(new.digest)[0].leaves
        found = None if new.nbytes != old.nbytes else _encoded(self._hasher, pieces, new, old)
        if found is not None:
            codec, blob = found
            self._put(new, blob, codec, old.digest, leaves)
        elif new.nbytes < PACK_BELOW:
            blob = bytes(pieces.read_piece(new.digest, 0, new.nbytes, new.nbytes))
            self._put(new, blob, PLAIN, None, leaves)

    def _put(self, new: Piece, blob: bytes, codec: str, base: bytes | None, leaves: bytes) -> None:
        gap = -self.nbytes % ALIGNMENT[MIXED]
        self._data += [bytes(gap), blob]
        at = self.nbytes + gap
        self._records.append(Record(new.digest, at, len(blob), new.nbytes, codec, base, leaves))
        self.nbytes = at + len(blob)

    def finish(self) -> StepDelta | None:
        """Return all of it, or None if nothing was added."""
        if not self._records:
            return None
        table = Table(MIXED, self.nbytes, self._records, None)
        return StepDelta(tables.encode(table).blob, self._data)


def _encoded(
    hasher: Hasher, pieces: StoredPieces, new: Piece, old: Piece
) -> tuple[str, bytes] | None:
    """A codec, and what it makes of the difference of two pieces of one size; None: too little."""
    from tensor_dedup.store.codecs.choice import CODECS, CodecChoice  # and with it numpy

    width = element_width(new.dtype)
    if width not in FAMILIES[_FAMILY].widths:
        return None
    choice = CodecChoice(CODECS[f"{_FAMILY}{width}"], "entropy", 0.0)
    under = Anchor(old.digest, old.nbytes, pieces.records(old.digest)[0].leaves, pieces)
    leaves = pieces.records(new.digest)[0].leaves
    plan = plan_of(choice, under, new.nbytes, leaves)
    assert plan is not None

    def work(start: int) -> bytes | None:
        if plan.has_leaf(start):
            return b""
        stop = min(start + LEAF_BYTES, new.nbytes)
        data = memoryview(pieces.read_piece(new.digest, start, stop, new.nbytes))
        return encoded_leaf(data, start, plan)

    found = [*hasher.each(work, range(0, new.nbytes, LEAF_BYTES))]
    whole = [chunk for chunk in found if chunk is not None]
    blob = b"".join([*map(entry, whole), *whole])
    if len(whole) < len(found) or len(blob) > new.nbytes * WORTH:
        return None
    return plan.codec, blob


def fetch(
    bucket: Bucket,
    manifest: str,
    missing: Mapping[bytes, int],
    names: Mapping[bytes, str],
    here: tuple[Objects, StoreIndex],
    transfer: Transfer,
    progress: TransferListener,
) -> Places:
    """Fetch those `missing` pieces whose direct differences the remote has; return what came.

    `missing` maps the digests of pieces of the step `manifest` to their sizes, and `names` has
    their names for messages. The pieces from which they differ must be in the store `here`. What
    goes wrong is logged: pieces that did not come are still missing.
    """
    arrived = Places()
    objects, index = here
    try:
        places = _places(bucket, manifest, missing, index)
        if not places:
            return arrived
        bases = {record.base for _, record in places.values() if record.base is not None}
        progress.start(sum(record.stored for _, record in places.values()))
        with (
            closing(StoredPieces(objects, index, bases)) as held,
            _DeltaPieces(bucket, places, names, held) as source,
        ):
            for digest_ in source.arriving():
                transfer.send(source, [digest_])
                arrived[digest_] = places[digest_]
                progress.advance(places[digest_][1].stored)
    except StoreError as error:
        what = "%s: what changed since the step before is not used: %s"
        _log.warning(what, bucket.at(layout.step_key(manifest)), str(error))
    return arrived


def _places(
    bucket: Bucket, manifest: str, missing: Mapping[bytes, int], index: StoreIndex
) -> Places:
    """Where the differences are that the store can use."""
    key = layout.step_key(manifest)
    found = bucket.get(key, layout.FRAME_BYTES)
    if found is None:
        return Places()
    with remote_damage(bucket.at(key)) as path:
        table = tables.decode(found[0], digest(found[0]), MIXED, path)
    records = [record for record in table.records if record.digest in missing]
    there = index.find({record.base for record in records if record.base is not None})
    container = ContainerId(manifest, MIXED)
    return {
        record.digest: (container, record)
        for record in records
        if record.nbytes == missing[record.digest]
        and (record.base is None or there.get(record.base))
    }


class _DeltaPieces(RemotePieces):
    """Direct differences as a source of pieces.

    One whose base the store holds by itself is taken over as it is. Others are decoded, and become
    pieces by themselves: nothing is stored against a piece that is stored against others.
    """

    def __init__(
        self, bucket: Bucket, places: Places, names: Mapping[bytes, str], bases: StoredPieces
    ) -> None:
        self._held: tuple[bytes, bytes] = b"", b""
        self._reading = threading.Lock()
        self._alone = {
            record.base
            for _, record in places.values()
            if record.base is not None and any(r.base is None for r in bases.records(record.base))
        }
        super().__init__(
            *(bucket, places, names, bases),
            key_of=lambda container: layout.step_data_key(container.name),
        )

    def own_places(self, digest: bytes) -> list[tuple[ContainerId, Record]]:
        # docstring inherited
        return [place for place in super().own_places(digest) if place[1].base in self._alone]

    def read_piece_into(self, digest: bytes, start: int, view: memoryview, nbytes: int) -> bytes:
        # docstring inherited
        container, record = self._places[digest]
        if record.codec == PLAIN:
            return super().read_piece_into(digest, start, view, nbytes)
        stored, base = self._stored(container, record), base_of(record, self.read_leaf)
        try:
            places = chunks(stored[: head_bytes(nbytes)], record.stored)
            for at in range(0, view.nbytes, LEAF_BYTES):
                leaf, chunk = view[at : at + LEAF_BYTES], places[(start + at) // LEAF_BYTES]
                blob = memoryview(stored)[chunk.offset : chunk.offset + chunk.size]
                decode_leaf(record.codec, blob, start + at, leaf, base)
        except CorruptFrameError:
            raise self._corrupt(container, record) from None
        leaves = leaves_of(record, start, view.nbytes)
        if b"".join(leaf_digests(view)) != leaves:
            raise self._corrupt(container, record)
        return leaves

    def _stored(self, container: ContainerId, record: Record) -> bytes:
        """What a piece is stored as, kept while its blocks are read."""
        with self._reading:
            if self._held[0] != record.digest:
                view = memoryview(bytearray(record.stored))
                self.read_stored(container, record.offset, view)
                self._held = record.digest, bytes(view)
            return self._held[1]
