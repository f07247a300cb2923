"""Source tensors: the files of a checkpoint, what is known about their bytes, and reading them.

A tensor whose digest a hint gives is read only if something in its layer differs. Everything that
is read is hashed in the memory from which it is then used, so the bytes cannot change in between.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from tensor_dedup.digest import (
    LEAF_BYTES,
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
from tensor_dedup.loader.checkpoint_io.hints import FileIdentity, HintIndex
from tensor_dedup.loader.residents.resident import digest_of

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    import torch
    from typing_extensions import Buffer

    from tensor_dedup.formats.pytorch.geometry import PickledTensor
    from tensor_dedup.formats.weights import Header
    from tensor_dedup.types import TensorSpec

# One preadv asks for at most this much: the kernel cuts it at 2 GiB anyway.
_PIECE_BYTES = 64 << 20


# (offset in the tensor, size) -> bytes
Read: TypeAlias = Callable[[int, int], bytes]


Reread: TypeAlias = Callable[[], AbstractContextManager[Read]]


class StaleHintError(ChangedFileError):
    """A hint gave another digest than the bytes that were read; load again without hints."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor inside a source.

    `start` is in bytes from the first byte of the source; shape and stride are in elements of
    `dtype`. `lazy` tells that the tensor is conjugated or negated when it is read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    lazy: bool


def placed(member: PickledTensor, spec: TensorSpec) -> Placed | None:
    """Return how a member lies in its source, or None if it is the whole source in order."""
    start = member.start - spec.start if member.nbytes else 0
    geometry = (member.dtype, member.shape, member.nbytes)
    if member.plain and not start and geometry == (spec.dtype, spec.shape, spec.nbytes):
        return None
    return Placed(member.name, member.dtype, member.shape, member.stride, start, member.lazy)


@dataclass(eq=False, slots=True)
class SourceTensor:
    """One tensor of an open checkpoint file.

    `digest` is None until a hint or a read gives it; `hinted` tells that it came from a hint.
    `leaves` are the digests that its leaves have by themselves, or empty: they are remembered of
    tensors of more than one.
    """

    file: SourceFile
    spec: TensorSpec
    digest: str | None = None
    hinted: bool = False
    leaves: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The file and the tensor's name, for messages."""
        return f"{self.file.path}: {self.spec.name}"

    def identity(self) -> tuple[object, ...]:
        """Return the part of a recipe that stands for this tensor.

        Raises:
            IntegrityError: The digest is not known yet.
        """
        if self.digest is None:  # two unknown tensors must never get one name
            raise IntegrityError(f"{self.place} was not hashed before its recipe was asked for")
        return ("source", self.digest, self.spec.dtype, self.spec.shape)


