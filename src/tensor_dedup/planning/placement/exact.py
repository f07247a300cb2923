"""Searches for the placement that takes the least memory, with OR-tools' CP-SAT (extra `plan`)."""

import importlib
import math
import threading
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from tensor_dedup.errors import NotInstalledError
from tensor_dedup.planning.placement.placement import Placement
from tensor_dedup.planning.placement.problem import PackingProblem
from tensor_dedup.suggestions import install_hint

_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Optimum:
    """The result of a search: `placement` is the best one found in the given time, or None.

    No placement can take less than `bound` bytes. `is_proven` is True if `placement` takes exactly
    `bound` bytes, so that no other is better.
    """

    placement: Placement | None
    bound: int
    is_proven: bool


def solve(problem: PackingProblem, seconds: float, hint: Placement | None = None) -> Optimum:
    """Search for the placement that takes the fewest bytes, for at most `seconds`.

    `hint` is a placement to start from. Ctrl-C ends the search early with the best placement found
    so far; a second Ctrl-C interrupts as usual.

    Raises:
        NotInstalledError: OR-tools is not installed.
    """
    try:
        cp_model: Any = importlib.import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        what = f"OR-tools is not installed; {install_hint('plan')}"
        raise NotInstalledError(what) from error
    model = cp_model.CpModel()
    nodes, models = range(len(problem.nodes)), range(len(problem.models))
    on = {(m, n): model.new_bool_var(f"m{m}n{n}") for m in models for n in nodes}
    for m in models:
        model.add(sum(on[m, n] for n in nodes) == problem.models[m].replicas)
    needed = _needed(problem)
    here = _hold_parts(model, problem, on, needed)
    unit = math.gcd(*problem.own.tolist(), *problem.sizes.tolist()) or 1
    total = []
    for n in nodes:
        taken = [int(problem.own[m]) // unit * on[m, n] for m in models]
        taken += [int(problem.sizes[p]) // unit * here[p, n] for p in needed]
        model.add(sum(taken) <= int(problem.capacity[n]) // unit)
        if problem.nodes[n].host is not None:
            host = [int(problem.host[m]) * on[m, n] for m in models]
            model.add(sum(host) <= int(problem.host_capacity[n]))
        total += taken
    model.minimize(sum(total))
    if hint is not None:
        for (m, n), variable in on.items():
            model.add_hint(variable, n in hint.nodes_of(m))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 1
    # Its own handler of Ctrl-C leaves the process with none: the next one would end it at once.
    solver.parameters.catch_sigint_signal = False
    status = _solved(solver, model)
    bound = max(problem.least(), math.ceil(solver.best_objective_bound - 1e-6) * unit)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Optimum(None, bound, is_proven=False)
    placed = Placement(problem)
    for (m, n), variable in on.items():
        if solver.value(variable):
            placed.add(m, n)
    return Optimum(placed, bound, is_proven=placed.total == bound)


def _solved(solver: Any, model: Any) -> Any:
    """Return the status. Another thread searches, so that Ctrl-C reaches this one.

    After Ctrl-C the search is asked to end again and again: a search that is asked before it has
    begun goes on.
    """
    search: Future[Any] = Future()
    begin = threading.Event()

    def run() -> None:
        begin.wait()
        try:
            search.set_result(solver.solve(model))
        except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
            search.set_exception(error)

    # Nothing waits for a thread of this kind when the program ends.
    threading.Thread(target=run, name="tensor-dedup-plan", daemon=True).start()
    ending = False
    while True:
        try:
            begin.set()  # only now, when Ctrl-C does what is said above
            if ending:
                solver.stop_search()
            return search.result(_POLL_S if ending else None)
        except TimeoutError:
            continue
        except KeyboardInterrupt:
            ending = True


def _needed(problem: PackingProblem) -> dict[int, int]:
    """On how many nodes each part is at least."""
    found: dict[int, int] = {}
    for parts, model in zip(problem.parts, problem.models, strict=True):
        for part in parts.tolist():
            found[part] = max(found.get(part, 0), model.replicas)
    return found


def _hold_parts(
    model: Any, problem: PackingProblem, on: dict[tuple[int, int], Any], needed: dict[int, int]
) -> dict[tuple[int, int], Any]:
    """Add variables for a part being on a node, which a model there implies."""
    nodes = range(len(problem.nodes))
    here = {(p, n): model.new_bool_var(f"p{p}n{n}") for p in needed for n in nodes}
    holders: defaultdict[int, list[int]] = defaultdict(list)
    for number, parts in enumerate(problem.parts):
        for part in parts.tolist():
            holders[part].append(number)
    for part, most in needed.items():
        # Implied by what follows; without it the bounds are poor.
        model.add(sum(here[part, n] for n in nodes) >= most)
        for n in nodes:
            for number in holders[part]:
                model.add_implication(on[number, n], here[part, n])
    return here
