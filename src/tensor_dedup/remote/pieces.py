"""Read pieces from a remote, which are downloaded in long ranges ahead of the reader.

Bytes from the server are never trusted. `RemotePieces` compares the bytes that it decodes with
their leaf digests. If it returns bytes as they are stored, the caller has to verify them.
"""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Self

from tensor_dedup.digest import LEAF_BYTES, leaf_digests
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.errors import (
    CorruptRemoteTensorError,
    DamagedRemoteError,
    MissingRemoteError,
    RemoteAccessError,
)
from tensor_dedup.store.codecs.records import chunks, head_bytes
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import CorruptFrameError
from tensor_dedup.store.format.tables import ALIGNMENT, PLAIN, Record
from tensor_dedup.store.reading.decoding import base_of, decode_leaf, leaves_of
from tensor_dedup.store.reading.reader import StoredPieces

# A range has so many bytes, and less than twice as many.
_RANGE_BYTES: Final = 32 << 20
_GAP_BYTES: Final = 256 << 10
# So much of what lies between may travel for nothing: a share of what is wanted, and a little.
_WASTE_SHARE: Final = 0.01
_WASTE_BYTES: Final = 512 << 10
_AHEAD: Final = 4

Place = tuple[ContainerId, Record]
"""Where a copy of a piece is stored: a container, and an entry (record) in its table."""

Places = dict[bytes, Place]
"""Where pieces are stored, by the digests of the pieces."""


def name_of(digest: bytes, names: Mapping[bytes, str]) -> str:
    """Return the name of the piece `digest` for messages.

    `names` maps digests to names of tensors. A piece without a name is described in general words.
    """
    return names.get(digest, "a header or small file, or what others need")


class _Arrival:
    """What has come of a range so far, in order; `ended` when no more will. Not safe by itself."""

    def __init__(self) -> None:
        self._chunks: list[memoryview] = []
        self._starts: list[int] = []
        self.nbytes = 0
        self.ended = False
        self.future: Future[None] | None = None

    def add(self, chunk: memoryview) -> None:
        """Take in what comes next."""
        if chunk.nbytes:
            self._chunks.append(chunk)
            self._starts.append(self.nbytes)
            self.nbytes += chunk.nbytes

    def part(self, at: int) -> memoryview:
        """Return bytes from `at` on, some at least; they have come."""
        number = bisect_right(self._starts, at) - 1
        return self._chunks[number][at - self._starts[number] :]


@dataclass
class _Download:
    """A range of a container: what is wanted of it, and how much of that was read."""

    container: ContainerId
    start: int
    stop: int
    wanted: int
    read: int = 0
    begun: bool = False
    arrival: _Arrival | None = field(default=None, repr=False)

    def has(self, stop: int) -> bool:
        """Whether a reader need not wait for what lies before `stop`, which is in it or behind."""
        arrival = self.arrival
        if arrival is None:
            return self.begun
        return arrival.ended or arrival.nbytes >= min(stop, self.stop) - self.start


