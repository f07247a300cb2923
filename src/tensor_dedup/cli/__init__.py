"""The command line `tensor-dedup VERB [OPTIONS]`.

A verb's module is imported only when the verb is called, so that `--help` is quick and no verb
loads libraries that only others need.

A failure prints one line on stderr, sets the exit status, and prints nothing on stdout. So a
program that reads the output of `--json` never takes an error for a result. Verbs that look for
damage print what they found, with status 1 if there is damage.
"""

import errno
import importlib
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, Final, TypeVar

import click

from tensor_dedup.errors import NOBODY_THERE, WRONG_DATA, WRONG_USE, TensorDedupError
from tensor_dedup.suggestions import nearest

# As shells say it.
INTERRUPTED: Final = 128 + signal.SIGINT
READER_GONE: Final = 128 + signal.SIGPIPE
_WHOLE: Final = 1000
_SHOWN: Final = 60  # characters of a path that is too long
_HYPHEN: Final = "\ue000"  # of no text
_HINT: Final = re.compile(r"`(tensor-dedup ([a-z]+)[^`]*)`")
# Where the click context keeps what was given for these.
_GIVEN: Final = "tensor_dedup.given."
_Value = TypeVar("_Value")

VERBS: Mapping[str, str] = {
    "analyze": "Show which tensors checkpoints share, and what sharing them saves.",
    "cat": "Write the bytes of a stored tensor to stdout.",
    "completion": "Print a shell script that completes verbs and names.",
    "delete": "Remove a checkpoint from the store.",
    "diff": "Show which tensors were renamed, changed, added or removed.",
    "doctor": "Check what can be shared on this machine, and what prevents it.",
    "du": "Show the disk space of each checkpoint, and what deleting it frees.",
    "evict": "Drop a checkpoint that no engine uses from shared memory.",
    "export": "Write a stored checkpoint's files, byte for byte.",
    "find": "Find the checkpoints that hold a tensor, by its digest.",
    "follow": "Pull each new step of a run as it is published, and let engines load it.",
    "gc": "Free the space that no stored checkpoint uses.",
    "help": "Show the help of a verb.",
    "import": "Import a checkpoint into the store; each distinct tensor is kept once.",
    "list": "List the checkpoints of the store.",
    "pin": "Keep a checkpoint in shared memory.",
    "plan": "Assign models to machines so that related ones share memory.",
    "pull": "Fetch a checkpoint from a remote; only missing tensors are downloaded.",
    "push": "Send a checkpoint to a remote; only missing tensors are uploaded.",
    "remote": "Inspect and maintain a remote in object storage or a folder.",
    "rename": "Give a stored checkpoint another name.",
    "repair": "Restore damaged or lost parts of the store.",
    "runs": "Inspect, prune and plot training runs.",
    "serve": "Run the memory manager, which shares weights between engines.",
    "show": "Show the files and tensors of a stored checkpoint.",
    "stats": "Show how large the store is and what it saves.",
    "status": "Show what the memory manager holds, and for which engines.",
    "stop": "Stop the memory manager.",
    "substitute": "Write a fine-tune with some layers replaced by those of its base.",
    "top": "Watch the memory manager live.",
    "unpin": "Allow a pinned checkpoint to be evicted again.",
    "verify": "Check the store for damage.",
}
# In the order of the help; a verb that is in none of them is the last group's.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Compare": ("analyze", "diff", "substitute", "plan"),
    "Store": (
        *("import", "list", "show", "du", "stats", "find", "cat", "export", "rename", "delete"),
        *("gc", "verify", "repair"),
    ),
    "Runs": ("runs",),
    "Remotes": ("push", "pull", "follow", "remote"),
    "Memory": ("serve", "status", "top", "pin", "unpin", "evict", "stop"),
    "Other": ("doctor", "completion", "help"),
}
# Verbs of other programs that look like none of ours, and what does that here.
_MEANT: Final[Mapping[str, tuple[str, ...]]] = {
    "compare": ("diff", "analyze"),
    "info": ("show",),
    "prune": ("gc", "runs prune"),
    "rm": ("delete",),
}
# Verbs whose hints are about the store of the command that gives them. A push is not: it is from a
# store that has what is lacking here.
_OF_THE_STORE: Final = {*GROUPS["Compare"], *GROUPS["Store"], *GROUPS["Runs"], "pull"}
_COMMANDS: Mapping[str, str] = {
    "analyze": "tensor_dedup.cli.analyze:command",
    "cat": "tensor_dedup.cli.contents:cat",
    "completion": "tensor_dedup.cli.completion:command",
    "delete": "tensor_dedup.cli.store:delete",
    "diff": "tensor_dedup.cli.diff:command",
    "doctor": "tensor_dedup.cli.doctor:command",
    "du": "tensor_dedup.cli.contents:du",
    "evict": "tensor_dedup.cli.manager:evict",
    "export": "tensor_dedup.cli.store:export",
    "find": "tensor_dedup.cli.contents:find",
    "follow": "tensor_dedup.cli.follow:command",
    "gc": "tensor_dedup.cli.store:gc",
    "help": "tensor_dedup.cli.help:command",
    "import": "tensor_dedup.cli.store:import_",
    "list": "tensor_dedup.cli.store:list_",
    "pin": "tensor_dedup.cli.manager:pin",
    "plan": "tensor_dedup.cli.plan:command",
    "pull": "tensor_dedup.cli.remote:pull",
    "push": "tensor_dedup.cli.remote:push",
    "remote": "tensor_dedup.cli.remote:command",
    "rename": "tensor_dedup.cli.store:rename",
    "repair": "tensor_dedup.cli.store:repair",
    "runs": "tensor_dedup.cli.runs:command",
    "serve": "tensor_dedup.cli.serve:command",
    "show": "tensor_dedup.cli.store:show",
    "stats": "tensor_dedup.cli.store:stats",
    "status": "tensor_dedup.cli.manager:status",
    "stop": "tensor_dedup.cli.manager:stop",
    "substitute": "tensor_dedup.cli.substitute:command",
    "top": "tensor_dedup.cli.manager:top",
    "unpin": "tensor_dedup.cli.manager:unpin",
    "verify": "tensor_dedup.cli.store:verify",
}


