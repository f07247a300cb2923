"""What processes hold that grows if something is never given back."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil


class Level(NamedTuple):
    """Open files, threads, bytes of anonymous memory, and mappings of shared memory."""

    files: int
    threads: int
    anonymous: int
    shared: int


def levels(pids: Sequence[int]) -> dict[int, Level]:
    """The level of each of these processes, but of those that have ended."""
    found = {}
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        if "RssAnon:" in status:
            process = psutil.Process(pid)
            anonymous = int(status.partition("RssAnon:")[2].split()[0]) << 10
            maps = Path(f"/proc/{pid}/maps").read_text()
            shared = maps.count("/memfd:") + maps.count("/dev/shm/")
            found[pid] = Level(process.num_fds(), process.num_threads(), anonymous, shared)
    return found


def growth(before: dict[int, Level], after: dict[int, Level]) -> Level:
    """By how much that process has grown which has grown most, in each respect."""
    both = before.keys() & after.keys()
    grown = [[now - then for now, then in zip(after[p], before[p], strict=True)] for p in both]
    return Level(*map(max, zip(*grown, strict=True)))


def family(pid: int) -> list[int]:
    """A process and those that it has started, and so on."""
    return [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
