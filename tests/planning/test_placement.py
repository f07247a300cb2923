"""Placements: what they count and find, and that nothing is placed where it does not fit."""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import synthetic_fleets
from tensor_dedup.planning.placement.exact import solve
from tensor_dedup.planning.placement.heuristic import best_fit, first_fit, improve, kin, place
from tensor_dedup.planning.placement.placement import Placement
from tensor_dedup.planning.placement.problem import Model, Node, PackingProblem


@st.composite
def problems(draw: st.DrawFn, most_models: int = 8, most_nodes: int = 4) -> PackingProblem:
    tensors = {f"t{n}": draw(st.integers(1, 30)) for n in range(draw(st.integers(1, 10)))}
    models = [
        Model(
            f"m{number}",
            {name: tensors[name] for name in draw(st.sets(st.sampled_from(sorted(tensors))))},
            room=draw(st.integers(0, 10)),
            host=draw(st.integers(0, 3)),
            replicas=draw(st.integers(1, 2)),
        )
        for number in range(draw(st.integers(1, most_models)))
    ]
    host = draw(st.none() | st.integers(0, 20))
    nodes = [
        Node(f"n{number}", draw(st.integers(10, 150)), host)
        for number in range(draw(st.integers(1, most_nodes)))
    ]
    return PackingProblem(models, nodes)


def counted(problem: PackingProblem, models: Sequence[int]) -> int:
    """What models take on a node, counted tensor by tensor."""
    chosen = [problem.models[number] for number in models]
    tensors = {digest: n for model in chosen for digest, n in model.tensors.items()}
    return sum(tensors.values()) + sum(model.room for model in chosen)


@given(problems(), st.randoms(use_true_random=False))
def test_a_node_counts_each_tensor_once(problem: PackingProblem, draw: random.Random) -> None:
    placed = Placement(problem)
    for _ in range(20):
        model, node = draw.randrange(len(problem.models)), draw.randrange(len(problem.nodes))
        if node in placed.nodes_of(model):
            freed, before = placed.freed(model, node), placed.total
            placed.remove(model, node)
            assert before - placed.total == freed
        else:
            added, before = int(placed.marginal(model)[node]), placed.total
            placed.add(model, node)
            assert placed.total - before == added
        for number in range(len(problem.nodes)):
            held = placed.models_on(number)
            assert placed.used[number] == counted(problem, held) == problem.used(held)


@settings(max_examples=50, deadline=None)
@given(problems())
def test_nothing_is_placed_where_it_does_not_fit(problem: PackingProblem) -> None:
    for placed in (place(problem), best_fit(problem), first_fit(problem)):
        assert placed.is_sound()
        for number, model in enumerate(problem.models):
            assert len(placed.nodes_of(number)) + placed.missing()[number] == model.replicas
        for number, node in enumerate(problem.nodes):
            held = placed.models_on(number)
            assert counted(problem, held) == placed.used[number] <= node.memory
            if node.host is not None:
                assert sum(problem.models[each].host for each in held) <= node.host


def rank(placed: Placement) -> tuple[int, int]:
    return sum(placed.missing().values()), placed.total


@settings(max_examples=50, deadline=None)
@given(problems())
def test_it_is_never_worse_than_best_fit(problem: PackingProblem) -> None:
    ours, theirs = place(problem), best_fit(problem)
    if sum(ours.missing().values()) == sum(theirs.missing().values()):
        assert rank(ours) <= rank(theirs)
    assert sum(ours.missing().values()) <= sum(theirs.missing().values())


def all_placements(problem: PackingProblem) -> Iterator[Placement]:
    """Every way to place all replicas."""
    nodes = range(len(problem.nodes))
    choices = [[*combinations(nodes, model.replicas)] for model in problem.models]
    for chosen in product(*choices):
        placed = Placement(problem)
        for number, where in enumerate(chosen):
            for node in where:
                placed.add(number, node)
        if placed.is_sound():
            yield placed


@settings(max_examples=60, deadline=None)
@given(problems(most_models=5, most_nodes=3))
def test_nothing_is_better_than_the_best_of_all(problem: PackingProblem) -> None:
    ours = place(problem)
    least = min((each.total for each in all_placements(problem)), default=None)
    if not ours.missing():
        assert least is not None
        assert ours.total >= least


@settings(max_examples=25, deadline=None)
@given(problems(most_models=5, most_nodes=3))
def test_the_solver_finds_the_best_of_all(problem: PackingProblem) -> None:
    pytest.importorskip("ortools")
    least = min((each.total for each in all_placements(problem)), default=None)
    found = solve(problem, 20.0)
    if least is None:
        assert found.placement is None
    else:
        assert found.placement is not None
        assert found.is_proven
        assert found.placement.is_sound()
        assert found.placement.total == found.bound == least


