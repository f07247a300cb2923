"""Sharing the parameters of a model that somebody else loads, or has loaded.

Nothing is known here but the finished tensors, after casts and merges; so those are what is
fingerprinted. A parameter keeps its object and gets another storage: a mapping of its own of the
resident with its bytes.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import TYPE_CHECKING, Final, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from tensor_dedup.digest import submit
from tensor_dedup.loader.assembly import COLLISION, SHARED_STORAGE, raise_audit, same_bytes
from tensor_dedup.loader.ledger import Ledger
from tensor_dedup.loader.lender import Wanted
from tensor_dedup.loader.mappings import MAPPINGS, any_page_copied
from tensor_dedup.loader.memory import SharedMemoryError
from tensor_dedup.loader.placing import (
    Mappings,
    data_of,
    files_and_common,
    overlapping,
    replace,
)
from tensor_dedup.loader.registry import registry
from tensor_dedup.loader.residents import Resident, pack, resident_key, sharable, tensor_bytes

if TYPE_CHECKING:
    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.supply import Supply
    from tensor_dedup.types import ResidentKey

Named: TypeAlias = tuple[str, nn.Parameter]

# A slab is one descriptor, and is freed whole. Tensors from the first size on have their own;
# smaller ones wait until there is enough for one, or until their model is complete.
_OWN_SLAB_BYTES: Final = 16 << 20
_BATCH_BYTES: Final = 64 << 20
# Classes of parameters that are nothing but their bytes and plain attributes.
_CLASSES: Final = frozenset(
    {"torch.nn.parameter.Parameter", "diffusers.quantizers.gguf.utils.GGUFParameter"}
)
# How many copies of one key are looked at beyond those in use: what differs between two models
# shifts the numbers of their equal tensors by no more than a few.
_AHEAD: Final = 8
# Under which name a resident came up first: models of one kind then meet name by name.
_first_names: Final[WeakKeyDictionary[Resident, str]] = WeakKeyDictionary()


@dataclass(slots=True)
class Terms:
    """What the adoptions of one load have in common. One thread."""

    config: TensorDedupConfig
    supply: Supply
    own: WeakSet[Resident] = field(default_factory=WeakSet)
    bytes_hashed: int = 0
    hash_seconds: float = 0.0
    process_seconds: float = 0.0
    collisions: int = 0
    rng: random.Random = field(default_factory=random.Random)


@dataclass(slots=True)
class _Share:
    """A parameter that is a mapping now. `made`: for it; `before`: resident before the load."""

    parameter: nn.Parameter
    resident: Resident
    copy: int
    made: bool
    before: bool


@dataclass(frozen=True, slots=True)
class _Missing:
    """A parameter whose bytes are nowhere resident; it will be this copy of its key."""

    name: str
    parameter: nn.Parameter
    copy: int
    digest: str


class Adoption:
    """Shares the parameters of one model. One thread, under the process-wide load lock.

    No two names of the model get one resident, unless the model ties them itself. Nobody may
    write to the parameters meanwhile.
    """

    def __init__(self, model: nn.Module, terms: Terms) -> None:
        self.model: Final = model
        self.ledger = Ledger()
        self._terms = terms
        self._waiting: dict[int, Named] = {}
        self._waiting_bytes = 0
        self._shares: dict[int, _Share] = {}
        self._reasons: dict[int, str] = {}
        self._used: dict[ResidentKey, set[int]] = defaultdict(set)

    def note(self, name: str) -> None:
        """Hear that a loader has set this tensor of the model for good."""
        parameter = _find(self.model, name)
        if parameter is None or parameter.device.type != "cpu":
            return
        if id(parameter) in self._shares or id(parameter) in self._waiting:
            return
        if parameter.nbytes >= _OWN_SLAB_BYTES:
            self._adopt([(name, parameter)])
            return
        self._waiting[id(parameter)] = name, parameter
        self._waiting_bytes += parameter.nbytes
        if self._waiting_bytes >= _BATCH_BYTES:
            self._flush()

    def settle(self) -> None:
        """Share what is left, order the copies, and do the accounts. The model is complete."""
        self._waiting.clear()
        for batch in _batches(self._left()):
            self._adopt(batch)
        self._order_copies()
        self._let_files_go()
        self._account()
        self._shares.clear()

    def share_again(self, parameters: Container[int]) -> None:
        """Share those of these ids that are private now. The model is complete."""
        for batch in _batches(item for item in self._left() if id(item[1]) in parameters):
            self._adopt(batch)
        self._order_copies()
        self._shares.clear()

    def _flush(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        self._adopt(list(waiting.values()))

    def _left(self) -> Iterator[Named]:
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in self._shares:
                yield name, parameter

    def _adopt(self, items: Sequence[Named]) -> None:
        began, hashed = time.perf_counter(), self._terms.hash_seconds
        candidates = self._candidates(items)
        digests = self._digests([parameter for _, parameter in candidates])
        missing = []
        for (name, parameter), digest in zip(candidates, digests, strict=True):
            key = resident_key(data_of(parameter), digest)
            copy = self._choose(key, name)
            self._used[key].add(copy)
            resident = registry.lookup(key, copy)
            if resident is None:
                missing.append(_Missing(name, parameter, copy, digest))
            else:
                self._take(parameter, resident, copy, made=False)
        self._make(missing)
        spent = time.perf_counter() - began
        self._terms.process_seconds += spent - (self._terms.hash_seconds - hashed)

    def _candidates(self, items: Sequence[Named]) -> list[Named]:
        """Those to share. Of the others the reasons are kept, or the residents that they are."""
        together = overlapping(self.model.parameters())
        _, common = files_and_common()
        resident = self._residents_behind(items)
        chosen = []
        for name, parameter in items:
            found = resident.get(id(parameter))
            reason = self._reason(parameter, together) if found is None else None
            if reason is None and found is None and common.hold(parameter):
                reason = "other processes can write to its memory"
            if reason is not None:
                self._reasons[id(parameter)] = reason
            elif found is not None and found[0] not in self._used[found[1].key]:
                copy, behind = found
                self._used[behind.key].add(copy)
                before = behind not in self._terms.own
                self._shares[id(parameter)] = _Share(parameter, behind, copy, False, before)
            elif parameter.nbytes:
                chosen.append((name, parameter))
        return chosen

    def _reason(self, parameter: nn.Parameter, together: set[int]) -> str | None:
        """Why this parameter is left alone, or None."""
        kind = type(parameter)
        if f"{kind.__module__}.{kind.__qualname__}" not in _CLASSES:
            return f"a parameter of class {kind.__name__} is left alone"
        if parameter.is_meta:
            return "it is not in memory (meta)"
        if parameter.device.type != "cpu":
            return f"it is on {parameter.device.type}; only host memory is shared in this version"
        if not sharable(data_of(parameter)):
            return "its type or layout cannot be shared"
        if id(parameter) in together:
            return SHARED_STORAGE
        if parameter.nbytes < self._terms.config.min_tensor_bytes:
            return "it is below min_tensor_bytes"
        return None

    def _residents_behind(self, items: Sequence[Named]) -> dict[int, tuple[int, Resident]]:
        """Parameters that are unwritten mappings already, as after an earlier load or sweep."""
        places = {}
        for _, parameter in items:
            if parameter.device.type == "cpu" and parameter.nbytes:
                start, nbytes = data_of(parameter).data_ptr(), parameter.nbytes
                place = MAPPINGS.find(start, nbytes)
                if place is not None and not any_page_copied(start, nbytes):
                    places[id(parameter)] = place
        if not places:
            return {}
        known = {(r.slab.serial, r.offset): (copy, r) for copy, r in registry.entries()}
        return {
            id(parameter): found
            for _, parameter in items
            if (place := places.get(id(parameter))) is not None
            and (found := known.get(place)) is not None
            and found[1].key == resident_key(data_of(parameter), found[1].key.digest)
        }

    def _digests(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        began = time.perf_counter()
        algorithm = self._terms.config.hash_algorithm
        futures = [submit(tensor_bytes(data_of(each)), algorithm) for each in parameters]
        digests = [future.result() for future in futures]
        self._terms.bytes_hashed += sum(each.nbytes for each in parameters)
        self._terms.hash_seconds += time.perf_counter() - began
        return digests

    def _choose(self, key: ResidentKey, name: str) -> int:
        """Which copy of a key this name is to be: one that is there, best its own, or a new one."""
        used = self._used[key]
        there = {
            copy: resident
            for copy in chain(range(len(used), len(used) + _AHEAD), range(len(used)))
            if copy not in used and (resident := registry.lookup(key, copy)) is not None
        }
        own = (copy for copy, resident in there.items() if _first_names.get(resident) == name)
        new = (copy for copy in count() if copy not in used)
        return next(chain(own, there, new))

    def _make(self, missing: Sequence[_Missing]) -> None:
        firsts = [each for each in missing if each.copy == 0]
        # Further copies are this process's own: a manager has one of each content.
        twins = [each for each in missing if each.copy > 0]
        try:
            made = self._terms.supply.make(
                [
                    Wanted(f"content:{resident_key(data_of(p), d)}", data_of(p), d)
                    for p, d in ((each.parameter, each.digest) for each in firsts)
                ]
            )
            items = [(data_of(each.parameter), each.digest) for each in twins]
            packed = pack(items, as_aligned=True) if items else []
        except SharedMemoryError as error:
            self._reasons.update((id(each.parameter), str(error)) for each in missing)
            return
        for resident, each in zip(packed, twins, strict=True):
            first = registry.publish(resident, each.copy)
            made.append((first, first is resident))
        for each, (resident, new) in zip([*firsts, *twins], made, strict=True):
            if new:
                self._terms.own.add(resident)
                _first_names[resident] = each.name
            self._take(each.parameter, resident, each.copy, made=new)

    def _take(self, parameter: nn.Parameter, resident: Resident, copy: int, *, made: bool) -> None:
        if not made and not self._equal(resident, parameter):
            self._reasons[id(parameter)] = COLLISION
            return
        try:
            replace(parameter, resident.map())
        except SharedMemoryError as error:
            self._reasons[id(parameter)] = str(error)
            return
        before = not made and resident not in self._terms.own
        self._shares[id(parameter)] = _Share(parameter, resident, copy, made, before)
        self._reasons.pop(id(parameter), None)

    def _equal(self, resident: Resident, parameter: nn.Parameter) -> bool:
        """On a hit: compare when asked to. Counts a collision, or AuditError."""
        config = self._terms.config
        audited = config.audit > 0 and self._terms.rng.random() < config.audit
        if not (config.verifies_bytes or audited):
            return True
        if same_bytes(data_of(parameter), resident.map(writable=False)):
            return True
        if not config.verifies_bytes:
            raise_audit(f"a tensor of {resident.key.digest}", "the resident", "its equal")
        self._terms.collisions += 1
        return False

    def _order_copies(self) -> None:
        """Names of equal bytes get copies by name, then in order, however loading ordered them."""
        twins: dict[ResidentKey, list[tuple[str, _Share]]] = defaultdict(list)
        for name, parameter in self.model.named_parameters():
            share = self._shares.get(id(parameter))
            if share is not None and len(self._used[share.resident.key]) > 1:
                twins[share.resident.key].append((name, share))
        for group in twins.values():
            self._deal(group)

    def _deal(self, group: Sequence[tuple[str, _Share]]) -> None:
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

    def _let_files_go(self) -> None:
        """Copy what is left of checkpoint files in memory: one small tensor pins a whole file."""
        files, _ = files_and_common()
        for parameter in self.model.parameters():
            plain = type(parameter) is nn.Parameter and id(parameter) not in self._shares
            if plain and self._reasons.get(id(parameter)) != SHARED_STORAGE:
                _copy_out(parameter, files)
        for buffer in self.model.buffers():
            _copy_out(buffer, files)

    def _account(self) -> None:
        for name, parameter in self.model.named_parameters():
            share = self._shares.get(id(parameter))
            if share is not None:
                self.ledger.add(name, parameter.nbytes, shared=share.before, made=share.made)
            elif parameter.nbytes:
                self.ledger.add(name, parameter.nbytes, shared=False)
                self.ledger.skip(name, self._reasons[id(parameter)])


def _give(share: _Share, card: tuple[Resident, int, bool, bool]) -> None:
    if share.resident is not card[0]:
        replace(share.parameter, card[0].map())
        share.resident, share.copy, share.made, share.before = card


def _copy_out(tensor: torch.Tensor, files: Mappings) -> None:
    if files.hold(tensor):
        replace(tensor, data_of(tensor).clone(memory_format=torch.preserve_format))


def _find(model: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter of that name; None for a buffer."""
    path, _, last = name.rpartition(".")
    return model.get_submodule(path)._parameters.get(last)


def _batches(items: Iterable[Named]) -> Iterator[list[Named]]:
    """Runs that fill a slab each, a large tensor by itself; one at a time in memory."""
    batch: list[Named] = []
    size = 0
    for name, parameter in items:
        if parameter.nbytes >= _OWN_SLAB_BYTES:
            yield [(name, parameter)]
            continue
        batch.append((name, parameter))
        size += parameter.nbytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
