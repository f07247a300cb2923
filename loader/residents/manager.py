"""The memory manager as a load uses it: residents of other processes, and those put there.

A borrowed tensor is a resident like any other, in a slab of the manager; its lease ends with it.
The same code serves a manager of host memory (`HostMemory`, here) and one of a GPU
(`tensor_dedup.loader.cuda.manager_residents`). A failure of the manager costs sharing and never a
load: it is logged once, and the tensors stay in this process.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Final,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
)
from weakref import WeakSet

from blake3 import blake3

from tensor_dedup.loader.residents.leaves import (
    Content,
    LeafPiece,
    content_marks,
    leaf_marks,
    note_contents,
    pieces_in_common,
    shared_in,
)
from tensor_dedup.loader.residents.lent import (
    LeasedPart,
    LentInParts,
    LentResident,
    PartsPlan,
    composition_in,
    key_in,
    leases_of,
    record_of,
    record_of_parts,
)
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM
from tensor_dedup.loader.residents.resident import Resident, key_anywhere, tensor_bytes
from tensor_dedup.loader.residents.slab import (
    SharedMemoryError,
    SlabUsageError,
)
from tensor_dedup.loader.torch_dtypes import torch_dtype
from tensor_dedup.memory_manager.client import (
    AUTO,
    Client,
    Fill,
    LayerFound,
    Lease,
    NewLayer,
    NewTensor,
    Put,
    connect,
)
from tensor_dedup.memory_manager.client.client import PUT_WAIT_S
from tensor_dedup.memory_manager.client.names import checkpoint_name, printed
from tensor_dedup.memory_manager.errors import (
    BackendError,
    ManagerGoneError,
    MemoryManagerError,
    RefusedError,
)
from tensor_dedup.memory_manager.protocol.layout import PAGE
from tensor_dedup.memory_manager.protocol.limits import MAX_RECORD

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    from tensor_dedup.types import ResidentKey

_log = logging.getLogger(__name__)
_CONTEXT: Final = "tensor-dedup manager key v1"


class ResidentQuery(NamedTuple):
    """A tensor to look for: the recipe it follows from, and its key.

    The key's digest is "" if only the recipe is known; its geometry is compared then.
    """

    recipe: str
    key: ResidentKey


@dataclass(frozen=True, slots=True)
class ResidentRequest:
    """A tensor to make resident: its recipe, its bytes and their digest."""

    recipe: str
    tensor: torch.Tensor
    digest: str

    @property
    def key(self) -> ResidentKey:
        """The key of the tensor's resident."""
        return key_anywhere(self.tensor, self.digest)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.tensor.nbytes


class AnyRequest(Protocol):
    """The fields that requests for every kind of memory have in common."""

    @property
    def recipe(self) -> str: ...

    @property
    def key(self) -> ResidentKey: ...

    @property
    def nbytes(self) -> int: ...


Request = TypeVar("Request", bound=AnyRequest)
Held = TypeVar("Held")
_Held_co = TypeVar("_Held_co", covariant=True)


class ManagedMemory(Protocol[Request, _Held_co]):
    """The memory that one manager lends: how it is filled, and what a resident in it is."""

    @property
    def namespace(self) -> str:
        """The prefix of keys, so that managers of different memory never mix them up."""

    @property
    def whole_only(self) -> str | None:
        """The reason why no tensor can have leaves of another, or None."""

    def resident(self, key: ResidentKey, lease: Lease) -> _Held_co:
        """Return the resident that a lease is on; the digest of `key` may be "".

        Raises:
            SlabUsageError: The lease is not on a tensor of this geometry, or not inside its slab.
            BackendError: The same, of memory whose digests are their writers' word.
        """

    def data(self, request: Request) -> Buffer | None:
        """Return the bytes that the client is to copy, or None if `fill` writes them."""

    def fill(self, requests: dict[str, Request]) -> Fill | None:
        """Return the function that writes these tensors, or None if the client copies `data`."""

    def with_room(self, ask: Callable[[], None]) -> None:
        """Call `ask`; if it is refused and unused memory could be freed, call it again."""


