"""A manager of its own for each test that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from manager_runs import managers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that only this user can enter, with a path short enough for a socket."""
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def manager(folder: Path) -> Iterator[managers.Manager]:
    """A manager that gives silent builders one second."""
    with managers.running(folder, "--build-timeout", "1", "--stall-timeout", "1") as running:
        yield running