_INTERRUPTED = """
import random, signal
from ortools.sat.python.cp_model import CpSolver
from tensor_dedup.planning.placement import Model, Node, plan

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
solve = CpSolver.solve

def searching(solver, model):  # says so when it has begun
    first = ["searching"]
    solver.parameters.log_search_progress, solver.parameters.log_to_stdout = True, False
    solver.log_callback = lambda _: first and print(first.pop(), flush=True)
    return solve(solver, model)

CpSolver.solve = searching
draw = random.Random(0)
models = [
    Model(f"m{n}", {f"t{k}": 50 + k % 31 for k in draw.sample(range(200), 20)}) for n in range(60)
]
nodes = [Node(f"n{n}", 5500) for n in range(12)]  # too many for the solver
for seconds in (0.1, 3600.0):
    found = plan(models, nodes, exact_s=seconds)
    print(len(found.placement()), "placed", 0 < found.least_bytes <= found.used_bytes, flush=True)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_ctrl_c_ends_the_search_with_a_plan_and_interrupts_what_comes_after() -> None:
    """OR-tools' own handler would leave SIGINT to the system, which ends the process."""
    pytest.importorskip("ortools")
    command = [sys.executable, "-c", _INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().strip() for _ in range(4)]
        try:
            process.send_signal(signal.SIGINT)
            said += process.communicate(timeout=60)[0].splitlines()
        finally:
            process.kill()  # else it would go on for an hour, and be waited for
    assert said == ["searching", "60 placed True", "interrupted"] * 2
    assert process.returncode == 0


def family(name: str, members: int, shared: int, own: int, room: int = 0) -> list[Model]:
    return [
        Model(f"{name}-{n}", {f"{name}/base": shared, f"{name}/{n}": own}, room)
        for n in range(members)
    ]


def test_families_stay_together_where_best_fit_tears_them() -> None:
    models = [m for pair in zip(*(family(n, 4, 40, 5) for n in "abcd"), strict=True) for m in pair]
    problem = PackingProblem(models, [Node(f"n{n}", 100) for n in range(4)])
    ours = place(problem)
    assert ours.total == 4 * (40 + 4 * 5)
    assert best_fit(problem).total > ours.total
    for number in range(4):
        assert len({problem.models[m].name[0] for m in ours.models_on(number)}) <= 1


def test_a_family_that_no_node_takes_is_split_into_as_few_as_can_be() -> None:
    problem = PackingProblem(family("a", 9, 40, 20), [Node(f"n{n}", 100) for n in range(4)])
    ours = place(problem)
    assert not ours.missing()
    assert ours.total == 9 * 20 + 3 * 40  # three fit a node


def test_one_in_the_way_moves() -> None:
    models = [
        Model("a", {"a": 60}),
        Model("b", {"b": 40}),
        Model("c", {"c": 50}),
        Model("d", {"d": 50}),
    ]
    problem = PackingProblem(models, [Node("n0", 100), Node("n1", 100)])
    start = Placement(problem)
    start.add(0, 0)
    start.add(2, 1)
    start.add(1, 1)
    assert place(problem, start).missing() == {3: 1}  # it may not move what is there
    assert not place(problem).missing()


def test_two_that_are_in_each_other_s_place_change_places() -> None:
    models = [*family("a", 4, 30, 5), *family("b", 4, 30, 5)]
    problem = PackingProblem(models, [Node("n0", 82), Node("n1", 82)])
    start = Placement(problem)
    for number, node in enumerate((0, 0, 0, 1, 0, 1, 1, 1)):
        start.add(number, node)
    assert start.is_sound()
    assert start.free().max() == 2  # less than any model adds
    improve(start, kin(problem))
    assert start.total == problem.least() == 100
    assert start.total == sum(problem.used(start.models_on(node)) for node in (0, 1))


def test_kin_are_found_without_pairs() -> None:
    models = [*family("a", 30, 40, 5), *family("b", 30, 30, 5), Model("x", {"x": 70})]
    common = {"everywhere": 1}
    models = [Model(m.name, {**m.tensors, **common}) for m in models]
    found = kin(PackingProblem(models, [Node("n", 1)]))
    assert sorted(map(len, found)) == [1, 30, 30]


def test_the_same_again() -> None:
    models = [m for name in "abcdef" for m in family(name, 7, 23, 11, room=3)]
    problem = PackingProblem(models, [Node(f"n{n}", 120) for n in range(8)])
    assert [*place(problem).replicas()] == [*place(problem).replicas()]
    assert [*place(problem).replicas()] == [
        *place(PackingProblem(models, problem.nodes)).replicas()
    ]


def test_fleets_of_the_table_are_near_the_optimum_and_far_from_best_fit() -> None:
    far = 0
    for fleet in synthetic_fleets.FLEETS:
        models, nodes = synthetic_fleets.models_of(fleet), synthetic_fleets.nodes_of(fleet)
        problem = PackingProblem(models, nodes)
        ours, theirs = place(problem), best_fit(problem)
        assert ours.is_sound()
        assert not ours.missing()
        placed = ours.total / synthetic_fleets.GIB
        assert round(placed, 1) == fleet.placed_gib
        assert placed <= 1.05 * fleet.optimum_gib
        if theirs.missing():
            continue
        assert ours.total <= theirs.total
        large = len(problem.models) >= 20 and len(problem.nodes) >= 4
        far += large and theirs.total >= 1.1 * ours.total
    assert far >= 6
