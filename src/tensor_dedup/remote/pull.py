"""Pull checkpoints from a remote: only pieces that the store lacks are transferred.

For each checkpoint, a pull takes these steps:

1. Read the reference, the manifest and the manifest's pages.
2. Determine the pieces that the store lacks.
3. Of a training step, download what changed since the step before, if the store has that step and
   the remote these differences.
4. Locate all other pieces in containers, by the catalog and the containers' tables.
5. Download ranges of the containers into containers of the store.
6. Commit the checkpoint in the same way as an import.

A remote cannot put wrong bytes into a store, because every manifest, page, table and leaf is
compared with its digest before the store refers to it. Pieces that an interrupted pull has received
completely are found by the next pull.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout, step_deltas
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.errors import (
    LostRemotelyError,
    RemoteNameTakenError,
    UnknownRemoteNameError,
)
from tensor_dedup.remote.locate import GONE, UNREADABLE, Locator
from tensor_dedup.remote.manifests import RemoteManifest, check_sizes, read_manifest, read_ref
from tensor_dedup.remote.pieces import Places, RemotePieces
from tensor_dedup.remote.results import TransferListener, TransferResult
from tensor_dedup.store.errors import (
    AdvisedError,
    DamagedFileError,
    MissingObjectError,
    NoSpaceError,
    UnknownNameError,
)
from tensor_dedup.store.format import manifests
from tensor_dedup.store.format.names import marked_by
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.steps.runs import check_replaceable, parse_step_name
from tensor_dedup.store.writing.transfer import Transfer

# A container is complete when it has so many bytes, or after so many seconds: what is not complete
# has to travel again.
_CONTAINER_BYTES: Final = 64 << 20
_CONTAINER_S: Final = 5.0

Session = Callable[[], AbstractContextManager[tuple[StoreIndex, Hasher]]]
"""Opens a session of a store: a context manager that provides its index and a hasher."""


def pull(
    bucket: Bucket,
    refs: Mapping[str, ObjectStatus | None],
    objects: Objects,
    session: Session,
    progress: TransferListener,
    *,
    replace: bool = False,
    dry_run: bool = False,
    from_anchor: bool = False,
    came: Callable[[str], object] | None = None,
) -> list[TransferResult]:
    """Pull the checkpoints in `refs`: a single checkpoint, or the steps and marks of a run.

    `refs` maps their names to the statuses of their references, from a listing of the remote, or to
    None. A status that proves that the reference equals the one in the store saves a request.

    Each checkpoint gets the same name in the store, in a `session` of its own. If data of a step is
    lost or damaged, the step and its mark are skipped, and the other steps are still pulled. Steps
    that were deleted on the remote meanwhile are skipped, too. Any other error ends the pull. With
    `dry_run`, only manifests and their pages are read, and nothing is written. With `from_anchor`,
    what changed in a step since the step before is not used, so that the store has the step against
    what the remote has it against. `came` is called with each name just after its commit.

    Raises:
        UnknownRemoteNameError: The remote has none of the checkpoints.
        RemoteNameTakenError: A name stands for another checkpoint in the store, and `replace` is
            False.
        MissingRemoteError, DamagedRemoteError, CorruptRemoteTensorError: Objects on the remote are
            missing or damaged. The checkpoint was not committed; received pieces are kept for the
            next attempt. For a run, the message lists the steps that were not pulled.
        NoSpaceError: The disk has no room for the missing pieces of a checkpoint.
    """
    work = _Pull(bucket, objects, progress, replace, dry_run, from_anchor)
    results: list[TransferResult] = []
    failed: dict[str, StoreError] = {}
    deleted: dict[str, UnknownRemoteNameError] = {}
    for name, listed in refs.items():
        # A mark alone would keep its step from being saved by a training that goes on.
        if marked_by(name) in {*failed, *deleted}:
            continue
        with session() as (index, hasher):
            try:
                results.append(work.one(name, listed, index, hasher))
                if came is not None:
                    came(name)
            except UnknownRemoteNameError as error:
                deleted[name] = error
            except LostRemotelyError as error:
                failed[name] = error
            except StoreError as error:
                failed[name] = error
                break
    if failed:
        raise _of_all(refs, failed, results)
    if not results:
        raise [*deleted.values()][-1]
    return results


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
    `afresh`, pieces that the store has are pulled too, with what they are stored against, because
    these may be damaged.

    Raises:
        UnknownRemoteNameError: The remote has no checkpoint of this name.
        MissingRemoteError, DamagedRemoteError, CorruptRemoteTensorError: Objects on the remote are
            missing or damaged.
        NoSpaceError: The disk has no room for the missing pieces.
    """
    objects, index, hasher = here
    found = _manifest(bucket, objects, name, read_ref(bucket, name))
    with _transfer(objects, index, hasher) as transfer:
        missing = _missing(bucket, transfer, found)
        wanted = _sizes(found) if afresh else missing
        progress.saved(sum(_sizes(found).values()) - sum(wanted.values()))
        _fetch(
            *(bucket, Locator(bucket), found, wanted, (objects, index), transfer, progress),
            afresh=afresh,
        )
        transfer.complete()
    return StoredCheckpoint(objects, index, name, (found.manifest, found.content, found.pieces))


