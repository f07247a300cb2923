"""Count the bytes read from checkpoint files, whatever opens and reads them.

    with reads.counted(checkpoint / "model.safetensors") as seen:
        ...
    assert seen.data_bytes() == expected and not seen.twice()

Watched are the ways Python code has to read a file: `os`, `open` and `io`, `mmap`, safetensors,
torch and numpy. A file is known by device and inode, so links, copies of descriptors and files
that appear later under a watched path count too. A mapping counts as read in full, since page
faults are invisible. What native code reads with system calls of its own is not attributed, but
`rchar`, the kernel's count for the whole process, contains it: see `Reads.unseen`.
"""

import builtins
import io
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import numpy
import safetensors
import torch

# These ways do not pass through read(2), so `rchar` does not contain them.
MAPPED = frozenset({"mmap", "safe_open", "torch.load", "from_file"})


@dataclass(frozen=True)
class Read:
    """Bytes [start, stop) of `path`, read at once by `how`."""

    path: Path
    start: int
    stop: int
    how: str


@dataclass
class Reads:
    """What was read from `paths`; complete and constant once the `with` block has ended."""

    paths: tuple[Path, ...]
    all: list[Read] = field(default_factory=list)
    rchar: int = 0
    _known: dict[tuple[int, int], Path] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def bytes(self) -> int:
        """All bytes read, headers included, a byte read twice counted twice."""
        return sum(read.stop - read.start for read in self.all)

    def header_bytes(self) -> int:
        """Bytes read of safetensors headers (the eight bytes of the length included)."""
        return self.bytes() - self.data_bytes()

    def data_bytes(self) -> int:
        """Bytes read of tensor data."""
        return sum(max(0, r.stop - max(r.start, _data_start(r.path))) for r in self.all)

    def ranges(self, path: Path) -> list[tuple[int, int]]:
        """What was read of the data of `path`, in order, neighbours joined."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(self._data(path)):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            else:
                joined.append((start, stop))
        return joined

    def twice(self) -> list[Read]:
        """Reads of tensor data of which some byte had been read before."""
        again = []
        for path in self.paths:
            end = 0
            for start, stop in sorted(self._data(path)):
                if start < end:
                    again.append(Read(path, start, min(stop, end), "again"))
                end = max(end, stop)
        return again

    def unseen(self) -> int:
        """Bytes this process read by system calls that are not accounted for in `all`.

        Imports, `/proc` and other files are in it; tensor data of any size must not be.
        """
        return self.rchar - sum(r.stop - r.start for r in self.all if r.how not in MAPPED)

    def add(self, path: Path | None, start: int, count: int, how: str) -> None:
        if path is not None and count > 0:
            with self._lock:
                self.all.append(Read(path, start, start + count, how))

    def path_of(self, file: object) -> Path | None:
        """The watched path that `file` (a descriptor, a path or an open file) is, if any."""
        if isinstance(file, io.IOBase):
            file = file.fileno()
        if not isinstance(file, int | str | bytes | os.PathLike):
            return None
        try:
            found = os.stat(file)  # noqa: PTH116 (a descriptor has no Path)
        except OSError:
            return None
        key = found.st_dev, found.st_ino
        if key not in self._known:
            self._known = {_identity(path): path for path in self.paths if path.exists()}
        return self._known.get(key)

    def _data(self, path: Path) -> Iterator[tuple[int, int]]:
        first = _data_start(path) if path.exists() else 0
        for read in self.all:
            if read.path == path and read.stop > first:
                yield max(read.start, first), read.stop


@contextmanager
def counted(*paths: Path) -> Iterator[Reads]:
    """Count what the block reads from `paths` (files, or folders: their safetensors files)."""
    seen = Reads(tuple(_files(paths)))
    patches: list[tuple[Any, Any]] = [
        *_os_calls(seen),
        *_opening(seen),
        *_native(seen),
    ]
    before = _rchar()
    _replace(patches)
    try:
        yield seen
    finally:
        _replace([(replacement, original) for original, replacement in patches])
    seen.rchar = _rchar() - before


def mapped(path: Path) -> bool:
    """Whether this process maps any part of `path` now."""
    inode = str(path.stat().st_ino)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.split()[4] == inode for line in lines)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(path.rglob("*.safetensors"))
        else:
            yield path


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


# Taken before anything is patched: the counter itself must not count.
_open, _pread = os.open, os.pread


def _data_start(path: Path) -> int:
    if path.suffix != ".safetensors":
        return 0
    fd = _open(path, os.O_RDONLY)
    try:
        return 8 + int.from_bytes(_pread(fd, 8, 0), "little")
    finally:
        os.close(fd)


def _rchar() -> int:
    fd = _open("/proc/self/io", os.O_RDONLY)
    try:
        return int(_pread(fd, 4096, 0).split()[1])
    finally:
        os.close(fd)


def _replace(patches: Sequence[tuple[object, object]]) -> None:
    """Put the second of each pair wherever a module holds the first, under whatever name."""
    # All of them in one go: vllm and torch have hundreds of thousands of names to look at.
    replacements = {id(original): replacement for original, replacement in patches}
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(getattr(module, "__dict__", None), dict) else {}
        if module is sys.modules[__name__]:
            continue
        for name, value in list(names.items()):
            if id(value) in replacements:
                names[name] = replacements[id(value)]


def _os_calls(seen: Reads) -> Iterator[tuple[Any, Any]]:
    read, readv, preadv, sendfile = os.read, os.readv, os.preadv, os.sendfile
    copy, tell = os.copy_file_range, os.lseek

    def counted_read(fd: int, n: int, /) -> bytes:
        path = seen.path_of(fd)
        start = tell(fd, 0, os.SEEK_CUR) if path else 0
        data = read(fd, n)
        seen.add(path, start, len(data), "read")
        return data

    def counted_readv(fd: int, buffers: Any, /) -> int:
        path = seen.path_of(fd)
        start = tell(fd, 0, os.SEEK_CUR) if path else 0
        count = readv(fd, buffers)
        seen.add(path, start, count, "readv")
        return count

    def counted_pread(fd: int, n: int, offset: int, /) -> bytes:
        data = _pread(fd, n, offset)
        seen.add(seen.path_of(fd), offset, len(data), "pread")
        return data

    def counted_preadv(fd: int, buffers: Any, offset: int, flags: int = 0, /) -> int:
        count = preadv(fd, buffers, offset, flags)
        seen.add(seen.path_of(fd), offset, count, "preadv")
        return count

    def counted_sendfile(out_fd: int, in_fd: int, offset: int | None, count: int) -> int:
        start = tell(in_fd, 0, os.SEEK_CUR) if offset is None else offset
        sent = sendfile(out_fd, in_fd, offset, count)
        seen.add(seen.path_of(in_fd), start, sent, "sendfile")
        return sent

    def counted_copy(
        src: int, dst: int, count: int, offset_src: int | None = None, offset_dst: int | None = None
    ) -> int:
        start = tell(src, 0, os.SEEK_CUR) if offset_src is None else offset_src
        copied = copy(src, dst, count, offset_src, offset_dst)
        seen.add(seen.path_of(src), start, copied, "copy_file_range")
        return copied

    yield read, counted_read
    yield readv, counted_readv
    yield _pread, counted_pread
    yield preadv, counted_preadv
    yield sendfile, counted_sendfile
    yield copy, counted_copy


def _opening(seen: Reads) -> Iterator[tuple[Any, Any]]:
    plain_open, plain_map = builtins.open, mmap.mmap

    class CountedFile(io.FileIO):
        def readinto(self, buffer: Any, /) -> int | None:
            return self._count(super().readinto(buffer))

        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(-1 if size is None else size) or b""
            self._count(len(data))
            return data

        def readall(self) -> bytes:
            data = super().readall() or b""
            self._count(len(data))
            return data

        def _count(self, count: int | None) -> int | None:
            if count:
                seen.add(seen.path_of(self.fileno()), self.tell() - count, count, "open")
            return count

    def counted_open(file: Any, mode: str = "r", *args: Any, **more: Any) -> IO[Any]:
        if seen.path_of(file) is None or not ({"r", "+"} & set(mode)):
            return plain_open(file, mode, *args, **more)
        return _wrapped(CountedFile, file, mode, *args, **more)

    class CountedMap(plain_map):  # type: ignore[misc, valid-type]
        def __new__(
            cls,
            fileno: int,
            length: int,
            *args: Any,
            **more: Any,
        ) -> "CountedMap":
            path = seen.path_of(fileno) if fileno >= 0 else None
            made = plain_map.__new__(cls, fileno, length, *args, **more)
            seen.add(path, more.get("offset", 0), len(made), "mmap")
            return made

    yield plain_open, counted_open
    yield io.FileIO, CountedFile
    yield plain_map, CountedMap


def _wrapped(
    kind: type[io.FileIO],
    file: Any,
    mode: str,
    buffering: int = -1,
    *text: Any,
    **more: Any,
) -> IO[Any]:
    """What `open` makes, over a raw file of `kind`."""
    closefd, opener = more.pop("closefd", True), more.pop("opener", None)
    raw: Any = kind(file, mode.replace("b", "").replace("t", ""), closefd, opener)
    if buffering == 0:
        return cast("IO[Any]", raw)
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    binary: Any = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedReader(raw, size)
    return cast("IO[Any]", binary if "b" in mode else io.TextIOWrapper(binary, *text, **more))


def _native(seen: Reads) -> Iterator[tuple[Any, Any]]:
    def whole(original: Callable[..., Any], how: str) -> tuple[Any, Any]:
        def counted_call(file: Any, *args: Any, **more: Any) -> Any:
            path = seen.path_of(file) if isinstance(file, str | os.PathLike) else None
            if path is not None:
                seen.add(path, 0, path.stat().st_size, how)
            return original(file, *args, **more)

        return original, counted_call

    safe_open = safetensors.safe_open

    def counted_safe_open(filename: Any, *args: Any, **more: Any) -> Any:
        path = seen.path_of(filename)
        opened = safe_open(filename, *args, **more)
        return opened if path is None else _SafeOpen(seen, path, opened)

    yield safe_open, counted_safe_open
    yield whole(torch.load, "torch.load")
    yield whole(torch.from_file, "from_file")
    yield whole(numpy.fromfile, "fromfile")


class _SafeOpen:
    """A `safe_open` handle that counts each tensor asked for (it maps the file itself)."""

    def __init__(self, seen: Reads, path: Path, opened: Any) -> None:
        self._seen, self._path, self._opened = seen, path, opened
        self._base = _data_start(path)
        seen.add(path, 0, self._base, "safe_open")
        self._where = _offsets(path, self._base)

    def __enter__(self) -> "_SafeOpen":
        self._opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        self._count(name)
        tensor: torch.Tensor = self._opened.get_tensor(name)
        return tensor

    def get_tensors(self) -> dict[str, torch.Tensor]:
        for name in self._where:
            self._count(name)
        tensors: dict[str, torch.Tensor] = self._opened.get_tensors()
        return tensors

    def get_slice(self, name: str) -> Any:
        self._count(name)
        return self._opened.get_slice(name)

    def _count(self, name: str) -> None:
        start, stop = self._where[name]
        self._seen.add(self._path, self._base + start, stop - start, "safe_open")


def _offsets(path: Path, data_start: int) -> dict[str, tuple[int, int]]:
    fd = _open(path, os.O_RDONLY)
    try:
        header = json.loads(_pread(fd, data_start - 8, 8))
    finally:
        os.close(fd)
    return {k: tuple(v["data_offsets"]) for k, v in header.items() if k != "__metadata__"}
