"""Tensors that somebody else computed, shared by what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensor_dedup.loader.comparing import COLLISION
from tensor_dedup.loader.lender import Wanted
from tensor_dedup.loader.memory import SharedMemoryError
from tensor_dedup.loader.residents import key_anywhere

if TYPE_CHECKING:
    import torch

    from tensor_dedup.loader.assembly import Assembly
    from tensor_dedup.loader.supply import AnyResident

Named = tuple[str, "torch.Tensor"]
Found = tuple["AnyResident | None", bool]
# What is smaller shares a slab with others of its layer. A slab is a descriptor, and a quantised
# layer has several tensors where another has one.
_OWN_SLAB_BYTES = 16 << 20


def residents_for(assembly: Assembly, finals: Sequence[Named]) -> list[Found]:
    """The residents with the bytes of these sharable tensors; was each made for it just now?

    None, with the reason in the ledger under the tensor's name, when another tensor has the same
    digest or there is no shared memory to be had.
    """
    wanted = []
    for _, tensor in finals:
        content = assembly.digest_of(tensor)
        wanted.append(Wanted(f"content:{key_anywhere(tensor, content)}", tensor, content))
    found: dict[int, Found] = {}
    for number, each in enumerate(wanted):
        resident = assembly.supply.by_content(key_anywhere(each.tensor, each.digest))
        if resident is not None:
            found[number] = (resident, False)
    for group in _slabs(wanted, [n for n in range(len(wanted)) if n not in found]):
        try:
            made = assembly.supply.make([wanted[number] for number in group])
        except SharedMemoryError as error:
            for number in group:
                assembly.ledger.skip(finals[number][0], str(error))
                found[number] = (None, False)
        else:
            found.update(zip(group, made, strict=True))
    return [_checked(assembly, finals[number], found[number]) for number in range(len(finals))]


def _slabs(wanted: Sequence[Wanted], missing: Sequence[int]) -> list[list[int]]:
    """Which of them go into one slab."""
    large = [n for n in missing if wanted[n].tensor.nbytes >= _OWN_SLAB_BYTES]
    small = [n for n in missing if wanted[n].tensor.nbytes < _OWN_SLAB_BYTES]
    return [*([number] for number in large), *([small] if small else [])]


def _checked(assembly: Assembly, final: Named, found: Found) -> Found:
    (name, tensor), (resident, made) = final, found
    if resident is None:
        return found
    if made:
        assembly.own.add(resident)
    elif not assembly.agrees(resident, tensor):
        assembly.ledger.skip(name, COLLISION)
        return None, False
    return found
