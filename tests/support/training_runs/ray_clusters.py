"""Ray clusters of several nodes on this machine, and what is asked of a fleet on one."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tensor_dedup.integrations.ray.cluster import import_ray
from tensor_dedup.memory_manager.client.admin import Admin
from vllm_runs import fleet, plain

# Ray's own processes take some hundred MiB; what is stored in it here is small.
_OBJECTS = 80 << 20
# As `plain.engine` makes engines.
ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 16 << 20,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "seed": 0,
    "distributed_executor_backend": "uni",  # a process less for each engine
}


class RayCluster:
    """Nodes of one Ray cluster, each with `memory` bytes, and the port of Serve's proxy.

    The last of the `names` is the `head`: what may go anywhere goes to the first.
    """

    def __init__(self, nodes: int, memory: int) -> None:
        self._ray, self._serve = import_ray(), import_ray("ray.serve")
        self.names = [f"node-{number + 1}" for number in range(nodes)]
        self.head = self.names[-1]
        client = _free_port()
        self.client = f"ray://127.0.0.1:{client}"
        more = {"num_cpus": 8, "memory": memory, "object_store_memory": _OBJECTS}
        self._cluster = import_ray("ray.cluster_utils").Cluster()
        self._nodes = {
            name: self._cluster.add_node(
                node_name=name,
                include_dashboard=False,
                **({"ray_client_server_port": client} if name == self.head else {}),
                **more,
            )
            for name in reversed(self.names)
        }
        self._ray.init(address=self._cluster.address, namespace="tests", log_to_driver=False)
        self.port = _free_port()
        http = {"host": "127.0.0.1", "port": self.port}
        self._serve.start(proxy_location="HeadOnly", http_options=http)

    def deploy(self, application: Any, name: str) -> None:
        """Run an application of Serve, as `serve deploy` does."""
        self._serve.run(application, name=name, route_prefix="/")

    def kill(self, name: str) -> None:
        """End a node as a loss of its machine does: with all that runs on it, at once."""
        node = self._nodes.pop(name)
        running = _below(node)
        self._cluster.remove_node(node, allow_graceful=False)
        _kill(running)

    def close(self) -> None:
        running = [each for node in self._cluster.list_all_nodes() for each in _below(node)]
        self._serve.shutdown()
        self._ray.shutdown()
        self._cluster.shutdown()
        _kill(running)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """The status and the document of a request over HTTP; Serve itself answers with a text."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode()
                is_json = error.headers.get_content_type() == "application/json"
                return error.code, json.loads(said) if is_json else said

    def outputs(self, model: str) -> list[Any]:
        """What a model answers, in the form of `reference`."""
        found = []
        for prompt in plain.PROMPTS:
            status, told = self.ask(
                "/v1/completions",
                {
                    "model": model,
                    "prompt": [*prompt],
                    "max_tokens": plain.NEW_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                    "logprobs": plain.TOP,
                    "return_tokens_as_token_ids": True,
                },
            )
            assert status == 200, told
            found.append(
                [_numbered(step) for step in told["choices"][0]["logprobs"]["top_logprobs"]]
            )
        return found


def _numbered(step: dict[str, float]) -> list[list[float]]:
    return sorted([int(token.removeprefix("token_id:")), value] for token, value in step.items())


def reference(paths: Sequence[str]) -> list[list[Any]]:
    """What plain vLLM answers with each checkpoint: the likely tokens of each step.

    Weights are as an engine beside a memory manager keeps them. To be called in a new process.
    """
    found = []
    for path in paths:
        with plain.kept_as("plain"):
            llm = plain.engine(path, enable_prefix_caching=False)
        answers: Any = [
            plain.outputs(llm, prompts=[{"prompt_token_ids": list(prompt)}])[0]
            for prompt in plain.PROMPTS
        ]
        plain.let_go(llm)
        found.append([[[list(pair) for pair in step] for step in likely] for _, likely in answers])
    return found


def slab_bytes(socket: Path) -> int:
    """The physical memory of a manager's slabs, in all processes that map them, by PSS."""
    with Admin(socket) as admin:
        overview = admin.overview()
    pids = {overview.totals.pid, *(client.pid for client in overview.clients)}
    return sum(fleet.slab_pss(pid) for pid in pids)


@contextmanager
def cluster(nodes: int, memory: int) -> Iterator[RayCluster]:
    """A cluster for a test; all that it has started ends with it."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    found = RayCluster(nodes, memory)
    try:
        yield found
    finally:
        found.close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _below(node: Any) -> list[psutil.Process]:
    """The processes of a node, what they have started, and memory managers, which are no child."""
    found = []
    for kind in node.all_processes.values():
        for each in kind:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(each.process.pid)
                found += [process, *process.children(recursive=True)]
    raylets = {str(each.process.pid) for each in node.all_processes["raylet"]}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's
            if process.environ().get("RAY_RAYLET_PID") in raylets and process not in found:
                found.append(process)
    return found


def _kill(processes: Sequence[psutil.Process]) -> None:
    for each in processes:
        with suppress(psutil.NoSuchProcess):  # it is known by its start, too: no other of its pid
            each.kill()
    psutil.wait_procs(processes, 60)


_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray 2.54 warns of what is to come
}


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
