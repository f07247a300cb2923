"""Lists of holders: for each manifest on a remote, the containers that hold its pieces.

A list of holders is a cache for pulls, in the form of a catalog segment. Its digest prefixes may be
shorter than those on which a push relies. If two pieces share a prefix, a pull reads at most one
table too many: only the table of a container decides which pieces are in it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.catalog import (
    PREFIX_BYTES,
    Catalog,
    CatalogSegment,
    ListedContainer,
    decode_segment,
    prefix_width,
    prefixes,
    segment_blob,
)
from tensor_dedup.remote.errors import DamagedRemoteError, RemoteAccessError
from tensor_dedup.remote.loads import LEAST_SAVED
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.format.manifests import Piece
from tensor_dedup.store.format.tables import PLAIN
from tensor_dedup.store.reading.reader import StoredPieces

# What holders may have for each that they name. It takes 70 in a container of its own.
_NAMED_BYTES: Final = 256
# One checkpoint in so many has two pieces with one prefix.
_MISTAKEN_BITS: Final = 6
# A pull fetches small containers whole, tables and all, of which almost all is wanted, when there
# are more than so many.
FEW_SMALL: Final = 6
SMALL_BYTES: Final = 32 << 20


class HeldContainer(ListedContainer, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The entry of a container in a list of holders (the containers of a manifest's pieces).

    `stored` is the number of bytes that the listed pieces take in the container, or 0 if the number
    is unknown or not needed.
    """

    stored: int = 0


class _Holders(CatalogSegment, frozen=True, array_like=True, forbid_unknown_fields=True):
    containers: Sequence[HeldContainer]


def stored_in(entry: ListedContainer) -> int:
    """Return how many bytes the pieces listed in `entry` take in the container, or 0 if unknown."""
    return min(max(0, entry.stored), entry.nbytes) if isinstance(entry, HeldContainer) else 0


def in_small_encoded(
    catalog: Catalog, reused: Mapping[tuple[bytes, bool], ContainerId]
) -> set[bytes]:
    """Return the pieces in `reused` whose stored sizes a list of holders has to record.

    `reused` has the pieces that a push need not send. It maps pairs (digest, whether stored without
    a base) to the containers that hold the pieces. The result has the pieces that are in small
    containers and may be encoded. If there are only a few small containers, it is empty.
    """
    small = {c for c in reused.values() if catalog.containers[c].nbytes <= SMALL_BYTES}
    if len(small) <= FEW_SMALL:
        return set()
    return {d for (d, _), c in reused.items() if c in small and c.kind != "pack"}


def sizes_of(source: StoredPieces, digests: Iterable[bytes]) -> dict[bytes, int]:
    """Return the sizes in bytes that pieces probably take on the remote, by digest.

    The size of a piece is that of its smallest encoded copy in the local store `source`. A piece
    that is too small to be encoded counts with its full size. Larger pieces without an encoded copy
    are left out.
    """
    found = dict[bytes, int]()
    for digest in digests:
        records = [record for _, record in source.own_places(digest)]
        sizes = [r.stored for r in records if r.codec != PLAIN or r.nbytes <= LEAST_SAVED]
        if sizes:
            found[digest] = min(sizes)
    return found


def relied_on(
    catalog: Catalog, reused: Mapping[tuple[bytes, bool], ContainerId]
) -> Iterator[ListedContainer]:
    """Iterate over copies of catalog entries that list only the pieces in `reused`.

    `reused` maps pairs (digest, whether stored without a base) to the containers that hold the
    pieces. The prefixes in the copies have their full length.
    """
    held: dict[ContainerId, tuple[list[bytes], list[bytes]]] = {}
    for (digest, alone), container in reused.items():
        held.setdefault(container, ([], []))[not alone].append(digest[:PREFIX_BYTES])
    for container, (alone_, deltas) in held.items():
        entry = catalog.containers[container]
        yield msgspec.structs.replace(
            entry, alone=b"".join(alone_), deltas=b"".join(deltas), width=PREFIX_BYTES
        )


