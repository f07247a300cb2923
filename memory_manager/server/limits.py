"""What the machine gives: memory for the budget, descriptors for clients and slabs."""

import resource
from pathlib import Path
from typing import Final

import psutil

_CGROUP: Final = Path("/sys/fs/cgroup")


def default_budget() -> int:
    """Half of the memory that this process may use, in bytes: the machine's or its container's."""
    return min([psutil.virtual_memory().total, *_cgroup_limits()]) // 2


def _cgroup_limits() -> list[int]:
    """The limits of the cgroups this process is in, innermost last; version 2 only."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    inside = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = _CGROUP / inside
    return [
        int(text)
        for place in (folder, *folder.parents)
        if place.is_relative_to(_CGROUP) and (text := _text(place / "memory.max")).isdigit()
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def raise_descriptor_limit() -> int:
    """Allow as many descriptors as the system lets this process have; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
