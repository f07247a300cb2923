"""The actor of a node: it runs the memory manager and pulls checkpoints into the store."""

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from tensor_dedup.errors import TensorDedupError
from tensor_dedup.integrations.ray.cluster import actor_options, import_ray, recall, remember
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.client.client import start_manager
from tensor_dedup.memory_manager.protocol import paths
from tensor_dedup.memory_manager.protocol.tables import Totals
from tensor_dedup.remote.on_demand import pull_missing
from tensor_dedup.store import LocalStore

_WATCH_S: Final = 2.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The places where an engine finds its weights, after a node was prepared.

    `store` is the folder of the node's store, and `socket` the socket of its memory manager.
    """

    store: str
    socket: str


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The report of a node's actor about its node. Sizes are in bytes.

    `resident_bytes` is the size of the weights in the node's memory manager. `pulled` maps
    checkpoints to the number of bytes pulled since the actor started.
    """

    store: str
    socket: str
    resident_bytes: int
    pulled: dict[str, int]


class NodeActor:
    """The actor of a node, which runs the memory manager and pulls checkpoints into the store.

    `store` and `socket` are paths on the node; by default they are those of the node's user. If
    several nodes share a machine, put `{node}` into the paths, which is replaced by the node's id.

    If a manager already answers at the socket, for example in a DaemonSet, the actor uses that
    manager and never stops it. Ray's key-value store records which manager an actor has started, so
    that the actor can stop it after a restart. Safe from any thread.
    """

    def __init__(self, store: str | None, socket: str | None, budget: int | None) -> None:
        node = import_ray().get_runtime_context().get_node_id()
        self._socket = paths.socket_path(socket.format(node=node) if socket else None)
        folder = store.format(node=node) if store else None
        self._store = LocalStore.open(folder)
        self._budget = budget
        self._started = f"manager {node}"  # what its pid is remembered by
        self._pulled: dict[str, int] = {}
        self._pulling = threading.Lock()
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._keep_serving()
        threading.Thread(target=self._watch, name="manager watch", daemon=True).start()

    def prepare(self, remote: str, name: str) -> Prepared:
        """Pull the checkpoint `name` if the store lacks it; return where an engine finds it.

        Raises:
            RemoteError, StoreError: The checkpoint cannot be pulled.
        """
        with self._pulling:  # of models that come at once, the second finds what both have
            result = pull_missing(self._store, name, remote)
        if result is not None:
            self._pulled[name] = result.moved_bytes
        self._keep_serving()
        return Prepared(str(self._store.path), str(self._socket))

    def report(self) -> NodeReport:
        """Return a report with the node's store, socket, resident bytes and pulled bytes."""
        totals = self._totals()
        resident = totals.resident_bytes if totals is not None else 0
        where = (str(self._store.path), str(self._socket))
        return NodeReport(*where, resident, dict(self._pulled))

    def close(self) -> None:
        """Stop the memory manager if this or an earlier actor of the node has started it."""
        self._ended.set()
        with self._guard, suppress(TensorDedupError, OSError), Admin(self._socket) as admin:
            if str(admin.totals().pid).encode() == recall(self._started):
                admin.stop()
            remember(self._started, None)  # not of one that does not answer

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_S):
            try:
                self._keep_serving()
            except Exception:  # noqa: BLE001  # Ray's own errors, too: it is tried again
                _log.exception("the memory manager of this node does not start")

    def _keep_serving(self) -> None:
        """Start a manager where none answers."""
        with self._guard:
            if self._ended.is_set() or self._totals() is not None:
                return
            # It is nobody's child, for Ray ends an actor's children with it: engines go on sharing.
            is_ours = start_manager(self._socket, budget=self._budget)
            totals = self._totals()
            if totals is not None:
                remember(self._started, str(totals.pid).encode() if is_ours else None)

    def _totals(self) -> Totals | None:
        try:
            with Admin(self._socket) as admin:
                return admin.totals()
        except (TensorDedupError, OSError):
            return None


def actor_name(node_id: str) -> str:
    """Return the name that a node's actor has as a Ray actor."""
    return f"node {node_id}"


def ensure(node_id: str, store: str | None, socket: str | None, budget: int | None) -> Any:
    """Return the handle of the actor of the node `node_id`; start the actor if it does not exist.

    The other arguments are passed to `NodeActor`. `budget` is in bytes.
    """
    ray = import_ray()
    strategies = import_ray("ray.util.scheduling_strategies")
    return (
        ray.remote(NodeActor)
        .options(
            **actor_options(actor_name(node_id)),
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(store, socket, budget)
    )
