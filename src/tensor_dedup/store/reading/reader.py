"""Reading a checkpoint from the store; every byte that is returned has been verified."""

import threading
from collections import Counter
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from tensor_dedup.errors import StoreError
from tensor_dedup.store.codecs.parts import leaf_bytes
from tensor_dedup.store.errors import (
    BadRangeError,
    ChangedExternalError,
    ClosedCheckpointError,
    CorruptFrameError,
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    StoreBusyError,
    UnknownTensorError,
    is_unreadable,
    os_errors,
    unreadable_as_damage,
)
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.format.external import EXTERNAL, ExternalFile
from tensor_dedup.store.format.manifests import (
    PART,
    Manifest,
    Piece,
    aliases,
    by_file,
    loose,
    synthesized_files,
)
from tensor_dedup.store.format.tables import PLAIN, Record, Table
from tensor_dedup.store.index import PieceLocation, StoreIndex
from tensor_dedup.store.locks import session
from tensor_dedup.store.objects import ContainerId, Objects
from tensor_dedup.store.reading.decoding import (
    Base,
    are_leaves,
    base_of,
    fill_leaves,
    leaves_of,
    read_range,
)
from tensor_dedup.store.reading.handle_cache import HandleCache, spare_handles

# Up to so many containers are opened although fewer hold all that is wanted: for what they have
# twice. A process may have a thousand files open, and an ensemble may lie in thousands.
_SPARE = 16
# One of which less than this is wanted is opened only for what no other has: its table is long.
_DENSE = 1 / 4
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a stored checkpoint; `digest` is the one `analyze` and `report` show.

    With `alias_of`, the name is a second one that its file gives to that tensor, whose bytes are
    stored once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a stored checkpoint, as an export writes it.

    `prefix` precedes the names of its tensors.
    """

    path: str
    nbytes: int
    pieces: tuple[Piece, ...]
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class _Spot:
    """A record in a container that this reader may open."""

    container: ContainerId
    record: Record


class _BaseLostError(Exception):
    """What a delta is against cannot be read; the cause says why."""


class StoredPieces:
    """Pieces of a store, open for reading: whatever gc does, what holds them stays readable.

    Containers that hold all of them are held open, and an open file can be read after it was
    unlinked. A reader that would need more files than it may hold open opens them by turns, and one
    that has met damage looks for what it misses in all other containers; both hold a session of the
    store from then on until they are closed, so that no gc runs meanwhile. Any thread may read.
    Close the object, or use it as a context manager, when no read is running any more. Do not use
    it in a forked child.
    """

    def __init__(
        self, objects: Objects, index: StoreIndex, wanted: set[bytes], name: str = ""
    ) -> None:
        """Open the containers of the pieces with these digests, in a session.

        `name` is the name of their checkpoint in error messages.
        """
        self.name = name or str(objects.layout.root)
        self._objects = objects
        self._open = True
        self._lock = threading.Lock()
        # The containers that were found, and the files that they index in place, if they do.
        self._origins: dict[ContainerId, ExternalFile | None] = {}
        self._handles = HandleCache(objects.files, self._open_data, spare_handles(objects.files))
        self._session = ExitStack()
        self._wanted = wanted
        self._given_up: list[_Spot] = []
        self._searching = threading.Lock()
        self._searched: set[bytes] | None = None  # None until a session is held
        self._spots: dict[bytes, list[_Spot]] = {}
        try:
            self._open_containers(index, wanted)
            if len(self._handles) < len(self._origins):
                self._hold_session()  # within the caller's: no gc can come in between
        except BaseException:
            self.close()
            raise

    def _hold_session(self) -> set[bytes]:
        if self._searched is None:
            files, layout = self._objects.files, self._objects.layout
            self._handles.with_room(lambda: self._session.enter_context(session(files, layout)))
            self._searched = set()
        return self._searched

    def _open_data(self, container: ContainerId) -> Handle:
        return self._objects.open_origin(container, self._origins[container])

    def _open_containers(self, index: StoreIndex, wanted: set[bytes]) -> None:
        self._open_known(index, wanted)
        if not index.fresh and not all(digest in self for digest in wanted):
            index.refresh()
            self._handles.close()
            self._origins, self._spots = {}, {}
            self._open_known(index, wanted)

    def _open_known(self, index: StoreIndex, wanted: set[bytes]) -> None:
        # More than one, also where one would do: it may turn out to be damaged.
        records = self._open_all(index, wanted)
        bases = {base for _, r in records if r.digest in wanted for base in r.bases}
        for container, record in [*records, *self._open_all(index, bases, anchors=True)]:
            if record.digest in wanted or record.digest in bases:
                spot = _Spot(container, record)
                self._spots.setdefault(record.digest, []).append(spot)

    def _open_all(
        self, index: StoreIndex, wanted: set[bytes], *, anchors: bool = False
    ) -> list[tuple[ContainerId, Record]]:
        """Open the containers that hold these pieces; all good records of those newly opened.

        With `anchors`, only such in which others may be stored against them.
        """
        found: list[tuple[ContainerId, Record]] = []
        places = index.find(wanted, external=not anchors)
        if anchors:
            alone = {d: [p for p in held if p.base is None] for d, held in places.items()}
            places = {digest: held for digest, held in alone.items() if held}
        for container in choose_containers(places):
            if container in self._origins:
                continue
            with suppress(
                MissingObjectError, DamagedFileError, NewerFormatError, FileNotFoundError
            ):
                table, bad = self._handles.with_room(partial(self._looked_up, container))
                self._origins[container] = self._objects.origin(container, table)
                try:
                    with unreadable_as_damage(self.path(container)), self.container(container):
                        pass  # it is there, and open
                except BaseException:
                    del self._origins[container]
                    raise
                found += [(container, r) for r in table.records if r.offset not in bad]
        return found

    def _looked_up(self, container: ContainerId) -> tuple[Table, frozenset[int]]:
        return self._objects.table(container), self._objects.bad_offsets(container.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the containers. Closing twice has no effect."""
        self._open = False
        self._handles.close()
        self._session.close()

    def __contains__(self, digest: object) -> bool:
        """Return whether a container was found that should hold the piece with this digest."""
        if not isinstance(digest, bytes):
            return False
        return any(
            all(map(self._is_anchor, spot.record.bases)) for spot in self._spots.get(digest, ())
        )

    def __repr__(self) -> str:
        containers, state = len(self._origins), "" if self._open else ", closed"
        name, pieces = self.name, len(self._spots)
        return f"{type(self).__name__}({name!r}, pieces={pieces}, containers={containers}{state})"

    def container(self, container: ContainerId) -> AbstractContextManager[Handle]:
        """Give the open file of a container of `plain_places`, for reading inside the block.

        Raises:
            OSError, ChangedExternalError: it is gone or cannot be opened.
            ClosedCheckpointError: this object was closed.
        """
        self._check_open()
        return self._handles.using(container)

    def path(self, container: ContainerId) -> Path:
        """Return the path of the file with the bytes of a container of `plain_places`."""
        origin = self._origins[container]
        own = self._objects.layout.container(container.name, container.kind)
        return own if origin is None else origin.path

    def records(self, digest: bytes) -> list[Record]:
        """Return the records of a piece, in the order in which they are tried."""
        with self._lock:
            return [spot.record for spot in self._spots.get(digest, ())]

    def anchor(self, digest: bytes) -> bytes | None:
        """Return the digest of the anchor for a delta against this piece, or None.

        The anchor is the piece itself or, if the piece is a delta, its base. It is None if the
        piece is not here.
        """
        with self._lock:
            spots = list(self._spots.get(digest, ()))
        bases = [spot.record.base for spot in spots if spot.record.base is not None]
        # One step, never more: two deltas may be against each other when no plain copy is left.
        return next((each for each in (digest, *bases) if self._is_anchor(each)), None)

    def _is_anchor(self, digest: bytes) -> bool:
        with self._lock:
            spots = list(self._spots.get(digest, ()))
        return any(map(_may_be_base, spots))

    @property
    def disk(self) -> Files:
        """The file system interface that the containers were opened through."""
        return self._objects.files

    def plain_places(self, digest: bytes) -> list[tuple[ContainerId, Record]]:
        """Return the unencoded copies of a piece, for a caller that reads and verifies them itself.

        Only copies in the store itself are returned: files that others may change are read by this
        class alone.
        """
        return [place for place in self.own_places(digest) if place[1].codec == PLAIN]

    def own_places(self, digest: bytes) -> list[tuple[ContainerId, Record]]:
        """Return the copies of a piece in the store itself, encoded ones too, unread."""
        with self._lock:
            return [
                (spot.container, spot.record)
                for spot in self._spots.get(digest, ())
                if spot.container.kind != EXTERNAL
            ]

    def read_stored(self, container: ContainerId, offset: int, view: memoryview) -> bool:
        """Fill `view` with bytes of a container of `own_places` as they are stored, unverified.

        Return False where the disk cannot read them.
        """
        try:
            with self.container(container) as handle:
                return self.disk.pread(handle, view, offset) == view.nbytes
        except OSError as error:
            if not is_unreadable(error):
                raise
            return False

    def read_piece(self, digest: bytes, start: int, stop: int, nbytes: int) -> bytearray:
        """Return a verified range of the piece of `nbytes` with this digest."""
        if start == stop:
            return bytearray()

        def read(spot: _Spot, handle: Handle) -> bytearray | None:
            return read_range(self.disk, handle, spot.record, start, stop, self._base(spot))

        self._check_wanted(digest, nbytes)
        return self._from_any(digest, nbytes, read)

    def _base(self, spot: _Spot) -> Base:
        """What gives the leaves that a record is stored against."""

        def read_leaf(digest: bytes, start: int, view: memoryview) -> bytes:
            self._check_leaf(digest, start, view.nbytes)
            try:
                return self._from_any(digest, view.nbytes, partial(anchored, start, view), True)
            except (CorruptTensorError, MissingObjectError) as error:
                raise _BaseLostError from error

        def anchored(start: int, view: memoryview, at: _Spot, handle: Handle) -> bytes | None:
            # No delta: it has no base of its own.
            right = fill_leaves(self.disk, handle, at.record, start, view, base)
            return leaves_of(at.record, start, view.nbytes) if right else None

        base = base_of(spot.record, read_leaf)
        return base

    def read_leaf(self, digest: bytes, start: int, view: memoryview) -> bytes:
        """Fill `view` with the leaf at `start` of the piece with this digest; return its digest.

        Raises:
            CorruptFrameError: the piece has no leaf of that size there.
            CorruptTensorError, MissingObjectError: no intact copy of the bytes is in the store.
        """
        nbytes = self._check_leaf(digest, start, view.nbytes)
        return self.read_piece_into(digest, start, view, nbytes)

    def _check_leaf(self, digest: bytes, start: int, leaf_bytes: int) -> int:
        """Return the size of a piece, 0 if it is not here, once it is sure to have this leaf.

        To read what it does not have would have the piece listed as damaged, instead of who asks.
        """
        nbytes = next((record.nbytes for record in self.records(digest)), 0)
        if nbytes and not are_leaves(nbytes, start, start + leaf_bytes):
            what = f"a leaf of {leaf_bytes} bytes at {start} of a base of {nbytes}"
            raise CorruptFrameError.at(str(self._objects.layout.root), what)
        return nbytes

    def read_piece_into(self, digest: bytes, start: int, view: memoryview, nbytes: int) -> bytes:
        """Fill `view` with verified bytes, from `start` of the piece of `nbytes` with this digest.

        If the range consists of whole leaves, no other memory is used, and the leaf digests that
        the bytes were compared with are returned; otherwise the result is empty. After an error the
        content of `view` is undefined.

        Raises:
            CorruptTensorError, MissingObjectError: no intact copy of the bytes is in the store.
        """
        stop = start + view.nbytes
        whole_leaves = are_leaves(nbytes, start, stop)

        def read(spot: _Spot, handle: Handle) -> bytes | None:
            base = self._base(spot)
            if whole_leaves:
                right = fill_leaves(self.disk, handle, spot.record, start, view, base)
                return leaves_of(spot.record, start, view.nbytes) if right else None
            data = read_range(self.disk, handle, spot.record, start, stop, base)
            if data is not None:
                view[:] = data
            return b"" if data is not None else None

        if not view.nbytes:
            return b""
        self._check_wanted(digest, nbytes)
        return self._from_any(digest, nbytes, read)

    def _check_wanted(self, digest: bytes, nbytes: int) -> None:
        # What is read in vain counts as damaged from then on: only a right question may be asked.
        with self._lock:
            spots = self._spots.get(digest)
        unknown = spots is None and digest not in self._wanted
        if unknown or any(spot.record.nbytes != nbytes for spot in spots or ()):
            raise self._missing(digest, nbytes)

    def _from_any(
        self,
        digest: bytes,
        nbytes: int,
        read: Callable[[_Spot, Handle], _T | None],
        anchors_only: bool = False,
    ) -> _T:
        """What `read` makes of the first place that is right."""
        self._check_open()
        lost: _BaseLostError | None = None
        wrong: list[tuple[_Spot, OSError | None]] = []
        with os_errors(self._objects.layout.root):
            for spot in self._places(digest):
                if anchors_only and not _may_be_base(spot):
                    continue
                try:
                    with self.container(spot.container) as handle:
                        data, failure = self._tried(spot, handle, read)
                    if data is not None:
                        return data
                    self._give_up(spot)
                    wrong.append((spot, failure))
                except _BaseLostError as error:
                    lost = error  # which says nothing against this record
                    if isinstance(error.__cause__, CorruptTensorError):
                        wrong.append((spot, None))
                except (FileNotFoundError, ChangedExternalError):
                    pass  # opened by turns, and somebody else has removed or changed it since
                except OSError as error:
                    if not is_unreadable(error):
                        raise
                    wrong.append((spot, _bare(error)))  # of opening it
        if not wrong:
            raise self._missing(digest, nbytes)
        raise self._corrupt(*wrong[0], digest) from lost

    def _places(self, digest: bytes) -> Iterator[_Spot]:
        """Where a piece is; when the caller asks for more than was known, where else it is."""
        with self._lock:
            known = list(self._spots.get(digest, ()))
        yield from known
        with suppress(StoreBusyError):  # a gc that does not end: what was found is all there is
            self._search(digest)
        with self._lock:
            found = list(self._spots.get(digest, ()))
        yield from (spot for spot in found if spot not in known)

    def _search(self, digest: bytes) -> None:
        """Look for a piece in all containers: few were opened, and the index may be wrong."""
        with self._searching:
            searched = self._hold_session()
            if digest in searched:
                return
            # With it all else that is missing: to look is to read all tables.
            with self._lock:
                missing = {other for other in self._wanted if not self._spots.get(other)}
            missing = {digest, *missing} - searched
            bases = self._find_all(missing) - searched - missing
            if bases:
                self._find_all(bases)
            searched |= missing | bases

    def _find_all(self, wanted: set[bytes]) -> set[bytes]:
        """Add every good record of these pieces; return all that deltas are against."""
        bases = set[bytes]()
        for container in sorted(self._objects.containers(), key=lambda c: c.kind, reverse=True):
            with suppress(StoreError, FileNotFoundError):  # it is for verify to say so
                table, bad = self._handles.with_room(partial(self._looked_up, container))
                held = [r for r in table.records if r.digest in wanted and r.offset not in bad]
                if held and container not in self._origins:
                    self._origins[container] = self._objects.origin(container, table)
                bases |= {base for record in held for base in record.bases}
                with self._lock:
                    for record in held:
                        spot, spots = (
                            _Spot(container, record),
                            self._spots.setdefault(record.digest, []),
                        )
                        if spot not in spots and spot not in self._given_up:
                            spots.append(spot)
        return bases

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedCheckpointError.at(self.name, "it was closed", name=self.name)

    def _tried(
        self, spot: _Spot, handle: Handle, read: Callable[[_Spot, Handle], _T | None]
    ) -> tuple[_T | None, OSError | None]:
        """What `read` makes of a place, or why the disk gives nothing of it."""
        failure = None
        for _ in range(2):  # the first may have been hit on its way, not on the disk
            try:
                data, failure = read(spot, handle), None
            except OSError as error:
                if not is_unreadable(error):
                    raise
                failure = _bare(error)
            else:
                if data is not None:
                    return data, None
        return None, failure

    def _missing(self, digest: bytes, nbytes: int) -> MissingObjectError:
        changed = self._objects.changed_holding(digest)
        if changed is not None:
            return ChangedExternalError.at(
                changed, f"it changed since it was indexed in place for {self.name!r}"
            )
        names = self._names_of(digest)
        called = names[0] if names else "a header or small file"
        what = f"no container holds {digest.hex()}"
        if called != digest.hex():
            what += f" ({called})"
        return MissingObjectError.at(
            self._objects.layout.root,
            f"{what} of {self.name!r}",
            digest=digest.hex(),
            nbytes=nbytes,
            tensors=names,
        )

    def _give_up(self, spot: _Spot) -> None:
        with self._lock:
            self._spots[spot.record.digest] = [
                other for other in self._spots[spot.record.digest] if other is not spot
            ]
            self._given_up.append(spot)
        # Where no note of it can be kept (the store may only be read, the disk is full, the list
        # is damaged itself), it is still not believed.
        with suppress(OSError, StoreError):
            self._objects.add_bad_offset(spot.container.name, spot.record.offset)

    def _corrupt(self, where: _Spot, failure: OSError | None, digest: bytes) -> CorruptTensorError:
        names = self._names_of(digest)
        base = where.record.base
        against = "" if base is None else f", stored against {base.hex()},"
        what = f"do not have the digest {digest.hex()}"
        if failure is not None:
            what = f"cannot be read from the disk ({failure.strerror}), digest {digest.hex()}"
        return CorruptTensorError.at(
            self.path(where.container),
            f"the {where.record.nbytes} bytes at {where.record.offset} "
            f"({names[0] if names else 'a header or small file'} of {self.name!r}){against} "
            f"{what}",
            digest=digest.hex(),
            offset=where.record.offset,
            nbytes=where.record.nbytes,
            tensors=names,
            base=None if base is None else base.hex(),
            errno=None if failure is None else failure.errno,
        )

    def _names_of(self, digest: bytes) -> list[str]:
        """The tensors with a digest, as far as they are known here."""
        return [digest.hex()]


