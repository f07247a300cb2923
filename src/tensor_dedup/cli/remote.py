"""`tensor-dedup push`, `pull` and `remote`: checkpoints in object storage and in other folders."""

from contextlib import suppress

import click

from tensor_dedup.cli import Verbs, WrongUse, printable
from tensor_dedup.cli.output import (
    ByteBar,
    Dotted,
    ask,
    cell,
    console,
    counted,
    json_option,
    listing,
    say,
    yes_option,
)
from tensor_dedup.cli.store import existing, name_argument, store_option
from tensor_dedup.errors import TensorDedupError
from tensor_dedup.store import Store
from tensor_dedup.store.remote import (
    Remote,
    RemoteCheckpoint,
    RemoteGcPlan,
    RemoteVerifyResult,
    TransferResult,
)
from tensor_dedup.store.remote.remote import DEFAULT_LEASE_HOURS
from tensor_dedup.text_table import human

_SHOWN = 20


class _TransferBar(ByteBar):
    """Bytes on the wire, rate, time left, and what need not travel."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._saved = 0

    def saved(self, nbytes: int) -> None:
        """So many more bytes are on the other side already."""
        self._saved += nbytes
        self.describe(f"{self._label}, {human(self._saved)} saved")


@click.command(name="push")
@name_argument
@click.argument("url", metavar="URL")
@click.option("--replace", is_flag=True, help="Replace the checkpoint that has this name there.")
@store_option
@json_option
def push(name: str, url: str, replace: bool, store: str | None, as_json: bool) -> None:
    """Send the checkpoint NAME, or all steps of the run NAME, to the remote at URL.

    URL is s3://BUCKET/PREFIX, gs://, az://, file:///FOLDER, or the folder of another store. Only
    tensors that are not there travel, as they are stored. Credentials come from the environment.
    The first push makes the remote, and tries whether the server keeps conditions.
    """
    with _TransferBar("pushing") as progress:
        result = existing(store).push(name, url, replace=replace, progress=progress)
    say(result.to_dict(), as_json, *_lines(name, result, "there"))


@click.command(name="pull")
@click.argument("url", metavar="URL")
@click.argument("name")
@click.option("--replace", is_flag=True, help="Replace the checkpoint that has this name here.")
@store_option
@json_option
def pull(url: str, name: str, replace: bool, store: str | None, as_json: bool) -> None:
    """Fetch the checkpoint NAME, or all steps of the run NAME, from the remote at URL.

    Only tensors that are nowhere in the store travel. Every byte is compared with its digest before
    anything refers to it.
    """
    with _TransferBar("pulling") as progress:
        result = Store.open(store).pull(url, name, replace=replace, progress=progress)
    say(result.to_dict(), as_json, *_lines(name, result, "here"))


def _lines(name: str, result: TransferResult, where: str) -> list[str]:
    if result.unchanged:
        return [f"{name}: unchanged, all of it is {where}"]
    rate = int(result.wire_bytes / result.seconds) if result.seconds > 0 else 0
    steps = f"{counted(len(result.names), 'checkpoint')}, " if len(result.names) > 1 else ""
    return [
        f"{name}: {steps}{human(result.nbytes)}; {counted(result.moved_pieces, 'piece')} of "
        f"{result.pieces} were not {where}",
        f"{human(result.wire_bytes)} on the wire ({human(rate)}/s), "
        f"{human(result.saved_bytes)} saved",
    ]


@click.group(name="remote", cls=Verbs, subcommand_metavar="VERB [OPTIONS]...")
def command() -> None:
    """Remotes: what is there, and what it takes. URL is what `push` and `pull` take."""


def _opened(url: str) -> Remote:
    remote = Remote.open(url)
    folder = remote.store_folder()
    if folder is not None:
        raise WrongUse(f"{folder} is a store; use `tensor-dedup list --store {folder}` and so on")
    return remote


@command.command(name="list")
@click.argument("url", metavar="URL")
@json_option
@click.pass_context
def list_(ctx: click.Context, url: str, as_json: bool) -> None:
    """List the checkpoints of a remote. Exit status 1 when one of them cannot be read."""
    remote = _opened(url)
    found = remote.checkpoints()
    if as_json:
        document = {"url": remote.url, "checkpoints": [each.to_dict() for each in found]}
        say(document, as_json)
    elif found:
        _print(remote, found, usage=False)
    else:
        say({}, as_json, f"{remote.url} holds no checkpoints")
    if any(each.damage is not None for each in found):
        ctx.exit(1)


def _print(remote: Remote, found: list[RemoteCheckpoint], *, usage: bool) -> None:
    table = listing("name", "size", *(["unique"] if usage else []), "tensors", "status")
    for each in found:
        unique = [] if not usage else [human(each.unique_bytes or 0)]
        status = "ok" if each.damage is None else "damaged"
        table.add_row(Dotted(each.name), human(each.nbytes), *unique, str(each.tensors), status)
    out = console()
    out.print(cell(f"remote {remote.url}"), soft_wrap=True)
    out.print(table)
    for each in found:
        if each.damage is not None:
            click.echo(printable(f"{each.name} cannot be read: {each.damage}"))


@command.command(name="show")
@click.argument("url", metavar="URL")
@click.argument("name")
@json_option
def show(url: str, name: str, as_json: bool) -> None:
    """Show the files and tensors of the checkpoint NAME of a remote."""
    found = _opened(url).read(name)
    tensors = [piece for piece in found.pieces if piece.name is not None]
    document = {
        "name": name,
        "manifest": found.manifest,
        "bytes": found.content.nbytes,
        "files": [{"path": file.path, "bytes": file.nbytes} for file in found.content.files],
        "tensors": [
            {
                "name": piece.name,
                "dtype": piece.dtype,
                "shape": [*(piece.shape or ())],
                "bytes": piece.nbytes,
                "digest": piece.digest.hex(),
            }
            for piece in tensors
        ],
    }
    more = len(tensors) - _SHOWN
    say(
        document,
        as_json,
        f"{name}: {human(found.content.nbytes)}, {counted(len(tensors), 'tensor')}",
        *(f"  {file.path}  {human(file.nbytes)}" for file in found.content.files),
        *(
            f"  {piece.name}  {piece.dtype}  {human(piece.nbytes)}  {piece.digest.hex()[:12]}"
            for piece in tensors[:_SHOWN]
        ),
        *([f"and {more} more; --json has all"] if more > 0 else []),
    )


@command.command(name="du")
@click.argument("url", metavar="URL")
@json_option
def du(url: str, as_json: bool) -> None:
    """Say what a remote takes, and what each checkpoint takes for itself alone."""
    remote = _opened(url)
    found = remote.usage()
    if as_json:
        say({"url": remote.url, **found.to_dict()}, as_json)
        return
    _print(remote, [*found.checkpoints], usage=True)
    say(
        {},
        as_json,
        f"{human(found.stored_bytes)} in {counted(found.containers, 'container')}, "
        f"{human(found.unused_bytes)} of them unused",
    )


@command.command(name="delete")
@click.argument("url", metavar="URL")
@click.argument("name")
@yes_option
@json_option
def delete(url: str, name: str, yes: bool, as_json: bool) -> None:
    """Forget the checkpoint NAME of a remote. Its bytes stay until `remote gc` deletes them."""
    remote = _opened(url)
    with suppress(TensorDedupError):  # it may be damaged: then it can be deleted all the more
        remote.read(name)
    ask(f"Delete {name} from {remote.url}?", yes)
    remote.delete(name)
    say({"deleted": name}, as_json, f"{name} is deleted; `remote gc` gives its space back")


@command.command(name="gc")
@click.argument("url", metavar="URL")
@click.option(
    "--lease",
    type=click.FloatRange(min=0),
    default=DEFAULT_LEASE_HOURS,
    show_default=True,
    metavar="HOURS",
    help="Longer than any push takes; with less, nobody may push meanwhile.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@yes_option
@json_option
def gc(url: str, lease: float, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Condemn what no name leads to, and delete what has been condemned for the lease.

    So space comes back in two runs that are a lease apart. Where anything cannot be read, nothing
    is deleted.
    """
    remote = _opened(url)
    plan = remote.gc(lease, dry_run=True)
    if not dry_run:
        if plan.delete:
            ask(f"{'. '.join(_gc_lines(plan))}. Do it?", yes)
        plan = remote.gc(lease)
    say(plan.to_dict(), as_json, *(plan.delete if dry_run else ()), *_gc_lines(plan))


