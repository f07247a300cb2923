"""What the verbs of the memory manager have in common: which socket, how numbers look."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import click
from rich.table import Table
from rich.text import Text

from tensor_dedup.cli.names import Dotted, cell, counted, short
from tensor_dedup.memory_manager.client.admin import Admin, Overview
from tensor_dedup.memory_manager.cuda.nvml import DeviceUse, NotAvailable, use_of
from tensor_dedup.memory_manager.protocol.paths import (
    ENVIRONMENT,
    default_socket,
    device_socket,
    socket_path,
)
from tensor_dedup.memory_manager.protocol.tables import ClientRow
from tensor_dedup.text_table import human

_DEVICE: Final = "tensor_dedup.device"
_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def socket_option(verb: _Verb) -> _Verb:
    """`--socket PATH`, as `socket`; None means the environment's or the user's own."""
    return _socket_option(verb, None)


def place_options(verb: _Verb) -> _Verb:
    """`--socket PATH` and `--device UUID`: as `socket`, the one of that GPU's manager."""
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
        help=f"The manager's socket; by default ${ENVIRONMENT}, else {short(default_socket())}.",
    )(verb)


def _remember_device(
    context: click.Context, _parameter: click.Parameter, value: str | None
) -> None:
    if value is not None and not re.fullmatch(r"GPU-[0-9a-f]{8}[0-9a-f-]*", value):
        raise click.BadParameter(f"{value!r} is no UUID; `nvidia-smi -L` shows them")
    context.meta[_DEVICE] = value


def _beside(context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    device = context.meta.get(_DEVICE)
    return str(device_socket(socket_path(value), device)) if device else value


def on_device(admin: Admin) -> DeviceUse | NotAvailable | None:
    """What NVML says of the GPU whose memory a manager lends; None for the machine's memory."""
    return use_of(admin.device) if admin.device else None


def document(overview: Overview, use: DeviceUse | NotAvailable | None) -> dict[str, Any]:
    """All of it as JSON can hold it; `device` for a GPU's manager only."""
    return overview.to_dict() | ({} if use is None else {"device": use.to_dict()})


def numbers(overview: Overview, use: DeviceUse | NotAvailable | None = None) -> Table:
    """The totals, one a line."""
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
        ("pinned", human(t.pinned_bytes) + (f" ({', '.join(t.pins)})" if t.pins else "")),
        ("look-ups", f"{counted(t.hits, 'layer')} found, {t.misses} not; {t.published} published"),
        ("builds", f"{t.builds} under way, {waiting} waiting, {t.takeovers} taken over"),
        ("evicted", human(t.evicted_bytes)),
    ):
        table.add_row(name, cell(value))
    if t.lingering_bytes:
        table.add_row("lingering", f"{human(t.lingering_bytes)} of processes that were cut off")
    if isinstance(use, DeviceUse):
        others = len({each.pid for each in use.processes} - {row.pid for row in overview.clients})
        table.add_row(
            "GPU", f"{use.name}: {human(use.used)} of {human(use.total)} in use, as NVML counts"
        )
        table.add_row("", f"{len(use.processes)} processes on it, {others} no clients of this")
    elif use is not None:
        table.add_row("GPU", f"not available: {use.reason}")
    return table


def _processes(overview: Overview) -> str:
    count = len({row.pid for row in overview.clients})
    return "1 process" if count == 1 else f"{count} processes"


def clients(overview: Overview, use: DeviceUse | NotAvailable | None = None) -> Table:
    """Which process holds what; with NVML, what each has of the GPU in all.

    What several connections of a process lease counts for each of them.
    """
    gpu = ("on the GPU",) if isinstance(use, DeviceUse) else ()
    table = _table("pid", "client", "leases", "leased", "builds", "connected", *gpu)
    of_pid: dict[int, list[ClientRow]] = {}
    for row in overview.clients:
        of_pid.setdefault(row.pid, []).append(row)
    for pid, rows in of_pid.items():
        cells: list[Text | str] = [
            str(pid),
            _client(rows),
            str(sum(row.leases for row in rows)),
            human(sum(row.leased_bytes for row in rows)),
            str(sum(row.builds for row in rows)),
            _time(max(row.connected_s for row in rows)),
        ]
        if isinstance(use, DeviceUse):
            cells.append(_of_process(use, pid))
        table.add_row(*cells)
    return table


def _client(rows: Sequence[ClientRow]) -> Text:
    """The names that the connections of one process gave, each once."""
    names = ", ".join(dict.fromkeys(row.name for row in rows))
    return cell(names + (f" ({len(rows)} connections)" if len(rows) > 1 else ""))


def _of_process(use: DeviceUse, pid: int) -> str:
    found = use.of(pid)
    if found is None:
        return "-"
    return "?" if found.nbytes is None else human(found.nbytes)


def checkpoints(overview: Overview) -> Table:
    """Bytes by checkpoint; a tensor that several share counts for each."""
    table = _table("checkpoint", "tensors", "size", "in use", "pinned")
    for row in overview.checkpoints:
        pinned = "yes" if row.pinned else ""
        size, used = human(row.nbytes), human(row.leased_bytes)
        table.add_row(Dotted(row.name), str(row.residents), size, used, pinned)
    return table


def builds(overview: Overview) -> Table:
    """Puts under way."""
    table = _table("put", "pid", "state", "layers", "slab", "silent for")
    for row in overview.builds:
        silent = f"{row.silent_s:.1f} s"
        table.add_row(
            str(row.put), str(row.pid), row.state, str(row.keys), human(row.nbytes), silent
        )
    return table


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        text = column in ("client", "checkpoint", "state", "pinned")
        if text:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
