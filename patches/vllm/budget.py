"""What others hold of a model already, for vLLM's plan of a device's memory."""

import os

from tensor_dedup.memory_manager.client import AUTO
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.errors import MemoryManagerError
from tensor_dedup.memory_manager.paths import device_socket, socket_path


def held_elsewhere(where: str | os.PathLike[str], checkpoint: str, device: str = "") -> int:
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
