"""Which residents of equal bytes the names of one model get.

A key has several residents, numbered, where one model has equal tensors: those must not become one
memory. Models of one kind are to meet name by name, whatever order their loading has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from tensor_dedup.loader.residents.compare import is_forgeable, same_bytes
from tensor_dedup.loader.residents.param_data import set_param_data
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.unsharing.private import map_shared

if TYPE_CHECKING:
    from torch import nn

    from tensor_dedup.loader.residents.resident import Resident
    from tensor_dedup.types import ResidentKey

# How many copies of one key are looked at beyond those in use: what differs between two models
# shifts the numbers of their equal tensors by no more than a few.
_AHEAD: Final = 8
# Under which name a resident came up first.
_first_names: Final[WeakKeyDictionary[Resident, str]] = WeakKeyDictionary()


@dataclass(slots=True)
class ReplicaShare:
    """A parameter that is a mapping now. `made`: for it; `before`: resident before the load."""

    parameter: nn.Parameter
    resident: Resident
    copy: int
    made: bool
    before: bool


def came_up(resident: Resident, name: str) -> None:
    """Note the name for which a resident was made."""
    _first_names[resident] = name


class ReplicaAssigner:
    """The copies that one model has taken. One thread."""

    def __init__(self) -> None:
        self._used: dict[ResidentKey, set[int]] = defaultdict(set)

    def claim(self, key: ResidentKey, copy: int) -> bool:
        """Take this copy. False: another name of the model has it."""
        used = self._used[key]
        if copy in used:
            return False
        used.add(copy)
        return True

    def release(self, key: ResidentKey, copy: int) -> None:
        """Give a copy back."""
        self._used[key].discard(copy)

    def choose(self, key: ResidentKey, name: str) -> int:
        """Take a copy for this name: one that is there, best its own, or else a new one."""
        used = self._used[key]
        there = {
            copy: resident
            for copy in chain(range(len(used), len(used) + _AHEAD), range(len(used)))
            if copy not in used and (resident := registry.lookup(key, copy)) is not None
        }
        own = (copy for copy, resident in there.items() if _first_names.get(resident) == name)
        new = (copy for copy in count() if copy not in used)
        copy = next(chain(own, there, new))
        used.add(copy)
        return copy

    def order(
        self, named: Iterable[tuple[str, nn.Parameter]], shares: Mapping[int, ReplicaShare]
    ) -> None:
        """Names of equal bytes get copies by name, then in order, however loading ordered them."""
        twins: dict[ResidentKey, list[tuple[str, ReplicaShare]]] = defaultdict(list)
        for name, parameter in named:
            share = shares.get(id(parameter))
            if share is not None and len(self._used[share.resident.key]) > 1:
                twins[share.resident.key].append((name, share))
        for key, group in twins.items():
            if not is_forgeable(key.digest) or _equal(group):
                _deal(group)


def _equal(group: Sequence[tuple[str, ReplicaShare]]) -> bool:
    """Each was compared with its own tensor, and not with the others."""
    first, *rest = (share.resident.map(writable=False) for _, share in group)
    return all(same_bytes(first, each) for each in rest)


def _deal(group: Sequence[tuple[str, ReplicaShare]]) -> None:
    held = sorted((share for _, share in group), key=lambda share: share.copy)
    cards = [(s.resident, s.copy, s.made, s.before) for s in held]
    rest = []
    for name, share in group:
        own = next((card for card in cards if _first_names.get(card[0]) == name), None)
        if own is None:
            rest.append(share)
        else:
            cards.remove(own)
            _give(share, own)
    for share, card in zip(rest, cards, strict=True):
        _give(share, card)


def _give(share: ReplicaShare, card: tuple[Resident, int, bool, bool]) -> None:
    if share.resident is not card[0]:
        set_param_data(share.parameter, map_shared(card[0]))
        share.resident, share.copy, share.made, share.before = card
