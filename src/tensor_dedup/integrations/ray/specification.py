"""The specification of a fleet, as it is stored in Ray's key-value store."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tensor_dedup.errors import ConfigError
from tensor_dedup.planning.placement import Model, Wanted, wanted
from tensor_dedup.remote import Remote
from tensor_dedup.types import STORE_SCHEME


class ModelSpecification(msgspec.Struct, frozen=True):
    """The specification of a model in a fleet. Sizes are in bytes.

    * `replicas` is the number of engines. No two of them run on the same node.
    * `room` is the memory that an engine takes in addition to the weights.
    * `host` is the machine memory that an engine takes, if `room` is on a GPU.
    * `engine` has vLLM arguments for this model alone.
    """

    replicas: int = 1
    room: int = 0
    host: int = 0
    engine: dict[str, Any] = {}  # msgspec copies it


class FleetSpecification(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The specification of a fleet. Sizes are in bytes.

    * `remote` is the URL of the remote with the checkpoints, and `models` the models by name.
    * `engine` has vLLM arguments for all models.
    * `memory` is the memory that each node has for weights and engines. None means Ray's resource
      `memory`.
    * `store` is the path of each node's store. `socket` and `budget` are the socket and the budget
      of each node's memory manager.
    * `cpus` and `gpus` are the amounts of Ray's resources that an engine takes.
    * `starting` is the number of engines that may start at the same time.
    """

    remote: str
    models: dict[str, ModelSpecification]
    engine: dict[str, Any] = {}
    memory: int | None = None
    store: str | None = None
    socket: str | None = None
    budget: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    starting: int = 4

    def encode(self) -> bytes:
        """Return the specification as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, text: bytes) -> "FleetSpecification":
        """Return the specification that `encode` has returned as the JSON `text`."""
        return msgspec.json.decode(text, type=cls)

    def with_model(self, name: str, model: ModelSpecification) -> "FleetSpecification":
        """Return a copy of the specification in which the model `name` is added or replaced."""
        return msgspec.structs.replace(self, models={**self.models, name: model})

    def without(self, name: str) -> "FleetSpecification":
        """Return a copy of the specification without the model `name`.

        If the fleet does not have the model, the copy is equal.
        """
        rest = {each: model for each, model in self.models.items() if each != name}
        return msgspec.structs.replace(self, models=rest)


def model_of(name: str, given: Mapping[str, Any]) -> ModelSpecification:
    """Return the specification of the model `name` from `given`, the fields that a user gave.

    Raises:
        ConfigError: A field is unknown or has a wrong value.
    """
    engine = given.get("engine", {})
    if not isinstance(engine, Mapping):
        what = f"models[{name!r}]: engine is {engine!r}; give vLLM's arguments by name"
        raise ConfigError(what, model=name)
    rest = {field: value for field, value in given.items() if field != "engine"}
    found: Wanted = wanted(f"models[{name!r}]", name, {**rest, "path": f"{STORE_SCHEME}{name}"})
    return ModelSpecification(found.replicas, found.room, found.host, dict(engine))


def measured(specification: FleetSpecification) -> list[Model]:
    """Return the models in the form that planning needs, with the sizes of their tensors.

    The sizes are read from manifests on the remote. No weights are read.

    Raises:
        UnknownRemoteNameError: The remote does not have the checkpoint of one of the models.
        RemoteError: The remote cannot be read.
    """
    remote = Remote.open(specification.remote)
    found = []
    for name, each in specification.models.items():
        pieces = remote.read(name).pieces
        tensors = {piece.digest.hex(): piece.nbytes for piece in pieces if piece.name is not None}
        found.append(Model(name, tensors, each.room, each.host, each.replicas))
    return found
