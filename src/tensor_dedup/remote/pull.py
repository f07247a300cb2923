"""Pull a checkpoint from a remote: only pieces that the store lacks are transferred.

A pull takes these steps:

1. Read the reference, the manifest and the manifest's pages, and determine the pieces that the
   store lacks.
2. Find the containers with these pieces in the manifest's list of holders or, if that list cannot
   be used, in the catalog.
3. Read the tables of these containers, and download ranges of the containers.
4. Commit the checkpoint in the same way as an import.

A remote cannot put wrong bytes into a store, because every manifest, page, table and leaf is
compared with its digest before the store refers to it. Pieces that an interrupted pull has received
completely are found by the next pull.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from tensor_dedup.digest import combine
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.catalog import (
    Catalog,
    read_catalog,
    read_table,
    read_table_within,
    rebuilt,
)
from tensor_dedup.remote.conditions import check_remote
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    LostRemotelyError,
    MissingRemoteError,
    RemoteAccessError,
    RemoteNameTakenError,
    RemoteUnreachableError,
    UnknownRemoteNameError,
    remote_damage,
)
from tensor_dedup.remote.holders import FEW_SMALL, SMALL_BYTES, read_holders, stored_in
from tensor_dedup.remote.pieces import LostPieces, RemotePieces, name_of, waste_of
from tensor_dedup.remote.results import TransferListener, TransferResult
from tensor_dedup.store.codecs.parts import leaf_bytes
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    NoSpaceError,
    UnknownNameError,
)
from tensor_dedup.store.format import manifests, tables
from tensor_dedup.store.format.manifests import Manifest, Piece
from tensor_dedup.store.format.names import check_name
from tensor_dedup.store.format.tables import Record, Table
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.steps.runs import (
    check_replaceable,
    parse_step_name,
)
from tensor_dedup.store.writing.transfer import Transfer

# A container is complete when it has so many bytes, or after so many seconds: what is not complete
# has to travel again.
_CONTAINER_BYTES: Final = 64 << 20
_CONTAINER_S: Final = 5.0
# Small containers that are wanted whole come with their tables, each in one request, with so much
# that is not wanted and in so much memory.
_WHOLES_BYTES: Final = 128 << 20
# What a table takes at least, which would be read anyway.
_TABLE_BYTES: Final = 200
_EMPTY: Final = bytes.fromhex(combine(0, []))
Place = tuple[ContainerId, Record]
Places = dict[bytes, Place]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RemoteManifest:
    """The manifest of a checkpoint on a remote, with all pieces of the checkpoint in order.

    * `name` is the name of the checkpoint.
    * `manifest` is the name of the manifest, and `content` is the decoded manifest.
    * `blobs` maps the names of the manifest and its pages to their encoded bytes.
    """

    name: str
    manifest: str
    content: Manifest
    pieces: Sequence[Piece]
    blobs: Mapping[str, bytes]


def read_ref(bucket: Bucket, name: str) -> str:
    """Return the name of the manifest of the checkpoint `name`, read from its reference.

    Raises:
        UnknownRemoteNameError: The remote has no checkpoint of this name.
        NotARemoteError: There is no remote.
        DamagedRemoteError: The reference is damaged.
    """
    manifest = find_ref(bucket, name)
    if manifest is None:
        check_remote(bucket)
        raise UnknownRemoteNameError.at(bucket.url, f"no checkpoint {name!r}", name=name)
    return manifest


def find_ref(bucket: Bucket, name: str) -> str | None:
    """Return the name of the manifest of the checkpoint `name`, read from its reference.

    Returns None if the remote does not have the name, or if the name was deleted.

    Raises:
        DamagedRemoteError: The reference is damaged.
    """
    key = layout.ref_key(check_name(name))
    found = bucket.get(key, layout.TEXT_BYTES)
    return None if found is None else layout.referred(found[0], name, bucket.at(key))


def list_refs(
    bucket: Bucket, run: str | None = None, *, thorough: bool = False
) -> dict[str, ObjectStatus]:
    """Return the checkpoint names on a remote, sorted, each with the status of its reference.

    With `run`, only steps and marks of this run are returned. A deleted name keeps a reference on
    the remote, but is left out. It is recognised by the size of that reference. So a damaged
    reference of the same size may be left out, too. If the remote is a folder, `thorough` prevents
    this: references of this size are then read.
    """
    found, deleted = dict[str, ObjectStatus](), dict[str, ObjectStatus]()
    for status in bucket.list(layout.REFS):
        name = layout.name_of_ref(status.key)
        if name is not None and (run is None or name.startswith(f"{run}@")):
            is_short = status.size == len(layout.reference(name, None))
            (deleted if is_short else found)[name] = status
    return dict(sorted([*found.items(), *_damaged(bucket, deleted, thorough and bucket.is_local)]))


def _damaged(
    bucket: Bucket, deleted: Mapping[str, ObjectStatus], every: bool
) -> Iterator[tuple[str, ObjectStatus]]:
    """Iterate over those that do not say that their name was deleted; `every` one is read."""
    for name, status in deleted.items():
        text = layout.reference(name, None)
        if status.may_be(text) and not every:
            continue
        held = bucket.get(status.key, layout.TEXT_BYTES)
        if held is not None and held[0] != text:
            yield name, status
        elif not every:
            return  # what look like sums there are none, and say nothing of the others


def read_manifest(
    bucket: Bucket,
    name: str,
    manifest: str,
    known: Callable[[str], bytes | None] = lambda _: None,
) -> RemoteManifest:
    """Read the manifest of the checkpoint `name` and its pages, and compare each with its digest.

    `manifest` is the name of the manifest. `known(name)` returns the bytes of a page or a manifest
    if the store has it, else None. Pages and manifests in the store are not read from the remote.

    Raises:
        MissingRemoteError: The manifest or a page is missing.
        DamagedRemoteError: The manifest or a page is damaged.
        NewerFormatError: The manifest or a page has a later version.
    """
    blob, content = read_content(bucket, manifest, known)
    where = bucket.at(layout.manifest_key(manifest))
    names = [page.hex() for page in dict.fromkeys(content.pages)]

    def page(part: str) -> bytes:
        return known(part) or _object(bucket, part, layout.PAGE_BYTES)

    blobs, pages = dict[str, bytes](), dict[str, Sequence[Piece]]()
    for part, found in zip(names, bucket.each(page, names), strict=True):
        with remote_damage(bucket.at(layout.manifest_key(part))) as path:
            pages[part] = manifests.decode_page(found, part, path).pieces
        blobs[part] = found
    pieces = [piece for part in content.pages for piece in pages[part.hex()]]
    with remote_damage(where) as path:
        manifests.check_pieces(content, pieces, path)
    _check_sizes(pieces, {_EMPTY: 0}, where)
    return RemoteManifest(name, manifest, content, pieces, {**blobs, manifest: blob})


def _check_sizes(pieces: Sequence[Piece], known: Mapping[bytes, int], where: str) -> None:
    """Raise DamagedRemoteError unless each digest has one size, the known one if there is any.

    A digest is one of bytes and of their number: of two sizes one is a lie.
    """
    sizes = dict(known)
    for piece in pieces:
        expected = sizes.setdefault(piece.digest, piece.nbytes)
        name, hexed = piece.name or "a header or small file", piece.digest.hex()
        if piece.nbytes != expected:
            what = f"{piece.nbytes} bytes of {hexed} ({name}), {expected} expected"
        elif piece.nbytes == 0 and piece.digest != _EMPTY:
            what = f"{hexed} ({name}) is no digest of 0 bytes"
        else:
            continue
        raise DamagedRemoteError.at(where, what, digest=hexed, tensors=[name])


def read_content(
    bucket: Bucket, manifest: str, known: Callable[[str], bytes | None] = lambda _: None
) -> tuple[bytes, Manifest]:
    """Read a manifest without its pages; return its bytes and the decoded manifest.

    `known(name)` returns the bytes of a manifest if the store has it, else None. A manifest in the
    store is not read from the remote.

    Raises:
        MissingRemoteError: The manifest is missing.
        DamagedRemoteError: The manifest is damaged.
        NewerFormatError: The manifest has a later version.
    """
    blob = known(manifest) or _object(bucket, manifest, layout.FRAME_BYTES)
    with remote_damage(bucket.at(layout.manifest_key(manifest))) as path:
        return blob, manifests.decode_manifest(blob, manifest, path)


def _object(bucket: Bucket, name: str, limit: int) -> bytes:
    key = layout.manifest_key(name)
    found = bucket.get(key, limit)
    if found is None:
        raise MissingRemoteError.at(bucket.at(key), "this manifest or page is gone")
    return found[0]


def pull(
    bucket: Bucket,
    name: str,
    here: tuple[Objects, StoreIndex, Hasher],
    progress: TransferListener,
    *,
    replace: bool = False,
    listed: ObjectStatus | None = None,
    seen: set[bytes] | None = None,
    lost: LostPieces | None = None,
    dry_run: bool = False,
) -> TransferResult:
    """Pull the checkpoint `name` into a store, where it gets the same name.

    * `here` has the objects, the index and the hasher of an open session of the store.
    * `listed` is the status of the checkpoint's reference, from a listing of the remote. If it
      proves that the reference equals the one in the store, the reference is not read.
    * `seen` has the digests of pieces that were counted in earlier results. They are not counted
      again. The digests of this checkpoint's pieces are added.
    * `lost` has the pieces that earlier pulls could not get. If the checkpoint needs one of them,
      the pull fails before any piece is transferred. Pieces that this pull cannot get are added.
    * With `dry_run`, only the manifest and its pages are read, and nothing is written.

    Raises:
        UnknownRemoteNameError: The remote has no checkpoint of this name.
        RemoteNameTakenError: The name stands for another checkpoint in the store, and `replace` is
            False.
        MissingRemoteError, DamagedRemoteError, CorruptRemoteTensorError: Objects on the remote are
            missing or damaged. Nothing was committed; received pieces are kept for the next
            attempt.
        NoSpaceError: The disk has no room for the missing pieces.
    """
    wanted = _look(bucket, name, here[0], replace, listed)
    if dry_run:
        return _planned(bucket, wanted, here[1], seen)
    return _bring(bucket, wanted, here, progress, seen, lost)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A checkpoint to pull: what its name stands for, there and here, and since when it is pulled.

    `before` has the bytes and the requests until then.
    """

    found: RemoteManifest
    held: str | None
    replace: bool
    began: float
    before: tuple[int, int]


