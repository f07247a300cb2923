"""Push from a store and pull into a store: to and from remotes, OCI artifacts and other stores."""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from os import PathLike

from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.errors import NoRangesError
from tensor_dedup.remote.latest import latest_name, latest_on
from tensor_dedup.remote.oci import artifact as oci
from tensor_dedup.remote.oci.artifact import Artifact, NoTablesError
from tensor_dedup.remote.oci.push import push as push_artifact
from tensor_dedup.remote.oci.registry import ArtifactName, RegistryRepository
from tensor_dedup.remote.pull import name_check, newly_seen, ref_here
from tensor_dedup.remote.pull import pull as pull_checkpoints
from tensor_dedup.remote.push import NameGuard, Outgoing
from tensor_dedup.remote.push import push as push_checkpoints
from tensor_dedup.remote.remote import Remote
from tensor_dedup.remote.results import (
    SilentTransfer,
    TransferListener,
    TransferResult,
    together,
)
from tensor_dedup.store.errors import (
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    UnknownNameError,
)
from tensor_dedup.store.format.names import check_name
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.steps import followed
from tensor_dedup.store.steps.runs import check_no_step
from tensor_dedup.store.store import LocalStore
from tensor_dedup.store.writing.transfer import Transfer

RemoteLike = str | PathLike[str] | Remote


