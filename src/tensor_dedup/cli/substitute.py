"""`tensor-dedup substitute`: a fine-tune with chosen layers of its base."""

from typing import TYPE_CHECKING, TextIO

import click
from rich.table import Table

from tensor_dedup.cli import WrongUse
from tensor_dedup.cli.store import store_option
from tensor_dedup.cli.tables import Dotted, counted
from tensor_dedup.cli.terminal import ByteBar, byte_size, console, json_option, say, say_lines
from tensor_dedup.formats.left_out import LeftOutReason
from tensor_dedup.formats.weight_choice import why_left_out
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.text_table import human

if TYPE_CHECKING:
    from tensor_dedup.planning.substitution import Substitution


@click.command(name="substitute")
@click.argument("base", metavar="BASE")
@click.argument("tune", metavar="TUNE")
@click.option(
    "--layers",
    metavar="SPEC",
    help="The layers to replace: numbers and patterns, for example 0-7,12 or '*embed*'.",
)
@click.option(
    "--budget",
    type=byte_size(),
    metavar="SIZE",
    help="Choose layers so that the output adds at most this much to BASE, for example 1.4GiB.",
)
@click.option(
    "--samples",
    type=click.File(),
    metavar="FILE",
    help="A file with one text per line, to measure how far the outputs move; --budget uses it.",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(),
    metavar="DIR",
    help="A folder that does not exist.",
)
@store_option
@json_option
def command(
    base: str,
    tune: str,
    layers: str | None,
    budget: int | None,
    samples: TextIO | None,
    output: str,
    store: str | None,
    as_json: bool,
) -> None:
    """Write a copy of TUNE in which chosen layers are those of BASE, byte for byte, to share them.

    This changes what the model computes: measure its quality before you use it. TUNE and BASE stay
    as they are. With --budget, layers whose values moved least for their size are replaced first;
    with --samples as well, layers that change the outputs least. The metadata of the new files
    names the tensors that come from BASE.
    """
    from tensor_dedup.planning.substitution import substitute  # it needs torch; the help does not

    with ByteBar("hashing") as progress:
        found = substitute(
            base,
            tune,
            output,
            layers=layers,
            budget=budget,
            samples=_texts(samples),
            hints=HintIndex(),
            store=store,
            progress=progress,
        )
    if as_json:
        say(found.to_dict(), as_json)
        return
    out = console()
    if found.layers:
        out.print(_layers(found))
        out.print()
    count = counted(sum(len(layer.tensors) for layer in found.layers), "tensor")
    adds, tune_adds = human(found.adds_bytes), human(found.tune_adds_bytes)
    say_lines(
        f"{found.output}: {count} taken from BASE",
        f"It adds {adds} to BASE, where TUNE adds {tune_adds}.",
    )
    apart = (LeftOutReason.TRAINING_STATE, LeftOutReason.UNFINISHED)
    why = {path: why_left_out(path) for path in found.left_out}
    others = [path for path in why if why[path] not in apart]
    if others:
        named = ", ".join(others)
        say_lines(f"Not copied, because they hold TUNE's weights in other forms: {named}.")
    for reason in apart:
        if paths := [path for path in why if why[path] is reason]:
            say_lines(f"Not copied, {reason.value}: {', '.join(paths)}.")
    say_lines(_movement(found))


def _texts(samples: TextIO | None) -> list[str]:
    if samples is None:
        return []
    texts = [line.strip() for line in samples if line.strip()]
    if not texts:
        raise WrongUse(f"--samples {samples.name}: there is no text in it; give one a line")
    return texts


def _movement(found: "Substitution") -> str:
    if all(layer.distance == 0 for layer in found.layers):
        return "Nothing changed: it computes what TUNE does."
    if found.outputs is None:
        return "Its outputs differ from TUNE's: --samples measures by how much."
    moved = f"On {counted(found.outputs.samples, 'sample')} its outputs are "
    if found.outputs.distance is None:
        moved += "infinitely far from TUNE's, or no numbers"
    else:
        moved += f"{100 * found.outputs.distance:.2f} % from TUNE's"
    if found.outputs.agreement is not None:
        moved += f"; the likeliest token is the same at {100 * found.outputs.agreement:.1f} %"
    return moved + "."


def _layers(found: "Substitution") -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("from BASE")
    table.add_column("tensors", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("distance", justify="right", no_wrap=True)
    if found.outputs is not None:
        table.add_column("outputs move", justify="right", no_wrap=True)
    for layer in found.layers:
        moved = [layer.distance, *([layer.output_distance] if found.outputs is not None else [])]
        shares = ["-" if each is None else f"{100 * each:.2f} %" for each in moved]
        table.add_row(Dotted(layer.name), str(len(layer.tensors)), human(layer.nbytes), *shares)
    return table
