"""The current state of a Ray cluster: its nodes, and which engines run on them."""

import importlib
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from tensor_dedup.errors import ConfigError, NotInstalledError
from tensor_dedup.planning.placement import Node
from tensor_dedup.suggestions import install_hint

# Of our actors, and of what is in Ray's key-value store.
NAMESPACE: Final = "tensor-dedup"
NODE_LABEL: Final = "ray.io/node-id"  # which Ray gives each node
_SHOWN_ID: Final = 12
_CLIENT_TRIES: Final = 3


def import_ray(module: str = "ray") -> Any:
    """Import and return Ray or one of its modules.

    Raises:
        NotInstalledError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"Ray is not installed, or not all of it ({error}); {install_hint('ray')}"
        raise NotInstalledError(what) from error


def actor_options(name: str) -> dict[str, Any]:
    """Return the Ray options of a detached actor with this name, which outlives its creator."""
    return {
        "name": name,
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 3,  # every call may be made twice
        "max_concurrency": 16,
    }


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of Ray that is alive; `memory` is Ray's resource `memory`, in bytes.

    `name` is the name with which the node was started, or the beginning of its `node_id` if it has
    no name or several nodes have the same one.
    """

    node_id: str
    name: str
    memory: int
    cpus: float
    gpus: float


def alive_nodes() -> list[ClusterNode]:
    """Return the nodes that are alive, sorted by name and `node_id`."""
    found = [each for each in import_ray().nodes() if each["Alive"]]
    names = Counter(each.get("NodeName") or "" for each in found)
    nodes = []
    for each in found:
        name, node_id = each.get("NodeName") or "", each["NodeID"]
        held = each["Resources"]
        nodes.append(
            ClusterNode(
                node_id,
                name if name and names[name] == 1 else node_id[:_SHOWN_ID],
                int(held.get("memory", 0)),
                held.get("CPU", 0.0),
                held.get("GPU", 0.0),
            )
        )
    return sorted(nodes, key=lambda each: (each.name, each.node_id))


@dataclass(frozen=True, slots=True)
class EngineApp:
    """An engine as a Ray Serve application, identified by fleet, model and node.

    All three are in the application's name, so Serve's own status shows where each model runs.
    """

    fleet: str
    model: str
    node_id: str

    @property
    def name(self) -> str:
        """The name of the Serve application: `FLEET:MODEL@NODE_ID`."""
        return f"{self.fleet}:{self.model}@{self.node_id}"

    @classmethod
    def parse(cls, name: str) -> "EngineApp | None":
        """Return the engine with this application name, or None for other applications."""
        fleet, colon, rest = name.partition(":")
        model, at, node_id = rest.rpartition("@")
        return cls(fleet, model, node_id) if colon and at else None


def engine_apps(fleet: str | None = None) -> dict[EngineApp, Any]:
    """Return Serve's status of each engine of a fleet; None means all fleets."""
    serve = import_ray("ray.serve")
    found = {}
    for name, state in serve.status().applications.items():
        app = EngineApp.parse(name)
        if app is not None and fleet in (None, app.fleet):
            found[app] = state
    return found


def recall(key: str) -> bytes | None:
    """Return the value that `remember` stored in Ray's key-value store, or None."""
    store = import_ray("ray.experimental.internal_kv")
    found: bytes | None = store._internal_kv_get(key.encode(), namespace=NAMESPACE)
    return found


def remember(key: str, value: bytes | None) -> None:
    """Store a value in Ray's key-value store until the cluster ends; None deletes the key."""
    store = import_ray("ray.experimental.internal_kv")
    if value is None:
        store._internal_kv_del(key.encode(), namespace=NAMESPACE)
    else:
        store._internal_kv_put(key.encode(), value, overwrite=True, namespace=NAMESPACE)


def observed(
    address: str, memory: int | None = None, host_memory: int | None = None
) -> tuple[list[Node], dict[str, list[str]]]:
    """Connect to a Ray cluster; return its nodes for planning, and the names of each model's nodes.

    `address` is passed to `ray.init`, for example `ray://HOST:10001`. `memory`, in bytes, replaces
    Ray's resource `memory` of every node. `host_memory`, in bytes, is the machine memory of every
    node.

    Raises:
        ConfigError: No cluster answers at the address.
        NotInstalledError: Ray is not installed.
    """
    ray = import_ray()
    if not ray.is_initialized():
        try:
            _connect(ray, address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"{address}: no Ray cluster answers: {error}") from error
    nodes = [each for each in alive_nodes() if each.cpus]
    names = {each.node_id: each.name for each in nodes}
    placed: dict[str, list[str]] = {}
    for app in sorted(engine_apps(), key=lambda each: each.name):
        if app.node_id in names:
            placed.setdefault(app.model, []).append(names[app.node_id])
    return [Node(each.name, memory or each.memory, host_memory) for each in nodes], placed


def _connect(ray: Any, address: str) -> None:
    """Connect. Ray Client forks a process for each client, which dies now and then as it begins."""
    for left in reversed(range(_CLIENT_TRIES)):
        try:
            ray.init(address=address, logging_level="ERROR")
        except ConnectionAbortedError:  # the server answers, and has no process for us
            if not left:
                raise
        else:
            return
