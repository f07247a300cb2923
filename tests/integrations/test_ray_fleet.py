"""A fleet on a real Ray cluster of several nodes, with real vLLM engines and a real remote."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from models import tiny_checkpoints
from processes import fresh
from remote_runs import real_servers
from remote_runs.remotes import Proxy
from tensor_dedup import Store
from tensor_dedup.analyze import analyze
from tensor_dedup.errors import ConfigError
from tensor_dedup.integrations.ray import Fleet, FleetStatus, NodeStatus, application
from tensor_dedup.integrations.ray.cluster import NAMESPACE, import_ray
from tensor_dedup.integrations.ray.front import MOST_BODY_BYTES
from tensor_dedup.integrations.ray.keeper import FleetError, keeper_name
from tensor_dedup.integrations.ray.node import actor_name
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.planning.placement import DoesNotFitError
from tensor_dedup.remote.errors import UnknownRemoteNameError
from training_runs import ray_clusters
from training_runs.ray_clusters import RayCluster

# The schemas of Ray's Serve use what pydantic calls deprecated.
# Ray leaves the log files of processes that it has started to be closed by themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file <_io.* name='/tmp/ray/:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file <_io.* name='/dev/null':ResourceWarning"),
]

MIB = 1 << 20
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Models:
    """Checkpoints by name, in a remote."""

    paths: Mapping[str, Path]
    remote: str

    def unique_bytes(self, names: Any) -> int:
        return analyze([self.paths[name] for name in names]).unique_bytes if names else 0


def _with_tokenizer(path: Path) -> Path:
    """vLLM's web application wants one; it is used for nothing here."""
    import tokenizers
    import transformers

    words = {f"t{number}": number for number in range(8192)}
    plain: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    kind: Any = transformers.PreTrainedTokenizerFast
    kind(tokenizer_object=plain, unk_token="t0").save_pretrained(path)
    return path


def _pushed(root: Path, paths: Mapping[str, Path], url: str) -> Models:
    with Store.open(root / "origin") as store:
        for name, path in paths.items():
            store.import_(_with_tokenizer(path), name)
            store.push(url, name)
    return Models(paths, url)


