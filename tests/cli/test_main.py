"""The command group: help without verbs, exit statuses, one line on stderr."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from manager_runs import managers
from processes import commands, core_only, terminal
from store_runs.stores import KIB, noise, safetensors, u8, write
from tensor_dedup import Store
from tensor_dedup.cli import GROUPS, VERBS, data_errors, main
from tensor_dedup.cli.tensorcas import main as tensorcas
from tensor_dedup.digest import digest
from tensor_dedup.errors import CheckpointNotFoundError, ConfigError, NoSuchPathError
from tensor_dedup.training import CheckpointStore


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


def verbs_of(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """All verbs, and verbs of verbs, by what is typed."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from verbs_of(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


ALL = dict([*verbs_of(main), *((f"tensorcas {n}", c) for n, c in verbs_of(tensorcas))])


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


def test_every_help_is_shown_where_no_extra_is_installed() -> None:
    asked = [*(verb.split() for verb in ALL), ["runs"], ["remote"], ["tensorcas"], []]
    for words, shown in zip(asked, core_only.run(*([*w, "--help"] for w in asked)), strict=True):
        assert (shown.status, shown.err) == (0, ""), words
        assert shown.out.startswith("Usage: "), words


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("substitute m other --layers 0 --output made", "torch"),
        ("serve --preload m", "vllm"),
        ("remote list s3://bucket/models", "remote"),
        ("pull oci://host/a:b", "oci"),
    ],
)
def test_what_needs_an_extra_says_so_where_none_is_installed(words: str, extra: str) -> None:
    (done,) = core_only.run(words.split())
    assert (done.status, done.out) == (2, "")
    assert f"; in your clone of tensor-dedup, run `pip install '.[{extra}]'`" in done.err


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
        (["rm"], "no verb 'rm'; did you mean 'delete'?"),
        (["remote", "rm"], "no verb 'rm'; did you mean 'delete'?"),
        (["info"], "no verb 'info'; did you mean 'show'?"),
        (["compare"], "no verb 'compare'; did you mean 'diff' or 'analyze'?"),
        (["prune"], "no verb 'prune'; did you mean 'gc' or 'runs prune'?"),
        (["remote", "prune"], "no verb 'prune'; did you mean 'gc'?"),
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


@pytest.mark.parametrize("verb", [*dict(verbs_of(main)), "runs", "remote", ""])
def test_help_shows_what_the_option_of_a_verb_does(verb: str) -> None:
    words = verb.split()
    shown, option = (
        CliRunner().invoke(main, each) for each in (["help", *words], [*words, "--help"])
    )
    assert shown.exit_code == 0
    assert shown.stdout == option.stdout
    document = CliRunner().invoke(main, ["help", *words, "--json"]).stdout
    assert json.loads(document)["help"] + "\n" == option.stdout


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


@pytest.fixture(scope="module")
def read_by_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where each verb below has something to say: a store, a run, a remote, a manager."""
    here = tmp_path_factory.mktemp("unread")
    store = Store.open(here / "store")
    for name in ("m", "other"):
        write(here / name, {"model.safetensors": safetensors(u8(a=noise(1, 90 * KIB)))})
        store.import_(here / name)
    for number in (1, 2):
        CheckpointStore(store, "run").save({"w": np.zeros(3)}, number, metrics={"loss": 1.0})
    store.push(f"file://{here}/remote", "m")
    with managers.running(here) as manager:
        yield {
            **os.environ,
            "TENSOR_DEDUP_STORE": str(here / "store"),
            "TENSOR_DEDUP_SOCKET": str(manager.socket),
            "PWD": str(here),
        }


@pytest.mark.parametrize(
    "words",
    [
        *(["list"], ["stats"], ["gc", "--dry-run"], ["du"], ["show", "m"], ["verify", "--full"]),
        *(["list", "--json"], ["cat", "m", "a"], ["export", "m", "out"], ["import", "m"]),
        *(["analyze", "m", "other"], ["diff", "m", "other"], ["find", digest(noise(1, 90 * KIB))]),
        *(["runs", "list"], ["runs", "show", "run"], ["runs", "diff", "run@1", "run@2"]),
        *(["remote", "list", "URL"], ["pull", "URL", "m"], ["push", "m", "URL"]),
        *(["status"], ["top", "--json"], ["pin", "m", "--ahead"]),
        *(["completion", "bash"], ["help"], ["--help"], ["list", "--help"], ["--version"]),
    ],
    ids=" ".join,
)
def test_a_reader_that_went_away_is_no_failure_of_ours(
    read_by_nobody: dict[str, str], words: list[str]
) -> None:
    here = Path(read_by_nobody["PWD"])
    typed = [f"file://{here}/remote" if word == "URL" else word for word in words]
    done = commands.run(*typed, environ=read_by_nobody, cwd=here, reader_gone=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("typed", "status", "said"),
    [
        ("list >&-", 0, ""),
        ("delete m <&-", 2, "Refusing without confirmation; pass --yes."),
        ("--help >/dev/full", 1, "Error: [Errno 28] No space left on device"),
    ],
)
def test_closed_and_full_streams_end_in_no_traceback(
    read_by_nobody: dict[str, str], typed: str, status: int, said: str
) -> None:
    words, stream = typed.rsplit(" ", 1)
    line = f"{sys.executable} -c 'from tensor_dedup.cli import main; main()' {words} {stream}"
    done = subprocess.run(
        line, env=read_by_nobody, shell=True, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert done.stderr.strip().endswith(said)
    assert "Traceback" not in done.stderr
    if not said:
        assert done.stderr == ""


def test_a_bug_is_not_dressed_up_as_wrong_data() -> None:
    result = CliRunner().invoke(failing(ZeroDivisionError()), [])
    assert isinstance(result.exception, ZeroDivisionError)