def _look(
    bucket: Bucket, name: str, objects: Objects, replace: bool, listed: ObjectStatus | None
) -> _Wanted:
    """Read what a name stands for; its pages too."""
    began, before = time.monotonic(), bucket.traffic.counts()
    held = _held(objects, name)
    if held is not None and listed is not None and listed.surely_is(layout.reference(name, held)):
        manifest = held
    else:
        manifest = read_ref(bucket, name)
    if held is not None and held != manifest and not replace:
        what = f"{name!r} stands for another checkpoint here"
        raise RemoteNameTakenError.at(objects.layout.root, what, name=name)
    found = read_manifest(bucket, name, manifest, lambda part: _frame_here(objects, part))
    return _Wanted(found, held, replace, began, before)


def _planned(
    bucket: Bucket, of: _Wanted, index: StoreIndex, seen: set[bytes] | None
) -> TransferResult:
    """Count what is missing of a checkpoint, and was not counted for an earlier one."""
    found = of.found
    wanted = {piece.digest: piece.nbytes for piece in found.pieces}
    missing = {digest for digest, nbytes in wanted.items() if nbytes} - index.find(wanted).keys()
    moved = missing - (seen or set())
    nbytes, calls = bucket.traffic.counts()
    return TransferResult(
        url=bucket.url,
        names=(found.name,),
        pieces=newly_seen(wanted, seen),
        nbytes=found.content.nbytes,
        moved_pieces=len(moved),
        moved_bytes=sum(wanted[digest] for digest in moved),
        wire_bytes=nbytes - of.before[0],
        requests=calls - of.before[1],
        seconds=time.monotonic() - of.began,
        unchanged=of.held == found.manifest and not missing,
        done=False,
    )


