"""Where residents come from: this process, the memory manager, or made for the purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensor_dedup.loader.registry import registry
from tensor_dedup.loader.residents import Resident, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from tensor_dedup.loader.lender import Lender, Wanted
    from tensor_dedup.types import ResidentKey

    # Raises when a resident is not of the bytes that the tensor had when it was hashed.
    Check = Callable[[Iterable[tuple[torch.Tensor, Resident]]], None]


@dataclass(slots=True)
class Supply:
    """The residents of one load. One thread. `lender`: with a memory manager.

    `as_aligned`: what is made in this process is aligned as the tensor it is made of.
    """

    lender: Lender | None = None
    as_aligned: bool = False

    @property
    def local(self) -> bool:
        """Is what is made kept in this process, at any alignment?"""
        return self.lender is None and not self.as_aligned

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
        first = registry.publish(lent)
        if not wanted.digest:
            self.lender.remember(recipe, first)
        return first

    def make(
        self, wanted: Sequence[Wanted], check: Check | None = None
    ) -> list[tuple[Resident, bool]]:
        """A resident for each, and whether it was made just now, by this call.

        `check` hears of what was made in this process before anybody else can have it; a manager
        hashes what it gets. What it raises; SharedMemoryError when there is no shared memory, here
        or in the manager.
        """
        lent = self.lender.put(wanted) if self.lender is not None else [None] * len(wanted)
        rest = [each for each, found in zip(wanted, lent, strict=True) if found is None]
        items = [(each.tensor, each.digest) for each in rest]
        local = pack(items, as_aligned=self.as_aligned) if items else []
        if check is not None:
            check(zip((each.tensor for each in rest), local, strict=True))
        packed = iter(local)
        made = []
        for each, found in zip(wanted, lent, strict=True):
            resident, new = found or (next(packed), True)
            first = registry.publish(resident)  # somebody here may have come first
            if self.lender is not None:
                self.lender.remember(each.key, first)
            made.append((first, new and first is resident))
        return made
