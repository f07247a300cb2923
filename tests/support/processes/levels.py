"""What processes hold that grows if something is never given back."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil


class Level(NamedTuple):
    """Open files, threads and bytes of anonymous memory of processes, and files in shared memory.

    Files are those of the host, among them what other processes make.
    """

    files: int
    threads: int
    anonymous: int
    shared: int

    def grown(self, before: "Level") -> "Level":
        """How much more there is than before."""
        return Level(*(now - then for now, then in zip(self, before, strict=True)))


def level(pids: Sequence[int]) -> Level:
    """The level of these processes together."""
    files = threads = anonymous = 0
    for pid in pids:
        process = psutil.Process(pid)
        files += process.num_fds()
        threads += process.num_threads()
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous += int(status.partition("RssAnon:")[2].split()[0]) << 10
    return Level(files, threads, anonymous, len([*Path("/dev/shm").iterdir()]))


def family(pid: int) -> list[int]:
    """A process and those that it has started, and so on."""
    return [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
