"""`tensor-dedup plan`: which model goes to which machine."""

from pathlib import Path
from typing import Annotated, Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

from tensor_dedup.analyze.analysis import measure
from tensor_dedup.cli import WrongUse, check_suffix, printable
from tensor_dedup.cli.page import html_option
from tensor_dedup.cli.plan_page import write_page
from tensor_dedup.cli.store import store_option
from tensor_dedup.cli.tables import Dotted, counted
from tensor_dedup.cli.terminal import (
    ByteBar,
    FiniteRange,
    byte_size,
    console,
    json_option,
    say,
    say_lines,
)
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.planning.placement import FleetPlan, Model, Node, Wanted, plan, read_fleet
from tensor_dedup.planning.placement.plan import Assignment, Move, PlannedNode
from tensor_dedup.planning.placement.pods import patches
from tensor_dedup.settings import LARGEST_SIZE
from tensor_dedup.text_table import human

_RAY: Final = "ray://"
_MOST_NODES: Final = 100_000
_SHOWN: Final = 60  # characters of a value that is wrong


class _EarlierModel(msgspec.Struct):
    model: str


class _EarlierNode(msgspec.Struct):
    name: str
    memory_bytes: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_SIZE)]
    models: list[_EarlierModel]


class _EarlierPlan(msgspec.Struct):
    """What an earlier plan's JSON says of the machines; the rest of it is skipped."""

    nodes: list[_EarlierNode]


