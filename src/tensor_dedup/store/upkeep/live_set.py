"""The live set: which pieces are readable, and which containers must stay for those in use. No I/O.

Stores and remotes are swept by the same rules, so both ask this module.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.format.external import EXTERNAL
from tensor_dedup.store.format.tables import Record

Records: TypeAlias = Mapping[ContainerId, Iterable[Record]]
"""The undamaged records of each container. They are iterated over several times."""
Held: TypeAlias = Mapping[ContainerId, Mapping[bytes, Record]]
"""The readable records of each container, by the digests of the pieces."""


def anchors(records: Records) -> set[bytes]:
    """Return the digests of the anchors: the pieces that deltas can be decoded against.

    An anchor is not stored as a delta, and not in an external container, which indexes a file
    outside the store.
    """
    own = (held for container, held in records.items() if container.kind != EXTERNAL)
    return {record.digest for held in own for record in held if record.base is None}


def readable(records: Records) -> dict[ContainerId, dict[bytes, Record]]:
    """Return the records that can be decoded, by container and digest.

    A delta is readable only if all pieces that it is encoded against are anchors.
    """
    there = anchors(records)
    return {
        container: {r.digest: r for r in held if there.issuperset(r.bases)}
        for container, held in records.items()
    }


def lost(live: Iterable[bytes], records: Records) -> set[bytes]:
    """Return the digests in `live` of which no container has a readable record."""
    there = {digest for held in readable(records).values() for digest in held}
    return {digest for digest in live if digest not in there}


@dataclass(frozen=True, slots=True)
class NeededPieces:
    """The containers that garbage collection must keep.

    `anchors` has the digests of the pieces against which pieces in use are stored as deltas.
    """

    containers: set[ContainerId]
    anchors: set[bytes]


def needed(live: Collection[bytes], containers: Held) -> NeededPieces:
    """Return the containers that must stay so that every piece in `live` remains readable.

    `containers` has the readable records of each container. The choice follows these rules:

    - If a piece is stored several times, one copy is kept, in the container with the most live
      bytes.
    - If that copy is a delta, the pieces it is encoded against are kept, too.
    - External containers, which index files outside the store, are kept only for pieces that no
      other container has.
    """
    own = {c: held for c, held in containers.items() if c.kind != EXTERNAL}
    chosen = _cover(live, own)
    against = {base for held in chosen.values() for each in held.values() for base in each.bases}
    alone = {
        container: {digest: record for digest, record in held.items() if record.base is None}
        for container, held in own.items()
    }
    there = {digest for container in chosen for digest in alone[container]}
    covered = {digest for held in chosen.values() for digest in held}
    others = {c: held for c, held in containers.items() if c.kind == EXTERNAL}
    elsewhere = _cover(set(live) - covered, others)
    return NeededPieces({*chosen, *_cover(against - there, alone), *elsewhere}, against)


def _cover(wanted: Collection[bytes], containers: Held) -> dict[ContainerId, dict[bytes, Record]]:
    """Containers that together hold all that is wanted, each with what it is kept for."""
    weight = {
        container: sum(r.nbytes for digest, r in held.items() if digest in wanted)
        for container, held in containers.items()
    }
    kept: dict[ContainerId, dict[bytes, Record]] = {}
    covered = set[bytes]()
    for container in sorted(containers, key=lambda c: (-weight[c], c)):
        fresh = {
            digest: record
            for digest, record in containers[container].items()
            if digest in wanted and digest not in covered
        }
        if fresh:
            kept[container] = fresh
            covered.update(fresh)
    return kept
