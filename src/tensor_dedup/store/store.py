"""`LocalStore`: a store of checkpoints in a folder, each distinct tensor once on disk.

The methods of `LocalStore` take the store's lock, open the index if they need it, and call the
modules in `writing`, `reading` and `upkeep`. `tensor_dedup.Store` extends `LocalStore` with push
and pull.
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from tensor_dedup.store.errors import (
    BadRangeError,
    UnknownNameError,
    os_errors,
)
from tensor_dedup.store.files import Files, RealFiles
from tensor_dedup.store.folders import StoreFolder
from tensor_dedup.store.format.layout import StoreLayout
from tensor_dedup.store.format.names import check_name, marked_by
from tensor_dedup.store.handle import StoreHandle
from tensor_dedup.store.hashing import ProgressListener, SilentListener
from tensor_dedup.store.init import default_path, initialise, workers
from tensor_dedup.store.locks import SWEEP_WAIT_S
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint
from tensor_dedup.store.reading.export import export
from tensor_dedup.store.reading.reader import StoredPieces
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
)
from tensor_dedup.store.writing.sources import HubSnapshot, default_name, read_source
from tensor_dedup.types import StrPath

if TYPE_CHECKING:
    import torch

    from tensor_dedup.store.reading.find import TensorPlace
    from tensor_dedup.store.steps.runs import Difference, Step
    from tensor_dedup.store.upkeep.cache_copies import CacheCopies
    from tensor_dedup.store.upkeep.run_sizes import Growth, RunCost, RunStats, TensorChanges
    from tensor_dedup.store.upkeep.usage import StoreUsage


class LocalStore:
    """A content-addressed store of checkpoints in a folder. `open` opens or creates a store.

    No file stays open between calls. Any number of threads and processes may use a store at once,
    also after a fork. `handle` is for the modules of this package. Every method may raise the
    following errors.

    Raises:
        StoreError: The store, its files or its disk failed; the subclass tells how.
        CheckpointError: A path passed to a method holds no checkpoint.
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
        """Open the store in the folder `path`; create one if the folder is empty or missing.

        Without `path`, the folder is the first of these that is set:

        1. the value of the environment variable TENSOR_DEDUP_STORE
        2. `store` in a configuration file (`tensor_dedup.settings`)
        3. the default, which is `tensor-dedup/store` in the user's data folder

        With `mend`, a missing or damaged marker file is written anew. `files` replaces the file
        system interface in tests. `worker_count` is the number of hashing threads; the default is
        one for each CPU.

        Raises:
            NotAStoreError: The folder holds other files.
            NoStoreError: The folder is empty or missing, and `create` is False.
            NewerFormatError: A later version of this program made the store.
            DamagedFileError: The marker file is missing or damaged. Either `mend` is False, or the
                file cannot be restored safely.
        """
        root = (Path(path) if path is not None else default_path()).absolute()
        interface = files or RealFiles()
        with os_errors(root):
            initialise(StoreFolder(interface, StoreLayout(root)), create=create, mend=mend)
        return cls(root, interface, worker_count or workers())

    @property
    def worker_count(self) -> int:
        """The number of hashing threads."""
        return self.handle.worker_count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing, because the store holds no file open. It may be used again."""

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
        all_files: bool = False,
        dry_run: bool = False,
    ) -> ImportResult:
        """Import the checkpoint at `path`: a file of weights, an index, or a folder with its files.

        `name` defaults to the name of the folder or file; characters that no checkpoint's name can
        have are replaced. Every byte is read and hashed. The checkpoint is committed when the call
        returns. After an error, the name is not committed, except perhaps after a disk failure.

        If the checkpoint `name` has the same files already and `replace` is False, nothing is
        written, and the result's `unchanged` is True. But if parts of that checkpoint are damaged,
        they are stored again, and `unchanged` is False.

        Leaves (2 MiB) of a new tensor that a stored tensor has at the same offset are not stored
        again, if that saves a tenth of the tensor. A vocabulary that grew therefore costs only its
        new rows. The other parameters are:

        - `hints` receives the digests of the imported files.
        - `compress` stores new tensors encoded if samples show that this saves a tenth. They are
          encoded on their own, or as the difference from a tensor in another checkpoint.
        - `base` is the name of the checkpoint to take differences from, and implies `compress`. The
          default is the most similar checkpoint in the store.
        - `external` leaves the weights where they are and indexes them there. The store then has no
          copy of them, and only notices if they change.
        - `follow_links` allows symbolic links to any place; use it only for folders that you trust.
          Without it, links must stay in the folder. In a Hugging Face cache, they may also lead to
          the blobs of the same repository and to those that the cache shares.
        - `all_files` keeps every file of a folder, also what the result otherwise lists as
          `left_out`, and hidden files. They are bytes of which nothing is known: they are never
          unpickled, engines do not see them, and an export brings them back.
        - `dry_run` only hashes the files and returns what an import would do. Nothing is written.

        Raises:
            CheckpointFilesError: A link leads out of the folder, or the files do not fit together.
            NameTakenError: The name holds another checkpoint, and `replace` is False. Or it holds
                files that only `all_files` keeps, and would lose them (LostFilesError).
            TakenStepError: The name is that of a training step or of a mark. Imports never replace
                these.
            ChangedFileError: A file was modified during the import.
            UnknownNameError: No checkpoint is called `base`.
        """
        from tensor_dedup.store.steps.runs import check_no_step

        source_path = Path(path)
        if name is None:
            name = default_name(source_path.absolute(), follow_links=follow_links)
        wanted = check_name(name)
        check = partial(check_no_step, self.handle.objects, wanted)
        with self.handle.session() as (index, hasher):
            check()  # before the work; it is looked at again after it
            source = read_source(
                self.handle.files, source_path, follow_links=follow_links, all_files=all_files
            )
            return import_source(
                self.handle.objects,
                index,
                hasher,
                source,
                wanted,
                replace=replace,
                progress=progress or SilentListener(),
                hints=hints or NullListener(),
                compress=compress is not None or base is not None,
                base=base,
                in_place=external,
                check_name=check,
                all_files=all_files,
                dry_run=dry_run,
            )

    def expected_manifest(
        self, path: StrPath, known: KnownDigests, *, all_files: bool = False
    ) -> str:
        """Return the name of the manifest that an import of `path` would make. Write nothing.

        If the result equals `manifest(name)`, the checkpoint `name` has the same files already.
        `known(path, fd)` returns the digests that the caller knows of an open file, as a mapping
        from (start, nbytes) to digests. Other parts of the file are hashed. `all_files` is that of
        `import_`.

        Raises:
            CheckpointFilesError: A link leads out of the folder, or the files do not fit together.
        """
        with self.handle.session() as (_, hasher):
            source = read_source(self.handle.files, Path(path), all_files=all_files)
            return expected_manifest(self.handle.files, hasher, source, known)

    def cache_copies(
        self,
        snapshots: Iterable[HubSnapshot],
        *,
        dedup: bool = False,
        follow_links: bool = False,
        progress: ProgressListener | None = None,
    ) -> "CacheCopies":
        """Return what snapshots of a Hugging Face cache and this store both hold on disk.

        Snapshots whose name the store lacks are left out. With `dedup`, a file of the cache that
        the store holds whole becomes one copy with it where the file system can share space between
        files. The kernel compares the bytes first, no file is written, and the cache's files keep
        their inodes and times. `follow_links` is that of `import_`.
        """
        from tensor_dedup.store.upkeep.cache_copies import cache_copies

        with self.handle.session() as (index, _):
            return cache_copies(
                self.handle.objects,
                index,
                snapshots,
                dedup=dedup,
                follow_links=follow_links,
                progress=progress or SilentListener(),
            )

    def manifest(self, name: str) -> str | None:
        """Return the name of the manifest of the checkpoint `name`, or None if there is none."""
        if marked_by(check_name(name)) is None:
            with self.handle.locked(), suppress(UnknownNameError):
                return self.handle.objects.ref(name)
        return None

    def checkpoint(self, name: str) -> StoredCheckpoint:
        """Open a checkpoint for reading. Close it, or use it as a context manager.

        Raises:
            UnknownNameError: No checkpoint has this name.
            MissingObjectError, DamagedFileError: The reference, the manifest or one of its pages is
                missing or damaged.
        """
        with self.handle.session(update=False) as (index, _), self.handle.saying_near(name):
            return StoredCheckpoint(self.handle.objects, index, check_name(name))

    def load(
        self, name: str, names: Collection[str] | None = None, *, verify: bool = True
    ) -> "dict[str, torch.Tensor]":
        """Load all tensors of a checkpoint, or those in `names`, as torch tensors on the CPU.

        Every byte is compared with its digest. If `verify` is False, this is done only for encoded
        tensors and for tensors in files indexed in place. The tensors are writable and belong to
        the caller. The first call imports torch. `tensor_dedup.store.reading.tensors` can also load
        in bounded memory, as mappings, or into reused buffers.

        Raises:
            UnknownNameError: No checkpoint is called `name`.
            UnknownTensorError: The checkpoint has no tensor of one of these names.
            CorruptTensorError, MissingObjectError: No intact copy of a tensor is in the store.
        """
        from tensor_dedup.store.reading.tensors import load_tensors  # and with it torch

        with self.checkpoint(name) as checkpoint:
            return load_tensors(checkpoint, names, verify=verify)

    def open_pieces(self, digests: Iterable[str]) -> StoredPieces:
        """Open the pieces with these digests (64 hex digits) for reading, from any checkpoints.

        Digests that the store does not have are ignored. Close the result, or use it as a context
        manager.
        """
        with self.handle.session() as (index, _):
            return StoredPieces(
                self.handle.objects, index, {bytes.fromhex(text) for text in digests}
            )

    def export(
        self, name: str, directory: StrPath, *, progress: ProgressListener | None = None
    ) -> list[Path]:
        """Write a checkpoint's files, byte for byte, to `directory`, an empty or missing folder.

        Return the paths of the files. Each file appears when it is complete and durable.

        Raises:
            UnknownNameError: No checkpoint is called `name`.
            ExportTargetError: `directory` is not empty, or is not a folder.
        """
        with self.checkpoint(name) as checkpoint, os_errors(Path(directory)):
            return export(
                self.handle.files, checkpoint, Path(directory), progress or SilentListener()
            )

    def names(self) -> "list[str]":
        """Return the names of all checkpoints, sorted. The steps of runs are among them."""
        with self.handle.locked():
            return self.handle.objects.names()

    def runs(self) -> "list[str]":
        """Return the sorted names of the training runs with steps in this store.

        `CheckpointStore(store, run)` opens a run.
        """
        from tensor_dedup.store.steps.runs import run_names

        with self.handle.locked():
            return run_names(self.handle.objects)

    def steps(self, run: str) -> "list[Step]":
        """Return the steps of a run, ordered by number. For an unknown run, the list is empty.

        Imported checkpoints with the name of a step are left out. Steps that cannot be read are
        left out, too, and a warning is logged for each.
        """
        from tensor_dedup.store.steps.runs import describe_all

        with self.handle.locked():
            return describe_all(self.handle.objects, run)

    def hold_step(self, name: str) -> None:
        """Keep the step `name` of a run from being deleted by programs that follow the run.

        A process holds the two steps of each run for which this was called last, until it ends.
        Nothing happens if `name` is no step that such a program has pulled: they delete no other.
        """
        from tensor_dedup.store.steps import followed

        with self.handle.translated():
            followed.hold(self.handle.objects, name)

    def run_stats(self, run: str | None = None) -> "RunStats":
        """Return the number of tensors in `run` and their size on disk. No tensor data is read.

        If `run` is None, the result is about all runs together.
        """
        from tensor_dedup.store.upkeep.run_sizes import run_stats as measure

        runs = self.runs() if run is None else [run]
        with self.handle.locked():
            return measure(self.handle.objects, runs, run)

    def run_cost(self, run: str | None = None) -> "RunCost":
        """Return how much disk space `run` takes. No tensor data is read.

        If `run` is None, the result is about all runs together.

        Raises:
            UnfitForCollectionError: The store is damaged, so it is uncertain what is in use.
        """
        from tensor_dedup.store.upkeep.run_sizes import run_cost

        runs = self.runs() if run is None else [run]
        with self.handle.locked():
            return run_cost(self.handle.objects, runs)

    def tensor_changes(self, run: str) -> "list[TensorChanges]":
        """Count for each tensor of a run in how many steps it changed. No tensor data is read."""
        from tensor_dedup.store.upkeep.run_sizes import tensor_changes

        with self.handle.locked():
            return tensor_changes(self.handle.objects, run)

    def run_growth(self, run: str) -> "list[Growth]":
        """Return how many tensors and bytes each step added to its run, ordered by step number.

        No tensor data is read.
        """
        from tensor_dedup.store.upkeep.run_sizes import growth

        with self.handle.locked():
            return growth(self.handle.objects, run)

    def step_difference(self, one: tuple[str, int], two: tuple[str, int]) -> "Difference":
        """Compare two steps: names and bytes of tensors, and metrics.

        `one` and `two` each consist of the name of a run and a step number.

        Raises:
            UnknownStepError: A run has no step with the given number.
            NotATrainingError: A checkpoint with the name of the step was not saved by the run.
        """
        from tensor_dedup.store.steps.runs import difference

        with self.handle.locked():
            return difference(self.handle.objects, one, two)

    def find(self, digest: str) -> "list[TensorPlace]":
        """Return the tensors whose digest begins with `digest`, ordered by checkpoint.

        If there is no such tensor, the list is empty.

        Raises:
            BadDigestError: `digest` is not 4 to 64 hex digits.
        """
        from tensor_dedup.store.reading.find import find

        with self.handle.locked():
            return find(self.handle.objects, digest)

    def list(self) -> "list[Listed]":
        """Return all checkpoints, ordered by name. If one cannot be read, its `damage` says why."""
        with self.handle.locked():
            return listed(self.handle.objects)

    def stats(self) -> Stats:
        """Return the sizes of the store. No tensor data is read."""
        with self.handle.locked():
            return stats(self.handle.objects)

    def usage(self, name: str | None = None) -> "StoreUsage":
        """Return the disk usage of each checkpoint and each run. No tensor data is read.

        If `name` is the name of a step, that step is listed separately and not as a part of its
        run.
        """
        from tensor_dedup.store.upkeep.usage import usage

        with self.handle.locked():
            return usage(self.handle.objects, name)

    def rename(self, name: str, new_name: str) -> None:
        """Rename a checkpoint, or a training run with its steps and the marks of those it keeps.

        After a crash, a checkpoint has the old name, the new name, or both, and a run has one name
        or the other. A run that is renamed while a training has it open keeps all its steps, and
        the next save of that training raises RenamedRunError.

        Raises:
            UnknownNameError: No checkpoint and no run is called `name`.
            NameTakenError: A checkpoint or run is called `new_name` already.
            TakenStepError: One of the names is the name of a training step or of a mark.
            DrainedRunError: The run has a second tier, on which its steps have its name.
            StoreBusyError: The store was in use for too long, so a run could not be renamed.
            DamagedFileError, MissingObjectError: A step of the run cannot be read, so none was
                renamed.
        """
        from tensor_dedup.store.steps.rename import rename_run
        from tensor_dedup.store.steps.runs import check_no_step, is_run

        names = check_name(name), check_name(new_name)
        with self.handle.locked():
            whole = name not in self.handle.objects.names() and is_run(self.handle.objects, name)
        if whole:
            with self.handle.translated(), self.handle.objects.sweep():
                rename_run(self.handle.objects, *names)
            return
        with self.handle.locked(), self.handle.saying_near(name):

            def check() -> None:
                for each in names:
                    check_no_step(self.handle.objects, each)

            self.handle.objects.move_ref(*names, check_name=check)

    def delete(self, name: str) -> None:
        """Remove the name of a checkpoint. Its bytes stay until `gc` finds that they are not used.

        Raises:
            UnknownNameError: No checkpoint has this name.
            KeptStepError: The checkpoint is a kept step of a run.
        """
        from tensor_dedup.store.steps.runs import check_no_kept_step

        def check() -> None:
            check_no_kept_step(self.handle.objects, name)

        with self.handle.locked(), self.handle.saying_near(name):
            self.handle.objects.drop_ref(check_name(name), check_name=check)

    def check_deletable(self, name: str) -> None:
        """Check that `delete` could remove the checkpoint `name`.

        Raises:
            UnknownNameError: No checkpoint has this name.
            KeptStepError: The checkpoint is a kept step of a run.
        """
        from tensor_dedup.store.steps.runs import check_no_kept_step

        self.check_exists(name)
        with self.handle.locked():
            check_no_kept_step(self.handle.objects, name)

    def check_exists(self, name: str) -> None:
        """Check that a checkpoint exists.

        Raises:
            UnknownNameError: No checkpoint has this name. The error suggests similar names.
        """
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
        """Collect garbage: move unused files to the trash, and delete old files from the trash.

        Files are deleted when they have been in the trash for `grace_hours`. With `dry_run`, only
        the plan is computed. Open checkpoints remain readable. They delay `gc` only if they lie in
        more containers than a process may hold open, or if damage was found in them.

        Raises:
            StoreBusyError: Other uses of the store did not end within `wait_s` seconds.
            UnfitForCollectionError: Something is damaged or lost; nothing was changed.
            BadRangeError: `grace_hours` is negative.
        """
        if not grace_hours >= 0:
            raise BadRangeError(
                f"{self.path}: grace_hours is {grace_hours}; give a number of hours, 0 or more",
                path=str(self.path),
                grace_hours=grace_hours,
            )
        with os_errors(self.path), self.handle.objects.sweep(wait_s):
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
        """Check the metadata of the store and a share of the pieces.

        `sample` is the share, from 0.0 to 1.0; `full` checks all pieces. By default, only the
        metadata is checked. `seed` makes a sample repeatable. The result lists the faults. Damaged
        data is quarantined, so it is not read again.

        Raises:
            BadRangeError: `sample` is not between 0.0 and 1.0.
        """
        share = 1.0 if full else sample or 0.0
        if not 0 <= share <= 1:
            raise BadRangeError(
                f"{self.path}: sample is {share}; give a share from 0.0 to 1.0",
                path=str(self.path),
                sample=share,
            )
        with self.handle.session() as (index, hasher):
            level = Level(share, seed)
            return verify(self.handle.objects, index, hasher, level, progress or SilentListener())

    def repair(
        self, paths: Sequence[StrPath] = (), *, progress: ProgressListener | None = None
    ) -> RepairResult:
        """Restore what `verify` found damaged, from the trash and from the checkpoints at `paths`.

        Raises:
            CheckpointError, UnsupportedError: A path does not lead to a checkpoint; nothing was
                restored.
        """
        with self.handle.session() as (index, hasher):
            work = Repair(self.handle.objects, index, hasher, progress or SilentListener())
            return work.run([Path(path) for path in paths])