@click.command(name="plan")
@click.option(
    "--models",
    "fleet",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The models to serve, in TOML: names, paths, replicas, memory beyond the weights.",
)
@click.option(
    "--nodes", metavar="N", help="The number of machines, or their names, separated by commas."
)
@click.option(
    "--memory",
    type=byte_size(1),
    metavar="SIZE",
    help="The memory of each machine for weights and engines, for example 80GiB.",
)
@click.option(
    "--host-memory",
    type=byte_size(),
    metavar="SIZE",
    help="The host memory of each machine, if --memory is that of its GPU.",
)
@click.option(
    "--from",
    "before",
    metavar="PLAN.json|ray://HOST:PORT",
    help="An earlier plan, printed with --json, or a Ray cluster (`ray://`: that of this machine): "
    "its machines, and what is there stays where it is.",
)
@click.option(
    "--rebalance", is_flag=True, help="Show what moving models would save and cost. Needs --from."
)
@click.option(
    "--exact",
    "exact_s",
    type=FiniteRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Let a solver (extra `plan`) search this long for a better plan and a lower bound. "
    "Ctrl-C ends the search; what was found by then is the plan.",
)
@html_option("the plan")
@click.option(
    "--kubernetes",
    "pods",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write node affinities for the Pods MODEL-1, MODEL-2, …, as patches for Kustomize.",
)
@store_option
@json_option
def command(
    fleet: Path,
    nodes: str | None,
    memory: int | None,
    host_memory: int | None,
    before: str | None,
    rebalance: bool,
    exact_s: float | None,
    page: Path | None,
    pods: Path | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Assign models to machines so that related models share memory.

    A machine holds each tensor once, however many models use it. Replicas of a model go to
    different machines. Nothing is started or moved: apply the plan with whatever starts your
    engines.
    """
    check_suffix(page, ".html")
    check_suffix(pods, ".yaml", ".yml")
    if rebalance and before is None:
        raise WrongUse("--rebalance compares with a plan: give it with --from")
    if exact_s is not None and before is not None:
        raise WrongUse("--exact plans from nothing: leave out --from")
    machines, current = _before(before, memory, host_memory)
    if nodes is not None or not machines:
        if nodes is None:
            raise WrongUse("say which machines there are: --nodes 8 --memory 80GiB")
        if memory is None:
            instead = " takes the place of the machines that --from names" if before else ""
            raise WrongUse(
                f"--nodes {nodes}{instead}: say how much memory each has, with --memory 80GiB"
            )
        machines = [Node(name, memory, host_memory) for name in _names(nodes)]
    with ByteBar("hashing") as progress:
        models = _measured(read_fleet(fleet), store, progress)
    found = plan(models, machines, current=current, rebalance=rebalance, exact_s=exact_s)
    if page is not None:
        write_page(page, found)
    if pods is not None:
        pods.write_text(patches(found), encoding="utf-8")
    if as_json:
        say(found.to_dict(), as_json)
        return
    _show(found, console(), compared=current is not None, rebalance=rebalance)
    say_lines(*(f"Wrote {path}." for path in (page, pods) if path is not None))


def _measured(fleet: list[Wanted], store: str | None, progress: ByteBar) -> list[Model]:
    """The models with their tensors; files that were hashed before are not read."""
    paths = list(dict.fromkeys(each.path for each in fleet))
    found, _ = measure(paths, hints=HintIndex(), store=store, progress=progress)
    tensors = {
        path: {t.fingerprint.digest: t.nbytes for t in checkpoint.tensors}
        for path, checkpoint in zip(paths, found, strict=True)
    }
    return [Model(w.name, tensors[w.path], w.room, w.host, w.replicas) for w in fleet]


def _names(nodes: str) -> list[str]:
    """The names of the machines, where only their number is given: node-1 and so on."""
    names = [name.strip() for name in nodes.split(",")]
    if nodes.lstrip("-").isdecimal():
        # Not converted before its length is known: Python refuses to convert thousands of digits.
        number = int(nodes) if len(nodes) <= len(str(_MOST_NODES)) else 0
        names = [f"node-{n + 1}" for n in range(number if number <= _MOST_NODES else 0)]
    if not names or not all(names) or len({*names}) < len(names):
        advice = f"give a number of 1 or more, at most {_MOST_NODES}, or different names"
        raise WrongUse(f"--nodes {nodes[:_SHOWN]}: {advice}")
    return names


def _before(
    place: str | None, memory: int | None, host_memory: int | None
) -> tuple[list[Node], dict[str, list[str]] | None]:
    """The machines and the placement that --from names: a cluster's, or those of a plan."""
    if place is None:
        return [], None
    if not place.startswith(_RAY):
        return _earlier(place, memory, host_memory)
    # Here: no other plan needs it, and it imports half of the package.
    from tensor_dedup.integrations.ray.cluster import observed

    machines, placed = observed("auto" if place == _RAY else place, memory, host_memory)
    return machines, placed or None


def _earlier(
    path: str, memory: int | None, host_memory: int | None
) -> tuple[list[Node], dict[str, list[str]]]:
    """The machines, with their memory unless it is given, and the placement of an earlier plan."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=_EarlierPlan)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise WrongUse(f"{path} is no plan of `tensor-dedup plan --json`: {error}") from error
    if len({node.name for node in found.nodes}) < len(found.nodes):
        raise WrongUse(f"{path} is no plan of `tensor-dedup plan --json`: it names a node twice")
    machines = [Node(each.name, memory or each.memory_bytes, host_memory) for each in found.nodes]
    placed: dict[str, list[str]] = {}
    for node in found.nodes:
        for each in node.models:
            placed.setdefault(each.model, []).append(node.name)
    return machines, placed


def _show(found: FleetPlan, out: Console, *, compared: bool, rebalance: bool) -> None:
    for node in found.nodes:
        if node.models:
            used, memory = human(node.used_bytes), human(node.memory_bytes)
            say_lines(f"{node.name}: {used} of {memory}")
            out.print(_table(node))
            out.print()
    replicas = [each for node in found.nodes for each in node.models]
    busy = sum(1 for node in found.nodes if node.models)
    say_lines(
        f"{counted(len({each.model for each in replicas}), 'model')}, "
        f"{counted(len(replicas), 'replica')} on {busy} of {counted(len(found.nodes), 'node')}: "
        f"{human(found.used_bytes)}; without sharing {human(found.alone_bytes)}."
    )
    if found.least_bytes is not None:
        above = 100 * (found.used_bytes / found.least_bytes - 1)
        say_lines(
            f"No plan takes less than {human(found.least_bytes)}; this takes {above:.1f} % more."
        )
    if compared:
        for move in found.moves:
            say_lines(_movement(move))
        if not found.moves:
            say_lines("There is nothing to move." if rebalance else "Nothing moves.")
        if found.saved_bytes:
            loads = sum(move.loads_bytes for move in found.moves)
            say_lines(f"Moving saves {human(found.saved_bytes)} and loads {human(loads)}.")


def _table(node: PlannedNode) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  model")
    for heading in ("adds", "of", "room"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why here")
    for each in node.models:
        sizes = map(human, (each.adds_bytes, each.weights_bytes, each.room_bytes))
        table.add_row(Dotted(f"  {each.model}"), *sizes, reason(each))
    return table


def reason(each: Assignment) -> str:
    """Return, in a few words, why the replica `each` is on its node."""
    if each.shares_with is None:
        return "room for it and its relatives"
    return f"{human(each.shared_bytes)} are there, most with {printable(each.shares_with)}"


def _movement(move: Move) -> str:
    if move.target is None:
        return f"{move.model} leaves {move.source or ''}."
    origin = f"moves from {move.source}" if move.source else "is new"
    return f"{move.model} {origin}: {move.target} loads {human(move.loads_bytes)}."
