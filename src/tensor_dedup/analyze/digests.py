"""Digests of the tensors of many files: each byte is read once, through buffers of fixed size.

A file that several checkpoints use, by links or by equal paths, is read once. A file whose digests
are remembered is not read at all.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import time_ns
from types import MappingProxyType

from tensor_dedup.digest import StreamDigest, digests_by_place, leaf_places
from tensor_dedup.errors import ChangedFileError, CheckpointNotFoundError
from tensor_dedup.formats.links import ANYWHERE, LinkBoundary
from tensor_dedup.loader.checkpoint_io.hints import FileIdentity, HintIndex
from tensor_dedup.store.hashing import ProgressListener
from tensor_dedup.types import TensorSpec

# Long beside the cost of a system call, short enough that a thread's buffer stays near its cache.
_PIECE_BYTES = 4 << 20
# What lies between the tensors of a zip or of an aligned format: reading over it costs less than a
# system call more.
_GAP_BYTES = 4096
# Enough open files that the threads never wait for the next one, far from the limit of descriptors.
_OPEN_FILES = 16

Place = tuple[int, int]  # where a tensor begins in its file, and its size, in bytes


@dataclass
class Digests:
    """The digests of all requested tensors, and how many bytes were read and hashed.

    `by_file` maps each file to a dict from place to digest. A place is an offset and a size in
    bytes. Each tensor has an entry. Leaves (2 MiB) of larger tensors have entries, too, if their
    digests are known.
    """

    by_file: dict[Path, dict[Place, str]] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_hashed: int = 0


def read_digests(
    files: Mapping[Path, Sequence[TensorSpec]],
    algorithm: str,
    hints: HintIndex | None,
    progress: ProgressListener,
    links: Mapping[Path, LinkBoundary] = MappingProxyType({}),
) -> Digests:
    """Hash the tensors of each file in `files`, on all CPUs that this process may use.

    Files whose digests `hints` remembers are not read; new digests are added to `hints`. `links`
    maps a file to the folders into which symbolic links on its path may lead. On the path
    of any other file, they may lead anywhere. Each thread takes 4 MiB of memory.

    Raises:
        ChangedFileError: A file changed while it was read.
        CheckpointFilesError: A link now leads out of a checkpoint.
        CheckpointNotFoundError: A file no longer exists.
    """
    digests = Digests()
    read: dict[tuple[int, int], Path] = {}
    work = _Work(progress, sum(spec.nbytes for specs in files.values() for spec in specs))
    with ExitStack() as undo:
        # Not the digest's pool: each thread reads into a buffer, which goes with the pool.
        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "tensor-dedup-analyze")
        undo.callback(pool.shutdown, cancel_futures=True)
        waiting: deque[_File] = deque()
        undo.callback(_close, waiting)
        for path, specs in files.items():
            file = _File(path, algorithm, hints, work)
            waiting.append(file)
            file.check(links.get(path, ANYWHERE))
            twin = read.setdefault((file.before.device, file.before.inode), path)
            file.begin(pool, specs, twin)
            if len(waiting) >= _OPEN_FILES:
                _end(waiting[0], digests)
                waiting.popleft().close()
        while waiting:
            _end(waiting[0], digests)
            waiting.popleft().close()
    return digests


def _close(files: "Iterable[_File]") -> None:
    for file in files:
        file.close()


def _end(file: "_File", digests: Digests) -> None:
    known = digests.by_file.get(file.twin, {})
    digests.by_file[file.path] = file.finish(known)
    digests.bytes_read += file.bytes_read
    digests.bytes_hashed += file.bytes_read


class _Work:
    """Tells a listener what is hashed: what turns out to be known is no work, and has no rate."""

    def __init__(self, listener: ProgressListener, total_bytes: int) -> None:
        self._listener, self._total = listener, total_bytes
        self.advance = listener.advance
        listener.start(total_bytes)

    def skip(self, nbytes: int) -> None:
        """So many bytes need no hashing."""
        if nbytes:
            self._total -= nbytes
            self._listener.start(self._total)


class _File:
    """One open file: what is hashed of it, and what it was when that began. One descriptor."""

    def __init__(
        self, path: Path, algorithm: str, hints: HintIndex | None, progress: "_Work"
    ) -> None:
        self.path = self.twin = path
        self.bytes_read = 0
        self._algorithm, self._hints, self._progress = algorithm, hints, progress
        self._fd = _open(path)
        self.before = FileIdentity.of(self._fd)
        self._began_ns = time_ns()
        self._known: dict[Place, str] = {}
        self._runs: list[Future[dict[Place, str]]] = []
        self._wanted: list[TensorSpec] = []

    def check(self, links: LinkBoundary) -> None:
        """Check that the open file is where links may lead."""
        links.check_open(self.path, self._fd)

    def begin(self, pool: ThreadPoolExecutor, specs: Sequence[TensorSpec], twin: Path) -> None:
        """Start hashing what neither the hints nor the same file's other path will answer."""
        self._wanted = list(specs)
        self.twin = twin
        if twin != self.path:
            self._progress.skip(sum(spec.nbytes for spec in specs))
            return
        if self._hints is not None:
            self._known = self._hints.lookup(self._fd, self._algorithm)
        missing = [spec for spec in specs if (spec.start, spec.nbytes) not in self._known]
        self._progress.skip(sum(s.nbytes for s in specs) - sum(s.nbytes for s in missing))
        self.bytes_read = sum(spec.nbytes for spec in missing)
        self._runs = [pool.submit(self._hash, run) for run in runs(missing)]

    def finish(self, twin: Mapping[Place, str]) -> dict[Place, str]:
        """Wait, check that the file is still the same, remember; the digests by place."""
        fresh: dict[Place, str] = {}
        for run in self._runs:
            fresh.update(run.result())
        if FileIdentity.of(self._fd) != self.before:
            raise _changed(self.path, "it was written while it was read")
        if self._hints is not None and fresh:
            self._hints.record(self._fd, self.before, self._began_ns, self._algorithm, fresh)
        known = {**twin, **self._known, **fresh}
        found = {(s.start, s.nbytes): known[s.start, s.nbytes] for s in self._wanted}
        places = (place for s in self._wanted for place in leaf_places(s.start, s.nbytes))
        return found | {place: known[place] for place in places if place in known}

    def close(self) -> None:
        for run in self._runs:
            run.cancel()
        for run in self._runs:
            # The number may be reused at once: no thread may still read from it.
            if not run.cancelled():
                run.exception()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _hash(self, run: Sequence[TensorSpec]) -> dict[Place, str]:
        digests: dict[Place, str] = {}
        if run[-1].start + run[-1].nbytes - run[0].start <= _PIECE_BYTES:
            view = self._read(run[0].start, run[-1].start + run[-1].nbytes - run[0].start)
            for spec in run:
                at = spec.start - run[0].start
                digests |= self._digests(spec, [view[at : at + spec.nbytes]])
            self._progress.advance(sum(spec.nbytes for spec in run))
            return digests
        (spec,) = run
        return self._digests(spec, self._pieces(spec))

    def _pieces(self, spec: TensorSpec) -> Iterator[memoryview]:
        for start in range(spec.start, spec.start + spec.nbytes, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, spec.start + spec.nbytes)
            yield self._read(start, stop - start)
            self._progress.advance(stop - start)

    def _digests(self, spec: TensorSpec, pieces: Iterable[memoryview]) -> dict[Place, str]:
        """The digest of a tensor, given in pieces, and those of its leaves."""
        stream = StreamDigest(self._algorithm, spec.nbytes)
        for piece in pieces:
            stream.update(piece)
        if self._algorithm == "blake3":
            return digests_by_place(spec.start, spec.nbytes, stream.leaves())
        return {(spec.start, spec.nbytes): stream.hexdigest()}

    def _read(self, start: int, nbytes: int) -> memoryview:
        """So many bytes of the file, in this thread's buffer: valid until its next read."""
        view, done = _buffer()[:nbytes], 0
        while done < nbytes:
            count = os.preadv(self._fd, [view[done:]], start + done)
            if count == 0:
                raise _changed(self.path, f"it ends at {start + done}")
            done += count
        return view


def runs(specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Group neighbouring tensors, so that each group can be read at once into one buffer.

    A tensor that is larger than the buffer is a group of its own. `specs` must be ordered by
    offset.
    """
    run: list[TensorSpec] = []
    for spec in specs:
        gap = spec.start - run[-1].start - run[-1].nbytes if run else 0
        if run and gap <= _GAP_BYTES and spec.start + spec.nbytes - run[0].start <= _PIECE_BYTES:
            run.append(spec)
            continue
        if run:
            yield run
        run = [spec]
    if run:
        yield run


_local = threading.local()


def _buffer() -> memoryview:
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_PIECE_BYTES))
    buffer: memoryview = _local.buffer
    return buffer


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointNotFoundError(
            f"{path}: {error.strerror}; check the path and its permissions", path=str(path)
        ) from error


def _changed(path: Path, how: str) -> ChangedFileError:
    return ChangedFileError(
        f"{path}: {how}; analyze it again when nobody writes it", path=str(path)
    )
