"""Assignment of replicas: which of several equal residents each name of a model gets.

A key has several numbered residents if one model has equal tensors, because those must not become
one memory. Models of one kind share name by name, in whatever order they were loaded.
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
    """A parameter that is a mapping of a resident now.

    `made` tells that the resident was built for it, and `before` that it existed before this load.
    """

    parameter: nn.Parameter
    resident: Resident
    replica: int
    made: bool
    before: bool


def note_first_name(resident: Resident, name: str) -> None:
    """Record the name for which a resident was built."""
    _first_names[resident] = name


def note_root(root: nn.Module) -> None:
    """Record the parts of a model, which may itself become a part of another one later."""
    parts = set(root.modules())
    for part in parts:
        known = _root(part)
        if known is None or known in parts:
            _roots[part] = ref(root)


def root_module(part: nn.Module) -> nn.Module:
    """Return the model that a module was last seen in, or the module itself if none is alive.

    Parts of a model are converted by themselves, and two names of one model must not become one
    memory whichever part they are in.
    """
    known = _root(part)
    return part if known is None else known


def _root(part: nn.Module) -> nn.Module | None:
    known = _roots.get(part)
    return None if known is None else known()


class ReplicaAssigner:
    """The replicas that the names of one model have taken. For one thread."""

    def __init__(self, taken: Iterable[ReplicaKey] = ()) -> None:
        self._used: dict[ResidentKey, set[int]] = defaultdict(set)
        for key, replica in taken:
            self.claim(key, replica)

    def claim(self, key: ResidentKey, replica: int) -> bool:
        """Take this replica; return False if another name of the model has it."""
        used = self._used[key]
        if replica in used:
            return False
        used.add(replica)
        return True

    def release(self, key: ResidentKey, replica: int) -> None:
        """Return a replica, so that another name can take it."""
        self._used[key].discard(replica)

    def claim_first(self, key: ResidentKey) -> int:
        """Take and return the first replica that no other name has."""
        return next(replica for replica in count() if self.claim(key, replica))

    def choose(self, key: ResidentKey, name: str) -> int:
        """Take a replica for this name: a resident one, preferably its own, or else a new one."""
        used = self._used[key]
        there = {
            replica: resident
            for replica in chain(range(len(used), len(used) + _AHEAD), range(len(used)))
            if replica not in used and (resident := registry.lookup(key, replica)) is not None
        }
        own = (replica for replica, each in there.items() if _first_names.get(each) == name)
        replica = next(chain(own, there), None)
        if replica is None:
            return self.claim_first(key)
        used.add(replica)
        return replica

    def order(
        self, named: Iterable[tuple[str, nn.Parameter]], shares: Mapping[int, ReplicaShare]
    ) -> None:
        """Assign replicas to names of equal bytes by first name, then in order of the names."""
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
