"""Source tensors: the tensors in a checkpoint's files, their digests, and reading them.

A *hint* is a digest that this machine remembers for a range of a file (`hints`). A tensor with a
hint is read only if no shared tensor in memory can be used instead. Bytes are hashed in the memory
from which they are then used, so they cannot change in between.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeAlias

from tensor_dedup.digest import (
    LEAF_BYTES,
    combine,
    digest,
    digests_by_place,
    leaf_places,
    stream,
    submit,
)
from tensor_dedup.errors import (
    ChangedFileError,
    FormatError,
    IntegrityError,
    UnreadableFileError,
)
from tensor_dedup.formats.weights import members_in, read_header
from tensor_dedup.loader.checkpoint_io.hints import (
    QUIET_NS,
    FileIdentity,
    HintIndex,
    is_trusted,
)
from tensor_dedup.loader.residents.resident import digest_of
from tensor_dedup.types import TensorSpec

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    import torch
    from typing_extensions import Buffer

    from tensor_dedup.formats.pytorch.geometry import PickledTensor
    from tensor_dedup.formats.weights import Header

# One preadv asks for at most this much: the kernel cuts it at 2 GiB anyway.
_PIECE_BYTES = 64 << 20
_IOV_MAX = 1024  # buffers that one preadv fills
# From the page cache, a call for each row is faster from here on: 37 ms instead of 99 at 49 KiB.
_MOST_BETWEEN = 8 << 10


# (offset in the tensor, size) -> bytes
Read: TypeAlias = Callable[[int, int], bytes]


Reread: TypeAlias = Callable[[], AbstractContextManager[Read]]


class StaleHintError(ChangedFileError):
    """Bytes that were read do not have their remembered digest (hint). Load again without hints."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of a tensor of a torch.save file within the source tensor that contains it.

    `start` is in bytes, from the first byte of the source tensor. `shape` and `stride` are in
    elements of `dtype`. If `lazy` is True, the stored values must still be conjugated or negated.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    lazy: bool


def placed(member: PickledTensor, spec: TensorSpec) -> Placed | None:
    """Return the place of `member`, a tensor of a torch.save file, in the source tensor `spec`.

    Returns None if `member` is the whole source, contiguous and of the same dtype and shape.
    """
    start = member.start - spec.start if member.nbytes else 0
    geometry = (member.dtype, member.shape, member.nbytes)
    if member.plain and not start and geometry == (spec.dtype, spec.shape, spec.nbytes):
        return None
    return Placed(member.name, member.dtype, member.shape, member.stride, start, member.lazy)


class Columns(NamedTuple):
    """The same columns of every row of a tensor: `run` bytes of each `stride` bytes."""

    run: int
    stride: int

    def gather(
        self,
        piece: memoryview,
        offset: int,
        read: Callable[[list[memoryview], int, int], int],
    ) -> int:
        """Fill `piece` with bytes of these columns, from byte `offset` of all their bytes on.

        `read(parts, at, offset)` fills the buffers `parts` one after the other from byte `at` of
        the rows on, which is byte `offset` of the columns, and returns how many bytes it has read.
        Up to 8 KiB that lie between columns are read too, always into the same memory: a call for
        each row would take longer. Returns the size of what was filled, which is less than that of
        `piece` only if `read` returned 0.
        """
        gap = self.stride - self.run
        between = memoryview(bytearray(min(gap, _MOST_BETWEEN)))
        most = _IOV_MAX - 1 if gap <= _MOST_BETWEEN else 1
        done = 0
        while done < piece.nbytes:
            row, first = divmod(offset + done, self.run)
            parts, end = [piece[done : done + self.run - first]], done + self.run - first
            while end < piece.nbytes and len(parts) < most:
                parts += [between, piece[end : end + self.run]]
                end += self.run
            left = read(parts, row * self.stride + first, offset + done)
            if left == 0:
                break
            for part in parts[::2]:
                done += max(min(left, part.nbytes), 0)
                left -= part.nbytes + gap
        return done