class ManagerSession(Generic[Request, Held]):
    """One load's requests to one memory manager. For one thread; the client may serve several.

    Look-ups and puts raise MemoryManagerError; load the rest privately then. A single tensor that
    is lent as something else is as good as missing: `unusable` tells why the first of them was.
    """

    def __init__(
        self, client: Client, checkpoint: str, memory: ManagedMemory[Request, Held]
    ) -> None:
        self.client: Final = client
        self.checkpoint: Final = checkpoint
        self.memory: Final = memory
        self.unusable: str | None = None
        self.not_by_leaf: str | None = None  # why a large tensor was put whole

    def by_content(self, keys: Sequence[ResidentKey]) -> list[Held | None]:
        """Return the residents with these bytes, in order, or None, looked up in one batch."""
        leases = self.client.lease([key.digest for key in keys], self.checkpoint)
        return [
            None if lease is None else self._resident(key, lease)
            for key, lease in zip(keys, leases, strict=True)
        ]

    def by_recipe(self, queries: Sequence[ResidentQuery]) -> list[Held | None]:
        """Return the residents that these recipes lead to, in order, looked up in one batch.

        A resident with another geometry, or with another digest where the query has one, is not
        used.
        """
        layers = self.client.get([self._key(each.recipe) for each in queries], self.checkpoint)
        return [
            self._of_layer(layer, each.key) for each, layer in zip(queries, layers, strict=True)
        ]

    def put(self, requests: Sequence[Request], found: dict[str, tuple[Held, bool]]) -> None:
        """Put these tensors into the manager's memory, each written by whichever process is first.

        The residents, and whether this call wrote them, are entered into `found` by recipe. Tensors
        that are missing from it, also after an error, stay in this process.
        """
        by_key = {
            self._key(each.recipe): each
            for each in requests
            if each.nbytes and each.recipe not in found
        }
        if not by_key:
            return
        layers = {key: self._layer(each) for key, each in by_key.items()}
        result = self.client.put(layers, self.checkpoint, fill=self.memory.fill(by_key))
        for key, layer in result.layers.items():
            each, [lease] = by_key[key], layer.leases
            if layer.written and each.nbytes >= LEAF_SHARED_FROM and self.not_by_leaf is None:
                self.not_by_leaf = self.memory.whole_only
            resident = self._resident(each.key, lease)
            if resident is not None:
                found[each.recipe] = resident, layer.written
        for error in result.unusable.values():
            self._note_unusable(str(error))
        if result.error is not None:
            raise result.error
        if result.still_building:
            [first, *_] = result.still_building
            raise MemoryManagerError(
                f"another process has been building {first} for {PUT_WAIT_S:.0f} s"
            )

    def announce_to_next_manager(self, recipe: str, resident: Resident) -> None:
        """Publish the recipe again should the manager be replaced, while the resident lives.

        `resident` must be the registry's own and not an equal one that is dropped at once.
        """
        if isinstance(resident, LentResident | LentInParts):
            self._remember(resident, [self._key(recipe)], *resident.published)

    def _remember(
        self, resident: Resident, keys: Sequence[str], record: bytes, digests: Sequence[str]
    ) -> None:
        new = self.client.remember(keys, record, digests)
        if new:
            weakref.finalize(resident, self.client.forget, new).atexit = False

    def having(self, geometry: ResidentKey, contents: Sequence[Content]) -> list[Held]:
        """Return nothing: only in host memory tensors are known to have parts in common."""
        return []

    def admit(
        self, recipe: str, geometry: ResidentKey, pieces: Sequence[LeafPiece]
    ) -> Callable[[], None] | None:
        """Return None: nothing is put in parts."""

    def put_built(self, resident: Resident) -> tuple[Held, bool] | None:
        """Put nothing, and return None."""

    def end_known(self) -> None:
        """Give up nothing."""

    def note_contents(self, resident: Resident, contents: Sequence[Content]) -> None:
        """Remember nothing."""

    def _layer(self, request: Request) -> NewLayer:
        data = self.memory.data(request)
        tensor = NewTensor(request.nbytes, request.key.digest, data)
        return NewLayer(record_of(request.key), (tensor,))

    def _of_layer(self, layer: LayerFound | None, key: ResidentKey) -> Held | None:
        if layer is None or len(layer.leases) != 1 or layer.record != record_of(key):
            return None
        [lease] = layer.leases
        return self._resident(key, lease) if key.digest in ("", lease.digest) else None

    def _resident(self, key: ResidentKey, lease: Lease) -> Held | None:
        """Return the resident that a lease is on, or None if it is on something else."""
        try:
            return self.memory.resident(key, lease)
        except (SlabUsageError, BackendError) as error:
            self._note_unusable(f"what is lent for {lease.digest} is not that tensor: {error}")
            return None

    def _note_unusable(self, reason: str) -> None:
        if self.unusable is None:
            self.unusable = reason
            _log.warning("%s: a tensor stays private: %s", self.checkpoint, reason)

    def _key(self, recipe: str) -> str:
        name = blake3(recipe.encode(), derive_key_context=_CONTEXT).hexdigest()
        return f"{self.memory.namespace}:{name}"