def _bare(error: OSError) -> OSError:
    """The same error without the frames, and the caller's memory, that one that was raised holds"""
    return OSError(error.errno, error.strerror, error.filename)


class StoredCheckpoint(StoredPieces):
    """A checkpoint, open for reading: its tensors by name, and its files.

    `in`, `[]`, `len`, `keys()`, `values()` and `items()` are those of a mapping from names to
    tensors; iterating gives the tensors themselves, in the order of the files. What StoredPieces
    says of threads and lifetime holds here too, and `in` also takes a digest (32 bytes).
    """

    def __init__(
        self,
        objects: Objects,
        index: StoreIndex,
        name: str,
        found: tuple[str, Manifest, Sequence[Piece]] | None = None,
    ) -> None:
        """Open the checkpoint of this name, in a session.

        `found` is that of another store or remote: its manifest's name, its manifest, its pieces.

        Raises:
            UnknownNameError: no checkpoint has this name.
            MissingObjectError, DamagedFileError: its bookkeeping is damaged.
        """
        if found is None:
            manifest = objects.ref(name)
            content = objects.manifest(manifest)
            found = manifest, content, objects.pieces(manifest, content)
        self.manifest, content, pieces = found
        self.notes = content.notes
        held = list(by_file(content, pieces))
        free, self._made = loose(content, pieces), dict[bytes, bytes]()
        self.files = (
            *(StoredFile(f.path, f.nbytes, tuple(part), f.prefix) for f, part in held),
            *self._make_files(free, [file.path for file in content.files]),
        )
        self._tensors = {
            tensor.name: tensor
            for prefix, part in [*((file.prefix, part) for file, part in held), ("", free)]
            for piece in part
            if (tensor := _tensor(prefix, piece)) is not None
        }
        for alias, name_ in aliases(content).items():
            if name_ in self._tensors and alias not in self._tensors:
                self._tensors[alias] = replace(self._tensors[name_], name=alias, alias_of=name_)
        super().__init__(objects, index, {piece.digest for piece in pieces if piece.nbytes}, name)

    def _make_files(self, free: Sequence[Piece], taken: Sequence[str]) -> Iterator[StoredFile]:
        for made in synthesized_files(free, self.notes.get(PART, ""), taken):
            self._made[made.head.digest] = made.header
            yield StoredFile(made.path, made.nbytes, (made.head, *made.pieces))

    def read_piece(self, digest: bytes, start: int, stop: int, nbytes: int) -> bytearray:
        made = self._made.get(digest)
        if made is not None:  # the header of a file that is nowhere
            return bytearray(made[start:stop])
        return super().read_piece(digest, start, stop, nbytes)

    def __iter__(self) -> Iterator[StoredTensor]:
        return iter(self._tensors.values())

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, wanted: object) -> bool:
        """Return whether there is a tensor of this name or, given bytes, a piece of this digest."""
        return wanted in self._tensors if isinstance(wanted, str) else super().__contains__(wanted)

    def __repr__(self) -> str:
        root, state = str(self._objects.layout.root), "" if self._open else ", closed"
        counts = f"tensors={len(self)}, files={len(self.files)}, nbytes={self.nbytes}"
        return f"StoredCheckpoint({self.name!r} of {root!r}, {counts}{state})"

    def keys(self) -> KeysView[str]:
        """Return the tensors' names, in the order of the files."""
        return self._tensors.keys()

    def values(self) -> ValuesView[StoredTensor]:
        """Return the tensors, in the order of the files."""
        return self._tensors.values()

    def items(self) -> ItemsView[str, StoredTensor]:
        """Return the tensors with their names, in the order of the files."""
        return self._tensors.items()

    def __getitem__(self, name: str) -> StoredTensor:
        """Return the tensor of this name.

        Raises:
            UnknownTensorError: the checkpoint has no tensor of this name.
        """
        try:
            return self._tensors[name]
        except KeyError:
            raise UnknownTensorError.at(self.name, f"no tensor {name!r}", tensor=name) from None

    @property
    def nbytes(self) -> int:
        """The size in bytes of all files: headers, tensors and small files."""
        return sum(file.nbytes for file in self.files)

    def read(self, tensor: StoredTensor | str) -> bytearray:
        """Return all bytes of a tensor, verified. It takes as much memory as the tensor's size.

        Raises:
            CorruptTensorError, MissingObjectError: no intact copy of the bytes is in the store.
            UnknownTensorError: the checkpoint has no tensor of this name.
            ClosedCheckpointError: the checkpoint was closed.
        """
        wanted = self[tensor] if isinstance(tensor, str) else tensor
        return self.read_piece(bytes.fromhex(wanted.digest), 0, wanted.nbytes, wanted.nbytes)

    def read_range(self, tensor: StoredTensor | str, start: int, stop: int) -> bytearray:
        """Return the bytes from `start` to `stop` of a tensor, verified leaf by leaf (2 MiB).

        The leaves that contain the range are read whole. Raises the errors of `read` too.

        Raises:
            BadRangeError: the tensor has no such bytes.
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

    def stored(self, tensor: StoredTensor) -> tuple[str, int, str | None]:
        """Return how a tensor is stored: its codec, bytes on disk, and the digest of its base.

        An unencoded tensor has no base; one that is in no container has no codec and takes no
        bytes. Leaves that are pieces of their own count with every tensor that has them.
        """
        records = self.records(bytes.fromhex(tensor.digest))
        if not records:
            return "", 0, None
        best = min(records, key=lambda record: record.stored)
        stored = best.stored + sum(leaf_bytes(number, best.nbytes) for number in best.parts)
        return best.codec_name, stored, None if best.base is None else best.base.hex()

    def _names_of(self, digest: bytes) -> list[str]:
        return [t.name for t in self._tensors.values() if t.digest == digest.hex()]


def _tensor(prefix: str, piece: Piece) -> StoredTensor | None:
    if piece.name is None or piece.dtype is None or piece.shape is None:
        return None
    return StoredTensor(
        prefix + piece.name, piece.dtype, piece.shape, piece.nbytes, piece.digest.hex()
    )


def _may_be_base(spot: _Spot) -> bool:
    """Whether others may be stored against a record: a file that changes is nothing to build on."""
    return spot.record.base is None and spot.container.kind != EXTERNAL


def choose_containers(places: Mapping[bytes, Sequence[PieceLocation]]) -> list[ContainerId]:
    """Choose the containers to open for these pieces: a small set with all of them, and some more.

    The additional ones hold little else, and provide many pieces with a second place to read from.
    """
    wanted: Counter[ContainerId] = Counter()
    sizes: dict[ContainerId, int] = {}
    for held in places.values():
        for place in held:
            wanted[place.container] += place.nbytes
            sizes[place.container] = place.file_bytes
    ranked = sorted(wanted, key=lambda c: (wanted[c] < sizes[c] * _DENSE, -wanted[c], c))
    ranks = {container: rank for rank, container in enumerate(ranked)}
    chosen = {min(ranks[place.container] for place in held) for held in places.values()}
    spare = (
        rank
        for rank, container in enumerate(ranked)
        if rank not in chosen and wanted[container] >= sizes[container] * _DENSE
    )
    for rank in spare:
        if len(chosen) >= _SPARE:
            break
        chosen.add(rank)
    # What is not encoded is read first, what others own late.
    return sorted((ranked[rank] for rank in sorted(chosen)), key=lambda c: c.kind, reverse=True)
