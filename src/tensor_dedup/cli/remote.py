"""`tensor-dedup push`, `pull` and `remote`: checkpoints in buckets, folders and web servers."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import click

from tensor_dedup.api import Store
from tensor_dedup.cli import INTERRUPTED, Verbs, WrongUse, printable, remember_given
from tensor_dedup.cli.store import existing, name_argument, store_option, store_or_empty
from tensor_dedup.cli.tables import counted, fitted
from tensor_dedup.cli.terminal import (
    ByteBar,
    FiniteRange,
    ask,
    console,
    dry_run_option,
    json_option,
    say,
    say_lines,
    yes_option,
)
from tensor_dedup.remote import (
    Remote,
    RemoteCheckpoint,
    RemoteGcPlan,
    RemoteVerifyResult,
    TransferResult,
    layout,
)
from tensor_dedup.remote.latest import latest_on
from tensor_dedup.remote.oci.artifact import Artifact, default_name, is_artifact
from tensor_dedup.remote.oci.registry import ArtifactName, RegistryRepository
from tensor_dedup.remote.remote import DEFAULT_LEASE_HOURS
from tensor_dedup.remote.upkeep import owner
from tensor_dedup.remote.urls import last_component
from tensor_dedup.store.errors import NoStoreError
from tensor_dedup.store.format.manifests import named_tensors
from tensor_dedup.store.format.names import check_name, marked_by, run_of_latest
from tensor_dedup.text_table import human
from tensor_dedup.types import STORE_SCHEME, is_url

_DIGITS: Final = 12  # of a digest
# What has to be tidied up after Ctrl-C takes less, and what waits for a server may take more.
_PATIENCE_S: Final = 5.0
_SHOW_CURSOR: Final = b"\x1b[?25h\n"


def run_of_url(url: str) -> str:
    """Return the name that a run has by default where it is published at `url`.

    Raises:
        WrongUse: No name follows from the URL.
    """
    found = last_component(url)
    if not found:
        raise WrongUse("no run follows from the URL; name it with --run")
    return found


@contextmanager
def interruptible() -> Iterator[None]:
    """Context manager: while it is active, Ctrl-C ends the process though a server does not answer.

    A request cannot be given up before it is answered or 20 minutes are over, and Python itself
    cannot do anything while its main thread waits for one. What a push or a pull leaves when it
    ends like this is what it leaves when it is killed: the next one goes on from there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended, (ours, wakeup) = threading.Event(), socket.socketpair()
    wakeup.setblocking(False)

    def watch() -> None:
        with ours:
            while number := ours.recv(1):
                if number[0] == signal.SIGINT and not ended.wait(_PATIENCE_S):
                    if sys.stderr.isatty():
                        os.write(2, _SHOW_CURSOR)
                    os.write(2, b"interrupted\n")
                    os._exit(INTERRUPTED)

    with wakeup:
        before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            signal.set_wakeup_fd(before)


