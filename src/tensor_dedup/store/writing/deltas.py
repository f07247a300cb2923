"""Writing of delta containers, for tensors that are encoded or stored against an anchor.

An anchor is a stored piece that is not itself encoded against another piece. A plan says how to
store a tensor: by a codec, against an anchor, or both. Leaves (2 MiB) that the anchor has at the
same offset are left out. Other leaves are encoded, stored unencoded, or become separate pieces.
Equal leaves are found by their digests, without reading the tensor or the anchor.

`tensor_dedup.store.writing.encoder` and `tensor_dedup.training.encoding.decisions` make plans
with codecs. `LeafSharing` finds anchors that share leaves.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tensor_dedup.digest import LEAF_BYTES, leaf_digests
from tensor_dedup.store.codecs.interface import LEAVES, WORTH
from tensor_dedup.store.codecs.leaves import AS_IT_IS, wrap
from tensor_dedup.store.codecs.parts import codec_of, leaf_bytes
from tensor_dedup.store.codecs.records import entry, head_bytes
from tensor_dedup.store.errors import (
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
)
from tensor_dedup.store.files import Handle
from tensor_dedup.store.format.tables import DIGEST_BYTES, ENCODED, Record, part_of
from tensor_dedup.store.hashing import Hashed, Hasher, change_hash_of_leaf, changed
from tensor_dedup.store.index import PieceAlike, StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.decoding import are_leaves
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.writing.containers import (
    ContainerWriter,
    Fresh,
    NewPiece,
    changed_in_memory,
    kind_for,
)

if TYPE_CHECKING:
    from tensor_dedup.store.codecs.choice import CodecChoice
    from tensor_dedup.store.codecs.interface import Codec
    from tensor_dedup.store.containers import ContainerId

_LEAF_HEAD = len(wrap(AS_IT_IS, b""))
# Steps that each change another leaf repeat what all before them have changed. With this share of a
# leaf, three of them take as much as if each leaf were stored once, as it is.
_CHEAP = 0.5


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A stored piece that other pieces are stored against.

    `leaves` has its concatenated leaf digests. `pieces` reads its bytes. If `pieces` is None, the
    anchor cannot be read; new pieces can share its leaves, but cannot be encoded against it.
    """

    digest: bytes
    nbytes: int
    leaves: bytes
    pieces: StoredPieces | None = None

    def read(self, start: int, stop: int) -> bytearray:
        """Return the bytes from `start` to `stop`, verified. `pieces` must not be None.

        Raises:
            CorruptTensorError, MissingObjectError: No intact copy of the bytes is in the store.
        """
        assert self.pieces is not None
        return self.pieces.read_piece(self.digest, start, stop, self.nbytes)

    def has_leaf(self, start: int, nbytes: int) -> bool:
        """Return whether the anchor has a leaf of `nbytes` at offset `start`."""
        return are_leaves(self.nbytes, start, start + nbytes)

    def in_common(self, leaves: bytes) -> tuple[bool, ...]:
        """Return for each leaf of a new piece whether the anchor has an equal leaf there.

        `leaves` has the concatenated leaf digests of the new piece. Only leaves at the same offset
        are compared.
        """
        ours = (self.leaves[at : at + DIGEST_BYTES] for at in range(0, len(leaves), DIGEST_BYTES))
        theirs = (leaves[at : at + DIGEST_BYTES] for at in range(0, len(leaves), DIGEST_BYTES))
        return tuple(one == other for one, other in zip(ours, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan for storing a new piece: by which codec, and against which anchor.

    `common` says for each leaf whether the anchor has an equal leaf, which is then not stored
    again. If `held` is None, the other leaves are stored within the piece. Otherwise, they become
    separate pieces, and `held` has the numbers of those that the store has already.
    """

    choice: "CodecChoice | None"
    anchor: Anchor | None
    common: tuple[bool, ...] = ()
    held: frozenset[int] | None = None

    @property
    def by_leaf(self) -> bool:
        """Whether some leaves are left out because they equal the anchor's leaves."""
        return any(self.common)

    @property
    def codec(self) -> str:
        """The name of the codec, as the container's table states it for the piece."""
        if self.in_parts:
            return codec_of(self.own)
        return LEAVES if self.by_leaf or self.choice is None else self.choice.codec.name

    @property
    def own(self) -> list[int]:
        """The numbers of the leaves that differ from the anchor's leaves."""
        return [number for number, common in enumerate(self.common) if not common]

    @property
    def in_parts(self) -> bool:
        """Whether the leaves that differ from the anchor's leaves become separate pieces."""
        return self.held is not None and self.by_leaf and not all(self.common)

    @property
    def base(self) -> bytes | None:
        """The digest of the anchor, or None if there is no anchor."""
        return None if self.anchor is None else self.anchor.digest

    def has_leaf(self, start: int) -> bool:
        """Return whether the leaf at `start` is left out because the anchor has an equal leaf."""
        return bool(self.common) and self.common[start // LEAF_BYTES]


def plan_of(
    choice: "CodecChoice | None",
    anchor: Anchor | None,
    nbytes: int,
    leaves: bytes,
    held: "LeafSharing | None" = None,
) -> Plan | None:
    """Return a plan for storing a piece, or None to store it unencoded.

    `choice` is the codec chosen for the piece, and `anchor` is the anchor to store it against.
    Either may be None. `leaves` has the concatenated leaf digests of the piece.

    With `held`, the plan may store changed leaves as separate pieces, which later steps can share.
    `held` finds out which of them the store has already.
    """
    plan = Plan(choice, anchor, anchor.in_common(leaves) if anchor is not None else ())
    if held is not None and plan.by_leaf and (choice is None or not _is_cheap(choice)):
        in_parts = replace(plan, held=held.held(plan, nbytes, leaves))
        if saves_by_leaf(in_parts, nbytes):
            return in_parts
    if choice is None:
        return plan if saves_by_leaf(plan, nbytes) else None
    if plan.by_leaf:
        return plan
    return Plan(choice, anchor if choice.codec.against_base else None)


def _is_cheap(choice: "CodecChoice") -> bool:
    """Whether what a codec makes of changed leaves may be stored once more by each later step."""
    return choice.codec.against_base and choice.share <= _CHEAP


def anchor_of(pieces: StoredPieces, digest: bytes) -> Anchor | None:
    """Return an anchor for new pieces that resemble the piece `digest`, or None if there is none.

    An anchor is a stored piece against which other pieces can be encoded. It is the piece `digest`
    itself, if possible, or else a piece against which that piece is encoded.
    """
    found = pieces.anchor(digest)
    records = [] if found is None else pieces.records(found)
    for record in records:
        if record.base is None:
            return Anchor(record.digest, record.nbytes, record.leaves, pieces)
    return None


def own_bytes(plan: Plan, nbytes: int) -> int:
    """Return the total size of the leaves that `plan` stores anew, for a piece of `nbytes`."""
    return sum(leaf_bytes(number, nbytes) for number in plan.own if number not in (plan.held or ()))


def saves_by_leaf(plan: Plan, nbytes: int) -> bool:
    """Return whether `plan` saves a tenth of a piece of `nbytes` by leaving out leaves.

    What a codec saves is not counted.
    """
    if not plan.by_leaf:
        return False
    heads = head_bytes(nbytes) + _LEAF_HEAD * len(plan.own)
    return own_bytes(plan, nbytes) + heads <= nbytes * WORTH


class LeafSharing:
    """A search for stored pieces that share leaves with new pieces. Use it from one thread.

    A shared leaf has the same offset in both pieces; names and shapes do not matter. Use the search
    inside `with locks.session(...):`, and close it afterwards.
    """

    def __init__(
        self, objects: Objects, index: StoreIndex, without: Collection[bytes] = ()
    ) -> None:
        """Begin a search. Stored pieces whose digests are in `without` are never found."""
        self._objects, self._index, self._without = objects, index, without
        self._records: dict[ContainerId, dict[int, Record]] = {}
        self._pieces: StoredPieces | None = None
        # By the leaves of a piece and what it would be stored against.
        self._held: dict[tuple[bytes, bytes | None], frozenset[int]] = {}

    def close(self) -> None:
        """Close the files that the last search opened."""
        if self._pieces is not None:
            self._pieces.close()
        self._pieces = None

    def find(
        self, wanted: Iterable[tuple[Hashed, int]], *, readable: bool = False, parts: bool = False
    ) -> dict[bytes, Anchor]:
        """Find for each new piece the stored piece that shares the most leaves with it.

        `wanted` has the hashes and the size of each new piece. The result maps the digests of new
        pieces to the stored pieces. A new piece is left out if sharing would save less than a tenth
        of it.

        If `parts` is True, leaves that the store has as separate pieces count as saved, too. If
        `readable` is True, the bytes of the stored pieces can be read until the next call of `find`
        or `close`.
        """
        self.close()
        found = {}
        for hashed, nbytes in wanted:
            anchor = None if nbytes < LEAF_BYTES else self._best(hashed, nbytes, parts=parts)
            if anchor is not None:
                found[hashed.digest] = anchor
        if not readable or not found:
            return found
        digests = {anchor.digest for anchor in found.values()}
        self._pieces = StoredPieces(self._objects, self._index, digests)
        return {key: replace(anchor, pieces=self._pieces) for key, anchor in found.items()}

    def held(self, plan: Plan, nbytes: int, leaves: bytes) -> frozenset[int]:
        """Return the numbers of a new piece's leaves that the store has as separate pieces.

        `nbytes` is the size of the new piece, and `leaves` are its concatenated leaf digests.
        Leaves that `plan` takes from its anchor are not looked up.
        """
        key = leaves, plan.base
        if key not in self._held:
            self._held[key] = self._find_held(plan, nbytes, leaves)
        return self._held[key]

    def _find_held(self, plan: Plan, nbytes: int, leaves: bytes) -> frozenset[int]:
        wanted = {number: part_of(leaves, number, nbytes) for number in plan.own}
        found = self._index.find(wanted.values())
        containers = {place.container for places in found.values() for place in places}
        if not self._index.fresh and not self._index.still_so(containers):
            self._index.refresh()
            found = self._index.find(wanted.values())
        there = {d for d, places in found.items() if any(place.base is None for place in places)}
        return frozenset(n for n, d in wanted.items() if d in there and d not in self._without)

    def _best(self, hashed: Hashed, nbytes: int, *, parts: bool) -> Anchor | None:
        best, least = None, nbytes
        for record in self._alike(hashed.leaves):
            if record.digest == hashed.digest or record.digest in self._without:
                continue
            anchor = Anchor(record.digest, record.nbytes, record.leaves)
            plan = Plan(None, anchor, anchor.in_common(hashed.leaves))
            own = own_bytes(plan, nbytes)
            # Of two that have as much, one of more leaves is no part of another tensor.
            better = own < least or (
                own == least and best is not None and record.nbytes > best.nbytes
            )
            if better and (plan.by_leaf if parts else saves_by_leaf(plan, nbytes)):
                best, least = anchor, own
        if parts and best is not None:
            return best if plan_of(None, best, nbytes, hashed.leaves, self) is not None else None
        return best

    def _alike(self, leaves: bytes) -> Iterator[Record]:
        """The records of the pieces that may have leaves in common with a new one."""
        found = self._index.find_alike(leaves)
        containers = {each.container for each in found}
        if not self._index.fresh and not self._index.still_so(containers):
            self._index.refresh()
            found = self._index.find_alike(leaves)
        for each in found:
            record = self._record(each)
            if record is not None and record.base is None:
                yield record

    def _record(self, place: PieceAlike) -> Record | None:
        if place.container not in self._records:
            self._records[place.container] = {}
            with suppress(MissingObjectError, DamagedFileError, NewerFormatError):
                table = self._objects.containers.table(place.container)
                self._records[place.container] = {each.offset: each for each in table.records}
        return self._records[place.container].get(place.offset)


class EncodedWriter(ContainerWriter):
    """A writer for a container of encoded pieces (delta), from files and from memory.

    Use it from one thread. End it with `finish`, `seal` or `abandon`. `tensors` counts the tensors
    encoded from files, and `saved_bytes` is the space that their encoding saved.
    `leaf_shared_bytes` is the total size of the leaves left out because an anchor has them.
    """

    def __init__(
        self, objects: Objects, hasher: Hasher, parts: "PartsWriter | None" = None
    ) -> None:
        """Begin a container. `parts` stores the leaves that plans turn into separate pieces."""
        super().__init__(objects, hasher, ENCODED)
        self._parts = parts
        self.saved_bytes = 0
        self.tensors = 0
        self.leaf_shared_bytes = 0

    def encode(
        self,
        source: Handle,
        piece: NewPiece,
        leaves: bytes,
        plan: Plan,
        *,
        before_leaf: Callable[[], None] = _nothing,
    ) -> int | None:
        """Encode a piece of the open file `source` and store it; return its stored size.

        If encoding does not save enough or the anchor cannot be read, store nothing and return
        None. `leaves` has the concatenated leaf digests of the piece. The threads call
        `before_leaf` before each leaf; if it raises, the encoding stops.

        Raises:
            ChangedFileError: The piece no longer has its leaf digests.
        """
        if plan.anchor is not None and plan.anchor.digest == piece.digest:
            return None  # somebody else has stored it meanwhile: nothing is against itself
        start = self._reserve(0)
        limit, at = start + int(piece.nbytes * WORTH), start + head_bytes(piece.nbytes)
        handle, head = self._opened(), bytearray()

        def work(first: int) -> bytes | None:
            before_leaf()
            if plan.has_leaf(first):
                return b""
            return encoded_leaf(self._read(source, piece, leaves, first), first, plan)

        try:
            for chunk in self._hasher.each(work, range(0, piece.nbytes, LEAF_BYTES)):
                if chunk is None or at + len(chunk) > limit:
                    self._take_back(handle, start)
                    return None
                self._objects.files.pwrite(handle, chunk, at)
                head += entry(chunk)
                at += len(chunk)
        except (CorruptTensorError, MissingObjectError):
            self._take_back(handle, start)  # the anchor is not what it should be
            return None
        self._objects.files.pwrite(handle, bytes(head), start)
        self._end = at
        hashed = Hashed(piece.digest, leaves)
        self._add(hashed, start, at - start, piece.nbytes, plan)
        if plan.choice is not None:
            self.tensors += 1
            self.saved_bytes += own_bytes(plan, piece.nbytes) if plan.by_leaf else piece.nbytes
            self.saved_bytes -= at - start
        return at - start

    def _add(self, hashed: Hashed, start: int, stored: int, nbytes: int, plan: Plan) -> None:
        self._records.append(
            Record(hashed.digest, start, stored, nbytes, plan.codec, plan.base, hashed.leaves)
        )
        if plan.by_leaf:
            self.leaf_shared_bytes += nbytes - own_bytes(plan, nbytes)

    def encode_all(self, planned: Sequence[tuple[Fresh, Plan]]) -> Iterator[int | None]:
        """Encode and store pieces in memory, with several threads; yield the stored size of each.

        If encoding does not save enough, the piece is not stored, and None is yielded for it. All
        encoded leaves of a piece are in memory at once.

        Raises:
            ChangedModelError: A piece has changed since it was hashed.
        """

        encoded = [
            (piece, plan)
            for piece, plan in planned
            if plan.choice is not None and not plan.in_parts
        ]
        work = [(piece, plan, at) for piece, plan in encoded for at in _leaves(piece)]
        # Waking threads for little takes longer than it saves.
        large = sum(piece.view.nbytes for piece, _ in encoded) > LEAF_BYTES
        each = self._hasher.each if large else map
        chunks = iter(each(lambda one: _encoded_in_memory(*one), work))
        for piece, plan in planned:
            if plan.choice is None or plan.in_parts:
                yield self.put_by_leaf(piece, plan)
            else:
                yield self._put_encoded(piece, plan, [next(chunks) for _ in _leaves(piece)])

    def put_by_leaf(self, piece: Fresh, plan: Plan) -> int:
        """Store a piece from memory, without the leaves that `plan` leaves out.

        The other leaves are stored unencoded, or as separate pieces if the plan says so. Return the
        number of bytes written.

        Raises:
            ChangedModelError: A leaf has changed since it was hashed.
        """
        if plan.in_parts:
            return self._put_in_parts(piece, plan)
        own = [at for at in _leaves(piece) if not plan.has_leaf(at)]
        head = head_bytes(piece.nbytes)
        stored = head + sum(_LEAF_HEAD + min(LEAF_BYTES, piece.nbytes - at) for at in own)
        self._flush()
        start, handle, files = self._reserve(stored), self._opened(), self._objects.files

        def work(numbered: tuple[int, int]) -> bytes:
            number, at = numbered
            chunk = wrap(AS_IT_IS, _checked_leaf(piece, at))
            files.pwrite(handle, chunk, start + head + number * (_LEAF_HEAD + LEAF_BYTES))
            return entry(chunk)

        entries = iter(self._hasher.each(work, list(enumerate(own))))
        heads = [entry(b"") if plan.has_leaf(at) else next(entries) for at in _leaves(piece)]
        files.pwrite(handle, b"".join(heads), start)
        files.begin_writing(handle, start, stored)
        self._add(piece.hashed, start, stored, piece.nbytes, plan)
        return stored

    def _put_in_parts(self, piece: Fresh, plan: Plan) -> int:
        assert self._parts is not None
        written = sum(
            self._parts.put_leaf(piece, number, plan.choice)
            for number in plan.own
            if number not in (plan.held or ())
        )
        head = entry(b"") * len(plan.common)
        start = self._reserve(len(head))
        self._write(head, start)
        self._add(piece.hashed, start, len(head), piece.nbytes, plan)
        return len(head) + written

    def encode_small(self, piece: Fresh, plan: Plan) -> int | None:
        """Encode and store a piece of a single leaf, in this thread; return its stored size.

        If encoding does not save enough, store nothing and return None.

        Raises:
            ChangedModelError: The piece has changed since it was hashed.
        """
        return self._put_encoded(piece, plan, [_encoded_in_memory(piece, plan, 0)])

    def _put_encoded(self, piece: Fresh, plan: Plan, chunks: Sequence[bytes | None]) -> int | None:
        whole = [chunk for chunk in chunks if chunk is not None]
        stored = head_bytes(piece.view.nbytes) + sum(map(len, whole))
        if len(whole) < len(chunks) or stored > piece.view.nbytes * WORTH:
            return None
        at = start = self._reserve(stored)
        for part in (b"".join(map(entry, whole)), *whole):
            self._write(part, at)
            at += len(part)
        self._add(piece.hashed, start, stored, piece.nbytes, plan)
        return stored

    def _take_back(self, handle: Handle, start: int) -> None:
        self._objects.files.truncate(handle, start)
        self._end = start

    def _read(self, source: Handle, piece: NewPiece, leaves: bytes, first: int) -> memoryview:
        data = memoryview(bytearray(min(LEAF_BYTES, piece.nbytes - first)))
        count = self._objects.files.pread(source, data, piece.start + first)
        number = first // LEAF_BYTES * DIGEST_BYTES
        if count != len(data) or leaf_digests(data) != [leaves[number : number + DIGEST_BYTES]]:
            raise changed(source, f"its bytes at {piece.start} were written while it was read")
        return data


class PartsWriter:
    """A writer that stores single leaves of pieces in memory as separate pieces, each once.

    Later steps may still need such a leaf when this step is deleted. Large leaves therefore go to
    containers for such leaves only. Small leaves go to the step's pack if they are not encoded.
    """

    def __init__(
        self, slab: ContainerWriter, pack: ContainerWriter, encoder: EncodedWriter
    ) -> None:
        self._writers = {"slab": slab, "pack": pack}
        self._encoder = encoder
        self._written: set[bytes] = set()

    def put_leaf(self, piece: Fresh, number: int, choice: "CodecChoice | None") -> int:
        """Store leaf `number` of a piece as a separate piece, encoded if that saves enough.

        Return the number of bytes written, which is 0 if this writer has stored the leaf before.

        Raises:
            ChangedModelError: The leaf has changed since it was hashed.
        """
        nbytes = leaf_bytes(number, piece.nbytes)
        digest = part_of(piece.leaves, number, piece.nbytes)
        if digest in self._written:
            return 0
        self._written.add(digest)
        at = number * LEAF_BYTES
        leaf = piece.leaves[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        changes = piece.leaf_changes[number : number + 1]
        part = Fresh(
            piece.name,
            piece.dtype,
            piece.view[at : at + nbytes],
            changes[0] if changes else b"",
            Hashed(digest, leaf),
            piece.private,
            changes,
        )
        if choice is not None:
            codec = _alone(choice.codec) if choice.codec.against_base else choice.codec
            plan = Plan(replace(choice, codec=codec), None)
            stored = self._encoder.encode_small(part, plan)
            if stored is not None:
                return stored
        self._writers[kind_for(nbytes)].put(part)
        return nbytes


def _leaves(piece: Fresh) -> range:
    return range(0, piece.view.nbytes, LEAF_BYTES)


def _checked_leaf(piece: Fresh, at: int) -> memoryview:
    """Return a leaf that stays as it was hashed: of memory that others write to, a copy."""
    if piece.private:
        return piece.view[at : at + LEAF_BYTES]
    data = bytes(piece.view[at : at + LEAF_BYTES])
    if change_hash_of_leaf(memoryview(data)) != piece.leaf_changes[at // LEAF_BYTES]:
        raise changed_in_memory(piece.name)
    return memoryview(data)


def _encoded_in_memory(piece: Fresh, plan: Plan, at: int) -> bytes | None:
    if plan.has_leaf(at):
        return b""
    data = _checked_leaf(piece, at)
    try:
        return encoded_leaf(data, at, plan)
    except (CorruptTensorError, MissingObjectError):
        return None  # the anchor is not what it should be


def encoded_leaf(data: memoryview, first: int, plan: Plan) -> bytes | None:
    """Encode the leaf `data` by `plan`; return its stored form, or None if a check fails.

    `first` is the offset of the leaf in its piece. The check decodes the encoded leaf and compares
    the result with `data`. With `plan.by_leaf`, the result is never None: the leaf is stored
    unencoded if the check fails or the codec saves too little.

    Raises:
        CorruptTensorError, MissingObjectError: The anchor's leaf cannot be read.
    """
    if plan.choice is None:
        return wrap(AS_IT_IS, data)
    codec, base = plan.choice.codec, None
    if plan.anchor is not None and codec.against_base:
        if plan.anchor.has_leaf(first, len(data)):
            base = memoryview(plan.anchor.read(first, first + len(data)))
        else:
            codec = _alone(codec)
    blob = codec.encode(data, base, plan.choice.effort)
    if plan.by_leaf and len(blob) > len(data) * WORTH:
        return wrap(AS_IT_IS, data)
    back = bytearray(len(data))
    codec.decode(memoryview(blob), base, memoryview(back))
    # A bytearray compares memory; two memoryviews compare number by number, and let no thread run.
    if back != data:
        return wrap(AS_IT_IS, data) if plan.by_leaf else None
    return wrap(codec.name, blob) if plan.by_leaf else blob


def _alone(codec: "Codec") -> "Codec":
    """The codec for what has no counterpart: new rows, where others are stored against a base."""
    from tensor_dedup.store.codecs.choice import CODECS  # and with it numpy

    return CODECS[f"planes{codec.width}"]
