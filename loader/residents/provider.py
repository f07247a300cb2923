"""Providers of residents: found in this process or the memory manager, or built on demand.

A resident is an immutable tensor in memory that models share. A load looks up residents (`find`),
builds missing ones (`get_or_build`), and maps all of them into its model (`map`). `HostProvider` is
for host memory, and `tensor_dedup.loader.cuda.provider` for a GPU.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakSet

from tensor_dedup.loader.residents.host_manager import HostResidents, host_manager_residents
from tensor_dedup.loader.residents.leaves import (
    LeafPlan,
    build_from_leaves,
    build_known,
    note_contents,
    pieces_of_known,
    relink,
)
from tensor_dedup.loader.residents.partial import share_in_part
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import Resident, pack
from tensor_dedup.loader.residents.slab import MappingLimitError, SharedMemoryError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from tensor_dedup.loader.residents.manager import ResidentQuery, ResidentRequest
    from tensor_dedup.loader.residents.partial import Content, KnownTensor, Progress
    from tensor_dedup.types import ResidentKey

    # Raises when a resident is not of the bytes that the tensor had when it was hashed.
    Check = Callable[[Iterable[tuple[torch.Tensor, Resident]]], None]

_log = logging.getLogger(__name__)
# Smaller tensors of one call share a slab: a page each in the file, and one descriptor for all.
_OWN_SLAB_BYTES: Final = 64 << 10


class AnyResident(Protocol):
    """An interface for residents in host memory or on a GPU."""

    @property
    def key(self) -> ResidentKey:
        """The resident key: dtype, shape, stride and digest."""

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""


class ResidentProvider(Protocol):
    """An interface for finding, building and mapping the residents of one load. For one thread."""

    @property
    def own_slab_bytes(self) -> int:
        """The size in bytes from which a tensor gets a slab of its own.

        Smaller tensors are collected and share a slab.
        """

    @property
    def batch_bytes(self) -> int:
        """The total size in bytes at which collected tensors are built together, in one slab."""

    @property
    def local(self) -> bool:
        """Whether residents are built in host memory of this process and may have any alignment.

        Only then can a tensor be read straight into the slab of its resident.
        """

    @property
    def plain(self) -> bool:
        """Whether weights must stay plain, not packed, so that other processes can map them."""

    @property
    def not_lent(self) -> str | None:
        """The reason why the requested memory manager does not hold all residents, or None."""

    @property
    def not_by_leaf(self) -> str | None:
        """The reason why a large tensor was copied whole and shares no parts, or None."""

    def find(
        self, queries: Sequence[ResidentQuery], *, ask_manager: bool = True
    ) -> Sequence[AnyResident | None]:
        """Look up residents; return them in order, or None for each miss. No tensor data is read.

        This process is searched first. With `ask_manager`, the memory manager is then asked for all
        missing residents in one batch. Keep the results alive until they are used, because
        residents are freed when nothing refers to them.
        """

    def by_content(self, key: ResidentKey) -> AnyResident | None:
        """Return this process's resident with this `key`, or None."""

    def note(self, recipe: str, resident: AnyResident) -> None:
        """Register `resident` under `recipe`, for as long as the resident lives."""

    def get_or_build(
        self, requests: Sequence[ResidentRequest]
    ) -> Sequence[tuple[AnyResident, bool]]:
        """Return a resident for each request, in order, and whether this call built it.

        Raises:
            SharedMemoryError: There is no room; keep the tensors private.
        """

    def share_known(
        self, tensor: KnownTensor, accept: Callable[[AnyResident], bool]
    ) -> tuple[AnyResident, bool] | None:
        """Return a resident of `tensor` that shares parts with others, and whether it is new.

        The digests of the tensor's contents are known, and its bytes were not read. The parts that
        residents have are found by digest, in this process or in the memory manager, and only the
        others are read. A part is a leaf of 2 MiB in host memory and a block of 16 MiB on a GPU.

        `accept` gets the resident that was built, before anybody else can find it, and returns
        whether it may be used; compare it there if the configuration asks for it. A resident that
        others had built before was found by digest, and `accept` was not asked about it.

        Returns None in these cases; load the tensor in the ordinary way then:

        - Nobody has a part of the tensor that is worth sharing.
        - There is no room, no descriptor or no mapping left for it, or the manager does not take
          it. This is met again, and said, on the ordinary way.
        - `accept` returned False, or the tensor as put together is not the known one.

        Nothing stays then. Errors of `tensor.read`, `tensor.differs` and `accept` are passed on,
        and nothing stays after them, either.
        """

    def note_contents(self, resident: AnyResident, contents: Sequence[Content]) -> None:
        """Register the `contents` of `resident`, so that `share_known` finds its parts by digest.

        Others find them in this process and, if this load has put the resident into the memory
        manager, in other processes.
        """

    def map(self, resident: AnyResident) -> torch.Tensor:
        """Map `resident` for the model of this load, and return it as a tensor.

        Raises:
            SharedMemoryError: The resident cannot be mapped.
        """

    def private(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, which lies in host memory, as a private tensor on the model's device.

        If that device is a GPU, the result is a copy; otherwise it is `tensor` itself.
        """

    def reason(self, name: str) -> str | None:
        """Return why the tensor `name` must stay private, or None if it can be shared."""


@dataclass(slots=True)
class HostProvider:
    """The `ResidentProvider` of one load for host memory. For one thread.

    With `keep_alignment`, a resident that is built in this process has the same alignment (modulo
    64 bytes) as the tensor from which it is copied. `built` has the residents that this load has
    built, which share no parts among themselves.
    """

    manager: HostResidents = field(default_factory=HostResidents)
    keep_alignment: bool = False
    own_slab_bytes: int = _OWN_SLAB_BYTES
    batch_bytes: int = 1 << 62  # all that a call wants
    built: WeakSet[Resident] = field(default_factory=WeakSet)
    _not_by_leaf: str | None = None

    @property
    def local(self) -> bool:
        """Whether residents are built in this process's memory and may have any alignment."""
        return not self.manager.in_use and not self.keep_alignment

    @property
    def plain(self) -> bool:
        """Whether weights must stay plain, not packed.

        This is so if a memory manager is used, because packed weights cannot be put there.
        """
        return self.manager.in_use

    @property
    def not_lent(self) -> str | None:
        """The reason why the requested memory manager does not hold all residents, or None."""
        return self.manager.not_lent

    @property
    def not_by_leaf(self) -> str | None:
        """The reason why a large tensor was copied whole and shares no parts, or None."""
        return self._not_by_leaf or self.manager.not_by_leaf

    def find(
        self, queries: Sequence[ResidentQuery], *, ask_manager: bool = True
    ) -> list[Resident | None]:
        """Look up residents; return them in order, or None for each miss. No tensor data is read.

        This process is searched first. With `ask_manager`, the memory manager is then asked for all
        missing residents in one batch. Keep the results alive until they are used, because
        residents are freed when nothing refers to them.
        """
        found = [_in_this_process(each) for each in queries]
        if not ask_manager:
            return found
        missing = [each for each, here in zip(queries, found, strict=True) if here is None]
        lent = iter(self.manager.find(missing))
        return [
            here if here is not None else self._entered(each, next(lent))
            for each, here in zip(queries, found, strict=True)
        ]

    def _entered(self, query: ResidentQuery, lent: Resident | None) -> Resident | None:
        if lent is None:
            return None
        first = registry.register(lent)
        if not query.key.digest:
            registry.register_record(query.recipe, first)
            self.manager.announce_to_next_manager(query.recipe, first)
        return first

    def by_content(self, key: ResidentKey) -> Resident | None:
        """Return this process's resident with this `key`, or None."""
        return registry.lookup(key)

    def note(self, recipe: str, resident: AnyResident) -> None:
        """Register `resident` under `recipe`, for as long as the resident lives."""
        registry.register_record(recipe, resident)

    def get_or_build(
        self, requests: Sequence[ResidentRequest], check: Check | None = None
    ) -> list[tuple[Resident, bool]]:
        """Return a resident for each request, in order, and whether this call built it.

        If `check` is given, it is called once, with pairs of a tensor and the resident that was
        built from it in this process. These residents are registered afterwards. If `check` raises
        an error, none of them is registered.

        Raises:
            SharedMemoryError: There is no shared memory left, here or in the manager.
        """
        lent = self.manager.put(requests)
        rest = [each for each, found in zip(requests, lent, strict=True) if found is None]
        local = self._build(rest)
        if check is not None:
            check(zip((each.tensor for each in rest), local, strict=True))
        packed = iter(local)
        built = []
        for each, found in zip(requests, lent, strict=True):
            resident, new = found or (next(packed), True)
            first = registry.register(resident)  # somebody here may have come first
            self.manager.announce_to_next_manager(each.recipe, first)
            if new and first is resident:
                self.built.add(first)
            built.append((first, new and first is resident))
        return built

    def _build(self, requests: Sequence[ResidentRequest]) -> list[Resident]:
        parts = [
            self._of_leaves(
                partial(build_from_leaves, each.tensor, each.digest, self.built, each.read)
            )
            for each in requests
        ]
        items = [
            (each.tensor, each.digest)
            for each, part in zip(requests, parts, strict=True)
            if part is None
        ]
        whole = iter(pack(items, keep_alignment=self.keep_alignment) if items else ())
        made = [next(whole) if part is None else part for part in parts]
        self.built.update(made)
        return made

    def _of_leaves(self, build: Callable[[], Resident | None]) -> Resident | None:
        try:
            return build()
        except MappingLimitError as error:
            self.note_not_by_leaf(str(error))
            return None

    def note_not_by_leaf(self, reason: str) -> None:
        """Record and log the `reason` why a large tensor is copied whole.

        Only the first reason is kept.
        """
        if self._not_by_leaf is None:
            self._not_by_leaf = reason
            _log.warning("a tensor is copied whole: %s", reason)

    def share_known(
        self, tensor: KnownTensor, accept: Callable[[Resident], bool]
    ) -> tuple[Resident, bool] | None:
        """Return a resident of `tensor` that shares leaves with others, and whether it is new.

        Leaves of 2 MiB are found by digest, and only the others are read. `accept` returns whether
        what was built may be used. Returns None if nothing is shared; load the tensor in the
        ordinary way then.
        """
        memory = _LentLeaves(self) if self.manager.in_use else _Leaves(self)
        try:
            found = share_in_part(tensor, memory, accept)
        except MappingLimitError as error:
            self.note_not_by_leaf(str(error))
            return None
        except SharedMemoryError:
            return None  # met again, and said, on the ordinary way
        if found is not None and found[1]:
            self.built.add(found[0])
        return found

    def note_contents(self, resident: AnyResident, contents: Sequence[Content]) -> None:
        """Register the `contents` of `resident`, so that others can share its parts by digest.

        The contents are registered in this process. If this load has put the resident into the
        memory manager, they are registered there, too.
        """
        assert isinstance(resident, Resident)
        note_contents(resident, contents)
        self.manager.note_contents(resident, contents)

    def enter_read(self, resident: Resident) -> tuple[Resident, bool]:
        """Register a resident that was read straight into a slab.

        Other residents may have leaves in common with `resident`. In that case, a second resident
        with the same bytes, which shares these leaves, is built and registered instead. Returns the
        resident to use, and whether it is new.

        Raises:
            SharedMemoryError: There is no memory to build the second resident.
        """
        return self.enter(self._of_leaves(partial(relink, resident, self.built)) or resident)

    def enter(self, resident: Resident) -> tuple[Resident, bool]:
        """Register `resident`, if no resident with its key is registered yet.

        Returns the registered resident, and whether it is `resident` itself.
        """
        self.built.add(resident)
        first = registry.register(resident)
        return first, first is resident

    def map(self, resident: AnyResident) -> torch.Tensor:
        """Return `resident` as a tensor, mapped copy-on-write."""
        assert isinstance(resident, Resident)
        return resident.map()

    def private(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` itself, because the model is in host memory."""
        return tensor

    def reason(self, name: str) -> str | None:
        """Return None. Every tensor can be shared, because a write copies the memory page."""


@dataclass(frozen=True, slots=True)
class _Leaves:
    """Host memory of this process for `share_in_part`: the pieces are leaves of 2 MiB."""

    provider: HostProvider

    def donors(self, tensor: KnownTensor) -> list[Resident]:
        built = self.provider.built
        return [each for each in registry.alike(tensor.geometry) if each not in built]

    def pieces(self, tensor: KnownTensor, donors: Sequence[Resident]) -> LeafPlan | None:
        return pieces_of_known(tensor, donors)

    def admit(self, tensor: KnownTensor, plan: LeafPlan) -> Progress | None:
        return _nothing

    def build(self, tensor: KnownTensor, plan: LeafPlan, progress: Progress) -> Resident | None:
        return build_known(tensor, plan, progress)

    def publish(self, tensor: KnownTensor, built: Resident) -> tuple[Resident, bool] | None:
        return self.provider.enter(built)

    def note_contents(self, resident: Resident, contents: Sequence[Content]) -> None:
        self.provider.note_contents(resident, contents)

    def release(self) -> None:
        """Do nothing, because nothing is reserved."""


class _LentLeaves(_Leaves):
    """Host memory that a memory manager lends."""

    def donors(self, tensor: KnownTensor) -> list[Resident]:
        return self.provider.manager.having(tensor.geometry, tensor.contents)

    def admit(self, tensor: KnownTensor, plan: LeafPlan) -> Progress | None:
        return self.provider.manager.admit(tensor.recipe, tensor.geometry, plan.pieces)

    def publish(self, tensor: KnownTensor, built: Resident) -> tuple[Resident, bool] | None:
        put = self.provider.manager.put_built(built)
        if put is None:
            return None
        first = registry.register(put[0])
        self.provider.manager.announce_to_next_manager(tensor.recipe, first)
        return first, put[1] and first is put[0]

    def release(self) -> None:
        self.provider.manager.end_known()


def _nothing() -> None:
    """Do nothing."""


def _in_this_process(query: ResidentQuery) -> Resident | None:
    found = registry.lookup_record(query.recipe)
    if isinstance(found, Resident):
        return found
    return registry.lookup(query.key) if query.key.digest else None


def host_provider_for(
    where: str | os.PathLike[str] | None, checkpoint: str, *, keep_alignment: bool = False
) -> HostProvider:
    """Return the provider for a load of `checkpoint` into host memory.

    `where` is the socket of the memory manager to use, or None to use none. If the manager does not
    answer, the failure is logged, and residents are built in this process only. With
    `keep_alignment`, residents built in this process have the same alignment (modulo 64 bytes) as
    the tensors from which they are copied.
    """
    return HostProvider(host_manager_residents(where, checkpoint), keep_alignment)
