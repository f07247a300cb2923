"""Push from a store and pull into a store, for remotes, OCI artifacts and other stores."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace as replace_fields
from functools import partial
from os import PathLike

from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.errors import NoRangesError
from tensor_dedup.remote.neighbour import copy_checkpoint
from tensor_dedup.remote.oci import artifact as oci
from tensor_dedup.remote.oci.artifact import Artifact, NoTablesError
from tensor_dedup.remote.oci.push import push as push_artifact
from tensor_dedup.remote.oci.registry import ArtifactName, RegistryRepository
from tensor_dedup.remote.pull import pull as pull_checkpoint
from tensor_dedup.remote.push import NameGuard, Outgoing
from tensor_dedup.remote.push import push as push_checkpoints
from tensor_dedup.remote.relatives import Relative, relatives
from tensor_dedup.remote.remote import Remote
from tensor_dedup.remote.results import (
    SilentTransfer,
    TransferListener,
    TransferResult,
    together,
)
from tensor_dedup.remote.run_pull import pull_each
from tensor_dedup.store.errors import (
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    UnknownNameError,
)
from tensor_dedup.store.format.names import check_name
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.steps.runs import check_no_step
from tensor_dedup.store.store import LocalStore

RemoteLike = str | PathLike[str] | Remote


def push(
    store: LocalStore,
    url: RemoteLike,
    name: str,
    *,
    replace: bool = False,
    progress: TransferListener | None = None,
    dry_run: bool = False,
) -> TransferResult:
    """Push the checkpoint `name`, or all steps of the run `name`, to the remote at `url`.

    `url` may also name an OCI artifact or the folder of another store. With `replace`, the name may
    take the place of another checkpoint there. Errors are those of `tensor_dedup.Store.push`.
    """
    listener = progress or SilentTransfer()
    if oci.is_artifact(url):
        return _push_artifact(store, str(url), name, listener, replace, dry_run)
    remote = url if isinstance(url, Remote) else Remote.open(url, files=store.handle.files)
    names = _names_of(store, check_name(name))
    folder = remote.store_folder()
    if folder is not None:
        other = LocalStore.open(folder, create=False, files=store.handle.files)
        return _copy_all(store, other, names, listener, replace, dry_run)
    while True:
        outgoing = _outgoing_of(store, names)
        related = partial(_relatives, store, outgoing)
        try:
            return push_to(
                *(store, remote.bucket, outgoing, listener),
                replace=replace,
                related=related,
                dry_run=dry_run,
            )
        except (CorruptTensorError, MissingObjectError):
            # A step that was pruned since may have been collected before it was opened.
            if all(_is_ref(store, each.name, each.manifest) for each in outgoing):
                raise


def pull(
    store: LocalStore,
    url: RemoteLike,
    name: str,
    *,
    replace: bool = False,
    progress: TransferListener | None = None,
    dry_run: bool = False,
) -> TransferResult:
    """Pull the checkpoint `name`, or all steps of the run `name`, from the remote at `url`.

    `url` may also name an OCI artifact or the folder of another store. With `replace`, the name may
    take the place of another checkpoint in `store`. Errors are those of `tensor_dedup.Store.pull`.
    """
    listener = progress or SilentTransfer()
    if oci.is_artifact(url):
        return _pull_artifact(store, str(url), name, listener, replace, dry_run)
    remote = url if isinstance(url, Remote) else Remote.open(url, files=store.handle.files)
    folder = remote.store_folder()
    if folder is not None:
        other = LocalStore.open(folder, create=False, files=store.handle.files)
        names = _names_of(other, check_name(name))
        return _copy_all(other, store, names, listener, replace, dry_run)
    before = remote.bucket.traffic.counts()
    refs, handle = remote.refs_of(check_name(name)), store.handle
    results = pull_each(
        *(remote.bucket, refs, handle.objects, handle.session, listener),
        replace=replace,
        dry_run=dry_run,
    )
    nbytes, calls = remote.bucket.traffic.counts()  # with those that looked for the names
    wire, requests = nbytes - before[0], calls - before[1]
    return replace_fields(together(results), wire_bytes=wire, requests=requests)


def push_to(
    store: LocalStore,
    bucket: Bucket,
    checkpoints: Sequence[Outgoing],
    progress: TransferListener,
    *,
    replace: bool,
    guard: NameGuard | None = None,
    related: Callable[[], Iterable[Relative]] = tuple,
    dry_run: bool = False,
) -> TransferResult:
    """Push `checkpoints`, made by `outgoing`, to a bucket; read their pieces from the store.

    `guard` can prevent a change of a name. `related` returns checkpoints of the store that share
    manifest pages with the pushed ones. With `dry_run`, nothing is written.

    Raises:
        StoreError: The push failed.
    """

    def open_pieces(digests: set[bytes]) -> StoredPieces:
        with store.handle.session(update=False) as (index, _):
            return StoredPieces(store.handle.objects, index, digests, checkpoints[0].name)

    with store.handle.translated():
        return push_checkpoints(
            bucket,
            checkpoints,
            open_pieces,
            progress,
            replace=replace,
            guard=guard,
            relatives=related,
            dry_run=dry_run,
        )


def outgoing(store: LocalStore, name: str) -> Outgoing:
    """Return the checkpoint `name` in the form that `push_to` needs.

    The caller must hold the store's lock.

    Raises:
        UnknownNameError: The store has no checkpoint of this name.
    """
    objects = store.handle.objects
    manifest = objects.ref(name)
    content = objects.manifest(manifest)
    wanted = {piece.digest: piece.nbytes for piece in objects.pieces(manifest, content)}
    parts = [*dict.fromkeys(page.hex() for page in content.pages), manifest]
    blobs = {part: objects.read(objects.layout.manifest(part)) for part in parts}
    return Outgoing(name, manifest, wanted, blobs, content.nbytes)


def _push_artifact(
    store: LocalStore,
    url: str,
    name: str,
    progress: TransferListener,
    replace: bool,
    dry_run: bool,
) -> TransferResult:
    with store.checkpoint(name) as checkpoint:
        with store.handle.locked():
            objects = [*outgoing(store, name).blobs.values()]
        files = store.handle.files
        return push_artifact(
            url, checkpoint, objects, files, progress, replace=replace, dry_run=dry_run
        )


def _pull_artifact(
    store: LocalStore,
    url: str,
    name: str,
    progress: TransferListener,
    replace: bool,
    dry_run: bool,
) -> TransferResult:
    with RegistryRepository(ArtifactName.parse(url)) as registry:
        artifact = Artifact(registry)
        bucket = artifact.as_bucket(check_name(name))
        if bucket is not None:
            with (
                suppress(NoRangesError, NoTablesError),
                store.handle.session() as (index, hasher),
            ):
                here = store.handle.objects, index, hasher
                result = pull_checkpoint(
                    bucket, name, here, progress, replace=replace, dry_run=dry_run
                )
                nbytes, calls = bucket.traffic.counts()  # with the manifest and the tables
                return replace_fields(result, wire_bytes=nbytes, requests=calls)
        return _import_artifact(store, artifact, name, progress, replace, dry_run)


def _import_artifact(
    store: LocalStore,
    artifact: Artifact,
    name: str,
    progress: TransferListener,
    replace: bool,
    dry_run: bool,
) -> TransferResult:
    """Pull whole layers into a folder of the store's `tmp`, and import that."""
    began, before = time.monotonic(), artifact.registry.traffic.counts()[0]
    files, objects = store.handle.files, store.handle.objects
    check_no_step(objects, name)
    # What cannot be read is stored again by an import of the same.
    with suppress(UnknownNameError, MissingObjectError, DamagedFileError, CorruptTensorError):
        with store.checkpoint(name) as held:
            same = None if replace else artifact.unchanged(held, name)
        if same is not None:
            return replace_fields(same, done=not dry_run)
    if dry_run:
        return artifact.planned(name)
    # Held, so that no gc takes it for what is left of a pull.
    with store.handle.locked(), oci.layers_folder(objects.layout.tmp, artifact, files) as folder:
        artifact.download(folder, files, progress)
        with oci.advising_pull(artifact.url, name):
            result = store.import_(folder, name, replace, all_files=artifact.is_ours)
    nbytes, calls = artifact.registry.traffic.counts()
    return TransferResult(
        url=artifact.url,
        names=(name,),
        pieces=result.tensors,
        nbytes=result.new_bytes + result.known_bytes,
        moved_pieces=result.new_tensors,
        moved_bytes=nbytes - before,
        wire_bytes=nbytes,
        requests=calls,
        seconds=time.monotonic() - began,
        unchanged=result.unchanged,
    )


