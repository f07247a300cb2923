"""A manager of a fake GPU's memory, as a program: `fake_gpu_manager.py` and the manager's options.

While a file `refuse` lies beside its log, it names a call of the driver that fails.
"""

import sys
from pathlib import Path
from typing import Any

from tensor_dedup.memory_manager.cuda.driver import Result, refused
from tensor_dedup.memory_manager.cuda.fake import FakeDriver
from tensor_dedup.memory_manager.server.__main__ import main


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


if __name__ == "__main__":
    sys.exit(main(Moody()))