@dataclass
class _Pull:
    """A pull of several checkpoints; `seen` has the pieces that were counted so far."""

    bucket: Bucket
    objects: Objects
    progress: TransferListener
    replace: bool
    dry_run: bool
    from_anchor: bool
    seen: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.locator = Locator(self.bucket)

    def one(
        self, name: str, listed: ObjectStatus | None, index: StoreIndex, hasher: Hasher
    ) -> TransferResult:
        """Pull the checkpoint `name` in a session of the store."""
        bucket, objects = self.bucket, self.objects
        began, before = time.monotonic(), bucket.traffic.counts()
        held = ref_here(objects, name)
        if held and listed and listed.surely_is(layout.reference(name, held)):
            manifest = held
        else:
            manifest = read_ref(bucket, name)
        check = name_check(objects, name, manifest, self.replace)
        check()
        found = _manifest(bucket, objects, name, manifest)
        wanted = _sizes(found)
        with _transfer(objects, index, hasher) as transfer:
            missing = _missing(bucket, transfer, found)
            unchanged = held == manifest and not missing
            if self.dry_run:
                moved = {d: nbytes for d, nbytes in missing.items() if d not in self.seen}
            else:
                self.progress.saved(sum(wanted.values()) - sum(missing.values()))
                here = objects, index
                places = _fetch(
                    *(bucket, self.locator, found, missing, here, transfer, self.progress),
                    direct=not self.from_anchor,
                )
                moved = {digest: record.stored for digest, (_, record) in places.items()}
                if not unchanged:
                    transfer.publish(name, manifest, found.blobs, check)
        nbytes, calls = bucket.traffic.counts()
        return TransferResult(
            url=bucket.url,
            names=(name,),
            pieces=newly_seen(wanted, self.seen),
            nbytes=found.content.nbytes,
            moved_pieces=len(moved.keys() & wanted.keys()),
            moved_bytes=sum(moved.values()),
            wire_bytes=nbytes - before[0],
            requests=calls - before[1],
            seconds=time.monotonic() - began,
            unchanged=unchanged,
            anchor_pieces=len(moved.keys() - wanted.keys()),
            done=not self.dry_run,
        )


def _transfer(objects: Objects, index: StoreIndex, hasher: Hasher) -> Transfer:
    return Transfer(objects, index, hasher, set(), _CONTAINER_BYTES, _CONTAINER_S)


def _manifest(bucket: Bucket, objects: Objects, name: str, manifest: str) -> RemoteManifest:
    """Read the manifest of a checkpoint and its pages, from here where they are here."""

    return read_manifest(bucket, name, manifest, partial(manifest_here, objects))


def manifest_here(objects: Objects, name: str) -> bytes | None:
    """Return the bytes of a manifest, or of a page of one, that a store has intact, else None."""
    path = objects.layout.manifest(name)
    try:
        blob = objects.read(path)
        manifests.check_object(name, blob, path)
    except (MissingObjectError, DamagedFileError):
        return None
    return blob


def _sizes(found: RemoteManifest) -> dict[bytes, int]:
    """The pieces of a checkpoint that have bytes, with their sizes."""
    return {piece.digest: piece.nbytes for piece in found.pieces if piece.nbytes}


def _missing(bucket: Bucket, transfer: Transfer, found: RemoteManifest) -> dict[bytes, int]:
    """The pieces that are not here, with their sizes.

    What is here is asked of no table there, which would say that it has another size.
    """
    sizes = _sizes(found)
    missing = {digest: sizes[digest] for digest in transfer.missing(sizes, gather=False)}
    where = bucket.at(layout.manifest_key(found.manifest))
    check_sizes(found.pieces, transfer.sizes_here, where)
    return missing


