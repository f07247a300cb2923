"""Reading of pieces from a store, verified against their digests.

A piece is a tensor, a file header or a small file. It may have several copies in containers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    ChangedExternalError,
    ClosedCheckpointError,
    CorruptFrameError,
    CorruptTensorError,
    MissingObjectError,
    is_unreadable,
    os_errors,
)
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.format.external import EXTERNAL
from tensor_dedup.store.format.tables import PLAIN, Record
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.copies import PieceCopies, PieceCopy
from tensor_dedup.store.reading.decoding import (
    Base,
    are_leaves,
    base_of,
    fill_leaves,
    leaves_of,
    read_range,
)

_T = TypeVar("_T")


class _BaseLostError(Exception):
    """What a delta is against cannot be read; the cause says why."""


class StoredPieces:
    """Pieces of a store, open for reading. They stay readable if garbage collection runs.

    The containers are held open, and an open file can be read even after it was deleted. If there
    are more containers than a reader may hold open, or if damage was found, garbage collection has
    to wait until `close`.

    Any thread may read. Close the object, or leave its `with` statement, only when no read is
    running any more. Do not use it in a forked child.
    """

    def __init__(
        self, objects: Objects, index: StoreIndex, wanted: set[bytes], name: str = ""
    ) -> None:
        """Open the containers of the pieces whose digests are in `wanted`.

        Call it inside `with locks.session(...):`. `name` is the name of the pieces' checkpoint,
        which error messages use.
        """
        self.name = name or str(objects.layout.root)
        self._objects = objects
        self._open = True
        self._copies = PieceCopies(objects, index, wanted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the containers. A second call has no effect."""
        self._open = False
        self._copies.close()

    def __contains__(self, digest: object) -> bool:
        """Return whether a container was found that should hold the piece with this digest."""
        return isinstance(digest, bytes) and digest in self._copies

    def __repr__(self) -> str:
        (pieces, containers), state = self._copies.counts, "" if self._open else ", closed"
        what = f"pieces={pieces}, containers={containers}{state}"
        return f"{type(self).__name__}({self.name!r}, {what})"

    def container(self, container: ContainerId) -> AbstractContextManager[Handle]:
        """Return a context manager: while it is active, a container's data file is open.

        It provides a handle for reading.

        Raises:
            OSError: The file was removed or cannot be opened.
            ChangedExternalError: The file was indexed in place and has changed.
            ClosedCheckpointError: This object was closed.
        """
        self._check_open()
        return self._copies.using(container)

    def path(self, container: ContainerId) -> Path:
        """Return the path of the data file of a container that this object uses."""
        return self._copies.path(container)

    def records(self, digest: bytes) -> list[Record]:
        """Return the entries for a piece in the tables of containers, one for each known copy.

        The copy that is tried first comes first.
        """
        return [copy.record for copy in self._copies.known(digest)]

    def anchor(self, digest: bytes) -> bytes | None:
        """Return the digest of an anchor for new pieces that resemble the piece `digest`, or None.

        An anchor is a piece against which other pieces can be encoded. It has a copy in the store
        that is not itself encoded against another piece. The anchor is the piece `digest` itself,
        if possible, or else a piece against which it is encoded.
        """
        return self._copies.anchor(digest)

    @property
    def disk(self) -> Files:
        """The file system interface that reads the containers."""
        return self._objects.files

    def plain_places(self, digest: bytes) -> list[tuple[ContainerId, Record]]:
        """Return the containers and records of the known unencoded copies of a piece.

        The copies are not read or verified. Copies in files that are indexed in place are left out,
        because those files may change.
        """
        return [place for place in self.own_places(digest) if place[1].codec == PLAIN]

    def own_places(self, digest: bytes) -> list[tuple[ContainerId, Record]]:
        """Return the containers and records of the known copies of a piece, without reading them.

        The copies may be encoded. Copies in files that are indexed in place are left out.
        """
        return [
            (copy.container, copy.record)
            for copy in self._copies.known(digest)
            if copy.container.kind != EXTERNAL
        ]

    def read_stored(self, container: ContainerId, offset: int, view: memoryview) -> bool:
        """Fill `view` with the bytes at `offset` of a container, neither decoded nor verified.

        Return False if the disk cannot read the bytes or the file is too short.
        """
        try:
            with self.container(container) as handle:
                return self.disk.pread(handle, view, offset) == view.nbytes
        except OSError as error:
            if not is_unreadable(error):
                raise
            return False

    def read_piece(self, digest: bytes, start: int, stop: int, nbytes: int) -> bytearray:
        """Read the bytes from `start` to `stop` of a piece, verify them, and return them.

        `nbytes` is the size of the whole piece.

        Raises:
            CorruptTensorError, MissingObjectError: No intact copy of the bytes is in the store.
            ClosedCheckpointError: This object was closed.
        """
        if start == stop:
            return bytearray()

        def read(copy: PieceCopy, handle: Handle) -> bytearray | None:
            return read_range(self.disk, handle, copy.record, start, stop, self._base(copy))

        self._check_wanted(digest, nbytes)
        return self._from_any(digest, nbytes, read)

    def _base(self, copy: PieceCopy) -> Base:
        """What gives the leaves that a record is stored against."""

        def read_leaf(digest: bytes, start: int, view: memoryview) -> bytes:
            self._check_leaf(digest, start, view.nbytes)
            try:
                return self._from_any(digest, view.nbytes, partial(anchored, start, view), True)
            except (CorruptTensorError, MissingObjectError) as error:
                raise _BaseLostError from error

        def anchored(start: int, view: memoryview, at: PieceCopy, handle: Handle) -> bytes | None:
            # No delta: it has no base of its own.
            right = fill_leaves(self.disk, handle, at.record, start, view, base)
            return leaves_of(at.record, start, view.nbytes) if right else None

        base = base_of(copy.record, read_leaf, self.peek_leaf)
        return base

    def peek_leaf(self, digest: bytes, start: int, view: memoryview) -> bool:
        """Fill `view` with a leaf of a piece from an unencoded copy, without verifying it.

        `start` is the offset of the leaf. Return False if the piece has no such leaf or copy, or if
        the disk cannot read it. The content of `view` is then undefined.
        """
        for container, record in self.plain_places(digest):
            if are_leaves(record.nbytes, start, start + view.nbytes):
                with suppress(OSError):  # opened by turns, and removed since
                    return self.read_stored(container, record.offset + start, view)
        return False

    def read_leaf(self, digest: bytes, start: int, view: memoryview) -> bytes:
        """Fill `view` with the leaf at offset `start` of a piece, verified; return its digest.

        Raises:
            CorruptFrameError: The piece has no leaf of the size of `view` at `start`.
            CorruptTensorError, MissingObjectError: No intact copy of the bytes is in the store.
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
        """Fill `view` with the bytes of a piece that begin at offset `start`, and verify them.

        `nbytes` is the size of the whole piece. If the bytes are whole leaves (2 MiB each), return
        the concatenated digests of these leaves. Otherwise, return b""; such a read is slower,
        because it copies the bytes. After an error, the content of `view` is undefined.

        Raises:
            CorruptTensorError, MissingObjectError: No intact copy of the bytes is in the store.
            ClosedCheckpointError: This object was closed.
        """
        stop = start + view.nbytes
        whole_leaves = are_leaves(nbytes, start, stop)

        def read(copy: PieceCopy, handle: Handle) -> bytes | None:
            base = self._base(copy)
            if whole_leaves:
                right = fill_leaves(self.disk, handle, copy.record, start, view, base)
                return leaves_of(copy.record, start, view.nbytes) if right else None
            data = read_range(self.disk, handle, copy.record, start, stop, base)
            if data is not None:
                view[:] = data
            return b"" if data is not None else None

        if not view.nbytes:
            return b""
        self._check_wanted(digest, nbytes)
        return self._from_any(digest, nbytes, read)

    def _check_wanted(self, digest: bytes, nbytes: int) -> None:
        # What is read in vain counts as damaged from then on: only a right question may be asked.
        if not self._copies.may_have(digest, nbytes):
            raise self._missing(digest, nbytes)

    def _from_any(
        self,
        digest: bytes,
        nbytes: int,
        read: Callable[[PieceCopy, Handle], _T | None],
        anchors_only: bool = False,
    ) -> _T:
        """What `read` makes of the first place that is right."""
        self._check_open()
        lost: _BaseLostError | None = None
        wrong: list[tuple[PieceCopy, OSError | None]] = []
        with os_errors(self._objects.layout.root):
            for copy in self._copies.all_of(digest):
                if anchors_only and not copy.may_be_base:
                    continue
                try:
                    with self.container(copy.container) as handle:
                        data, failure = self._tried(copy, handle, read)
                    if data is not None:
                        return data
                    self._copies.give_up(copy)
                    wrong.append((copy, failure))
                except _BaseLostError as error:
                    lost = error  # which says nothing against this record
                    if isinstance(error.__cause__, CorruptTensorError):
                        wrong.append((copy, None))
                except (FileNotFoundError, ChangedExternalError):
                    pass  # opened by turns, and somebody else has removed or changed it since
                except OSError as error:
                    if not is_unreadable(error):
                        raise
                    wrong.append((copy, _bare(error)))  # of opening it
        if not wrong:
            raise self._missing(digest, nbytes)
        raise self._corrupt(*wrong[0], digest) from lost

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedCheckpointError.at(self.name, "it was closed", name=self.name)

    def _tried(
        self, copy: PieceCopy, handle: Handle, read: Callable[[PieceCopy, Handle], _T | None]
    ) -> tuple[_T | None, OSError | None]:
        """What `read` makes of a place, or why the disk gives nothing of it."""
        failure = None
        for _ in range(2):  # the first may have been hit on its way, not on the disk
            try:
                data, failure = read(copy, handle), None
            except OSError as error:
                if not is_unreadable(error):
                    raise
                failure = _bare(error)
            else:
                if data is not None:
                    return data, None
        return None, failure

    def _missing(self, digest: bytes, nbytes: int) -> MissingObjectError:
        changed = self._objects.containers.changed_holding(digest)
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

    def _corrupt(
        self, where: PieceCopy, failure: OSError | None, digest: bytes
    ) -> CorruptTensorError:
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
