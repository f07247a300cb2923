"""Models, nodes, and what a set of models needs on a node: each tensor once.

Tensors that the same models have are one part, found by an index of digests and never by comparing
models in pairs. So a base and its fine-tunes make a few parts, however many tensors they have.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Model:
    """A model to place. Sizes in bytes.

    `tensors` are the sizes of its tensors by digest. Its engines take `room` beside the weights,
    for the KV cache and for activations, and `host` of the machine's memory where `room` is a
    device's. `replicas` are on different nodes.
    """

    name: str
    tensors: Mapping[str, int] = field(repr=False)
    room: int = 0
    host: int = 0
    replicas: int = 1

    @property
    def nbytes(self) -> int:
        """The bytes of its weights, each tensor once."""
        return sum(self.tensors.values())


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, or a device of one: `memory` bytes for weights and engines.

    `host` are those of the machine's own memory, if they are to be counted too.
    """

    name: str
    memory: int
    host: int | None = None


class PackingProblem:
    """Models and nodes in the form in which placements are computed. Immutable; any thread.

    `own[m]` are the bytes that each replica of model m needs whoever else is there, `parts[m]` the
    numbers of the parts that it has in common with other models, and `sizes` their bytes. On a node
    where nothing else is a replica takes `needs[m]`.
    """

    def __init__(self, models: Sequence[Model], nodes: Sequence[Node]) -> None:
        """Find the parts, in time that grows with the tensors of all models."""
        self.models, self.nodes = tuple(models), tuple(nodes)
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
        """Return a number of bytes below which no placement of everything is, on any nodes.

        Each part is on as many nodes as a model that has it.
        """
        replicas = np.array([model.replicas for model in self.models], np.int64)
        most = np.zeros(len(self.sizes), np.int64)
        for number, parts in enumerate(self.parts):
            most[parts] = np.maximum(most[parts], replicas[number])
        return int(self.own @ replicas + self.sizes @ most)

    def used(self, models: Iterable[int]) -> int:
        """What these models take on one node together."""
        chosen = sorted(set(models))
        held = [self.parts[model] for model in chosen]
        union = np.unique(np.concatenate(held)) if held else np.array([], np.int64)
        return int(self.own[chosen].sum() + self.sizes[union].sum())


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
