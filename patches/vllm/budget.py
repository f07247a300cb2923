"""What others hold of a model already, for vLLM's plan of a device's memory."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Final

from tensor_dedup.errors import TensorDedupError
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.memory_manager.client import AUTO
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.errors import MemoryManagerError
from tensor_dedup.memory_manager.protocol.paths import device_socket, socket_path

if TYPE_CHECKING:
    import torch

# What an engine casts to its own dtype; others stay as they are.
_CAST: Final = frozenset({"F64", "F32", "F16", "BF16"})


def held_by_manager(where: str | os.PathLike[str], checkpoint: str, device: str = "") -> int:
    """Bytes that the manager at `where` holds under this checkpoint's name; 0 where none answers.

    `device`: the UUID of the GPU whose manager, beside that one, is asked. What a fine-tune has in
    common with others is known when it is loaded and not before, so it is missing here: it then
    counts as the engine's own. No manager is started.
    """
    try:
        beside = socket_path(None if os.fspath(where) == AUTO else where)
        with Admin(device_socket(beside, device)) as admin:
            rows = admin.overview(residents=False).checkpoints
    except MemoryManagerError:
        return 0
    return sum(row.nbytes for row in rows if row.name == checkpoint)


def at_most(held: int, path: str, dtype: torch.dtype) -> int:
    """So many bytes, but no more than a model of this dtype can take of a local checkpoint.

    Other engines may have it in their own dtype. What an engine adds to tensors, as rows of a
    vocabulary, is left out; so is a checkpoint that cannot be read here.
    """
    try:
        tensors = open_checkpoint(path).tensors()
        most = sum(
            math.prod(spec.shape) * dtype.itemsize if spec.dtype in _CAST else spec.nbytes
            for _, _, spec in tensors
        )
    except (TensorDedupError, OSError):
        return held
    return min(held, most)
