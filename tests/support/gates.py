"""A disk that waits, for tests of what goes on meanwhile."""

import threading
from pathlib import Path
from typing import Any

from steps import handle
from tensor_dedup.store.checkpoints import CheckpointStore
from tensor_dedup.store.files import Handle, RealFiles


class Gate(RealFiles):
    """A disk that makes nothing durable while it is closed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.waiting = threading.Event()

    def fsync(self, handle: Handle) -> None:
        self.waiting.set()
        assert self.opened.wait(60)
        super().fsync(handle)


def gated(root: Path, gate: Gate, **more: Any) -> CheckpointStore:
    """A run in a store that is there: making one is made durable too."""
    handle(root).close()
    return handle(root, files=gate, **more)
