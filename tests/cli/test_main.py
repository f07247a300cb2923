"""The command group: help without verbs, exit statuses, one line on stderr."""

import errno
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from tensor_dedup.cli import VERBS, main
from tensor_dedup.cli.errors import data_errors
from tensor_dedup.errors import CheckpointNotFoundError, ConfigError, NoSuchPathError


def failing(error: Exception) -> click.Command:
    @click.command()
    def verb() -> None:
        with data_errors():
            raise error

    return verb


def test_help_names_every_verb_and_imports_none() -> None:
    code = (
        "import sys\n"
        "from tensor_dedup.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "verbs = [name for name in sys.modules if name.startswith('tensor_dedup.cli.')]\n"
        "assert verbs == ['tensor_dedup.cli.errors'], verbs\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    for verb in VERBS:
        assert f"\n  {verb} " in shown


def test_the_version_is_the_installed_one() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.stdout.split()[0]) == (0, "tensor-dedup,")


@pytest.mark.parametrize("arguments", [["analyse"], ["--nonsense"], ["analyze", "--nonsense"]])
def test_wrong_use_ends_with_2_and_nothing_on_stdout(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: " in result.stderr


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CheckpointNotFoundError("m: no weights\nthere; name a file"), 1),
        (NoSuchPathError("m: no such file; name one"), 2),
        (ConfigError("audit is 7; give a share between 0.0 and 1.0"), 2),
        (PermissionError(errno.EACCES, "Permission denied", "model.safetensors"), 1),
    ],
)
def test_a_failure_is_one_line_on_stderr(error: Exception, status: int) -> None:
    result = CliRunner().invoke(failing(error), [])
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr == f"Error: {' '.join(str(error).split())}\n"


def test_a_reader_that_went_away_is_no_failure_of_ours() -> None:
    result = CliRunner().invoke(failing(BrokenPipeError(errno.EPIPE, "Broken pipe")), [])
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "")


def test_a_bug_is_not_dressed_up_as_wrong_data() -> None:
    result = CliRunner().invoke(failing(ZeroDivisionError()), [])
    assert isinstance(result.exception, ZeroDivisionError)