def _fleet(models: Models, root: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a fleet whose nodes share this machine."""
    return {
        "remote": models.remote,
        "models": wanted,
        "engine": ray_clusters.ENGINE,
        "store": str(root / "nodes" / "{node}" / "store"),
        "socket": str(root / "run" / "{node}" / "s"),
        "starting": 1,
        "cpus": 0.5,
    }


def _where(status: FleetStatus) -> dict[str, set[str]]:
    return {model: {each.node for each in held} for model, held in status.models.items()}


def _until(fleet: Fleet, condition: Callable[[FleetStatus], bool]) -> FleetStatus:
    """The status when it is so: the cluster does it by itself."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition(status := fleet.status()):
        assert time.monotonic() < deadline, str(status)
        time.sleep(1)
    return status


def _all_run(status: FleetStatus) -> bool:
    held = [each for replicas in status.models.values() for each in replicas]
    return all(status.models.values()) and all(
        each.state == "RUNNING" and not each.node.startswith("lost") for each in held
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a short path, as sockets are below it."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as found:
        yield Path(found)


def _expected(paths: Mapping[str, Path]) -> dict[str, Any]:
    """What plain vLLM answers."""
    found = fresh.call_forked(ray_clusters.reference, [*map(str, paths.values())])
    return dict(zip(paths, found, strict=True))


@pytest.mark.long
@pytest.mark.vllm
def test_models_of_a_lost_node_answer_elsewhere(folder: Path) -> None:
    pair = tiny_checkpoints.make("qwen2", folder)
    paths = {"base": pair.base, "tune": pair.fine_tune}
    models = _pushed(folder, paths, f"file://{folder}/remote")
    expected = _expected(paths)
    assert expected["base"] != expected["tune"]
    with ray_clusters.cluster(2, 64 * MIB) as cluster:
        args = _fleet(models, folder, {name: {"room": "1MiB"} for name in paths})
        cluster.deploy(application(args), "fleet")
        fleet = Fleet()
        status = _until(fleet, _all_run)
        # They are kin, and so on one node, which has each tensor once.
        [(home, held)] = [(each.name, each) for each in status.nodes if each.models]
        assert held.models == ("base", "tune")
        assert home != cluster.head
        unique = models.unique_bytes(paths)
        assert unique < 0.9 * sum(map(tiny_checkpoints.nbytes, paths.values()))
        assert unique <= sum(held.pulled.values()) < unique + MIB  # and the small files
        assert {name: cluster.outputs(name) for name in paths} == expected
        held = next(node for node in fleet.status().nodes if node.models)
        assert 0.9 * unique < held.resident_bytes < 1.2 * unique
        assert 0 < ray_clusters.slab_bytes(Path(held.socket)) < 1.2 * unique
        assert cluster.ask("/v1/models")[1]["data"][0]["id"] == "base"
        code, told = cluster.ask("/v1/completions", {"model": "tuna", "prompt": "x"})
        assert (code, told["error"]["code"]) == (404, 404)
        assert "perhaps 'tune'" in told["error"]["message"]
        code, told = cluster.ask("/v1/completions", {"prompt": " " * MOST_BODY_BYTES})
        assert (code, told["error"]["type"]) == (413, "ContentTooLargeError")
        _refuses_what_does_not_fit(fleet, status)
        _plans_from_the_cluster(cluster, folder, paths, home)
        _its_processes_come_again(fleet, held)
        cluster.kill(home)
        status = _until(fleet, lambda now: _all_run(now) and home not in _where(now)["base"])
        assert _where(status) == {"base": {cluster.head}, "tune": {cluster.head}}
        assert {name: cluster.outputs(name) for name in paths} == expected
        _leaves_nothing(fleet, status)
        assert cluster.ask("/v1/models")[0] == 404


def _refuses_what_does_not_fit(fleet: Fleet, status: FleetStatus) -> None:
    with pytest.raises(DoesNotFitError, match=r"tune takes 1\.0 GiB .* the largest node has 64"):
        fleet.add("tune", room="1GiB")
    with pytest.raises(UnknownRemoteNameError, match="no checkpoint 'nobody'"):
        fleet.add("nobody")
    with pytest.raises(ConfigError, match="perhaps 'replicas'"):
        fleet.add("tune", replica=2)
    assert _where(fleet.status()) == _where(status)


def _plans_from_the_cluster(
    cluster: RayCluster, folder: Path, paths: Mapping[str, Path], home: str
) -> None:
    """`plan --from` finds the nodes, their memory, and what runs there."""
    lines = [f'[models.{name}]\npath = "{path}"' for name, path in paths.items()]
    (folder / "models.toml").write_text(
        "\n".join([*lines, f'[models.new]\npath = "{paths["tune"]}"'])
    )
    command = Path(sys.executable).with_name("tensor-dedup")
    arguments = (
        "plan",
        "--models",
        str(folder / "models.toml"),
        "--from",
        cluster.client,
        "--json",
    )
    done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert {node["name"]: node["memory_bytes"] for node in found["nodes"]} == dict.fromkeys(
        cluster.names, 64 * MIB
    )
    assert [(m["model"], m["source"], m["target"], m["loads_bytes"]) for m in found["moves"]] == [
        ("new", None, home, 0)
    ]


def _leaves_nothing(fleet: Fleet, status: FleetStatus) -> None:
    """`shutdown` ends the actors, and a manager whose actor was lost before."""
    [node] = status.nodes
    with Admin(node.socket) as admin:
        manager = psutil.Process(admin.totals().pid)
    ray = import_ray()
    ray.kill(ray.get_actor(actor_name(node.node_id), namespace=NAMESPACE), no_restart=False)
    # Until the next one answers. It counts anew what it pulls.
    _until(fleet, lambda now: [each.pulled for each in now.nodes] == [{}])
    with Admin(node.socket) as admin:
        assert admin.totals().pid == manager.pid
    fleet.shutdown()
    manager.wait(PATIENCE_S)
    named = ray.util.list_named_actors(all_namespaces=True)
    assert [each for each in named if each["namespace"] == NAMESPACE] == []


@pytest.mark.long
@pytest.mark.vllm
def test_an_engine_that_did_not_start_is_tried_again(folder: Path) -> None:
    pair = tiny_checkpoints.make("qwen2", folder)
    paths = {"base": pair.base, "tune": pair.fine_tune}
    models = _pushed(folder, paths, f"file://{folder}/remote")
    with ray_clusters.cluster(1, 64 * MIB) as cluster:
        fleet = Fleet(**_fleet(models, folder, {"base": {"room": "1MiB"}}))
        fleet.apply()
        pieces = folder / "remote" / "containers"
        pieces.rename(folder / "away")
        with pytest.raises(FleetError, match="engines do not start"):
            fleet.add("tune", room="1MiB")
        assert {each.state for each in fleet.status().models["tune"]} == {"DEPLOY_FAILED"}
        (folder / "away").rename(pieces)
        status = _until(fleet, _all_run)  # by itself
        assert set(status.models) == {*paths}
        assert {name: cluster.outputs(name) for name in paths} == _expected(paths)
        fleet.shutdown()


@pytest.mark.long
def test_a_client_whose_process_dies_as_it_begins_is_connected_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray Client's server forks a process for each client, which a fork in gRPC kills now and then.
    died = folder / "died"
    (folder / "sitecustomize.py").write_text(
        "import os, pathlib, sys\n"
        f"died = pathlib.Path({str(died)!r})\n"
        "if '--mode=specific-server' in sys.orig_argv and not died.exists():\n"
        "    died.touch()\n"
        "    os._exit(1)\n"
    )
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *before.split(os.pathsep)]))
    code = (
        "import sys; from tensor_dedup.integrations.ray import observed\n"
        "nodes, placed = observed(sys.argv[1])\n"
        "print([(node.name, node.memory) for node in nodes], placed)"
    )
    with ray_clusters.cluster(1, 64 * MIB) as cluster:
        command = [sys.executable, "-c", code, cluster.client]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert died.exists()
    assert (done.returncode, done.stdout) == (0, f"[('node-1', {64 * MIB})] {{}}\n"), done.stderr