def _names_of(store: LocalStore, name: str) -> Sequence[str]:
    """The name of a checkpoint, or the names of the steps and marks of a run."""
    with store.handle.locked(), store.handle.saying_near(name):
        names = store.handle.objects.references()
        found = [name] if name in names else [n for n in names if n.startswith(f"{name}@")]
        if not found:
            raise UnknownNameError.at(store.path, f"no checkpoint {name!r}", name=name)
        return found


def _outgoing_of(store: LocalStore, names: Sequence[str]) -> Sequence[Outgoing]:
    """Return these checkpoints, without those that were deleted here meanwhile."""
    found = []
    with store.handle.locked():
        for name in names:
            with suppress(UnknownNameError):
                found.append(outgoing(store, name))
    if not found:
        raise _deleted(store, names)
    return found


def _is_ref(store: LocalStore, name: str, manifest: str) -> bool:
    with store.handle.locked(), suppress(UnknownNameError):
        return store.handle.objects.ref(name) == manifest
    return False


def _deleted(store: LocalStore, names: Sequence[str]) -> UnknownNameError:
    what = f"{names[0]!r} was deleted here before it was sent"
    return UnknownNameError.at(store.path, what, name=names[0])


def _relatives(store: LocalStore, checkpoints: Sequence[Outgoing]) -> Sequence[Relative]:
    names = {each.name for each in checkpoints}
    pages = {part for each in checkpoints for part in each.blobs if part != each.manifest}
    with store.handle.locked():
        return relatives(store.handle.objects, names, pages)


def _copy_all(
    store: LocalStore,
    other: LocalStore,
    names: Sequence[str],
    progress: TransferListener,
    replace: bool,
    dry_run: bool,
) -> TransferResult:
    """Copy these checkpoints, without those that were deleted here meanwhile."""
    near = store.handle.objects, partial(store.handle.session, update=False)
    far, seen, results = (other.handle.objects, other.handle.session), set[bytes](), []
    for name in names:
        with suppress(UnknownNameError):
            done = copy_checkpoint(
                near, far, name, progress, replace=replace, seen=seen, dry_run=dry_run
            )
            results.append(done)
    if not results:
        raise _deleted(store, names)
    return together(results)
