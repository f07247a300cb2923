"""Assign replicas: choose which of several equal residents each parameter of a model gets.

Equal tensors of one model must not have the same memory. So there may be several residents with
equal bytes, called replicas and numbered from 0. If two models of one kind have a parameter of the
same name and bytes, it gets the same replica in both, whatever the order in which they are loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, ref

from tensor_dedup.loader.residents.compare import is_forgeable, same_bytes
from tensor_dedup.loader.residents.param_data import set_param_data
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.slab import SharedMemoryError
from tensor_dedup.loader.unsharing.private import map_shared

if TYPE_CHECKING:
    from torch import nn

    from tensor_dedup.loader.residents.resident import ReplicaKey, Resident
    from tensor_dedup.types import ResidentKey

# How many replicas of one key are looked at beyond those in use: what differs between two models
# shifts the numbers of their equal tensors by no more than a few.
_AHEAD: Final = 8
# The name for which a resident was made.
_first_names: Final[WeakKeyDictionary[Resident, str]] = WeakKeyDictionary()
# The model that a module was last seen in: a module does not know its parent.
_roots: Final[WeakKeyDictionary[nn.Module, ref[nn.Module]]] = WeakKeyDictionary()


@dataclass(slots=True)
class ReplicaShare:
    """A parameter that is now a mapping of a resident, and the resident's replica number.

    `made` is True if the resident was built for this parameter. `before` is True if the resident
    existed before this load.
    """

    parameter: nn.Parameter
    resident: Resident
    replica: int
    made: bool
    before: bool


def note_first_name(resident: Resident, name: str) -> None:
    """Record that `resident` was built for the parameter `name`.

    `ReplicaAssigner` then prefers the resident for parameters of this name.
    """
    _first_names[resident] = name


def note_root(root: nn.Module) -> None:
    """Record `root` as the model that `root_module` returns for each module in it.

    If another model is recorded for a module already, that record stays, unless the other model is
    a part of `root` or no longer exists.
    """
    parts = set(root.modules())
    for part in parts:
        known = _root(part)
        if known is None or known in parts:
            _roots[part] = ref(root)


def root_module(part: nn.Module) -> nn.Module:
    """Return the model that `note_root` has recorded for the module `part`.

    Returns `part` itself if no model was recorded or the model is gone. Code that shares only a
    part of a model uses this function to find the other parts, whose memory the part must not get.
    """
    known = _root(part)
    return part if known is None else known


def _root(part: nn.Module) -> nn.Module | None:
    known = _roots.get(part)
    return None if known is None else known()


class ReplicaAssigner:
    """The assigner of replicas (residents with equal bytes) to the parameters of one model.

    Replicas are numbered from 0, and equal parameters get different numbers. `taken` has the
    replicas that parameters of the model use already. For one thread.
    """

    def __init__(self, taken: Iterable[ReplicaKey] = ()) -> None:
        self._used: dict[ResidentKey, set[int]] = defaultdict(set)
        for key, replica in taken:
            self.claim(key, replica)

    def claim(self, key: ResidentKey, replica: int) -> bool:
        """Take the replica number `replica` of `key`; return False if it was taken before."""
        used = self._used[key]
        if replica in used:
            return False
        used.add(replica)
        return True

    def release(self, key: ResidentKey, replica: int) -> None:
        """Release a replica, so that another parameter can take it.

        Nothing happens if the replica was not taken.
        """
        self._used[key].discard(replica)

    def claim_first(self, key: ResidentKey) -> int:
        """Take the lowest replica number of `key` that is not taken, and return the number."""
        return next(replica for replica in count() if self.claim(key, replica))

    def choose(self, key: ResidentKey, name: str) -> int:
        """Choose a resident for the parameter `name`, and return the resident's replica number.

        Residents with the same `key` are equal, and have different replica numbers. A number that
        is taken already is not chosen again. The choice is the first that exists of these:

        1. A resident that was built for a parameter of this name.
        2. Any other resident.
        3. A resident that is still to be built. It gets the lowest free number.
        """
        used = self._used[key]
        chosen = None
        for replica in chain(range(len(used), len(used) + _AHEAD), range(len(used))):
            resident = None if replica in used else registry.lookup(key, replica)
            if resident is None:
                continue
            if _first_names.get(resident) == name:
                chosen = replica
                break
            if chosen is None:
                chosen = replica
        if chosen is None:
            return self.claim_first(key)
        used.add(chosen)
        return chosen

    def order(
        self, named: Iterable[tuple[str, nn.Parameter]], shares: Mapping[int, ReplicaShare]
    ) -> None:
        """Exchange replicas between parameters with equal bytes, by the parameters' names.

        If one of these replicas was built for a parameter's name, the parameter gets it. The
        remaining parameters get the remaining replicas, in the order of `named`.

        `named` has all parameters of the model with their names. `shares` maps the id of a shared
        parameter to its share, and is updated.
        """
        equals: dict[ResidentKey, list[tuple[str, ReplicaShare]]] = defaultdict(list)
        for name, parameter in named:
            share = shares.get(id(parameter))
            if share is not None and len(self._used[share.resident.key]) > 1:
                equals[share.resident.key].append((name, share))
        for key, group in equals.items():
            if not is_forgeable(key.digest) or _equal(group):
                _assign(group)


def _equal(group: Sequence[tuple[str, ReplicaShare]]) -> bool:
    """Return whether all have equal bytes; each was compared only with its own tensor before."""
    first, *rest = (share.resident.seen() for _, share in group)
    return all(same_bytes(first, each) for each in rest)


def _assign(group: Sequence[tuple[str, ReplicaShare]]) -> None:
    held = sorted((share for _, share in group), key=lambda share: share.replica)
    available = [(s.resident, s.replica, s.made, s.before) for s in held]
    rest, given = [], []
    for name, share in group:
        own = next((each for each in available if _first_names.get(each[0]) == name), None)
        if own is None:
            rest.append(share)
        else:
            available.remove(own)
            given.append((share, own))
    given += zip(rest, available, strict=True)
    others = [(share, other) for share, other in given if share.resident is not other[0]]
    try:
        mapped = [map_shared(other[0]) for _, other in others]
    except SharedMemoryError:
        return  # they stay as they are: each has one of these, and all have equal bytes
    for (share, other), tensor in zip(others, mapped, strict=True):
        set_param_data(share.parameter, tensor)
        share.resident, share.replica, share.made, share.before = other
