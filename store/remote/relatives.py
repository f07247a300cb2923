"""What a push need not ask or send, since a checkpoint that the remote has leads to it.

A fine-tune has most pages of its manifest in common with its base, and most pieces. While a
reference there leads to the base, all of that is there: no sweep deletes it within a lease.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.remote import layout
from tensor_dedup.store.remote.buckets import Bucket
from tensor_dedup.store.remote.errors import DamagedRemoteError, RemoteAccessError

# To ask for a reference are two requests, and a page is one.
_FEWEST_PAGES: Final = 3
# So many are asked for, until one is there.
_ASKED: Final = 2


@dataclass(frozen=True, slots=True)
class Relative:
    """A checkpoint: its name, the names of its manifest and pages, and its pieces, read if asked.

    `pieces` may raise a StoreError.
    """

    name: str
    manifest: str
    pages: Collection[str]
    pieces: Callable[[], Collection[bytes]]


def relatives(objects: Objects, names: Collection[str], pages: Collection[str]) -> list[Relative]:
    """Return the checkpoints of a store that have some of these pages, first those with most.

    Of several that have as many the one that was named first: that may be the base of the others.
    Those of these `names` are left out, and so is what cannot be read.
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


def first_there(bucket: Bucket, candidates: Iterable[Relative]) -> Relative | None:
    """Return the first of these checkpoints that the remote has, too, or None.

    An answer may be an old one: that it is there is asked for twice.
    """
    for relative, _ in zip(candidates, range(_ASKED), strict=False):
        key = layout.ref_key(relative.name)
        with suppress(DamagedRemoteError, NewerFormatError, RemoteAccessError):
            found = bucket.get(key, layout.TEXT_BYTES)
            if found is None:
                continue
            there = layout.referred(found[0], relative.name, bucket.at(key))
            if there == relative.manifest and bucket.still_has(key, found[1]):
                return relative
    return None
