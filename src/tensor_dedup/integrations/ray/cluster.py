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
    """Import `module`, which is Ray or one of its modules, and return it.

    Raises:
        NotInstalledError: Ray or the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"Ray is not installed, or not all of it ({error}); {install_hint('ray')}"
        raise NotInstalledError(what) from error


def actor_options(name: str) -> dict[str, Any]:
    """Return the Ray options for a detached actor called `name`.

    A detached actor continues to exist after the process that created it has ended.
    """
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
    """A node of Ray that is alive. `memory` is Ray's resource `memory`, in bytes.

    `name` is the name with which the node was started. If the node has no name, or shares its name
    with other nodes, `name` is the beginning of its `node_id`.
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
    """An engine as a Ray Serve application, identified by its fleet, its model and its node.

    All three are in the name of the application, so Serve's own status shows where each model runs.
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
        """Return the engine whose application is called `name`.

        Returns None if the application is not an engine.
        """
        fleet, colon, rest = name.partition(":")
        model, at, node_id = rest.rpartition("@")
        return cls(fleet, model, node_id) if colon and at else None


def engine_apps(fleet: str | None = None) -> dict[EngineApp, Any]:
    """Return the engines of `fleet`, or of all fleets, each with its status in Serve."""
    serve = import_ray("ray.serve")
    found = {}
    for name, state in serve.status().applications.items():
        app = EngineApp.parse(name)
        if app is not None and fleet in (None, app.fleet):
            found[app] = state
    return found


def recall(key: str) -> bytes | None:
    """Return the value that `remember` has stored under `key`, or None if there is none."""
    store = import_ray("ray.experimental.internal_kv")
    found: bytes | None = store._internal_kv_get(key.encode(), namespace=NAMESPACE)
    return found


def remember(key: str, value: bytes | None) -> None:
    """Store `value` under `key` in Ray's key-value store; with a `value` of None, delete the key.

    The value is kept until the cluster ends.
    """
    store = import_ray("ray.experimental.internal_kv")
    if value is None:
        store._internal_kv_del(key.encode(), namespace=NAMESPACE)
    else:
        store._internal_kv_put(key.encode(), value, overwrite=True, namespace=NAMESPACE)


def observed(
    address: str, memory: int | None = None, host_memory: int | None = None
) -> tuple[list[Node], dict[str, list[str]]]:
    """Connect to the Ray cluster at `address`; return its nodes, and where models run.

    The second result maps each model to the names of the nodes on which it runs. `address` is
    passed to `ray.init`, for example `ray://HOST:10001`. `memory` is the memory of each returned
    node in bytes; by default it is Ray's resource `memory`. `host_memory` is the machine memory of
    each node in bytes.

    Raises:
        ConfigError: No cluster answers at `address`.
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
