"""Providers of residents: from this process, from the memory manager, or built on demand.

A load looks up what it can name (`find`), builds the rest (`get_or_build`) and maps both into its
model. `HostProvider` has residents in host memory; `tensor_dedup.loader.cuda.provider` has them on
a GPU.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakSet

from tensor_dedup.loader.residents.host_manager import HostResidents, host_manager_residents
from tensor_dedup.loader.residents.leaves import (
    Content,
    LeafPiece,
    build_from_leaves,
    note_contents,
    relink,
)
from tensor_dedup.loader.residents.manager import ManagerResidents, ResidentQuery, ResidentRequest
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import Resident, pack
from tensor_dedup.loader.residents.slab import MappingLimitError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from tensor_dedup.types import ResidentKey

    # Raises when a resident is not of the bytes that the tensor had when it was hashed.
    Check = Callable[[Iterable[tuple[torch.Tensor, Resident]]], None]
    # Is asked before a tensor of these pieces is read, as `build_from_contents` says.
    Admit = Callable[[Sequence[LeafPiece]], Callable[[], None] | None]

_log = logging.getLogger(__name__)
# Smaller tensors of one call share a slab: a page each in the file, and one descriptor for all.
_OWN_SLAB_BYTES: Final = 64 << 10


class AnyResident(Protocol):
    """A resident in host memory or on a GPU."""

    @property
    def key(self) -> ResidentKey:
        """The dtype, geometry and digest."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""