@dataclass(eq=False, slots=True)
class SourceTensor:
    """One tensor of an open checkpoint file.

    - `digest` is None until it is known: from a hint (a remembered digest), from the manifest of a
      stored checkpoint, or from a read.
    - `hinted` is True if the digest comes from a hint or a manifest.
    - `leaves` has the digest of each leaf (2 MiB), hashed as if the leaf were a tensor of its own.
      It is empty if these digests are unknown or the tensor has one leaf only.
    - `part_of` is the tensor in the file of which this one is a part, or None.
    - `columns` is None, or says that the part is not one range of bytes. `spec.start` then is the
      first byte of its first row.
    """

    file: SourceFile
    spec: TensorSpec
    digest: str | None = None
    hinted: bool = False
    leaves: tuple[str, ...] = ()
    part_of: SourceTensor | None = None
    columns: Columns | None = None

    @property
    def whole(self) -> SourceTensor:
        """The tensor in the file: this one, or the one of which it is a part."""
        return self if self.part_of is None else self.part_of

    def read_into(self, piece: memoryview, offset: int = 0) -> bytes | None:
        """Fill `piece` with the tensor's bytes from byte `offset` on, as `SourceFile.read_into`."""
        if self.columns is None:
            return self.file.read_into(self.spec, piece, offset)
        self.file.read_columns(self.spec, self.columns, piece, offset)
        return None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from byte `offset` on.

        At the end of the file there are fewer, or for columns a FormatError.
        """
        if self.columns is None:
            return self.file.read_range(self.spec.start + offset, nbytes)
        data = bytearray(nbytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    @property
    def place(self) -> str:
        """The path of the file and the tensor's name, for messages."""
        return f"{self.file.path}: {self.spec.name}"

    def identity(self) -> tuple[object, ...]:
        """Return the digest, dtype and shape, by which recipes identify this tensor.

        Raises:
            IntegrityError: The digest is not known yet.
        """
        if self.digest is None:  # two unknown tensors must never get one name
            raise IntegrityError(f"{self.place} was not hashed before its recipe was asked for")
        return ("source", self.digest, self.spec.dtype, self.spec.shape)


