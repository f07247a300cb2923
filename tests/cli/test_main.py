"""The command group: help without verbs, exit statuses, one line on stderr."""

import errno
import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from processes import terminal
from tensor_dedup.cli import GROUPS, VERBS, data_errors, main
from tensor_dedup.cli.tensorcas import main as tensorcas
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
        "assert verbs == [], verbs\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    for verb in VERBS:
        assert f"\n  {verb} " in shown


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """All verbs, and verbs of verbs, by what is typed."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


ALL = dict([*commands(main), *((f"tensorcas {n}", c) for n, c in commands(tensorcas))])


@pytest.mark.parametrize("verb", ALL)
def test_the_help_of_a_verb_explains_all_of_it(verb: str) -> None:
    command = ALL[verb]
    assert command.help is not None
    assert re.match(r"[A-Z][^\n]*(\n[^\n]+)*?\.", command.help)  # a sentence first
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.opts
            flag = option.is_flag or not isinstance(option.default, int | float | str)
            said = option.show_default or option.default in ("", "{}", None)
            assert flag or said or option.required, option.opts
    names = verb.split()
    program, names = (tensorcas, names[1:]) if names[0] == "tensorcas" else (main, names)
    shown = CliRunner().invoke(program, [*names, "--help"])
    assert shown.exit_code == 0
    assert not re.search(r"[a-z]-\n", shown.stdout)  # names and paths are there to be copied
    assert not re.search("RANGE|CONVERTED|FILENAME", shown.stdout)  # names of click's own
    assert "--json" in shown.stdout


def test_every_verb_has_its_group() -> None:
    grouped = [verb for group in GROUPS.values() for verb in group]
    assert sorted(grouped) == sorted(VERBS)


def test_help_lists_verbs_with_whole_sentences() -> None:
    for program, arguments in ((main, []), (main, ["runs"]), (tensorcas, [])):
        shown = CliRunner().invoke(program, [*arguments, "--help"]).stdout
        first = "\nCompare:\n" if program is main and not arguments else "\nVerbs:\n"
        listed = " ".join(shown.split(first)[1].split())
        assert listed.endswith(".")
        assert "..." not in listed


@pytest.fixture(scope="module")
def at_terminals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[terminal.Terminal]:
    with terminal.terminal(tmp_path_factory.mktemp("terminal"), {}) as made:
        yield made


@pytest.mark.parametrize("verb", [[], ["runs"], ["remote"]])
def test_no_verb_shows_the_help_as_it_is(at_terminals: terminal.Terminal, verb: list[str]) -> None:
    for width in (None, 60, 80):
        helped = at_terminals.run(*verb, "--help", width=width)
        shown = at_terminals.run(*verb, width=width)
        assert (shown.status, helped.status, shown.out) == (2, 0, "")
        assert shown.err == helped.out
        assert "\n  list " in shown.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lst"], "no verb 'lst'; did you mean 'list'?"),
        (["runs", "plt"], "no verb 'plt'; did you mean 'plot'?"),
        (
            ["runs", "xyz"],
            "no verb 'xyz'; there are best, compare, delete, diff, drain, keep, list, plot, prune, "
            "show, stats.",
        ),
    ],
)
def test_a_wrong_verb_is_said_with_the_nearest(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith(f"Error: {said}\n")


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


@pytest.mark.parametrize("verb", ALL)
def test_ctrl_c_ends_any_verb_with_130(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ALL[verb], "callback", interrupted)
    monkeypatch.setattr(ALL[verb], "params", [])
    first, *rest = verb.split()
    program, names = (tensorcas, rest) if first == "tensorcas" else (main, [first, *rest])
    done = CliRunner().invoke(program, names)
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_reader_that_went_away_is_no_failure_of_ours() -> None:
    result = CliRunner().invoke(failing(BrokenPipeError(errno.EPIPE, "Broken pipe")), [])
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "")


def test_a_bug_is_not_dressed_up_as_wrong_data() -> None:
    result = CliRunner().invoke(failing(ZeroDivisionError()), [])
    assert isinstance(result.exception, ZeroDivisionError)
