"""A manager of a fake GPU's memory, as a program: `fake_gpu_manager.py` and the manager's options.

While a file `refuse` lies beside its log, it names a call of the driver that fails.
"""

import sys
from pathlib import Path
from typing import Any

from gpu_runs.fake_driver import FakeDriver
from tensor_dedup.memory_manager.backends.base import Backend
from tensor_dedup.memory_manager.backends.ipc import Helper, IpcBackend
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.cuda.driver import Result, refused
from tensor_dedup.memory_manager.server.__main__ import main
from tensor_dedup.memory_manager.server.main import Start


class Moody(FakeDriver):
    """Fails where the file says so."""

    def __getattribute__(self, name: str) -> Any:
        folder = Path(sys.argv[sys.argv.index("--socket") + 1]).parent
        if not name.startswith("_") and name in _wish(folder):
            raise refused(name, Result.OUT_OF_MEMORY)
        return super().__getattribute__(name)


def _wish(folder: Path) -> list[str]:
    file = folder / "refuse"
    return file.read_text().split() if file.exists() else []


def make(start: Start) -> Backend:
    """The kind of memory that was asked for, on the fake GPU."""
    if start.backend == "ipc":
        return IpcBackend(Helper(start.device, "gpu_runs.fake_driver:FakeDriver"))
    return VmmBackend(Moody(), start.device, start.handle)


if __name__ == "__main__":
    sys.exit(main(make))