def _its_processes_come_again(fleet: Fleet, held: NodeStatus) -> None:
    """The keeper, the node's actor and its manager are killed: engines run on, all come again."""
    ray = import_ray()

    def manager() -> int:
        with Admin(held.socket) as admin:
            return admin.totals().pid

    first = manager()
    for name in (keeper_name(fleet.name), actor_name(held.node_id)):
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=False)
    _until(fleet, lambda now: [n.models for n in now.nodes if n.node_id == held.node_id] != [])
    assert manager() == first  # whose actor is another one now
    os.kill(first, signal.SIGKILL)

    def is_back(now: FleetStatus) -> bool:
        [node] = [each for each in now.nodes if each.node_id == held.node_id]
        return node.resident_bytes >= held.resident_bytes

    _until(fleet, is_back)  # with what the engines still held
    assert manager() != first


def _family(root: Path) -> dict[str, Path]:
    """A base of 56 MB, six fine-tunes of three kinds, and two strangers of its size."""
    paths = {"base": _large(root / "base", 0)}

    def changed(name: str, wanted: Callable[[str], bool], seed: int) -> None:
        def change(tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * (1.01 + seed / 100) if wanted(tensor_name) else tensor

        paths[name] = tiny_checkpoints.mapped(paths["base"], root / name, change)

    for number in (1, 2):
        changed(f"layer-{number}", lambda name: ".layers.4." in name, number)
        # All that vLLM fuses into one tensor: what of it is equal is no tensor in memory.
        changed(
            f"attention-{number}", lambda name: re.search("[qkv]_proj", name) is not None, number
        )
        rows = tiny_checkpoints.grown_vocabulary(
            paths["base"], root / f"vocabulary-{number}", 64 * number
        )
        paths[f"vocabulary-{number}"] = rows
        paths[f"stranger-{number}"] = _large(root / f"stranger-{number}", number)
    return paths


def _large(target: Path, seed: int) -> Path:
    import transformers as hf

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8192,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    make: Any = hf.Qwen2ForCausalLM
    model = make(hf.Qwen2Config(**settings)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            # Vectors too: zeros and ones would be what strangers have in common.
            parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(
                torch.randn_like(parameter) * 0.05
            )
    model.save_pretrained(target)
    return target


@contextmanager
def _seaweed(folder: Path) -> Iterator[Proxy]:
    """SeaweedFS with a bucket `bucket`, behind a counting proxy to which the environment leads."""
    with (
        real_servers.weed(folder / "weed") as server,
        closing(Proxy(server.port)) as proxy,
        real_servers.environment(real_servers.s3_environment(proxy.port)),
    ):
        yield proxy


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_nine_models_on_four_nodes(folder: Path) -> None:
    with _seaweed(folder) as wire:
        paths = _family(folder)
        assert min(map(tiny_checkpoints.nbytes, paths.values())) >= 50 * MIB
        models = _pushed(folder, paths, "s3://bucket/models")
        expected = _expected(paths)
        assert len({str(each) for each in expected.values()}) == len(paths)
        wanted = {name: {"room": "16MiB", "replicas": 4 if name == "base" else 1} for name in paths}
        later = wanted.pop("layer-2")
        with ray_clusters.cluster(4, 180 * MIB) as cluster:
            fleet = Fleet(**_fleet(models, folder, wanted))
            wire.reset()
            before = fleet.apply()
            status = fleet.add("layer-2", **later)
            assert {**_where(status), **_where(before)} == _where(status)  # nothing moved
            assert len([node for node in status.nodes if node.models]) == 4
            # Over the wire went what the nodes lacked, and no more.
            pulled = sum(sum(node.pulled.values()) for node in status.nodes)
            assert pulled <= wire.received < 1.03 * pulled
            assert {name: cluster.outputs(name) for name in paths} == expected
            for _ in range(4):  # each of its engines
                assert cluster.outputs("base") == expected["base"]
            _holds_each_tensor_once(models, fleet.status())

            lost = next(
                node
                for node in status.nodes
                if node.name != cluster.head and any("-" in each for each in node.models)
                if not any(each.startswith("stranger") for each in node.models)
            )
            kin_elsewhere = [n for n in status.nodes if n != lost and "base" in n.models]
            assert kin_elsewhere
            wire.reset()
            cluster.kill(lost.name)
            # Ray counts the node as alive until it has missed some heartbeats.
            status = _until(
                fleet,
                lambda now: _all_run(now) and lost.name not in set().union(*_where(now).values()),
            )
            assert "base has 4 replicas on different nodes, and there are 3" in status.problem
            assert {name: cluster.outputs(name) for name in lost.models} == {
                name: expected[name] for name in lost.models
            }
            _holds_each_tensor_once(models, fleet.status())
            after = {node.name: node for node in status.nodes}
            for old in kin_elsewhere:  # where the base was, only what is a model's own came
                for name in {*after[old.name].models} - {*old.models}:
                    own = models.unique_bytes([*old.models, name]) - models.unique_bytes(old.models)
                    assert (
                        after[old.name].pulled[name]
                        <= own + MIB
                        < 0.5 * models.unique_bytes([name])
                    )
            assert any({*after[old.name].models} > {*old.models} for old in kin_elsewhere)
            whole = sum(models.unique_bytes([name]) for name in lost.models)
            assert wire.received < 0.75 * whole
            fleet.shutdown()


def _holds_each_tensor_once(models: Models, status: FleetStatus) -> None:
    """In each node's store and memory; sharing is asserted where there is something to share."""
    for node in status.nodes:
        if not node.models:
            continue
        # By whole tensors; of grown vocabularies even less is new.
        unique = models.unique_bytes(node.models)
        least = max(models.unique_bytes([name]) for name in node.models)
        pulled = sum(node.pulled.values())
        assert least <= pulled < 1.01 * unique + len(node.models) * MIB // 2, (node.pulled, unique)
        assert 0.97 * least <= node.resident_bytes <= 1.03 * unique, (node.resident_bytes, unique)
        # A page that nobody has read yet, a row of an embedding, is not mapped.
        held = ray_clusters.slab_bytes(Path(node.socket))
        assert 0.5 * least <= held <= 1.03 * unique, (node.models, held, unique)
    alone = sum(models.unique_bytes([name]) for node in status.nodes for name in node.models)
    assert sum(models.unique_bytes(node.models) for node in status.nodes) < 0.7 * alone


def test_without_ray_nothing_of_it_is_imported() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from tensor_dedup.integrations.ray import Fleet, observed\n"
        "from tensor_dedup.errors import UnsupportedError\n"
        "import tensor_dedup.cli.plan\n"
        "assert not {'vllm', 'torch'} & sys.modules.keys()\n"
        "for use in (lambda: Fleet('file:///x', ['a']), lambda: observed('auto')):\n"
        "    try: use()\n"
        "    except UnsupportedError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("pip install '.[ray]'") == 2
