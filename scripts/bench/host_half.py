"""The host's half of an upload to a GPU, beside reading and hashing alone: per core, no GPU.

The copies to the GPU do nothing here, so the figures say nothing about a GPU.
"""

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from bench.process_memory import read_pages
from bench.stats import Estimate, estimate, verdict
from tensor_dedup.digest import LEAF_BYTES, on_pool, task_ranges
from tensor_dedup.formats.safetensors import read_header
from tensor_dedup.loader.cuda.transfers import BUFFER_BYTES, Ring, Transfers, UploadPart, file_part

if TYPE_CHECKING:
    from tensor_dedup.memory_manager.cuda.driver import Driver

LEAST: Final = 0.85
MIB: Final = 1 << 20
TENSOR_BYTES: Final = 64 * MIB
# Neither these nor their sums are multiples of a leaf.
PART_BYTES: Final = (11 * MIB + 512, 3 * MIB + 4096, MIB + 64)
NARROW: Final = 0.03
ROUNDS: Final = (7, 60)  # at least, at most
SECONDS: Final = 40.0


class IdleDriver:
    """As much of a driver as `Transfers` calls, with memory of the host and without copies."""

    def __init__(self) -> None:
        self._locked: list[mmap.mmap] = []

    def enter(self, device: int) -> None:
        """Implement `Driver.enter`."""

    def leave(self) -> None:
        """Implement `Driver.leave`."""

    def stream(self) -> int:
        """Implement `Driver.stream`."""
        return 1

    def begin_copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy nothing."""

    def record(self, stream: int) -> int:
        """Implement `Driver.record`."""
        return 1

    def done(self, event: int) -> bool:
        """Say that everything has ended."""
        return True

    def wait(self, event: int) -> None:
        """Implement `Driver.wait`."""

    def forget(self, event: int) -> None:
        """Implement `Driver.forget`."""

    def page_lock(self, nbytes: int) -> int:
        """Return memory that has been touched, as page-locked memory has."""
        made = _touched(nbytes)
        self._locked.append(made)
        return ctypes.addressof(ctypes.c_char.from_buffer(made))


def _touched(nbytes: int) -> mmap.mmap:
    made = mmap.mmap(-1, nbytes)
    made[:] = b"\1" * nbytes
    return made


_mine: Final = threading.local()


def _buffer() -> memoryview:
    """A buffer as large as one of the ring, of the calling thread."""
    if not hasattr(_mine, "buffer"):
        _mine.buffer = _touched(BUFFER_BYTES)
    return memoryview(_mine.buffer)


class Ways:
    """Ways over the tensors of one file, in the threads of the hash pool where ours uses them."""

    def __init__(self, file: Path) -> None:
        """Open `file`, whose tensors have at least a leaf each."""
        self._file = file
        tensors = read_header(file).tensors
        self._ranges = [(each.start, each.nbytes) for each in tensors]
        self._first = min(each.start for each in tensors)
        self.nbytes = sum(nbytes for _, nbytes in self._ranges)
        self._fd = os.open(file, os.O_RDONLY)
        self._transfers = Transfers(cast("Driver", IdleDriver()), 0, Ring())
        self._target = torch.ones(max(nbytes for _, nbytes in self._ranges), dtype=torch.uint8)
        self.hashed = dict[str, int]()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def all(self) -> dict[str, Callable[[], object]]:
        """Return the ways by name; each passes over all bytes."""
        return {
            "read": partial(self._in_leaves, self._read),
            "hash": partial(self._in_leaves, self._hash),
            "ours": partial(self._upload, "ours", self._whole_tensors),
            "parts": partial(self._upload, "parts", partial(self._parts, has_leaves=False)),
            "twice": partial(self._upload, "twice", partial(self._parts, has_leaves=True)),
            "woken": partial(self._upload, "woken", self._whole_tensors, hashed=False),
            "load_file": self._load_file,
        }

    def _in_leaves(self, do: Callable[[memoryview, int], object]) -> None:
        def piece(start: int, stop: int) -> None:
            buffer = _buffer()
            for at in range(start, stop, LEAF_BYTES):
                first = at % BUFFER_BYTES
                do(buffer[first : first + min(LEAF_BYTES, stop - at)], self._first + at)

        _wait(on_pool(partial(piece, *each)) for each in task_ranges(self.nbytes))

    def _read(self, into: memoryview, at: int) -> None:
        os.preadv(self._fd, [into], at)

    def _hash(self, data: memoryview, _: int) -> None:
        blake3(data).digest()

    def _whole_tensors(self) -> Iterator[tuple[int, list[UploadPart]]]:
        for start, nbytes in self._ranges:
            yield nbytes, [file_part(self._fd, start, nbytes)]

    def _parts(self, *, has_leaves: bool) -> Iterator[tuple[int, list[UploadPart]]]:
        parts, at, number = [], 0, 0
        while at < self.nbytes:
            size = min(PART_BYTES[number % len(PART_BYTES)], self.nbytes - at)
            part = file_part(self._fd, self._first + at, size)
            parts.append(part._replace(start=at, has_leaves=has_leaves))
            at, number = at + size, number + 1
        yield self.nbytes, parts

    def _upload(
        self,
        name: str,
        tensors: Callable[[], Iterator[tuple[int, list[UploadPart]]]],
        *,
        hashed: bool = True,
    ) -> None:
        begun = [self._transfers.upload(1 << 40, *each, hashed=hashed) for each in tensors()]
        for each in begun:
            each.wait()
            assert not hashed or each.digest
        self._transfers.fence()
        self.hashed[name] = sum(each.content.bytes_hashed for each in begun)

    def _load_file(self) -> None:
        """Copy every tensor into one buffer: `load_file` itself maps the file and reads nothing."""
        for tensor in load_file(self._file).values():
            data = tensor.view(torch.uint8).flatten()
            self._target[: data.numel()].copy_(data)


def _wait(tasks: Iterator[Future[None]]) -> None:
    for task in list(tasks):
        task.result()


class Meter:
    """Seconds of the clock and of processors, round by round and way by way."""

    def __init__(self) -> None:
        self.clock: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def measure(self, name: str, work: Callable[[], object]) -> None:
        """Enter the seconds that `work` takes."""
        began, used = time.perf_counter(), time.process_time()
        work()
        self.cpu.setdefault(name, []).append(time.process_time() - used)
        self.clock.setdefault(name, []).append(time.perf_counter() - began)


def share(seconds: dict[str, list[float]], way: str, hashed: float = 1.0) -> Estimate:
    """How fast a way is, as a share of reading once and hashing `hashed` times, in turn.

    As all of them pass over the same bytes, this is of seconds what the speed is of
    1 / (1 / read + hashed / hash).
    """
    rounds = zip(seconds["read"], seconds["hash"], seconds[way], strict=True)
    return estimate([(read + hashed * hash_) / ours for read, hash_, ours in rounds])


def free_cores(idle: float, used: float, elapsed: float) -> float:
    """How many cores this process had or could have had: idle ones, and those that it used."""
    return (idle + used) / elapsed


def _idle_seconds() -> float:
    cpu = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(cpu[4]) + int(cpu[5])) / os.sysconf("SC_CLK_TCK")


def is_narrow(found: Estimate) -> bool:
    """Return whether an interval says enough."""
    return found.high - found.low <= 2 * NARROW


def host(work: Path, mib: int) -> Iterator[str]:
    """Measure with a file of so many MiB, until the intervals are narrow or time is up."""
    file = work / "host.safetensors"
    count = max(1, mib * MIB // TENSOR_BYTES)
    size = min(TENSOR_BYTES, mib * MIB)
    made = (torch.empty(size // 2048, 1024, dtype=torch.bfloat16) for _ in range(count))
    tensors = {f"w{number}": each.random_(-100, 100) for number, each in enumerate(made)}
    save_file(tensors, file)
    del tensors
    read_pages(file)
    ways, meter = Ways(file), Meter()
    try:
        yield from _measured(ways, meter)
    finally:
        ways.close()
        file.unlink()


def _measured(ways: Ways, meter: Meter) -> Iterator[str]:
    names, order = list(ways.all()), random.Random(1)
    for do in ways.all().values():  # the ring and each thread's buffer are allocated
        do()
    began, idle, used = time.perf_counter(), _idle_seconds(), time.process_time()
    for turn in range(ROUNDS[1]):
        # At random: the caches that a way leaves behind slow down, or help, the one after it.
        for name in order.sample(names, len(names)):
            meter.measure(name, ways.all()[name])
        enough = turn + 1 >= ROUNDS[0]
        if enough and all(is_narrow(share(each, "ours")) for each in (meter.clock, meter.cpu)):
            break
        if enough and time.perf_counter() - began > SECONDS:
            break
    elapsed = time.perf_counter() - began
    free = free_cores(_idle_seconds() - idle, time.process_time() - used, elapsed)
    yield from lines(ways.nbytes, ways.hashed, meter, free, len(os.sched_getaffinity(0)))


TITLES: Final = {
    "read": "reading alone: `preadv` from the page cache into a buffer of each thread",
    "hash": "BLAKE3 alone, over that buffer",
    "ours": "`Transfers.upload` of whole tensors, copies that do nothing",
    "parts": "the same, one tensor of parts that begin within its leaves",
    "twice": "the same, with the digests of these parts, too",
    "woken": "whole tensors, not hashed, as an engine wakes up",
    "load_file": "safetensors' `load_file`, and a copy of each tensor into one buffer, not hashed",
}


def lines(
    nbytes: int, hashed: dict[str, int], meter: Meter, free: float, cores: int
) -> Iterator[str]:
    """Yield a table of the rates, and how much of the limit ours reaches."""
    rounds = len(meter.clock["ours"])
    yield (
        f"{nbytes / MIB:.0f} MiB in the page cache, {rounds} rounds in random order; {cores} "
        f"cores, of which {free:.1f} were free for this process. Copies to a GPU do nothing here: "
        "these figures say nothing about a GPU."
    )
    yield from ("", "| | GB a second of one core | GB a second |", "| --- | --- | --- |")
    for name, title in TITLES.items():
        cpu, clock = (
            estimate([nbytes / 1e9 / each for each in seconds[name]]).text(2)
            for seconds in (meter.cpu, meter.clock)
        )
        yield f"| {title} | {cpu} | {clock} |"
    yield ""
    yield (
        "Share of 1 / (1 / read + 1 / hash), of a core by the time that it worked and, all in as "
        f"many threads, by the clock; aim {LEAST}:"
    )
    yield ""
    for way in ("ours", "parts", "twice", "woken"):
        times = hashed[way] / nbytes
        yield from _shares(TITLES[way], meter, way, sorted({1.0, times} if times else {0.0}))


def _shares(what: str, meter: Meter, way: str, hashes: Sequence[float]) -> Iterator[str]:
    for times in hashes:
        cpu, clock = (share(each, way, times) for each in (meter.cpu, meter.clock))
        said, also = (f": {verdict(each, least=LEAST)}" for each in (cpu, clock))
        more = {0.0: ", of reading alone", 1.0: ""}.get(
            times, f", of 1 / (1 / read + {times:.2f} / hash)"
        )
        yield f"* {what}{more}: {cpu.text()}{said}; by the clock {clock.text()}{also}"
