"""Reading a checkpoint back: every byte that is returned has been compared with its digest."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self, TypeVar

from tensor_dedup.digest import LEAF_BYTES, combine, leaf_digests
from tensor_dedup.store.errors import (
    BadRangeError,
    ClosedCheckpointError,
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    StoreAccessError,
    UnknownTensorError,
)
from tensor_dedup.store.files import Handle
from tensor_dedup.store.index import Index
from tensor_dedup.store.manifests import Piece, by_file
from tensor_dedup.store.objects import ContainerId, Objects
from tensor_dedup.store.tables import DIGEST_BYTES, PLAIN, Record

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a stored checkpoint; `digest` is the one `analyze` and `report` show."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a stored checkpoint, as an export writes it."""

    path: str
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class _Spot:
    """A record in an open container."""

    container: ContainerId
    handle: Handle
    record: Record


class StoredPieces:
    """Pieces of a store, open for reading: all containers that hold them are held open.

    So gc cannot take them. Reading may be done from any thread. Close it, or use it as a context
    manager, when no read is running any more. Not to be used in a forked child.
    """

    def __init__(self, objects: Objects, index: Index, wanted: set[bytes], name: str = "") -> None:
        """Open what there is of the pieces with these digests, in a session.

        `name` is the checkpoint's they belong to, for messages.
        """
        self.name = name or str(objects.layout.root)
        self._objects = objects
        self._open = True
        self._lock = threading.Lock()
        self._handles: dict[ContainerId, Handle] = {}
        self._spots: dict[bytes, list[_Spot]] = {}
        try:
            self._open_containers(index, wanted)
        except BaseException:
            self.close()
            raise

    def _open_containers(self, index: Index, wanted: set[bytes]) -> None:
        # All of them, also where one would do: gc may take any that is not open.
        for places in index.find(wanted).values():
            for place in places:
                self._open_container(place.container, wanted)

    def _open_container(self, container: ContainerId, wanted: set[bytes]) -> None:
        if container in self._handles:
            return
        layout, files = self._objects.layout, self._objects.files
        with suppress(MissingObjectError, DamagedFileError, FileNotFoundError):
            table = self._objects.table(container)
            bad = self._objects.bad_offsets(container.name)
            handle = files.open(layout.container(container.name, container.kind), "read")
            self._handles[container] = handle
            for record in table.records:
                if record.digest in wanted and record.offset not in bad:
                    spot = _Spot(container, handle, record)
                    self._spots.setdefault(record.digest, []).append(spot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the containers go. A second time does nothing."""
        self._open = False
        for handle in self._handles.values():
            self._objects.files.close(handle)

    def __contains__(self, digest: bytes) -> bool:
        """Whether a container is open that should hold the piece with this digest."""
        return bool(self._spots.get(digest))

    def read_piece(self, digest: bytes, start: int, stop: int, nbytes: int) -> bytearray:
        """A range of the `nbytes` that have a digest, verified: the store's own way to read."""
        if start == stop:
            return bytearray()

        def read(spot: _Spot) -> bytearray | None:
            return read_verified(self._objects, spot.handle, spot.record, start, stop)

        return self._from_any(digest, nbytes, read)

    def read_piece_into(self, digest: bytes, start: int, view: memoryview, nbytes: int) -> None:
        """Fill `view` with bytes from `start` of the `nbytes` that have a digest, verified.

        Where whole leaves are asked for, no other memory is used. When it raises, `view` may hold
        anything.
        """
        stop = start + view.nbytes
        whole_leaves = not start % LEAF_BYTES and (not stop % LEAF_BYTES or stop == nbytes)

        def read(spot: _Spot) -> bool | None:
            if whole_leaves and spot.record.codec == PLAIN:
                return _fill_verified(self._objects, spot, start, view)
            data = read_verified(self._objects, spot.handle, spot.record, start, stop)
            if data is not None:
                view[:] = data
            return data is not None or None

        if view.nbytes:
            self._from_any(digest, nbytes, read)

    def _from_any(self, digest: bytes, nbytes: int, read: Callable[[_Spot], _T | None]) -> _T:
        """What `read` makes of the first place that is right."""
        if not self._open:
            raise ClosedCheckpointError.at(self.name, "it was closed", name=self.name)
        with self._lock:
            spots = list(self._spots.get(digest, ()))
        if not spots:
            raise MissingObjectError.at(
                self._objects.layout.root,
                f"no container holds {digest.hex()} of {self.name!r}",
                digest=digest.hex(),
                nbytes=nbytes,
            )
        for spot in spots:
            for _ in range(2):  # the first may have been hit on its way, not on the disk
                data = read(spot)
                if data is not None:
                    return data
            self._give_up(spot)
        raise self._corrupt(spots, digest)

    def _give_up(self, spot: _Spot) -> None:
        with self._lock:
            self._spots[spot.record.digest] = [
                other for other in self._spots[spot.record.digest] if other is not spot
            ]
        # A store that may only be read keeps no note of it, and is still not believed.
        with suppress(OSError, StoreAccessError):
            quarantine(self._objects, spot.container, spot.record)

    def _corrupt(self, spots: Sequence[_Spot], digest: bytes) -> CorruptTensorError:
        where, names = spots[0], self._names_of(digest)
        return CorruptTensorError.at(
            where.handle.path,
            f"the {where.record.nbytes} bytes at {where.record.offset} "
            f"({names[0] if names else 'a header or small file'} of {self.name!r}) "
            f"do not have the digest {digest.hex()}",
            digest=digest.hex(),
            offset=where.record.offset,
            nbytes=where.record.nbytes,
            tensors=names,
        )

    def _names_of(self, digest: bytes) -> list[str]:
        """The tensors with a digest, as far as they are known here."""
        return [digest.hex()]


class StoredCheckpoint(StoredPieces):
    """A checkpoint, open for reading. All said of StoredPieces holds."""

    def __init__(self, objects: Objects, index: Index, name: str) -> None:
        """Open it, in a session. UnknownNameError, MissingObjectError, DamagedFileError."""
        self.manifest = objects.ref(name)
        content = objects.manifest(self.manifest)
        pieces = objects.pieces(self.manifest, content)
        held = list(by_file(content, pieces))
        self.files = tuple(StoredFile(f.path, f.nbytes, tuple(part)) for f, part in held)
        self._tensors = {
            tensor.name: tensor
            for file, part in held
            for piece in part
            if (tensor := _tensor(file.prefix, piece)) is not None
        }
        super().__init__(objects, index, {piece.digest for piece in pieces if piece.nbytes}, name)

    def __iter__(self) -> Iterator[StoredTensor]:
        return iter(self._tensors.values())

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> StoredTensor:
        """The tensor of this name. UnknownTensorError."""
        try:
            return self._tensors[name]
        except KeyError:
            raise UnknownTensorError.at(self.name, f"no tensor {name!r}", tensor=name) from None

    @property
    def nbytes(self) -> int:
        """Bytes of all files: headers, tensors and small files."""
        return sum(file.nbytes for file in self.files)

    def read(self, tensor: StoredTensor | str) -> bytearray:
        """All bytes of a tensor, verified. CorruptTensorError, MissingObjectError: none are right.

        UnknownTensorError. ClosedCheckpointError. Memory: the tensor.
        """
        wanted = self[tensor] if isinstance(tensor, str) else tensor
        return self.read_piece(bytes.fromhex(wanted.digest), 0, wanted.nbytes, wanted.nbytes)

    def read_range(self, tensor: StoredTensor | str, start: int, stop: int) -> bytearray:
        """The bytes from `start` to `stop` of a tensor, verified leaf by leaf (2 MiB).

        BadRangeError: it has no such bytes; else as read. Reads whole leaves.
        """
        wanted = self[tensor] if isinstance(tensor, str) else tensor
        if not 0 <= start <= stop <= wanted.nbytes:
            raise BadRangeError.at(
                f"{self.name}: tensor {wanted.name!r}",
                f"bytes {start} to {stop} of {wanted.nbytes}",
                start=start,
                stop=stop,
                nbytes=wanted.nbytes,
            )
        return self.read_piece(bytes.fromhex(wanted.digest), start, stop, wanted.nbytes)

    def _names_of(self, digest: bytes) -> list[str]:
        return [t.name for t in self._tensors.values() if t.digest == digest.hex()]


def _fill_verified(objects: Objects, spot: _Spot, start: int, view: memoryview) -> bool | None:
    """Whole leaves of a record that is stored as it is, into `view`; None when they are wrong."""
    record = spot.record
    if objects.files.pread(spot.handle, view, record.offset + start) != view.nbytes:
        return None
    found, first = b"".join(leaf_digests(view)), start // LEAF_BYTES * DIGEST_BYTES
    return found == record.leaves[first : first + len(found)] or None


def read_verified(
    objects: Objects, handle: Handle, record: Record, start: int, stop: int
) -> bytearray | None:
    """A range of a record's bytes, or None when they are not what the record says."""
    first = start // LEAF_BYTES * LEAF_BYTES
    last = min(-(-stop // LEAF_BYTES) * LEAF_BYTES, record.nbytes)
    data = bytearray(last - first)
    with memoryview(data) as view:
        if objects.files.pread(handle, view, record.offset + first) != len(data):
            return None
        found = leaf_digests(view)
    leaves = record.leaf_list
    expected = leaves[first // LEAF_BYTES : -(-last // LEAF_BYTES)]
    if found != expected or combine(record.nbytes, leaves) != record.digest.hex():
        return None
    del data[stop - first :]
    del data[: start - first]
    return data


def quarantine(objects: Objects, container: ContainerId, record: Record) -> None:
    """Note that the bytes of a record are not what they should be: nobody is given them again."""
    with objects.naming():
        offsets = objects.bad_offsets(container.name) | {record.offset}
        objects.set_bad_offsets(container.name, sorted(offsets))


def _tensor(prefix: str, piece: Piece) -> StoredTensor | None:
    if piece.name is None or piece.dtype is None or piece.shape is None:
        return None
    return StoredTensor(
        prefix + piece.name, piece.dtype, piece.shape, piece.nbytes, piece.digest.hex()
    )
