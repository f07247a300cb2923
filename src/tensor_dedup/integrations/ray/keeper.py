"""The keeper of a fleet: an actor that keeps the cluster in line with the fleet's specification."""

import logging
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from tensor_dedup.errors import TensorDedupError
from tensor_dedup.integrations.ray.cluster import (
    NAMESPACE,
    NODE_LABEL,
    ClusterNode,
    EngineApp,
    actor_options,
    alive_nodes,
    engine_apps,
    import_ray,
    recall,
    remember,
)
from tensor_dedup.integrations.ray.engine import Engine
from tensor_dedup.integrations.ray.node import NodeReport, actor_name, ensure
from tensor_dedup.integrations.ray.specification import (
    FleetSpecification,
    ModelSpecification,
    measured,
)
from tensor_dedup.planning.placement import DoesNotFitError, FleetPlan, Model, Node, plan

_EVERY_S: Final = 2.0
_AGAIN_S: Final = 60.0  # after a plan for which there was no room, or engines that did not start
_POLL_S: Final = 0.5
_PATIENCE_S: Final = 60.0
_SAID: Final = 1000
_FAILED: Final = "DEPLOY_FAILED"
_log = logging.getLogger(__name__)


class FleetError(TensorDedupError):
    """A fleet cannot be changed as requested, for example because engines do not start.

    `facts` has Serve's message for each engine that did not start.
    """


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """The status of an engine: its node, its state in Serve (such as `RUNNING`), and a message.

    The message is that of Serve, or "" if the engine is running.
    """

    node: str
    state: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The status of a node that is alive. Sizes are in bytes.

    `resident_bytes` is the size of the weights in the node's memory manager. `pulled` maps
    checkpoints to the number of bytes pulled since the node's actor started.
    """

    name: str
    node_id: str
    memory_bytes: int
    resident_bytes: int
    store: str
    socket: str
    models: tuple[str, ...]
    pulled: dict[str, int]


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The state of a fleet: its replicas by model, its nodes, and the last problem.

    A model that runs nowhere has an empty list of replicas. `problem` is "" if there is no problem.
    """

    models: dict[str, list[ReplicaStatus]]
    nodes: list[NodeStatus]
    problem: str = field(default="")

    def to_dict(self) -> dict[str, Any]:
        """Return the status as a dict that can be written as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = []
        for model, replicas in self.models.items():
            shown = ", ".join(f"{each.node} {each.state}" for each in replicas)
            lines.append(f"{model}: {shown or 'nowhere'}")
        return "\n".join([*lines, *([self.problem] if self.problem else [])])


class Keeper:
    """The actor that starts and stops a fleet's engines, and replaces them when nodes are lost.

    Methods may run at the same time; changes of the cluster are made one after the other. The
    specification is in Ray's key-value store, and Serve knows which engines run. So if Ray restarts
    the keeper on another node, the keeper continues from there.
    """

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._key = f"fleet {fleet}"
        self._declared = f"declared {fleet}"
        self._changing = threading.Lock()
        # Two calls that change what is wanted must not undo each other. It is not the lock above:
        # engines may start for minutes, and a front that starts meanwhile asks for `declare`.
        self._wanting = threading.RLock()
        self._problem = ""
        self._settled: frozenset[str] = frozenset()  # nodes for which there was no better plan
        self._tried = 0.0
        threading.Thread(target=self._watch, name="fleet watch", daemon=True).start()

    def want(self, wanted: bytes, rebalance: bool = False) -> None:
        """Check that the nodes have room for the fleet `wanted`, and store `wanted`.

        `wanted` is an encoded `FleetSpecification`. The keeper starts and stops engines later.

        Raises:
            DoesNotFitError: The models do not fit on the nodes.
            UnknownRemoteNameError: The remote does not have one of the checkpoints.
            RemoteError: The remote cannot be read.
        """
        specification = FleetSpecification.decode(wanted)
        with self._wanting:
            nodes = usable_nodes(specification)
            planned(measured(specification), nodes, specification, self._current(nodes), rebalance)
            remember(self._key, wanted)
            self._settled = frozenset()

    def declare(self, wanted: bytes) -> None:
        """Store `wanted`, the specification from a Serve configuration file, if it is new.

        A specification that equals the last declared one is ignored, because Serve may start the
        application again with the same file after models were added to the fleet.

        Raises:
            DoesNotFitError: The models do not fit on the nodes.
            UnknownRemoteNameError: The remote does not have one of the checkpoints.
            RemoteError: The remote cannot be read.
        """
        with self._wanting:
            if recall(self._declared) != wanted:
                self.want(wanted)
                remember(self._declared, wanted)

    def apply(self, wanted: bytes | None, rebalance: bool = False) -> None:
        """Start and stop engines until they match the specification; return when all answer.

        `wanted` is an encoded `FleetSpecification`, which is stored first. If it is None, the
        stored specification is applied.

        Raises:
            DoesNotFitError: The models do not fit on the nodes; nothing was changed.
            FleetError: Engines do not start.
        """
        if wanted is not None:
            self.want(wanted, rebalance)
        with self._changing:
            self._reconcile(rebalance=rebalance, strict=True)

    def add(self, name: str, model: ModelSpecification) -> None:
        """Add a model to the fleet, or replace its specification, and apply the change.

        Raises:
            FleetError: No fleet was applied yet, or engines do not start.
            DoesNotFitError: The models do not fit on the nodes.
            UnknownRemoteNameError: The remote does not have one of the checkpoints.
            RemoteError: The remote cannot be read.
        """
        with self._wanting:
            specification = self._specification()
            if specification is None:
                raise FleetError(f"there is no fleet {self._fleet!r}; apply one first")
            self.want(specification.with_model(name, model).encode())
        self.apply(None)

    def remove(self, name: str) -> None:
        """Remove a model from the fleet, and stop its engines.

        Nothing changes if the fleet does not have the model.
        """
        with self._wanting:
            specification = self._specification()
            if specification is None or name not in specification.models:
                return
            self.want(specification.without(name).encode())
        self.apply(None)

    def status(self) -> FleetStatus:
        """Return the status of the fleet, with its replicas, its nodes and the last problem."""
        specification = self._specification()
        nodes = alive_nodes()
        names = {each.node_id: each.name for each in nodes}
        models: dict[str, list[ReplicaStatus]] = {}
        for wanted in specification.models if specification is not None else ():
            models[wanted] = []
        held: dict[str, list[str]] = {}
        for app, state in sorted(engine_apps(self._fleet).items(), key=lambda each: each[0].name):
            node = names.get(app.node_id, f"lost {app.node_id[:12]}")
            said = "" if state.status == "RUNNING" else _reason(state)
            status = ReplicaStatus(node, str(state.status.value), said)
            models.setdefault(app.model, []).append(status)
            held.setdefault(app.node_id, []).append(app.model)
        found = [_node_status(each, held.get(each.node_id, ())) for each in nodes]
        return FleetStatus(models, [each for each in found if each is not None], self._problem)

    def shutdown(self) -> None:
        """Stop the engines, the HTTP front and the node actors, and delete the specification.

        A node actor stays if engines of another fleet run on its node.
        """
        serve = import_ray("ray.serve")
        with self._changing:
            remember(self._key, None)
            remember(self._declared, None)
            running = [app.name for app in engine_apps(self._fleet)]
            for name in (*running, self._fleet):
                serve.delete(name)
            others = {app.node_id for app in engine_apps() if app.fleet != self._fleet}
            for node in alive_nodes():
                if node.node_id not in others:
                    _close_node(node.node_id)

    def _watch(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            try:
                if self._changing.acquire(blocking=False):
                    try:
                        if self._is_stale():
                            self._reconcile(rebalance=False, strict=False)
                    finally:
                        self._changing.release()
            except Exception as error:  # noqa: BLE001  # Ray may be recovering: again in a moment
                self._problem = str(error)
                _log.exception("fleet %s cannot be made what is wanted", self._fleet)

    def _is_stale(self) -> bool:
        """Is something not as it is wanted, that may be put right?"""
        specification = self._specification()
        if specification is None:
            return False
        nodes = frozenset(each.node_id for each in usable_nodes(specification))
        running = engine_apps(self._fleet)
        if any(app.node_id not in nodes for app in running):
            return True
        count = dict.fromkeys(specification.models, 0)
        failed = [app for app, state in running.items() if state.status == _FAILED]
        for app in {*running} - {*failed}:
            count[app.model] = count.get(app.model, 0) + 1
        wanted = {name: each.replicas for name, each in specification.models.items()}
        was_tried = time.monotonic() - self._tried < _AGAIN_S
        waits = was_tried and (bool(failed) or nodes == self._settled)
        return count != wanted and not waits

    def _reconcile(self, *, rebalance: bool, strict: bool) -> None:
        specification = self._specification()
        if specification is None:
            return
        nodes = usable_nodes(specification)
        self._tried = time.monotonic()
        current = self._current(nodes)
        models = measured(specification)
        try:
            found = planned(models, nodes, specification, current, rebalance)
            self._problem = ""
        except DoesNotFitError as error:
            if strict:
                raise
            self._problem = error.message
            self._settled = frozenset(each.node_id for each in nodes)
            found = what_fits(models, nodes, specification, current, error)
        ids = {each.name: each.node_id for each in nodes}
        wanted = {
            EngineApp(self._fleet, model, ids[node])
            for model, where in found.placement().items()
            for node in where
        }
        self._change(specification, nodes, wanted, strict=strict)

    def _change(
        self,
        specification: FleetSpecification,
        nodes: Iterable[ClusterNode],
        wanted: set[EngineApp],
        *,
        strict: bool,
    ) -> None:
        serve = import_ray("ray.serve")
        running = {app for app, s in engine_apps(self._fleet).items() if s.status != _FAILED}
        for app in sorted({*engine_apps(self._fleet)} - (wanted & running), key=_by_name):
            serve.delete(app.name)
        ids = {app.node_id for app in wanted}
        lame = self._start_nodes(specification, [node for node in nodes if node.node_id in ids])
        failed = {app.name: lame[app.node_id] for app in wanted if app.node_id in lame}
        missing = sorted((w for w in wanted - running if w.node_id not in lame), key=_by_name)
        for first in range(0, len(missing), specification.starting):
            failed |= self._start(specification, missing[first : first + specification.starting])
        failed |= self._ready(wanted & running)
        if failed:
            listed = "; ".join(f"{app}: {said}" for app, said in failed.items())
            self._problem = f"engines do not start: {listed}"
            if strict:
                raise FleetError(self._problem, engines=failed)

    def _start_nodes(
        self, specification: FleetSpecification, nodes: Iterable[ClusterNode]
    ) -> dict[str, str]:
        """Have an actor on each of these nodes; return what is wrong with those that fail."""
        ray = import_ray()
        actors = {}
        for node in nodes:
            budget = specification.budget or _planned_memory(node, specification)
            where = (specification.store, specification.socket, budget)
            actors[node.node_id] = ensure(node.node_id, *where)
        failed = {}
        for node_id, actor in actors.items():
            try:
                ray.get(actor.report.remote(), timeout=_PATIENCE_S)
            except ray.exceptions.RayError as error:
                failed[node_id] = f"the actor of its node does not start: {error}"
        return failed

    def _start(
        self, specification: FleetSpecification, apps: Collection[EngineApp]
    ) -> dict[str, str]:
        serve = import_ray("ray.serve")
        targets = []
        for app in apps:
            options = {**specification.engine, **specification.models[app.model].engine}
            deployment = serve.deployment(Engine).options(
                max_ongoing_requests=1024,
                health_check_timeout_s=120,
                ray_actor_options={
                    "num_cpus": specification.cpus,
                    "num_gpus": specification.gpus,
                    "label_selector": {NODE_LABEL: app.node_id},
                },
            )
            bound = deployment.bind(app.model, specification.remote, options)
            targets.append(serve.RunTarget(bound, name=app.name, route_prefix=None))
        serve.run_many(
            targets,
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        return self._ready(apps)

    def _ready(self, apps: Iterable[EngineApp]) -> dict[str, str]:
        """Wait until engines run; return what is wrong with those that will not, by name."""
        waiting, failed = {*apps}, dict[str, str]()
        while waiting:
            found = engine_apps(self._fleet)
            alive = {each.node_id for each in alive_nodes()}
            for app in [*waiting]:
                state = found.get(app)
                if state is None or app.node_id not in alive:
                    failed[app.name] = "its node was lost"
                elif state.status == _FAILED:
                    failed[app.name] = _reason(state)
                elif state.status != "RUNNING":
                    continue
                waiting.discard(app)
            if waiting:
                time.sleep(_POLL_S)
        return failed

    def _current(self, nodes: Iterable[ClusterNode]) -> dict[str, list[str]]:
        """The nodes of each model, by name; a lost one by its identity."""
        names = {each.node_id: each.name for each in nodes}
        found: dict[str, list[str]] = {}
        for app in sorted(engine_apps(self._fleet), key=_by_name):
            found.setdefault(app.model, []).append(names.get(app.node_id, app.node_id))
        return found

    def _specification(self) -> FleetSpecification | None:
        found = recall(self._key)
        return FleetSpecification.decode(found) if found else None


def usable_nodes(specification: FleetSpecification) -> list[ClusterNode]:
    """Return the nodes that have enough CPUs and GPUs for an engine.

    Nodes without any CPU are left out, even if the specification asks for none.
    """
    return [
        each
        for each in alive_nodes()
        if each.cpus >= max(specification.cpus, 1e-9) and each.gpus >= specification.gpus
    ]


def planned(
    models: list[Model],
    nodes: Iterable[ClusterNode],
    specification: FleetSpecification,
    current: dict[str, list[str]],
    rebalance: bool,
) -> FleetPlan:
    """Return a plan that places `models` on `nodes`.

    `current` maps each model to the names of the nodes on which it runs. These engines stay where
    they are unless `rebalance` is True.

    Raises:
        DoesNotFitError: The models do not fit on the nodes.
    """
    memory = specification.memory
    room = [
        Node(each.name, each.memory, None)
        if memory is None
        else Node(each.name, memory, each.memory or None)
        for each in nodes
    ]
    return plan(models, room, current=current or None, rebalance=rebalance and bool(current))


def what_fits(
    models: list[Model],
    nodes: list[ClusterNode],
    specification: FleetSpecification,
    current: dict[str, list[str]],
    error: DoesNotFitError,
) -> FleetPlan:
    """Return a plan for `models` in which models that do not fit get no new replicas.

    `error` was raised by `planned` and names the models that do not fit. These models keep the
    replicas that `current` lists on `nodes`.

    Raises:
        DoesNotFitError: Without the new replicas, the models do not fit on the nodes either.
    """
    names = {each.name for each in nodes}
    while True:
        rest = []
        for model in models:
            left = sum(node in names for node in current.get(model.name, ()))
            if model.name not in error.facts["models"]:
                rest.append(model)
            elif left:
                rest.append(replace(model, replicas=min(left, model.replicas)))
        if rest == models:
            raise error
        models = rest
        try:
            return planned(models, nodes, specification, current, rebalance=False)
        except DoesNotFitError as again:
            error = again


def _planned_memory(node: ClusterNode, specification: FleetSpecification) -> int | None:
    """What the plan counts on a node, if it is the machine's own memory."""
    return None if specification.gpus else specification.memory or node.memory or None