class _TransferBar(ByteBar):
    """Bytes on the wire, rate, time left, and what need not travel."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._saved = 0

    def saved(self, nbytes: int) -> None:
        """So many more bytes are on the other side already."""
        self._saved += nbytes
        self.describe(f"{self._label}, {human(self._saved)} saved")


def _check_order(name: str, url: str, usage: str) -> None:
    """Say which argument comes first where they are the other way round.

    The URL is not repeated: it may hold a secret.
    """
    if name.startswith(STORE_SCHEME):
        raise WrongUse(f"write the name without {STORE_SCHEME}: tensor-dedup {usage}")
    is_path = name.startswith(("/", "./", "../")) and not is_url(url) and "/" not in url
    if is_url(name) or is_path:
        raise WrongUse(f"the name stands where the URL belongs: tensor-dedup {usage}")


# An error that repeats the URL in a hint comes after it was opened, so there is no secret in it.
url_argument = click.argument("url", metavar="URL", callback=remember_given)


@click.command(name="push")
@name_argument
@url_argument
@click.option("--replace", is_flag=True, help="Replace the checkpoint that has this name there.")
@dry_run_option
@store_option
@json_option
def push(
    name: str, url: str, replace: bool, dry_run: bool, store: str | None, as_json: bool
) -> None:
    """Send the checkpoint NAME, or all steps of the run NAME, to the remote at URL.

    URL is s3://BUCKET/PREFIX, gs://, az://, file:///FOLDER, or the folder of another store. Only
    tensors that the remote lacks are uploaded, as they are stored. Credentials come from the
    environment. The first push creates the remote, and tests whether the server honours conditional
    writes.

    oci://REGISTRY/REPOSITORY:TAG creates an artifact that any registry client can pull. Layers that
    the registry has are not uploaded again.
    """
    _check_order(name, url, "push NAME URL")
    with interruptible(), _TransferBar("pushing") as progress:
        result = existing(store).push(
            url, name, replace=replace, progress=progress, dry_run=dry_run
        )
    say(result.to_dict(), as_json, *_lines(_moved(name, result), result, "there"))


@click.command(name="pull")
@url_argument
@click.argument("name", required=False, callback=remember_given)
@click.option("--replace", is_flag=True, help="Replace the checkpoint that has this name here.")
@dry_run_option
@store_option
@json_option
def pull(
    url: str, name: str | None, replace: bool, dry_run: bool, store: str | None, as_json: bool
) -> None:
    """Fetch the checkpoint NAME, or all steps of the run NAME, from the remote at URL.

    Only tensors that the store lacks are downloaded. Every byte is verified against its digest
    before it can be used.

    An artifact at oci://REGISTRY/REPOSITORY:TAG is stored as NAME, by default that of its
    repository. If another program pushed it, all of it is downloaded, but each tensor is still
    stored once.
    """
    if name is None:
        if not is_artifact(url):
            raise WrongUse("say which checkpoint: tensor-dedup pull URL NAME")
        name = default_name(url)
    _check_order(name, url, "pull URL NAME")
    with interruptible(), _TransferBar("pulling") as progress:
        target = store_or_empty(store) if dry_run else _store_for(store, url, name)
        result = target.pull(url, name, replace=replace, progress=progress, dry_run=dry_run)
    say(result.to_dict(), as_json, *_lines(_moved(name, result), result, "here"))


def _store_for(store: str | None, url: str, name: str) -> Store:
    """The store to pull into: a new one only where there is something to pull."""
    try:
        return existing(store)
    except NoStoreError:
        if is_artifact(url):
            with RegistryRepository(ArtifactName.parse(url)) as registry:
                Artifact(registry)
        else:
            remote = Remote.open(url)
            remote.names_of(latest_on(remote, check_name(name)))
    return Store.open(store)


def _moved(name: str, result: TransferResult) -> str:
    """The name of what was transferred: for RUN@latest, the step."""
    return name if run_of_latest(name) is None else result.names[0]


def _lines(name: str, result: TransferResult, where: str) -> list[str]:
    if result.unchanged:
        return [f"{name}: unchanged, all of it is {where}"]
    if not result.done:
        return [_planned(name, result, where)]
    rate = int(result.wire_bytes / result.seconds) if result.seconds > 0 else 0
    steps = f"{counted(len(result.names), 'checkpoint')}, " if len(result.names) > 1 else ""
    anchors = counted(result.anchor_pieces, "further piece")
    were = "was" if result.moved_pieces == 1 else "were"
    return [
        f"{name}: {steps}{human(result.nbytes)}; {counted(result.moved_pieces, 'piece')} of "
        f"{result.pieces} {were} not {where}"
        + (f"; {anchors} came too: differences refer to them" if result.anchor_pieces else ""),
        f"{human(result.wire_bytes)} on the wire ({human(rate)}/s), "
        f"{human(result.saved_bytes)} saved",
    ]


def _planned(name: str, result: TransferResult, where: str) -> str:
    steps = f"{counted(len(result.names), 'checkpoint')}, " if len(result.names) > 1 else ""
    rest = "would be transferred; nothing was written"
    if not result.pieces:  # an artifact of another program: what it holds is not known before
        return f"{name}: {human(result.moved_bytes)} {rest}"
    were = "is" if result.moved_pieces == 1 else "are"
    missing = f"{counted(result.moved_pieces, 'piece')} of {result.pieces} {were} not {where}"
    moved = f"{human(result.moved_bytes)} (before encoding)"
    return f"{name}: {steps}{human(result.nbytes)}; {missing}; {moved} {rest}"


@click.group(name="remote", cls=Verbs, subcommand_metavar="VERB [OPTIONS]...")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Inspect and maintain a remote. URL is that of `push` and `pull`."""
    ctx.with_resource(interruptible())


