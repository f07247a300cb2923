"""Bytes on their way to numbered files of bounded size, through a few buffers that are used again.

One thread fills buffers, another writes them, a third hashes them. Memory is that of the buffers:
`num_buffers` times `buffer_size_mb`, or less when there is less to write.
"""

import queue
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensor_dedup.errors import ConfigError
from tensor_dedup.store.buffers import PAGE, allocate
from tensor_dedup.store.files import Files, Handle

Sink = Callable[[memoryview], None]
DATA_NAME = "tensor.data_"
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StreamingConfig:
    """How a save streams; defaults as tensorcast has them. ConfigError for what cannot be."""

    num_buffers: int = 4
    buffer_size_mb: int = 256
    enable_async_write: bool = True

    def __post_init__(self) -> None:
        for name in ("num_buffers", "buffer_size_mb"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"streaming_config: {name} is {value!r}; give a number from 1")

    @classmethod
    def of(cls, given: "Mapping[str, Any] | StreamingConfig | None") -> "StreamingConfig":
        """From what a caller gave."""
        if isinstance(given, StreamingConfig):
            return given
        unknown = set(given or {}) - set(cls.__dataclass_fields__)
        if unknown:
            raise ConfigError(
                f"streaming_config: no setting {min(unknown)!r}; use one of "
                f"{', '.join(cls.__dataclass_fields__)}"
            )
        wanted = (given or {}).get("enable_async_write", True)
        if type(wanted) is not bool:
            raise ConfigError(
                f"streaming_config: enable_async_write is {wanted!r}; give True or False"
            )
        return cls(**(given or {}))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one buffer: whole pages."""
        return self.buffer_size_mb << 20


class DataFiles:
    """`tensor.data_0`, `tensor.data_1`, ... of at most `limit` bytes each, as one run of bytes."""

    def __init__(self, files: Files, folder: Path, limit: int) -> None:
        if limit < PAGE:
            raise ConfigError(f"files of {limit} bytes are too small; give {PAGE} or more")
        self._files = files
        self._folder = folder
        # Whole pages, so that a reader past the page cache can read any file from its beginning.
        self._limit = limit // PAGE * PAGE
        self._handles: list[Handle] = []

    def write(self, view: memoryview, start: int) -> None:
        """Write bytes at `start` of the run; in order."""
        done = 0
        while done < view.nbytes:
            number, at = divmod(start + done, self._limit)
            with view[done : done + self._limit - at] as part:
                self._files.pwrite(self._file(number), part, at)
                done += part.nbytes

    def _file(self, number: int) -> Handle:
        while len(self._handles) <= number:
            path = self._folder / f"{DATA_NAME}{len(self._handles)}"
            self._handles.append(self._files.open(path, "create"))
        return self._handles[number]

    def sync(self) -> None:
        """Make all bytes durable. There is at least one file."""
        self._file(0)
        for handle in self._handles:
            self._files.fsync(handle)

    def close(self) -> None:
        """Close all files."""
        while self._handles:
            self._files.close(self._handles.pop())


class Stream:
    """A run of bytes, written and hashed behind the back of who fills it. One thread fills.

    `room` gives the free rest of a buffer, `commit` says how much of it was filled. `finish` waits
    for the last byte; `close` ends the threads, whatever happened. Both raise what writing raised.
    """

    def __init__(
        self, data: DataFiles, hash_: Sink, config: StreamingConfig, expected_bytes: int
    ) -> None:
        self._data = data
        self._hash = hash_
        # All buffers together hold at most half of it, or nothing would be written meanwhile.
        share = max(_LEAST_BYTES, expected_bytes // (2 * config.num_buffers))
        wanted = min(share, max(expected_bytes, 1))
        self._size = min(config.buffer_bytes, -(-wanted // PAGE) * PAGE)
        self._unmade = config.num_buffers
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._current: memoryview | None = None
        self._filled = 0
        self._start = 0
        self._busy: deque[tuple[memoryview, list[Future[None]]]] = deque()
        self._pools: list[ThreadPoolExecutor] = []
        if config.enable_async_write:
            names = ("tensor-dedup-write", "tensor-dedup-hash")
            self._pools = [ThreadPoolExecutor(1, name) for name in names]

    def room(self) -> memoryview:
        """Free memory to be filled: at least one byte."""
        if self._current is None:
            self._current = self._buffer()
        return self._current[self._filled :]

    def _buffer(self) -> memoryview:
        if self._unmade:
            self._unmade -= 1
            return allocate(self._size)[: self._size]
        buffer, work = self._busy.popleft()
        for future in work:
            future.result()
        return buffer

    def commit(self, nbytes: int) -> None:
        """So many bytes of the room were filled."""
        self._filled += nbytes
        if self._filled == self._size:
            self._send()

    def pad(self, nbytes: int) -> None:
        """Add zeros."""
        while nbytes:
            with self.room()[:nbytes] as part:
                part[:] = bytes(part.nbytes)
                count = part.nbytes
            self.commit(count)
            nbytes -= count

    def _send(self) -> None:
        if self._current is None or not self._filled:
            return
        view, start = self._current[: self._filled], self._start
        buffer, self._current = self._current, None
        self._start += self._filled
        self._filled = 0
        if self._pools:
            writer, hasher = self._pools
            work = [writer.submit(self._data.write, view, start), hasher.submit(self._hash, view)]
        else:
            self._data.write(view, start)
            self._hash(view)
            work = []
        self._busy.append((buffer, work))

    def finish(self) -> None:
        """Wait until all bytes are written, and durable, and hashed."""
        self._send()
        for _, work in self._busy:
            for future in work:
                future.result()
        self._data.sync()

    def close(self) -> None:
        """End the threads and close the files."""
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
        self._data.close()
