"""A load's use of the memory manager of host memory, where tensors can share leaves.

A leaf is a part of 2 MiB of a tensor. `tensor_dedup.loader.cuda.manager_residents` is the
counterpart for the memory manager of a GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakSet

from tensor_dedup.loader.residents.leaves import (
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
    record_of_parts,
)
from tensor_dedup.loader.residents.manager import (
    ManagerResidents,
    ManagerSession,
    ResidentQuery,
    ResidentRequest,
    client_of,
)
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM
from tensor_dedup.loader.residents.resident import Resident, nbytes_of, tensor_bytes
from tensor_dedup.loader.residents.slab import SharedMemoryError
from tensor_dedup.memory_manager.client import Client, LayerFound, Lease, NewLayer, Put
from tensor_dedup.memory_manager.client.names import checkpoint_name
from tensor_dedup.memory_manager.errors import MemoryManagerError, RefusedError
from tensor_dedup.memory_manager.protocol.layout import PAGE
from tensor_dedup.memory_manager.protocol.limits import MAX_RECORD

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    from tensor_dedup.loader.residents.partial import Content, Progress
    from tensor_dedup.types import ResidentKey

_log = logging.getLogger(__name__)


class HostMemory:
    """Host memory that a memory manager lends.

    The client copies the bytes of tensors into it, and the manager hashes them.
    """

    namespace: Final = "tensor"
    whole_only: Final = None

    def resident(self, key: ResidentKey, lease: Lease) -> Resident:
        """Return the leased tensor as a resident with the dtype, shape and stride of `key`.

        The digest of `key` is ignored; the resident has the digest of the lease.

        Raises:
            SlabUsageError: The lease is on a tensor of another size, or exceeds its slab.
        """
        return LentResident(replace(key, digest=lease.digest), lease)

    def data(self, request: ResidentRequest) -> Buffer:
        """Return the bytes of the requested tensor, which lies in host memory."""
        return tensor_bytes(request.tensor)

    def fill(self, requests: dict[str, ResidentRequest]) -> None:
        """Return None. The client copies the bytes from `data`, so no function needs to do it."""

    def with_room(self, ask: Callable[[], None]) -> None:
        """Call `ask`, which requests memory from the manager, and pass on its errors.

        There is no second attempt, because this process keeps no unused memory to free first.
        """
        ask()


class _Admitted(NamedTuple):
    """A tensor in parts whose rest is being read, and the room for it in the manager.

    `put` is None where somebody else builds it: it is looked up, or waited for, when it is put.
    """

    put: Put | None
    recipe: str
    plan: PartsPlan
    pieces: Sequence[LeafPiece]

    def progress(self) -> None:
        """Tell the manager that the rest is being read. Safe from any thread."""
        with suppress(MemoryManagerError):  # met again when it is put
            if self.put is not None:
                self.put.progress()


class HostSession(ManagerSession[ResidentRequest, Resident]):
    """One load's requests to a manager of host memory, where tensors can share leaves of 2 MiB.

    If a new tensor has leaves in common with tensors of the manager, these tensors are leased, and
    only the missing leaves are written. Other processes find the new tensor by its recipe, by its
    digest, and by hashes of some of its leaves (`leaf_marks`).
    """

    def __init__(self, client: Client, checkpoint: str) -> None:
        super().__init__(client, checkpoint, HostMemory())
        self._put: WeakSet[Resident] = WeakSet()  # by this load
        self._marks_of: dict[str, list[str]] = {}  # by recipe, of what is being put
        self._having: list[Resident] = []  # with their leases, until what is built of them is put
        self._admitted: _Admitted | None = None

    def by_content(self, keys: Sequence[ResidentKey]) -> list[Resident | None]:
        """Look up residents by digest; return them in order, or None for each miss.

        Tensors that consist of parts of other tensors are found, too.
        """
        found = super().by_content(keys)
        missing = [n for n, each in enumerate(found) if each is None and _is_large(keys[n])]
        layers = self.client.get([self._content_key(keys[n]) for n in missing], self.checkpoint)
        for number, layer in zip(missing, layers, strict=True):
            found[number] = self._of_layer(layer, keys[number])
        return found

    def put(
        self, requests: Sequence[ResidentRequest], found: dict[str, tuple[Resident, bool]]
    ) -> None:
        """Put those tensors of `requests` into the manager's memory that are not there yet.

        For each tensor that the manager then lends, `found[request.recipe]` is set to a pair: the
        resident, and whether this call wrote it. This holds after an error, too. A tensor of 8 MiB
        and more can share leaves with tensors of the manager. Only its other leaves are written.
        """
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
        # Their leases end as soon as they are compared: what is leased cannot make room.
        del layers
        for each in new:
            self._put_in_parts(each, donors_of.pop(0), found)
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
                    new_marks = self._marks_of.get(each.recipe, [])
                    self._remember(resident, new_marks, *resident.published)

    def announce_to_next_manager(self, recipe: str, resident: Resident) -> None:
        """Arrange that `recipe` leads to `resident` again if the manager is restarted.

        The arrangement ends when the object `resident` is freed, so pass the object that is in the
        registry. Does nothing if no manager lends the resident.
        """
        if isinstance(resident, LentResident | LentInParts):
            self._remember(resident, [self._key(recipe)], *resident.published)

    def having(self, geometry: ResidentKey, contents: Sequence[Content]) -> list[Resident]:
        """Return residents of the manager that may have parts of a new tensor.

        `contents` are the parts of the new tensor, with their digests, and `geometry` has its
        dtype, shape and stride. The contents of the returned residents are registered in this
        process (`leaves.note_contents`) if the manager knows them. The residents are held until
        `end_known`.
        """
        layers = self._look_up([self._keys_of(content_marks(geometry, contents))])
        [donors] = self._donors(layers)
        keys = [self._contents_key(each.key) for each in donors]
        for resident, layer in zip(donors, self.client.get(keys, self.checkpoint), strict=True):
            composition = None if layer is None else composition_in(layer.record)
            if composition is None or composition.key != resident.key:
                continue
            theirs = composition.contents
            if theirs and theirs[-1].end == resident.nbytes:
                note_contents(resident, theirs)
        self._having = donors
        return donors

    def admit(
        self, recipe: str, geometry: ResidentKey, pieces: Sequence[LeafPiece]
    ) -> Progress | None:
        """Reserve room in the manager for the missing pieces of a new tensor.

        `pieces` are all pieces of the tensor. A piece is missing if its `there` is None. `geometry`
        has the tensor's dtype, shape and stride. Returns None if the manager cannot hold the tensor
        in parts. Otherwise returns a function that tells the manager that this load is still
        working. Call that function now and then while the missing pieces are read. Then call
        `put_built`, or `end_known` to release the room.

        Raises:
            RefusedError: There is no room.
        """
        leases = [lease for donor in self._having for lease in leases_of(donor)]
        plan = PartsPlan(geometry, pieces, leases)
        if plan.unfit is not None:
            self._note_whole(plan.unfit)
            return None
        put = self.client.reserve([self._key(recipe)], self.checkpoint).put
        self._admitted = _Admitted(put, recipe, plan, pieces)
        if put is not None and plan.rest_bytes:
            put.allocate([plan.tensors[-1].nbytes])
        return self._admitted.progress

    def put_built(self, resident: Resident) -> tuple[Resident, bool] | None:
        """Put `resident`, which was built after `admit`, into the manager.

        Returns the manager's resident and whether this call wrote it, or None if the resident
        cannot be put.
        """
        admitted, self._admitted = self._admitted, None
        assert admitted is not None, "nothing is built that was not admitted"
        if admitted.put is not None:
            try:
                return self._put_admitted(admitted.put, resident, admitted)
            except RefusedError as error:
                # Nothing was heard of this load for too long, as while it compared what it had
                # read: another process has taken the layer over.
                if error.code != "stale_put":
                    raise
        return self._put_like_others(resident, admitted)

    def _put_admitted(
        self, put: Put, resident: Resident, admitted: _Admitted
    ) -> tuple[Resident, bool] | None:
        _, recipe, plan, pieces = admitted
        with put:
            [there] = self.by_content([resident.key])
            if there is not None:
                put.abandon()  # before the recipe leads to it
                self._publish(there, [self._key(recipe)])
                return there, False
            tensor = self._mapped(resident)
            if tensor is None:
                return None
            data = tensor_bytes(tensor)
            leases = list(plan.needed)
            if plan.rest_bytes:
                plan.write_rest(data, put)
                leases += put.seal()
            record = record_of_parts(resident.key, plan.parts)
            put.publish(self._key(recipe), record, [lease.digest for lease in leases])
        # Its digest is of these very bytes: all that it was built of is sealed.
        made = self._in_parts(resident.key, leases, plan.parts, shared_in(pieces), hashed=True)
        if made is None:
            return None
        marks = self._keys_of(leaf_marks(resident.key, data))
        self._publish(made, [self._content_key(resident.key), *marks])
        self._put.add(made)
        return made, True

    def _put_like_others(
        self, resident: Resident, admitted: _Admitted
    ) -> tuple[Resident, bool] | None:
        """Use what another process has built meanwhile, or wait for it, or put it here."""
        _, recipe, plan, pieces = admitted
        [there] = self.by_content([resident.key])
        if there is not None:
            return there, False
        tensor = self._mapped(resident)
        if tensor is None:
            return None
        request = ResidentRequest(recipe, tensor, resident.key.digest)
        self._marks_of[recipe] = self._marks(request)
        found: dict[str, tuple[Resident, bool]] = {}
        self._put_pieces(request, pieces, plan.needed, found)
        if recipe not in found:  # somebody has put it otherwise
            [there] = self.by_recipe([ResidentQuery(recipe, resident.key)])
            return None if there is None else (there, False)
        return found[recipe]

    def _mapped(self, resident: Resident) -> torch.Tensor | None:
        try:
            return resident.map(writable=False)
        except SharedMemoryError as error:
            self._note_unusable(f"{resident.key.digest} cannot be put: {error}")
            return None

    def end_known(self) -> None:
        """Give back the room that `admit` reserved and `put_built` has not used.

        The residents that the method `having` returned are no longer held, either. Does nothing if
        there is nothing to give back.
        """
        admitted, self._admitted = self._admitted, None
        self._having = []
        if admitted is not None and admitted.put is not None:
            admitted.put.abandon()

    def note_contents(self, resident: Resident, contents: Sequence[Content]) -> None:
        """Publish the `contents` of `resident`, so that other processes find and share its parts.

        Does nothing for a resident that this load has not put.
        """
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
            pieces = pieces_in_common(request.tensor, donors, request.read) if donors else None
        except SharedMemoryError as error:
            self._note_whole(str(error))
            return
        if pieces is not None:
            leases = [lease for donor in donors for lease in leases_of(donor)]
            self._put_pieces(request, pieces, leases, found)

    def _note_whole(self, reason: str) -> None:
        if self.not_by_leaf is None:
            self.not_by_leaf = reason
            _log.warning("a tensor is put whole: %s", reason)

    def _put_pieces(
        self,
        request: ResidentRequest,
        pieces: Sequence[LeafPiece],
        leases: Sequence[Lease],
        found: dict[str, tuple[Resident, bool]],
    ) -> None:
        plan = PartsPlan(request.key, pieces, leases)
        if plan.unfit is not None:
            self._note_whole(plan.unfit)
            return
        key = self._key(request.recipe)
        layer = NewLayer(record_of_parts(request.key, plan.parts), plan.tensors)
        fill = partial(plan.fill, tensor_bytes(request.tensor), request.read, request.digest)
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
        whole = super()._of_layer(layer, key)
        if layer is None or whole is not None:
            return whole  # most are: a record that is no composition is refused by an exception
        composition = composition_in(layer.record)
        if composition is None:
            return None
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
        if len(record) > MAX_RECORD:  # what a tensor of 2 GB and more consists of
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
        data = tensor_bytes(request.tensor)
        return self._keys_of(leaf_marks(request.key, data, request.read))

    def _keys_of(self, marks: Sequence[str]) -> list[str]:
        return [f"{self.memory.namespace}-leaf:{mark}" for mark in marks]

    def _content_key(self, key: ResidentKey) -> str:
        return self._key(f"content:{key}")

    def _contents_key(self, key: ResidentKey) -> str:
        return self._key(f"contents of:{key}")


class HostResidents(ManagerResidents[ResidentRequest, Resident, HostSession]):
    """One load's use of a manager of host memory, which may be absent or fail. For one thread."""

    def announce_to_next_manager(self, recipe: str, resident: Resident) -> None:
        """Arrange that `recipe` leads to `resident` again if the manager is restarted.

        Does nothing without a manager.
        """
        if self.session is not None:
            self.session.announce_to_next_manager(recipe, resident)

    def having(self, geometry: ResidentKey, contents: Sequence[Content]) -> list[Resident]:
        """Return residents of the manager that may have parts of a new tensor.

        `contents` are the parts of the new tensor, with their digests, and `geometry` has its
        dtype, shape and stride. The result is empty if no manager is in use.
        """
        found: list[Resident] = []
        self._ask(lambda session: found.extend(session.having(geometry, contents)))
        return found

    def admit(
        self, recipe: str, geometry: ResidentKey, pieces: Sequence[LeafPiece]
    ) -> Progress | None:
        """Reserve room in the manager for the missing pieces of a new tensor.

        `pieces` are all pieces of the tensor. A piece is missing if its `there` is None. Returns
        None if the manager cannot hold the tensor or has no room. Otherwise returns a function that
        tells the manager that this load is still working. Call that function now and then while the
        missing pieces are read. Then call `put_built`, or `end_known` to release the room.
        """
        found: list[Progress | None] = []
        self._ask(lambda session: found.append(session.admit(recipe, geometry, pieces)))
        return found[0] if found else None

    def put_built(self, resident: Resident) -> tuple[Resident, bool] | None:
        """Put `resident`, which was built after `admit`, into the manager.

        Returns the manager's resident and whether this call wrote it, or None if the manager does
        not take it.
        """
        found: list[tuple[Resident, bool] | None] = []
        self._ask(lambda session: found.append(session.put_built(resident)))
        return found[0] if found else None

    def end_known(self) -> None:
        """Release the room that `admit` reserved and `put_built` has not used.

        Does nothing without a manager.
        """
        if self.session is not None:
            self.session.end_known()

    def note_contents(self, resident: Resident, contents: Sequence[Content]) -> None:
        """Publish the `contents` of `resident`, so that other processes find and share its parts.

        Does nothing for a resident that this load has not put.
        """
        self._ask(lambda session: session.note_contents(resident, contents))


def host_session(client: Client, checkpoint: str) -> HostSession:
    """Return a load's session with a manager of host memory.

    `checkpoint` names the load to the manager.
    """
    return HostSession(client, checkpoint)


def host_manager_residents(where: str | os.PathLike[str] | None, checkpoint: str) -> HostResidents:
    """Connect a load to the memory manager of host memory whose socket is `where`.

    If `where` is None, no manager is used. `checkpoint` names the load to the manager. If the
    manager does not answer, the failure is logged, the result's `failed` has the reason, and the
    load goes on without the manager.
    """
    if where is None:
        return HostResidents()
    try:
        client = client_of(os.fspath(where))
        return HostResidents(host_session(client, checkpoint_name(checkpoint)))
    except MemoryManagerError as error:
        _log.warning("%s: loading without a memory manager: %s", checkpoint, str(error))
        return HostResidents(failed=str(error))


def _is(layer: LayerFound | None, record: bytes, digests: Sequence[str]) -> bool:
    if layer is None or layer.record != record:
        return False
    return [lease.digest for lease in layer.leases] == list(digests)


def _is_large(key: ResidentKey) -> bool:
    return nbytes_of(key) >= LEAF_SHARED_FROM
