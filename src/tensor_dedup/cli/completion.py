"""`tensor-dedup completion`: scripts with which shells complete verbs, options and names."""

import click
from click.shell_completion import get_completion_class

from tensor_dedup.cli import main
from tensor_dedup.cli.terminal import json_option, say

_PROGRAM = "tensor-dedup"
# Left alone, bash takes RUN@STEP for three words.
_BASH = "COMP_WORDBREAKS=${COMP_WORDBREAKS//@/}\n"


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
def command(shell: str, as_json: bool) -> None:
    """Print a script that lets SHELL complete verbs, options and names in the store.

    \b
    bash, in ~/.bashrc:  eval "$(tensor-dedup completion bash)"
    zsh, in ~/.zshrc:    eval "$(tensor-dedup completion zsh)"
    fish:                tensor-dedup completion fish | source
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(main, {}, _PROGRAM, "_TENSOR_DEDUP_COMPLETE").source()
    text = (_BASH if shell == "bash" else "") + script
    if as_json:
        say({"shell": shell, "script": text}, as_json)
    else:
        click.echo(text)
