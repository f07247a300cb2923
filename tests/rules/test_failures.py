"""A test that fails costs the tests after it nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
_CASES = """
import gc
import pytest
from torch import nn
from tensor_dedup import sweep
from tensor_dedup.loader.residents.registry import registry

def shared():
    model = nn.Linear(64, 64)
    sweep(model)
    assert registry.resident_bytes()
    return model

@pytest.fixture(scope="session")
def broken():
    model = shared()
    try:
        raise KeyError(model.weight.shape)
    except KeyError:
        raise OSError("while another was handled")

@pytest.fixture
def before():
    gc.collect()
    return registry.resident_bytes()

def test_that_fails():
    model = shared()
    assert model.weight is None

def test_after_a_failed_test(before):
    assert before == registry.resident_bytes() == 0

def test_whose_fixture_fails(broken):
    pass

def test_after_a_failed_fixture(before):
    assert before == registry.resident_bytes() == 0
"""


def test_the_models_of_a_failed_test_are_gone_when_the_next_begins(tmp_path: Path) -> None:
    cases = tmp_path / "test_cases.py"
    cases.write_text(_CASES)
    path = os.pathsep.join([str(_TESTS), str(_TESTS / "support"), *sys.path])

    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", cases],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr
    assert "1 failed, 2 passed, 1 error" in ran.stdout, ran.stdout
