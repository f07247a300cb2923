"""Plans: each placement has its reason, changes move nothing unasked, refusals have numbers."""

import json
import random

import pytest

from tensor_dedup.planning.placement import DoesNotFitError, FleetPlan, Model, Node, plan


def family(name: str, members: int, shared: int, own: int, **more: int) -> list[Model]:
    return [
        Model(f"{name}-{n}", {f"{name}/base": shared, f"{name}/{n}": own}, **more)
        for n in range(members)
    ]


def nodes(count: int, memory: int) -> list[Node]:
    return [Node(f"node-{n + 1}", memory) for n in range(count)]


MODELS = [*family("a", 4, 40, 5, room=2), *family("b", 3, 30, 5, room=1), Model("x", {"x": 25})]


def where(found: FleetPlan) -> dict[str, set[str]]:
    return {name: set(held) for name, held in found.placement().items()}


def test_each_placement_has_its_reason() -> None:
    found = plan(MODELS, nodes(4, 100))
    for node in found.nodes:
        assert node.used_bytes == sum(each.adds_bytes + each.room_bytes for each in node.models)
        for each in node.models:
            assert each.adds_bytes + each.shared_bytes == each.weights_bytes
            assert (each.shares_with is None) == (each.shared_bytes == 0)
    told = {each.model: each for node in found.nodes for each in node.models}
    assert told["a-0"].shares_with is None
    assert (told["a-3"].adds_bytes, told["a-3"].shared_bytes) == (5, 40)
    assert str(told["a-3"].shares_with).startswith("a-")
    assert found.used_bytes == 40 + 4 * 7 + 30 + 3 * 6 + 25
    assert found.alone_bytes == 4 * 47 + 3 * 36 + 25


def test_the_order_of_the_file_does_not_matter_to_what_it_takes() -> None:
    totals = set()
    for seed in range(5):
        models = random.Random(seed).sample(MODELS, len(MODELS))
        totals.add(plan(models, nodes(4, 100)).used_bytes)
        assert plan(models, nodes(4, 100)) == plan(models, nodes(4, 100))
    assert len(totals) == 1


def test_replicas_are_on_different_nodes() -> None:
    found = plan(family("a", 3, 40, 5, replicas=2), nodes(3, 100))
    assert all(len(held) == 2 for held in where(found).values())
    assert found.used_bytes == 2 * (40 + 3 * 5)


def test_a_new_model_moves_nothing() -> None:
    before = plan(MODELS, nodes(4, 100)).placement()
    models = [*MODELS, *family("a", 5, 40, 5, room=2)[4:]]
    found = plan(models, nodes(4, 100), current=before)
    [move] = found.moves
    assert (move.model, move.source, move.loads_bytes) == ("a-4", None, 5)
    assert move.target in before["a-0"]
    kept = {name: held for name, held in where(found).items() if name != "a-4"}
    assert kept == {name: set(held) for name, held in before.items()}


def test_what_was_on_a_lost_node_is_placed_again() -> None:
    before = plan(MODELS, nodes(4, 100))
    [lost] = [n.name for n in before.nodes if any(m.model == "a-0" for m in n.models)]
    left = [node for node in nodes(4, 100) if node.name != lost]
    found = plan(MODELS, left, current=before.placement())
    moved = {each.model for node in before.nodes if node.name == lost for each in node.models}
    assert {move.model for move in found.moves} == moved >= {f"a-{n}" for n in range(4)}
    assert all(move.source == lost for move in found.moves)
    # The first of the family loads the base, the others what is their own.
    assert sum(move.loads_bytes for move in found.moves if move.model[0] == "a") == 40 + 4 * 5


def test_what_is_no_longer_wanted_leaves() -> None:
    before = plan(MODELS, nodes(4, 100)).placement()
    found = plan(MODELS[1:], nodes(4, 100), current=before)
    [move] = found.moves
    assert (move.model, [move.source], move.target) == ("a-0", before["a-0"], None)


def torn() -> dict[str, list[str]]:
    """Two families, each on both nodes."""
    return {f"{name}-{n}": [f"node-{n % 2 + 1}"] for name in "ab" for n in range(4)}


def test_rebalancing_says_what_it_saves_and_costs() -> None:
    models = [*family("a", 4, 40, 1), *family("b", 4, 30, 1)]
    stays = plan(models, nodes(2, 100), current=torn())
    assert stays.moves == []
    assert stays.used_bytes == 2 * 40 + 2 * 30 + 8
    moved = plan(models, nodes(2, 100), current=torn(), rebalance=True)
    assert moved.used_bytes == 40 + 30 + 8
    assert moved.saved_bytes == stays.used_bytes - moved.used_bytes == 70
    # Whatever moves, the base is there already: only what is its own is loaded.
    assert 2 <= len(moved.moves) <= 4
    assert all(move.loads_bytes == 1 for move in moved.moves)
    again = plan(models, nodes(2, 100), current=moved.placement(), rebalance=True)
    assert (again.moves, again.saved_bytes) == ([], 0)


@pytest.mark.parametrize(
    ("models", "machines", "said"),
    [
        ([Model("big", {"t": 90}, room=20)], nodes(9, 100), "big takes 110 B .* has 100 B"),
        ([Model("twice", {"t": 9}, replicas=3)], nodes(2, 100), "3 replicas .* 2 nodes"),
        (
            [Model(f"m{n}", {f"t{n}": 60}) for n in range(3)],
            nodes(2, 100),
            r"no room for m\d \(1 of 3 replicas\): m\d would add 60 B to node-\d, where 40 B",
        ),
        (
            [Model("h", {"t": 1}, host=5), Model("i", {"t": 1}, host=3)],
            [Node("n", 100, 7), Node("full", 0, 9)],
            "no room for i .*: i takes 3 B of host memory, of which 2 B are left on n; .*--host-me",
        ),
        (
            [Model("h", {"t": 60}, replicas=2), Model("i", {"u": 30})],
            [Node("n", 100), Node("less", 50)],
            "h would add 60 B to less, where (50|20) B are left; .* --memory",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_numbers(
    models: list[Model], machines: list[Node], said: str
) -> None:
    with pytest.raises(DoesNotFitError, match=said) as caught:
        plan(models, machines)
    assert caught.value.facts["models"]


def test_what_fits_only_if_others_move_says_so() -> None:
    models = [
        Model("a", {"a": 60}),
        Model("b", {"b": 40}),
        Model("c", {"c": 50}),
        Model("d", {"d": 50}),
    ]
    current = {"a": ["node-1"], "b": ["node-2"], "c": ["node-2"]}
    with pytest.raises(DoesNotFitError, match="without moving others; --rebalance"):
        plan(models, nodes(2, 100), current=current)
    found = plan(models, nodes(2, 100), current=current, rebalance=True)
    assert {move.model for move in found.moves} >= {"d"}
    assert found.used_bytes == 200


def test_the_document_is_plain() -> None:
    found = plan(MODELS, nodes(4, 100)).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert [*found][:4] == ["schema", "nodes", "used_bytes", "alone_bytes"]