def _bring(
    bucket: Bucket,
    of: _Wanted,
    here: tuple[Objects, StoreIndex, Hasher],
    progress: TransferListener,
    seen: set[bytes] | None,
    lost: LostPieces | None,
) -> TransferResult:
    """Fetch what is missing of a checkpoint, and commit it."""
    found, objects = of.found, here[0]
    name, manifest = found.name, found.manifest
    wanted = {piece.digest: piece.nbytes for piece in found.pieces}

    def commit(transfer: Transfer, missing: Sequence[bytes]) -> bool:
        unchanged = of.held == manifest and not missing
        if not unchanged:
            check = name_check(objects, name, manifest, of.replace)
            transfer.publish(name, manifest, found.blobs, check)
        return unchanged

    moved, unchanged = _gathered(bucket, found, wanted, here, progress, commit, lost=lost)
    nbytes, calls = bucket.traffic.counts()
    return TransferResult(
        url=bucket.url,
        names=(name,),
        pieces=newly_seen(wanted, seen),
        nbytes=found.content.nbytes,
        moved_pieces=len(moved.keys() & wanted.keys()),
        moved_bytes=sum(record.stored for _, record in moved.values()),
        wire_bytes=nbytes - of.before[0],
        requests=calls - of.before[1],
        seconds=time.monotonic() - of.began,
        unchanged=unchanged,
        anchor_pieces=len(moved.keys() - wanted.keys()),
    )


