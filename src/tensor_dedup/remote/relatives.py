"""Find objects that a push need not send, because a related checkpoint is on the remote.

A fine-tune shares most manifest pages and most pieces with its base. While a reference on the
remote leads to the base, and for a lease afterwards, no gc deletes these objects. They may still
have been lost, for example if the remote was copied incompletely. So a push checks that they exist,
but does not read them.
"""

import math
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.catalog import Catalog
from tensor_dedup.remote.errors import DamagedRemoteError, RemoteAccessError
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format import manifests
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.objects import Objects

# To ask for a reference may be two requests, and a page is one.
_FEWEST_PAGES: Final = 3
# So many are asked for, until one is there.
_ASKED: Final = 2
# Of more containers than so many, listing all costs less than asking for each; of fewer, where all
# are few, or where each would be a request too many and a list is not too many bytes.
_ASKED_CONTAINERS: Final = 8
_FEW_CONTAINERS: Final = 2
# What an object takes in a list, and what a list may: so much, a share of what is sent, and so much
# for each page or table that is not asked for then.
_LISTED_BYTES: Final = 350
_LIST_BYTES: Final = 16 << 10
_LIST_SHARE: Final = 0.005
_HEAD_BYTES: Final = 2 << 10


@dataclass(frozen=True, slots=True)
class Relative:
    """A checkpoint of the store that shares parts of its manifest (pages) with a pushed one.

    `pages` are the names of all its pages. `pieces` returns the digests of its pieces, and may
    raise a StoreError.
    """

    name: str
    manifest: str
    pages: Collection[str]
    pieces: Callable[[], Collection[bytes]]


def relatives(objects: Objects, names: Collection[str], pages: Collection[str]) -> list[Relative]:
    """Return the checkpoints of a store that have at least three of the manifest pages in `pages`.

    The checkpoint with the most of these pages comes first. Among checkpoints with equally many,
    the one with the oldest reference comes first, since it may be the base of the others.
    Checkpoints in `names`, and those that cannot be read, are left out.
    """
    wanted = {*pages}
    if len(wanted) < _FEWEST_PAGES:
        return []
    found: list[tuple[int, int, Relative]] = []
    for name in objects.names():
        with suppress(StoreError):
            if name in names:
                continue
            manifest = objects.ref(name)
            content = objects.manifest(manifest)
            own = {page.hex() for page in content.pages}
            status = objects.files.status(objects.layout.refs / file_of(name))
            if len(own & wanted) < _FEWEST_PAGES or status is None:
                continue

            def pieces(manifest: str = manifest) -> Collection[bytes]:
                held = objects.pieces(manifest, objects.manifest(manifest))
                return {piece.digest for piece in held if piece.nbytes}

            rank = (-len(own & wanted), status.mtime_ns)
            found.append((*rank, Relative(name, manifest, own, pieces)))
    return [each for *_, each in sorted(found, key=lambda each: each[:2])]


def first_there(bucket: Bucket, candidates: Iterable[Relative], *, surely: bool) -> Relative | None:
    """Return the first of `candidates` that the remote has under the same name, or None.

    Only the first few candidates are looked up. With `surely`, the reference is requested a second
    time, because the first answer may be outdated.
    """
    for relative, _ in zip(candidates, range(_ASKED), strict=False):
        key = layout.ref_key(relative.name)
        with suppress(DamagedRemoteError, NewerFormatError, RemoteAccessError):
            found = bucket.get(key, layout.TEXT_BYTES)
            if found is None:
                continue
            there = layout.referred(found[0], relative.name, bucket.at(key))
            if there != relative.manifest:
                continue
            if not surely or bucket.still_has(key, found[1]):
                return relative
    return None


def pages_there(
    bucket: Bucket, catalog: Catalog, relative: Relative, blobs: Collection[str], sent: int
) -> set[str]:
    """Return those of the pages in `blobs` that `relative` has and that exist on the remote.

    `sent` is the number of bytes that the push sends. The larger it is, the more bytes this check
    may transfer in order to save requests.
    """
    common = {layout.manifest_key(part): part for part in blobs if part in relative.pages}
    # About so many are there: a push has two or more, and a page is of so many pieces.
    pieces = sum(entry.pieces for entry in catalog.containers.values())
    count = 2 * len(catalog.containers) + pieces // manifests.PAGE_ENTRIES
    count += _condemned(catalog, layout.MANIFESTS)
    spare = _spare(sent) + len(common) * _HEAD_BYTES
    return {common[key] for key in _sizes(bucket, layout.MANIFESTS, common, count, spare)}


def lost(
    bucket: Bucket,
    catalog: Catalog,
    containers: Collection[ContainerId],
    sent: int,
    left: int,
    *,
    mending: bool,
) -> set[ContainerId]:
    """Return those of `containers` that are missing on the remote or have a wrong size.

    With `mending`, containers whose table object is missing are returned too. `sent` is the number
    of bytes that the push sends. `left` is the number of bytes that the push may still cost.
    """
    count = len(catalog.containers) + _condemned(catalog, layout.CONTAINERS)
    keys = {layout.container_key(each): each for each in containers}
    spare = _spare(sent)
    if len(keys) > _FEW_CONTAINERS:
        spare = max(spare, left) if len(keys) <= _ASKED_CONTAINERS else math.inf
    sizes = _sizes(bucket, layout.CONTAINERS, keys, count, spare)
    tables = {layout.table_key(each.name): each for each in containers if mending}
    spare = _spare(sent) + len(tables) * _HEAD_BYTES
    sizes |= _sizes(bucket, layout.TABLES, tables, count, spare)

    def is_whole(key: str) -> bool:
        whole = catalog.containers[keys[key]].nbytes if key in keys else sizes.get(key)
        return key in sizes and sizes[key] == whole

    # An answer may be old: one is not enough to send again what is there.
    gone = [key for key in (*keys, *tables) if not is_whole(key)]
    sizes |= {s.key: s.size for s in bucket.each(bucket.head, gone) if s is not None}
    return {(keys | tables)[key] for key in gone if not is_whole(key)}


def _condemned(catalog: Catalog, prefix: str) -> int:
    """The number of objects with this prefix that are listed, and that nothing leads to."""
    trash = catalog.trash
    return sum(key.startswith(prefix) for key in {*trash.condemned, *trash.deleting})


def _spare(sent: int) -> float:
    return _LIST_BYTES + _LIST_SHARE * sent


def _sizes(
    bucket: Bucket, prefix: str, keys: Collection[str], count: int, spare: float
) -> dict[str, int]:
    """Return the sizes of those of these objects that are there, of about `count` in all.

    They are listed if that takes fewer requests than to ask for each, and `spare` bytes at most.
    """
    if count * _LISTED_BYTES <= spare and count // 1000 + 1 < len(keys):
        return {s.key: s.size for s in bucket.list(prefix) if s.key in keys}
    return {s.key: s.size for s in bucket.each(bucket.head, keys) if s is not None}
