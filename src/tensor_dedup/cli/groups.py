"""Commands with verbs: what their help lists, a wrong verb, and how a program ends."""

import signal
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

import click

from tensor_dedup.cli.errors import data_errors

# As shells say it, and unlike 1, which is for wrong data.
INTERRUPTED: Final = 128 + signal.SIGINT
_WHOLE: Final = 1000
_HYPHEN: Final = "\ue000"  # of no text


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
    """Lists each verb with a whole sentence, and says which verb was perhaps meant."""

    context_class = _Context

    def sentence(self, ctx: click.Context, verb: str) -> str:
        """What the help says of a verb."""
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
            near = get_close_matches(args[0], verbs, 1)
            more = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(verbs)}."
            ctx.fail(f"no verb {args[0]!r}; {more}")
        verb, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            command.context_class = _Context
        return verb, command, rest


class Program(Verbs):
    """Turns what went wrong, and Ctrl-C, into one line and an exit status."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            with data_errors():
                result: object = super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        return result