def ensure_keeper(fleet: str) -> Any:
    """Return the actor handle of a fleet's keeper; start the keeper if it does not exist."""
    return import_ray().remote(Keeper).options(**actor_options(keeper_name(fleet))).remote(fleet)


def keeper_name(fleet: str) -> str:
    """Return the name that a fleet's keeper has as a Ray actor."""
    return f"keeper {fleet}"


def _reason(state: Any) -> str:
    """What Serve says of an application; the end, as the whole is a traceback."""
    said = [each.message.strip() for each in state.deployments.values() if each.message]
    return " ".join(" ".join([*said, state.message]).split())[-_SAID:]


def _by_name(app: EngineApp) -> str:
    return app.name


def _node_status(node: ClusterNode, models: Iterable[str]) -> NodeStatus | None:
    """Ask a node's actor; None where there is none."""
    ray = import_ray()
    try:
        actor = ray.get_actor(actor_name(node.node_id), namespace=NAMESPACE)
        told: NodeReport = ray.get(actor.report.remote(), timeout=_PATIENCE_S)
    except (ValueError, ray.exceptions.RayError):
        return None
    return NodeStatus(
        name=node.name,
        node_id=node.node_id,
        memory_bytes=node.memory,
        resident_bytes=told.resident_bytes,
        store=told.store,
        socket=told.socket,
        models=tuple(sorted(models)),
        pulled=told.pulled,
    )


def _close_node(node_id: str) -> None:
    """End a node's actor and its manager; of one that does not answer, the actor alone."""
    ray = import_ray()
    with suppress(ValueError):  # there is none
        actor = ray.get_actor(actor_name(node_id), namespace=NAMESPACE)
        with suppress(ray.exceptions.RayError):
            ray.get(actor.close.remote(), timeout=_PATIENCE_S)
        ray.kill(actor)