class SourceFile:
    """An open weights file and its tensors.

    `tensors` has the tensors by name, and `identity` is the file's `FileIdentity` when it was
    opened. `hashed` has the digests that were computed since then, by (start, nbytes) of the range.
    The file descriptor stays open until `close`. `reads_any_range` says that a range of a tensor
    may begin and end within a leaf (2 MiB) at no cost.

    Raises:
        FormatError: The header is not valid.
        OSError: The file cannot be opened.
    """

    reads_any_range = True

    def __init__(
        self, path: Path, hints: HintIndex | None, algorithm: str, *, trust: bool = True
    ) -> None:
        """Open the file at `path`; with `trust`, take the digests that `hints` knows.

        `algorithm` is the hash algorithm of the digests.
        """
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._hints = hints
        self._algorithm = algorithm
        self.hashed: dict[tuple[int, int], str] = {}
        try:
            self.identity = FileIdentity.of(self._fd)
            self._began_ns = time.time_ns()
            self.header: Header = read_header(path, fd=self._fd)
            known = hints.lookup(self._fd, algorithm) if hints is not None and trust else {}
            self._hinted: Mapping[tuple[int, int], str] = known
            self.tensors = {spec.name: self._tensor(spec, known) for spec in self.header.tensors}
        except BaseException:
            self.close()
            raise

    def named(self) -> Iterator[tuple[str, SourceTensor, Placed | None]]:
        """Yield (name, source tensor, placement) for every tensor name of the file, sorted by name.

        In a file of torch.save, several tensors may be views of one source tensor. The placement
        says which part of the source tensor is meant. It is None for the whole.
        """
        members = members_in(self.header)
        for name in sorted(self.tensors.keys() | members.keys()):
            member = members.get(name)
            source = self.tensors[name if member is None else member.held_by]
            yield name, source, None if member is None else placed(member, source.spec)

    def has_parts(self, source: SourceTensor) -> bool:
        """Return whether `part` may be called for `source`, a tensor of this file.

        Subclasses return False for a tensor that is read from a store, which knows and verifies it
        as a whole.
        """
        return True

    def part(
        self,
        source: SourceTensor,
        start: int,
        nbytes: int,
        shape: tuple[int, ...],
        columns: Columns | None = None,
    ) -> SourceTensor:
        """Return `nbytes` bytes of `source`, from its byte `start` on, as a tensor of its own.

        With `columns`, these are columns of all its rows, and `start` lies in the first row.
        `source` is a tensor of this file and no part itself; the result has its name and dtype, and
        the given `shape`. Its digest is that of its own bytes.
        """
        whole = source.spec
        spec = TensorSpec(whole.name, whole.dtype, shape, whole.start + start, nbytes)
        if columns is None:
            part = self._tensor(spec, self._hinted)
        else:
            digest = self._hinted.get(_place_of_columns(spec))
            part = SourceTensor(self, spec, digest, digest is not None, columns=columns)
        part.part_of = source
        return part

    def _tensor(self, spec: TensorSpec, known: Mapping[tuple[int, int], str]) -> SourceTensor:
        digest = known.get((spec.start, spec.nbytes))
        places = leaf_places(spec.start, spec.nbytes)
        leaves = tuple(known[place] for place in places if place in known)
        if digest is None or len(leaves) < len(places):
            leaves = ()
        return SourceTensor(self, spec, digest, digest is not None, leaves)

    def read_into(self, spec: TensorSpec, piece: memoryview, offset: int = 0) -> bytes | None:
        """Fill the writable buffer `piece` with the tensor's bytes from byte `offset` on.

        `spec` describes the tensor. Safe from any thread. Returns None. A subclass that reads from
        a store may return the concatenated digests of the leaves (2 MiB) that were verified.

        Raises:
            FormatError: The file was truncated.
            UnreadableFileError: Reading the file failed.
        """
        done = 0
        while done < piece.nbytes:
            with piece[done : done + _PIECE_BYTES] as part:
                done += self._read([part], spec, offset + done, offset + done)
        return None

    def _read(self, parts: list[memoryview], spec: TensorSpec, at: int, offset: int) -> int:
        """Read from byte `at` after `spec.start`, which is byte `offset` of the tensor."""
        try:
            count = os.preadv(self._fd, parts, spec.start + at)
        except OSError as error:
            raise UnreadableFileError(
                f"{self.path}: tensor {spec.name!r} cannot be read at byte {offset} of "
                f"{spec.nbytes} ({error.strerror}); look at the disk or share it is on",
                path=str(self.path),
                tensor=spec.name,
                errno=error.errno,
            ) from error
        if count == 0:
            raise FormatError(
                f"{self.path}: tensor {spec.name!r} ends after {offset} of {spec.nbytes} bytes; "
                "the file was truncated while it was open, fetch it again",
                path=str(self.path),
                tensor=spec.name,
            )
        return count

    def read_columns(
        self, spec: TensorSpec, columns: Columns, piece: memoryview, offset: int
    ) -> None:
        """Fill `piece` with bytes of `columns`, from byte `offset` of all their bytes on.

        `spec` describes the part as in `SourceTensor`. Safe from any thread.

        Raises:
            FormatError: The file was truncated.
            UnreadableFileError: Reading the file failed.
        """
        columns.gather(piece, offset, lambda parts, at, done: self._read(parts, spec, at, done))

    def read_range(self, start: int, nbytes: int) -> bytes:
        """Return up to `nbytes` bytes from file offset `start`; fewer at the end of the file."""
        return os.pread(self._fd, nbytes, start)

    def reread(self, _: TensorSpec) -> Reread | None:
        """Return None: the tensor can be read again from the file at `path`, also after `close`.

        A subclass without such a file returns a function that opens the tensor for reading.
        """
        return None

    def check_unchanged(self) -> None:
        """Check that the file's identity is the same as when it was opened.

        Raises:
            ChangedFileError: The file has changed.
        """
        if FileIdentity.of(self._fd) != self.identity:
            raise ChangedFileError(
                f"{self.path} changed while it was being loaded; load it again",
                path=str(self.path),
            )

    def tells_changes(self, since_ns: int | None = None) -> bool:
        """Return whether a file that has this identity at two moments has the same bytes at both.

        The first moment is `since_ns`, as of time.time_ns(), or when the file was opened. This is
        so if the file system maintains times reliably, and the file had not been modified for 2 s.
        """
        began_ns = self._began_ns if since_ns is None else since_ns
        quiet_ns = began_ns - max(self.identity.mtime_ns, self.identity.ctime_ns)
        return quiet_ns >= QUIET_NS and is_trusted(self._fd)

    def remember(self) -> None:
        """Record the digests in `hashed` as hints, for later loads of the file.

        Nothing is recorded in these cases:

        - The file was opened without `hints`.
        - The file has changed since it was opened, or had changed less than 2 s before.
        - The file's times are not reliable.
        """
        if self._hints is not None and self.hashed:
            self._hints.record(
                self._fd, self.identity, self._began_ns, self._algorithm, self.hashed
            )

    def forget(self) -> None:
        """Delete every hint of this file, if the file was opened with `hints`."""
        if self._hints is not None:
            self._hints.forget(self._fd)

    def close(self) -> None:
        """Close the descriptor. Closing twice has no effect."""
        fd, self._fd = self._fd, -1
        if fd != -1:
            os.close(fd)


