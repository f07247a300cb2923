"""Which containers to open for a set of pieces. No I/O."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tensor_dedup.store.index import Place
from tensor_dedup.store.objects import ContainerId

# Up to so many containers are opened although fewer hold all that is wanted: for what they have
# twice. A process may have a thousand files open, and an ensemble may lie in thousands.
_SPARE = 64


def enough(places: Mapping[bytes, Sequence[Place]]) -> list[ContainerId]:
    """The containers to open for these pieces: all, or, of many, as few as hold them all."""
    weights = Counter(place.container for held in places.values() for place in held)
    if len(weights) <= _SPARE:
        return list(weights)
    ranks = {container: rank for rank, (container, _) in enumerate(weights.most_common())}
    best = (min((p.container for p in held), key=ranks.__getitem__) for held in places.values())
    return list(dict.fromkeys(best))
