"""A store of checkpoints: each distinct tensor once on disk, and the same bytes out again.

`LocalStore` has no logic of its own beyond opening a session: each method takes the lock, opens the
index where it needs one, and calls a module of `writing`, `reading` or `upkeep`. Users have it as
`tensor_dedup.Store`, which adds push and pull.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from tensor_dedup.formats.markers import in_files
from tensor_dedup.store.errors import (
    BadRangeError,
    NameTakenError,
    UnknownNameError,
    os_errors,
)
from tensor_dedup.store.files import Files, RealFiles
from tensor_dedup.store.format.layout import StoreLayout
from tensor_dedup.store.format.names import check_name, name_of
from tensor_dedup.store.handle import StoreHandle
from tensor_dedup.store.hashing import ProgressListener, SilentListener
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.init import default_path, initialise, workers
from tensor_dedup.store.locks import SWEEP_WAIT_S, sweep
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.export import export
from tensor_dedup.store.reading.reader import StoredCheckpoint, StoredPieces
from tensor_dedup.store.upkeep.gc import DEFAULT_GRACE_HOURS, GcPlan, execute, plan_gc
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

if TYPE_CHECKING:
    import torch

    from tensor_dedup.store.reading.find import TensorPlace
    from tensor_dedup.store.steps.runs import Difference, Step
    from tensor_dedup.store.upkeep.run_sizes import Growth, RunCost, RunStats, TensorChanges
    from tensor_dedup.store.upkeep.usage import StoreUsage
    from tensor_dedup.store.writing.encoder import Encoder

StrPath = str | PathLike[str]


class LocalStore:
    """A content-addressed store of checkpoints in one folder; `open` opens or makes one.

    It keeps nothing open between calls: any number of handles, threads and processes may use
    one folder at once, and it survives a fork. `handle` is for the modules of this package.

    Raises:
        StoreError: the store, its files or its disk failed; the subclass says how.
        CheckpointError: a path passed to a method holds no checkpoint.
    """

    def __init__(self, path: Path, files: Files, worker_count: int) -> None:
        self.path = path
        self.handle = StoreHandle(path, files, worker_count)

    def __repr__(self) -> str:
        count: int | str = "?"
        with suppress(OSError):
            count = len(self.handle.objects.names())
        return f"{type(self).__name__}({str(self.path)!r}, checkpoints={count})"

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
        interface = files or RealFiles()
        with os_errors(root):
            initialise(Objects(interface, StoreLayout(root)), create=create, mend=mend)
        return cls(root, interface, worker_count or workers())

    @property
    def worker_count(self) -> int:
        """The number of hashing threads."""
        return self.handle.worker_count

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
        check = partial(check_no_step, self.handle.objects, wanted)
        with self.handle.session() as (index, hasher):
            check()  # before the work; it is looked at again after it
            source = read_source(self.handle.files, source_path, follow_links=follow_links)
            if not replace and wanted in self.handle.objects.names():
                same = unchanged(
                    self.handle.objects, index, hasher, source, wanted, in_place=external
                )
                if same is not None:
                    return same
                # By the same: what of it is damaged or gone is stored again.
                replace, check = (
                    True,
                    partial(self._check_still, wanted, check, self.handle.objects.ref(wanted)),
                )
            encoder = None
            if compress is not None or base is not None:
                encoder = self._encoder(index, source, base)
            return import_source(
                self.handle.objects,
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
        if self.handle.objects.ref(name) != manifest:
            raise NameTakenError.at(self.path, f"{name!r} is there already", name=name)

    def _encoder(self, index: StoreIndex, source: ImportSource, base: str | None) -> "Encoder":
        from tensor_dedup.store.writing.encoder import Encoder  # and with it numpy

        encoder = Encoder(self.handle.objects, index)
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
        with self.handle.session() as (_, hasher):
            return expected_manifest(
                self.handle.files, hasher, read_source(self.handle.files, Path(path)), known
            )

    def manifest(self, name: str) -> str | None:
        """Return the name of a checkpoint's manifest, or None if there is no such checkpoint."""
        with self.handle.locked(), suppress(UnknownNameError):
            return self.handle.objects.ref(check_name(name))
        return None

    def checkpoint(self, name: str) -> StoredCheckpoint:
        """Open a checkpoint for reading; close it, or use it as a context manager.

        Raises:
            UnknownNameError: no checkpoint has this name.
            MissingObjectError, DamagedFileError: its bookkeeping is damaged.
        """
        with self.handle.session(update=False) as (index, _), self.handle.saying_near(name):
            return StoredCheckpoint(self.handle.objects, index, check_name(name))

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
        with self.handle.session() as (index, _):
            return StoredPieces(
                self.handle.objects, index, {bytes.fromhex(text) for text in digests}
            )

    def export(
        self, name: str, directory: StrPath, *, progress: ProgressListener | None = None
    ) -> list[Path]:
        """Write a checkpoint's files, byte for byte, to a folder that is empty or missing.

        Returns the paths of the files. Each file appears when it is complete and durable.
        """
        with self.checkpoint(name) as checkpoint, os_errors(Path(directory)):
            return export(
                self.handle.files, checkpoint, Path(directory), progress or SilentListener()
            )

    def names(self) -> "list[str]":
        """Return the names of all checkpoints, sorted; nothing else is read."""
        with self.handle.locked():
            return self.handle.objects.names()

    def runs(self) -> "list[str]":
        """Return the names of the training runs that have steps in this store, sorted.

        `CheckpointStore(store, run)` opens one.
        """
        from tensor_dedup.store.steps.runs import run_names

        with self.handle.locked():
            return run_names(self.handle.objects)

    def steps(self, run: str) -> "list[Step]":
        """Return the steps of a run in order; an unknown run has none.

        Imports under a step's name are left out, as are, with a logged warning, steps that cannot
        be read.
        """
        from tensor_dedup.store.steps.runs import describe_all

        with self.handle.locked():
            return describe_all(self.handle.objects, run)

    def run_stats(self, run: str | None = None) -> "RunStats":
        """Measure the steps of a run, or those of all runs together. Reads no tensor data."""
        from tensor_dedup.store.upkeep.run_sizes import run_stats as measure

        runs = self.runs() if run is None else [run]
        with self.handle.locked():
            return measure(self.handle.objects, runs, run)

    def run_cost(self, run: str | None = None) -> "RunCost":
        """Compute what a run, or all runs together, cost beside the rest. Reads no tensor data.

        Raises:
            UnfitForCollectionError: something in the store is damaged or lost, so that it is not
                certain what is in use.
        """
        from tensor_dedup.store.upkeep.run_sizes import run_cost

        runs = self.runs() if run is None else [run]
        with self.handle.locked():
            return run_cost(self.handle.objects, runs)

    def tensor_changes(self, run: str) -> "list[TensorChanges]":
        """Count in how many steps of a run each tensor changed. Reads no tensor data."""
        from tensor_dedup.store.upkeep.run_sizes import tensor_changes

        with self.handle.locked():
            return tensor_changes(self.handle.objects, run)

    def run_growth(self, run: str) -> "list[Growth]":
        """Return what each step of a run added to it, in order. Reads no tensor data."""
        from tensor_dedup.store.upkeep.run_sizes import growth

        with self.handle.locked():
            return growth(self.handle.objects, run)

    def step_difference(self, one: tuple[str, int], two: tuple[str, int]) -> "Difference":
        """Compare two steps, each a run and a number: their tensors' names, bytes and metrics.

        Raises:
            UnknownStepError: a run has no such step.
            NotATrainingError: the checkpoint of that name was imported.
        """
        from tensor_dedup.store.steps.runs import difference

        with self.handle.locked():
            return difference(self.handle.objects, one, two)

    def find(self, digest: str) -> "list[TensorPlace]":
        """Return the tensors whose digest begins with these hex digits, by checkpoint and name.

        Raises:
            BadDigestError: it is not 4 to 64 hex digits.
        """
        from tensor_dedup.store.reading.find import find

        with self.handle.locked():
            return find(self.handle.objects, digest)

    def list(self) -> "list[Listed]":
        """Return all checkpoints, ordered by name; `damage` says which cannot be read, and why."""
        with self.handle.locked():
            return listed(self.handle.objects)

    def stats(self) -> Stats:
        """Measure the store, from its bookkeeping alone; no tensor data is read."""
        with self.handle.locked():
            return stats(self.handle.objects)

    def usage(self, name: str | None = None) -> "StoreUsage":
        """Measure what each checkpoint and each run takes; no tensor data is read.

        With `name`, the step of this name counts by itself, and not as a part of its run.
        """
        from tensor_dedup.store.upkeep.usage import usage

        with self.handle.locked():
            return usage(self.handle.objects, name)

    def rename(self, name: str, new_name: str) -> None:
        """Give a checkpoint another name; it has one of the two at any moment.

        Raises:
            UnknownNameError: no checkpoint is called `name`.
            NameTakenError: another one is called `new_name`.
            TakenStepError: one of the names is that of a training step, or of a pin.
        """
        from tensor_dedup.store.steps.runs import check_no_step

        with self.handle.locked(), self.handle.saying_near(name):
            names = check_name(name), check_name(new_name)

            def check() -> None:
                for each in names:
                    check_no_step(self.handle.objects, each)

            self.handle.objects.move_ref(*names, check_name=check)

    def delete(self, name: str) -> None:
        """Remove a checkpoint's name. Its bytes stay until gc finds that nothing else uses them.

        Raises:
            UnknownNameError: no checkpoint has this name.
            PinnedStepError: it is a step of a run, and pinned.
        """
        from tensor_dedup.store.steps.runs import check_no_kept_step

        def check() -> None:
            check_no_kept_step(self.handle.objects, name)

        with self.handle.locked(), self.handle.saying_near(name):
            self.handle.objects.drop_ref(check_name(name), check_name=check)

    def check_deletable(self, name: str) -> None:
        """Raise the error that `delete` would raise now."""
        from tensor_dedup.store.steps.runs import check_no_kept_step

        self.check_exists(name)
        with self.handle.locked():
            check_no_kept_step(self.handle.objects, name)

    def check_exists(self, name: str) -> None:
        """Raise UnknownNameError, which suggests the nearest name, unless the checkpoint exists."""
        with self.handle.locked(), self.handle.saying_near(name):
            if check_name(name) not in self.handle.objects.names():
                raise UnknownNameError.at(self.path, f"no checkpoint {name!r}", name=name)

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
        with (
            os_errors(self.path),
            sweep(self.handle.files, self.handle.objects.layout, wait_s=wait_s),
        ):
            plan = plan_gc(self.handle.objects, grace_hours)
            return plan if dry_run else execute(self.handle.objects, plan, grace_hours)

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
        with self.handle.session() as (index, hasher):
            level = Level(share, seed)
            return verify(self.handle.objects, index, hasher, level, progress or SilentListener())

    def repair(
        self, paths: Sequence[StrPath] = (), *, progress: ProgressListener | None = None
    ) -> RepairResult:
        """Restore what `verify` found damaged, from the trash and from the checkpoints at `paths`.

        Raises:
            CheckpointError, UnsupportedError: a path is not a checkpoint; nothing was restored.
        """
        with self.handle.session() as (index, hasher):
            work = Repair(self.handle.objects, index, hasher, progress or SilentListener())
            return work.run([Path(path) for path in paths])
