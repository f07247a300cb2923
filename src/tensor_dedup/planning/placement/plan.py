"""A plan: which model goes to which node, why, and which replicas have to move."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from tensor_dedup.errors import WRONG_USE, TensorDedupError
from tensor_dedup.planning.placement.exact import solve
from tensor_dedup.planning.placement.heuristic import improve, kin, place
from tensor_dedup.planning.placement.placement import Placement
from tensor_dedup.planning.placement.problem import Model, Node, PackingProblem
from tensor_dedup.text_table import human

# Of the JSON document.
SCHEMA: Final = 1


class DoesNotFitError(TensorDedupError):
    """The models do not fit on the nodes; `facts` has the names of models and the numbers."""

    exit_status = WRONG_USE


@dataclass(frozen=True, slots=True)
class Assignment:
    """A replica on a node, and why it is there. Sizes are in bytes.

    The replicas of a node form a list.

    * `shared_bytes` is the size of the weights that earlier replicas in the list have, too.
      `adds_bytes` is the size of the other weights.
    * `shares_with` is the model of the earlier replica that has most in common with it, or None.
    * `room_bytes` is the memory that its engine takes beside the weights. `host_bytes` is the
      machine memory that the engine takes.
    """

    model: str
    weights_bytes: int
    adds_bytes: int
    shared_bytes: int
    room_bytes: int
    host_bytes: int
    shares_with: str | None


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """A node, and the replicas on it (`models`). Sizes are in bytes."""

    name: str
    memory_bytes: int
    used_bytes: int
    models: Sequence[Assignment]


@dataclass(frozen=True, slots=True)
class Move:
    """A replica that the plan moves, starts or stops.

    If the plan starts the replica, `source` is None; if it stops the replica, `target` is None.
    `loads_bytes` is the size of the tensors that the target node does not have yet.
    """

    model: str
    source: str | None
    target: str | None
    loads_bytes: int


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A plan: which models go to which nodes. Sizes are in bytes.

    * `used_bytes` is the memory used on all nodes. Each tensor counts once on a node.
    * `alone_bytes` is what the same replicas would take without sharing.
    * `moves` lists the changes from the current placement.
    * `saved_bytes` is what rebalancing saves compared with moving nothing.
    * `least_bytes` is a lower bound for every plan, or None if no solver was used.
    """

    nodes: Sequence[PlannedNode]
    used_bytes: int
    alone_bytes: int
    moves: Sequence[Move] = ()
    saved_bytes: int = 0
    least_bytes: int | None = None
    schema: int = field(default=SCHEMA)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of `plan --json`, which `plan --from` reads."""
        found = asdict(self)
        return {"schema": found.pop("schema"), **found}

    def placement(self) -> dict[str, list[str]]:
        """Return a dict from the name of each model to the names of its nodes."""
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            for each in node.models:
                found.setdefault(each.model, []).append(node.name)
        return found


def plan(
    models: Sequence[Model],
    nodes: Sequence[Node],
    *,
    current: Mapping[str, Sequence[str]] | None = None,
    rebalance: bool = False,
    exact_s: float | None = None,
) -> FleetPlan:
    """Choose a node for each replica so that all nodes together hold the fewest bytes.

    `current` maps the name of each model that runs already to the names of its nodes. With
    `rebalance`, these replicas may be moved; otherwise they stay.

    If `exact_s` is given without `current`, a solver searches for a better plan and a lower bound,
    for at most `exact_s` seconds. Without the solver, the same arguments give the same plan.

    Raises:
        ConfigError: Sizes are negative, or too large to be added up.
        DoesNotFitError: There is no room for a replica.
        NotInstalledError: The solver is not installed.
    """
    problem = PackingProblem(models, nodes)
    _check_sizes(problem)
    if current is None:
        placed, least = place(problem), None
        if exact_s is not None:
            placed, least = _exact(problem, placed, exact_s)
        _check(placed, "")
        return replace(_explained(placed), least_bytes=least)
    before = _held(problem, current)
    kept = place(problem, before)
    if not rebalance:
        hint = " without moving others; --rebalance says what would have to move"
        _check(kept, hint)
        return _explained(kept, _moves(problem, current, before, kept))
    found = [kept.copy(), _matched(place(problem), before)]
    improve(found[0], kin(problem))
    placed = min(found, key=lambda each: (sum(each.missing().values()), each.total))
    _check(placed, "")
    saved = kept.total - placed.total if not kept.missing() else 0
    return _explained(placed, _moves(problem, current, before, placed), saved)


def _exact(problem: PackingProblem, placed: Placement, seconds: float) -> tuple[Placement, int]:
    found = solve(problem, seconds, None if placed.missing() else placed)
    better = found.placement
    if better is not None and (placed.missing() or better.total < placed.total):
        placed = better
    return placed, found.bound


def _check_sizes(problem: PackingProblem) -> None:
    """Refuse what fits no node, or wants more nodes than there are, before anything is tried."""
    largest = int(problem.capacity.max(initial=0))
    for number, model in enumerate(problem.models):
        if problem.needs[number] > largest:
            need = human(int(problem.needs[number]))
            what = (
                f"{model.name} takes {need} ({human(model.nbytes)} of weights, {human(model.room)} "
                f"of room), and the largest node has {human(largest)}; give more --memory"
            )
            raise DoesNotFitError(what, models=[model.name])
        if model.replicas > len(problem.nodes):
            what = (
                f"{model.name} has {model.replicas} replicas on different nodes, and there are "
                f"{len(problem.nodes)} nodes; give more --nodes"
            )
            raise DoesNotFitError(what, models=[model.name])


def _check(placed: Placement, hint: str) -> None:
    missing = placed.missing()
    if not missing:
        return
    problem = placed.problem
    number = max(missing, key=lambda each: (problem.needs[each], -each))
    added = placed.marginal(number)
    room = placed.free()
    others = np.ones(len(problem.nodes), np.bool_)  # than those that have one: `_check_sizes`
    others[placed.nodes_of(number)] = False
    admitted = others & (added <= room)
    names = [problem.models[each].name for each in missing]
    count = sum(missing.values())
    what = f"no room for {_listed(names)} ({count} of {_replicas(problem)} replicas){hint}: "
    memory = "--host-memory" if admitted.any() else "--memory"
    if admitted.any():
        left = placed.free_host()
        node = int(np.argmax(np.where(admitted, left, -1)))
        what += (
            f"{problem.models[number].name} takes {human(problem.models[number].host)} of host "
            f"memory, of which {human(int(left[node]))} are left on {problem.nodes[node].name}"
        )
    else:
        node = int(np.argmin(np.where(others, added - room, np.iinfo(np.int64).max)))
        what += (
            f"{problem.models[number].name} would add {human(int(added[node]))} to "
            f"{problem.nodes[node].name}, where {human(int(room[node]))} are left"
        )
    raise DoesNotFitError(f"{what}; give more --nodes or {memory}", models=names)


def _replicas(problem: PackingProblem) -> int:
    return sum(model.replicas for model in problem.models)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _held(problem: PackingProblem, current: Mapping[str, Sequence[str]]) -> Placement:
    """What of the placement before there still is: models, nodes and room change."""
    nodes = {node.name: number for number, node in enumerate(problem.nodes)}
    placed = Placement(problem)
    for number, model in enumerate(problem.models):
        here = [nodes[name] for name in current.get(model.name, ()) if name in nodes]
        for node in here[: model.replicas]:
            if placed.fits(number, node):
                placed.add(number, node)
    return placed


def _matched(placed: Placement, before: Placement) -> Placement:
    """The same placement with nodes of equal size exchanged so that most stays where it is."""
    problem = placed.problem
    count = len(problem.nodes)
    common = np.zeros((count, count), np.int64)
    for number in range(len(problem.models)):
        here, there = placed.nodes_of(number), before.nodes_of(number)
        common[np.ix_(here, there)] += problem.weights[number]
    alike = problem.capacity[:, None] == problem.capacity[None, :]
    alike &= problem.host_capacity[:, None] == problem.host_capacity[None, :]
    order = np.argsort(-common, axis=None, kind="stable")
    target: dict[int, int] = {}
    taken: set[int] = set()
    for flat in order.tolist():
        node, old = divmod(flat, count)
        if node not in target and old not in taken and alike[node, old]:
            target[node] = old
            taken.add(old)
    found = Placement(problem)
    for number, node in placed.replicas():
        found.add(number, target[node])
    return found


def _moves(
    problem: PackingProblem,
    current: Mapping[str, Sequence[str]],
    before: Placement,
    placed: Placement,
) -> list[Move]:
    names = [node.name for node in problem.nodes]
    resident = before.copy()
    found = []
    for number, model in enumerate(problem.models):
        here = {names[node]: node for node in placed.nodes_of(number)}
        gone = [name for name in current.get(model.name, ()) if name not in here]
        for name, node in here.items():
            if name in current.get(model.name, ()) and number in before.models_on(node):
                continue
            loads = resident.marginal_on(number, node) - model.room
            resident.add(number, node)
            found.append(Move(model.name, gone.pop(0) if gone else None, name, loads))
        found += [Move(model.name, name, None, 0) for name in gone]
    known = {model.name for model in problem.models}
    for name, nodes in current.items():
        found += [Move(name, node, None, 0) for node in nodes if name not in known]
    return found


def _explained(placed: Placement, moves: Sequence[Move] = (), saved: int = 0) -> FleetPlan:
    """Put a placement into words."""
    problem = placed.problem
    nodes = []
    for number, node in enumerate(problem.nodes):
        models = placed.models_on(number)
        used = int(placed.used[number])
        nodes.append(PlannedNode(node.name, node.memory, used, _reasons(problem, models)))
    alone = sum(int(problem.needs[model]) for model, _ in placed.replicas())
    return FleetPlan(nodes, placed.total, alone, [*moves], saved)


def _reasons(problem: PackingProblem, models: Sequence[int]) -> list[Assignment]:
    """Explain the models of a node, largest first, relatives together."""
    holders = np.zeros(len(problem.sizes), np.int64)
    for number in models:
        holders[problem.parts[number]] += 1
    common = {m: int(problem.sizes[problem.parts[m]] @ holders[problem.parts[m]]) for m in models}
    # Of several of a size, the base of the others first.
    rest = sorted(models, key=lambda each: (-problem.needs[each], -common[each], each))
    there = np.zeros(len(problem.sizes), np.bool_)
    listed: list[int] = []
    found = []
    while rest:
        shared = {m: int(problem.sizes[problem.parts[m]] @ there[problem.parts[m]]) for m in rest}
        # The next one is whoever shares most with those before, so that relatives stay together.
        number = max(rest, key=lambda each: (shared[each], -rest.index(each)))
        model = problem.models[number]
        parts = problem.parts[number]
        nearest = max(listed, key=lambda each: _common(problem, number, each), default=None)
        found.append(
            Assignment(
                model=model.name,
                weights_bytes=int(problem.weights[number]),
                adds_bytes=int(problem.weights[number]) - shared[number],
                shared_bytes=shared[number],
                room_bytes=model.room,
                host_bytes=model.host,
                shares_with=problem.models[nearest].name
                if nearest is not None and shared[number]
                else None,
            )
        )
        there[parts] = True
        listed.append(number)
        rest.remove(number)
    return found


def _common(problem: PackingProblem, one: int, other: int) -> int:
    both = np.intersect1d(problem.parts[one], problem.parts[other], assume_unique=True)
    return int(problem.sizes[both].sum())
