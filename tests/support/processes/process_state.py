"""What this process holds: slabs, descriptors and memory, and what a test leaves of residents.

The kernel is asked about mappings and descriptors, malloc about memory, the registry about
residents. An engine that vLLM keeps until the next is made may go during a later test. So what
is left is compared with what was there before, by `Remains.beyond`, and not by counting. Functions
run in forked children here; `collect_surely` makes gc.collect one that has collected, and
`set_aside` spares it what the tests have imported.
"""

import atexit
import ctypes
import gc
import os
import pickle
import re
import resource
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.types import ResidentKey

_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")
T = TypeVar("T")
SLAB = "/memfd:tensor-dedup"
_freeze, _unfreeze = gc.freeze, gc.unfreeze


def mapped_slabs() -> Counter[str]:
    """How many mappings this process has of each slab, by its inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Counter(line.split()[4] for line in lines if SLAB in line)


def slab_mappings() -> int:
    """How many mappings of slabs this process has."""
    return mapped_slabs().total()


def open_slabs() -> Counter[str]:
    """How many descriptors this process has of each slab, by its inode."""
    found: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        try:
            if str(path.readlink()).startswith(SLAB):
                found[str(path.stat().st_ino)] += 1
        except FileNotFoundError:  # the descriptor of this listing
            continue
    return found


def slab_places(addresses: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Which slab each address is in (its inode) and where there: alike in every process.

    Without those that are in no slab.
    """
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if SLAB not in line:
            continue
        bounds, _, offset, _, inode = line.split()[:5]
        begin, end = (int(each, 16) for each in bounds.split("-"))
        for name, address in addresses.items():
            if begin <= address < end:
                found[name] = int(inode), int(offset, 16) + address - begin
    return found


def slab_descriptors() -> int:
    """How many open descriptors of slabs this process has."""
    return open_slabs().total()


def descriptors() -> set[str]:
    """Every open descriptor of this process, with what it leads to.

    Compare with what was open before by `-`: garbage of earlier tests may close its own in between.
    Not what is open for a moment only: clients that earlier tests left look for their manager, in
    threads.
    """
    gc.collect()
    found = _open()
    time.sleep(0.05)
    return found & _open()


def _open() -> set[str]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{path.name} {path.readlink()} {path.stat().st_ino}")
        except FileNotFoundError:  # the descriptor of this listing
            continue
    return found


@contextmanager
def descriptor_limit(most: int) -> Iterator[None]:
    """This process may open no descriptor of the number `most` or above."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def clear_frames(error: BaseException) -> None:
    """Let go of what the functions held through which `error` and the errors behind it came."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        for frame, _ in traceback.walk_tb(each.__traceback__):
            _ = frame.f_locals  # Python 3.11 keeps the last answer, with what was in the frame
        left += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions


def slabs() -> tuple[int, int]:
    """Mappings and descriptors of slabs."""
    return slab_mappings(), slab_descriptors()


def slab_memory() -> Counter[str]:
    """Bytes by field (Rss, Pss, Anonymous and so on) over the mappings of slabs."""
    sizes: Counter[str] = Counter()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if _HEAD.match(line):
            inside = SLAB in line
        elif inside and line.endswith(" kB"):
            name, _, size = line.partition(":")
            sizes[name] += int(size.split()[0]) * 1024
    return sizes


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    )


def allocated() -> int:
    """Bytes that malloc has lent in this process, in all its arenas."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def fork() -> int:
    """os.fork, for a child that does little and leaves with os._exit."""
    with warnings.catch_warnings():
        # torch has started threads, of which Python warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def forked(function: Callable[[], T]) -> T:
    """Run a function in a forked child and return its result; its failure fails the caller."""
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        _answer(function, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, data.decode(errors="replace") or f"the child ended with status {status}"
    result: T = pickle.loads(data)
    return result


def _answer(function: Callable[[], object], writing: int) -> None:
    code, data = 1, b""
    try:
        data = pickle.dumps(function())
        code = 0
    except BaseException:  # noqa: BLE001 - the parent gets it, and the child must not go on
        data = traceback.format_exc().encode()
    finally:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(data)
        os._exit(code)


@dataclass(frozen=True)
class Remains:
    """Residents and layer records by key; mappings and descriptors of slabs by the slab."""

    residents: frozenset[tuple[ResidentKey, int]]
    records: frozenset[str]
    mappings: Counter[str]
    descriptors: Counter[str]

    def beyond(self, before: "Remains") -> list[object]:
        """What is here and was not there before."""
        return [
            *(self.residents - before.residents),
            *(self.records - before.records),
            *(self.mappings - before.mappings),
            *(self.descriptors - before.descriptors),
        ]


def remaining() -> Remains:
    """What there is when the garbage is gone."""
    gc.collect()
    residents = frozenset((each.key, copy) for copy, each in registry.entries())
    records = frozenset(registry.records())
    return Remains(residents, records, mapped_slabs(), open_slabs())


class _Collections:
    """Counts the collections that each thread has made."""

    def __init__(self) -> None:
        self._collect = gc.collect
        self._made: Counter[int] = Counter()
        self._under_way: int | None = None

    def heard(self, phase: str, _info: dict[str, Any]) -> None:
        thread = threading.get_ident()
        self._under_way = thread if phase == "start" else None
        self._made[thread] += phase == "stop"

    def collect(self, generation: int = 2) -> int:
        """As gc.collect, which does nothing while another thread is collecting.

        What frees memory lets other threads run, so a test may ask for a collection just then.
        """
        thread = threading.get_ident()
        if self._under_way == thread:  # asked for by what is being collected
            return 0
        before = self._made[thread]
        found = 0
        found = self._collect(generation)
        while self._made[thread] == before:
            time.sleep(0.001)
            found += self._collect(generation)
        return found


def set_aside() -> None:
    """Take all that is there now out of garbage collection, for the rest of this process.

    Each collection would look at every object of torch's and vLLM's modules. vLLM does the same
    when an engine begins, with the engine too, and takes it back when one ends: no more in this
    process.
    """
    gc.collect()
    _freeze()
    atexit.register(_unfreeze)  # some libraries look for leaks when the process ends
    gc.freeze = gc.unfreeze = _leave


def _leave() -> None:
    """Freeze nothing, unfreeze nothing."""


def collect_surely() -> None:
    """Replace gc.collect in this process by one that has collected when it returns."""
    collections = _Collections()
    gc.callbacks.append(collections.heard)
    gc.collect = collections.collect
