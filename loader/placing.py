"""Where tensors lie in memory, and giving parameters other memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import torch

_MAPS: Final = Path("/proc/self/maps")


def data_of(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's data as an ordinary tensor, whatever its class makes of operations."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.data


def replace(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give a parameter or buffer other memory; its object, class and attributes stay."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = tensor


def overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The ids of those whose memory is, in whole or in part, that of another one."""
    ranges = []
    for each in tensors:
        if each.device.type == "cpu" and each.layout is torch.strided and each.nbytes:
            data = data_of(each)
            ranges.append((data.data_ptr(), data.data_ptr() + data.nbytes, id(each)))
    found: set[int] = set()
    reach, holder = 0, 0
    for start, end, key in sorted(ranges):
        if start < reach:
            found |= {key, holder}
        if end > reach:
            reach, holder = end, key
    return found


class Mapped(NamedTuple):
    """One mapping of a file: addresses, where in the file it begins, and which file it is.

    `device` is as the kernel writes it ("fe:00"); `path` is only where to look for it.
    """

    start: int
    end: int
    offset: int = 0
    device: str = ""
    inode: int = 0
    path: str = ""


class Mappings:
    """Some mappings of this process, as of when this was made."""

    def __init__(self, ranges: Iterable[Mapped]) -> None:
        self._ordered = sorted(ranges)
        self._starts = [each.start for each in self._ordered]

    def hold(self, tensor: torch.Tensor) -> bool:
        """Does the memory of this tensor begin in one of them?"""
        return self.find(tensor) is not None

    def find(self, tensor: torch.Tensor) -> Mapped | None:
        """The one in which the memory of this tensor begins."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.nbytes:
            return None
        address = data_of(tensor).data_ptr()
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._ordered[index].end:
            return None
        return self._ordered[index]


def files_and_common() -> tuple[Mappings, Mappings]:
    """Mappings of files that are this process's own, and those that others can write to.

    Memory files, as residents are, are in neither. Both are empty when /proc cannot be read: then
    files stay mapped.
    """
    files, common = [], []
    try:
        lines = _MAPS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    for line in lines:
        # Residents are thousands of lines that say nothing here.
        if "/memfd:" in line and line.partition(" ")[2][3] == "p":
            continue
        fields = line.split(maxsplit=5)  # addresses, permissions, offset, device, inode, path
        start, _, end = fields[0].partition("-")
        where = Mapped(
            int(start, 16),
            int(end, 16),
            int(fields[2], 16),
            fields[3],
            int(fields[4]),
            fields[-1],
        )
        if fields[1].endswith("s") and "w" in fields[1]:
            common.append(where)
        elif where.inode and not where.path.startswith("/memfd:"):
            files.append(where)
    return Mappings(files), Mappings(common)
