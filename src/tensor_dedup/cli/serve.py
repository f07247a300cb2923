"""`tensor-dedup serve`: the memory manager, in the foreground."""

import json
import os
from ipaddress import ip_address

import click

from tensor_dedup.cli.manager import check_uuid, socket_option
from tensor_dedup.cli.terminal import FiniteRange, byte_size, json_option
from tensor_dedup.memory_manager.protocol.paths import socket_path
from tensor_dedup.memory_manager.server.main import MIN_BUDGET, Start, log_to, serve
from tensor_dedup.memory_manager.server.metrics import LOOPBACK
from tensor_dedup.memory_manager.server.preload import Preload
from tensor_dedup.text_table import human

_HANDLES = tuple(2 << power for power in range(20, 26))


def _handle(_context: click.Context, _parameter: click.Parameter, value: int | None) -> int:
    """2, 4, 8, 16, 32 or 64 MiB."""
    if value is not None and value not in _HANDLES:
        raise click.BadParameter(f"{human(value)} is not 2, 4, 8, 16, 32 or 64 MiB")
    return value or 0


def _gpu(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """A number or a UUID; "" for the machine's memory."""
    if value and not value.isdecimal():
        check_uuid(value)
    return value


def _json_object(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        given = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"no JSON ({error})") from error
    if not isinstance(given, dict):
        raise click.BadParameter('give an object, for example {"dtype": "bfloat16"}')
    return value


def _address(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """An address; nothing at all would mean all of this machine's."""
    if value != "localhost":
        try:
            ip_address(value)
        except ValueError as error:
            what = f"{value!r} is not an address; write for example {LOOPBACK}, 0.0.0.0 or ::"
            raise click.BadParameter(what) from error
    return value


@click.command(name="serve")
@click.option(
    "--budget",
    type=byte_size(MIN_BUDGET),
    metavar="SIZE",
    help="The most memory to hold, for example 64GiB; by default `budget` of "
    "tensor-dedup.toml, else half of the machine's, and with --device 80 % of the GPU's.",
)
@click.option(
    "--metrics",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve Prometheus metrics, /healthz and /readyz on this port, or on any free one if 0.",
)
@click.option(
    "--metrics-address",
    default=LOOPBACK,
    show_default=True,
    metavar="ADDRESS",
    callback=_address,
    help="The address of --metrics and --dashboard; 0.0.0.0 or :: admits other machines.",
)
@click.option(
    "--dashboard",
    is_flag=True,
    help="Serve a live page of what is held, for which engines, and what sharing saves.",
)
@click.option(
    "--idle-exit",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="Stop after no engine has been connected for this long; by default never.",
)
@click.option(
    "--build-timeout",
    type=FiniteRange(min=0.1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long an engine that builds a layer may be silent before another takes over.",
)
@click.option(
    "--device",
    default="",
    metavar="GPU",
    callback=_gpu,
    help="Hold memory of this GPU (UUID or number), at a socket of its own next to --socket.",
)
@click.option(
    "--backend",
    type=click.Choice(["vmm", "ipc"]),
    default="vmm",
    show_default=True,
    help="With --device: use ipc only where memory cannot be passed on as file descriptors.",
)
@click.option(
    "--handle",
    type=byte_size(),
    callback=_handle,
    metavar="SIZE",
    help="With --device: allocate multiples of this, 2MiB (the default) to 64MiB.",
)
@click.option(
    "--preload",
    multiple=True,
    metavar="[NAME=]PATH...",
    help="Build the final tensors of these checkpoints for engines, and keep them. With NAME=, "
    "publish the checkpoint's own tensors under a name, for connect().get(NAME).",
)
@click.option(
    "--engine-args",
    default="{}",
    metavar="JSON",
    callback=_json_object,
    help='The engine arguments to load for with --preload, for example {"dtype": "bfloat16"}.',
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Plain lines, or one JSON object per line.",
)
@click.option("--verbose", is_flag=True, help="Log every tensor, not only every checkpoint.")
@click.argument("more", nargs=-1, metavar="")
@socket_option
@json_option
def command(
    preload: tuple[str, ...],
    engine_args: str,
    more: tuple[str, ...],
    budget: int | None,
    metrics: int | None,
    metrics_address: str,
    dashboard: bool,
    idle_exit: float | None,
    build_timeout: float,
    device: str,
    backend: str,
    handle: int,
    log_format: str,
    verbose: bool,
    socket: str | None,
    as_json: bool,
) -> None:
    """Hold the memory that this user's engines share, until SIGTERM, Ctrl-C or `tensor-dedup stop`.

    Logs go to stderr. With --json, one document is printed as soon as clients can connect.
    """
    if more and not preload:
        raise click.UsageError(f"{more[0]!r} belongs to no option; did you mean --preload?")
    if device and preload:
        raise click.UsageError("--preload fills the machine's memory, not that of a --device")
    if handle and (not device or backend != "vmm"):
        raise click.UsageError("--handle is for the memory of a --device, with the backend vmm")
    if metrics_address != LOOPBACK and metrics is None and not dashboard:
        what = "--metrics-address is where --metrics or --dashboard listens; give one of them"
        raise click.UsageError(what)
    start = Start(
        socket_path(socket),
        budget,
        metrics,
        idle_exit,
        build_timeout,
        device=device,
        backend=backend,
        handle=handle,
        metrics_address=metrics_address,
        dashboard=dashboard,
    )
    log_to(details=verbose, as_json=log_format == "json")
    helpers = Preload(start.socket, (*preload, *more), engine_args)

    def ready() -> None:
        helpers.start()
        if as_json:
            click.echo(json.dumps({"socket": str(start.socket), "pid": os.getpid()}))

    try:
        serve(start, ready)
    finally:
        helpers.close()