def _fetch(
    bucket: Bucket,
    locator: Locator,
    found: RemoteManifest,
    missing: Mapping[bytes, int],
    here: tuple[Objects, StoreIndex],
    transfer: Transfer,
    progress: TransferListener,
    *,
    afresh: bool = False,
    direct: bool = False,
) -> Places:
    """Locate and download the `missing` pieces; return where they were, with bases that came along.

    With `afresh`, all bases come along, though the store may have them. With `direct`, what changed
    in a step since the step before is used.

    What proves to be missing or damaged is looked for elsewhere. Where it is nowhere else, what has
    come is kept.
    """
    names = {piece.digest: piece.name for piece in found.pieces if piece.name is not None}
    arrived, lost = Places(), None
    if missing and direct and parse_step_name(found.name) is not None:
        given = bucket, found.manifest, missing, names
        arrived |= step_deltas.fetch(*given, here, transfer, progress)
    while left := {d: nbytes for d, nbytes in missing.items() if d not in arrived}:
        try:
            places = locator.places(left, names, None if afresh else here[1])
        except UNREADABLE as error:
            raise lost or error from None
        came, errors = _download(bucket, places, names, here, transfer, progress)
        arrived |= came
        if errors:
            # Whoever needs it next, be it another attempt, finds it here.
            transfer.complete()
            lost = lost or errors[0]
            are_news = [locator.leave_out(error) for error in errors]
            if not any(are_news):
                raise lost
    return arrived


def _download(
    bucket: Bucket,
    places: Places,
    names: Mapping[bytes, str],
    here: tuple[Objects, StoreIndex],
    transfer: Transfer,
    progress: TransferListener,
) -> tuple[Places, list[StoreError]]:
    """Copy pieces, first what is stored by itself, then what is stored against others.

    Return what has arrived, and the errors of what is missing or damaged.
    """
    objects, index = here
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
    with RemotePieces(bucket, alone, names) as source:
        arrived, errors = _receive(source, alone, transfer, progress)
    if deltas and not errors:
        transfer.complete()
        with (
            StoredPieces(objects, index, bases) as held,
            RemotePieces(bucket, deltas, names, held) as source,
        ):
            came, errors = _receive(source, deltas, transfer, progress)
        arrived |= came
    return arrived, errors


def _receive(
    source: RemotePieces, places: Places, transfer: Transfer, progress: TransferListener
) -> tuple[Places, list[StoreError]]:
    """Take in what arrives; where something is lost, what is under way beside it, too."""
    arrived, errors = Places(), list[StoreError]()
    for digest in source.arriving():
        try:
            transfer.send(source, [digest])
            arrived[digest] = places[digest]
        except GONE as error:
            errors.append(error)
            source.stop()
        progress.advance(places[digest][1].stored)
    return arrived, errors


def newly_seen(wanted: Collection[bytes], seen: set[bytes]) -> int:
    """Add the digests in `wanted` to `seen`; return how many of them `seen` did not have."""
    before = len(seen)
    seen.update(wanted)
    return len(seen) - before


def ref_here(objects: Objects, name: str) -> str | None:
    """Return the manifest for which `name` stands in a store, or None if the store lacks the name.

    Raises:
        DamagedFileError, NewerFormatError: The reference cannot be read.
    """
    try:
        return objects.ref(name)
    except UnknownNameError:
        return None


def name_check(objects: Objects, name: str, manifest: str, replace: bool) -> Callable[[], None]:
    """Return a function that raises an error if a pull must not set `name` to `manifest`.

    Call the function before anything is transferred, and again just before the name is set in the
    store. If the name stands for another checkpoint, it raises:

    * RemoteNameTakenError if `replace` is False;
    * the errors of `check_replaceable` if the name is that of a step that must not be replaced.
    """
    step = parse_step_name(name)

    def check() -> None:
        held = ref_here(objects, name)
        if held is None or held == manifest:
            return
        if not replace:
            what = f"{name!r} stands for another checkpoint here"
            raise RemoteNameTakenError.at(objects.layout.root, what, name=name)
        if step is not None and not step.kept:
            check_replaceable(objects, step.run, step.step)

    return check


def _of_all(
    refs: Collection[str], failed: Mapping[str, StoreError], results: Sequence[TransferResult]
) -> StoreError:
    """What the pull of a run ends with: the first error, with what it says of all.

    Where one of another kind has ended it, that one: it tells the caller what to do.
    """
    errors = [*failed.values()]
    is_damage = isinstance(errors[-1], LostRemotelyError)
    error = errors[0] if is_damage else errors[-1]
    if len(refs) == 1 or (len(errors) == 1 and not is_damage):
        return error
    came = {name for each in results for name in each.names}
    count = sum(marked_by(name) is None for name in came)
    advice = f"; {error.advice}" if isinstance(error, AdvisedError) else ""
    what = f"not pulled: {', '.join(failed)}; steps pulled: {count}"
    error.message = f"{error.message.removesuffix(advice)}; {what}{advice}"
    error.args = (error.message,)
    error.facts |= {"not_pulled": (*failed,)}
    return error
