"""What torch makes of a file, and what this package says of it, as tensors to compare."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch

from tensor_dedup.formats.pytorch.machine import DTYPES
from tensor_dedup.formats.pytorch.reader import PytorchHeader

TORCH: dict[str, torch.dtype] = {dtype.name: getattr(torch, name) for name, dtype in DTYPES.items()}


def flat(value: object) -> dict[str, torch.Tensor]:
    """Every tensor of a loaded value by its keys, joined by dots."""
    return {name or "tensor": tensor for name, tensor in _walk("", value)}


def _walk(prefix: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, dict):
        for key, held in value.items():
            yield from _walk(_joined(prefix, key), held)
    elif isinstance(value, list | tuple):
        for number, held in enumerate(cast("Sequence[object]", value)):
            yield from _walk(_joined(prefix, number), held)


def _joined(prefix: str, key: object) -> str:
    part = str(int(key)) if isinstance(key, bool) else str(key)
    return f"{prefix}.{part}" if prefix else part


def seen_by_us(path: Path, header: PytorchHeader) -> dict[str, torch.Tensor]:
    """All tensors as the header describes them, over the bytes of the file."""
    file = path.read_bytes()
    specs = {spec.name: spec for spec in header.tensors}
    found = {}
    for member in header.members:
        spec, dtype = specs[member.held_by], TORCH[member.dtype]
        assert spec.start <= member.start <= spec.start + spec.nbytes
        raw = bytearray(file[spec.start : spec.start + spec.nbytes])
        held = (
            torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        )
        size = torch.empty(0, dtype=dtype).element_size()
        whole = held[: len(raw) // size * size].view(dtype)
        offset = (member.start - spec.start) // size
        found[member.name] = whole.as_strided(member.shape, member.stride, offset)
    return found


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in order."""
    whole = tensor.detach().contiguous().reshape(-1)
    return bytes(whole.view(torch.uint8).tolist()) if whole.numel() else b""


def shares_a_range(ends: Sequence[tuple[int, int]]) -> bool:
    """Whether two of these ranges, which are in order, have a byte in common."""
    return any(a[1] > b[0] for a, b in pairwise(ends))