def newly_seen(wanted: Mapping[bytes, int], seen: set[bytes] | None) -> int:
    """Add the pieces in `wanted` to `seen`; return how many of them `seen` did not have.

    `wanted` maps digests to sizes. Pieces of 0 bytes are neither added nor counted.
    """
    held = seen if seen is not None else set()
    before = len(held)
    held.update(digest for digest, nbytes in wanted.items() if nbytes)
    return len(held) - before


def open_pulled(
    bucket: Bucket,
    name: str,
    here: tuple[Objects, StoreIndex, Hasher],
    progress: TransferListener,
    *,
    afresh: bool = False,
) -> StoredCheckpoint:
    """Pull the pieces of the checkpoint `name` into a store, and return the checkpoint, opened.

    `here` has the objects, the index and the hasher of an open session of the store. The store gets
    no name for the checkpoint, so a gc may delete the pieces after the result is closed. With
    `afresh`, pieces that the store has are pulled too, because these may be damaged.

    Raises:
        UnknownRemoteNameError: The remote has no checkpoint of this name.
        MissingRemoteError, DamagedRemoteError, CorruptRemoteTensorError: Objects on the remote are
            missing or damaged.
        NoSpaceError: The disk has no room for the missing pieces.
    """
    objects, index, _ = here
    manifest = read_ref(bucket, name)
    found = read_manifest(bucket, name, manifest, lambda part: _frame_here(objects, part))
    wanted = {piece.digest: piece.nbytes for piece in found.pieces if piece.nbytes}

    def commit(transfer: Transfer, _: Sequence[bytes]) -> None:
        transfer.complete()

    _gathered(bucket, found, wanted, here, progress, commit, afresh=afresh)
    return StoredCheckpoint(objects, index, name, (manifest, found.content, found.pieces))