@dataclass(frozen=True, slots=True)
class _Options:
    """How to push or pull: what is told the progress, and the arguments of `push` and `pull`.

    A push is as a pull that `follows`: it leaves notes about followed steps alone.
    """

    progress: TransferListener
    replace: bool
    dry_run: bool
    from_anchor: bool = False
    follows: bool = True


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

    RUN@latest is the step of RUN that was saved last in the store.

    `url` may also name an OCI artifact or the folder of another store. With `replace`, the name may
    take the place of another checkpoint there. Errors are those of `tensor_dedup.Store.push`.
    """
    options = _Options(progress or SilentTransfer(), replace, dry_run)
    if oci.is_artifact(url):
        return _push_artifact(store, str(url), name, options)
    remote, other = _opened(store, url)
    names = _names_of(store, latest_name(store, check_name(name), None))
    if other is not None:
        return _copy(store, other, names, options)
    while True:
        checkpoints = _outgoing_of(store, names)
        try:
            return push_to(
                *(store, remote.bucket, checkpoints, options.progress),
                replace=replace,
                dry_run=dry_run,
            )
        except (CorruptTensorError, MissingObjectError):
            # A step that was pruned since may have been collected before it was opened.
            if all(_is_ref(store, each.name, each.manifest) for each in checkpoints):
                raise


def pull(
    store: LocalStore,
    url: RemoteLike,
    name: str,
    *,
    replace: bool = False,
    progress: TransferListener | None = None,
    dry_run: bool = False,
    follows: bool = False,
    from_anchor: bool = False,
) -> TransferResult:
    """Pull the checkpoint `name`, or all steps of the run `name`, from the remote at `url`.

    RUN@latest is the step of RUN that was saved last on the remote.

    `url` may also name an OCI artifact or the folder of another store. With `replace`, the name may
    take the place of another checkpoint in `store`. Unless the caller `follows` the run, programs
    that do so no longer delete the step. With `from_anchor`, a step is stored against what the
    remote has it against. Errors are those of `tensor_dedup.Store.pull`.
    """
    options = _Options(progress or SilentTransfer(), replace, dry_run, from_anchor, follows)
    if oci.is_artifact(url):
        _claim(store, [name], options)
        result = _pull_artifact(store, str(url), name, options)
        _claim(store, [name], options)
        return result
    remote, other = _opened(store, url)
    before = remote.bucket.traffic.counts()
    name = latest_on(remote, check_name(name))
    if other is not None:
        names = _names_of(other, name)
        _claim(store, names, options)
        return _copy(other, store, names, options)
    refs, handle = remote.refs_of(name), store.handle
    _claim(store, refs, options)
    results = pull_checkpoints(
        *(remote.bucket, refs, handle.objects, handle.session, options.progress),
        replace=options.replace,
        dry_run=options.dry_run,
        from_anchor=options.from_anchor,
        came=lambda each: _claim(store, [each], options),
    )
    nbytes, calls = remote.bucket.traffic.counts()  # with those that looked for the names
    wire, requests = nbytes - before[0], calls - before[1]
    return replace_fields(together(results), wire_bytes=wire, requests=requests)


def _claim(store: LocalStore, names: Iterable[str], options: _Options) -> None:
    """Let programs that follow a run no longer delete these steps, which are pulled by name.

    Before anything is pulled, since what is here already may be deleted meanwhile; and after each
    commit, since such a program may have pulled the same step meanwhile.
    """
    if not options.dry_run and not options.follows:
        with store.handle.translated():
            for name in names:
                followed.forget(store.handle.objects, name)


def _opened(store: LocalStore, url: RemoteLike) -> tuple[Remote, LocalStore | None]:
    """The remote at `url`, and the store that is there if it is the folder of one."""
    files = store.handle.files
    remote = url if isinstance(url, Remote) else Remote.open(url, files=files)
    folder = remote.store_folder()
    other = None if folder is None else LocalStore.open(folder, create=False, files=files)
    return remote, other


# Remotes


def push_to(
    store: LocalStore,
    bucket: Bucket,
    checkpoints: Sequence[Outgoing],
    progress: TransferListener,
    *,
    replace: bool,
    guard: NameGuard | None = None,
    dry_run: bool = False,
) -> TransferResult:
    """Push `checkpoints`, made by `outgoing`, to a bucket; read their pieces from the store.

    `guard` can prevent a change of a name. With `dry_run`, nothing is written.

    Raises:
        StoreError: The push failed.
    """

    def open_pieces(digests: set[bytes]) -> StoredPieces:
        with store.handle.session(update=False) as (index, _):
            return StoredPieces(store.handle.objects, index, digests, checkpoints[0].name)

    with store.handle.translated():
        return push_checkpoints(
            *(bucket, checkpoints, open_pieces, progress),
            replace=replace,
            guard=guard,
            dry_run=dry_run,
        )


def outgoing(objects: Objects, name: str) -> Outgoing:
    """Return the checkpoint `name` of a store in the form that `push_to` needs.

    The caller must hold the store's lock.

    Raises:
        UnknownNameError: The store has no checkpoint of this name.
    """
    manifest = objects.ref(name)
    content = objects.manifest(manifest)
    wanted = {piece.digest: piece.nbytes for piece in objects.pieces(manifest, content)}
    parts = [*dict.fromkeys(page.hex() for page in content.pages), manifest]
    blobs = {part: objects.read(objects.layout.manifest(part)) for part in parts}
    return Outgoing(name, manifest, wanted, blobs, content.nbytes)


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
                found.append(outgoing(store.handle.objects, name))
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


# Artifacts


def _push_artifact(store: LocalStore, url: str, name: str, options: _Options) -> TransferResult:
    with store.checkpoint(name) as checkpoint:
        with store.handle.locked():
            objects = [*outgoing(store.handle.objects, name).blobs.values()]
        return push_artifact(
            *(url, checkpoint, objects, store.handle.files, options.progress),
            replace=options.replace,
            dry_run=options.dry_run,
        )


def _pull_artifact(store: LocalStore, url: str, name: str, options: _Options) -> TransferResult:
    with RegistryRepository(ArtifactName.parse(url)) as registry:
        artifact = Artifact(registry)
        bucket = artifact.as_bucket(check_name(name))
        if bucket is not None:
            with suppress(NoRangesError, NoTablesError):
                (result,) = pull_checkpoints(
                    *(bucket, {name: None}, store.handle.objects, store.handle.session),
                    options.progress,
                    replace=options.replace,
                    dry_run=options.dry_run,
                )
                nbytes, calls = bucket.traffic.counts()  # with the manifest and the tables
                return replace_fields(result, wire_bytes=nbytes, requests=calls)
        return _import_artifact(store, artifact, name, options)


def _import_artifact(
    store: LocalStore, artifact: Artifact, name: str, options: _Options
) -> TransferResult:
    """Pull whole layers into a folder of the store's `tmp`, and import that."""
    began, before = time.monotonic(), artifact.registry.traffic.counts()[0]
    files, objects = store.handle.files, store.handle.objects
    check_no_step(objects, name)
    # What cannot be read is stored again by an import of the same.
    with suppress(UnknownNameError, MissingObjectError, DamagedFileError, CorruptTensorError):
        with store.checkpoint(name) as held:
            same = None if options.replace else artifact.unchanged(held, name)
        if same is not None:
            return replace_fields(same, done=not options.dry_run)
    if options.dry_run:
        return artifact.planned(name)
    # Held, so that no gc takes it for what is left of a pull.
    with store.handle.locked(), oci.layers_folder(objects.layout.tmp, artifact, files) as folder:
        artifact.download(folder, files, options.progress)
        with oci.advising_pull(artifact.url, name):
            result = store.import_(folder, name, options.replace, all_files=artifact.is_ours)
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


