"""`tensor-dedup verify`: read the store and say what is wrong."""

import click

from tensor_dedup.cli.errors import WrongUse
from tensor_dedup.cli.names import counted
from tensor_dedup.cli.store_verbs import ByteBar, existing, json_option, say, store_option
from tensor_dedup.store import VerifyResult
from tensor_dedup.text_table import human


@click.command(name="verify")
@click.option(
    "--sample",
    type=click.FloatRange(0, 100),
    metavar="P",
    help="Read P percent of the tensors, chosen by chance.",
)
@click.option("--full", is_flag=True, help="Read every byte.")
@store_option
@json_option
@click.pass_context
def command(
    ctx: click.Context, sample: float | None, full: bool, store: str | None, as_json: bool
) -> None:
    """Check the store's bookkeeping, and with --sample or --full the tensors themselves.

    What is damaged is named and kept from readers. Exit status 1 when anything is.
    """
    if full and sample is not None:
        raise WrongUse("--sample and --full exclude each other: give one of them")
    with ByteBar("verifying") as progress:
        share = None if sample is None else sample / 100
        result = existing(store).verify(sample=share, full=full, progress=progress)
    say(result.to_dict(), as_json, *_lines(result))
    if not result.fine:
        ctx.exit(1)


def _lines(result: VerifyResult) -> list[str]:
    lines = [
        f"{fault.kind}: {fault.path}: {fault.what.removeprefix(fault.path + ': ')}"
        for fault in result.faults
    ]
    users = sorted({name for fault in result.faults for name in fault.affected})
    if users:
        lines.append(f"affected: {', '.join(users)}")
    checked = f"{counted(result.checkpoints, 'checkpoint')}, {human(result.bytes_checked)} read"
    return [*lines, f"{counted(len(result.faults), 'fault')} ({result.level}: {checked})"]