@dataclass(slots=True)
class ReadCounters:
    """The bytes that one load read and hashed, and the wall-clock seconds that this took.

    `read_seconds` is the time spent waiting for source tensors, which are hashed as they are read.
    `hash_seconds` is the time spent hashing tensors that were computed from source tensors.
    """

    bytes_read: int = 0
    bytes_hashed: int = 0
    read_seconds: float = 0.0
    hash_seconds: float = 0.0


@dataclass(slots=True)
class SourceReader:
    """A reader that reads and hashes source tensors in the background. For one thread.

    Threads of the hash pool read and hash several leaves at once. `settle` waits for the reads and
    sets the digests of the source tensors. `begun` is the number of hashed reads that were started.
    `known_reads` has the source tensors, by id, whose digests were remembered and that were read
    all the same, with the number of bytes.
    """

    algorithm: str
    counters: ReadCounters = field(default_factory=ReadCounters)
    known_reads: dict[int, tuple[SourceTensor, int]] = field(default_factory=dict)
    begun: int = 0  # how many were started with `hashed`
    _settled: int = 0
    _pending: deque[tuple[SourceTensor, Future[str], list[bytes] | None]] = field(
        default_factory=deque
    )
    _leaf_reads: list[Future[str]] = field(default_factory=list)

    def fill(self, source: SourceTensor, memory: torch.Tensor, *, hashed: bool) -> None:
        """Start reading `source` into `memory` (a flat uint8 CPU tensor of the same size).

        With `hashed`, the read goes on in the background. Call `settle` before using the bytes or
        the digest, and before writing to `memory` again. Without `hashed`, the tensor is read
        before this returns, and is not hashed.
        """
        began = time.perf_counter()
        view, spec = memory.numpy().data, source.spec
        self._count(source, spec.nbytes)
        if hashed:
            self.counters.bytes_hashed += spec.nbytes
            leaves = _wanted_leaves(source)
            future = submit(view, self.algorithm, source.read_into, leaves)
            self._pending.append((source, future, leaves))
            self.begun += 1
        else:
            source.read_into(view)
        self.counters.read_seconds += time.perf_counter() - began

    def read_pieces(self, source: SourceTensor, write: Callable[[memoryview, int], None]) -> str:
        """Read `source` in pieces, pass each to `write(piece, offset)`, and return the digest.

        The digest is a BLAKE3, whatever `algorithm` is. `write` is called by threads of the hash
        pool. This also waits for all other reads in progress. The first error of a read is raised.

        Raises:
            StaleHintError: The bytes that were read do not have the digest that a hint gave.
        """
        spec = source.spec

        def pass_on(piece: memoryview, offset: int) -> bytes | None:
            compared = source.read_into(piece, offset)
            write(piece, offset)
            return compared

        self._count(source, spec.nbytes)
        self.counters.bytes_hashed += spec.nbytes
        leaves = _wanted_leaves(source)
        self._pending.append((source, stream(spec.nbytes, pass_on, leaves), leaves))
        self.begun += 1
        self.settle()
        assert source.digest is not None
        return source.digest

    def read_leaves(
        self, source: SourceTensor, numbers: Sequence[int], write: Callable[[memoryview, int], None]
    ) -> None:
        """Read the leaves `numbers` of `source` and pass their pieces to `write(piece, offset)`.

        Leaves are numbered from 0, and `offset` is counted from the beginning of the tensor.
        `source.leaves` must have the digests of the leaves. Waits until everything is written.

        Raises:
            StaleHintError: A leaf does not have the digest in `source.leaves`.
        """
        spec = source.spec
        began = time.perf_counter()
        reads = []
        for number in numbers:
            start = number * LEAF_BYTES
            size = min(LEAF_BYTES, spec.nbytes - start)

            def pass_on(piece: memoryview, offset: int, start: int = start) -> bytes | None:
                compared = source.read_into(piece, start + offset)
                write(piece, start + offset)
                return compared

            self._count(source, size)
            self.counters.bytes_hashed += size
            reads.append((number, stream(size, pass_on)))
        self._leaf_reads = [future for _, future in reads]
        wait(self._leaf_reads)  # all of them, whatever happened to one
        self._leaf_reads.clear()
        self.counters.read_seconds += time.perf_counter() - began
        for number, future in reads:
            if future.result() != source.leaves[number]:
                raise_stale(source, future.result(), f"leaf {number}", source.leaves[number])

    def _count(self, source: SourceTensor, nbytes: int) -> None:
        self.counters.bytes_read += nbytes
        if source.hinted:
            _, before = self.known_reads.get(id(source), (source, 0))
            self.known_reads[id(source)] = source, before + nbytes

    def count(self, source: SourceTensor | None, nbytes: int) -> None:
        """Count bytes that other code has read of `source`, or of none, and has hashed."""
        self.counters.bytes_hashed += nbytes
        if source is not None:
            self._count(source, nbytes)

    def enter_read(self, source: SourceTensor, leaves: Sequence[bytes]) -> None:
        """Enter the leaf digests of `source`, which was read by other code, and count the read.

        Raises:
            StaleHintError: The bytes that were read do not have the digest that a hint gave.
        """
        nbytes = source.spec.nbytes
        self._count(source, nbytes)
        _enter(source, combine(nbytes, leaves), leaves if nbytes > LEAF_BYTES else ())

    def settle(self, mark: int | None = None) -> None:
        """Wait for reads in progress and set the digests of their source tensors.

        With `mark`, an earlier value of `begun`, this waits only for the reads that had been
        started by then. The first error of these reads is raised.

        Raises:
            StaleHintError: The bytes that were read do not have the digest that a hint gave.
        """
        count = (self.begun if mark is None else mark) - self._settled
        if count <= 0:
            return
        began = time.perf_counter()
        # All of them, whatever happened to one, and before one is let go: until then the pool
        # writes into the memory, and `abandon` must find what is still under way.
        for _, future, _ in islice(self._pending, count):
            future.exception()
        settled = [self._pending.popleft() for _ in range(count)]
        self._settled += count
        self.counters.read_seconds += time.perf_counter() - began
        failed = next((each for _, future, _ in settled if (each := future.exception())), None)
        # What arrived has arrived, whatever became of another: a load may go on without that one.
        for source, future, leaves in settled:
            if future.exception() is None:
                _enter(source, future.result(), leaves or ())
        if failed is not None:
            raise failed

    def digest(self, data: Buffer) -> str:
        """Return the digest of `data`, and add the size of `data` and the time to the counters."""
        return self._counted(memoryview(data).nbytes, lambda: digest(data, self.algorithm))

    def digest_of(self, tensor: torch.Tensor, leaves: list[bytes] | None = None) -> str:
        """Return the digest of a gap-free tensor on any device, and count its size and the time.

        If the list `leaves` is given, the leaf digests are added to it, unless the tensor is a
        single leaf.
        """
        return self._counted(tensor.nbytes, lambda: digest_of(tensor, self.algorithm, leaves))

    def _counted(self, nbytes: int, hash_: Callable[[], str]) -> str:
        began = time.perf_counter()
        value = hash_()
        self.counters.bytes_hashed += nbytes
        self.counters.hash_seconds += time.perf_counter() - began
        return value

    def abandon(self) -> None:
        """Wait for every read in progress and discard the results.

        The memory that was read into may then be freed.
        """
        while self._pending:
            self._pending.popleft()[1].exception()
        wait(self._leaf_reads)
        self._settled = self.begun