def opened_remote(url: str) -> Remote:
    """Open the remote at `url`.

    Raises:
        WrongUse: The URL is that of an artifact, or of the folder of a store.
    """
    if is_artifact(url):
        name = ArtifactName.parse(url)  # which shows no secret of a URL that holds one
        raise WrongUse(
            f"{name.url}: an OCI registry holds single artifacts; "
            "only push and pull take oci:// URLs"
        )
    remote = Remote.open(url)
    folder = remote.store_folder()
    if folder is not None:
        raise WrongUse(f"{folder} is a store; use `tensor-dedup list --store {folder}` and so on")
    return remote


@command.command(name="list")
@url_argument
@json_option
@click.pass_context
def list_(ctx: click.Context, url: str, as_json: bool) -> None:
    """List the checkpoints of a remote, and each training run with its number of steps.

    The exit status is 1 if a checkpoint cannot be read, or was found damaged or lost.
    """
    remote = opened_remote(url)
    found = remote.checkpoints()
    if as_json:
        document = {"url": remote.url, "checkpoints": [each.to_dict() for each in found]}
        say(document, as_json)
    elif found:
        _print(remote, found)
    else:
        say({}, as_json, f"{remote.url} holds no checkpoints")
    if any(each.damage is not None for each in found):
        ctx.exit(1)


def _print(
    remote: Remote, found: Sequence[RemoteCheckpoint], of_runs: Mapping[str, int] | None = None
) -> None:
    """A row for each checkpoint and each run; with `of_runs`, what each alone needs."""
    rows: dict[tuple[str, bool], list[RemoteCheckpoint]] = {}
    for each in found:
        rows.setdefault(owner(each.name), []).append(each)
    steps = [str(len(held)) if is_run else "-" for (_, is_run), held in rows.items()]
    columns = {
        "steps": steps,
        "size": [human(sum(each.nbytes for each in held)) for held in rows.values()],
    }
    if of_runs is not None:
        columns["alone"] = [
            human((of_runs.get(name, 0) if is_run else held[0].unique_bytes) or 0)
            for (name, is_run), held in rows.items()
        ]
    columns["tensors"] = [str(sum(each.tensors for each in held)) for held in rows.values()]
    columns["status"] = [
        "ok" if all(each.damage is None for each in held) else "damaged" for held in rows.values()
    ]
    if {*steps} == {"-"}:
        del columns["steps"]
    out = console()
    table, left_out = fitted(out, "name", [name for name, _ in rows], columns, ["tensors", "steps"])
    say_lines(f"remote {remote.url}")
    out.print(table)
    damaged = [each for each in found if each.damage is not None]
    say_lines(
        *([left_out] if left_out else []),
        *(_damage_of(each) for each in damaged),
    )


def _damage_of(checkpoint: RemoteCheckpoint) -> str:
    if not checkpoint.manifest:
        return f"{checkpoint.name} cannot be read: {checkpoint.damage}"
    return f"{checkpoint.name} may be damaged: {checkpoint.damage}; push it again where it is whole"


