"""A load session: final tensors are looked up, built where nobody has them, and installed.

Tensors that vLLM's own processing computed are shared through `share_by_content`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from tensor_dedup.digest import digest
from tensor_dedup.loader.checkpoint_io.sources import raise_stale
from tensor_dedup.loader.cuda.residents import DeviceResident
from tensor_dedup.loader.deferred.evaluate import Prefetcher
from tensor_dedup.loader.deferred.layer_key import process_state
from tensor_dedup.loader.deferred.parameters import DeferredParameter, replace_data
from tensor_dedup.loader.deferred.recipe import (
    RecipeBook,
    composite_digest,
    drop_what_is_overwritten,
    parts_of,
    reason_to_keep_private,
    whole_source,
)
from tensor_dedup.loader.deferred.storage import View, as_view
from tensor_dedup.loader.ledger import LoadLedger, NotShared
from tensor_dedup.loader.residents.compare import raise_audit, same_bytes
from tensor_dedup.loader.residents.leaves import Content, build_from_contents
from tensor_dedup.loader.residents.manager import ResidentQuery, ResidentRequest
from tensor_dedup.loader.residents.provider import HostProvider
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM, registry
from tensor_dedup.loader.residents.resident import (
    Resident,
    Write,
    key_anywhere,
    read_into_slab,
    sharable,
    tensor_bytes,
)
from tensor_dedup.loader.residents.slab import SharedMemoryError
from tensor_dedup.loader.torch_dtypes import dtype_name, has_name
from tensor_dedup.types import ResidentKey

if TYPE_CHECKING:
    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.checkpoint_io.sources import SourceReader, SourceTensor
    from tensor_dedup.loader.deferred.evaluate import Evaluator, Scratch
    from tensor_dedup.loader.residents.provider import Admit, AnyResident, ResidentProvider

# What is larger is read straight into shared memory, at 0.7 s a GB more: threads that write to one
# memory file do so in turns. So no load needs more memory beside its model than this for a tensor.
STREAM_BYTES = 512 << 20

Named = tuple[str, "torch.Tensor"]
Found = tuple["AnyResident | None", bool]
_KnownPart = tuple["SourceTensor | None", Content]
# What is smaller shares a slab with others of its layer. A slab is a descriptor, and a quantised
# layer has several tensors where another has one.
_OWN_SLAB_BYTES = 16 << 20
# What is smaller yet is often equal in models that have nothing else in common, and a slab stays as
# long as one tensor of it: these share one among themselves.
_SMALL_BYTES = 64 << 10


@dataclass(slots=True)
class ScratchTensor:
    """A final tensor computed in scratch memory, valid until the block is given back.

    `escaped` tells that something keeps using the memory, so that it is never lent again.
    """

    block: torch.Tensor
    tensor: torch.Tensor
    escaped: bool = False


@dataclass(slots=True)
class LoadSession:
    """The state of one load. For one thread that holds the process-wide load lock."""

    config: TensorDedupConfig
    reader: SourceReader
    scratch: Scratch
    evaluator: Evaluator
    provider: ResidentProvider = field(default_factory=HostProvider)
    ledger: LoadLedger = field(default_factory=LoadLedger)
    book: RecipeBook = field(default_factory=RecipeBook)
    aliased: set[int] = field(default_factory=set)  # storages that several parameters share
    own: WeakSet[object] = field(default_factory=WeakSet)  # residents and records of this load
    _flat: dict[int, torch.Tensor] = field(default_factory=dict)
    _hits: dict[int, AnyResident] = field(default_factory=dict)  # by id of the parameter
    _state: str = field(default_factory=process_state)
    _rng: random.Random = field(default_factory=random.Random)
    ahead: Prefetcher = field(init=False)

    def __post_init__(self) -> None:
        self.ahead = Prefetcher(self.reader, self.scratch, self.evaluator)

    def close(self) -> None:
        """Wait for reads in progress, and release what was found and not installed."""
        self.reader.abandon()
        self.provider.close()
        self.ahead.close()
        self._hits.clear()

    def expect(self, parameters: Sequence[DeferredParameter]) -> None:
        """Announce the final tensors of the load, before the first is used."""
        seen: set[int] = set()
        for each in parameters:
            if each.view is not None:
                storage = id(each.view.storage)
                self.aliased.update({storage} & seen)
                seen.add(storage)
                self.evaluator.expect(each.view)
        drop_what_is_overwritten([each.view for each in parameters if each.view is not None])
        wanted = {id(s) for each in parameters for s in self._shareable_sources(each)}
        every = {id(s) for each in parameters for s in self.sources(each)}
        self.evaluator.unhashed = every - wanted
        self.ahead.plan(parameters)

    def sources(self, each: DeferredParameter) -> list[SourceTensor]:
        """Return the source tensors that the bytes of `each` follow from."""
        return each.sources

    def _shareable_sources(self, each: DeferredParameter) -> list[SourceTensor]:
        return [] if self.reason(each) is not None else self.sources(each)

    def known(self, each: DeferredParameter) -> bool:
        """Return whether every digest that the recipe needs is known."""
        return all(source.digest is not None for source in self.sources(each))

    def reason(self, each: DeferredParameter) -> str | None:
        """Return why this final tensor stays private, or None."""
        view = each.view
        if view is None:
            return NotShared.NOT_DEFERRED
        if not view.is_whole() or id(view.storage) in self.aliased:
            return NotShared.SHARED_STORAGE
        sources = self.sources(each)
        if each.private is not None or not sources:
            return each.private or NotShared.NOT_FROM_CHECKPOINT
        smallest = min(source.spec.nbytes for source in sources)
        if smallest < self.config.min_tensor_bytes:
            return f"a source of {smallest} bytes is below min_tensor_bytes"
        return reason_to_keep_private(view) or self.provider.reason(each.name)

    def make(self, each: DeferredParameter) -> ScratchTensor:
        """Compute a final tensor in scratch memory; afterwards its sources have digests."""
        view = _view(each)
        block = self.ahead.take(each)
        if block is None:
            block = self.scratch.take(view.storage.nbytes)
            self.evaluator.fill(view, block[: view.storage.nbytes])
        self.ahead.begin(self._must_be_read)
        return ScratchTensor(block, as_view(block[: view.storage.nbytes], view))

    def _must_be_read(self, each: DeferredParameter) -> bool:
        if each.installed or not each.sources or self.reason(each) is not None:
            return False
        return all(source.digest is None for source in each.sources)

    def give_back(self, made: ScratchTensor | None) -> None:
        """Return the scratch memory of `made`, if any."""
        if made is not None and made.escaped:
            self.scratch.forget(made.block)
        elif made is not None:
            self.scratch.give_back(made.block)

    def digest_of(self, tensor: torch.Tensor) -> str:
        """Return the digest of the bytes of a dense tensor on any device."""
        return self.reader.digest_of(tensor)

    def content_digest(
        self, each: DeferredParameter, tensor: torch.Tensor, *, trusted: bool = True
    ) -> str:
        """Return the composite digest of a parameter's bytes, which are those of `tensor`.

        With `trusted`, the digests of sources stand for their bytes; without it all bytes are
        hashed.
        """
        view = _view(each)
        if trusted and (source := whole_source(view)) is not None and source.digest is not None:
            return source.digest
        return composite_digest(view, tensor_bytes(tensor), self.reader.digest, trusted=trusted)

    def share(
        self, parameters: Sequence[DeferredParameter], made: ScratchTensor | None = None
    ) -> None:
        """Install these parameters in the model, shared where a resident has equal bytes.

        `made` may hold the content of the only parameter of the call; it is not given back.
        """
        if made is None:
            self.find(parameters)
        small: list[tuple[DeferredParameter, ScratchTensor, str]] = []
        for each in parameters:
            if each.installed:
                continue
            reason = self.reason(each)
            if reason is not None:
                self.keep_private(each, reason, made)
                continue
            missed = self._share_one(each, made)
            if missed is None:
                continue
            if each.nbytes >= self.provider.own_slab_bytes or made is not None:
                self._publish([(each, *missed)], borrowed=made is None)
                continue
            small.append((each, *missed))
            if sum(one.nbytes for one, _, _ in small) >= self.provider.batch_bytes:
                self._publish(small, borrowed=True)
                small = []
        self._publish(small, borrowed=True)

    def find(self, parameters: Iterable[DeferredParameter]) -> None:
        """Look up, in one batch, the residents that the recipes of these parameters lead to.

        No byte is read. What is found is held until `share` installs it. Parameters whose digests
        are not known yet, or that stay private, are skipped. Call it with the parameters of a whole
        plan, so that a memory manager is asked a few times per load and not once per layer.
        """
        wanted = [
            (each, query)
            for each in parameters
            if id(each) not in self._hits and (query := self._query(each)) is not None
        ]
        found = self.provider.find([query for _, query in wanted])
        for (each, _), resident in zip(wanted, found, strict=True):
            if resident is not None:
                self._hits[id(each)] = resident

    def _query(self, each: DeferredParameter) -> ResidentQuery | None:
        """Return what to look for before any byte is read, or None if unknown or not shared."""
        dtype = each.parameter.dtype
        if each.installed or self.reason(each) is not None:
            return None
        if not has_name(dtype) or not self.known(each):
            return None
        source = whole_source(_view(each))
        content = source.digest if source is not None else None
        shape, stride = tuple(each.parameter.shape), tuple(each.parameter.stride())
        key = ResidentKey(dtype_name(dtype), shape, stride, content or "")
        return ResidentQuery(self._recipe_key(each), key)

    def _share_one(
        self, each: DeferredParameter, made: ScratchTensor | None
    ) -> tuple[ScratchTensor, str] | None:
        """Install a resident with these bytes, or return the bytes and their digest on a miss."""
        if made is None:
            resident = self._hits.pop(id(each), None) or self._made_meanwhile(each)
            if resident is not None:
                self._install_checked(each, resident)
                return None
        return self._share_by_content(each, made)

    def _made_meanwhile(self, each: DeferredParameter) -> AnyResident | None:
        """Return the resident of an equal parameter that was built here since the look-up."""
        query = self._query(each)
        if query is None:
            return None
        return self.provider.find([query], ask_manager=False)[0]

    def _install_checked(self, each: DeferredParameter, resident: AnyResident) -> None:
        """Install a hit by recipe, compared first where verify_bytes or audit ask for it."""
        verify, audit = self.config.verifies_bytes, self.sampled()
        if not verify and not audit:
            self._install(each, resident)
            return
        made = self.make(each)
        if same_bytes(made.tensor, self._seen(resident)):
            self._install(each, resident)
        elif verify:
            self.ledger.collisions += 1
            self.keep_private(each, NotShared.COLLISION, made)
        else:
            raise_audit(each.name, "the resident", "the tensor made from its checkpoint")
        self.give_back(made)

    def _share_by_content(
        self, each: DeferredParameter, made: ScratchTensor | None
    ) -> tuple[ScratchTensor, str] | None:
        if made is None and self._share_known_contents(each):
            return None
        if made is None and (source := self._streamed_source(each)) is not None:
            self._stream(each, source)
            return None
        here = made if made is not None else self.make(each)
        if not sharable(here.tensor):
            self.keep_private(each, NotShared.UNSHARABLE_LAYOUT, here)
            self._give_back_own(here, made)
            return None
        source = whole_source(_view(each))
        known = source.digest if source is not None else None
        name = known if known is not None else self.digest_of(here.tensor)
        resident = self.provider.by_content(key_anywhere(here.tensor, name))
        if resident is None:
            return here, name
        if self.agrees(resident, here.tensor):
            self.provider.note(self._recipe_key(each), resident)
            self._install(each, resident)
        else:
            self.keep_private(each, NotShared.COLLISION, here)
        self._give_back_own(here, made)
        return None

    def _share_known_contents(self, each: DeferredParameter) -> bool:
        """Install a tensor that others have parts of, reading only the rest; return whether so.

        This is for a tensor of source tensors side by side, all with digests, in this process.

        Raises:
            StaleHintError: What was read is not what was remembered.
        """
        known, provider = self._contents(each), self.provider
        if not known or not isinstance(provider, HostProvider) or provider.keep_alignment:
            return False
        contents = [content for _, content in known]
        shape, stride = tuple(each.parameter.shape), tuple(each.parameter.stride())
        geometry = ResidentKey(dtype_name(each.parameter.dtype), shape, stride, "")

        def read(number: int, leaves: Sequence[int] | None, write: Write) -> None:
            source, content = known[number]
            if source is None:
                write(memoryview(bytes(content.end - content.start)), 0)
            elif leaves is None:
                self.reader.read_pieces(source, write)
            else:
                self.reader.read_leaves(source, leaves, write)

        check = partial(self._check_known, known)

        def build(others: Sequence[Resident], admit: Admit | None) -> Resident | None:
            return build_from_contents(
                geometry, contents, read, check, self.digest_of, others, admit
            )

        try:
            try:
                resident = provider.build_known(self._recipe_key(each), geometry, contents, build)
            except SharedMemoryError:
                return False  # met again, and said, on the ordinary way
            if resident is None:
                return False
            if len(contents) == 1 and resident.key.digest != contents[0].digest:
                source, _ = known[0]
                assert source is not None
                raise_stale(source, resident.key.digest, "it", contents[0].digest)
            if not self._is_as_loaded(each, resident):
                return True
            return self._install_known(each, provider, resident, contents)
        finally:
            provider.end_known()

    def _check_known(self, known: Sequence[_KnownPart], number: int, data: memoryview) -> None:
        source, content = known[number]
        assert source is not None, "of zeros no single leaf is taken"
        if (found := self.reader.digest(data)) != content.digest:
            raise_stale(source, found, "it", content.digest)

    def _install_known(
        self,
        each: DeferredParameter,
        provider: HostProvider,
        resident: Resident,
        contents: Sequence[Content],
    ) -> bool:
        """Install what was built of remembered digests; return False if it cannot be lent."""
        entered = provider.enter_known(self._recipe_key(each), resident)
        if entered is None:
            return False
        first, made = entered
        if not made and not self.agrees(first, tensor := resident.seen()):
            self.keep_private(each, NotShared.COLLISION, ScratchTensor(tensor, tensor))
            return True
        self._install(each, first, made=made)
        provider.note(self._recipe_key(each), first)
        if made:
            provider.note_contents(first, contents)
        return True

    def _is_as_loaded(self, each: DeferredParameter, resident: Resident) -> bool:
        """Compare what was made of remembered digests with the checkpoint where that is asked for.

        If it differs the tensor is installed privately, and this returns False.

        Raises:
            AuditError: An audit found other bytes.
        """
        verify = self.config.verifies_bytes
        if not verify and not self.sampled():
            return True
        made = self.make(each)
        equal = same_bytes(made.tensor, resident.seen())
        if not equal and not verify:
            raise_audit(each.name, "the leaves of others", "the tensor made from its checkpoint")
        if not equal:
            self.ledger.collisions += 1
            self.keep_private(each, NotShared.COLLISION, made)
        self.give_back(made)
        return equal

    def _contents(self, each: DeferredParameter) -> list[_KnownPart]:
        """Return the sources of known digests that a large tensor consists of, or nothing.

        None stands for zeros, which no source has.
        """
        if each.nbytes < LEAF_SHARED_FROM or not has_name(each.parameter.dtype):
            return []
        if self.config.hash_algorithm != "blake3":
            return []
        found: list[_KnownPart] = []
        for start, stop, source, zeros in parts_of(_view(each)):
            if start == stop:  # padding of a vocabulary that needs none
                continue
            if zeros:
                known = digest(bytes(stop - start))
                found.append((None, Content(start, stop, known, ())))
            elif source is None or source.digest is None:
                return []
            else:
                found.append((source, Content(start, stop, source.digest, source.leaves)))
        return found if any(source is not None for source, _ in found) else []

    def _note_contents(self, each: DeferredParameter, resident: AnyResident) -> None:
        """Remember what a resident consists of whose sources have all been read."""
        known = self._contents(each)
        if known and isinstance(resident, Resident) and isinstance(self.provider, HostProvider):
            self.provider.note_contents(resident, [content for _, content in known])

    def is_streamed(self, each: DeferredParameter) -> bool:
        """Return whether a tensor is read directly into shared memory, without scratch memory."""
        return self._streamed_source(each) is not None

    def _streamed_source(self, each: DeferredParameter) -> SourceTensor | None:
        """Return the tensor's only source if it is read directly into shared memory, or None.

        This is for tensors so large that a second copy might not fit, unless it is being read
        already.
        """
        if each.installed or each.nbytes <= STREAM_BYTES or self.config.hash_algorithm != "blake3":
            return None
        if self.ahead.has(each) or not self.provider.local or self.reason(each) is not None:
            return None
        alone = self.evaluator.alone(_view(each))
        return None if id(alone) in self.evaluator.unhashed else alone

    def _stream(self, each: DeferredParameter, source: SourceTensor) -> None:
        parameter = each.parameter
        shape, stride = tuple(parameter.shape), tuple(parameter.stride())
        geometry = ResidentKey(dtype_name(parameter.dtype), shape, stride, "")
        assert isinstance(self.provider, HostProvider)  # no other is local
        try:
            resident = read_into_slab(
                geometry, each.nbytes, partial(self.reader.read_pieces, source)
            )
            first, made = self.provider.enter_read(resident)
        except SharedMemoryError as error:
            self.keep_private(each, str(error))
            return
        self.ahead.begin(self._must_be_read)
        self._note_contents(each, first)
        if not made and not self.agrees(first, tensor := resident.seen()):
            self.keep_private(each, NotShared.COLLISION, ScratchTensor(tensor, tensor))
            return
        self._install(each, first, made=made)
        registry.register_record(self._recipe_key(each), first)

    def _give_back_own(self, here: ScratchTensor, lent: ScratchTensor | None) -> None:
        if here is not lent:
            self.give_back(here)

    def _publish(
        self, missed: Sequence[tuple[DeferredParameter, ScratchTensor, str]], *, borrowed: bool
    ) -> None:
        if not missed:
            return
        wanted = [
            ResidentRequest(self._recipe_key(each), made.tensor, name)
            for each, made, name in missed
        ]
        try:
            residents = self.provider.get_or_build(wanted)
        except SharedMemoryError as error:
            self._publish_nothing(missed, str(error), borrowed=borrowed)
            return
        for (each, made, _), (resident, new) in zip(missed, residents, strict=True):
            # Somebody may have come first, be it another tensor of this very call.
            if self.is_compared(resident, new=new) or self.agrees(resident, made.tensor):
                self._install(each, resident, made=new)
                self.provider.note(self._recipe_key(each), resident)
                self._note_contents(each, resident)
            else:
                self.keep_private(each, NotShared.COLLISION, made)
            if borrowed:
                self.give_back(made)

    def is_compared(self, resident: AnyResident, *, new: bool) -> bool:
        """Return whether a resident is of the bytes it was built from, and not of a digest."""
        return new and not (isinstance(resident, DeviceResident) and resident.leaf_shared_bytes)

    def _publish_nothing(
        self,
        missed: Sequence[tuple[DeferredParameter, ScratchTensor, str]],
        reason: str,
        *,
        borrowed: bool,
    ) -> None:
        """Keep tensors private for lack of shared memory; the model loads all the same."""
        for each, made, _ in missed:
            self.keep_private(each, reason, made)
            if borrowed:
                self.give_back(made)

    def _install(
        self, each: DeferredParameter, resident: AnyResident, *, made: bool = False
    ) -> None:
        try:
            tensor = self.provider.map(resident)
        except SharedMemoryError as error:
            self.keep_private(each, str(error))
            return
        if made:
            self.own.add(resident)
        self.place(each, tensor)
        self.enter(each.name, each.nbytes, resident, made=made, sources=self.sources(each))

    def enter(
        self,
        name: str,
        nbytes: int,
        used: object,
        *,
        made: bool,
        sources: Iterable[SourceTensor] = (),
    ) -> None:
        """Account for a final tensor that is, or is part of, `used`, a resident or a record."""
        shared = not made and used is not None and used not in self.own
        self.ledger.add(name, nbytes, shared=shared, made=made, sources=sources)
        if made and isinstance(used, Resident | DeviceResident):
            self.ledger.note_leaves(used.leaf_shared_bytes)

    def place(self, each: DeferredParameter, tensor: torch.Tensor) -> None:
        """Give the parameter its memory."""
        replace_data(each.parameter, tensor)
        each.installed = True
        if each.view is not None:
            self.evaluator.release(each.view)

    def keep_private(
        self, each: DeferredParameter, reason: str, made: ScratchTensor | None = None
    ) -> None:
        """Give the parameter memory of its own, with the content plain loading would give it."""
        view = _view(each)
        key = id(view.storage)
        if key not in self._flat:
            flat = torch.empty(view.storage.nbytes, dtype=torch.uint8)
            if made is not None:
                as_view(flat, view).copy_(made.tensor)
            else:
                self.evaluator.fill(view, flat)
            self._flat[key] = self.provider.private(flat)
        self.place(each, as_view(self._flat[key], view))
        self.ledger.add(each.name, each.nbytes, shared=False, sources=self.sources(each))
        self.ledger.skip(each.name, reason)

    def _recipe_key(self, each: DeferredParameter) -> str:
        recipe = self.book.digest(_view(each))
        return f"recipe:{self.config.hash_algorithm}:{self._state}:{recipe}"

    def sampled(self) -> bool:
        """Return whether this hit is one of those to audit, chosen at random."""
        return self.config.audit > 0 and self._rng.random() < self.config.audit

    def _seen(self, resident: AnyResident) -> torch.Tensor:
        """Return the bytes of a resident in host memory, to be compared."""
        if isinstance(resident, Resident):
            return resident.seen()
        return self.provider.map(resident).cpu()

    def agrees(self, resident: AnyResident, tensor: torch.Tensor) -> bool:
        """Compare a hit by content where that is asked for; return whether it may be used.

        With verify_bytes a difference counts as a collision.

        Raises:
            AuditError: An audit found other bytes.
        """
        verify = self.config.verifies_bytes
        if not (verify or self.sampled()):
            return True
        if same_bytes(tensor.cpu(), self._seen(resident)):
            return True
        if not verify:
            raise_audit(f"a tensor of {resident.key.digest}", "the resident", "its equal")
        self.ledger.collisions += 1
        return False


def _view(each: DeferredParameter) -> View:
    assert each.view is not None, f"{each.name} was not deferred"
    return each.view


def slabs(sizes: Sequence[int]) -> list[list[int]]:
    """Group the tensors of a layer, given by sizes in bytes, into slabs; return their indices."""
    large = [[n] for n, size in enumerate(sizes) if size >= _OWN_SLAB_BYTES]
    middling = [n for n, size in enumerate(sizes) if _SMALL_BYTES <= size < _OWN_SLAB_BYTES]
    small = [n for n, size in enumerate(sizes) if size < _SMALL_BYTES]
    return [*large, *(group for group in (middling, small) if group)]


def share_by_content(session: LoadSession, finals: Sequence[Named]) -> list[Found]:
    """Return the resident with the bytes of each tensor, and whether it was built by this call.

    Those that are built share a slab. The resident is None, with the reason in the ledger, where
    another tensor has the same digest or there is no shared memory left.
    """
    wanted = []
    for _, tensor in finals:
        content = session.digest_of(tensor)
        wanted.append(ResidentRequest(f"content:{key_anywhere(tensor, content)}", tensor, content))
    found: dict[int, Found] = {}
    for number, each in enumerate(wanted):
        resident = session.provider.by_content(key_anywhere(each.tensor, each.digest))
        if resident is not None:
            found[number] = (resident, False)
    missing = [number for number in range(len(wanted)) if number not in found]
    try:
        made = (
            session.provider.get_or_build([wanted[number] for number in missing]) if missing else []
        )
    except SharedMemoryError as error:
        for number in missing:
            session.ledger.skip(finals[number][0], str(error))
            found[number] = (None, False)
    else:
        found.update(zip(missing, made, strict=True))
    return [_checked(session, finals[number], found[number]) for number in range(len(finals))]


def _checked(session: LoadSession, final: Named, found: Found) -> Found:
    (name, tensor), (resident, made) = final, found
    if resident is None:
        return found
    if made:
        session.own.add(resident)
    if not session.is_compared(resident, new=made) and not session.agrees(resident, tensor):
        session.ledger.skip(name, NotShared.COLLISION)
        return None, False
    return found
