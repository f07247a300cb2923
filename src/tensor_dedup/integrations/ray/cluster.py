"""A Ray cluster as it is: its nodes, and where engines of fleets run."""

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
    """Return Ray, or a module of it.

    Raises:
        NotInstalledError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"Ray is not installed, or not all of it ({error}); {install_hint('ray')}"
        raise NotInstalledError(what) from error


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of Ray that is alive; `memory` is the resource of that name, in bytes.

    `name` is what the node was started with, or the beginning of its `node_id` where several nodes
    have one name.
    """

    node_id: str
    name: str
    memory: int
    cpus: float
    gpus: float


def alive_nodes() -> list[ClusterNode]:
    """Return the nodes that are alive, by name and identity."""
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
    """An engine: an application of Serve whose name says whose it is and where it runs.

    So what runs where is known to Serve alone.
    """

    fleet: str
    model: str
    node_id: str

    @property
    def name(self) -> str:
        """The name of the application."""
        return f"{self.fleet}:{self.model}@{self.node_id}"

    @classmethod
    def parse(cls, name: str) -> "EngineApp | None":
        """Return what the name of an application says, or None for one that is no engine."""
        fleet, colon, rest = name.partition(":")
        model, at, node_id = rest.rpartition("@")
        return cls(fleet, model, node_id) if colon and at else None


def engine_apps(fleet: str | None = None) -> dict[EngineApp, Any]:
    """Return what Serve says of each engine of a fleet, or of all fleets."""
    serve = import_ray("ray.serve")
    found = {}
    for name, state in serve.status().applications.items():
        app = EngineApp.parse(name)
        if app is not None and fleet in (None, app.fleet):
            found[app] = state
    return found


def recall(key: str) -> bytes | None:
    """Return what `remember` was given last, from Ray's key-value store."""
    store = import_ray("ray.experimental.internal_kv")
    found: bytes | None = store._internal_kv_get(key.encode(), namespace=NAMESPACE)
    return found


def remember(key: str, value: bytes | None) -> None:
    """Keep a value in Ray's key-value store as long as the cluster lives; None forgets it."""
    store = import_ray("ray.experimental.internal_kv")
    if value is None:
        store._internal_kv_del(key.encode(), namespace=NAMESPACE)
    else:
        store._internal_kv_put(key.encode(), value, overwrite=True, namespace=NAMESPACE)


def observed(
    address: str, memory: int | None = None, host_memory: int | None = None
) -> tuple[list[Node], dict[str, list[str]]]:
    """Connect to a cluster and return its nodes for a plan, and the nodes of each model there.

    `address` is what `ray.init` takes, `ray://HOST:10001` for example. `memory` of each node is
    Ray's resource of that name unless it is given.

    Raises:
        ConfigError: there is no cluster.
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
