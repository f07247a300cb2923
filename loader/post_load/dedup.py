"""Share the parameters of a model that Diffusers or Transformers loads, or has loaded.

These libraries cast and merge tensors themselves, so the finished parameters are hashed. A
parameter remains the same object and gets another storage: a mapping of the *resident*, the shared
tensor in memory, that has its bytes. `ModuleDedup` takes a parameter through these steps:

    note or settle     the loader has finished the parameter, or the whole model is complete
    candidates         decide whether it can be shared, and record the reason if not
    hash               hash it, in batches, in the background if later changes can be detected
    find               look up a resident with its bytes that no other parameter of the model has
    install            replace its memory by a mapping of that resident
    build              build a resident if there is none, and install it
    account            record in the ledger what was shared and built, and the reasons for the rest
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import nn

from tensor_dedup.loader.cuda.blocks import spare_descriptors
from tensor_dedup.loader.cuda.new_slabs import BATCH_BYTES, OWN_SLAB_BYTES, slab_batches
from tensor_dedup.loader.not_shared import LoadLedger, NotShared
from tensor_dedup.loader.post_load.batch import (
    DedupCandidate,
    DedupContext,
    HashBatch,
    MissingResident,
    reason_of_class,
)
from tensor_dedup.loader.post_load.equal_untied import (
    ReplicaAssigner,
    ReplicaShare,
    note_first_name,
    note_root,
    root_module,
)
from tensor_dedup.loader.post_load.known_leaves import known_tensor, note_leaves
from tensor_dedup.loader.post_load.on_gpu import GpuModuleDedup, GpuShare
from tensor_dedup.loader.post_load.replaced_storages import ReplacedStorages
from tensor_dedup.loader.residents.compare import raise_audit, same_bytes
from tensor_dedup.loader.residents.mappings import is_as_mapped
from tensor_dedup.loader.residents.param_data import overlapping, param_data, set_param_data
from tensor_dedup.loader.residents.process_mappings import ProcessMappings
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM, registry
from tensor_dedup.loader.residents.resident import Resident, resident_key, sharable
from tensor_dedup.loader.residents.slab import MappingLimitError, SharedMemoryError
from tensor_dedup.loader.unsharing.lookup import is_mapping_of, residents_of
from tensor_dedup.loader.unsharing.private import map_shared

if TYPE_CHECKING:
    from tensor_dedup.loader.post_load.batch import NamedParameter

# A slab is a descriptor. Above this part of all that the process may have, they are saved.
_MANY_DESCRIPTORS: Final = 0.25
# Batches that are read while the loader goes on.
_UNDER_WAY: Final = 2


class _Found(NamedTuple):
    """A resident for a parameter; `made` tells that it was built for it just now."""

    parameter: nn.Parameter
    resident: Resident
    replica: int
    made: bool


class ModuleDedup:
    """The deduplication of one model. For one thread that holds the process-wide load lock.

    Parameters passed to `note` are read in the background while the loader continues, so call
    `settle` or `abandon` before the mapped files in `context` are closed. No thread may write to
    the parameters while a method runs. Two parameters of the model share memory only if the model
    ties them.
    """

    def __init__(self, model: nn.Module, context: DedupContext) -> None:
        self.model: Final = model
        self.ledger = LoadLedger()
        self._process: Final = os.getpid()
        self._context = context
        self._waiting: dict[int, NamedParameter] = {}
        self._waiting_bytes = 0
        self._under_way: deque[HashBatch] = deque()
        self._begun: set[int] = set()
        self._unchecked: list[DedupCandidate] = []
        self._shares: dict[int, ReplicaShare] = {}
        self._reasons: dict[int, str] = {}
        self._replicas = ReplicaAssigner()
        self._replaced = ReplacedStorages()
        self._on_gpus = GpuModuleDedup(model, context)
        self._memory: ProcessMappings | None = None
        # A part of a model takes nothing that another part of it has.
        whole = root_module(model)
        if whole is not model:
            mine = {id(parameter) for parameter in model.parameters()}
            self._claim(each for each in whole.parameters() if id(each) not in mine)

    def note(self, name: str) -> None:
        """Announce that the loader has finished the parameter `name`, which may now be hashed.

        Nothing happens if `name` is a buffer, is not on the CPU, or was announced before.
        """
        parameter = _find_parameter(self.model, name)
        if parameter is None or parameter.device.type != "cpu":
            return
        if any(id(parameter) in each for each in (self._shares, self._waiting, self._begun)):
            return
        if _is_alone(parameter.nbytes):
            self._begin([(name, parameter)])
            return
        # Smaller ones wait until there is enough for a slab, or until their model is complete.
        self._waiting[id(parameter)] = name, parameter
        self._waiting_bytes += parameter.nbytes
        if self._waiting_bytes >= BATCH_BYTES:
            waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
            self._begin(list(waiting.values()))

    def settle(self) -> None:
        """Share all remaining parameters, and fill the ledger. The model must be complete."""
        self._waiting.clear()
        self._complete()
        self._forget_replaced()
        self._take_back_written()
        for buffer in self.model.buffers():
            self._restore_views_with(buffer)
        for batch in slab_batches(self._left(), _nbytes, _has_own_slab):
            self._begin(batch, wait=True)
        self._replicas.order(self.model.named_parameters(), self._shares)
        self._on_gpus.share(list(self._left()))
        self._copy_out_of_files()
        self._account()
        self._end()

    def abandon(self) -> None:
        """Wait until no thread reads parameters any more. Parameters not shared yet stay private.

        A forked child does not wait, because only its parent has these threads.
        """
        while self._under_way:
            if os.getpid() == self._process:
                self._under_way[0].abandon()
            self._under_way.popleft()
        self._begun.clear()
        self._unchecked.clear()

    def share_again(self, parameters: Container[int]) -> None:
        """Share the private parameters of the model whose ids are in `parameters`.

        The model must be complete. The ledger is not filled.
        """
        self._claim(each for each in self.model.parameters() if id(each) not in parameters)
        left = (item for item in self._left() if id(item[1]) in parameters)
        for batch in slab_batches(left, _nbytes, _has_own_slab):
            self._begin(batch, wait=True)
        self._replicas.order(self.model.named_parameters(), self._shares)
        self._end()

    def _end(self) -> None:
        note_root(self.model)
        self._shares.clear()
        self._replaced = ReplacedStorages()

    def _claim(self, parameters: Iterable[nn.Parameter]) -> None:
        for known, _ in residents_of(parameters).values():
            self._replicas.claim(*known)

    def _left(self) -> Iterator[NamedParameter]:
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in self._shares:
                yield name, parameter

    # Hashing, while the loader goes on.

    def _begin(self, items: Sequence[NamedParameter], *, wait: bool = False) -> None:
        """Start reading parameters; the loader continues where a later write would be seen."""
        self._complete(0 if wait else _UNDER_WAY - 1)
        began, hashed = time.perf_counter(), self._context.hash_seconds
        candidates = [each for each in self._candidates(items) if not self._share_by_hint(each)]
        assert self._memory is not None  # the candidates were looked for in it
        batch = HashBatch(candidates, self._context, self._memory)
        self._under_way.append(batch)
        self._begun.update(id(each.parameter) for each in candidates)
        batch.begin()
        spent = time.perf_counter() - began
        self._context.process_seconds += spent - (self._context.hash_seconds - hashed)
        if wait or not batch.is_all_files:
            self._complete(1)  # of what began before the loader may have changed something
            self._complete(checked=True)

    def _complete(self, under_way: int = 0, *, checked: bool = False) -> None:
        """Share what was read, except for `under_way` batches.

        `checked` tells that the loader did not continue meanwhile.
        """
        while len(self._under_way) > under_way:
            batch = self._under_way[0]
            digests = batch.digests()
            self._under_way.popleft()
            self._begun.difference_update(id(each.parameter) for each in batch.candidates)
            self._share(batch, digests, set() if checked else self._changed(batch))
            if not checked:
                self._unchecked += batch.candidates

    def _changed(self, batch: HashBatch) -> set[int]:
        """Return those that are not what was read, or are no longer the model's."""
        return {
            id(each.parameter)
            for each in batch.candidates
            if _find_parameter(self.model, each.name) is not each.parameter or not _is_as_read(each)
        }

    # Finding, installing and building residents.

    def _share(self, batch: HashBatch, digests: Sequence[str], changed: set[int]) -> None:
        began = time.perf_counter()
        hits, missing = self._find(batch, digests, changed)
        self._install(hits)
        self._install(self._build(batch, missing))
        self._context.process_seconds += time.perf_counter() - began

    def _find(
        self, batch: HashBatch, digests: Sequence[str], changed: set[int]
    ) -> tuple[list[_Found], list[MissingResident]]:
        """Look up what was hashed; return the residents found and what is missing."""
        hits, missing = [], []
        for number, (candidate, digest) in enumerate(zip(batch.candidates, digests, strict=True)):
            if id(candidate.parameter) in changed:  # what was hashed may be no file's
                # It is looked at once more when the model is complete.
                self._reasons[id(candidate.parameter)] = NotShared.CHANGED
                continue
            if candidate.file_range is not None and self._context.files is not None:
                self._context.files.learn(candidate.file_range, digest, batch.leaves(number))
            key = resident_key(candidate.data, digest)
            replica = self._replicas.choose(key, candidate.name)
            resident = registry.lookup(key, replica)
            if resident is None:
                missing.append(MissingResident(candidate, replica, digest, number))
            else:
                hits.append(_Found(candidate.parameter, resident, replica, made=False))
        return hits, missing

    def _share_by_hint(self, candidate: DedupCandidate) -> bool:
        """Share a resident that a hint names, without reading; False means it must be hashed."""
        remembered = None if candidate.file_range is None else candidate.file_range.remembered
        if remembered is None:
            self._context.unknown += 1
            return False
        self._context.remembered += 1
        key = resident_key(param_data(candidate.parameter), remembered)
        replica = self._replicas.choose(key, candidate.name)
        resident = registry.lookup(key, replica)
        made = False
        if resident is None and replica == 0:
            resident, made = self._build_known(candidate)
        if resident is None:
            self._replicas.release(key, replica)
            return False
        self._install([_Found(candidate.parameter, resident, replica, made)])
        return True

    def _build_known(self, candidate: DedupCandidate) -> tuple[Resident | None, bool]:
        """Build what hints know leaf by leaf of what others have, reading only the rest.

        Return the resident, or None where nobody has a part, and whether it is new.
        """
        known = known_tensor(candidate, self._context)
        if known is None:
            return None, False
        found = self._context.provider.share_known(
            known, lambda built: self._equal(built, candidate.parameter)
        )
        if found is None:
            return None, False
        resident, made = found
        if made:
            note_first_name(resident, candidate.name)
        return resident, made

    def _build(self, batch: HashBatch, missing: Sequence[MissingResident]) -> list[_Found]:
        try:
            built = batch.build(missing) if missing else []
        except SharedMemoryError as error:
            self._reasons.update((id(each.candidate.parameter), str(error)) for each in missing)
            return []
        for each, (resident, made) in zip(missing, built, strict=True):
            if made:
                self._context.built.add(resident)
                note_first_name(resident, each.candidate.name)
                note_leaves(resident, each.candidate, self._context)
        return [
            _Found(each.candidate.parameter, resident, each.replica, made)
            for each, (resident, made) in zip(missing, built, strict=True)
        ]

    def _install(self, found: Iterable[_Found]) -> None:
        """Give each parameter a mapping of its resident, or keep it private with the reason."""
        for parameter, resident, replica, made in found:
            if not made and not self._equal(resident, parameter):
                self._reasons[id(parameter)] = NotShared.COLLISION
                continue
            try:
                shared = map_shared(resident)
            except SharedMemoryError as error:
                self._reasons[id(parameter)] = str(error)
                if isinstance(error, MappingLimitError):
                    # The parameter is looked at again in the end, and may become a replica.
                    self._context.provider.note_not_by_leaf(str(error))
                continue
            self._replaced.enter(parameter)
            set_param_data(parameter, shared)
            before = not made and resident not in self._context.built
            self._shares[id(parameter)] = ReplicaShare(parameter, resident, replica, made, before)
            self._reasons.pop(id(parameter), None)

    def _equal(self, resident: Resident, parameter: nn.Parameter) -> bool:
        """Compare a hit with the parameter if asked to, counting a collision.

        Raises:
            AuditError: An audit found other bytes.
        """
        config = self._context.config
        audited = config.audit > 0 and self._context.rng.random() < config.audit
        if not (config.verifies_bytes or audited):
            return True
        if same_bytes(param_data(parameter), resident.seen()):
            return True
        if not config.verifies_bytes:
            raise_audit(f"a tensor of {resident.key.digest}", "the resident", "its equal")
        self._context.collisions += 1
        return False

    # Which parameters are candidates, and what a loader has done to them since.

    def _candidates(self, items: Sequence[NamedParameter]) -> list[DedupCandidate]:
        """Return those to share; record the others' reasons, or the residents that they are."""
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
                self._replicas.claim(*found[0])
            reason = self._reason(parameter, together) if found is None or tied else None
            if reason is None and found is None and memory.is_common(parameter):
                reason = NotShared.WRITABLE_BY_OTHERS
            if reason is not None:
                self._reasons[id(parameter)] = reason
            elif found is not None and self._replicas.claim(*found[0]):
                (_, replica), behind = found
                before = behind not in self._context.built
                share = ReplicaShare(parameter, behind, replica, made=not before, before=before)
                self._shares[id(parameter)] = share
            elif parameter.nbytes:
                files = self._context.files
                file_range = None if files is None else files.range_of(parameter, memory)
                chosen.append(DedupCandidate(name, parameter, param_data(parameter), file_range))
        return chosen

    def _reason(self, parameter: nn.Parameter, together: set[int]) -> str | None:
        """Return why this parameter stays private, or None."""
        reason = reason_of_class(parameter)
        if reason is not None:
            return reason
        if parameter.is_meta:
            return NotShared.META
        if parameter.device.type != "cpu":
            return f"it came to {parameter.device.type} by itself; load in host memory, then move"
        if not sharable(param_data(parameter)):
            return NotShared.UNSHARABLE_LAYOUT
        if id(parameter) in together or self._restore_views_with(parameter):
            return NotShared.SHARED_STORAGE
        if parameter.nbytes < self._context.config.min_tensor_bytes:
            return NotShared.BELOW_MIN_BYTES
        return None

    def _restore_views_with(self, tensor: torch.Tensor) -> bool:
        """Restore the shared parameters that were views of this tensor's memory, if any.

        Returns whether there were any; then neither they nor this tensor are shared.
        """
        views = self._replaced.overlapping(tensor)
        for view in views:
            share = self._set_apart(id(view.parameter))
            if share is not None:
                self._replicas.release(share.resident.key, share.replica)
                view.restore(param_data(tensor).untyped_storage())
        return bool(views)

    def _set_apart(self, number: int) -> ReplicaShare | None:
        """Stop sharing a parameter, left as it is now: another one of the model uses its memory."""
        share = self._shares.pop(number, None)
        if share is not None:
            self._reasons[number] = NotShared.SHARED_STORAGE
        return share

    def _forget_replaced(self) -> None:
        """Forget the shares of parameters to which a loader has given other memory since."""
        for number, share in list(self._shares.items()):
            if not is_mapping_of(share.parameter, share.resident):
                del self._shares[number]
                self._replicas.release(share.resident.key, share.replica)

    def _take_back_written(self) -> None:
        """Undo the sharing of what was written since through a view that a loader has kept."""
        for each in self._unchecked:
            share = self._shares.get(id(each.parameter))
            if share is not None and not is_as_mapped(each.data.data_ptr(), each.data.nbytes):
                del self._shares[id(each.parameter)]
                self._replicas.release(share.resident.key, share.replica)
                set_param_data(each.parameter, each.data)
        self._unchecked.clear()

    # The end of a load.

    def _copy_out_of_files(self) -> None:
        """Copy the rest of checkpoint files into memory: one small tensor pins a whole file."""
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
                made = share.made and self._counts(share)
                self.ledger.add(name, parameter.nbytes, shared=share.before, made=made)
                if made:
                    here = share.resident if isinstance(share, ReplicaShare) else share
                    self.ledger.note_leaves(here.leaf_shared_bytes)
            elif parameter.nbytes:
                self.ledger.add(name, parameter.nbytes, shared=False)
                self.ledger.skip(name, self._reasons[id(parameter)])

    def _counts(self, share: ReplicaShare | GpuShare) -> bool:
        """Return whether what was made is counted here: models of one load may each have it."""
        if not isinstance(share, ReplicaShare):
            return True
        counted = share.resident in self._context.accounted
        self._context.accounted.add(share.resident)
        return not counted


