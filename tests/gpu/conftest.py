"""These need a GPU and cuda-bindings: `scripts/test-gpu` runs them, `scripts/test` does not."""

from pathlib import Path

import pytest

from gpu_runs import gpu_world


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    if not gpu_world.REHEARSAL:
        # On a machine with a GPU a driver that is missing is a failure, not a skip.
        gpu_world.new_driver()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path
