"""The files for Ray: what Serve, Kubernetes and the package's own code say to them."""

import re
import tomllib
from typing import Any

import pytest

from files import container_files
from files.container_files import DEPLOY
from project import package_source

FLEET = DEPLOY / "ray" / "fleet.yaml"
SERVICE = DEPLOY / "kubernetes" / "ray-service.yaml"
IMAGE = DEPLOY / "ray.Dockerfile"


def read(text: str) -> dict[str, Any]:
    yaml: Any = pytest.importorskip("yaml")
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def service() -> dict[str, Any]:
    return read(SERVICE.read_text())


def groups() -> list[dict[str, Any]]:
    cluster = service()["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


# Ray 2.60's schemas use what pydantic calls deprecated.
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments:DeprecationWarning")
def test_serve_and_the_fleet_understand_the_application() -> None:
    pytest.importorskip("ray")
    from tensor_dedup.errors import ConfigError
    from tensor_dedup.integrations import ray as ours
    from tensor_dedup.integrations.ray.cluster import import_ray
    from tensor_dedup.integrations.ray.specification import FleetSpecification

    document = read(FLEET.read_text())
    schema = import_ray("ray.serve.schema").ServeDeploySchema
    [application] = schema(**document).applications
    assert application.import_path == f"{ours.__name__}:{ours.application.__name__}"
    bound = ours.application(application.args)._bound_deployment
    fleet, wanted = bound.init_args
    specification = FleetSpecification.decode(wanted)
    assert fleet == application.name
    assert {*specification.models} == {*document["applications"][0]["args"]["models"]}
    assert specification.models["base"].room == 4 << 30
    with pytest.raises(ConfigError, match="perhaps 'remote'"):
        ours.application({**application.args, "remotes": ""})


def test_kubernetes_has_the_same_application() -> None:
    assert read(service()["spec"]["serveConfigV2"]) == read(FLEET.read_text())


def test_its_pods_fit_the_schema_and_are_restricted() -> None:
    kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")
    version = kubernetes_validate.latest_version()
    uids = [step.text for step in container_files.instructions(IMAGE)]
    for group in groups():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        kubernetes_validate.validate(pod, version, strict=True)
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True
        assert f"UID={context['runAsUser']}" in uids
        [container] = pod["spec"]["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert f"-t {container['image']} ." in IMAGE.read_text()


def test_the_head_takes_no_engine_and_workers_say_what_the_plan_counts() -> None:
    head, workers = groups()
    assert head["rayStartParams"]["num-cpus"] == "0"
    [container] = workers["template"]["spec"]["containers"]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert int(workers["rayStartParams"]["memory"]) <= 0.8 * limit
    [args] = [each["args"] for each in read(FLEET.read_text())["applications"]]
    assert args["cpus"] <= int(container["resources"]["requests"]["cpu"])


def test_the_image_has_the_ray_that_was_tried() -> None:
    steps = container_files.instructions(IMAGE)
    [install] = [step.text for step in steps if "pip install" in step.text]
    found = re.search(r'"ray\[serve\]==([\d.]+)"', install)
    assert found is not None
    assert service()["spec"]["rayClusterConfig"]["rayVersion"] == found[1]
    project = tomllib.loads((package_source.ROOT / "pyproject.toml").read_text())["project"]
    [remote] = project["optional-dependencies"]["remote"]
    assert remote in install
    assert [step.text for step in steps if step.verb == "USER"][-1] == "${UID}:${UID}"
    engine = (DEPLOY / "kubernetes" / "engine.yaml").read_text()
    [base] = [step.text.removeprefix("ENGINE=") for step in steps if "ENGINE=" in step.text]
    assert f"image: {base}\n" in engine