class RemotePieces:
    """A set of pieces on a remote that are downloaded in the background. Implements `PieceSource`.

    Read the pieces in the order of `arriving`, from any thread. Afterwards call `close`, or use the
    object as a context manager.
    """

    def __init__(
        self,
        bucket: Bucket,
        places: Mapping[bytes, Place],
        names: Mapping[bytes, str],
        bases: StoredPieces | None = None,
        key_of: Callable[[ContainerId], str] = layout.container_key,
    ) -> None:
        """Start to download the pieces.

        * `places` maps the digest of each piece to its container and its entry in the table.
        * `names` maps digests to names of tensors, for messages.
        * `bases` has the bases of the pieces that are stored as deltas.
        * `key_of` returns the key of a container's object.
        """
        self._key_of = key_of
        self._bucket, self._places, self._names, self._bases = bucket, places, names, bases
        self.order = sorted(places, key=lambda d: (places[d][0], places[d][1].offset))
        self._downloads = _downloads([places[digest] for digest in self.order])
        self._starts = [(d.container, d.start) for d in self._downloads]
        self._changed = threading.Condition(threading.Lock())
        self._ahead: deque[int] = deque(range(len(self._downloads)))
        # Not `Bucket.each`: ranges arrive ahead of what is read, until this is closed.
        self._pool = ThreadPoolExecutor(_AHEAD)
        self._closed = self._stopped = False
        with self._changed:
            self._fetch_ahead()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def arriving(self) -> Iterator[bytes]:
        """Iterate over the digests of the pieces in the order in which the pieces arrive.

        Read each piece before requesting the next digest.
        """
        waiting: dict[int, deque[bytes]] = {}
        for digest in self.order:
            container, record = self._places[digest]
            number = bisect_right(self._starts, (container, record.offset)) - 1
            waiting.setdefault(number, deque()).append(digest)
        is_all = True
        while waiting:
            with self._changed:
                if self._stopped and is_all:
                    waiting, is_all = self._begun(waiting), False
                    continue
                while (arrived := self._next(waiting)) is None:
                    self._changed.wait()
            yield waiting[arrived].popleft()
            if not waiting[arrived]:
                del waiting[arrived]

    def stop(self) -> None:
        """Start no further downloads; `arriving` then yields only pieces already requested."""
        with self._changed:
            self._stopped = True
            self._ahead.clear()

    def _begun(self, waiting: Mapping[int, Iterable[bytes]]) -> dict[int, deque[bytes]]:
        """The pieces that are under way as a whole."""
        found = {
            number: deque(d for d in digests if all(r.begun for r in self._downloads_of(d)))
            for number, digests in waiting.items()
        }
        return {number: digests for number, digests in found.items() if digests}

    def _downloads_of(self, digest: bytes) -> Sequence[_Download]:
        container, record = self._places[digest]
        last = (container, record.offset + max(1, record.stored) - 1)
        first = bisect_right(self._starts, (container, record.offset)) - 1
        return self._downloads[first : bisect_right(self._starts, last)]

    def _next(self, waiting: Mapping[int, Sequence[bytes]]) -> int | None:
        """The download whose next piece to read; None where to wait is better."""
        for number, digests in waiting.items():
            if not self._downloads[number].begun:
                break
            record = self._places[digests[0]][1]
            stop = record.offset + record.stored
            if all(each.has(stop) for each in self._downloads_of(digests[0])):
                return number
        first = next(iter(waiting))
        downloads = self._downloads_of(waiting[first][0])
        # What is as long as all that is fetched at once lets the ranges behind it begin as it is
        # read. What nobody fetches is fetched when it is read.
        may_wait = len(downloads) < _AHEAD and all(each.begun for each in downloads)
        return None if may_wait else first

    def close(self) -> None:
        """End all downloads. Reads in other threads then raise an error."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        with self._changed:
            for each in self._downloads:
                if each.arrival is not None:  # perhaps of a range that nobody began to fetch
                    each.arrival.ended = True
            self._changed.notify_all()

    def own_places(self, digest: bytes) -> list[Place]:
        """Return where a piece is stored: a list with one pair, the container and the table entry.

        Raises:
            KeyError: The piece is not in this set.
        """
        return [self._places[digest]]

    def records(self, digest: bytes) -> list[Record]:
        """Return the table entry (record) of a piece as a list of one.

        The list is empty if the piece is not in this set.
        """
        return [self._places[digest][1]] if digest in self._places else []

    def read_stored(self, container: ContainerId, offset: int, view: memoryview) -> bool:
        """Fill `view` with the stored bytes of a container from `offset` on, unverified.

        Returns False if the range is not part of the pieces in this set.
        """
        at = 0
        while at < view.nbytes:
            number = bisect_right(self._starts, (container, offset + at)) - 1
            got = self._read(number, container, offset + at, view[at:])
            if not got:
                return False
            at += got
        return True

    def _read(self, number: int, container: ContainerId, offset: int, view: memoryview) -> int:
        download = self._downloads[number]
        if download.container != container or not download.start <= offset < download.stop:
            return 0
        at = offset - download.start
        with self._changed:
            if download.arrival is None:
                self._submit(download)
            arrival = download.arrival
            assert arrival is not None
            while arrival.nbytes <= at and not arrival.ended:
                self._changed.wait()
            future, held = arrival.future, arrival.part(at) if at < arrival.nbytes else None
        if held is None:
            assert future is not None
            future.result()
            raise AssertionError("a range that is too short is an error")
        part = held[: view.nbytes]
        view[: part.nbytes] = part
        with self._changed:
            download.read += part.nbytes
            if download.read >= download.wanted:
                download.arrival = None  # what is read again is fetched again
                self._fetch_ahead()
        return part.nbytes

    def _fetch_ahead(self) -> None:
        busy = sum(1 for each in self._downloads if each.arrival is not None)
        while self._ahead and busy < _AHEAD:
            download = self._downloads[self._ahead.popleft()]
            if not download.begun:
                self._submit(download)
                busy += 1

    def _submit(self, download: _Download) -> None:
        arrival = _Arrival()
        # First, for a pool that takes nothing more raises: nobody would end what waits for it.
        arrival.future = self._pool.submit(self._receive, download, arrival)
        download.begun, download.read, download.arrival = True, 0, arrival

    def _receive(self, download: _Download, arrival: _Arrival) -> None:
        def arrived(chunk: memoryview) -> None:
            with self._changed:
                arrival.add(chunk)
                self._changed.notify_all()

        try:
            self._stream(download.container, download.start, download.stop, arrived)
        finally:
            with self._changed:
                arrival.ended = True
                self._changed.notify_all()

    def _fetch(self, container: ContainerId, start: int, stop: int) -> memoryview:
        found: list[memoryview] = []
        self._stream(container, start, stop, found.append)
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def _stream(
        self,
        container: ContainerId,
        start: int,
        stop: int,
        arrived: Callable[[memoryview], None],
    ) -> None:
        key, got = self._key_of(container), 0

        def counted(chunk: memoryview) -> None:
            nonlocal got
            got += chunk.nbytes
            if self._closed:
                raise CancelledError
            if got > stop - start:
                what = f"asked for bytes {start} to {stop}, the server sends more"
                raise DamagedRemoteError.at(self._bucket.at(key), what, start=start, stop=stop)
            arrived(chunk)

        try:
            self._bucket.stream_range(key, start, stop, counted)
        except FileNotFoundError:
            what = f"this container is gone, with {self._held_in(container)}"
            facts = {"container": container.name, "intact": 0}
            raise MissingRemoteError.at(self._bucket.at(key), what, **facts) from None
        except RemoteAccessError as error:
            # What S3 says to those who may not list, of an object that is not there.
            error.facts |= {"container": container.name, "intact": 0}
            raise
        if got != stop - start:
            what = f"bytes {start} to {stop} are {got}: it is too short"
            facts = {"container": container.name, "intact": start + got}
            at = self._bucket.at(key)
            raise DamagedRemoteError.at(at, what, start=start, stop=stop, **facts)

    def _held_in(self, container: ContainerId) -> str:
        held = [self._names.get(d, d.hex()) for d, p in self._places.items() if p[0] == container]
        return ", ".join(held[:3]) + (f" and {len(held) - 3} more" if len(held) > 3 else "")

    def read_leaf(self, digest: bytes, start: int, view: memoryview) -> bytes:
        """Fill `view` with a verified leaf of a base; return the digest of the leaf.

        `digest` is the digest of the base, the piece that a delta is encoded against. `start` is
        the offset of the leaf. Bases are read from the store, not from the remote.

        Raises:
            MissingRemoteError: The store does not have the base.
        """
        if self._bases is None or digest not in self._bases:
            what = f"what {digest.hex()} is needed for is stored against it, and it is not here"
            raise MissingRemoteError.at(self._bucket.url, what, base=digest.hex())
        return self._bases.read_leaf(digest, start, view)

    def read_piece_into(self, digest: bytes, start: int, view: memoryview, nbytes: int) -> bytes:
        """Fill `view` with whole leaves of a piece, verified, and return the digests of the leaves.

        Bytes that do not match their digests are downloaded once more.

        Raises:
            CorruptRemoteTensorError: The bytes do not match after the second download either.
        """
        container, record = self._places[digest]
        if record.codec != PLAIN:
            return self._decode_into(container, record, start, view)
        leaves = leaves_of(record, start, view.nbytes)
        self.read_stored(container, record.offset + start, view)
        if b"".join(leaf_digests(view)) != leaves:
            # It may have been hit on its way.
            at = record.offset + start
            view[:] = self._fetch(container, at, at + view.nbytes)
            if b"".join(leaf_digests(view)) != leaves:
                raise self._corrupt(container, record)
        return leaves

    def _decode_into(
        self, container: ContainerId, record: Record, start: int, view: memoryview
    ) -> bytes:
        """What came as it is encoded was wrong: fetch its chunks again, and decode them."""
        base = base_of(record, self.read_leaf)
        leaves, size = leaves_of(record, start, view.nbytes), head_bytes(record.nbytes)
        try:
            head = self._fetch(container, record.offset, record.offset + size)
            places = chunks(bytes(head), record.stored)
            for at in range(0, view.nbytes, LEAF_BYTES):
                leaf = view[at : at + LEAF_BYTES]
                chunk = places[(start + at) // LEAF_BYTES]
                where, blob = record.offset + chunk.offset, memoryview(b"")
                if chunk.size:  # of nothing there is no range to ask for
                    blob = self._fetch(container, where, where + chunk.size)
                decode_leaf(record.codec, blob, start + at, leaf, base)
        except CorruptFrameError:
            raise self._corrupt(container, record) from None
        if b"".join(leaf_digests(view)) != leaves:
            raise self._corrupt(container, record)
        return leaves

    def _corrupt(self, container: ContainerId, record: Record) -> CorruptRemoteTensorError:
        name = name_of(record.digest, self._names)
        what = (
            f"the {record.stored} bytes at {record.offset} ({name}) do not have the digest "
            f"{record.digest.hex()}"
        )
        return CorruptRemoteTensorError.at(
            self._bucket.at(self._key_of(container)),
            what,
            digest=record.digest.hex(),
            container=container.name,
            offset=record.offset,
            nbytes=record.stored,
            tensors=[name],
        )


def _downloads(places: Sequence[Place]) -> list[_Download]:
    """The ranges to ask for: neighbours together, also over small gaps, none too long."""
    waste = int(sum(record.stored for _, record in places) * _WASTE_SHARE) + _WASTE_BYTES
    runs: list[list[Place]] = []
    for container, record in places:
        gap = -1
        if runs and runs[-1][-1][0] == container:
            last = runs[-1][-1][1]
            gap = record.offset - last.offset - last.stored
        is_padding = 0 <= gap < ALIGNMENT[container.kind]
        if is_padding or 0 <= gap <= min(waste, _GAP_BYTES):
            waste -= 0 if is_padding else gap
            runs[-1].append((container, record))
        else:
            runs.append([(container, record)])
    return [download for run in runs for download in _split(run)]


def _split(run: Sequence[Place]) -> list[_Download]:
    """The ranges of neighbours, equally long: a short one behind full ones is a request more."""
    length = run[-1][1].offset + run[-1][1].stored - run[0][1].offset
    longest = max(1, -(-length // max(1, length // _RANGE_BYTES)))
    found: list[_Download] = []
    for container, record in run:
        start, stop = record.offset, record.offset + record.stored
        if found:
            last = found[-1]
            room = max(0, last.start + longest - start)
            taken = min(room, record.stored)
            if taken:
                last.stop, last.wanted = start + taken, last.wanted + taken
                start += taken
        for at in range(start, stop, longest):
            end = min(at + longest, stop)
            found.append(_Download(container, at, end, end - at))
    return found