def put_holders(
    bucket: Bucket,
    manifest: str,
    containers: Iterable[ListedContainer],
    sizes: Mapping[bytes, int],
) -> None:
    """Write the list of holders of `manifest`: the `containers` that hold its pieces.

    Prefixes in the list are shortened. `sizes` maps digests of pieces to their stored sizes in
    bytes, as far as these are known.
    """
    held = [*containers]
    if sum(each.nbytes <= SMALL_BYTES for each in held) > FEW_SMALL:
        known = {digest[:PREFIX_BYTES]: nbytes for digest, nbytes in sizes.items()}
        held = [_with_size(each, known) for each in held]
    pieces = sum(each.pieces for each in held)
    width = prefix_width(pieces * pieces, _MISTAKEN_BITS)
    blob = segment_blob(each.shortened(width) for each in held)
    bucket.put(layout.holders_key(manifest), [memoryview(blob)])


def _with_size(entry: ListedContainer, sizes: Mapping[bytes, int]) -> ListedContainer:
    own = [*prefixes(entry)]
    if entry.kind == "pack" or not sizes.keys() >= {*own}:
        return entry
    nbytes = sum(map(sizes.__getitem__, own))
    return HeldContainer(
        entry.name, entry.kind, entry.nbytes, entry.alone, entry.deltas, entry.width, nbytes
    )


def read_holders(bucket: Bucket, manifest: str, pieces: Sequence[Piece]) -> Catalog | None:
    """Read a manifest's list of holders as a catalog, or return None if there is no list.

    The list names the containers of the manifest's `pieces`. Some of these containers may have been
    deleted by a gc.

    Raises:
        DamagedRemoteError: The list is damaged, or too large for these pieces.
        NewerFormatError: The list has a later version.
    """
    key = layout.holders_key(manifest)
    # Each piece is named once, and once what it is against: a base, and all of its leaves but one.
    most = sum(1 + -(-piece.nbytes // LEAF_BYTES) for piece in pieces if piece.nbytes)
    # Sizes are what the manifest says. No frame that is read into memory is larger than this.
    limit = min(layout.TEXT_BYTES + most * _NAMED_BYTES, layout.FRAME_BYTES)
    try:
        found = bucket.get(key, limit)
    except RemoteAccessError:
        # What S3 says of an object that is not there to those who may not list.
        return None
    if found is None:
        return None
    holders, containers = Catalog(), decode_segment(found[0], bucket.at(key), _Holders)
    # Short prefixes of few bytes are many.
    if (count := sum(each.pieces for each in containers)) > most:
        what = f"they name {count} pieces, {most} are allowed"
        raise DamagedRemoteError.at(bucket.at(key), what)
    for container in containers:
        holders.add(container)
    return holders


def fault_of(
    held: Catalog | DamagedRemoteError | None, pieces: Collection[bytes], there: Catalog
) -> str | None:
    """Compare a manifest's list of holders with the tables; describe the fault of the list.

    `held` is the list as it was read, or the error of reading it, or None if there is no list.
    `there` is the catalog of the remote's tables. The result is:

    * None if there is no list, or the list is right;
    * an empty string if the list is outdated (it names containers that are not in `there`) or
      incomplete (it does not name a container for each of the `pieces`);
    * a description if the list is damaged or contradicts a table.
    """
    if held is None:
        return None
    if isinstance(held, DamagedRemoteError):
        return str(held)
    for container in held.containers.keys() & there.containers.keys():
        entry, right = held.containers[container], there.containers[container]
        known = {prefix[: entry.width] for prefix in prefixes(right)}
        if entry.nbytes != right.nbytes or not known.issuperset(prefixes(entry)):
            return f"it says of {container.name} what its table does not"
    whole = held.containers.keys() <= there.containers.keys() and all(map(held.holders, pieces))
    return None if whole else ""
