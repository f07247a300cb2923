"""The verbs that talk to a running memory manager: status, top, pin, unpin, evict, stop."""

import errno
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, TypeVar

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tensor_dedup.cli import NobodyThere, WrongUse
from tensor_dedup.cli.tables import Dotted, counted, fitted
from tensor_dedup.cli.terminal import FiniteRange, console, json_option, say, screen, short
from tensor_dedup.memory_manager.client.admin import Admin, Overview
from tensor_dedup.memory_manager.client.names import checkpoint_name, printed
from tensor_dedup.memory_manager.cuda.nvml import DeviceUse, NotAvailable, use_of
from tensor_dedup.memory_manager.errors import ManagerGoneError
from tensor_dedup.memory_manager.protocol.paths import (
    ENVIRONMENT,
    default_socket,
    device_socket,
    socket_path,
)
from tensor_dedup.memory_manager.protocol.tables import ClientRow
from tensor_dedup.suggestions import nearest
from tensor_dedup.text_table import human

_DEVICE: Final = "tensor_dedup.device"
_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def socket_option(verb: _Verb) -> _Verb:
    """Add the option `--socket PATH` to a verb, which gets it as `socket`; None by default."""
    return _socket_option(verb, None)


def place_options(verb: _Verb) -> _Verb:
    """Add `--socket PATH` and `--device UUID` to a verb, which gets both as one argument `socket`.

    With `--device`, `socket` is the socket of the manager for that GPU.
    """
    device = click.option(
        "--device",
        metavar="UUID",
        expose_value=False,
        is_eager=True,  # or the socket would be looked at first
        callback=_remember_device,
        help="Ask the manager of this GPU's memory.",
    )
    return device(_socket_option(verb, _beside))


def _socket_option(verb: _Verb, callback: Callable[..., Any] | None) -> _Verb:
    return click.option(
        "--socket",
        type=click.Path(dir_okay=False),
        metavar="PATH",
        callback=callback,
        help=f"The manager's socket; by default ${ENVIRONMENT}, else `socket` of "
        f"tensor-dedup.toml, else {short(default_socket())}.",
    )(verb)


def _remember_device(
    context: click.Context, _parameter: click.Parameter, value: str | None
) -> None:
    if value is not None:
        check_uuid(value)
    context.meta[_DEVICE] = value


def check_uuid(value: str) -> None:
    """Raise BadParameter if `value` is no GPU's UUID, nor the beginning of one."""
    if re.fullmatch(r"GPU-[0-9a-f]{8}[0-9a-f-]*", value):
        return
    if value.startswith("MIG-"):
        advice = f"for a slice of MIG write GPU- for MIG-: {value.replace('MIG-', 'GPU-', 1)}"
    else:
        advice = "`nvidia-smi -L` shows them, as GPU-01234567-..."
    raise click.BadParameter(f"{value!r} is not the UUID of a GPU; {advice}")


