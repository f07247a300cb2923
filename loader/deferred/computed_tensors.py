"""Share tensors that vLLM's own processing has computed, by comparing their content.

Tensors of a layer that become resident lie together in *slabs*, pieces of shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensor_dedup.loader.not_shared import NotShared
from tensor_dedup.loader.residents.manager import ResidentRequest
from tensor_dedup.loader.residents.resident import key_anywhere
from tensor_dedup.loader.residents.slab import SharedMemoryError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Group the tensors of a layer by size into slabs (pieces of shared memory).

    `sizes` has the tensors' sizes in bytes. Returns, for each slab, the indices of its tensors:

    - Each tensor of 16 MiB or more has a slab of its own.
    - The tensors from 64 KiB up to 16 MiB share one slab.
    - The tensors below 64 KiB share another slab.
    """
    large = [[n] for n, size in enumerate(sizes) if size >= _OWN_SLAB_BYTES]
    middling = [n for n, size in enumerate(sizes) if _SMALL_BYTES <= size < _OWN_SLAB_BYTES]
    small = [n for n, size in enumerate(sizes) if size < _SMALL_BYTES]
    return [*large, *(group for group in (middling, small) if group)]


def share_by_content(session: LoadSession, finals: Sequence[Named]) -> list[Found]:
    """Find by hash, or build, a resident (shared tensor) with the bytes of each tensor in `finals`.

    Residents that one call builds lie in one slab, so call this once for each group from `slabs`.
    Returns a pair for each tensor, in order: the resident, and whether this call built it. The
    resident is None in two cases, and the session's ledger then has the reason:

    - There is no shared memory left.
    - With `verify_bytes`, the resident was found to have other bytes under the same digest.

    Raises:
        AuditError: An audit found a resident with other bytes under the same digest.
    """
    wanted = []
    for _, tensor in finals:
        content = session.reader.digest_of(tensor)
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
        session.memory.own.add(resident)
    if not session.checks.agrees(resident, tensor, new=made):
        session.ledger.skip(name, NotShared.COLLISION)
        return None, False
    return found