class ManagerResidents(Generic[Request, Held]):
    """One load's use of a memory manager, which may fail at any moment. For one thread.

    No method raises MemoryManagerError. `failed` tells why no manager is asked, or is asked no
    more; `refused` why the first tensor for which it had no room stays in this process. No session
    and no reason mean that no manager was requested.
    """

    def __init__(
        self, session: ManagerSession[Request, Held] | None = None, failed: str | None = None
    ) -> None:
        self.session: Final = session
        self.failed = failed
        self.refused: str | None = None

    @property
    def in_use(self) -> bool:
        """Whether there is a manager, or was one when the load began."""
        return self.session is not None

    @property
    def not_lent(self) -> str | None:
        """The reason why a requested manager does not hold everything, or None."""
        unusable = self.session.unusable if self.session is not None else None
        return self.failed or self.refused or unusable

    @property
    def not_by_leaf(self) -> str | None:
        """The reason why a tensor was put whole although others have leaves of it, or None."""
        return self.session.not_by_leaf if self.session is not None else None

    def find(self, queries: Sequence[ResidentQuery]) -> list[Held | None]:
        """Look residents up, in order: by digest where it is known, else by recipe.

        All digests go in one look-up and all recipes in another, whatever their number, in messages
        of 1,024 digests and of 256 recipes.
        """
        known = list({each.key: None for each in queries if each.key.digest})
        others = list({each: None for each in queries if not each.key.digest})
        by_key: dict[ResidentKey, Held | None] = {}
        by_query: dict[ResidentQuery, Held | None] = {}

        def ask(session: ManagerSession[Request, Held]) -> None:
            if known:
                by_key.update(zip(known, session.by_content(known), strict=True))
            if others:
                by_query.update(zip(others, session.by_recipe(others), strict=True))

        self._ask(ask)
        return [by_key.get(q.key) if q.key.digest else by_query.get(q) for q in queries]

    def put(self, requests: Sequence[Request]) -> list[tuple[Held, bool] | None]:
        """Return a resident for each, and whether it was written here; None means keep it private.

        If another process is building one of them, this waits for it and uses the result.
        """
        found: dict[str, tuple[Held, bool]] = {}
        if requests:
            self._ask(lambda session: session.put(requests, found))
        return [found.get(each.recipe) for each in requests]

    def having(self, geometry: ResidentKey, contents: Sequence[Content]) -> list[Held]:
        """Return residents of the manager that have some of these contents, which are noted."""
        found: list[Held] = []
        self._ask(lambda session: found.extend(session.having(geometry, contents)))
        return found

    def admit(
        self, recipe: str, geometry: ResidentKey, pieces: Sequence[LeafPiece]
    ) -> Callable[[], None] | None:
        """Reserve room for a tensor of these pieces, of residents from `having`.

        Return None if the manager cannot have it, or a function to call now and then while the rest
        is read. Then `put_built` puts it, or `end_known` gives the room back.
        """
        found: list[Callable[[], None] | None] = []
        self._ask(lambda session: found.append(session.admit(recipe, geometry, pieces)))
        return found[0] if found else None

    def put_built(self, resident: Resident) -> tuple[Held, bool] | None:
        """Put what was built after `admit`; return what is lent for it, or None."""
        found: list[tuple[Held, bool] | None] = []
        self._ask(lambda session: found.append(session.put_built(resident)))
        return found[0] if found else None

    def end_known(self) -> None:
        """Give back the room that `admit` has reserved and `put_built` has not filled."""
        if self.session is not None:
            self.session.end_known()

    def note_contents(self, resident: Resident, contents: Sequence[Content]) -> None:
        """Have others find what this load has put by what it consists of."""
        self._ask(lambda session: session.note_contents(resident, contents))

    def announce_to_next_manager(self, recipe: str, resident: Resident) -> None:
        """Call `ManagerSession.announce_to_next_manager`; without a manager do nothing."""
        if self.session is not None:
            self.session.announce_to_next_manager(recipe, resident)

    def _ask(self, ask: Callable[[ManagerSession[Request, Held]], None]) -> None:
        session = self.session
        if session is None or self.failed is not None:
            return
        try:
            session.memory.with_room(lambda: ask(session))
        except RefusedError as error:
            # No room for these: what is resident can still be borrowed.
            if self.refused is None:
                self.refused = str(error)
                _log.warning("%s: not all of it can be lent: %s", session.checkpoint, str(error))
        except MemoryManagerError as error:
            self.failed = str(error)
            _log.warning(
                "%s: loading without the memory manager from here on: %s",
                session.checkpoint,
                str(error),
            )


