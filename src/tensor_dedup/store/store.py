"""A store of checkpoints: each distinct tensor once on disk, and the same bytes out again.

`Store` is the public interface. It has no logic of its own beyond opening a session: each method
takes the lock, opens the index where it needs one, and calls a module of `writing`, `reading` or
`upkeep`.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace as replace_fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from tensor_dedup.formats.markers import in_files
from tensor_dedup.store.errors import (
    BadRangeError,
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    NameTakenError,
    UnknownNameError,
    os_errors,
)
from tensor_dedup.store.files import Files, RealFiles
from tensor_dedup.store.format.layout import StoreLayout
from tensor_dedup.store.format.names import check_name, name_of
from tensor_dedup.store.hashing import Hasher, ProgressListener, SilentListener
from tensor_dedup.store.index import StoreIndex, open_index
from tensor_dedup.store.init import default_path, initialise, workers
from tensor_dedup.store.locks import SWEEP_WAIT_S, session, sweep
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.export import export
from tensor_dedup.store.reading.reader import StoredCheckpoint, StoredPieces
from tensor_dedup.store.upkeep.gc import DEFAULT_GRACE_HOURS, GcPlan, execute, plan_gc, sweep_now
from tensor_dedup.store.upkeep.repair import Repair, RepairResult
from tensor_dedup.store.upkeep.stats import Listed, Stats, listed, stats
from tensor_dedup.store.upkeep.verify import Level, VerifyResult, verify
from tensor_dedup.store.writing.import_ import (
    ImportListener,
    ImportResult,
    KnownDigests,
    NullListener,
    expected_manifest,
    import_source,
    unchanged,
)
from tensor_dedup.store.writing.sources import ImportSource, read_source
from tensor_dedup.suggestions import nearest, perhaps

if TYPE_CHECKING:
    import torch

    from tensor_dedup.remote.buckets import Bucket
    from tensor_dedup.remote.oci.artifact import Artifact
    from tensor_dedup.remote.push import NameGuard, Outgoing
    from tensor_dedup.remote.relatives import Relative
    from tensor_dedup.remote.remote import Remote
    from tensor_dedup.remote.results import TransferListener, TransferResult
    from tensor_dedup.store.reading.find import TensorPlace
    from tensor_dedup.store.steps.runs import Difference, Step
    from tensor_dedup.store.upkeep.run_sizes import Growth, RunCost, RunStats, TensorChanges
    from tensor_dedup.store.upkeep.usage import StoreUsage
    from tensor_dedup.store.writing.encoder import Encoder

StrPath = str | PathLike[str]


class Store:
    """A content-addressed store of checkpoints in one folder; `Store.open` opens or makes one.

    A handle keeps nothing open between calls: any number of handles, threads and processes may use
    one folder at once, and a handle survives a fork.

    Raises:
        StoreError: the store, its files or its disk failed; the subclass says how.
        CheckpointError: a path passed to a method holds no checkpoint.
    """

    def __init__(self, path: Path, files: Files, worker_count: int) -> None:
        self.path = path
        self._files = files
        self._workers = worker_count
        # The other modules of this package use it too, and `_locked` and `_translated`.
        self._objects = Objects(files, StoreLayout(path))

    def __repr__(self) -> str:
        count: int | str = "?"
        with suppress(OSError):
            count = len(self._objects.names())
        return f"Store({str(self.path)!r}, checkpoints={count})"

    @classmethod
    def open(
        cls,
        path: StrPath | None = None,
        *,
        create: bool = True,
        mend: bool = False,
        files: Files | None = None,
        worker_count: int | None = None,
    ) -> Self:
        """Open the store in a folder, and make one there if the folder is empty or missing.

        `path` defaults to the environment variable TENSOR_DEDUP_STORE, or else to `store` of a
        configuration file (`tensor_dedup.settings`), or else to `tensor-dedup/store` in the user's
        data folder. With `mend`, a damaged marker is rewritten.
        `files` is the file system interface, which tests replace; `worker_count` is the number of
        hashing threads.

        Raises:
            NotAStoreError: the folder holds something else.
            NoStoreError: it is empty or missing, and `create` is off.
            NewerFormatError: the store was made by a later version.
        """
        root = (Path(path) if path is not None else default_path()).absolute()
        door = files or RealFiles()
        with os_errors(root):
            initialise(Objects(door, StoreLayout(root)), create=create, mend=mend)
        return cls(root, door, worker_count or workers())

    @property
    def worker_count(self) -> int:
        """The number of hashing threads."""
        return self._workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: nothing is held open, and the store may be used again."""

    def import_(
        self,
        path: StrPath,
        name: str | None = None,
        replace: bool = False,
        *,
        progress: ProgressListener | None = None,
        hints: ImportListener | None = None,
        compress: Literal["auto"] | None = None,
        base: str | None = None,
        external: bool = False,
        follow_links: bool = False,
    ) -> ImportResult:
        """Import a checkpoint: a file of weights, an index, or a folder with what belongs to it.

        `name` defaults to that of the folder or file. The checkpoint is committed when this
        returns. When it raises, nothing is committed, except that a failing disk may leave it open
        whether the name exists. What holds the same files under its name already is left as it is
        (`unchanged`); what of it is damaged or was changed outside is stored again. Every byte is
        read and hashed, even of files whose digests are
        remembered; `hints` receives the digests.

        Leaves (2 MiB) that a new tensor has in common with a stored one, at the same offset, are
        not stored again, where that saves a tenth: a vocabulary that grew costs its new rows. With
        `compress`, new tensors are stored encoded where samples show that this saves a tenth: by
        themselves, or as the difference from a tensor of the checkpoint `base`, by default the most
        similar one in the store. `base` implies `compress`. With `external` the weights stay
        where they are and are indexed there: there is no second copy, and no guarantee except that
        changes to them are noticed.

        Symbolic links are followed within the folder, and to the blobs of its own repository in a
        hub cache. What leads elsewhere is refused, unless you trust the folder and say
        `follow_links`.

        Raises:
            CheckpointFilesError: a link leads out of the folder, or the files do not fit together.
            NameTakenError: the name exists, it holds something else, and `replace` is off.
            TakenStepError: it is the name of a step, which no import replaces, or of a pin.
            ChangedFileError: a file was modified meanwhile.
            UnknownNameError: no checkpoint is called `base`.
        """
        from tensor_dedup.store.steps.runs import check_no_step

        source_path = Path(path)
        wanted = check_name(name) if name is not None else name_of(source_path.absolute())
        check = partial(check_no_step, self._objects, wanted)
        with self._session() as (index, hasher):
            check()  # before the work; it is looked at again after it
            source = read_source(self._files, source_path, follow_links=follow_links)
            if not replace and wanted in self._objects.names():
                same = unchanged(self._objects, index, hasher, source, wanted, in_place=external)
                if same is not None:
                    return same
                # By the same: what of it is damaged or gone is stored again.
                replace, check = (
                    True,
                    partial(self._check_still, wanted, check, self._objects.ref(wanted)),
                )
            encoder = None
            if compress is not None or base is not None:
                encoder = self._encoder(index, source, base)
            return import_source(
                self._objects,
                index,
                hasher,
                source,
                wanted,
                replace=replace,
                progress=progress or SilentListener(),
                hints=hints or NullListener(),
                encoder=encoder,
                in_place=external,
                check_name=check,
            )

    def _check_still(self, name: str, check: Callable[[], None], manifest: str) -> None:
        check()
        if self._objects.ref(name) != manifest:
            raise NameTakenError.at(self.path, f"{name!r} is there already", name=name)

    def _encoder(self, index: StoreIndex, source: ImportSource, base: str | None) -> "Encoder":
        from tensor_dedup.store.writing.encoder import Encoder  # and with it numpy

        encoder = Encoder(self._objects, index)
        if base is not None:
            encoder.open_base(check_name(base))
        else:
            encoder.find_base(source, in_files(file.path for file in source.files))
        return encoder

    def expected_manifest(self, path: StrPath, known: KnownDigests) -> str:
        """Return the name of the manifest that an import of `path` would make; write nothing.

        `known(path, fd)` returns the known digests of an open file, by (start, nbytes); the rest is
        hashed. Raises the errors of `import_` about the path.
        """
        with self._session() as (_, hasher):
            return expected_manifest(
                self._files, hasher, read_source(self._files, Path(path)), known
            )

    def manifest(self, name: str) -> str | None:
        """Return the name of a checkpoint's manifest, or None if there is no such checkpoint."""
        with self._locked(), suppress(UnknownNameError):
            return self._objects.ref(check_name(name))
        return None

    def checkpoint(self, name: str) -> StoredCheckpoint:
        """Open a checkpoint for reading; close it, or use it as a context manager.

        Raises:
            UnknownNameError: no checkpoint has this name.
            MissingObjectError, DamagedFileError: its bookkeeping is damaged.
        """
        with self._session(update=False) as (index, _), self._saying_near(name):
            return StoredCheckpoint(self._objects, index, check_name(name))

    def load(
        self, name: str, names: Collection[str] | None = None, *, verify: bool = True
    ) -> "dict[str, torch.Tensor]":
        """Load a checkpoint's tensors, or those with these names, as torch tensors on the CPU.

        Every byte is compared with its digest unless `verify` is off. The tensors are writable and
        belong to the caller. Needs torch, which the first call imports.
        `tensor_dedup.store.reading.tensors` also provides iteration in bounded memory, mapped
        tensors and reused buffers.

        Raises:
            UnknownNameError, UnknownTensorError: there is no such checkpoint, or no such tensor.
            CorruptTensorError, MissingObjectError: no intact copy of a tensor is in the store.
        """
        from tensor_dedup.store.reading.tensors import load_tensors  # and with it torch

        with self.checkpoint(name) as checkpoint:
            return load_tensors(checkpoint, names, verify=verify)

    def open_pieces(self, digests: Iterable[str]) -> StoredPieces:
        """Open the pieces with these digests, of any checkpoint, as far as the store has them."""
        with self._session() as (index, _):
            return StoredPieces(self._objects, index, {bytes.fromhex(text) for text in digests})

    def export(
        self, name: str, directory: StrPath, *, progress: ProgressListener | None = None
    ) -> list[Path]:
        """Write a checkpoint's files, byte for byte, to a folder that is empty or missing.

        Returns the paths of the files. Each file appears when it is complete and durable.
        """
        with self.checkpoint(name) as checkpoint, os_errors(Path(directory)):
            return export(self._files, checkpoint, Path(directory), progress or SilentListener())

    def push(
        self,
        url: "StrPath | Remote",
        name: str,
        *,
        replace: bool = False,
        progress: "TransferListener | None" = None,
    ) -> "TransferResult":
        """Push a checkpoint, or all steps of a run, to a remote: only what is missing there.

        `url` is what `Remote.open` takes, the folder of another store, or `oci://` and an artifact:
        `oci://REGISTRY/REPOSITORY:TAG`, which any client of registries can pull. Nobody sees the
        name there before everything it leads to. What was cut short goes on when it is done again,
        and what `Remote.verify` has found damaged there is sent again. Of a run, steps that are
        deleted here meanwhile are left out.

        Raises:
            UnknownNameError: no checkpoint and no run is called so, or all of it was deleted
                meanwhile.
            RemoteNameTakenError: the name stands for another one there, and `replace` is off.
            NoConditionsError: the server could lose names; nothing that counts was written.
            RemoteUrlError, RemoteUnreachableError, RemoteAccessError, NotARemoteError: it cannot
                be reached, or is something else.
        """
        from tensor_dedup.remote.oci.artifact import is_artifact
        from tensor_dedup.remote.remote import Remote
        from tensor_dedup.remote.results import SilentTransfer

        if is_artifact(url):
            return self._push_artifact(str(url), name, progress or SilentTransfer(), replace)
        remote = url if isinstance(url, Remote) else Remote.open(url, files=self._files)
        names, listener = self._names_of(check_name(name)), progress or SilentTransfer()
        folder = remote.store_folder()
        if folder is not None:
            other = Store.open(folder, create=False, files=self._files)
            return self._copy_all(other, names, listener, replace)
        while True:
            outgoing = self._outgoing_of(names)
            related = partial(self._relatives, outgoing)
            try:
                return self._push_to(
                    remote.bucket, outgoing, listener, replace=replace, relatives=related
                )
            except (CorruptTensorError, MissingObjectError):
                # A step that was pruned since may have been collected before it was opened.
                if all(self._is_ref(each.name, each.manifest) for each in outgoing):
                    raise

    def pull(
        self,
        url: "StrPath | Remote",
        name: str,
        *,
        replace: bool = False,
        progress: "TransferListener | None" = None,
    ) -> "TransferResult":
        """Pull a checkpoint, or all steps of a run, from a remote: only what is nowhere here.

        `url` is what `push` takes. An artifact (`oci://`) is called `name` here; one that somebody
        else has made is pulled as whole layers, and imported. Of a run all steps come, also those
        that retention rules have deleted here.

        Every byte is compared with its digest before anything refers to it: whoever writes to the
        remote can withhold a checkpoint or name another one, and put no wrong tensor here. What was
        cut short goes on when it is done again.

        Raises:
            UnknownRemoteNameError: the remote has neither a checkpoint nor a run of this name.
            RemoteNameTakenError: the name stands for another one here, and `replace` is off.
            MissingRemoteError, DamagedRemoteError, CorruptRemoteTensorError: objects of the remote
                are gone or damaged; nothing was committed. Of a run the other steps come; the
                error names those that failed.
            RemoteUrlError, RemoteUnreachableError, RemoteAccessError, NotARemoteError: it cannot
                be reached, or is something else.
        """
        from tensor_dedup.remote.oci.artifact import is_artifact
        from tensor_dedup.remote.remote import Remote
        from tensor_dedup.remote.results import SilentTransfer, together
        from tensor_dedup.remote.run_pull import pull_each

        if is_artifact(url):
            return self._pull_artifact(str(url), name, progress or SilentTransfer(), replace)
        remote = url if isinstance(url, Remote) else Remote.open(url, files=self._files)
        listener = progress or SilentTransfer()
        folder = remote.store_folder()
        if folder is not None:
            other = Store.open(folder, create=False, files=self._files)
            names = other._names_of(check_name(name))
            return other._copy_all(self, names, listener, replace)
        before = remote.bucket.traffic.counts()
        refs, here = remote.refs_of(check_name(name)), self._objects
        results = pull_each(remote.bucket, refs, here, self._session, listener, replace=replace)
        nbytes, calls = remote.bucket.traffic.counts()  # with those that looked for the names
        wire, requests = nbytes - before[0], calls - before[1]
        return replace_fields(together(results), wire_bytes=wire, requests=requests)

    def _push_artifact(
        self, url: str, name: str, progress: "TransferListener", replace: bool
    ) -> "TransferResult":
        from tensor_dedup.remote.oci import artifact as oci

        with self.checkpoint(name) as checkpoint:
            with self._locked():
                objects = [*self._outgoing(name).blobs.values()]
            return oci.push(url, checkpoint, objects, self._files, progress, replace=replace)

    def _pull_artifact(
        self, url: str, name: str, progress: "TransferListener", replace: bool
    ) -> "TransferResult":
        from tensor_dedup.remote.errors import NoRangesError
        from tensor_dedup.remote.oci.artifact import Artifact, NoTablesError
        from tensor_dedup.remote.oci.registry import ArtifactName, RegistryRepository
        from tensor_dedup.remote.pull import pull

        with RegistryRepository(ArtifactName.parse(url)) as registry:
            artifact = Artifact(registry)
            bucket = artifact.as_bucket(check_name(name))
            if bucket is not None:
                with suppress(NoRangesError, NoTablesError), self._session() as (index, hasher):
                    here = self._objects, index, hasher
                    result = pull(bucket, name, here, progress, replace=replace)
                    nbytes, calls = bucket.traffic.counts()  # with the manifest and the tables
                    return replace_fields(result, wire_bytes=nbytes, requests=calls)
            return self._import_artifact(artifact, name, progress, replace)

    def _import_artifact(
        self, artifact: "Artifact", name: str, progress: "TransferListener", replace: bool
    ) -> "TransferResult":
        """Pull whole layers into a folder of this store's `tmp`, and import that."""
        from tensor_dedup.remote.oci.artifact import advising_pull, layers_folder
        from tensor_dedup.remote.results import TransferResult
        from tensor_dedup.store.steps.runs import check_no_step

        began, before = time.monotonic(), artifact.registry.traffic.counts()[0]
        files, tmp = self._files, self._objects.layout.tmp
        check_no_step(self._objects, name)
        # What cannot be read is stored again by an import of the same.
        with suppress(UnknownNameError, MissingObjectError, DamagedFileError, CorruptTensorError):
            with self.checkpoint(name) as held:
                same = None if replace else artifact.unchanged(held, name)
            if same is not None:
                return same
        # Held, so that no gc takes it for what is left of a pull.
        with self._locked(), layers_folder(tmp, artifact, files) as folder:
            artifact.download(folder, files, progress)
            with advising_pull(artifact.url, name):
                result = self.import_(folder, name, replace)
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

    def _names_of(self, name: str) -> Sequence[str]:
        """The name of a checkpoint, or the names of the steps and pins of a run."""
        with self._locked(), self._saying_near(name):
            names = self._objects.names()
            found = [name] if name in names else [n for n in names if n.startswith(f"{name}@")]
            if not found:
                raise UnknownNameError.at(self.path, f"no checkpoint {name!r}", name=name)
            return found

    def _outgoing_of(self, names: Sequence[str]) -> "Sequence[Outgoing]":
        """Return these checkpoints, without those that were deleted here meanwhile."""
        found = []
        with self._locked():
            for name in names:
                with suppress(UnknownNameError):
                    found.append(self._outgoing(name))
        if not found:
            raise self._deleted(names)
        return found

    def _is_ref(self, name: str, manifest: str) -> bool:
        with self._locked(), suppress(UnknownNameError):
            return self._objects.ref(name) == manifest
        return False

    def _deleted(self, names: Sequence[str]) -> UnknownNameError:
        what = f"{names[0]!r} was deleted here before it was sent"
        return UnknownNameError.at(self.path, what, name=names[0])

    def _push_to(
        self,
        bucket: "Bucket",
        outgoing: "Sequence[Outgoing]",
        progress: "TransferListener",
        *,
        replace: bool,
        guard: "NameGuard | None" = None,
        relatives: "Callable[[], Iterable[Relative]]" = tuple,
    ) -> "TransferResult":
        from tensor_dedup.remote.push import push

        def open_pieces(digests: set[bytes]) -> StoredPieces:
            with self._session(update=False) as (index, _):
                return StoredPieces(self._objects, index, digests, outgoing[0].name)

        with self._translated():
            return push(
                bucket,
                outgoing,
                open_pieces,
                progress,
                replace=replace,
                guard=guard,
                relatives=relatives,
            )

    def _relatives(self, outgoing: "Sequence[Outgoing]") -> "Sequence[Relative]":
        from tensor_dedup.remote.relatives import relatives

        names = {each.name for each in outgoing}
        pages = {part for each in outgoing for part in each.blobs if part != each.manifest}
        with self._locked():
            return relatives(self._objects, names, pages)

    def _outgoing(self, name: str) -> "Outgoing":
        from tensor_dedup.remote.push import Outgoing

        objects = self._objects
        manifest = objects.ref(name)
        content = objects.manifest(manifest)
        wanted = {piece.digest: piece.nbytes for piece in objects.pieces(manifest, content)}
        parts = [*dict.fromkeys(page.hex() for page in content.pages), manifest]
        blobs = {part: objects.read(objects.layout.manifest(part)) for part in parts}
        return Outgoing(name, manifest, wanted, blobs, content.nbytes)

    def _copy_all(
        self,
        other: "Store",
        names: Sequence[str],
        progress: "TransferListener",
        replace: bool,
    ) -> "TransferResult":
        """Copy these checkpoints, without those that were deleted here meanwhile."""
        from tensor_dedup.remote.neighbour import copy_checkpoint
        from tensor_dedup.remote.results import together

        near = self._objects, partial(self._session, update=False)
        far, seen, results = (other._objects, other._session), set[bytes](), []
        for name in names:
            with suppress(UnknownNameError):
                done = copy_checkpoint(near, far, name, progress, replace=replace, seen=seen)
                results.append(done)
        if not results:
            raise self._deleted(names)
        return together(results)

    def names(self) -> "list[str]":
        """Return the names of all checkpoints, sorted; nothing else is read."""
        with self._locked():
            return self._objects.names()

    def runs(self) -> "list[str]":
        """Return the names of the training runs that have steps in this store, sorted.

        `CheckpointStore(store, run)` opens one.
        """
        from tensor_dedup.store.steps.runs import run_names

        with self._locked():
            return run_names(self._objects)

    def steps(self, run: str) -> "list[Step]":
        """Return the steps of a run in order; an unknown run has none.

        Imports under a step's name are left out, as are, with a logged warning, steps that cannot
        be read.
        """
        from tensor_dedup.store.steps.runs import describe_all

        with self._locked():
            return describe_all(self._objects, run)

    def run_stats(self, run: str | None = None) -> "RunStats":
        """Measure the steps of a run, or those of all runs together. Reads no tensor data."""
        from tensor_dedup.store.upkeep.run_sizes import run_stats as measure

        runs = self.runs() if run is None else [run]
        with self._locked():
            return measure(self._objects, runs, run)

    def run_cost(self, run: str | None = None) -> "RunCost":
        """Compute what a run, or all runs together, cost beside the rest. Reads no tensor data.

        Raises:
            UnfitForCollectionError: something in the store is damaged or lost, so that it is not
                certain what is in use.
        """
        from tensor_dedup.store.upkeep.run_sizes import run_cost

        runs = self.runs() if run is None else [run]
        with self._locked():
            return run_cost(self._objects, runs)

    def tensor_changes(self, run: str) -> "list[TensorChanges]":
        """Count in how many steps of a run each tensor changed. Reads no tensor data."""
        from tensor_dedup.store.upkeep.run_sizes import tensor_changes

        with self._locked():
            return tensor_changes(self._objects, run)

    def run_growth(self, run: str) -> "list[Growth]":
        """Return what each step of a run added to it, in order. Reads no tensor data."""
        from tensor_dedup.store.upkeep.run_sizes import growth

        with self._locked():
            return growth(self._objects, run)

    def step_difference(self, one: tuple[str, int], two: tuple[str, int]) -> "Difference":
        """Compare two steps, each a run and a number: their tensors' names, bytes and metrics.

        Raises:
            UnknownStepError: a run has no such step.
            NotATrainingError: the checkpoint of that name was imported.
        """
        from tensor_dedup.store.steps.runs import difference

        with self._locked():
            return difference(self._objects, one, two)

    def find(self, digest: str) -> "list[TensorPlace]":
        """Return the tensors whose digest begins with these hex digits, by checkpoint and name.

        Raises:
            BadDigestError: it is not 4 to 64 hex digits.
        """
        from tensor_dedup.store.reading.find import find

        with self._locked():
            return find(self._objects, digest)

    def list(self) -> "list[Listed]":
        """Return all checkpoints, ordered by name; `damage` says which cannot be read, and why."""
        with self._locked():
            return listed(self._objects)

    def stats(self) -> Stats:
        """Measure the store, from its bookkeeping alone; no tensor data is read."""
        with self._locked():
            return stats(self._objects)

    def usage(self, name: str | None = None) -> "StoreUsage":
        """Measure what each checkpoint and each run takes; no tensor data is read.

        With `name`, the step of this name counts by itself, and not as a part of its run.
        """
        from tensor_dedup.store.upkeep.usage import usage

        with self._locked():
            return usage(self._objects, name)

    def rename(self, name: str, new_name: str) -> None:
        """Give a checkpoint another name; it has one of the two at any moment.

        Raises:
            UnknownNameError: no checkpoint is called `name`.
            NameTakenError: another one is called `new_name`.
            TakenStepError: one of the names is that of a training step, or of a pin.
        """
        from tensor_dedup.store.steps.runs import check_no_step

        with self._locked(), self._saying_near(name):
            names = check_name(name), check_name(new_name)

            def check() -> None:
                for each in names:
                    check_no_step(self._objects, each)

            self._objects.move_ref(*names, check_name=check)

    def delete(self, name: str) -> None:
        """Remove a checkpoint's name. Its bytes stay until gc finds that nothing else uses them.

        Raises:
            UnknownNameError: no checkpoint has this name.
            PinnedStepError: it is a step of a run, and pinned.
        """
        from tensor_dedup.store.steps.runs import check_no_kept_step

        def check() -> None:
            check_no_kept_step(self._objects, name)

        with self._locked(), self._saying_near(name):
            self._objects.drop_ref(check_name(name), check_name=check)

    def check_deletable(self, name: str) -> None:
        """Raise the error that `delete` would raise now."""
        from tensor_dedup.store.steps.runs import check_no_kept_step

        self.check_exists(name)
        with self._locked():
            check_no_kept_step(self._objects, name)

    def check_exists(self, name: str) -> None:
        """Raise UnknownNameError, which suggests the nearest name, unless the checkpoint exists."""
        with self._locked(), self._saying_near(name):
            if check_name(name) not in self._objects.names():
                raise UnknownNameError.at(self.path, f"no checkpoint {name!r}", name=name)

    @contextmanager
    def _saying_near(self, name: str) -> Iterator[None]:
        """Add the nearest name to an UnknownNameError."""
        try:
            yield
        except UnknownNameError as error:
            names = self._objects.names()
            what = f"no checkpoint {name!r}{perhaps(name, names)}"
            raise type(error).at(self.path, what, name=name, near=nearest(name, names)) from error

    def gc(
        self,
        grace_hours: float = DEFAULT_GRACE_HOURS,
        *,
        dry_run: bool = False,
        wait_s: float = SWEEP_WAIT_S,
    ) -> GcPlan:
        """Move unused files to the trash; delete those that have been there for `grace_hours`.

        Open checkpoints remain readable. They do not delay it, but for those that lie in more
        containers than a process may hold open, and those that have met damage.

        Raises:
            StoreBusyError: other sessions, or such checkpoints, were not closed within `wait_s`
                seconds.
            UnfitForCollectionError: something is damaged or lost; nothing was touched.
        """
        if not grace_hours >= 0:
            raise BadRangeError.at(self.path, f"a grace of {grace_hours} hours")
        with os_errors(self.path), sweep(self._files, self._objects.layout, wait_s=wait_s):
            plan = plan_gc(self._objects, grace_hours)
            return plan if dry_run else execute(self._objects, plan, grace_hours)

    def _sweep(self, wait_s: float, check: Callable[[], None]) -> GcPlan:
        """Delete what is not used now, without a grace, as `gc` does; the trash keeps its own.

        `check` is called when nothing can be named or unnamed any more, and raises if it must not.
        """
        with os_errors(self.path):
            return sweep_now(self._objects, wait_s, check)

    def verify(
        self,
        *,
        sample: float | None = None,
        full: bool = False,
        seed: int | None = None,
        progress: ProgressListener | None = None,
    ) -> VerifyResult:
        """Check the bookkeeping, and a share of the pieces (`sample`, 0.0 to 1.0) or all (`full`).

        Faults are listed in the result and quarantined. `seed` makes a sample repeatable.
        """
        share = 1.0 if full else sample or 0.0
        if not 0 <= share <= 1:
            raise BadRangeError.at(self.path, f"a sample of {share}")
        with self._session() as (index, hasher):
            level = Level(share, seed)
            return verify(self._objects, index, hasher, level, progress or SilentListener())

    def repair(
        self, paths: Sequence[StrPath] = (), *, progress: ProgressListener | None = None
    ) -> RepairResult:
        """Restore what `verify` found damaged, from the trash and from the checkpoints at `paths`.

        Raises:
            CheckpointError, UnsupportedError: a path is not a checkpoint; nothing was restored.
        """
        with self._session() as (index, hasher):
            work = Repair(self._objects, index, hasher, progress or SilentListener())
            return work.run([Path(path) for path in paths])

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn OSError into StoreError."""
        with os_errors(self.path):
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold a session, during which no sweep runs."""
        with os_errors(self.path), session(self._files, self._objects.layout):
            yield

    @contextmanager
    def _session(self, *, update: bool = True) -> Iterator[tuple[StoreIndex, Hasher]]:
        with self._locked(), ExitStack() as undo:
            hasher = Hasher(self._files, self._workers)
            undo.callback(hasher.close)
            yield undo.enter_context(open_index(self._objects, update=update)), hasher
