"""A load session: look up each final tensor, compute it if it is missing, and install it.

A *final tensor* is a weight as the engine uses it, and a *resident* is a final tensor in memory
that models share. `SharingPlan` decides which tensors are shared, `RecipeLookup` finds residents,
`HitChecks` compares them if the configuration asks for it, and `ModelMemory` puts them into the
model. Tensors that vLLM's own processing computes are shared by
`computed_tensors.share_by_content`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tensor_dedup.loader.deferred.evaluate import Prefetcher
from tensor_dedup.loader.deferred.hit_checks import HitChecks
from tensor_dedup.loader.deferred.known_contents import known_tensor
from tensor_dedup.loader.deferred.model_memory import ModelMemory
from tensor_dedup.loader.deferred.recipe import RecipeBook, composite_digest, whole_source
from tensor_dedup.loader.deferred.recipe_lookup import RecipeLookup
from tensor_dedup.loader.deferred.sharing_plan import SharingPlan
from tensor_dedup.loader.deferred.storage import as_view
from tensor_dedup.loader.deferred.straight_reads import unread_tensor
from tensor_dedup.loader.not_shared import LoadLedger, NotShared, WhyRead
from tensor_dedup.loader.residents.manager import ResidentRequest
from tensor_dedup.loader.residents.provider import HostProvider
from tensor_dedup.loader.residents.resident import (
    key_anywhere,
    read_into_slab,
    sharable,
    tensor_bytes,
)
from tensor_dedup.loader.residents.slab import SharedMemoryError

if TYPE_CHECKING:
    import torch

    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.checkpoint_io.sources import SourceReader, SourceTensor
    from tensor_dedup.loader.cuda.residents import UnreadTensor
    from tensor_dedup.loader.deferred.evaluate import Evaluator, Scratch
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.deferred.straight_reads import ReadsStraight
    from tensor_dedup.loader.residents.provider import AnyResident, ResidentProvider

_log = logging.getLogger(__name__)
# What is larger is read straight into shared memory, at 0.7 s a GB more: threads that write to one
# memory file do so in turns. So no load needs more memory beside its model than this for a tensor.
STREAM_BYTES = 512 << 20


@dataclass(slots=True)
class ScratchTensor:
    """A final tensor computed in scratch memory, valid until `LoadSession.give_back`.

    `block` is the piece of scratch memory in which `tensor` lies. Set `escaped` if other code keeps
    using the memory, so that the memory is not reused.
    """

    block: torch.Tensor
    tensor: torch.Tensor
    escaped: bool = False


class Missed(NamedTuple):
    """A final tensor in scratch memory of which there is no resident, and its digests."""

    parameter: DeferredParameter
    made: ScratchTensor
    digest: str
    leaves: Sequence[bytes]


@dataclass(slots=True)
class LoadSession:
    """The state of one load: its configuration, reader, providers and ledger.

    For one thread that holds the process-wide load lock.
    """

    config: TensorDedupConfig
    reader: SourceReader
    scratch: Scratch
    evaluator: Evaluator
    provider: ResidentProvider = field(default_factory=HostProvider)
    straight: ReadsStraight | None = None  # for a load onto a GPU
    ledger: LoadLedger = field(default_factory=LoadLedger)
    book: RecipeBook = field(default_factory=RecipeBook)
    ahead: Prefetcher = field(init=False)
    plan: SharingPlan = field(init=False)
    lookup: RecipeLookup = field(init=False)
    checks: HitChecks = field(init=False)
    memory: ModelMemory = field(init=False)

    def __post_init__(self) -> None:
        self.ahead = Prefetcher(self.reader, self.scratch, self.evaluator)
        self.plan = SharingPlan(self.config, self.provider, self.evaluator)
        self.lookup = RecipeLookup(self.plan, self.provider, self.book)
        self.checks = HitChecks(self.config, self.provider, self.ledger)
        self.memory = ModelMemory(self.evaluator, self.provider, self.ledger)

    def close(self) -> None:
        """Wait for reads in progress, and release residents that were found but not installed."""
        self.reader.abandon()
        self.ahead.close()
        self.lookup.close()

    def expect(self, parameters: Sequence[DeferredParameter]) -> None:
        """Announce `parameters`, all final tensors of the load in order of use.

        Call this before any other method.
        """
        self.plan.expect(parameters)
        self.ahead.plan(parameters)

    def make(self, each: DeferredParameter) -> ScratchTensor:
        """Compute the final tensor `each` in scratch memory.

        Source tensors that are read are hashed, too, if a shared tensor needs their digests. Pass
        the result to `give_back` when it is not needed any more.
        """
        view = each.require_view()
        block = self.ahead.take(each)
        if block is None:
            block = self.scratch.take(view.storage.nbytes)
            self.evaluator.fill(view, block[: view.storage.nbytes])
        self._read_ahead()
        return ScratchTensor(block, as_view(block[: view.storage.nbytes], view))

    def _read_ahead(self) -> None:
        self.ahead.begin(lambda each: self.plan.must_be_read(each) and self._unread(each) is None)

    def give_back(self, made: ScratchTensor | None) -> None:
        """Return the scratch memory of `made` to the pool; do nothing for None."""
        if made is not None and made.escaped:
            self.scratch.forget(made.block)
        elif made is not None:
            self.scratch.give_back(made.block)

    def content_digest(
        self, each: DeferredParameter, tensor: torch.Tensor, *, trusted: bool = True
    ) -> str:
        """Return a digest of the content of the parameter `each`, made from digests of its parts.

        `tensor` has the parameter's bytes. With `trusted`, known digests of source tensors are
        used. Without `trusted`, all bytes are hashed.
        """
        view = each.require_view()
        if trusted and (source := whole_source(view)) is not None and source.digest is not None:
            return source.digest
        return composite_digest(view, tensor_bytes(tensor), self.reader.digest, trusted=trusted)

    def share(
        self, parameters: Sequence[DeferredParameter], made: ScratchTensor | None = None
    ) -> None:
        """Install `parameters` in the model, shared if possible and otherwise private.

        Parameters that are installed already are skipped. If `parameters` is a single parameter
        whose content was computed already, pass the content as `made`. The caller must still give
        `made` back with `give_back`.
        """
        parameters = [each for each in parameters if not each.installed]
        if made is None and parameters:
            self.lookup.find(parameters)
        unread: list[tuple[DeferredParameter, UnreadTensor]] = []
        awaited: set[str] = set()
        missed: list[DeferredParameter] = []
        for each in parameters:
            reason = self.plan.reason(each)
            if reason is not None:
                content = None if made is None else made.tensor
                self.memory.keep_private(each, reason, content)
            elif made is not None or not self._share_known(each):
                one = self._unread(each) if made is None else None
                if one is None or self._is_awaited(each, awaited):
                    missed.append(each)
                    continue
                unread = self._with_room_for(each, unread)
                unread.append((each, one))
        self._read_straight(unread)
        self._share_missed(missed, made)

    def _share_missed(
        self, parameters: Sequence[DeferredParameter], made: ScratchTensor | None = None
    ) -> None:
        """Compute tensors in host memory, and share them by their content.

        Those that have been made meanwhile, as equals of others, are found without being computed.
        """
        small: list[Missed] = []
        for each in parameters:
            resident = self.lookup.take(each) if made is None else None
            if resident is not None:
                self._install_checked(each, resident)
                continue
            missed = self._share_by_content(each, made)
            if missed is None:
                continue
            if each.nbytes >= self.provider.own_slab_bytes or made is not None:
                self._publish([missed], borrowed=made is None)
                continue
            small.append(missed)
            if sum(one.parameter.nbytes for one in small) >= self.provider.batch_bytes:
                self._publish(small, borrowed=True)
                small = []
        self._publish(small, borrowed=True)

    def _share_known(self, each: DeferredParameter) -> bool:
        """Install a tensor that is known by its recipe, or of which others have known parts."""
        resident = self.lookup.take(each)
        if resident is not None:
            self._install_checked(each, resident)
            return True
        return self._share_known_contents(each)

    def _unread(self, each: DeferredParameter) -> UnreadTensor | None:
        """Describe a tensor that goes straight from its files to the GPU; None: it does not."""
        if self.straight is None or self.config.hash_algorithm != "blake3":
            return None
        # What is compared is needed in host memory.
        if self.config.verifies_bytes or self.config.audit or self.ahead.has(each):
            return None
        return unread_tensor(each, self.evaluator, self.reader, self.lookup.key)

    def _is_awaited(self, each: DeferredParameter, awaited: set[str]) -> bool:
        """Return whether an equal tensor is to be read; if not, add the key of `each`, if known."""
        key = self.lookup.key(each) if each.known else None
        if key is None or key in awaited:
            return key is not None
        awaited.add(key)
        return False

    def _with_room_for(
        self,
        each: DeferredParameter,
        unread: list[tuple[DeferredParameter, UnreadTensor]],
    ) -> list[tuple[DeferredParameter, UnreadTensor]]:
        """Read what was collected, unless one more tensor fits; return what is still to be read."""
        assert self.straight is not None
        size = sum(one.nbytes for one, _ in unread)
        if not unread or size + each.nbytes <= self.straight.round_bytes:
            return unread
        self._read_straight(unread)
        return []

    def _read_straight(self, unread: Sequence[tuple[DeferredParameter, UnreadTensor]]) -> None:
        """Read tensors from their files to the GPU, and install them.

        Raises:
            StaleHintError: What was read is not what was remembered.
        """
        if not unread or self.straight is None:
            return
        began = time.perf_counter()
        found: Sequence[tuple[AnyResident, bool]] | None = None
        try:
            found = self.straight.build_unread([one for _, one in unread])
        except SharedMemoryError as error:
            _log.debug("read into host memory first: %s", str(error))
        finally:
            self.reader.counters.read_seconds += time.perf_counter() - began
        if found is None:
            # There may be room for those of which nobody has the bytes, and that of the attempt is
            # free again: the error, which refers to it, is gone.
            self._share_missed([each for each, _ in unread])
            return
        for (each, _), (resident, made) in zip(unread, found, strict=True):
            self.memory.install(each, resident, made=made)
            self.lookup.note(each, resident)
            self._note_contents(each, resident)

    def _install_checked(self, each: DeferredParameter, resident: AnyResident) -> None:
        """Install a hit by recipe, compared first where verify_bytes or audit ask for it."""
        if self._is_as_loaded(each, "the resident", resident):
            self.memory.install(each, resident)

    def _is_as_loaded(self, each: DeferredParameter, shared: str, resident: AnyResident) -> bool:
        """Compare what was not read with the checkpoint, where verify_bytes or audit ask for it.

        If it differs, the tensor is installed privately, and this returns False. `shared` describes
        the resident in the error.

        Raises:
            AuditError: An audit found other bytes.
        """
        if not self.checks.asked():
            return True
        self.ledger.why_read[each.name] = WhyRead.COMPARED
        made = self.make(each)
        equal = self.checks.is_as_loaded(each.name, resident, made.tensor, shared)
        if not equal:
            self.memory.keep_private(each, NotShared.COLLISION, made.tensor)
        self.give_back(made)
        return equal

    def _share_by_content(
        self, each: DeferredParameter, made: ScratchTensor | None
    ) -> Missed | None:
        """Install a resident with these bytes; return the bytes and their digests on a miss."""
        if made is None and (source := self._streamed_source(each)) is not None:
            self._stream(each, source)
            return None
        here = made if made is not None else self.make(each)
        if not sharable(here.tensor):
            self.memory.keep_private(each, NotShared.UNSHARABLE_LAYOUT, here.tensor)
            self._give_back_own(here, made)
            return None
        source = whole_source(each.require_view())
        leaves: list[bytes] = []
        known = source.digest if source is not None else None
        name = known if known is not None else self.reader.digest_of(here.tensor, leaves)
        resident = self.provider.by_content(key_anywhere(here.tensor, name))
        if resident is None:
            return Missed(each, here, name, leaves)
        if self.checks.agrees(resident, here.tensor):
            self.lookup.note(each, resident)
            self.memory.install(each, resident)
        else:
            self.memory.keep_private(each, NotShared.COLLISION, here.tensor)
        self._give_back_own(here, made)
        return None

    def _share_known_contents(self, each: DeferredParameter) -> bool:
        """Install a tensor that others have parts of, reading only the rest; return whether so.

        This is for a tensor of source tensors side by side, all with digests.

        Raises:
            StaleHintError: What was read is not what was remembered.
            AuditError: An audit found that others do not have these parts.
        """
        known = known_tensor(each, self.lookup.key, self.reader)
        if known is None:
            return False

        def accept(built: AnyResident) -> bool:
            self.ledger.why_read[each.name] = WhyRead.REST
            return self._is_as_loaded(each, "the leaves of others", built)

        found = self.provider.share_known(known, accept)
        if found is None:
            return each.installed  # privately, if it is not as loaded
        resident, made = found
        if made or self._is_as_loaded(each, "the resident", resident):
            self.memory.install(each, resident, made=made)
            self.lookup.note(each, resident)
        return True

    def _note_contents(self, each: DeferredParameter, resident: AnyResident) -> None:
        """Remember what a resident consists of whose sources have all been read."""
        known = known_tensor(each, self.lookup.key, self.reader)
        if known is not None:
            self.provider.note_contents(resident, known.contents)

    def is_streamed(self, each: DeferredParameter) -> bool:
        """Return whether the parameter `each` is read directly into shared memory.

        This is done for very large parameters, and uses no scratch memory.
        """
        return self._streamed_source(each) is not None

    def _streamed_source(self, each: DeferredParameter) -> SourceTensor | None:
        """Return the tensor's only source if it is read directly into shared memory, or None.

        This is for tensors so large that a second copy might not fit, unless it is being read
        already.
        """
        if each.installed or each.nbytes <= STREAM_BYTES or self.config.hash_algorithm != "blake3":
            return None
        if self.ahead.has(each) or not self.provider.local or self.plan.reason(each) is not None:
            return None
        alone = self.evaluator.alone(each.require_view())
        return None if id(alone) in self.evaluator.unhashed else alone

    def _stream(self, each: DeferredParameter, source: SourceTensor) -> None:
        read = partial(self.reader.read_pieces, source)
        assert isinstance(self.provider, HostProvider)  # no other is local
        try:
            resident = read_into_slab(each.geometry, each.nbytes, read)
            first, made = self.provider.enter_read(resident)
        except SharedMemoryError as error:
            self.memory.keep_private(each, str(error))
            return
        self._read_ahead()
        self._note_contents(each, first)
        if not made and not self.checks.agrees(first, tensor := resident.seen()):
            self.memory.keep_private(each, NotShared.COLLISION, tensor)
            return
        self.memory.install(each, first, made=made)
        self.lookup.note(each, first)

    def _give_back_own(self, here: ScratchTensor, lent: ScratchTensor | None) -> None:
        if here is not lent:
            self.give_back(here)

    def _publish(self, missed: Sequence[Missed], *, borrowed: bool) -> None:
        if not missed:
            return
        wanted = [
            ResidentRequest(
                self.lookup.key(one.parameter), one.made.tensor, one.digest, leaves=one.leaves
            )
            for one in missed
        ]
        try:
            residents = self.provider.get_or_build(wanted)
        except SharedMemoryError as error:
            self._publish_nothing(missed, str(error), borrowed=borrowed)
            return
        for (each, made, _, _), (resident, new) in zip(missed, residents, strict=True):
            # Somebody may have come first, be it another tensor of this very call.
            if self.checks.agrees(resident, made.tensor, new=new):
                self.memory.install(each, resident, made=new)
                self.lookup.note(each, resident)
                self._note_contents(each, resident)
            else:
                self.memory.keep_private(each, NotShared.COLLISION, made.tensor)
            if borrowed:
                self.give_back(made)

    def _publish_nothing(self, missed: Sequence[Missed], reason: str, *, borrowed: bool) -> None:
        """Keep tensors private for lack of shared memory; the model loads all the same."""
        for each, made, _, _ in missed:
            self.memory.keep_private(each, reason, made.tensor)
            if borrowed:
                self.give_back(made)