class Failure(click.ClickException):
    """The error that data, such as a file or a store, is wrong or damaged.

    It is printed as one line on stderr, and the exit status is 1.
    """

    exit_code = WRONG_DATA


class WrongUse(Failure):
    """The error that the command line is wrong and has to be changed. The exit status is 2."""

    exit_code = WRONG_USE


def check_suffix(path: Path | None, *suffixes: str) -> None:
    """Check that the name of an output file ends in one of `suffixes`.

    So an input file is not overwritten if it is named by mistake. If `path` is None, nothing is
    checked.

    Raises:
        WrongUse: The name has another ending.
    """
    if path is not None and path.suffix not in suffixes:
        raise WrongUse(f"{path} does not end in {suffixes[0]}; name a file that does")


class NobodyThere(Failure):
    """The error that no memory manager or remote answers. The exit status is 3."""

    exit_code = NOBODY_THERE


class Declined(Failure):
    """The error that the user said no at a prompt. The exit status is 4."""

    exit_code = 4


_FAILURES: Final = {each.exit_code: each for each in (Failure, WrongUse, NobodyThere)}


@contextmanager
def data_errors() -> Iterator[None]:
    """Context manager: turn errors of this package and of the file system into a Failure.

    An error of this package with exit status 2 becomes a WrongUse, and one with 3 a NobodyThere. If
    a path exists already or is too long, a file is in place of a folder, or the locale cannot
    encode a text, the error becomes a WrongUse. A BrokenPipeError is not changed.
    """
    try:
        yield
    except TensorDedupError as error:
        said = repeating_given(_one_line(error), error.facts.get("path", ""))
        raise _FAILURES[error.exit_status](said) from error
    except BrokenPipeError:
        raise  # `| head` has seen enough, which `Program` ends without a message
    except UnicodeEncodeError as error:
        what = f"{error.object!a} has no form in this locale ({error.encoding}); "
        raise WrongUse(f"{what}set LC_ALL=C.UTF-8 or PYTHONUTF8=1") from error
    except (NotADirectoryError, FileExistsError) as error:
        what = "it is there already, or a part of this path is a file; name another path"
        raise WrongUse(printable(f"{error.filename or error}: {what}")) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            shown = printable(f"{error.filename}")[:_SHOWN]
            what = "it is longer than a file's path or name can be here; name another"
            raise WrongUse(f"{shown}...: {what}") from error
        raise Failure(_one_line(error)) from error


def remember_given(context: click.Context, parameter: click.Parameter, value: _Value) -> _Value:
    """Remember the value of the option `--store`, or of the argument URL or NAME.

    Messages that suggest a command can then repeat it. This is a click `callback`; it
    returns `value` unchanged.
    """
    remember(context, parameter.name or "", value)
    return value


def remember(context: click.Context, name: str, value: object) -> None:
    """Remember that `value` was given for `name`, which is "store", "url" or "name"."""
    context.meta[_GIVEN + name] = value


def given(name: str) -> str | None:
    """Return the value that the command line gave for `name`, or None if it gave none.

    `name` is "store", "url" or "name".
    """
    context = click.get_current_context(silent=True)
    found = None if context is None else context.meta.get(_GIVEN + name)
    return found if isinstance(found, str) else None


def repeating_given(text: str, path: object = None) -> str:
    """Put the store and the URL of this command line into the commands in `text`.

    Commands are the parts in backquotes. In each, the word `URL` is replaced by the URL, and `NAME`
    by the name. `--store` is appended to `pull` and to the commands for comparisons, the store and
    runs.

    `path`, if given, is the path that `text` is about. If the command line has a URL and `path` is
    outside the store, `text` is taken to be about the remote, and `--store` is not appended.
    """
    store, url, name = given("store"), given("url"), given("name")
    if store and url and path is not None and not PurePath(str(path)).is_relative_to(store):
        store = None

    def repeated(found: re.Match[str]) -> str:
        command, verb = found.groups()
        if url is not None:
            command = re.sub(r"\bURL\b", lambda _: shlex.quote(url), command)
        if name is not None:
            command = re.sub(r"\bNAME\b", lambda _: shlex.quote(name), command)
        if store is not None and verb in _OF_THE_STORE and "--store" not in command:
            command += f" --store {shlex.quote(store)}"
        return f"`{command}`"

    return _HINT.sub(repeated, text)


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))


