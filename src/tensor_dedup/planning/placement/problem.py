"""The placement problem: models, nodes, and the memory that a set of models needs on a node.

Each tensor counts once on a node. All tensors that belong to exactly the same models form a part.
Parts are found by an index of digests, without comparing models in pairs. A base and its fine-tunes
have only a few parts, however many tensors they have.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tensor_dedup.errors import ConfigError

Bytes = NDArray[np.int64]
# A quarter of what 64 bits hold, in bytes: of all nodes, and of all replicas.
_MOST: Final = 1 << 61


@dataclass(frozen=True, slots=True)
class Model:
    """A model to place. Sizes are in bytes.

    `tensors` maps the digest of each tensor to its size. Each engine takes `room` beside the
    weights, for the KV cache and activations. If the weights are on a device, the engine also takes
    `host` of the machine's memory. Each of the `replicas` goes to a different node.
    """

    name: str
    tensors: Mapping[str, int] = field(repr=False)
    room: int = 0
    host: int = 0
    replicas: int = 1

    @property
    def nbytes(self) -> int:
        """The size of its weights in bytes, equal tensors counted once."""
        return sum(self.tensors.values())


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, or a device of it, with `memory` bytes for weights and engines.

    `host` is the machine's own memory in bytes, or None if it is not limited.
    """

    name: str
    memory: int
    host: int | None = None


class PackingProblem:
    """Models and nodes as arrays from which placements are computed. Immutable; for any thread.

    Tensors that belong to exactly the same models form a part, if these are two or more models.
    Sizes are in bytes:

    * `sizes[p]` is the size of part p, and `parts[m]` lists the parts in model m.
    * `own[m]` is what each replica of model m adds on any node: the engine's room, and the tensors
      that no other model has.
    * `needs[m]` is what a replica of model m takes on an empty node.
    """

    def __init__(self, models: Sequence[Model], nodes: Sequence[Node]) -> None:
        """Find the parts, in time that grows with the tensors of all models.

        Raises:
            ConfigError: The sizes are negative, or too large to be added up in 64 bits.
        """
        self.models, self.nodes = tuple(models), tuple(nodes)
        _check_range(self.models, self.nodes)
        own = [model.room for model in models]
        parts: list[list[int]] = [[] for _ in models]
        sizes: list[int] = []
        for holders, nbytes in _parts(models).items():
            if len(holders) == 1:
                own[holders[0]] += nbytes
                continue
            for model in holders:
                parts[model].append(len(sizes))
            sizes.append(nbytes)
        self.own: Bytes = np.array(own, np.int64)
        self.sizes: Bytes = np.array(sizes, np.int64)
        self.parts = [np.array(each, np.int64) for each in parts]
        self.host: Bytes = np.array([model.host for model in models], np.int64)
        self.weights: Bytes = np.array([model.nbytes for model in models], np.int64)
        rooms = np.array([model.room for model in models], np.int64)
        self.needs: Bytes = self.weights + rooms
        self.capacity: Bytes = np.array([node.memory for node in nodes], np.int64)
        most = np.iinfo(np.int64).max
        hosts = [most if node.host is None else node.host for node in nodes]
        self.host_capacity: Bytes = np.array(hosts, np.int64)

    def least(self) -> int:
        """Return a lower bound for the bytes that all replicas take on all nodes together.

        A tensor of several models counts n times, where n is the largest number of replicas that
        one of these models has.
        """
        replicas = np.array([model.replicas for model in self.models], np.int64)
        most = np.zeros(len(self.sizes), np.int64)
        for number, parts in enumerate(self.parts):
            most[parts] = np.maximum(most[parts], replicas[number])
        return int(self.own @ replicas + self.sizes @ most)

    def used(self, models: Iterable[int]) -> int:
        """Return the bytes that these models take together on one node."""
        chosen = sorted(set(models))
        held = [self.parts[model] for model in chosen]
        union = np.unique(np.concatenate(held)) if held else np.array([], np.int64)
        return int(self.own[chosen].sum() + self.sizes[union].sum())


def _check_range(models: Sequence[Model], nodes: Sequence[Node]) -> None:
    """Refuse sizes whose sums would not fit the arrays."""
    taken = [(model.nbytes + model.room, model.host) for model in models]
    copies = [min(model.replicas, len(nodes)) for model in models]
    given = [(node.memory, node.host or 0) for node in nodes]
    sizes = [size for pair in (*taken, *given) for size in pair]
    most = max(
        sum(max(pair) * count for pair, count in zip(taken, copies, strict=True)),
        sum(max(pair) for pair in given),
    )
    if most > _MOST or min(sizes, default=0) < 0:
        raise ConfigError(
            f"sizes from {min(sizes)} to {max(sizes)} bytes, {most} in all; give sizes of 0 and "
            f"more, and at most {_MOST} in all",
            nbytes=most,
        )


def _parts(models: Sequence[Model]) -> dict[tuple[int, ...], int]:
    """The bytes of all tensors that exactly these models have, by their numbers."""
    # A set of holders is a number, and grows by a model to another: of a family most tensors take
    # the same way, so there are few sets however many tensors there are.
    grown: dict[tuple[int, int], int] = {}
    origin: list[tuple[int, int]] = [(0, -1)]
    holders: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    for number, model in enumerate(models):
        for digest, size in model.tensors.items():
            before = holders.get(digest, 0)
            after = grown.get((before, number))
            if after is None:
                after = grown[before, number] = len(origin)
                origin.append((before, number))
            holders[digest], nbytes[digest] = after, size
    found: Counter[int] = Counter()
    for digest, held in holders.items():
        found[held] += nbytes[digest]

    def members(held: int) -> tuple[int, ...]:
        numbers = []
        while held:
            held, number = origin[held]
            numbers.append(number)
        return tuple(reversed(numbers))

    return {members(held): size for held, size in found.items()}
