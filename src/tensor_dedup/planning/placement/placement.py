"""A placement of models on nodes, and the memory that it takes."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tensor_dedup.planning.placement.problem import Bytes, PackingProblem


class Placement:
    """A placement: which models have a replica on which nodes, and the bytes used there.

    A node is a machine or a device with memory. Models and nodes are given by their positions in
    the problem. A node has at most one replica of a model. Arrays of bytes have one entry for each
    node. For one thread.
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
        """Return an independent placement with the same replicas."""
        other = Placement.__new__(Placement)
        other.problem = self.problem
        other._holders, other._on = self._holders.copy(), self._on.copy()
        other.used, other._host = self.used.copy(), self._host.copy()
        return other

    @property
    def total(self) -> int:
        """The bytes used on all nodes together."""
        return int(self.used.sum())

    @property
    def busy(self) -> int:
        """The number of nodes that hold at least one model."""
        return int(self._on.any(axis=0).sum())

    def replicas(self) -> Iterator[tuple[int, int]]:
        """Yield each replica as a pair of its model and its node."""
        for model, node in np.argwhere(self._on):
            yield int(model), int(node)

    def models_on(self, node: int) -> list[int]:
        """Return the models on a node, in ascending order."""
        return [int(model) for model in np.flatnonzero(self._on[:, node])]

    def nodes_of(self, model: int) -> list[int]:
        """Return the nodes that hold a model, in ascending order."""
        return [int(node) for node in np.flatnonzero(self._on[model])]

    def missing(self) -> Counter[int]:
        """Return how many replicas of each model are not placed yet.

        Models whose replicas are all placed are left out.
        """
        held = self._on.sum(axis=1)
        wanted = enumerate(self.problem.models)
        return Counter({n: int(m.replicas - held[n]) for n, m in wanted if m.replicas > held[n]})

    def marginal(self, model: int) -> Bytes:
        """Return, for each node, the bytes that a replica of the model would add there."""
        problem = self.problem
        parts = problem.parts[model]
        if not len(parts):
            return np.full(len(problem.nodes), problem.own[model])
        added: Bytes = problem.own[model] + problem.sizes[parts] @ (self._holders[parts] == 0)
        return added

    def freed(self, model: int, node: int) -> int:
        """Return the bytes that removing the model's replica would free on the node."""
        parts = self.problem.parts[model]
        alone = self._holders[parts, node] == 1
        return int(self.problem.own[model] + self.problem.sizes[parts] @ alone)

    def shared(self, model: int, node: int) -> int:
        """Return the bytes that the model's replica shares with other models on the node."""
        parts = self.problem.parts[model]
        return int(self.problem.sizes[parts] @ (self._holders[parts, node] > 1))

    def free(self) -> Bytes:
        """Return the free bytes of each node; negative where a node is overfull."""
        return self.problem.capacity - self.used

    def free_host(self) -> Bytes:
        """Return the free bytes of each node's host memory."""
        return self.problem.host_capacity - self._host

    def admits(self, model: int, marginal: Bytes) -> NDArray[np.bool_]:
        """Return, for each node, whether a replica of the model may be added there.

        The node must have room for the replica and must not hold the model yet. `marginal` is the
        result of the method `marginal` for the model.
        """
        problem = self.problem
        host = problem.host[model] <= self.free_host()
        admitted: NDArray[np.bool_] = (marginal <= self.free()) & host & ~self._on[model]
        return admitted

    def add(self, model: int, node: int) -> None:
        """Place a replica of the model on a node, which must not hold one yet.

        The replica is placed even if there is no room for it.
        """
        assert not self._on[model, node]
        self.used[node] += self.marginal_on(model, node)
        self._holders[self.problem.parts[model], node] += 1
        self._host[node] += self.problem.host[model]
        self._on[model, node] = True

    def marginal_on(self, model: int, node: int) -> int:
        """Return the bytes that a replica of the model would add to one node."""
        parts = self.problem.parts[model]
        absent = self._holders[parts, node] == 0
        return int(self.problem.own[model] + self.problem.sizes[parts] @ absent)

    def remove(self, model: int, node: int) -> None:
        """Remove the model's replica from a node, which must hold one."""
        assert self._on[model, node]
        self.used[node] -= self.freed(model, node)
        self._holders[self.problem.parts[model], node] -= 1
        self._host[node] -= self.problem.host[model]
        self._on[model, node] = False

    def fits(self, model: int, node: int) -> bool:
        """Return whether a replica of the model may be added to a node.

        The node must have room for the replica and must not hold the model yet.
        """
        problem = self.problem
        if self._on[model, node]:
            return False
        if self._host[node] + problem.host[model] > problem.host_capacity[node]:
            return False
        return bool(self.marginal_on(model, node) <= problem.capacity[node] - self.used[node])

    def together(self, models: Sequence[int]) -> tuple[Bytes, NDArray[np.bool_]]:
        """Return, for each node, the bytes that these models would add, and whether they all fit.

        If a node already holds one of the models, they do not fit there.
        """
        problem = self.problem
        parts = np.unique(np.concatenate([problem.parts[model] for model in models]))
        added = problem.own[models].sum() + problem.sizes[parts] @ (self._holders[parts] == 0)
        host = self._host + problem.host[models].sum() <= problem.host_capacity
        return added, (added <= self.free()) & host & ~self._on[models].any(axis=0)

    def is_sound(self) -> bool:
        """Return whether no node holds more than its memory and host memory allow."""
        problem = self.problem
        return bool((self.used <= problem.capacity).all()) and bool(
            (self._host <= problem.host_capacity).all()
        )
