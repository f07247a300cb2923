"""What a fleet on Ray decides, without a cluster: tests/integrations/test_ray_fleet.py has one."""

from pathlib import Path

import pytest

from models import gallery
from tensor_dedup import Store
from tensor_dedup.analyze import analyze
from tensor_dedup.errors import ConfigError
from tensor_dedup.integrations.ray.cluster import ClusterNode, EngineApp
from tensor_dedup.integrations.ray.keeper import planned, what_fits
from tensor_dedup.integrations.ray.specification import (
    FleetSpecification,
    ModelSpecification,
    measured,
    model_of,
)
from tensor_dedup.planning.placement import DoesNotFitError, FleetPlan, Model
from tensor_dedup.remote.errors import UnknownRemoteNameError

NOWHERE = FleetSpecification("file:///nowhere", {})


def nodes(count: int, memory: int) -> list[ClusterNode]:
    return [ClusterNode(f"id-{n}", f"node-{n}", memory, 8.0, 0.0) for n in range(count)]


def family(members: int, shared: int, own: int, replicas: int = 1) -> list[Model]:
    return [
        Model(f"m{n}", {"base": shared, f"own {n}": own}, replicas=replicas) for n in range(members)
    ]


def lost(models: list[Model], left: list[ClusterNode], before: FleetPlan) -> FleetPlan:
    """What is served when there is no room for everything on the nodes that are left."""
    current = before.placement()
    with pytest.raises(DoesNotFitError) as caught:
        planned(models, left, NOWHERE, current, rebalance=False)
    return what_fits(models, left, NOWHERE, current, caught.value)


def test_what_has_room_is_served_when_a_node_is_lost() -> None:
    models = [*family(3, 40, 10), Model("large", {"x": 95}), Model("small", {"y": 20})]
    before = planned(models, nodes(2, 100), NOWHERE, {}, rebalance=False)
    gone = before.placement()["large"][0]
    left = [each for each in nodes(2, 100) if each.name != gone]
    found = lost(models, left, before)
    assert {*found.placement()} == {"m0", "m1", "m2", "small"}
    assert all(held == [left[0].name] for held in found.placement().values())


def test_a_replica_that_is_left_is_not_given_up() -> None:
    models = family(2, 40, 10, replicas=2)
    before = planned(models, nodes(2, 100), NOWHERE, {}, rebalance=False)
    found = lost(models, nodes(1, 100), before)
    assert found.placement() == {"m0": ["node-0"], "m1": ["node-0"]}


def test_a_given_memory_is_a_device_s_and_the_node_s_own_counts_beside_it() -> None:
    models = [Model("m", {"x": 50}, host=30), Model("n", {"y": 50}, host=30)]
    specification = FleetSpecification("file:///nowhere", {}, memory=100)
    planned(models, nodes(1, 60), specification, {}, rebalance=False)
    with pytest.raises(DoesNotFitError, match="host memory"):
        planned(models, nodes(1, 59), specification, {}, rebalance=False)


@pytest.mark.parametrize("model", ["base", "run@19", "a:b", "org/name"])
def test_the_name_of_an_application_says_what_it_is(model: str) -> None:
    app = EngineApp("fleet", model, "0123abcd")
    assert EngineApp.parse(app.name) == app


@pytest.mark.parametrize("name", ["fleet", "default", "x:y", "x@y"])
def test_other_applications_are_no_engines(name: str) -> None:
    assert EngineApp.parse(name) is None


def test_a_specification_comes_back_as_it_was() -> None:
    model = model_of("base", {"replicas": 2, "room": "1GiB", "engine": {"max_model_len": 64}})
    assert model == ModelSpecification(2, 1 << 30, 0, {"max_model_len": 64})
    fleet = FleetSpecification("s3://bucket/models", {"base": model}, memory=5, store="/{node}")
    assert FleetSpecification.decode(fleet.encode()) == fleet
    more = fleet.with_model("tune", model)
    assert [*more.models] == ["base", "tune"]
    assert more.without("tune") == fleet


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"replica": 2}, "perhaps 'replicas'"),
        ({"replicas": 0}, "replicas is 0"),
        ({"room": "much"}, "4GiB"),
        ({"engine": "eager"}, "vLLM's arguments by name"),
    ],
)
def test_wrong_fields_say_what_would_be_right(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_of("base", fields)


def test_the_remote_s_manifests_are_enough_to_plan(tmp_path: Path) -> None:
    paths = gallery.make(tmp_path / "gallery")
    url = f"file://{tmp_path}/remote"
    with Store.open(tmp_path / "store") as store:
        for number, path in enumerate(paths):
            store.import_(path, f"model-{number}", compress="auto")
            store.push(url, f"model-{number}")
    names = {f"model-{number}": ModelSpecification(room=1000) for number in range(len(paths))}
    models = measured(FleetSpecification(url, names))
    unique = analyze(paths).unique_bytes
    assert unique < sum(model.nbytes for model in models)
    found = planned(models, nodes(1, 1 << 30), NOWHERE, {}, rebalance=False)
    assert found.used_bytes == unique + 1000 * len(paths)
    with pytest.raises(UnknownRemoteNameError, match="nobody"):
        measured(FleetSpecification(url, {"nobody": ModelSpecification()}))
