"""What is wanted of a fleet, as it lies in Ray's key-value store."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tensor_dedup.errors import ConfigError
from tensor_dedup.planning.placement import Model, Wanted, wanted
from tensor_dedup.remote import Remote


class ModelSpecification(msgspec.Struct, frozen=True):
    """A model of a fleet. Sizes in bytes; `engine` are vLLM's arguments for this model alone."""

    replicas: int = 1
    room: int = 0
    host: int = 0
    engine: dict[str, Any] = {}  # msgspec copies it


class FleetSpecification(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet: the remote that has its checkpoints, its models by name, and how they are served.

    `memory` is what each node has for weights and engines if it is not Ray's resource; `store`,
    `socket` and `budget` are those of a node; `cpus` and `gpus` what an engine takes of Ray's.
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
        """Return what `encode` was given."""
        return msgspec.json.decode(text, type=cls)

    def with_model(self, name: str, model: ModelSpecification) -> "FleetSpecification":
        """Return the fleet with a model more, or with another specification of it."""
        return msgspec.structs.replace(self, models={**self.models, name: model})

    def without(self, name: str) -> "FleetSpecification":
        """Return the fleet without a model."""
        rest = {each: model for each, model in self.models.items() if each != name}
        return msgspec.structs.replace(self, models=rest)


def model_of(name: str, given: Mapping[str, Any]) -> ModelSpecification:
    """Return a model from the fields that a user gave.

    Raises:
        ConfigError: a field is unknown or has a wrong value.
    """
    engine = given.get("engine", {})
    if not isinstance(engine, Mapping):
        what = f"models[{name!r}]: engine is {engine!r}; give vLLM's arguments by name"
        raise ConfigError(what, model=name)
    rest = {field: value for field, value in given.items() if field != "engine"}
    found: Wanted = wanted(f"models[{name!r}]", name, {**rest, "path": f"store://{name}"})
    return ModelSpecification(found.replicas, found.room, found.host, dict(engine))


def measured(specification: FleetSpecification) -> list[Model]:
    """Return the models with their tensors, as the remote's manifests say; no weights are read.

    Raises:
        UnknownRemoteNameError: the remote has no checkpoint of a name.
        RemoteError: it cannot be read.
    """
    remote = Remote.open(specification.remote)
    found = []
    for name, each in specification.models.items():
        pieces = remote.read(name).pieces
        tensors = {piece.digest.hex(): piece.nbytes for piece in pieces if piece.name is not None}
        found.append(Model(name, tensors, each.room, each.host, each.replicas))
    return found
