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

    def grown(self, before: "Level") -> "Level":
        """How much more there is than before."""
        return Level(*(now - then for now, then in zip(self, before, strict=True)))


def level(pids: Sequence[int]) -> Level:
    """The level of these processes together."""
    files = threads = anonymous = shared = 0
    for pid in pids:
        process = psutil.Process(pid)
        files += process.num_fds()
        threads += process.num_threads()
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous += int(status.partition("RssAnon:")[2].split()[0]) << 10
        maps = Path(f"/proc/{pid}/maps").read_text()
        shared += maps.count("/memfd:") + maps.count("/dev/shm/")
    return Level(files, threads, anonymous, shared)


def family(pid: int) -> list[int]:
    """A process and those that it has started, and so on."""
    return [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
