"""How the pieces that are alive lie on disk: as they are, or encoded, and what that saves."""

from collections.abc import Collection
from dataclasses import dataclass

from tensor_dedup.store.upkeep.gc import Held


@dataclass
class Coded:
    """What is stored by one codec: how many pieces, their bytes, and the bytes they take."""

    pieces: int = 0
    nbytes: int = 0
    stored_bytes: int = 0


def by_codec(held: Held, used: Collection[bytes]) -> dict[str, Coded]:
    """All pieces in `used`, each once, where it takes least, by codec. Computes only."""
    found: dict[str, Coded] = {}
    seen = set[bytes]()
    records = [r for pieces in held.values() for r in pieces.values() if r.digest in used]
    for record in sorted(records, key=lambda record: record.stored):
        if record.digest not in seen:
            seen.add(record.digest)
            coded = found.setdefault(record.codec, Coded())
            coded.pieces += 1
            coded.nbytes += record.nbytes
            coded.stored_bytes += record.stored
    return found