class HostMemory:
    """Host memory: the client copies the bytes, and the manager hashes them."""

    namespace: Final = "tensor"
    whole_only: Final = None

    def resident(self, key: ResidentKey, lease: Lease) -> Resident:
        """Return the resident that a lease is on."""
        return LentResident(replace(key, digest=lease.digest), lease)

    def data(self, request: ResidentRequest) -> Buffer:
        """Return the bytes of a tensor in host memory."""
        return tensor_bytes(request.tensor)

    def fill(self, requests: dict[str, ResidentRequest]) -> None:
        """Return None, because the client copies `data`."""

    def with_room(self, ask: Callable[[], None]) -> None:
        """Call `ask` once: this process keeps no memory of the manager without using it."""
        ask()


class _Admitted(NamedTuple):
    """Room in the manager for a tensor in parts whose rest is being read."""

    put: Put
    recipe: str
    plan: PartsPlan
    shared_bytes: int

    def progress(self) -> None:
        """Tell the manager that the rest is being read. Safe from any thread."""
        with suppress(MemoryManagerError):  # met again when it is put
            self.put.progress()


class HostSession(ManagerSession[ResidentRequest, Resident]):
    """One load's requests to a manager of host memory, where tensors have leaves in common.

    Of a tensor that nobody has, what lies in tensors of the manager is leased with those, and only
    the rest is put. So that others find it, the marks of some leaves (`leaf_marks`) are keys of its
    record, too. What it consists of is a record of its own, for whoever has found it.
    """

    def __init__(self, client: Client, checkpoint: str) -> None:
        super().__init__(client, checkpoint, HostMemory())
        self._put: WeakSet[Resident] = WeakSet()  # by this load
        self._marks_of: dict[str, list[str]] = {}  # by recipe, of what is being put
        self._having: list[Resident] = []  # with their leases, until what is built of them is put
        self._admitted: _Admitted | None = None

    def by_content(self, keys: Sequence[ResidentKey]) -> list[Resident | None]:
        """Return the residents with these bytes, also those that consist of parts."""
        found = super().by_content(keys)
        missing = [n for n, each in enumerate(found) if each is None and _is_large(keys[n])]
        layers = self.client.get([self._content_key(keys[n]) for n in missing], self.checkpoint)
        for number, layer in zip(missing, layers, strict=True):
            found[number] = self._of_layer(layer, keys[number])
        return found

    def put(
        self, requests: Sequence[ResidentRequest], found: dict[str, tuple[Resident, bool]]
    ) -> None:
        """Put these tensors, of large ones only what no tensor of the manager has."""
        large = [each for each in requests if each.nbytes >= LEAF_SHARED_FROM]
        there = self.by_content([each.key for each in large])
        new = []
        for each, resident in zip(large, there, strict=True):
            if isinstance(resident, LentInParts):
                found[each.recipe] = resident, False
                self._publish(resident, [self._content_key(each.key), self._key(each.recipe)])
            elif resident is None:
                new.append(each)
        marks = [self._marks(each) for each in new]
        layers = self._look_up(marks)
        # A key has one record, the first.
        self._marks_of = {
            each.recipe: [mark for mark, layer in zip(keys, hits, strict=True) if layer is None]
            for each, keys, hits in zip(new, marks, layers, strict=True)
        }
        # What is taken of them is compared, and hashed where it is put.
        donors_of = self._donors(layers, hashed=True)
        for each, donors in zip(new, donors_of, strict=True):
            self._put_in_parts(each, donors, found)
        super().put(requests, found)
        # Another process may have put it in parts meanwhile.
        missing = [each for each in large if each.recipe not in found]
        queries = [ResidentQuery(each.recipe, each.key) for each in missing]
        for each, resident in zip(missing, self.by_recipe(queries), strict=True):
            if resident is not None:
                found[each.recipe] = resident, False
        for each in large:
            resident, written = found.get(each.recipe, (None, False))
            if resident is not None and written:
                self._put.add(resident)
                if isinstance(resident, LentResident):
                    marks = self._marks_of.get(each.recipe, ())
                    self._remember(resident, marks, *resident.published)

    def having(self, geometry: ResidentKey, contents: Sequence[Content]) -> list[Resident]:
        """Return tensors of the manager that have some of these contents, and note theirs."""
        layers = self._look_up([self._keys_of(content_marks(geometry, contents))])
        [donors] = self._donors(layers)
        keys = [self._contents_key(each.key) for each in donors]
        for resident, layer in zip(donors, self.client.get(keys, self.checkpoint), strict=True):
            composition = None if layer is None else composition_in(layer.record)
            if composition is not None and composition.key == resident.key:
                note_contents(resident, composition.contents)
        self._having = donors
        return donors

    def admit(
        self, recipe: str, geometry: ResidentKey, pieces: Sequence[LeafPiece]
    ) -> Callable[[], None] | None:
        """Reserve room for what lies in no tensor of the manager of one of these pieces.

        Raises:
            RefusedError: There is no room.
        """
        leases = [lease for donor in self._having for lease in leases_of(donor)]
        plan = PartsPlan(geometry, pieces, leases)
        if not plan.fits:
            return None
        put = self.client.reserve([self._key(recipe)], self.checkpoint).put
        if put is None:
            return None  # somebody else builds it, or has built it since it was looked for
        self._admitted = _Admitted(put, recipe, plan, shared_in(pieces))
        if plan.rest_bytes:
            put.allocate([plan.tensors[-1].nbytes])
        return self._admitted.progress

    def put_built(self, resident: Resident) -> tuple[Resident, bool] | None:
        """Put what lies in no tensor of the manager of one that was built after `admit`."""
        admitted, self._admitted = self._admitted, None
        assert admitted is not None, "nothing is built that was not admitted"
        put, recipe, plan, _ = admitted
        with put:
            [there] = self.by_content([resident.key])
            if there is not None:
                put.abandon()  # before the recipe leads to it
                self._publish(there, [self._key(recipe)])
                return there, False
            try:
                data = tensor_bytes(resident.map(writable=False))
            except SharedMemoryError as error:
                self._note_unusable(f"{resident.key.digest} cannot be put: {error}")
                return None
            leases = list(plan.needed)
            if plan.rest_bytes:
                plan.write_rest(data, put)
                leases += put.seal()
            record = record_of_parts(resident.key, plan.parts)
            put.publish(self._key(recipe), record, [lease.digest for lease in leases])
        # Its digest is of these very bytes: all that it was built of is sealed.
        made = self._in_parts(resident.key, leases, plan.parts, admitted.shared_bytes, hashed=True)
        if made is None:
            return None
        marks = self._keys_of(leaf_marks(resident.key, data))
        self._publish(made, [self._content_key(resident.key), *marks])
        self._put.add(made)
        return made, True

    def end_known(self) -> None:
        """Give back the room that `admit` has reserved, if it was not filled, and the donors."""
        admitted, self._admitted = self._admitted, None
        self._having = []
        if admitted is not None:
            admitted.put.abandon()

    def note_contents(self, resident: Resident, contents: Sequence[Content]) -> None:
        """Have others find what this load has put by what it consists of."""
        if resident in self._put and isinstance(resident, LentResident | LentInParts):
            self._publish(resident, self._keys_of(content_marks(resident.key, contents)))
            record = record_of_parts(resident.key, resident.parts, contents)
            self._publish_record(resident, [self._contents_key(resident.key)], record)

    def _layer(self, request: ResidentRequest) -> NewLayer:
        layer = super()._layer(request)
        return replace(layer, also=tuple(self._marks_of.get(request.recipe, ())))

    def _put_in_parts(
        self,
        request: ResidentRequest,
        donors: Sequence[Resident],
        found: dict[str, tuple[Resident, bool]],
    ) -> None:
        """Put what no tensor of the manager has of one, if these have a part of it."""
        donors = [each for each in donors if each.key.digest != request.digest]
        try:
            pieces = pieces_in_common(request.tensor, donors) if donors else None
        except SharedMemoryError as error:
            if self.not_by_leaf is None:
                self.not_by_leaf = str(error)
                _log.warning("a tensor is put whole: %s", str(error))
            return
        if pieces is not None:
            leases = [lease for donor in donors for lease in leases_of(donor)]
            self._put_pieces(request, pieces, leases, found)

    def _put_pieces(
        self,
        request: ResidentRequest,
        pieces: Sequence[LeafPiece],
        leases: Sequence[Lease],
        found: dict[str, tuple[Resident, bool]],
    ) -> None:
        plan = PartsPlan(request.key, pieces, leases)
        if not plan.fits:
            return
        key = self._key(request.recipe)
        layer = NewLayer(record_of_parts(request.key, plan.parts), plan.tensors)
        fill = partial(plan.fill, tensor_bytes(request.tensor), request.digest)
        result = self.client.put({key: layer}, self.checkpoint, fill=fill)
        if result.error is not None:
            raise result.error
        if key not in result.layers:
            return  # somebody has put it otherwise: it is looked up
        layer_found = result.layers[key]
        made = self._in_parts(
            request.key,
            layer_found.leases,
            plan.parts,
            shared_in(pieces),
            hashed=layer_found.written and plan.rest_bytes > 0,
        )
        if made is None:
            return
        found[request.recipe] = made, layer_found.written or plan.rest_bytes == 0
        self._publish(made, [self._content_key(request.key), *self._marks_of[request.recipe]])

    def _look_up(self, keys: Sequence[Sequence[str]]) -> list[list[LayerFound | None]]:
        """Return what each of these lists of keys leads to, looked up in one batch."""
        layers = iter(self.client.get([key for each in keys for key in each], self.checkpoint))
        return [list(islice(layers, len(each))) for each in keys]

    def _donors(
        self, found: Sequence[Sequence[LayerFound | None]], *, hashed: bool = False
    ) -> list[list[Resident]]:
        """Return the tensors that marks lead to, by what each list of them leads to.

        They are not what this load itself has put. Those in parts are hashed first, unless with
        `hashed` their digests need not be true.
        """
        known: dict[str, Resident | None] = {each.key.digest: None for each in self._put}
        donors: list[list[Resident]] = []
        for layers in found:
            these: dict[str, Resident] = {}
            for layer in layers:
                key = None if layer is None else key_in(layer)
                if key is None or key.digest in these:
                    continue
                if key.digest not in known:
                    known[key.digest] = self._of_layer(layer, key, hashed=hashed)
                donor = known[key.digest]
                if donor is not None and not donor.offset % PAGE:
                    these[key.digest] = donor
            donors.append(list(these.values()))
        return donors

    def _of_layer(
        self, layer: LayerFound | None, key: ResidentKey, *, hashed: bool = False
    ) -> Resident | None:
        """Return the resident of a layer: a whole tensor, or one in parts, hashed if not before."""
        composition = None if layer is None else composition_in(layer.record)
        if layer is None or composition is None:
            return super()._of_layer(layer, key)
        found = composition.key
        if replace(found, digest=key.digest) != key or key.digest not in ("", found.digest):
            return None
        return self._in_parts(found, layer.leases, composition.parts, hashed=hashed)

    def _in_parts(
        self,
        key: ResidentKey,
        leases: Sequence[Lease],
        parts: Sequence[LeasedPart],
        leaf_shared_bytes: int = 0,
        *,
        hashed: bool = False,
    ) -> LentInParts | None:
        """Return a tensor of parts, or None if these are not its parts.

        With `hashed` they are not hashed: that was done, or need not be.
        """
        try:
            found = LentInParts(key, leases, parts, leaf_shared_bytes)
            true = hashed or found.has_its_digest()
        except SharedMemoryError as error:
            self._note_unusable(f"what is lent for {key.digest} cannot be used: {error}")
            return None
        if not true:
            self._note_unusable(f"the parts that are lent for {key.digest} are not that tensor's")
            return None
        return found

    def _publish(self, resident: Resident, keys: Sequence[str]) -> None:
        """Have these keys lead to a resident, to the next manager too, while it lives."""
        if isinstance(resident, LentResident | LentInParts):
            record, _ = resident.published
            self._publish_record(resident, keys, record)

    def _publish_record(self, resident: Resident, keys: Sequence[str], record: bytes) -> None:
        if len(record) > MAX_RECORD:  # what a tensor of a GB and more consists of
            return
        digests = [lease.digest for lease in leases_of(resident)]
        try:
            if self.client.publish(keys, record, digests) < len(keys):
                # Some lead to another tensor, and must not lead here once the manager is replaced.
                layers = self.client.get(keys, self.checkpoint)
                keys = [
                    k for k, each in zip(keys, layers, strict=True) if _is(each, record, digests)
                ]
        except RefusedError as error:
            _log.debug("%s: its leaves are not found by others: %s", self.checkpoint, str(error))
            return
        self._remember(resident, keys, record, digests)

    def _marks(self, request: ResidentRequest) -> list[str]:
        return self._keys_of(leaf_marks(request.key, tensor_bytes(request.tensor)))

    def _keys_of(self, marks: Sequence[str]) -> list[str]:
        return [f"{self.memory.namespace}-leaf:{mark}" for mark in marks]

    def _content_key(self, key: ResidentKey) -> str:
        return self._key(f"content:{key}")

    def _contents_key(self, key: ResidentKey) -> str:
        return self._key(f"contents of:{key}")


