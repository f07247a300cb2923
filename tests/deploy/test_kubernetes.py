"""The manifests fit the schemas of Kubernetes, each other, the images and the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from files import container_files
from files.container_files import DEPLOY
from tensor_dedup.cli.serve import command as serve
from tensor_dedup.config import TensorDedupConfig

FOLDER = DEPLOY / "kubernetes"
MANIFESTS = ("manager.yaml", "manager-gpu.yaml", "engine.yaml")
EACH = pytest.mark.parametrize("name", MANIFESTS)
MANAGERS = pytest.mark.parametrize("name", ["manager.yaml", "manager-gpu.yaml"])
GIB = {"Gi": 1 << 30, "Mi": 1 << 20}


def manifest(name: str) -> dict[str, Any]:
    yaml: Any = pytest.importorskip("yaml")
    [document] = yaml.safe_load_all((FOLDER / name).read_text())
    assert isinstance(document, dict)
    return document


def pod(name: str) -> dict[str, Any]:
    """The pod's spec."""
    spec: dict[str, Any] = manifest(name)["spec"]
    return spec["template"]["spec"] if "template" in spec else spec


def nbytes(quantity: str) -> int:
    return int(quantity[:-2]) * GIB[quantity[-2:]]


def test_each_manifest_is_tested() -> None:
    # That of KubeRay has a schema of its own: tests/deploy/test_ray.py.
    assert {path.name for path in FOLDER.iterdir()} == {*MANIFESTS, "ray-service.yaml"}


@EACH
def test_it_fits_the_schema(name: str) -> None:
    kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")
    document = manifest(name)
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(document, version, strict=True)
    template = document["spec"].get("template", document)
    template["spec"]["containers"][0]["readinessProbes"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinessProbes"):
        kubernetes_validate.validate(document, version, strict=True)


@EACH
def test_it_is_restricted_where_the_host_s_folder_allows(name: str) -> None:
    spec = pod(name)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert spec["automountServiceAccountToken"] is False
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    uids = [s.text for s in container_files.instructions(DEPLOY / "manager.Dockerfile")]
    assert f"UID={context['runAsUser']}" in uids
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    for container in spec.get("initContainers", []):
        capabilities = container["securityContext"]["capabilities"]
        assert capabilities == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
    kinds = {frozenset(volume) - {"name"} for volume in spec["volumes"]}
    assert kinds <= {frozenset({"hostPath"}), frozenset({"emptyDir"})}


@EACH
def test_it_says_what_it_needs_and_how_it_is(name: str) -> None:
    spec = pod(name)
    assert spec["tolerations"]
    labels = manifest(name)["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "tensor-dedup"
    for container in (*spec["containers"], *spec.get("initContainers", [])):
        assert ":" in container["image"]
        assert not container["image"].endswith(":latest")
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
    [container] = spec["containers"]
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports


@MANAGERS
def test_the_manager_understands_its_arguments(name: str) -> None:
    [container] = pod(name)["containers"]
    verb, *options = container["args"]
    assert verb == "serve"
    given = serve.make_context("serve", list(options)).params
    assert [port["containerPort"] for port in container["ports"]] == [given["metrics"]]
    assert given["metrics_address"] == "0.0.0.0"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    environment = {each["name"]: each["value"] for each in container["env"]}
    if given["device"]:
        assert environment["NVIDIA_VISIBLE_DEVICES"] == given["device"]
        assert given["device"].startswith("GPU-")
    else:
        assert given["budget"] < nbytes(container["resources"]["limits"]["memory"])
    assert any("GiB" in option for option in options)  # 60G would be 10^9 to most readers


def mounts(name: str) -> dict[str, str]:
    """Where each folder of the host is in the container."""
    spec = pod(name)
    hosts = {v["name"]: v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v}
    [container] = spec["containers"]
    found = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    return {host: found[volume] for volume, host in hosts.items()}


@EACH
def test_manager_and_engine_meet_at_one_socket(name: str) -> None:
    [container] = pod(name)["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    socket = Path(environment["TENSOR_DEDUP_SOCKET"])
    assert mounts(name)["/run/tensor-dedup"] == str(socket.parent)
    if name == "engine.yaml":
        [option] = [each for each in container["args"] if each.startswith("--tensor-dedup=")]
        config = TensorDedupConfig(**json.loads(option.partition("=")[2]))
        assert config.memory_manager == str(socket)
