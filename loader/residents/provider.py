"""Where residents come from: this process, the memory manager, or made for the purpose.

`HostProvider` has them in the machine's memory; `tensor_dedup.loader.cuda.provider` on a GPU.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from tensor_dedup.loader.residents.manager import ManagerResidents, ResidentRequest, client_of
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import Resident, pack
from tensor_dedup.memory_manager.client.names import checkpoint_name
from tensor_dedup.memory_manager.errors import MemoryManagerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from tensor_dedup.loader.cuda.residents import DeviceResident
    from tensor_dedup.types import ResidentKey

    # Raises when a resident is not of the bytes that the tensor had when it was hashed.
    Check = Callable[[Iterable[tuple[torch.Tensor, Resident]]], None]
    AnyResident: TypeAlias = Resident | DeviceResident

_log: Final = logging.getLogger(__name__)
# Smaller tensors of one call share a slab: a page each in the file, and one descriptor for all.
_OWN_SLAB_BYTES: Final = 64 << 10


class ResidentProvider(Protocol):
    """Where the final tensors of one vLLM load live. One thread.

    `own_slab_bytes`: from here on a tensor has a slab of its own; smaller ones are made together,
    `batch_bytes` at a time. `local`: is what is made kept in this process, in the machine's memory,
    at any alignment? `plain`: must weights be left plain, for whoever else maps them? `not_lent`:
    why other processes do not get it, or not all, although that was asked for.
    """

    @property
    def own_slab_bytes(self) -> int: ...

    @property
    def batch_bytes(self) -> int: ...

    @property
    def local(self) -> bool: ...  # see the class

    @property
    def plain(self) -> bool: ...

    @property
    def not_lent(self) -> str | None: ...

    def by_recipe(self, recipe: str, wanted: ResidentKey) -> AnyResident | None:
        """The resident that a recipe leads to, without a byte read."""

    def by_content(self, key: ResidentKey) -> AnyResident | None:
        """The resident of this process with these bytes."""

    def note(self, recipe: str, resident: AnyResident) -> None:
        """Remember what a recipe leads to, while the resident lives."""

    def get_or_build(self, wanted: Sequence[ResidentRequest]) -> Sequence[tuple[AnyResident, bool]]:
        """A resident for each, and whether it was made by this call. SharedMemoryError."""

    def map(self, resident: AnyResident) -> torch.Tensor:
        """A resident as the model of this load sees it. SharedMemoryError."""

    def private(self, tensor: torch.Tensor) -> torch.Tensor:
        """A private tensor of the host where the model wants it."""

    def reason(self, name: str) -> str | None:
        """Why a tensor of that name stays private here, or None."""

    def close(self) -> None:
        """The load has ended."""


@dataclass(slots=True)
class HostProvider:
    """The residents of one load. One thread. `lender`: with a memory manager.

    `keep_alignment`: what is made in this process is aligned as the tensor it is made of. `failed`:
    why there is no lender, where one was asked for.
    """

    lender: ManagerResidents | None = None
    keep_alignment: bool = False
    own_slab_bytes: int = _OWN_SLAB_BYTES
    batch_bytes: int = 1 << 62  # all that a call wants
    failed: str | None = None

    @property
    def local(self) -> bool:
        """Is what is made kept in this process, at any alignment?"""
        return self.lender is None and not self.keep_alignment

    @property
    def plain(self) -> bool:
        """Must weights be left plain? A packed one cannot leave this process."""
        return self.lender is not None

    @property
    def not_lent(self) -> str | None:
        """Why a memory manager that was asked for is not used for all, or None."""
        if self.lender is not None:
            return self.lender.failed or self.lender.refused
        return self.failed

    def by_content(self, key: ResidentKey) -> Resident | None:
        """The resident of this process with these bytes."""
        return registry.lookup(key)

    def note(self, recipe: str, resident: AnyResident) -> None:
        """Remember what a recipe leads to, while the resident lives."""
        registry.register_record(recipe, resident)

    def map(self, resident: AnyResident) -> torch.Tensor:
        """A mapping, copied on write."""
        assert isinstance(resident, Resident)
        return resident.map()

    def private(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor: it is where the model wants it."""
        return tensor

    def reason(self, name: str) -> str | None:
        """None: whoever writes gets pages of its own."""

    def close(self) -> None:
        """Nothing is open."""

    def by_recipe(self, recipe: str, wanted: ResidentKey) -> Resident | None:
        """The resident that a recipe leads to, without a byte read.

        `wanted.digest` is "" where the recipe is more than one whole source.
        """
        found = registry.lookup_record(recipe)
        if isinstance(found, Resident):
            return found
        here = registry.lookup(wanted) if wanted.digest else None
        if here is not None or self.lender is None:
            return here
        lent = (
            self.lender.by_content(wanted)
            if wanted.digest
            else self.lender.by_recipe(recipe, wanted)
        )
        if lent is None:
            return None
        first = registry.register(lent)
        if not wanted.digest:
            self.lender.announce_to_next_manager(recipe, first)
        return first

    def get_or_build(
        self, wanted: Sequence[ResidentRequest], check: Check | None = None
    ) -> list[tuple[Resident, bool]]:
        """A resident for each, and whether it was made just now, by this call.

        `check` hears of what was made in this process before anybody else can have it; a manager
        hashes what it gets. What it raises; SharedMemoryError when there is no shared memory, here
        or in the manager.
        """
        lent = self.lender.put(wanted) if self.lender is not None else [None] * len(wanted)
        rest = [each for each, found in zip(wanted, lent, strict=True) if found is None]
        items = [(each.tensor, each.digest) for each in rest]
        local = pack(items, keep_alignment=self.keep_alignment) if items else []
        if check is not None:
            check(zip((each.tensor for each in rest), local, strict=True))
        packed = iter(local)
        made = []
        for each, found in zip(wanted, lent, strict=True):
            resident, new = found or (next(packed), True)
            first = registry.register(resident)  # somebody here may have come first
            if self.lender is not None:
                self.lender.announce_to_next_manager(each.key, first)
            made.append((first, new and first is resident))
        return made


def host_provider_for(
    where: str | os.PathLike[str] | None, checkpoint: str, *, keep_alignment: bool = False
) -> HostProvider:
    """Where a load of `checkpoint` finds residents: here, and in the manager at `where`.

    Without a manager, with a warning, only here. One connection a process and manager, made when
    first needed, again after a fork.
    """
    if where is None:
        return HostProvider(keep_alignment=keep_alignment)
    try:
        lender = ManagerResidents(client_of(os.fspath(where)), checkpoint_name(checkpoint))
    except MemoryManagerError as error:
        _log.warning("%s: loading without a memory manager: %s", checkpoint, str(error))
        return HostProvider(keep_alignment=keep_alignment, failed=str(error))
    return HostProvider(lender, keep_alignment=keep_alignment)