# Other stores


def _copy(
    source: LocalStore, target: LocalStore, names: Sequence[str], options: _Options
) -> TransferResult:
    """Copy these checkpoints, without those that were deleted in the source meanwhile."""
    seen, results = set[bytes](), list[TransferResult]()
    for name in names:
        with suppress(UnknownNameError):
            results.append(copy_checkpoint(source, target, name, options, seen))
            _claim(target, [name], options)
    if not results:
        raise _deleted(source, names)
    return together(results)


def copy_checkpoint(
    source: LocalStore, target: LocalStore, name: str, options: _Options, seen: set[bytes]
) -> TransferResult:
    """Copy a checkpoint from one store to another; count what was not `seen`, and add it there.

    Raises:
        UnknownNameError: The source has no checkpoint of this name.
        RemoteNameTakenError: The name stands for another checkpoint in the target, and is not to be
            replaced.
        CorruptTensorError, MissingObjectError: The source has no intact copy of a piece.
    """
    began = time.monotonic()
    objects, there, progress = source.handle.objects, target.handle.objects, options.progress
    with (
        target.handle.session() as (index, hasher),
        Transfer(there, index, hasher, set()) as transfer,
    ):
        with source.handle.session(update=False) as (near, _):
            found = outgoing(objects, name)
            held = ref_here(there, name)
            check = name_check(there, name, found.manifest, options.replace)
            check()
            missing = transfer.missing(found.wanted, gather=False)
            # From here on gc may come: what is open can be read.
            opened = StoredPieces(objects, near, {*missing}, name)
        unchanged = held == found.manifest and not missing
        with opened:
            if options.dry_run:
                missing = [digest for digest in missing if digest not in seen]
                moved = sum(found.wanted[digest] for digest in missing)
            else:
                _send(opened, missing, found, transfer, progress)
                moved = transfer.sent_bytes
                if not unchanged:
                    transfer.publish(name, found.manifest, found.blobs, check)
    return TransferResult(
        url=f"file://{there.layout.root}",
        names=(name,),
        pieces=newly_seen([d for d, nbytes in found.wanted.items() if nbytes], seen),
        nbytes=found.nbytes,
        moved_pieces=len(missing),
        moved_bytes=moved,
        wire_bytes=0 if options.dry_run else moved,
        requests=0,
        seconds=time.monotonic() - began,
        unchanged=unchanged,
        done=not options.dry_run,
    )


def _send(
    opened: StoredPieces,
    missing: Sequence[bytes],
    found: Outgoing,
    transfer: Transfer,
    progress: TransferListener,
) -> None:
    nbytes = sum(found.wanted[digest] for digest in missing)
    progress.saved(sum(found.wanted.values()) - nbytes)
    progress.start(nbytes)
    for digest in missing:
        transfer.send(opened, [digest])
        progress.advance(found.wanted[digest])
