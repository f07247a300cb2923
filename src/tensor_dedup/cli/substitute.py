"""`tensor-dedup substitute`: a fine-tune with chosen layers of its base."""

from typing import TextIO

import click
from rich.table import Table

from tensor_dedup.cli import printable
from tensor_dedup.cli.output import ByteBar, Dotted, byte_size, console, counted, json_option, say
from tensor_dedup.cli.store import store_option
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.substitution import Substitution, substitute
from tensor_dedup.text_table import human


@click.command(name="substitute")
@click.argument("base", metavar="BASE")
@click.argument("tune", metavar="TUNE")
@click.option(
    "--layers",
    metavar="SPEC",
    help="Which layers: numbers and patterns, for example 0-7,12 or '*embed*'.",
)
@click.option(
    "--budget",
    type=byte_size(),
    help="What the output may add beside BASE, for example 1.4GiB: layers are chosen.",
)
@click.option(
    "--samples",
    type=click.File(),
    help="A file with one text a line: says how far outputs move on them, and --budget uses it.",
)
@click.option("--output", required=True, type=click.Path(), help="A folder that is not there yet.")
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
    """Write fine-tune TUNE with chosen layers of BASE, byte for byte, so that they are shared.

    This changes what the model computes: measure its quality before you use it. TUNE and BASE stay
    as they are. With --budget those layers are taken first whose numbers have moved least for each
    byte; with --samples too, those that move the outputs least. The new files say in their metadata
    which tensors come from BASE.
    """
    with ByteBar("hashing") as progress:
        found = substitute(
            base,
            tune,
            output,
            layers=layers,
            budget=budget,
            samples=[line.strip() for line in samples or () if line.strip()],
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
    out.print(f"{printable(found.output)}: {count} of BASE")
    out.print(
        f"Beside BASE it adds {human(found.adds_bytes)}, where TUNE adds "
        f"{human(found.tune_adds_bytes)}."
    )
    if found.left_out:
        names = ", ".join(map(printable, found.left_out))
        out.print(f"Not copied, for they hold TUNE's weights in other forms: {names}.")
    out.print(_movement(found))


def _movement(found: Substitution) -> str:
    if found.outputs is None:
        return "Its outputs are no longer TUNE's: --samples says how far they move."
    moved = f"On {counted(found.outputs.samples, 'sample')} its outputs are "
    moved += f"{100 * found.outputs.distance:.2f} % from TUNE's"
    if found.outputs.agreement is not None:
        moved += f"; the likeliest token is the same at {100 * found.outputs.agreement:.1f} %"
    return moved + "."


def _layers(found: Substitution) -> Table:
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