class ResidentProvider(Protocol):
    """The source of the final tensors of one vLLM load. For one thread."""

    @property
    def own_slab_bytes(self) -> int:
        """The size from which a tensor has a slab of its own; smaller ones are built together."""

    @property
    def batch_bytes(self) -> int:
        """The total size of the smaller tensors that are built together."""

    @property
    def local(self) -> bool:
        """Whether residents built here stay in this process, in host memory, at any alignment."""

    @property
    def plain(self) -> bool:
        """Whether weights must be left unpacked, for other processes that map them."""

    @property
    def not_lent(self) -> str | None:
        """The reason why other processes do not get everything although requested, or None."""

    @property
    def not_by_leaf(self) -> str | None:
        """The reason why a tensor was copied although others have leaves of it, or None."""

    def find(
        self, queries: Sequence[ResidentQuery], *, ask_manager: bool = True
    ) -> Sequence[AnyResident | None]:
        """Look residents up, in order, without reading a byte.

        This process is searched first, and then, unless `ask_manager` is False, the memory manager
        for all that is missing, in one batch. Hold the results: every table is weak, and a query is
        answered without a message only while somebody holds the answer.
        """

    def by_content(self, key: ResidentKey) -> AnyResident | None:
        """Return the resident of this process with these bytes, or None."""

    def note(self, recipe: str, resident: AnyResident) -> None:
        """Remember which resident a recipe leads to, while the resident lives."""

    def get_or_build(
        self, requests: Sequence[ResidentRequest]
    ) -> Sequence[tuple[AnyResident, bool]]:
        """Return a resident for each request, and whether it was built by this call.

        Raises:
            SharedMemoryError: There is no room; keep the tensors private.
        """

    def map(self, resident: AnyResident) -> torch.Tensor:
        """Return a resident as the model of this load sees it.

        Raises:
            SharedMemoryError: The resident cannot be mapped.
        """

    def private(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a private tensor of host memory on the device of the model."""

    def reason(self, name: str) -> str | None:
        """Return why a tensor of this name stays private, or None."""

    def close(self) -> None:
        """Free what the provider holds for the load."""


@dataclass(slots=True)
class HostProvider:
    """The residents of one load in host memory. For one thread.

    With `keep_alignment`, residents built in this process are aligned as the tensors they copy.
    """

    manager: HostResidents = field(default_factory=ManagerResidents)
    keep_alignment: bool = False
    own_slab_bytes: int = _OWN_SLAB_BYTES
    batch_bytes: int = 1 << 62  # all that a call wants
    _built: WeakSet[Resident] = field(default_factory=WeakSet)
    _not_by_leaf: str | None = None

    @property
    def local(self) -> bool:
        """Whether residents built here stay in this process, at any alignment."""
        return not self.manager.in_use and not self.keep_alignment

    @property
    def plain(self) -> bool:
        """Whether weights must be left unpacked, because a packed one cannot leave this process."""
        return self.manager.in_use

    @property
    def not_lent(self) -> str | None:
        """The reason why a requested memory manager does not hold everything, or None."""
        return self.manager.not_lent

    @property
    def not_by_leaf(self) -> str | None:
        """The reason why a tensor was copied although others have leaves of it, or None."""
        return self._not_by_leaf or self.manager.not_by_leaf

    def find(
        self, queries: Sequence[ResidentQuery], *, ask_manager: bool = True
    ) -> list[Resident | None]:
        """Look residents up, in order, as `ResidentProvider.find` does."""
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
        """Return the resident of this process with these bytes, or None."""
        return registry.lookup(key)

    def note(self, recipe: str, resident: AnyResident) -> None:
        """Remember which resident a recipe leads to, while the resident lives."""
        registry.register_record(recipe, resident)

    def get_or_build(
        self, requests: Sequence[ResidentRequest], check: Check | None = None
    ) -> list[tuple[Resident, bool]]:
        """Return a resident for each request, and whether it was built by this call.

        `check` is called with what was built in this process before anyone else can get it, and may
        raise; a manager hashes what it is given.

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
            built.append((first, new and first is resident))
        return built

    def _build(self, requests: Sequence[ResidentRequest]) -> list[Resident]:
        parts = [
            self._of_leaves(
                partial(build_from_leaves, each.tensor, each.digest, self._built, each.read)
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
        self._built.update(made)
        return made

    def _of_leaves(self, build: Callable[[], Resident | None]) -> Resident | None:
        try:
            return build()
        except MappingLimitError as error:
            self.note_not_by_leaf(str(error))
            return None

    def note_not_by_leaf(self, reason: str) -> None:
        """Remember why a tensor was copied although others have leaves of it; the first is told."""
        if self._not_by_leaf is None:
            self._not_by_leaf = reason
            _log.warning("a tensor is copied whole: %s", reason)

    def build_known(
        self,
        recipe: str,
        geometry: ResidentKey,
        contents: Sequence[Content],
        build: Callable[[Sequence[Resident], Admit | None], Resident | None],
    ) -> Resident | None:
        """Return what `build` makes of residents that have some of these contents, or None.

        They are not this load's own, and with a memory manager they are that one's, which is asked
        for room before anything is read (`build_from_contents`). What is built is to be entered
        with `enter_known`. Call `end_known` in any case, also after an error.

        Raises:
            SharedMemoryError: There is no memory for what nobody has.
        """
        if self.manager.in_use:
            donors = self.manager.having(geometry, contents)
            admit = partial(self.manager.admit, recipe, geometry)
            return self._of_leaves(partial(build, donors, admit))
        others = [each for each in registry.alike(geometry) if each not in self._built]
        return self._of_leaves(partial(build, others, None))

    def enter_known(self, recipe: str, resident: Resident) -> tuple[Resident, bool] | None:
        """Enter what `build_known` returned; return the one to use, and whether it is new.

        None means that the memory manager does not take it: drop it.
        """
        if not self.manager.in_use:
            return self.enter(resident)
        put = self.manager.put_built(resident)
        if put is None:
            return None
        first = registry.register(put[0])
        self.manager.announce_to_next_manager(recipe, first)
        return first, put[1] and first is put[0]

    def end_known(self) -> None:
        """Give up what `build_known` has reserved and `enter_known` was not called for."""
        self.manager.end_known()

    def note_contents(self, resident: Resident, contents: Sequence[Content]) -> None:
        """Remember what a resident consists of, for this process and where it is lent."""
        note_contents(resident, contents)
        self.manager.note_contents(resident, contents)

    def enter_read(self, resident: Resident) -> tuple[Resident, bool]:
        """Enter a resident that was read straight into a slab, as one that `get_or_build` built.

        Raises:
            SharedMemoryError: There is no memory for what it has in common with others.
        """
        return self.enter(self._of_leaves(partial(relink, resident, self._built)) or resident)

    def enter(self, resident: Resident) -> tuple[Resident, bool]:
        """Enter a resident; return the one to use, and whether it is this one."""
        self._built.add(resident)
        first = registry.register(resident)
        return first, first is resident

    def map(self, resident: AnyResident) -> torch.Tensor:
        """Return a copy-on-write mapping of a resident."""
        assert isinstance(resident, Resident)
        return resident.map()

    def private(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, which is where the model wants it."""
        return tensor

    def reason(self, name: str) -> str | None:
        """Return None: every tensor can be shared, because a writer gets pages of its own."""

    def close(self) -> None:
        """Do nothing, because nothing is open."""


def _in_this_process(query: ResidentQuery) -> Resident | None:
    found = registry.lookup_record(query.recipe)
    if isinstance(found, Resident):
        return found
    return registry.lookup(query.key) if query.key.digest else None


def host_provider_for(
    where: str | os.PathLike[str] | None, checkpoint: str, *, keep_alignment: bool = False
) -> HostProvider:
    """Return the provider of a load of `checkpoint`: this process and the manager at `where`.

    Without a manager that answers, which is logged, it is this process alone. There is one
    connection per process and manager, made when it is first needed and again after a fork.
    """
    return HostProvider(host_manager_residents(where, checkpoint), keep_alignment)