def _is_as_read(candidate: DedupCandidate) -> bool:
    """Return whether the parameter is what was read, although the loader continued.

    A write to a mapped page of a file copies that page, and so can be detected.
    """
    data, read = param_data(candidate.parameter), candidate.data
    same = (data.data_ptr(), data.shape, data.stride(), data.dtype) == (
        read.data_ptr(), read.shape, read.stride(), read.dtype,
    )  # fmt: skip
    return same and (candidate.file_range is None or is_as_mapped(read.data_ptr(), read.nbytes))


def _copy_out(tensor: torch.Tensor, memory: ProcessMappings) -> None:
    if memory.file(tensor) is not None:
        set_param_data(tensor, param_data(tensor).clone(memory_format=torch.preserve_format))


def _find_parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter of that name, or None for a buffer."""
    *path, last = name.split(".")
    module: nn.Module = functools.reduce(getattr, path, model)
    return module._parameters.get(last)


def _is_alone(nbytes: int) -> bool:
    """Return whether a tensor of this size has a slab of its own.

    What others may take leaves of has, because nobody keeps a slab of many tensors for some leaves;
    but a model may have tens of thousands of such experts.
    """
    if nbytes < LEAF_SHARED_FROM or nbytes >= OWN_SLAB_BYTES:
        return nbytes >= OWN_SLAB_BYTES
    return spare_descriptors(_MANY_DESCRIPTORS) > 0


def _has_own_slab(item: NamedParameter) -> bool:
    return _is_alone(item[1].nbytes)


def _nbytes(item: NamedParameter) -> int:
    return item[1].nbytes