def visible(name: str) -> str:
    """Return `name` with unprintable characters escaped: controls, escapes and direction marks."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def printable(name: str) -> str:
    """Return `name` with characters escaped that are unprintable or not in stdout's encoding."""
    name = visible(name)
    if name.isascii():
        return name
    encoding = sys.stdout.encoding or "ascii"
    return name.encode(encoding, "backslashreplace").decode(encoding)


class _Formatter(click.HelpFormatter):
    """Breaks no line at a hyphen: names, options and paths are there to be copied."""

    def write_text(self, text: str) -> None:
        super().write_text(_held(text))

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        super().write_dl([(name, _held(text)) for name, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-")


def _held(text: str) -> str:
    return text.replace("-", _HYPHEN)


class _Context(click.Context):
    formatter_class = _Formatter


class Verbs(click.Group):
    """A click group whose help has a whole sentence for each verb.

    For an unknown verb it suggests a similar one.
    """

    context_class = _Context

    def sentence(self, ctx: click.Context, verb: str) -> str:
        """Return the sentence about a verb in the help of the group."""
        command = self.get_command(ctx, verb)
        return command.get_short_help_str(_WHOLE) if command is not None else ""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click's own cuts sentences.
        with formatter.section("Verbs"):
            formatter.write_dl([(v, self.sentence(ctx, v)) for v in self.list_commands(ctx)])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        verbs = self.list_commands(ctx)
        if args[0] not in verbs and not args[0].startswith("-") and not ctx.resilient_parsing:
            meant = [each for each in _MEANT.get(args[0], ()) if each.split()[0] in verbs]
            near = " or ".join(map(repr, meant or nearest(args[0], verbs, most=1)))
            more = f"did you mean {near}?" if near else f"there are {', '.join(verbs)}."
            ctx.fail(f"no verb {args[0]!r}; {more}")
        verb, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            command.context_class = _Context
        return verb, command, rest


def _use_what_streams_can_show() -> None:
    """Escape what stdout and stderr have no characters for, and all but ASCII in the locale C.

    Python writes UTF-8 there, which a terminal of that locale does not know.
    """
    told = os.environ.get("PYTHONUTF8") or os.environ.get("PYTHONIOENCODING")
    plain = os.environ.get("LC_ALL") in ("C", "POSIX") and not told
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="ascii" if plain else None, errors="backslashreplace")


def _open_closed_streams() -> None:
    """Open the null device in place of each standard stream that the caller has closed.

    Python has None there, and the next file that is opened would get the stream's number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """End the program as SIGPIPE would, with 141 and without a message, if its pipe was closed."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # now, and not when nothing can answer an error any more
    except BrokenPipeError:
        # What is still in the buffers goes nowhere, or Python would complain about it at its end.
        with Path(os.devnull).open("wb") as nowhere:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # it may be no file
                    os.dup2(nowhere.fileno(), stream.fileno())
        raise click.exceptions.Exit(READER_GONE) from None


class Program(Verbs):
    """A click group that ends with one line and an exit status on errors and on Ctrl-C."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        _open_closed_streams()
        with data_errors(), _reader_may_leave():  # `--help` is printed here
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> object:
        with _reader_may_leave():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> object:
        _use_what_streams_can_show()
        try:
            with data_errors():
                result: object = super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise  # its message is the help, which has its own lines
        except click.ClickException as error:
            output = importlib.import_module("tensor_dedup.cli.terminal")  # late: --help is quick
            lines = output.error_lines(error.format_message())
            if lines == error.format_message():
                raise
            if isinstance(error, click.UsageError):
                raise click.UsageError(lines, error.ctx) from error
            raise type(error)(lines) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        return result


class VerbGroup(Program):
    """The group of all verbs, which imports the module of a verb only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs to the help text, in groups with titles."""
        *_, last = GROUPS
        grouped = {verb for group in GROUPS.values() for verb in group}
        for title, group in GROUPS.items():
            verbs = [verb for verb in group if verb in VERBS]
            verbs += [verb for verb in VERBS if title == last and verb not in grouped]
            if verbs:
                with formatter.section(title):
                    formatter.write_dl([(verb, VERBS[verb]) for verb in verbs], col_max=12)

    def sentence(self, ctx: click.Context, verb: str) -> str:
        # Its own docstring would have to be imported.
        return VERBS[verb]


@click.group(
    cls=VerbGroup,
    subcommand_metavar="VERB [OPTIONS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="tensor-dedup", prog_name="tensor-dedup")
def main() -> None:
    """One copy of every tensor that several models have in common.

    Exit status: 0 all is well, 1 something is wrong with the data, 2 wrong use,
    3 nobody to talk to, 4 declined at a prompt, 130 interrupted, 141 the reader
    of the output went away.
    """
