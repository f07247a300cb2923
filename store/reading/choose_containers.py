"""Which containers to open for a set of pieces. No I/O."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tensor_dedup.store.index import PieceLocation
from tensor_dedup.store.objects import ContainerId

# Up to so many containers are opened although fewer hold all that is wanted: for what they have
# twice. A process may have a thousand files open, and an ensemble may lie in thousands.
_SPARE = 16
# One of which less than this is wanted is opened only for what no other has: its table is long.
_DENSE = 1 / 4


def choose_containers(places: Mapping[bytes, Sequence[PieceLocation]]) -> list[ContainerId]:
    """The containers to open for these pieces: as few as hold them all, and those of the others
    that hold little else, up to some.
    """
    wanted: Counter[ContainerId] = Counter()
    sizes: dict[ContainerId, int] = {}
    for held in places.values():
        for place in held:
            wanted[place.container] += place.nbytes
            sizes[place.container] = place.file_bytes
    ranked = sorted(wanted, key=lambda c: (wanted[c] < sizes[c] * _DENSE, -wanted[c], c))
    ranks = {container: rank for rank, container in enumerate(ranked)}
    chosen = {min(ranks[place.container] for place in held) for held in places.values()}
    spare = (
        rank
        for rank, container in enumerate(ranked)
        if rank not in chosen and wanted[container] >= sizes[container] * _DENSE
    )
    for rank in spare:
        if len(chosen) >= _SPARE:
            break
        chosen.add(rank)
    # What is not encoded is read first, what others own late.
    return sorted((ranked[rank] for rank in sorted(chosen)), key=lambda c: c.kind, reverse=True)