def _wanted_leaves(source: SourceTensor) -> list[bytes] | None:
    """Return a list for the leaf digests of a tensor that has more than one leaf.

    Others may have some of them, by itself or in a larger tensor that it becomes a part of.
    """
    return [] if source.spec.nbytes > LEAF_BYTES else None


def _place_of_columns(spec: TensorSpec) -> tuple[int, int]:
    """Return the place by which the digest of columns is remembered.

    Below zero, no range of the file has it, and no other columns of the same tensor.
    """
    return -1 - spec.start, spec.nbytes


def _enter(source: SourceTensor, value: str, leaves: Sequence[bytes]) -> None:
    if source.digest is not None and source.digest != value:
        raise_stale(source, value, "it", source.digest)
    spec = source.spec
    found = digests_by_place(spec.start, spec.nbytes, leaves) if leaves else {}
    if source.columns is not None:  # whose leaves have no places in the file
        source.file.hashed[_place_of_columns(spec)] = value
    # What was known is remembered already, but perhaps not leaf by leaf.
    elif source.digest is None or (found and not source.leaves):
        source.file.hashed |= found or {(spec.start, spec.nbytes): value}
    source.digest = value
    if found:
        source.leaves = tuple(found[place] for place in leaf_places(spec.start, spec.nbytes))


def raise_stale(source: SourceTensor, value: str, what: str, remembered: str) -> NoReturn:
    """Raise StaleHintError for bytes of `source` that do not have the digest of a hint.

    `what` names the part of the tensor that differs, `value` is the digest of its bytes, and
    `remembered` is the digest that the hint gave.
    """
    raise StaleHintError(
        f"{source.place}: {what} hashes to {value}, remembered as {remembered}; "
        "something wrote to the file without changing its times",
        path=str(source.file.path),
        tensor=source.spec.name,
    )