class SourceFile:
    """An open checkpoint file: its header, its identity when it was opened, its digests by range.

    It owns one descriptor until `close`.

    Raises:
        FormatError: The header is not valid.
        OSError: The file cannot be opened.
    """

    def __init__(
        self, path: Path, hints: HintIndex | None, algorithm: str, *, trust: bool = True
    ) -> None:
        """Open the file; with `trust`, take digests from the hints, which are always written."""
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
            self.tensors = {spec.name: self._tensor(spec, known) for spec in self.header.tensors}
        except BaseException:
            self.close()
            raise

    def named(self) -> Iterator[tuple[str, SourceTensor, Placed | None]]:
        """Yield every tensor of the file under each of its names, in the order of names.

        In a file of torch.save several tensors may lie in one source; each then says where.
        """
        members = members_in(self.header)
        for name in sorted(self.tensors.keys() | members.keys()):
            member = members.get(name)
            source = self.tensors[name if member is None else member.held_by]
            yield name, source, None if member is None else placed(member, source.spec)

    def _tensor(self, spec: TensorSpec, known: Mapping[tuple[int, int], str]) -> SourceTensor:
        digest = known.get((spec.start, spec.nbytes))
        places = leaf_places(spec.start, spec.nbytes)
        leaves = tuple(known[place] for place in places if place in known)
        if digest is None or len(leaves) < len(places):
            leaves = ()
        return SourceTensor(self, spec, digest, digest is not None, leaves)

    def read_into(self, spec: TensorSpec, piece: memoryview, offset: int = 0) -> bytes | None:
        """Fill the writable `piece` with the tensor's bytes from `offset` on. Safe from any thread.

        Returns None; a file backed by a store may return the digests of the whole leaves that the
        bytes were compared with instead.

        Raises:
            FormatError: The file was truncated.
            UnreadableFileError: Reading the file failed.
        """
        done = 0
        while done < piece.nbytes:
            with piece[done : done + _PIECE_BYTES] as part:
                count = self._read(part, spec, offset + done)
            if count == 0:
                raise FormatError(
                    f"{self.path}: tensor {spec.name!r} ends after {offset + done} of "
                    f"{spec.nbytes} bytes; the file was truncated while it was open, fetch it "
                    "again",
                    path=str(self.path),
                    tensor=spec.name,
                )
            done += count
        return None

    def _read(self, part: memoryview, spec: TensorSpec, offset: int) -> int:
        try:
            return os.preadv(self._fd, [part], spec.start + offset)
        except OSError as error:
            raise UnreadableFileError(
                f"{self.path}: tensor {spec.name!r} cannot be read at byte {offset} of "
                f"{spec.nbytes} ({error.strerror}); look at the disk or share it is on",
                path=str(self.path),
                tensor=spec.name,
                errno=error.errno,
            ) from error

    def read_range(self, start: int, nbytes: int) -> bytes:
        """Return up to `nbytes` bytes from file offset `start`."""
        return os.pread(self._fd, nbytes, start)

    def reread(self, _: TensorSpec) -> Reread | None:
        """Return a way to read a tensor after `close`, or None to read it by path if unchanged."""
        return None

    def check_unchanged(self) -> None:
        """Check that the file is as it was when it was opened.

        Raises:
            ChangedFileError: The file has changed.
        """
        if FileIdentity.of(self._fd) != self.identity:
            raise ChangedFileError(
                f"{self.path} changed while it was being loaded; load it again",
                path=str(self.path),
            )

    def remember(self) -> None:
        """Record what was hashed as hints, which refuse what cannot be trusted later."""
        if self._hints is not None and self.hashed:
            self._hints.record(
                self._fd, self.identity, self._began_ns, self._algorithm, self.hashed
            )

    def forget(self) -> None:
        """Delete every hint of this file."""
        if self._hints is not None:
            self._hints.forget(self._fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd != -1:
            os.close(fd)


@dataclass(slots=True)
class ReadCounters:
    """The bytes that one load fetched and hashed, and the wall-clock seconds that it waited.

    `read_seconds` counts source tensors, which are hashed as they arrive; `hash_seconds` counts the
    digests of what was computed from them.
    """

    bytes_read: int = 0
    bytes_hashed: int = 0
    read_seconds: float = 0.0
    hash_seconds: float = 0.0


@dataclass(slots=True)
class SourceReader:
    """A reader of source tensors that hashes them in the caller's memory. For one thread.

    The hash pool also does the reading: each leaf is hashed while it is still in a CPU cache, and
    several reads are in progress at once.
    """

    algorithm: str
    counters: ReadCounters = field(default_factory=ReadCounters)
    begun: int = 0  # how many were started with `hashed`
    _settled: int = 0
    _pending: deque[tuple[SourceTensor, Future[str], list[bytes] | None]] = field(
        default_factory=deque
    )
    _leaf_reads: list[Future[str]] = field(default_factory=list)

    def fill(self, source: SourceTensor, memory: torch.Tensor, *, hashed: bool) -> None:
        """Start reading `source` into `memory` (a flat uint8 CPU tensor of exactly its size).

        Call `settle` before the bytes or the digest are used and before `memory` is written again.
        Without `hashed` the tensor is read at once and not hashed.
        """
        began = time.perf_counter()
        view, spec, file = memory.numpy().data, source.spec, source.file
        self.counters.bytes_read += spec.nbytes
        if hashed:
            self.counters.bytes_hashed += spec.nbytes
            leaves = _wanted_leaves(source)
            future = submit(view, self.algorithm, partial(file.read_into, spec), leaves)
            self._pending.append((source, future, leaves))
            self.begun += 1
        else:
            file.read_into(spec, view)
        self.counters.read_seconds += time.perf_counter() - began

    def read_pieces(self, source: SourceTensor, write: Callable[[memoryview, int], None]) -> str:
        """Read a tensor in pieces, pass each to `write(piece, offset)`; return its BLAKE3 digest.

        The whole tensor exists only where `write` puts it. Threads of the hash pool call `write`
        and hash the same piece. Returns when all reads in progress have finished, and raises what
        `settle` raises.
        """
        spec, file = source.spec, source.file

        def pass_on(piece: memoryview, offset: int) -> bytes | None:
            compared = file.read_into(spec, piece, offset)
            write(piece, offset)
            return compared

        self.counters.bytes_read += spec.nbytes
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
        """Read those leaves of a tensor whose digests are known, as `read_pieces` reads a whole.

        Raises:
            StaleHintError: A leaf has another digest.
        """
        spec, file = source.spec, source.file
        began = time.perf_counter()
        reads = []
        for number in numbers:
            start = number * LEAF_BYTES
            size = min(LEAF_BYTES, spec.nbytes - start)

            def pass_on(piece: memoryview, offset: int, start: int = start) -> bytes | None:
                compared = file.read_into(spec, piece, start + offset)
                write(piece, start + offset)
                return compared

            self.counters.bytes_read += size
            self.counters.bytes_hashed += size
            reads.append((number, stream(size, pass_on)))
        self._leaf_reads = [future for _, future in reads]
        wait(self._leaf_reads)  # all of them, whatever happened to one
        self._leaf_reads.clear()
        self.counters.read_seconds += time.perf_counter() - began
        for number, future in reads:
            if future.result() != source.leaves[number]:
                raise_stale(source, future.result(), f"leaf {number}", source.leaves[number])

    def settle(self, mark: int | None = None) -> None:
        """Wait for all reads in progress, or for the first `mark` begun, and enter their digests.

        Errors of reading are raised here.

        Raises:
            StaleHintError: A hint gave another digest.
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
        """Return the digest of bytes that were computed here, and count them."""
        return self._counted(memoryview(data).nbytes, lambda: digest(data, self.algorithm))

    def digest_of(self, tensor: torch.Tensor) -> str:
        """Return the digest of a gap-free tensor that was computed on any device, and count it."""
        return self._counted(tensor.nbytes, lambda: digest_of(tensor, self.algorithm))

    def _counted(self, nbytes: int, hash_: Callable[[], str]) -> str:
        began = time.perf_counter()
        value = hash_()
        self.counters.bytes_hashed += nbytes
        self.counters.hash_seconds += time.perf_counter() - began
        return value

    def abandon(self) -> None:
        """Wait for every read in progress and discard it, so that the memory may be freed."""
        while self._pending:
            self._pending.popleft()[1].exception()
        wait(self._leaf_reads)
        self._settled = self.begun


def _wanted_leaves(source: SourceTensor) -> list[bytes] | None:
    """Return a list for the leaf digests of a tensor that has more than one leaf.

    Others may have some of them, by itself or in a larger tensor that it becomes a part of.
    """
    return [] if source.spec.nbytes > LEAF_BYTES else None


def _enter(source: SourceTensor, value: str, leaves: Sequence[bytes]) -> None:
    if source.digest is not None and source.digest != value:
        raise_stale(source, value, "it", source.digest)
    spec = source.spec
    found = digests_by_place(spec.start, spec.nbytes, leaves) if leaves else {}
    # What was known is remembered already, but perhaps not leaf by leaf.
    if source.digest is None or (found and not source.leaves):
        source.file.hashed |= found or {(spec.start, spec.nbytes): value}
    source.digest = value
    if found:
        source.leaves = tuple(found[place] for place in leaf_places(spec.start, spec.nbytes))


def raise_stale(source: SourceTensor, value: str, what: str, remembered: str) -> NoReturn:
    """Raise StaleHintError: a tensor, or `what` of it, has another digest than was remembered."""
    raise StaleHintError(
        f"{source.place}: {what} hashes to {value}, remembered as {remembered}; "
        "something wrote to the file without changing its times",
        path=str(source.file.path),
        tensor=source.spec.name,
    )