@command.command(name="show")
@url_argument
@click.argument("name")
@json_option
def show(url: str, name: str, as_json: bool) -> None:
    """Show the files and tensors of the checkpoint NAME of a remote, or the steps of a run."""
    _check_order(name, url, "remote show URL NAME")
    remote = opened_remote(url)
    name = latest_on(remote, name)
    steps = remote.steps(name)
    if steps:
        _show_run(remote, name, steps, as_json)
        return
    found = remote.read(name)
    tensors = list(named_tensors(found.content, found.pieces))
    document = {
        "name": name,
        "manifest": found.manifest,
        "bytes": found.content.nbytes,
        "files": [{"path": file.path, "bytes": file.nbytes} for file in found.content.files],
        "tensors": [
            {
                "name": tensor,
                "dtype": piece.dtype,
                "shape": [*(piece.shape or ())],
                "bytes": piece.nbytes,
                "digest": piece.digest.hex(),
            }
            for tensor, piece in tensors
        ],
    }
    if as_json:
        say(document, as_json)
        return
    out = console()
    files, _ = fitted(
        out,
        "file",
        [file.path for file in found.content.files],
        {"size": [human(file.nbytes) for file in found.content.files]},
        [],
    )
    columns = {
        "dtype": [printable(piece.dtype or "-") for _, piece in tensors],
        "shape": ["x".join(map(str, piece.shape or ())) or "-" for _, piece in tensors],
        "size": [human(piece.nbytes) for _, piece in tensors],
        "digest": [piece.digest.hex()[:_DIGITS] for _, piece in tensors],
    }
    names = [tensor for tensor, _ in tensors]
    table, left_out = fitted(out, "tensor", names, columns, ["digest", "dtype"])
    say_lines(f"{name}: {human(found.content.nbytes)}, {counted(len(tensors), 'tensor')}")
    if found.content.files:
        out.print(files)
    out.print(table)
    say_lines(*([left_out] if left_out else []))


def _show_run(remote: Remote, name: str, steps: Sequence[str], as_json: bool) -> None:
    found = remote.checkpoints(steps)
    document = {"name": name, "checkpoints": [each.to_dict() for each in found]}
    say(document, as_json, f"{name}: {counted(len(found), 'step')}")
    if not as_json:
        columns = {
            "size": [human(each.nbytes) for each in found],
            "tensors": [str(each.tensors) for each in found],
            "status": ["ok" if each.damage is None else "damaged" for each in found],
        }
        out = console()
        out.print(fitted(out, "name", [each.name for each in found], columns, ["tensors"])[0])


@command.command(name="du")
@url_argument
@json_option
@click.pass_context
def du(ctx: click.Context, url: str, as_json: bool) -> None:
    """Show the space that a remote takes, and what each checkpoint or run alone needs.

    The exit status is 1 if a checkpoint cannot be read, or was found damaged or lost.
    """
    remote = opened_remote(url)
    found = remote.usage()
    if as_json:
        say({"url": remote.url, **found.to_dict()}, as_json)
    else:
        _print(remote, found.checkpoints, found.run_unique_bytes)
        meaning = ": no checkpoint needs that" if found.unused_bytes else ""
        say_lines(
            f"{human(found.stored_bytes)} in {counted(found.containers, 'container')}, "
            f"{human(found.unused_bytes)} of it unused{meaning}"
        )
    if any(each.damage is not None for each in found.checkpoints):
        ctx.exit(1)


@command.command(name="delete")
@url_argument
@click.argument("name")
@yes_option
@json_option
def delete(url: str, name: str, yes: bool, as_json: bool) -> None:
    """Delete the checkpoint NAME, or all steps of the run NAME, from a remote.

    `remote gc` frees the space that no other uses.
    """
    _check_order(name, url, "remote delete URL NAME")
    remote = opened_remote(url)
    steps = remote.steps(name)
    # The mark of a step goes with it.
    marks = [mark for mark in remote.marks(name) if marked_by(mark) not in steps]
    count = counted(len(steps) + len(marks), "step")
    what = f"{name} with {count}" if steps or marks else name
    ask(f"Delete {what} from {remote.url}?", yes)
    for each in [*steps, *marks] or [name]:
        remote.delete(each)
    say(
        {"deleted": name},
        as_json,
        f"{what} is deleted; `tensor-dedup remote gc URL`, run once a week, frees its space",
    )


