"""`Fleet`: the programming interface for serving a set of models on a Ray cluster."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tensor_dedup.errors import ConfigError
from tensor_dedup.integrations.ray.cluster import NAMESPACE, import_ray
from tensor_dedup.integrations.ray.front import Front
from tensor_dedup.integrations.ray.keeper import FleetStatus, ensure_keeper, keeper_name
from tensor_dedup.integrations.ray.specification import FleetSpecification, model_of
from tensor_dedup.settings import parse_size
from tensor_dedup.suggestions import perhaps

_POLL_S: Final = 0.5
_PATIENCE_S: Final = 120.0  # Ray takes up to half a minute to see that a node is lost
Models = Mapping[str, Mapping[str, Any] | None] | Sequence[str]


class Fleet:
    """A fleet: models on a remote that are served by a Ray cluster.

    The cluster is the one to which this process is connected. The specification and the engines
    belong to the cluster, and remain when this process ends. Safe from any thread.

    Methods raise the errors of the keeper (the actor that manages the fleet), and Ray's errors if
    the cluster does not answer.
    """

    def __init__(
        self,
        remote: str | None = None,
        models: Models | None = None,
        *,
        name: str = "fleet",
        engine: Mapping[str, Any] | None = None,
        memory: int | str | None = None,
        store: str | None = None,
        socket: str | None = None,
        budget: int | str | None = None,
        cpus: float = 1.0,
        gpus: float = 0.0,
        starting: int = 4,
        route: str | None = "/",
    ) -> None:
        """Describe the fleet `name`; nothing is started yet.

        Without `remote` and `models`, the object is the existing fleet of this name. Sizes are in
        bytes, or texts such as "4GiB".

        * `remote` is the URL of the remote, and `models` has the names of checkpoints on it.
          Instead of a list of names, `models` may map each name to fields:

            * `replicas`, the number of engines;
            * `room`, the memory that an engine takes in addition to the weights, for the KV cache
              and activations;
            * `host`, the machine memory that an engine takes if `room` is on a GPU;
            * `engine`, vLLM's arguments for this model, in addition to those for all models.

        * `engine` has vLLM's arguments for all models.
        * `memory` is the memory that a node has for weights and engines, by default Ray's resource
          `memory`. If engines run on GPUs, give the memory of a GPU.
        * `store` is the path of each node's store, and `socket` that of its memory manager's
          socket. If nodes share a machine, put `{node}` into the paths, which is replaced by the
          node's id.
        * `budget` is the budget of each node's memory manager. By default it is the memory that the
          plan counts for the node.
        * `cpus` and `gpus` are the amounts of Ray's resources that an engine takes, and at most
          `starting` engines start at the same time.
        * `route` is the path at which Serve answers HTTP requests. With None, it does not answer.

        Raises:
            ConfigError: A field is unknown or has a wrong value.
            NotInstalledError: Ray is not installed.
        """
        import_ray("ray.serve")
        self.name, self._route = name, route
        if ":" in name or not name:
            raise ConfigError(f"{name!r} cannot be the name of a fleet: leave out ':'", name=name)
        if (remote is None) != (models is None):
            raise ConfigError("give both the remote and the models, or neither")
        self._wanted: FleetSpecification | None = None
        if remote is None or models is None:
            return
        given = models if isinstance(models, Mapping) else dict.fromkeys(models)
        self._wanted = FleetSpecification(
            remote,
            {each: model_of(each, fields or {}) for each, fields in given.items()},
            dict(engine or {}),
            _size("memory", memory),
            store,
            socket,
            _size("budget", budget),
            cpus,
            gpus,
            starting,
        )

    def __repr__(self) -> str:
        known = "" if self._wanted is None else f", {len(self._wanted.models)} models"
        return f"Fleet({self.name!r}{known})"

    def apply(self, *, rebalance: bool = False) -> FleetStatus:
        """Start and stop engines until they match this fleet; return when all engines answer.

        Running engines stay on their nodes unless `rebalance` is True. Engines of models that are
        no longer in the fleet are stopped.

        Raises:
            DoesNotFitError: The models do not fit on the nodes; nothing was changed.
            UnknownRemoteNameError: The remote does not have one of the checkpoints.
            RemoteError: The remote cannot be read.
            FleetError: Engines do not start.
        """
        wanted = self._wanted.encode() if self._wanted is not None else None
        self._ask("apply", wanted, rebalance)
        serve = import_ray("ray.serve")
        if self._route is not None and self.name not in serve.status().applications:
            serve.run(_front(self.name), name=self.name, route_prefix=self._route)
        return self.status()

    def add(self, name: str, **fields: Any) -> FleetStatus:
        """Add the model `name` to the fleet and serve it, without moving other models.

        `fields` are the fields that a model has in the argument `models` of `Fleet`.
        """
        model = model_of(name, fields)
        self._ask("add", name, model)
        if self._wanted is not None:
            self._wanted = self._wanted.with_model(name, model)
        return self.status()

    def remove(self, name: str) -> FleetStatus:
        """Remove the model `name` from the fleet, and stop its engines.

        Nothing changes if the fleet does not have the model.
        """
        self._ask("remove", name)
        if self._wanted is not None:
            self._wanted = self._wanted.without(name)
        return self.status()

    def status(self) -> FleetStatus:
        """Return the status of the fleet, with its replicas, its nodes and the last problem."""
        found: FleetStatus = self._ask("status")
        return found

    def shutdown(self) -> None:
        """Stop the engines, the HTTP front and the keeper of the fleet, and its memory managers.

        A memory manager keeps running if engines of another fleet run on its node, or if no fleet
        has started it.
        """
        ray = import_ray()
        self._ask("shutdown")
        ray.kill(ray.get_actor(keeper_name(self.name), namespace=NAMESPACE))

    def _ask(self, method: str, *arguments: Any) -> Any:
        """What the keeper answers; its error as it was raised there.

        While its node is lost Ray starts it on another one, and it is asked again.
        """
        ray = import_ray()
        if not ray.is_initialized():
            ray.init(namespace=NAMESPACE)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return ray.get(getattr(ensure_keeper(self.name), method).remote(*arguments))
            except ray.exceptions.RayTaskError as error:
                cause = getattr(error, "cause", None)
                raise (cause if isinstance(cause, Exception) else error) from None
            except ray.exceptions.RayActorError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)


def application(args: Mapping[str, Any]) -> Any:
    """Return the Serve application of a fleet, for `import_path` in a Serve configuration file.

    `args` are the arguments of `Fleet`. When the application is deployed, it applies the fleet. The
    application then answers the HTTP requests to the fleet.

    Raises:
        ConfigError: An argument is unknown or has a wrong value.
    """
    known = Fleet.__init__.__annotations__
    for field in args:
        if field not in known or field in ("return", "route"):
            what = f"the fleet has no argument {field!r}{perhaps(field, known)}"
            raise ConfigError(what, field=field)
    fleet = Fleet(**{**args, "route": None})
    if fleet._wanted is None:
        raise ConfigError("the fleet's args lack remote and models")
    return _front(fleet.name, fleet._wanted.encode())


def _front(fleet: str, wanted: bytes | None = None) -> Any:
    front = import_ray("ray.serve").deployment(Front)
    return front.options(ray_actor_options={"num_cpus": 0}).bind(fleet, wanted)


def _size(field: str, value: int | str | None) -> int | None:
    nbytes = parse_size(value)
    if value is not None and not nbytes:
        raise ConfigError(f'{field} is {value!r}; write for example "80GiB"', field=field)
    return nbytes