def _gathered(
    bucket: Bucket,
    found: RemoteManifest,
    wanted: Mapping[bytes, int],
    here: tuple[Objects, StoreIndex, Hasher],
    progress: TransferListener,
    commit: Callable[[Transfer, Sequence[bytes]], _T],
    *,
    afresh: bool = False,
    lost: LostPieces | None = None,
) -> tuple[Places, _T]:
    """Fetch what is missing of `wanted`, or all with `afresh`, and `commit`.

    `commit` is given the transfer and the digests that were missing. Return where these were, with
    the anchors that came for them, and what `commit` returned.
    """
    objects, index, hasher = here
    lost = LostPieces() if lost is None else lost
    names = {piece.digest: piece.name for piece in found.pieces if piece.name is not None}
    moved: Places = {}

    def attempt(lookup: _Lookup) -> _T:
        with Transfer(objects, index, hasher, set(), _CONTAINER_BYTES, _CONTAINER_S) as transfer:
            missing = transfer.missing(wanted, gather=False)
            # What is here is asked of no table there, which would say that it has another size.
            where = bucket.at(layout.manifest_key(found.manifest))
            _check_sizes(found.pieces, transfer.sizes_here, where)
            if afresh:
                missing = [*wanted]
            if not moved:
                progress.saved(sum(wanted.values()) - sum(wanted[digest] for digest in missing))
            if missing:
                needed = {digest: wanted[digest] for digest in missing}
                lost.check(needed, names, where)
                places = lookup.places(needed)
                lost.check_places(places, names, where)
                moved.update(places)
                try:
                    _fetch(bucket, places, names, transfer, here, progress, lookup.wholes)
                except LostRemotelyError:
                    # Whoever needs it next, be it another step that ends so, finds it here.
                    transfer.complete()
                    raise
            return commit(transfer, missing)

    lookup = _Lookup(bucket, index, names, found, lost)
    try:
        try:
            done = attempt(lookup)
        except (LostRemotelyError, RemoteAccessError):
            # Of an object that is not there S3 says to those who may not list that they have no
            # access. The holders may name a container that was swept or found damaged since they
            # were written.
            if not lookup.by_holders:
                raise
            done = attempt(_Lookup(bucket, index, names, None, lost))
    except LostRemotelyError as error:
        lost.note(error, wanted)
        raise
    return moved, done


def _held(objects: Objects, name: str) -> str | None:
    try:
        return objects.ref(name)
    except UnknownNameError:
        return None


def _frame_here(objects: Objects, name: str) -> bytes | None:
    """The frame of a page or a manifest, if the store has it whole."""
    path = objects.layout.manifest(name)
    try:
        blob = objects.read(path)
        manifests.check_object(name, blob, path)
    except (MissingObjectError, DamagedFileError):
        return None
    return blob


def name_check(objects: Objects, name: str, manifest: str, replace: bool) -> Callable[[], None]:
    """Return a function that raises an error if a pull must not set `name` to `manifest`.

    Call the function just before the name is set in the store. If the name stands for another
    checkpoint, it raises:

    * RemoteNameTakenError if `replace` is False;
    * the errors of `check_replaceable` if the name is that of a step that must not be replaced.
    """
    step = parse_step_name(name)

    def check() -> None:
        held = _held(objects, name)
        if held is None or held == manifest:
            return
        if not replace:
            what = f"{name!r} stands for another checkpoint here"
            raise RemoteNameTakenError.at(objects.layout.root, what, name=name)
        if step is not None and not step.kept:
            check_replaceable(objects, step.run, step.step)

    return check


