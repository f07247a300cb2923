"""Tensors that somebody else computed, shared by what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensor_dedup.loader.residents.compare import COLLISION
from tensor_dedup.loader.residents.manager import ResidentRequest
from tensor_dedup.loader.residents.resident import key_anywhere
from tensor_dedup.loader.residents.slab import SharedMemoryError

if TYPE_CHECKING:
    import torch

    from tensor_dedup.loader.deferred.session import LoadSession
    from tensor_dedup.loader.residents.provider import AnyResident

Named = tuple[str, "torch.Tensor"]
Found = tuple["AnyResident | None", bool]
# What is smaller shares a slab with others of its layer. A slab is a descriptor, and a quantised
# layer has several tensors where another has one.
_OWN_SLAB_BYTES = 16 << 20
# What is smaller yet is often equal in models that have nothing else in common, and a slab stays as
# long as one tensor of it: these share one among themselves.
_SMALL_BYTES = 64 << 10


def slabs(sizes: Sequence[int]) -> list[list[int]]:
    """Which tensors of a layer, by their sizes in bytes, are to share a slab: numbers of each."""
    large = [[n] for n, size in enumerate(sizes) if size >= _OWN_SLAB_BYTES]
    middling = [n for n, size in enumerate(sizes) if _SMALL_BYTES <= size < _OWN_SLAB_BYTES]
    small = [n for n, size in enumerate(sizes) if size < _SMALL_BYTES]
    return [*large, *(group for group in (middling, small) if group)]


def share_by_content(assembly: LoadSession, finals: Sequence[Named]) -> list[Found]:
    """The residents with the bytes of these sharable tensors; was each made for it just now?

    Those that are made share a slab. None, with the reason in the ledger under the tensor's name,
    when another tensor has the same digest or there is no shared memory to be had.
    """
    wanted = []
    for _, tensor in finals:
        content = assembly.digest_of(tensor)
        wanted.append(ResidentRequest(f"content:{key_anywhere(tensor, content)}", tensor, content))
    found: dict[int, Found] = {}
    for number, each in enumerate(wanted):
        resident = assembly.provider.by_content(key_anywhere(each.tensor, each.digest))
        if resident is not None:
            found[number] = (resident, False)
    missing = [number for number in range(len(wanted)) if number not in found]
    try:
        made = (
            assembly.provider.get_or_build([wanted[number] for number in missing])
            if missing
            else []
        )
    except SharedMemoryError as error:
        for number in missing:
            assembly.ledger.skip(finals[number][0], str(error))
            found[number] = (None, False)
    else:
        found.update(zip(missing, made, strict=True))
    return [_checked(assembly, finals[number], found[number]) for number in range(len(finals))]


def _checked(assembly: LoadSession, final: Named, found: Found) -> Found:
    (name, tensor), (resident, made) = final, found
    if resident is None:
        return found
    if made:
        assembly.own.add(resident)
    elif not assembly.agrees(resident, tensor):
        assembly.ledger.skip(name, COLLISION)
        return None, False
    return found
