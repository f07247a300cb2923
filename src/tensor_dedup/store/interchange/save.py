"""Writing of a state dict as a new folder of numbered data files with an index. Needs torch.

The folder appears atomically, complete and durable, or not at all. The bytes go through a few
reused buffers: the calling thread fills them, and other threads hash them and write them with
O_DIRECT. The buffers take at most `num_buffers` times `buffer_size_mb` MiB of memory.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.formats.serverless.artifact import (
    CANONICAL,
    HASH_LEAF_BYTES,
    TreeHash,
    Verifier,
    describe,
    index_multihash,
    verification_name,
)
from tensor_dedup.formats.serverless.storage_graph import StorageGraph
from tensor_dedup.formats.serverless.tensor_index import (
    ALIGNMENT,
    Fields,
    IndexEntry,
    encode_index,
    encode_index_cbor,
)
from tensor_dedup.store.buffers import PAGE, allocate
from tensor_dedup.store.direct import DIRECT_BYTES, DirectFile
from tensor_dedup.store.errors import ExportTargetError, os_errors
from tensor_dedup.store.files import Files, Handle, RealFiles
from tensor_dedup.store.folders import make_folders
from tensor_dedup.store.init import workers
from tensor_dedup.store.interchange.storages import HeldStorages, copy_into, hold

DATA_NAME = "tensor.data_"
_LEAST_BYTES = 1 << 20
# More memory would be slower: to touch it for the first time costs more than to use some again.
_MOST_BYTES: Final = 8 << 20
# So many threads wait for the disk.
_WRITERS: Final = 3
MAX_FILE_BYTES: Final = 10_000_000_000
_VIEW_STEP = 8 << 20


@dataclass(frozen=True, slots=True)
class StreamingConfig:
    """The buffers and threads of a save. The defaults are tensorcast's.

    A save uses at most `num_buffers` buffers, each of at most `buffer_size_mb` MiB and never more
    than 8 MiB. With `enable_async_write`, other threads write and hash.

    Raises:
        ConfigError: A number is not a positive integer.
    """

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
        """Return a configuration made from `given`, a mapping of its fields.

        A StreamingConfig is returned as it is. None gives the defaults.

        Raises:
            ConfigError: A key is unknown or a value is invalid.
        """
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
        """The maximum size of one buffer in bytes."""
        return self.buffer_size_mb << 20


class DataFiles:
    """A writer of the data files `tensor.data_0`, `tensor.data_1`, ... as one range of bytes.

    Each file has at most `limit` bytes, rounded down to whole pages.

    Raises:
        ConfigError: `limit` is smaller than a page.
    """

    def __init__(self, files: Files, folder: Path, limit: int) -> None:
        if limit < PAGE:
            raise ConfigError(f"files of {limit} bytes are too small; give {PAGE} or more")
        self._files = files
        self._folder = folder
        # Whole pages, so that a reader past the page cache can read any file from its beginning.
        self._limit = limit // PAGE * PAGE
        self._opening = threading.Lock()
        self._handles: list[Handle] = []
        self._direct: list[DirectFile] = []

    def write(self, view: memoryview, start: int) -> None:
        """Write the bytes in `view` at offset `start` of the range. Safe from any thread.

        Files are created as needed.
        """
        done = 0
        while done < view.nbytes:
            number, at = divmod(start + done, self._limit)
            with view[done : done + self._limit - at] as part:
                self._open(number)
                if part.nbytes >= DIRECT_BYTES:
                    self._direct[number].write(part, at)
                else:
                    self._files.pwrite(self._handles[number], part, at)
                done += part.nbytes

    def _open(self, number: int) -> None:
        with self._opening:
            while len(self._handles) <= number:
                path = self._folder / f"{DATA_NAME}{len(self._handles)}"
                self._handles.append(self._files.open(path, "create"))
                self._direct.append(DirectFile(self._files, self._handles[-1]))

    def sync(self) -> None:
        """Make all bytes durable. No thread may be writing.

        If nothing was written, an empty first file is created.
        """
        self._open(0)
        for handle, direct in zip(self._handles, self._direct, strict=True):
            direct.finish()
            self._files.fsync(handle)

    def close(self) -> None:
        """Close all files. No thread may be writing. A second call has no effect."""
        for direct in self._direct:
            direct.close()
        while self._handles:
            self._files.close(self._handles.pop())


class DataHashes:
    """The checksums of the data, without its final padding, computed while it is written.

    `tree` is that of the descriptor, and `verifier` that of the verification file; None leaves one
    out.
    """

    def __init__(self, total: int, *, descriptor: bool, verification: bool) -> None:
        self._total = total
        self.tree = TreeHash() if descriptor else None
        self.verifier = Verifier(total) if verification else None

    def work(self, view: memoryview, start: int) -> Iterator[tuple[bool, Callable[[], None]]]:
        """Yield the jobs that hash `view`, a buffer that begins at offset `start` of the data.

        Each job is a pair (ordered, function). If `ordered` is False, any thread may run the
        function. Otherwise, one thread must run all such functions, in the order of the buffers.
        """
        counted = view[: max(0, self._total - start)]
        if self.verifier is not None:
            yield True, partial(self.verifier.update, counted)
        if self.tree is None:
            return
        last = start + counted.nbytes == self._total
        if start % HASH_LEAF_BYTES or (counted.nbytes % HASH_LEAF_BYTES and not last):
            yield True, partial(self.tree.update, counted)
            return
        for at in range(0, counted.nbytes, HASH_LEAF_BYTES):
            leaf = counted[at : at + HASH_LEAF_BYTES]
            yield False, partial(self.tree.leaf, (start + at) // HASH_LEAF_BYTES, leaf)


class Stream:
    """A byte stream that one thread fills while background threads write and hash it.

    Fill the memory that `room` returns, then call `commit` with the number of bytes. `finish` waits
    until all bytes are written. Always call `close`, which stops the threads. `room`, `commit` and
    `finish` raise the errors of the background threads.
    """

    def __init__(
        self,
        data: DataFiles,
        hashes: DataHashes,
        config: StreamingConfig,
        expected_bytes: int,
    ) -> None:
        self._data = data
        self._hashes = hashes
        self._size = _buffer_bytes(expected_bytes, config)
        self._unmade = config.num_buffers
        self._current: memoryview | None = None
        self._filled = 0
        self._start = 0
        self._busy: deque[tuple[memoryview, list[Future[None]]]] = deque()
        self._pools: list[ThreadPoolExecutor] = []
        if config.enable_async_write:
            sizes = {"write": _WRITERS, "hash": workers(), "chain": 1}
            # Three: hashing waits for no disk, and one thread hashes what has an order.
            self._pools = [
                ThreadPoolExecutor(size, f"tensor-dedup-{name}") for name, size in sizes.items()
            ]

    def room(self) -> memoryview:
        """Return at least one byte of free buffer memory to fill.

        If all buffers are in use, wait until one is free.
        """
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
        """Append the first `nbytes` of the memory returned by `room` to the stream."""
        self._filled += nbytes
        if self._filled == self._size:
            self._send()

    def pad(self, nbytes: int) -> None:
        """Append `nbytes` zero bytes."""
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
        write = partial(self._data.write, view, start)
        hashing = self._hashes.work(view, start)
        futures: list[Future[None]] = []
        if self._pools:
            writers, hashers, chain = self._pools
            futures.append(writers.submit(write))
            futures += ((chain if ordered else hashers).submit(work) for ordered, work in hashing)
        else:
            write()
            for _, work in hashing:
                work()
        self._busy.append((buffer, futures))

    def finish(self) -> None:
        """Wait until all bytes are written, durable and hashed."""
        self._send()
        for _, work in self._busy:
            for future in work:
                future.result()
        self._data.sync()

    def close(self) -> None:
        """Stop the threads and close the files."""
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
        self._data.close()


def _buffer_bytes(expected: int, config: StreamingConfig) -> int:
    # All buffers together hold at most half of it, or nothing would be written meanwhile.
    share = max(_LEAST_BYTES, expected // (2 * config.num_buffers))
    size = min(config.buffer_bytes, _MOST_BYTES, share, max(expected, 1))
    # Whole leaves, so that threads can hash what is in different buffers.
    step = HASH_LEAF_BYTES if size > HASH_LEAF_BYTES else PAGE
    return size // step * step if size >= step else step


def save_dict(
    state_dict: Mapping[str, torch.Tensor],
    disk_path: str | PathLike[str],
    streaming_config: Mapping[str, Any] | StreamingConfig | None = None,
    *,
    views: Mapping[str, Collection[str]] | None = None,
    fields: Fields = 6,
    max_file_bytes: int = MAX_FILE_BYTES,
    verification: bool = True,
    descriptor: bool = True,
    files: Files | None = None,
) -> dict[str, Any]:
    """Write tensors to a new folder, each storage once; return the descriptor as a dict.

    The arguments are:

    - `disk_path` is a folder that is empty or does not exist. It appears when everything is
      durable, or not at all.
    - `streaming_config` has the fields of StreamingConfig and bounds the memory that is used.
    - `views` maps ids to selections of tensor names. Each selection gets its own verification file,
      for `load_dict(view=...)`.
    - `fields` is the number of fields in an index entry: 6, or 5 for ServerlessLLM, which does not
      support storage offsets.
    - `max_file_bytes` limits the size of each data file.
    - `files` replaces the file system in tests.

    The descriptor has tensorcast's fields. It also has `storage_entries` and `tensor_aliases`, from
    which `rebuild_index` restores `tensor_index.json`.

    If `verification` is False, `verification.json` is not written. If `descriptor` is False,
    `artifact_descriptor.json` is not written, and the returned descriptor has only
    `storage_entries` and `tensor_aliases`. With both False nothing is hashed, so `load_dict` cannot
    verify the data.

    The tensors must not be modified during the call. Use one thread for each folder.

    Raises:
        ConfigError: An argument is invalid.
        UnsupportedError: A tensor has no dense storage, or 5 fields cannot describe it.
        ExportTargetError: The target exists and is not an empty folder.
        StoreError: The disk failed.
    """
    config = StreamingConfig.of(streaming_config)
    held = hold(state_dict)
    entries = held.graph.index_entries()
    _check(held.graph, entries, fields, views or {})
    if views and not verification:
        raise ConfigError("a view is a verification file; leave out views, or verification=False")
    target, disk = Path(disk_path).absolute(), files or RealFiles()
    with os_errors(target), new_folder(disk, target) as folder:
        data = DataFiles(disk, folder, max_file_bytes)
        total = max((e.offset + e.size for e in entries), default=0)
        hashes = DataHashes(total, descriptor=descriptor, verification=verification)
        _write_data(held, Stream(data, hashes, config, total))
        index = encode_index(entries, fields)
        blobs = {
            "tensor_index.json": index,
            "tensor_index.cbor": encode_index_cbor(entries, fields),
        }
        described = held.graph.to_json()
        if hashes.tree is not None:
            found = describe(index_multihash(index), hashes.tree.multihash(), total)
            described = found | described
            blobs["artifact_descriptor.json"] = json.dumps(described, indent=2).encode()
        if hashes.verifier is not None:
            blobs[verification_name(CANONICAL)] = hashes.verifier.result().encode()
        for view, names in (views or {}).items():
            blobs[verification_name(view)] = _verify_view(held, view, names)
        for name, blob in blobs.items():
            write_file(disk, folder / name, blob)
    return described


def _check(
    graph: StorageGraph,
    entries: Collection[IndexEntry],
    fields: Fields,
    views: Mapping[str, Collection[str]],
) -> None:
    for entry in entries:
        if fields == 5 and entry.storage_offset:
            raise UnsupportedError(
                f"{entry.name!r} begins {entry.storage_offset} elements into its storage, which 5 "
                "fields cannot say; save 6 fields, or a copy of the tensor",
                tensor=entry.name,
            )
    known = {alias.name for alias in graph.tensor_aliases}
    for view, names in views.items():
        missing = set(names) - known
        if missing or view == CANONICAL:
            what = f"has no tensor {min(missing)!r}" if missing else "needs a name"
            raise ConfigError(f"the view {view!r} {what}; name tensors of the state dict")
    if len({verification_name(view) for view in views}) != len(views):
        raise ConfigError(
            "two views would have one file name; use letters, digits, '.', '_' and '-' in their ids"
        )


def _write_data(held: HeldStorages, stream: Stream) -> None:
    try:
        for storage_id in held.graph.offsets():
            _copy(held.storages[storage_id], stream)
        stream.finish()
    finally:
        stream.close()


def _copy(storage: torch.Tensor, stream: Stream) -> None:
    done = 0
    while done < storage.nbytes:
        with stream.room() as room:
            copied = copy_into(room, storage, done)
        done += copied
        stream.commit(copied)
    stream.pad(-done % ALIGNMENT)


def _verify_view(held: HeldStorages, view: str, names: Collection[str]) -> bytes:
    """Return the verification file of a view, laid out as if it were the whole."""
    graph = held.graph.select(list(names))
    offsets = graph.offsets()
    total = max((offsets[e.storage_id] + e.nbytes for e in graph.storage_entries), default=0)
    verifier = Verifier(total, view)
    buffer, at = allocate(_VIEW_STEP), 0
    for storage_id, offset in offsets.items():
        verifier.update(memoryview(bytes(offset - at)))
        storage, at = held.storages[storage_id], offset
        while at < offset + storage.nbytes:
            copied = copy_into(buffer, storage, at - offset)
            verifier.update(buffer[:copied])
            at += copied
    return verifier.result().encode()


@contextmanager
def new_folder(files: Files, target: Path) -> Iterator[Path]:
    """Context manager: while it is active, a temporary folder exists; it provides the path.

    The caller fills the folder and makes the files in it durable. At the end, the folder is renamed
    to `target`. After an exception, the folder is removed instead. A crash leaves at most a hidden
    folder `.NAME.*.partial` beside `target`.

    Raises:
        ExportTargetError: `target` exists and is not an empty folder.
    """
    _check_free(files, target)
    make_folders(files, target.parent)
    partial = target.parent / f".{target.name}.{files.token()}.partial"
    files.mkdir(partial)
    try:
        yield partial
        files.sync_folder(partial)
        _check_free(files, target)
        files.rename(partial, target)
    except BaseException:
        with suppress(OSError):
            remove_folder(files, partial)
        raise
    files.sync_folder(target.parent)


def _check_free(files: Files, target: Path) -> None:
    status = files.status(target)
    if status is not None and (status.kind != "folder" or files.listdir(target)):
        raise ExportTargetError.at(target, "it is not an empty folder")


def remove_folder(files: Files, folder: Path) -> None:
    """Remove `folder` and the files in it. It must not contain folders."""
    for name in files.listdir(folder):
        files.unlink(folder / name)
    files.rmdir(folder)


def write_file(files: Files, path: Path, blob: bytes) -> None:
    """Write the new file `path` with the content `blob` and sync it.

    The file's name is not durable until the folder is synced, too.

    Raises:
        FileExistsError: The file exists already.
    """
    handle = files.open(path, "create")
    try:
        files.pwrite(handle, blob, 0)
        files.fsync(handle)
    finally:
        files.close(handle)
