"""Which model is on which node, what that takes, and what a change would."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tensor_dedup.planning.placement.problem import Bytes, PackingProblem


class Placement:
    """Replicas of models on nodes, and the memory that they take. One thread.

    A replica is a pair of numbers: its model's and its node's.
    """

    def __init__(self, problem: PackingProblem) -> None:
        """Begin with empty nodes."""
        self.problem = problem
        nodes = len(problem.nodes)
        self._holders = np.zeros((len(problem.sizes), nodes), np.int32)
        self._on = np.zeros((len(problem.models), nodes), np.bool_)
        self.used: Bytes = np.zeros(nodes, np.int64)
        self._host: Bytes = np.zeros(nodes, np.int64)

    def copy(self) -> "Placement":
        """Return another placement with the same replicas."""
        other = Placement.__new__(Placement)
        other.problem = self.problem
        other._holders, other._on = self._holders.copy(), self._on.copy()
        other.used, other._host = self.used.copy(), self._host.copy()
        return other

    @property
    def total(self) -> int:
        """The bytes taken on all nodes."""
        return int(self.used.sum())

    @property
    def busy(self) -> int:
        """The number of nodes that have a model."""
        return int(self._on.any(axis=0).sum())

    def replicas(self) -> Iterator[tuple[int, int]]:
        """Yield each replica, by model and node."""
        for model, node in np.argwhere(self._on):
            yield int(model), int(node)

    def models_on(self, node: int) -> list[int]:
        """Return the models of a node, by number."""
        return [int(model) for model in np.flatnonzero(self._on[:, node])]

    def nodes_of(self, model: int) -> list[int]:
        """Return the nodes of a model, by number."""
        return [int(node) for node in np.flatnonzero(self._on[model])]

    def missing(self) -> Counter[int]:
        """Return how many replicas of each model have no node."""
        held = self._on.sum(axis=1)
        wanted = enumerate(self.problem.models)
        return Counter({n: int(m.replicas - held[n]) for n, m in wanted if m.replicas > held[n]})

    def marginal(self, model: int) -> Bytes:
        """Return what a replica of the model would add to each node, in bytes."""
        problem = self.problem
        parts = problem.parts[model]
        if not len(parts):
            return np.full(len(problem.nodes), problem.own[model])
        added: Bytes = problem.own[model] + problem.sizes[parts] @ (self._holders[parts] == 0)
        return added

    def freed(self, model: int, node: int) -> int:
        """Return what a node would give back with this replica, in bytes."""
        parts = self.problem.parts[model]
        alone = self._holders[parts, node] == 1
        return int(self.problem.own[model] + self.problem.sizes[parts] @ alone)

    def shared(self, model: int, node: int) -> int:
        """Return the bytes that a replica has in common with others on its node."""
        parts = self.problem.parts[model]
        return int(self.problem.sizes[parts] @ (self._holders[parts, node] > 1))

    def free(self) -> Bytes:
        """Return what is left on each node, in bytes."""
        return self.problem.capacity - self.used

    def free_host(self) -> Bytes:
        """Return what is left of each node's host memory, in bytes."""
        return self.problem.host_capacity - self._host

    def admits(self, model: int, marginal: Bytes) -> NDArray[np.bool_]:
        """Return the nodes that have room for a replica of the model and none of it yet."""
        problem = self.problem
        host = problem.host[model] <= self.free_host()
        admitted: NDArray[np.bool_] = (marginal <= self.free()) & host & ~self._on[model]
        return admitted

    def add(self, model: int, node: int) -> None:
        """Place a replica on a node that has none of the model, whether there is room or not."""
        assert not self._on[model, node]
        self.used[node] += self.marginal_on(model, node)
        self._holders[self.problem.parts[model], node] += 1
        self._host[node] += self.problem.host[model]
        self._on[model, node] = True

    def marginal_on(self, model: int, node: int) -> int:
        """Return what a replica of the model would add to one node, in bytes."""
        parts = self.problem.parts[model]
        absent = self._holders[parts, node] == 0
        return int(self.problem.own[model] + self.problem.sizes[parts] @ absent)

    def remove(self, model: int, node: int) -> None:
        """Take a replica from its node."""
        assert self._on[model, node]
        self.used[node] -= self.freed(model, node)
        self._holders[self.problem.parts[model], node] -= 1
        self._host[node] -= self.problem.host[model]
        self._on[model, node] = False

    def fits(self, model: int, node: int) -> bool:
        """Return whether a node has room for a replica of the model and none of it yet."""
        problem = self.problem
        if self._on[model, node]:
            return False
        if self._host[node] + problem.host[model] > problem.host_capacity[node]:
            return False
        return bool(self.marginal_on(model, node) <= problem.capacity[node] - self.used[node])

    def together(self, models: Sequence[int]) -> tuple[Bytes, NDArray[np.bool_]]:
        """Return what several models would add to each node, in bytes, and which has room for all.

        A node that has one of them already has none.
        """
        problem = self.problem
        parts = np.unique(np.concatenate([problem.parts[model] for model in models]))
        added = problem.own[models].sum() + problem.sizes[parts] @ (self._holders[parts] == 0)
        host = self._host + problem.host[models].sum() <= problem.host_capacity
        return added, (added <= self.free()) & host & ~self._on[models].any(axis=0)

    def is_sound(self) -> bool:
        """Return whether no node holds more than it may."""
        problem = self.problem
        return bool((self.used <= problem.capacity).all()) and bool(
            (self._host <= problem.host_capacity).all()
        )
