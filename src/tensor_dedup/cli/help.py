"""`tensor-dedup help`: what `--help` after a verb says."""

from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from tensor_dedup.cli import main
from tensor_dedup.cli.terminal import json_option, say


def _next_verbs(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    found = _context_of(context, context.params.get("verb") or ())
    if not isinstance(found.command, click.Group):
        return []
    verbs = found.command.list_commands(found)
    return [CompletionItem(verb) for verb in verbs if verb.startswith(incomplete)]


def _context_of(context: click.Context, verb: Sequence[str]) -> click.Context:
    """The context in which `verb`, the words of a verb, would print its help."""
    root = context.find_root()
    found = click.Context(main, info_name=root.info_name, **main.context_settings)
    for word in verb:
        if not isinstance(found.command, click.Group):
            raise click.UsageError(f"{found.command_path!r} has no verbs of its own", context)
        _, command, _ = found.command.resolve_command(found, [word])
        assert command is not None  # or the group has said which verbs there are
        found = command.context_class(command, parent=found, info_name=word)
    return found


@click.command(name="help")
@click.argument("verb", nargs=-1, shell_complete=_next_verbs)
@json_option
@click.pass_context
def command(context: click.Context, verb: Sequence[str], as_json: bool) -> None:
    """Show what `tensor-dedup VERB --help` says, or all verbs.

    A verb of a verb takes two words, for example `tensor-dedup help runs prune`.
    """
    found = _context_of(context, verb)
    text = found.get_help()
    if as_json:
        say({"command": found.command_path, "help": text}, as_json)
    else:
        click.echo(text)
