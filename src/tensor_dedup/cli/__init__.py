"""The command line `tensor-dedup VERB [OPTIONS]`.

A verb lives in `tensor_dedup.cli.<verb>` as a click command named `command`. It is imported only
when it is called, so that `--help` stays quick and no verb pays for another's libraries.
"""

import importlib
import keyword
from collections.abc import Mapping

import click

from tensor_dedup.cli.groups import Program

VERBS: Mapping[str, str] = {
    "analyze": "Say which tensors checkpoints have in common, and what sharing them saves.",
    "delete": "Forget a checkpoint of the store.",
    "evict": "Drop from shared memory what nobody uses.",
    "export": "Write a stored checkpoint's files, byte for byte.",
    "gc": "Give back the space of what no stored checkpoint uses.",
    "import": "Take a checkpoint into the store, each distinct tensor once.",
    "list": "List the checkpoints of the store.",
    "pin": "Keep a checkpoint in shared memory.",
    "repair": "Restore what is damaged or lost in the store.",
    "runs": "Training checkpoints: what the runs of a store hold.",
    "serve": "Run the memory manager, which lends weights to the engines of this user.",
    "show": "Show the files and tensors of a stored checkpoint.",
    "stats": "Say how large the store is and what it saves.",
    "status": "Say what the memory manager holds, and for whom.",
    "stop": "End the memory manager.",
    "top": "Watch the memory manager.",
    "unpin": "Let a pinned checkpoint be evicted again.",
    "verify": "Read the store and say what is wrong.",
}


class VerbGroup(Program):
    """Knows its verbs by name and one line, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        # No module can be called `import`.
        module = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        command = importlib.import_module(f"tensor_dedup.cli.{module}").command
        return command if isinstance(command, click.Command) else None

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
    130 interrupted.
    """
