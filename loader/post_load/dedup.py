"""Sharing the parameters of a model that somebody else loads, or has loaded.

Nothing is known here but the finished tensors, after casts and merges; so those are what is
fingerprinted. A parameter keeps its object and gets another storage: a mapping of its own of the
resident with its bytes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from tensor_dedup.loader.deferred.session import SHARED_STORAGE
from tensor_dedup.loader.ledger import LoadLedger
from tensor_dedup.loader.post_load import root_module
from tensor_dedup.loader.post_load.batch import (
    DedupCandidate,
    DedupContext,
    HashBatch,
    MissingResident,
)
from tensor_dedup.loader.post_load.on_gpu import GpuAdoption
from tensor_dedup.loader.post_load.parameter_classes import reason_of_class
from tensor_dedup.loader.post_load.replaced_storages import ReplacedStorages
from tensor_dedup.loader.post_load.replicas import ReplicaAssigner, ReplicaShare, came_up
from tensor_dedup.loader.residents.compare import COLLISION, raise_audit, same_bytes
from tensor_dedup.loader.residents.mappings import is_as_mapped
from tensor_dedup.loader.residents.param_data import overlapping, param_data, set_param_data
from tensor_dedup.loader.residents.process_mappings import ProcessMappings
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import Resident, resident_key, sharable
from tensor_dedup.loader.residents.slab import SharedMemoryError
from tensor_dedup.loader.unsharing.lookup import is_mapping_of, residents_of
from tensor_dedup.loader.unsharing.private import map_shared

if TYPE_CHECKING:
    from tensor_dedup.loader.post_load.parameter_classes import NamedParameter

# A slab is one descriptor, and is freed whole. Tensors from the first size on have their own;
# smaller ones wait until there is enough for one, or until their model is complete.
_OWN_SLAB_BYTES: Final = 16 << 20
_BATCH_BYTES: Final = 64 << 20
_CHANGED: Final = "it changed while it was being loaded"
# Batches that are read while the loader goes on.
_UNDER_WAY: Final = 2


class ModuleDedup:
    """Shares the parameters of one model. One thread, under the process-wide load lock.

    No two names of the model get one resident, unless the model ties them itself. What `note` hears
    of is read while the loader goes on: end with `settle` or `abandon` before files are closed.
    Nobody may write to the parameters while one of these runs.
    """

    def __init__(self, model: nn.Module, terms: DedupContext) -> None:
        self.model: Final = model
        self.ledger = LoadLedger()
        self._process: Final = os.getpid()
        self._terms = terms
        self._waiting: dict[int, NamedParameter] = {}
        self._waiting_bytes = 0
        self._under_way: deque[HashBatch] = deque()
        self._begun: set[int] = set()
        self._left_behind: list[DedupCandidate] = []
        self._shares: dict[int, ReplicaShare] = {}
        self._reasons: dict[int, str] = {}
        self._copies = ReplicaAssigner()
        self._formers = ReplacedStorages()
        self._on_gpus = GpuAdoption(model, terms)
        self._memory: ProcessMappings | None = None
        # A part of a model takes nothing that another part of it has.
        whole = root_module.root_module(model)
        if whole is not model:
            mine = {id(parameter) for parameter in model.parameters()}
            self._claim(each for each in whole.parameters() if id(each) not in mine)

    def _claim(self, parameters: Iterable[nn.Parameter]) -> None:
        for known, _ in residents_of(parameters).values():
            self._copies.claim(known.key, known.copy)

    def note(self, name: str) -> None:
        """Hear that a loader has set this tensor of the model for good."""
        parameter = _find(self.model, name)
        if parameter is None or parameter.device.type != "cpu":
            return
        if any(id(parameter) in each for each in (self._shares, self._waiting, self._begun)):
            return
        if parameter.nbytes >= _OWN_SLAB_BYTES:
            self._begin([(name, parameter)])
            return
        self._waiting[id(parameter)] = name, parameter
        self._waiting_bytes += parameter.nbytes
        if self._waiting_bytes >= _BATCH_BYTES:
            self._flush()

    def settle(self) -> None:
        """Share what is left, order the copies, and do the accounts. The model is complete."""
        self._waiting.clear()
        self._complete()
        self._forget_replaced()
        self._take_back_written()
        for buffer in self.model.buffers():
            self._part_again(buffer)
        for batch in _batches(self._left()):
            self._adopt(batch)
        self._copies.order(self.model.named_parameters(), self._shares)
        self._on_gpus.adopt(list(self._left()))
        self._let_files_go()
        self._account()
        self._end()

    def _forget_replaced(self) -> None:
        """A loader may have given a parameter other memory after it was shared."""
        for number, share in list(self._shares.items()):
            if not is_mapping_of(share.parameter, share.resident):
                del self._shares[number]
                self._copies.release(share.resident.key, share.copy)

    def abandon(self) -> None:
        """Wait until nothing is read any more; what is not shared by now is as it was.

        In a forked child nobody reads.
        """
        while self._under_way:
            if os.getpid() == self._process:
                self._under_way[0].abandon()
            self._under_way.popleft()
        self._begun.clear()
        self._left_behind.clear()

    def share_again(self, parameters: Container[int]) -> None:
        """Share those of these ids that are private now. The model is complete."""
        self._claim(each for each in self.model.parameters() if id(each) not in parameters)
        for batch in _batches(item for item in self._left() if id(item[1]) in parameters):
            self._adopt(batch)
        self._copies.order(self.model.named_parameters(), self._shares)
        self._end()

    def _end(self) -> None:
        root_module.remember(self.model)
        self._shares.clear()
        self._formers = ReplacedStorages()

    def _flush(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        self._begin(list(waiting.values()))

    def _left(self) -> Iterator[NamedParameter]:
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in self._shares:
                yield name, parameter

    def _adopt(self, items: Sequence[NamedParameter]) -> None:
        self._begin(items, wait=True)

    def _begin(self, items: Sequence[NamedParameter], *, wait: bool = False) -> None:
        """Have some read. The loader goes on meanwhile where a write of its would be seen."""
        self._complete(0 if wait else _UNDER_WAY - 1)
        began, hashed = time.perf_counter(), self._terms.hash_seconds
        candidates = [each for each in self._candidates(items) if not self._take_remembered(each)]
        assert self._memory is not None  # the candidates were looked for in it
        batch = HashBatch(candidates, self._terms, self._memory)
        self._under_way.append(batch)
        self._begun.update(id(each.parameter) for each in candidates)
        batch.begin()
        spent = time.perf_counter() - began
        self._terms.process_seconds += spent - (self._terms.hash_seconds - hashed)
        if wait or not batch.of_files:
            self._complete(1)  # of what began before the loader may have changed something
            self._complete(checked=True)

    def _complete(self, under_way: int = 0, *, checked: bool = False) -> None:
        """Share what was read, but for so many batches. `checked`: nobody went on meanwhile."""
        while len(self._under_way) > under_way:
            batch = self._under_way[0]
            digests = batch.digests()
            self._under_way.popleft()
            self._begun.difference_update(id(each.parameter) for each in batch.candidates)
            self._share(batch, digests, set() if checked else self._changed(batch))
            if not checked:
                self._left_behind += batch.candidates

    def _changed(self, batch: HashBatch) -> set[int]:
        """Those that are not what was read, or not the model's any more."""
        return {
            id(each.parameter)
            for each in batch.candidates
            if _find(self.model, each.name) is not each.parameter or not _is_as_read(each)
        }

    def _take_back_written(self) -> None:
        """A loader may have kept a view of what was read, and written to it since."""
        for each in self._left_behind:
            share = self._shares.get(id(each.parameter))
            if share is not None and not is_as_mapped(each.data.data_ptr(), each.data.nbytes):
                del self._shares[id(each.parameter)]
                self._copies.release(share.resident.key, share.copy)
                set_param_data(each.parameter, each.data)
        self._left_behind.clear()

    def _share(self, batch: HashBatch, digests: Sequence[str], changed: set[int]) -> None:
        began = time.perf_counter()
        missing = []
        for number, (candidate, found) in enumerate(zip(batch.candidates, digests, strict=True)):
            if id(candidate.parameter) in changed:  # what was hashed may be no file's
                self._reasons[id(candidate.parameter)] = _CHANGED  # it is looked at once more
                continue
            if candidate.place is not None and self._terms.origins is not None:
                self._terms.origins.learn(candidate.place, found)
            key = resident_key(candidate.data, found)
            copy = self._copies.choose(key, candidate.name)
            resident = registry.lookup(key, copy)
            if resident is None:
                missing.append(MissingResident(candidate, copy, found, number))
            else:
                self._take(candidate.parameter, resident, copy, made=False)
        self._make(batch, missing)
        self._terms.process_seconds += time.perf_counter() - began

    def _take_remembered(self, candidate: DedupCandidate) -> bool:
        """Share what a hint names and what is resident, without reading it. False: hash it."""
        remembered = None if candidate.place is None else candidate.place.remembered
        if remembered is None:
            self._terms.unknown += 1
            return False
        self._terms.remembered += 1
        key = resident_key(param_data(candidate.parameter), remembered)
        copy = self._copies.choose(key, candidate.name)
        resident = registry.lookup(key, copy)
        if resident is None:
            self._copies.release(key, copy)
            return False
        self._take(candidate.parameter, resident, copy, made=False)
        return True

    def _candidates(self, items: Sequence[NamedParameter]) -> list[DedupCandidate]:
        """Those to share. Of the others the reasons are kept, or the residents that they are."""
        together = overlapping(chain(self.model.parameters(), self.model.buffers()))
        for number in together & self._shares.keys():
            self._set_apart(number)
        memory = self._memory = ProcessMappings()
        resident = residents_of([parameter for _, parameter in items])
        chosen = []
        for name, parameter in items:
            found = resident.get(id(parameter))
            tied = id(parameter) in together
            if found is not None and tied:  # nobody else here gets what it is
                self._copies.claim(*found[0])
            reason = self._reason(parameter, together) if found is None or tied else None
            if reason is None and found is None and memory.is_common(parameter):
                reason = "other processes can write to its memory"
            if reason is not None:
                self._reasons[id(parameter)] = reason
            elif found is not None and self._copies.claim(*found[0]):
                (_, copy), behind = found
                before = behind not in self._terms.own
                self._shares[id(parameter)] = ReplicaShare(parameter, behind, copy, False, before)
            elif parameter.nbytes:
                origins = self._terms.origins
                place = None if origins is None else origins.place(parameter, memory)
                chosen.append(DedupCandidate(name, parameter, param_data(parameter), place))
        return chosen

    def _reason(self, parameter: nn.Parameter, together: set[int]) -> str | None:
        """Why this parameter is left alone, or None."""
        reason = reason_of_class(parameter)
        if reason is not None:
            return reason
        if parameter.is_meta:
            return "it is not in memory (meta)"
        if parameter.device.type != "cpu":
            return f"it came to {parameter.device.type} by itself; load in host memory, then move"
        if not sharable(param_data(parameter)):
            return "its type or layout cannot be shared"
        if id(parameter) in together or self._part_again(parameter):
            return SHARED_STORAGE
        if parameter.nbytes < self._terms.config.min_tensor_bytes:
            return "it is below min_tensor_bytes"
        return None

    def _part_again(self, tensor: torch.Tensor) -> bool:
        """Had one that is shared the memory that this one has? Then neither is shared."""
        formers = self._formers.overlapping(tensor)
        for former in formers:
            share = self._set_apart(id(former.parameter))
            if share is not None:
                self._copies.release(share.resident.key, share.copy)
                former.restore(param_data(tensor).untyped_storage())
        return bool(formers)

    def _set_apart(self, number: int) -> ReplicaShare | None:
        """Leave one that was shared as it is now: another one of the model has its memory."""
        share = self._shares.pop(number, None)
        if share is not None:
            self._reasons[number] = SHARED_STORAGE
        return share

    def _make(self, batch: HashBatch, missing: Sequence[MissingResident]) -> None:
        try:
            made = batch.make(missing) if missing else []
        except SharedMemoryError as error:
            self._reasons.update((id(each.candidate.parameter), str(error)) for each in missing)
            return
        for each, (resident, new) in zip(missing, made, strict=True):
            if new:
                self._terms.own.add(resident)
                came_up(resident, each.candidate.name)
            self._take(each.candidate.parameter, resident, each.copy, made=new)

    def _take(self, parameter: nn.Parameter, resident: Resident, copy: int, *, made: bool) -> None:
        if not made and not self._equal(resident, parameter):
            self._reasons[id(parameter)] = COLLISION
            return
        try:
            shared = map_shared(resident)
        except SharedMemoryError as error:
            self._reasons[id(parameter)] = str(error)
            return
        self._formers.enter(parameter)
        set_param_data(parameter, shared)
        before = not made and resident not in self._terms.own
        self._shares[id(parameter)] = ReplicaShare(parameter, resident, copy, made, before)
        self._reasons.pop(id(parameter), None)

    def _equal(self, resident: Resident, parameter: nn.Parameter) -> bool:
        """On a hit: compare when asked to. Counts a collision, or AuditError."""
        config = self._terms.config
        audited = config.audit > 0 and self._terms.rng.random() < config.audit
        if not (config.verifies_bytes or audited):
            return True
        if same_bytes(param_data(parameter), resident.map(writable=False)):
            return True
        if not config.verifies_bytes:
            raise_audit(f"a tensor of {resident.key.digest}", "the resident", "its equal")
        self._terms.collisions += 1
        return False

    def _let_files_go(self) -> None:
        """Copy what is left of checkpoint files in memory: one small tensor pins a whole file."""
        memory = ProcessMappings()
        tied = overlapping(chain(self.model.parameters(), self.model.buffers()))
        for parameter in self.model.parameters():
            plain = type(parameter) is nn.Parameter and id(parameter) not in self._shares
            if plain and id(parameter) not in tied:
                _copy_out(parameter, memory)
        for buffer in self.model.buffers():
            if id(buffer) not in tied:
                _copy_out(buffer, memory)

    def _account(self) -> None:
        self._reasons |= self._on_gpus.reasons
        for name, parameter in self.model.named_parameters():
            share = self._shares.get(id(parameter)) or self._on_gpus.shares.get(id(parameter))
            if share is not None:
                self.ledger.add(name, parameter.nbytes, shared=share.before, made=share.made)
            elif parameter.nbytes:
                self.ledger.add(name, parameter.nbytes, shared=False)
                self.ledger.skip(name, self._reasons[id(parameter)])


def _is_as_read(candidate: DedupCandidate) -> bool:
    """Is the parameter what was read? The loader went on; a file's page is copied by a write."""
    data, read = param_data(candidate.parameter), candidate.data
    same = (data.data_ptr(), data.shape, data.stride(), data.dtype) == (
        read.data_ptr(), read.shape, read.stride(), read.dtype,
    )  # fmt: skip
    return same and (candidate.place is None or is_as_mapped(read.data_ptr(), read.nbytes))


def _copy_out(tensor: torch.Tensor, memory: ProcessMappings) -> None:
    if memory.file(tensor) is not None:
        set_param_data(tensor, param_data(tensor).clone(memory_format=torch.preserve_format))


def _find(model: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter of that name; None for a buffer."""
    path, _, last = name.rpartition(".")
    return model.get_submodule(path)._parameters.get(last)


def _batches(items: Iterable[NamedParameter]) -> Iterator[list[NamedParameter]]:
    """Runs that fill a slab each, a large tensor by itself; one at a time in memory."""
    batch: list[NamedParameter] = []
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
