"""Where residents come from: this process, the memory manager, or made for the purpose.

A load looks up what it can name (`find`), makes the rest (`get_or_build`) and maps both into its
model. `HostProvider` has residents in the machine's memory; `tensor_dedup.loader.cuda.provider` has
them on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from tensor_dedup.loader.residents.manager import (
    HostResidents,
    ManagerResidents,
    ResidentQuery,
    ResidentRequest,
    host_manager_residents,
)
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import Resident, pack

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from tensor_dedup.types import ResidentKey

    # Raises when a resident is not of the bytes that the tensor had when it was hashed.
    Check = Callable[[Iterable[tuple[torch.Tensor, Resident]]], None]

# Smaller tensors of one call share a slab: a page each in the file, and one descriptor for all.
_OWN_SLAB_BYTES: Final = 64 << 10


class AnyResident(Protocol):
    """A resident of host memory or of a GPU."""

    @property
    def key(self) -> ResidentKey:
        """Its dtype, geometry and digest."""

    @property
    def nbytes(self) -> int:
        """Its size."""


class ResidentProvider(Protocol):
    """The source of the final tensors of one vLLM load. One thread."""

    @property
    def own_slab_bytes(self) -> int:
        """The size from which a tensor has a slab of its own; smaller ones are made together."""

    @property
    def batch_bytes(self) -> int:
        """How much of the smaller ones is made together."""

    @property
    def local(self) -> bool:
        """Whether what is made stays in this process, in the machine's memory, at any alignment."""

    @property
    def plain(self) -> bool:
        """Whether weights must be left plain, for whoever else maps them."""

    @property
    def not_lent(self) -> str | None:
        """Why other processes do not get all of it although that was asked for, or None."""

    def find(
        self, queries: Sequence[ResidentQuery], *, ask_manager: bool = True
    ) -> Sequence[AnyResident | None]:
        """Look residents up, in order, without a byte read.

        In this process first; what it lacks, in the memory manager, all at once, unless
        `ask_manager` is False. Hold what is found: every table is weak, and a query is answered
        without a message only while somebody holds the answer.
        """

    def by_content(self, key: ResidentKey) -> AnyResident | None:
        """Return the resident of this process with these bytes."""

    def note(self, recipe: str, resident: AnyResident) -> None:
        """Remember what a recipe leads to, while the resident lives."""

    def get_or_build(
        self, requests: Sequence[ResidentRequest]
    ) -> Sequence[tuple[AnyResident, bool]]:
        """Return a resident for each, and whether it was made by this call.

        Raises:
            SharedMemoryError: There is no room; keep the tensors private.
        """

    def map(self, resident: AnyResident) -> torch.Tensor:
        """Return a resident as the model of this load sees it.

        Raises:
            SharedMemoryError: It cannot be mapped.
        """

    def private(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a private tensor of the host where the model wants it."""

    def reason(self, name: str) -> str | None:
        """Return why a tensor of that name stays private here, or None."""

    def close(self) -> None:
        """End the load."""


@dataclass(slots=True)
class HostProvider:
    """The residents of one load in the machine's memory. One thread.

    With `keep_alignment`, what is made in this process is aligned as the tensor it is made of.
    """

    manager: HostResidents = field(default_factory=ManagerResidents)
    keep_alignment: bool = False
    own_slab_bytes: int = _OWN_SLAB_BYTES
    batch_bytes: int = 1 << 62  # all that a call wants

    @property
    def local(self) -> bool:
        """Whether what is made stays in this process, at any alignment."""
        return not self.manager.in_use and not self.keep_alignment

    @property
    def plain(self) -> bool:
        """Whether weights must be left plain: a packed one cannot leave this process."""
        return self.manager.in_use

    @property
    def not_lent(self) -> str | None:
        """Why a memory manager that was asked for is not used for all, or None."""
        return self.manager.not_lent

    def find(
        self, queries: Sequence[ResidentQuery], *, ask_manager: bool = True
    ) -> list[Resident | None]:
        """Look residents up, in order; see `ResidentProvider.find`."""
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
        """Return the resident of this process with these bytes."""
        return registry.lookup(key)

    def note(self, recipe: str, resident: AnyResident) -> None:
        """Remember what a recipe leads to, while the resident lives."""
        registry.register_record(recipe, resident)

    def get_or_build(
        self, requests: Sequence[ResidentRequest], check: Check | None = None
    ) -> list[tuple[Resident, bool]]:
        """Return a resident for each, and whether it was made just now, by this call.

        `check` hears of what was made in this process before anybody else can have it, and may
        raise; a manager hashes what it gets.

        Raises:
            SharedMemoryError: There is no shared memory to be had, here or in the manager.
        """
        lent = self.manager.put(requests)
        rest = [each for each, found in zip(requests, lent, strict=True) if found is None]
        items = [(each.tensor, each.digest) for each in rest]
        local = pack(items, keep_alignment=self.keep_alignment) if items else []
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

    def map(self, resident: AnyResident) -> torch.Tensor:
        """Return a mapping, copied on write."""
        assert isinstance(resident, Resident)
        return resident.map()

    def private(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor: it is where the model wants it."""
        return tensor

    def reason(self, name: str) -> str | None:
        """Return None: whoever writes gets pages of its own."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


def _in_this_process(query: ResidentQuery) -> Resident | None:
    found = registry.lookup_record(query.recipe)
    if isinstance(found, Resident):
        return found
    return registry.lookup(query.key) if query.key.digest else None


def host_provider_for(
    where: str | os.PathLike[str] | None, checkpoint: str, *, keep_alignment: bool = False
) -> HostProvider:
    """Return where a load of `checkpoint` finds residents: here, and in the manager at `where`.

    Without a manager, with a warning, only here. There is one connection a process and manager,
    made when it is first needed, and again after a fork.
    """
    return HostProvider(host_manager_residents(where, checkpoint), keep_alignment)