def _beside(context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    device = context.meta.get(_DEVICE)
    return str(device_socket(socket_path(value), device)) if device else value


def _admin(socket: str | None) -> Admin:
    """A connection for the verb that runs, to the manager at what its options name."""
    return Admin(socket, device=click.get_current_context().meta.get(_DEVICE) or "")


def on_device(admin: Admin) -> DeviceUse | NotAvailable | None:
    """Return what NVML reports about the GPU whose memory the manager lends.

    The result is None if the manager lends host memory.
    """
    return use_of(admin.device) if admin.device else None


def document(overview: Overview, use: DeviceUse | NotAvailable | None) -> dict[str, Any]:
    """Return an overview of a manager as a JSON object.

    `use` is what NVML reports about the manager's GPU, which is added as `device`. It is None for a
    manager of host memory.
    """
    return overview.to_dict() | ({} if use is None else {"device": use.to_dict()})


def numbers(overview: Overview, use: DeviceUse | NotAvailable | None = None) -> Table:
    """Return a table with the manager's totals, one in each row.

    `use` is what NVML reports about the manager's GPU, or None for a manager of host memory.
    """
    t = overview.totals
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    layers, leases = counted(t.records, "layer"), counted(t.leases, "lease")
    waiting = counted(t.waiting, "client")
    for name, value in (
        ("manager", f"process {t.pid} at {t.name}, up {_time(t.uptime_s)}"),
        ("budget", f"{human(t.charged)} of {human(t.budget)} in use"),
        (
            "residents",
            f"{counted(t.residents, 'tensor')}, {human(t.resident_bytes)}; {layers}",
        ),
        ("leased", f"{human(t.leased_bytes)}, {leases} of {_processes(overview)}"),
        ("saved", _saving(overview)),
        ("pinned", human(t.pinned_bytes) + (f" ({', '.join(t.pins)})" if t.pins else "")),
        ("look-ups", f"{counted(t.hits, 'layer')} found, {t.misses} not; {t.published} published"),
        ("builds", f"{t.builds} under way, {waiting} waiting, {t.takeovers} taken over"),
        ("evicted", human(t.evicted_bytes)),
    ):
        table.add_row(name, Dotted(value))
    if t.leaf_shared_bytes:
        leaves = f"{human(t.leaf_shared_bytes)} of tensors that are not shared whole"
        table.add_row("by leaf", leaves)
    if t.lingering_bytes:
        table.add_row("lingering", f"{human(t.lingering_bytes)} of processes that were cut off")
    if isinstance(use, DeviceUse):
        others = len({each.pid for each in use.processes} - {row.pid for row in overview.clients})
        table.add_row(
            "GPU", f"{use.name}: {human(use.used)} of {human(use.total)} in use, as NVML counts"
        )
        here = "1 process" if len(use.processes) == 1 else f"{len(use.processes)} processes"
        table.add_row("", f"{here} on it, {others} no clients of this")
    elif use is not None:
        table.add_row("GPU", f"not available: {use.reason}")
    return table


def _saving(overview: Overview) -> str:
    saved, leased = overview.saved_bytes, overview.totals.leased_bytes
    if not saved:
        return f"{human(0)}: no two processes use the same tensor"
    share = saved / (saved + leased)
    return f"{human(saved)} of {human(saved + leased)} by sharing ({100 * share:.0f} %)"


def _processes(overview: Overview) -> str:
    count = len({row.pid for row in overview.clients})
    return "1 process" if count == 1 else f"{count} processes"


def clients(
    out: Console, overview: Overview, use: DeviceUse | NotAvailable | None = None
) -> tuple[Table, str]:
    """Return a table of client processes and their leases, and a line that names left-out columns.

    The leases of all connections of a process are added up. If `use` has a report of NVML, a column
    shows each process's use of the GPU. Columns are left out if `out` is too narrow. If none is
    left out, the line is "".
    """
    of_pid: dict[int, list[ClientRow]] = {}
    for row in overview.clients:
        of_pid.setdefault(row.pid, []).append(row)
    processes = list(of_pid.values())
    columns = {
        "pid": [str(pid) for pid in of_pid],
        "leases": [str(sum(row.leases for row in rows)) for rows in processes],
        "leased": [human(sum(row.leased_bytes for row in rows)) for rows in processes],
        "builds": [str(sum(row.builds for row in rows)) for rows in processes],
        "connected": [_time(max(row.connected_s for row in rows)) for rows in processes],
    }
    if isinstance(use, DeviceUse):
        columns["on the GPU"] = [_of_process(use, pid) for pid in of_pid]
    names = [_client(rows) for rows in processes]
    return fitted(out, "client", names, columns, ["builds", "connected", "leases"])


def _client(rows: Sequence[ClientRow]) -> str:
    """The names that the connections of one process gave, each once."""
    names = ", ".join(dict.fromkeys(row.name for row in rows))
    return names + (f" ({len(rows)} connections)" if len(rows) > 1 else "")


def _of_process(use: DeviceUse, pid: int) -> str:
    found = use.of(pid)
    if found is None:
        return "-"
    return "?" if found.nbytes is None else human(found.nbytes)


def checkpoints(out: Console, overview: Overview) -> tuple[Table, str]:
    """Return a table of the bytes of each checkpoint, and a line that names left-out columns.

    A tensor that several checkpoints share counts for each of them. Columns are left out if `out`
    is too narrow. If none is left out, the line is "".
    """
    rows = overview.checkpoints
    columns = {
        "tensors": [str(row.residents) for row in rows],
        "size": [human(row.nbytes) for row in rows],
        "in use": [human(row.leased_bytes) for row in rows],
        "pinned": ["yes" if row.pinned else "" for row in rows],
    }
    return fitted(out, "checkpoint", [row.name for row in rows], columns, ["tensors", "pinned"])


def builds(out: Console, overview: Overview) -> tuple[Table, str]:
    """Return a table of the puts in progress, and a line that names left-out columns.

    In a put, a client adds tensors to the manager. Columns are left out if `out` is too narrow. If
    none is left out, the line is "".
    """
    rows = overview.builds
    columns = {
        "pid": [str(row.pid) for row in rows],
        "state": [row.state for row in rows],
        "layers": [str(row.keys) for row in rows],
        "slab": [human(row.nbytes) for row in rows],
        "silent for": [f"{row.silent_s:.1f} s" for row in rows],
    }
    return fitted(out, "put", [str(row.put) for row in rows], columns, ["layers", "state"])


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


_DIGEST_NAME: Final = re.compile(r"[0-9a-f]{64}")
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class HeldName:
    """Whether a manager holds anything under a name (`here`), and has pinned it (`pinned`)."""

    here: bool
    pinned: bool


def name_of(admin: Admin, given: str) -> str:
    """Return the name under which the manager knows the checkpoint or digest `given`.

    This is `given` itself if the manager holds or has pinned something of that name. Otherwise
    `given` is taken for a path, and the result is the name of the checkpoint there.
    """
    name = printed(given)
    held = look_up(admin, name)
    return name if held.here or held.pinned else checkpoint_name(given)


def look_up(admin: Admin, name: str) -> HeldName:
    """Return whether a manager holds, and has pinned, the checkpoint or digest `name`.

    A checkpoint is held if any of its tensors is.
    """
    pinned = name in admin.totals().pins
    if _DIGEST_NAME.fullmatch(name):
        here = any(row.digest == name for row in admin.overview().residents)
    else:
        here = name in _names(admin)
    return HeldName(here, pinned)


def not_held_error(admin: Admin, name: str, advice: str = "") -> WrongUse:
    """Return the error that the manager holds nothing of `name`.

    The message suggests names that the manager holds, if any, and ends with `advice`.
    """
    offer = _offer(admin, name)
    more = f"{' ' if offer.endswith('?') else '; '}{advice}" if advice else ""
    return WrongUse(f"nothing of {name!r} is in the memory manager; {offer}{more}")


def _offer(admin: Admin, name: str) -> str:
    names = _names(admin)
    if not names:
        return "it holds no checkpoint yet, as `tensor-dedup status` shows"
    close = _close(name, names)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    return f"`tensor-dedup status` lists {shown}"


def _names(admin: Admin) -> list[str]:
    return [row.name for row in admin.overview(residents=False).checkpoints]


def _close(name: str, names: list[str]) -> list[str]:
    """Those that end like it, or look like it; most people write a path's last part."""
    last = PurePath(name).name
    same = [each for each in names if last and PurePath(each).name == last]
    ends = {PurePath(each).name: each for each in names}
    near = [ends[end] for end in nearest(last, ends, most=_SHOWN)]
    return list(dict.fromkeys([*same, *near, *nearest(name, names, most=_SHOWN)]))[:_SHOWN]


@click.command(name="status")
@place_options
@json_option
def status(socket: str | None, as_json: bool) -> None:
    """Show what is held in memory, for which checkpoints and engines, and what sharing saves.

    For a GPU's manager, this includes what NVML reports if the package nvidia-ml-py is installed.
    """
    with _admin(socket) as admin:
        overview = admin.overview(residents=as_json)
        use = on_device(admin)
    if as_json:
        say(document(overview, use), as_json)
        return
    out = console()
    for each in _shown(out, overview, use):
        out.print(each)


def _shown(
    out: Console, overview: Overview, use: DeviceUse | NotAvailable | None
) -> Iterator[Table | Text]:
    """The numbers, the tables that are not empty, and what they have no room for."""
    yield numbers(overview, use)
    for rows, (table, left_out) in (
        (overview.clients, clients(out, overview, use)),
        (overview.checkpoints, checkpoints(out, overview)),
        (overview.builds, builds(out, overview)),
    ):
        if rows:
            yield table
        if rows and left_out:
            yield Text(left_out)


@click.command(name="top")
@click.option(
    "--every",
    type=FiniteRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@place_options
@json_option
def top(every: float, socket: str | None, as_json: bool) -> None:
    """Show the output of `status` and keep it up to date, until you press q or Ctrl-C.

    With --json, print it once, as `status` does.
    """
    with suppress(KeyboardInterrupt), _admin(socket) as admin:
        if as_json:
            overview = admin.overview()
            say(document(overview, on_device(admin)), as_json)
            return
        out = screen()
        live = Live(console=out, auto_refresh=False, screen=out.is_terminal)
        with live, _keys() as quits:
            while True:
                live.update(_screen(out, admin), refresh=True)
                if quits(every):
                    return


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """What waits for so many seconds, or until q is pressed: whether it was."""
    if not sys.stdin.isatty():
        yield _wait
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield _pressed_q
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _pressed_q(seconds: float) -> bool:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0] and os.read(sys.stdin.fileno(), 1) in b"qQ":
            return True
    return False


def _screen(out: Console, admin: Admin) -> Group:
    overview = admin.overview(residents=False)
    return Group(*_shown(out, overview, on_device(admin)))


@click.command(name="pin")
@click.argument("name", metavar="X")
@click.option("--ahead", is_flag=True, help="Also when nothing of X is in memory yet.")
@place_options
@json_option
def pin(name: str, ahead: bool, socket: str | None, as_json: bool) -> None:
    """Keep the checkpoint or digest X in memory, even while no engine uses it.

    X is its name in `status`. Tensors that are added under that name later are kept too.
    """
    with _admin(socket) as admin:
        name = name_of(admin, name)
        if not ahead and not look_up(admin, name).here:
            raise not_held_error(admin, name, "`pin --ahead` keeps what will come under that name")
        done = admin.pin(name)
    document = {"name": name, "pinned": True, "tensors": done.count, "bytes": done.nbytes}
    so_far = f"{counted(done.count, 'tensor')}, {human(done.nbytes)} so far"
    now = so_far if done.count else "nothing yet"
    say(document, as_json, f"{name} is pinned: {now}")


@click.command(name="unpin")
@click.argument("name", metavar="X")
@place_options
@json_option
def unpin(name: str, socket: str | None, as_json: bool) -> None:
    """Allow the checkpoint or digest X to be evicted when memory is needed and no engine uses it.

    X is its name in `status`.
    """
    with _admin(socket) as admin:
        name = name_of(admin, name)
        held = look_up(admin, name)
        if not held.here and not held.pinned:
            raise not_held_error(admin, name)
        done = admin.pin(name, pinned=False)
    document = {"name": name, "pinned": False, "tensors": done.count, "bytes": done.nbytes}
    was = "is not pinned any more" if held.pinned else "was not pinned"
    here = f"{counted(done.count, 'tensor')}, {human(done.nbytes)} here"
    say(document, as_json, f"{name} {was}: {here}")


@click.command(name="evict")
@click.argument("name", metavar="X")
@place_options
@json_option
@click.pass_context
def evict(ctx: click.Context, name: str, socket: str | None, as_json: bool) -> None:
    """Drop the checkpoint or digest X from memory, except what is in use or pinned.

    X is its name in `status`. What another checkpoint has in common with X stays for that one. The
    memory of a digest is freed in a whole slab, so other tensors that lie in it are dropped too.
    The exit status is 1 if nothing could be dropped.
    """
    with _admin(socket) as admin:
        name = name_of(admin, name)
        if not look_up(admin, name).here:
            raise not_held_error(admin, name)
        done = admin.evict(name)
    document = {"name": name, "tensors": done.count, "bytes": done.nbytes}
    nothing = (
        f"nothing of {name} was dropped: it is in use, or pinned, or another checkpoint has it, "
        "too; see `tensor-dedup status`"
    )
    freed = f"{name}: {counted(done.count, 'tensor')} dropped, {human(done.nbytes)} free"
    say(document, as_json, freed if done.count else nothing)
    if not done.count:
        ctx.exit(1)


_NOBODY: Final = (errno.ENOENT, errno.ECONNREFUSED)


@click.command(name="stop")
@place_options
@json_option
def stop(socket: str | None, as_json: bool) -> None:
    """Stop the memory manager. Engines keep what they have mapped; new ones load from disk.

    The exit status is 3 if none is running.
    """
    try:
        admin = _admin(socket)
    except ManagerGoneError as error:
        if error.facts.get("errno") not in _NOBODY:
            raise
        raise NobodyThere(
            f"no memory manager runs at {socket_path(socket)}, so there is nothing to stop; "
            f"--socket or {ENVIRONMENT} names another one"
        ) from error
    with admin:
        pid = admin.totals().pid
        admin.stop()
    document = {"socket": str(admin.path), "pid": pid, "stopped": True}
    say(document, as_json, f"the memory manager (process {pid}) has ended")