HostResidents = ManagerResidents[ResidentRequest, Resident]


def host_session(client: Client, checkpoint: str) -> HostSession:
    """Return a load's session with a manager of host memory."""
    return HostSession(client, checkpoint)


def host_manager_residents(where: str | os.PathLike[str] | None, checkpoint: str) -> HostResidents:
    """Return a load's view of the manager at `where`.

    With `where` None, no manager is used. If the manager does not answer, that is logged and
    `failed` tells why.
    """
    if where is None:
        return ManagerResidents()
    try:
        client = client_of(os.fspath(where))
        return ManagerResidents(host_session(client, checkpoint_name(checkpoint)))
    except MemoryManagerError as error:
        _log.warning("%s: loading without a memory manager: %s", checkpoint, str(error))
        return ManagerResidents(failed=str(error))


def _is(layer: LayerFound | None, record: bytes, digests: Sequence[str]) -> bool:
    if layer is None or layer.record != record:
        return False
    return [lease.digest for lease in layer.leases] == list(digests)


def _is_large(key: ResidentKey) -> bool:
    return math.prod(key.shape) * torch_dtype(key.dtype).itemsize >= LEAF_SHARED_FROM


_clients: dict[tuple[int, str, str], Client] = {}
_clients_lock = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_clients_lock=threading.Lock()))


def client_of(where: str, device: str = "") -> Client:
    """Return this process's connection to a manager of host memory, or of the GPU with this UUID.

    It is made when first needed, and again after a fork or after the manager's death.

    Raises:
        MemoryManagerError: The manager does not answer, or is not one of this device.
    """
    with _clients_lock:
        key = os.getpid(), where, device
        client = _clients.get(key)
        if client is None or client.closed:
            client = connect(where, name=_program(), device=device)
            _clients[key] = client
        elif not client.connected:
            _reconnect(client, where, device)
        return client


def _program() -> str:
    """Return a name of this process for people; the manager knows its process number."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    program = "python" if program in ("", "-c", "-m") else program
    process = multiprocessing.current_process().name
    return printed(program if process == "MainProcess" else f"{program} {process}")


def _reconnect(client: Client, where: str, device: str) -> None:
    """Offer what is held here to the current manager, or to one that this starts."""
    try:
        client.reconnect()
    except ManagerGoneError:
        if where != AUTO:
            raise
        connect(AUTO, name="starting", keep_connected=False, device=device).close()
        client.reconnect()