def _fetch(
    bucket: Bucket,
    places: Places,
    names: Mapping[bytes, str],
    transfer: Transfer,
    here: tuple[Objects, StoreIndex, Hasher],
    progress: TransferListener,
    wholes: Mapping[ContainerId, memoryview],
) -> None:
    """Copy what is missing, first what is stored by itself, then what is stored against others."""
    objects, index, _ = here
    total = sum(record.stored for _, record in places.values())
    free = objects.files.free_bytes(objects.layout.root)
    if total > free:
        what = f"{total} bytes to write, {free} free"
        raise NoSpaceError.at(objects.layout.root, what, nbytes=total, free=free)
    progress.start(total)
    bases = {base for _, record in places.values() for base in record.bases}
    parts = {part for _, record in places.values() for part in record.parts.values()}
    transfer.expect({digest: record.nbytes for digest, (_, record) in places.items()}, parts)
    alone = {d: place for d, place in places.items() if place[1].base is None}
    deltas = {d: place for d, place in places.items() if place[1].base is not None}
    with RemotePieces(bucket, alone, names, None, wholes) as source:
        _receive(source, alone, transfer, progress)
    if deltas:
        transfer.complete()
        with (
            StoredPieces(objects, index, bases) as held,
            RemotePieces(bucket, deltas, names, held, wholes) as source,
        ):
            _receive(source, deltas, transfer, progress)


def _receive(
    source: RemotePieces, places: Places, transfer: Transfer, progress: TransferListener
) -> None:
    """Take in what arrives; where something is lost, what is under way beside it, too."""
    lost: LostRemotelyError | None = None
    for digest in source.arriving():
        try:
            transfer.send(source, [digest])
        except LostRemotelyError as error:
            lost = lost or error
            source.stop()
        progress.advance(places[digest][1].stored)
    if lost is not None:
        raise lost


def _against_bytes(record: Record, there: Collection[bytes]) -> int:
    """The bytes of what a record is stored against and is not `there`."""
    base = 0 if record.base is None or record.base in there else record.nbytes
    new = (number for number, part in record.parts.items() if part not in there)
    return base + sum(leaf_bytes(number, record.nbytes) for number in new)