def _gc_lines(plan: RemoteGcPlan) -> list[str]:
    deleted = f"{counted(len(plan.delete), 'object')}, {human(plan.deleted_bytes)}"
    return [
        f"Condemned: {counted(len(plan.condemn), 'object')}, {human(plan.condemned_bytes)}",
        f"{'Deleted' if plan.done else 'To delete'}: {deleted}",
        f"Waiting for the lease: {counted(plan.waiting, 'object')}",
    ]


@command.command(name="verify")
@click.argument("url", metavar="URL")
@click.option("--full", is_flag=True, help="Download and check every byte.")
@json_option
@click.pass_context
def verify(ctx: click.Context, url: str, full: bool, as_json: bool) -> None:
    """Check a remote's bookkeeping, and with --full every byte. Exit status 1 on a fault.

    Containers with faults leave the catalog, so the next push sends again what was in them.
    """
    with ByteBar("verifying") as progress:
        result = _opened(url).verify(full=full, advance=progress.advance)
    say(result.to_dict(), as_json, *_verify_lines(result))
    if not result.fine:
        ctx.exit(1)


def _verify_lines(result: RemoteVerifyResult) -> list[str]:
    lines = [f"{fault.url}: {fault.what.removeprefix(fault.url + ': ')}" for fault in result.faults]
    users = sorted({name for fault in result.faults for name in fault.affected})
    if users:
        lines.append(f"affected: {', '.join(users)}")
    checked = f"{counted(result.checkpoints, 'checkpoint')}, {human(result.bytes_checked)} read"
    return [*lines, f"{counted(len(result.faults), 'fault')} ({checked})"]