@command.command(name="gc")
@url_argument
@click.option(
    "--lease",
    type=FiniteRange(min=0),
    default=DEFAULT_LEASE_HOURS,
    show_default=True,
    metavar="HOURS",
    help="A time longer than any push takes; with a shorter one, nobody may push meanwhile.",
)
@dry_run_option
@yes_option
@json_option
def gc(url: str, lease: float, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Condemn objects that no checkpoint uses, and delete those condemned for the lease.

    An unused object is condemned once it is older than the lease, and deleted by a run that is at
    least a lease later. So old objects are gone after two runs, a lease apart, and new ones after
    three. With a lease of 0, while nobody pushes, one run deletes almost all unused objects; the
    catalog that it replaces is left to the next run. If anything cannot be read, nothing is
    deleted.
    """
    remote = opened_remote(url)
    plan = remote.gc(lease, dry_run=True)
    if not dry_run:
        if plan.delete:
            hurry = "" if lease >= DEFAULT_LEASE_HOURS else " Nobody may push meanwhile."
            ask(f"{'. '.join(_gc_lines(plan, lease))}.{hurry} Do it?", yes)
        plan = remote.gc(lease)
    say(plan.to_dict(), as_json, *(plan.delete if dry_run else ()), *_gc_lines(plan, lease))


def _gc_lines(plan: RemoteGcPlan, lease: float) -> list[str]:
    new, before = len(plan.condemn), plan.waiting - len(plan.condemn)
    deleted = f"{counted(len(plan.delete), 'object')}, {human(plan.deleted_bytes)}"
    lines = [f"{'Deleted' if plan.done else 'To delete'}: {deleted}"]
    if new:
        lines.append(
            f"{'Condemned' if plan.done else 'To condemn'}: {counted(new, 'unused object')}, "
            f"{human(plan.condemned_bytes)}, which a gc {lease:g} hours later deletes"
        )
    if before > 0:
        lines.append(
            f"Waiting: {counted(before, 'object')}, condemned less than {lease:g} hours ago or "
            "found damaged"
        )
    if plan.young:
        lines.append(
            f"Too young: {counted(plan.young, 'unused object')}, {human(plan.young_bytes)}, "
            f"written less than {lease:g} hours ago, which a later gc condemns"
        )
    return lines


@command.command(name="verify")
@url_argument
@click.option("--full", is_flag=True, help="Download and check every byte.")
@json_option
@click.pass_context
def verify(ctx: click.Context, url: str, full: bool, as_json: bool) -> None:
    """Check a remote's bookkeeping, and with --full every byte. The exit status is 1 on a fault.

    Damaged containers are removed from the catalog, so that the next push of a checkpoint that
    needs them sends their contents again.
    """
    with ByteBar("verifying") as progress:
        result = opened_remote(url).verify(full=full, advance=progress.advance)
    say(result.to_dict(), as_json, *_verify_lines(result, full, url))
    if not result.fine:
        ctx.exit(1)


def _verify_lines(result: RemoteVerifyResult, full: bool, url: str) -> list[str]:
    lines = [f"{fault.url}: {fault.what.removeprefix(fault.url + ': ')}" for fault in result.faults]
    users = sorted({name for fault in result.faults for name in fault.affected})
    if users:
        lines.append(f"affected: {', '.join(users)}")
        # A reference that cannot be read is replaced only on request.
        unread = {each.url for each in result.faults if each.what.startswith(each.url)}
        is_unread = any(each.endswith(layout.ref_key(users[0])) for each in unread)
        again = f"tensor-dedup push {users[0]} {url}{' --replace' if is_unread else ''}"
        others = ", and so on for the others" if users[1:] else ""
        lines.append(f"to mend it, run `{again}` from a store that has it{others}")
    checked = f"{counted(result.checkpoints, 'checkpoint')}, {human(result.bytes_checked)} read"
    lines.append(f"{counted(len(result.faults), 'fault')} ({checked})")
    if not full:
        lines.append("only bookkeeping was checked: --full reads the tensors")
    return lines