class _Lookup:
    """Where to fetch pieces from, by the holders of a manifest and the tables that they lead to.

    Where these do not do, or it is `of` no manifest, by the catalog; where that is lost, damaged,
    old or wrong, it is put together from all tables, once. `by_holders` tells whether tables were
    read that only the holders name, `wholes` has containers that came with their tables.
    """

    by_holders = False

    def __init__(
        self,
        bucket: Bucket,
        index: StoreIndex,
        names: Mapping[bytes, str],
        of: RemoteManifest | None,
        lost: LostPieces | None = None,
    ) -> None:
        self._bucket, self._names, self._of = bucket, names, of
        self._index = index
        self._lost = LostPieces() if lost is None else lost
        self._missing: Mapping[bytes, int] = {}
        self._parts: dict[bytes, int] = {}
        self._records: dict[bytes, list[tuple[ContainerId, Record]]] = {}
        self._known: set[ContainerId] = set()
        self._sizes: dict[ContainerId, int] = {}
        self.wholes: dict[ContainerId, memoryview] = {}

    def places(self, missing: Mapping[bytes, int]) -> Places:
        """Return where each missing piece is, and each anchor that is neither here nor missing.

        Pieces are given with their sizes.
        """
        self._missing = missing
        with suppress(DamagedRemoteError, MissingRemoteError, NewerFormatError):
            of = self._of
            holders = of and read_holders(self._bucket, of.manifest, of.pieces)
            if holders:
                self.by_holders = True
                return self._found(holders)
        try:
            catalog = read_catalog(self._bucket)
            if catalog is not None:
                return self._found(catalog)
        except (DamagedRemoteError, MissingRemoteError) as error:
            return self._from_tables(error)
        return self._from_tables(None)

    def _from_tables(self, error: DamagedRemoteError | MissingRemoteError | None) -> Places:
        self._records.clear()
        self._known.clear()
        try:
            # Not again for each of many checkpoints that are lost: these are all tables there.
            self._lost.rebuilt = self._lost.rebuilt or rebuilt(self._bucket)
        except RemoteUnreachableError:  # a plain web server lists nothing
            if error is not None:
                raise error from None
            raise
        return self._found(self._lost.rebuilt)

    def _found(self, catalog: Catalog) -> Places:
        self._sizes = {container: each.nbytes for container, each in catalog.containers.items()}
        self._read_tables(catalog, self._missing, alone=False)
        options = {digest: self._options(digest) for digest in self._missing}
        nowhere = set[bytes]()
        while True:
            places, local = self._cheapest(options)
            absent = self._add_anchors(catalog, places, local)
            if not absent:
                return places
            # What is against an anchor that is lost may have been pushed again in another way.
            nowhere |= absent
            stranded = {d: absent.intersection(places[d][1].bases) for d in options}
            stranded = {digest: bases for digest, bases in stranded.items() if bases}
            self._read({holder for digest in stranded for holder in catalog.holders(digest)})
            for digest, bases in stranded.items():
                held = self._options(digest)
                options[digest] = [p for p in held if nowhere.isdisjoint(p[1].bases)]
                if not options[digest]:
                    raise self._missing_error(min(bases))

    def _cheapest(self, options: Mapping[bytes, Sequence[Place]]) -> tuple[Places, set[bytes]]:
        """The copies that cost least, and what is here of what differences are against."""
        bases = {base for held in options.values() for _, r in held for base in r.bases}
        here = self._index.find(bases)
        local = {d for d, found in here.items() if any(place.base is None for place in found)}
        there = local | {*self._missing}
        # An anchor that is not here comes along, and only then: a plain copy may cost less.
        places: Places = {}
        for digest, held in options.items():
            costs = [record.stored + _against_bytes(record, there) for _, record in held]
            places[digest] = held[costs.index(min(costs))]
        return places, local

    def _add_anchors(
        self, catalog: Catalog, places: Places, local: Collection[bytes]
    ) -> set[bytes]:
        """Add what differences are against and is not here; return what of it is nowhere."""
        bases = [base for _, record in places.values() for base in record.bases]
        needed = [base for base in dict.fromkeys(bases) if base not in local]
        for _, record in places.values():
            self._parts |= {p: leaf_bytes(n, record.nbytes) for n, p in record.parts.items()}
        self._read_tables(catalog, [d for d in needed if not self._alone(d)], alone=True)
        nowhere = set[bytes]()
        for digest in needed:
            if alone := self._alone(digest):
                places[digest] = min(alone, key=lambda place: (place[1].stored, place[0]))
            else:
                nowhere.add(digest)
        return nowhere

    def _alone(self, digest: bytes) -> list[Place]:
        held = self._options(digest) if digest in self._records else []
        return [place for place in held if place[1].base is None]

    def _options(self, digest: bytes) -> list[tuple[ContainerId, Record]]:
        held = self._records.get(digest, [])
        wanted = self._missing.get(digest)  # of an anchor that is not missing no size is known
        for container, record in held:
            if wanted is not None and record.nbytes != wanted:
                name = self._name_of(digest)
                what = f"{record.nbytes} bytes of {digest.hex()} ({name}), {wanted} expected"
                where = self._bucket.at(layout.table_key(container.name))
                raise DamagedRemoteError.at(where, what, digest=digest.hex(), tensors=[name])
        if not held:
            raise self._missing_error(digest)
        return held

    def _name_of(self, digest: bytes) -> str:
        return name_of(digest, self._names)

    def _missing_error(self, digest: bytes) -> MissingRemoteError:
        name = self._name_of(digest)
        what = f"no container there holds {digest.hex()} ({name})"
        return MissingRemoteError.at(self._bucket.url, what, digest=digest.hex(), tensors=[name])

    def _read_tables(self, catalog: Catalog, wanted: Collection[bytes], *, alone: bool) -> None:
        """Read the tables of a small set of containers that together hold these pieces."""
        holders = {digest: catalog.holders(digest, alone=alone) for digest in wanted}
        while holders:
            counts = Counter(container for held in holders.values() for container in held)
            ranked = sorted(counts, key=lambda c: (-counts[c], c))
            ranks = {container: rank for rank, container in enumerate(ranked)}
            chosen = {d: min(held, key=ranks.__getitem__) for d, held in holders.items() if held}
            self._read({*chosen.values()}, self._wanted_whole(catalog, chosen))
            # A catalog with short prefixes names containers that do not hold a piece, too.
            holders = {
                digest: rest
                for digest, held in holders.items()
                if not any(not alone or r.base is None for _, r in self._records.get(digest, []))
                and (rest := [container for container in held if container not in self._known])
            }

    def _wanted_whole(
        self, catalog: Catalog, chosen: Mapping[bytes, ContainerId]
    ) -> dict[ContainerId, int]:
        """The sizes of the small containers of which all is wanted, but for very little.

        How many bytes encoded pieces take, holders may tell: of all that they name, together.
        """
        wanted, count = Counter[ContainerId](), Counter(chosen.values())
        for digest, container in chosen.items():
            wanted[container] += self._missing.get(digest) or self._parts.get(digest, 0)
        for container in (c for c in wanted if c.kind != "pack"):
            entry = catalog.containers[container]
            wanted[container] = stored_in(entry) if count[container] == entry.pieces else 0
        sizes = {container: catalog.containers[container].nbytes for container in wanted}
        known = {*self._known, *(c for c in wanted if c.kind not in layout.KINDS)}
        small = [c for c in wanted if sizes[c] <= SMALL_BYTES and c not in known]
        # Where others have not come, this one may not either: then its tables tell, by themselves.
        if len(small) <= FEW_SMALL or self._lost:
            return {}
        waste = waste_of(wanted.total())
        room = _WHOLES_BYTES - sum(view.nbytes for view in self.wholes.values())
        found: dict[ContainerId, int] = {}
        unwanted = {c: max(0, sizes[c] - wanted[c] - _TABLE_BYTES) for c in small}
        for container in sorted(small, key=lambda c: (unwanted[c], sizes[c], c)):
            waste -= unwanted[container]
            room -= sizes[container]
            if min(waste, room) < 0:
                break
            found[container] = sizes[container]
        return found

    def _with_table(self, container: ContainerId, nbytes: int) -> Table | None:
        """The table of a container that is fetched whole; None where its own has to be read."""
        key = layout.container_key(container)
        try:
            whole = self._bucket.get_range(key, 0, nbytes)
            with remote_damage(self._bucket.at(key)) as path:
                end = whole.nbytes - tables.TAIL_BYTES
                start = tables.table_start(bytes(whole[max(0, end) :]), whole.nbytes, path)
                blob = bytes(whole[start:end])
                table = tables.decode(blob, container.name, container.kind, path)
        except (FileNotFoundError, DamagedRemoteError, NewerFormatError):
            return None
        self.wholes[container] = whole
        return table

    def _table(self, container: ContainerId) -> Table:
        """Read the table of a container or, where that is gone or damaged, the one in it."""
        try:
            return read_table(self._bucket, container.name)
        except (DamagedRemoteError, MissingRemoteError):
            found = read_table_within(self._bucket, container, self._sizes[container])
            if found is None:
                raise
            return found

    def _read(
        self,
        containers: Collection[ContainerId],
        wholes: Mapping[ContainerId, int] | None = None,
    ) -> None:
        """Read the tables of these containers, of each once; `wholes` are fetched with theirs."""
        sizes = wholes or {}

        def read(container: ContainerId) -> list[Record]:
            table = self._with_table(container, sizes[container]) if container in sizes else None
            if table is None:
                table = self._table(container)
            if table.kind != container.kind:
                where = self._bucket.at(layout.table_key(container.name))
                raise DamagedRemoteError.at(where, f"it is of the kind {table.kind}")
            return table.records

        names = sorted(container for container in containers if container not in self._known)
        for container, records in zip(names, self._bucket.each(read, names), strict=True):
            self._known.add(container)
            for record in records:
                self._records.setdefault(record.digest, []).append((container, record))
