"""CheckpointStore: save, load, prune and delete the checkpoints of one run."""

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import NameTakenError, NoSpaceError
from tensor_dedup.store.format.names import check_name
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint
from tensor_dedup.store.steps.errors import NotATrainingError
from tensor_dedup.store.steps.notes import Notes, checked
from tensor_dedup.store.steps.retention import Mode, Retention, best, goal
from tensor_dedup.store.steps.runs import (
    StepOrder,
    StepPlace,
    check_no_step_s_name,
    check_run,
    in_save_order,
    step_name,
    step_numbers,
)
from tensor_dedup.store.store import LocalStore
from tensor_dedup.store.upkeep.gc import DEFAULT_GRACE_HOURS, GcPlan
from tensor_dedup.store.upkeep.run_sizes import run_stats
from tensor_dedup.training.adapters import ModelAdapter, adapter_for, by_name, chunks_of
from tensor_dedup.training.background import Hook, Saves
from tensor_dedup.training.commit import Saved
from tensor_dedup.training.encoding.decisions import Compress
from tensor_dedup.training.errors import DrainError, RunTakenError, with_notes
from tensor_dedup.training.options import SaveOptions, TierOptions, read_files
from tensor_dedup.training.pending_save import PendingSave
from tensor_dedup.training.retention import RunRetention
from tensor_dedup.training.saver import Saver
from tensor_dedup.training.snapshot import ExtractedStep, StepSnapshot, StepSource
from tensor_dedup.training.state import Value
from tensor_dedup.training.tiers.drain import Drain
from tensor_dedup.training.tiers.one_tier import OneTier, RunSteps
from tensor_dedup.training.tiers.two_tiers import TwoTiers
from tensor_dedup.training.values import load_values

if TYPE_CHECKING:
    import torch

    from tensor_dedup.remote.remote import Remote
    from tensor_dedup.training.host_pool import HostPool
    from tensor_dedup.types import StrPath


class CheckpointStore:
    """The checkpoints of one run in a store.

        with CheckpointStore("checkpoints", "run-001", keep_last=5) as run:
            run.save(model, step=epoch, metrics={"val_loss": loss})
            model = run.load(run.best("val_loss"), original=model)

    To save without waiting for the disk, hook the optimizer that changes the model:

            run.hook(optimizer)
            run.save_async({"model": model, "optimizer": optimizer}, step=step)

    A step takes space only for tensors that no step of any run in the store has yet. Every save
    compares each tensor by content, so a tensor that was changed in place is saved.

    If a training returns to an earlier step and continues from there, the later steps of its first
    attempt are outdated. Therefore `latest` and `keep_last` use the order of saving, which is
    recorded in the manifests and does not depend on a clock.

    Any number of objects, runs and processes may use a store at the same time. Safe from any
    thread; saves take turns. Errors of the store and its disk are StoreErrors. Their subclass
    StateError means that a model cannot be taken apart or restored.
    """

    def __init__(
        self,
        root: "StrPath | LocalStore",
        run_id: str,
        adapter: ModelAdapter | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, int, Mode] | None = None,
        compress: Compress = "auto",
        base: str | None = None,
        config: "StrPath | Mapping[str, str | bytes] | None" = None,
        weights: str = "",
        pool_bytes: "int | HostPool | None" = None,
        in_flight: int = 1,
        drain: "StrPath | LocalStore | Remote | None" = None,
        keep_fast: int | None = 1,
        drain_backlog: int = 8,
        direct: bool = False,
    ) -> None:
        """Open the run `run_id` in the store `root`, a folder in which a store is made if needed.

        `adapter` takes models apart and reassembles them. By default the adapter is chosen by the
        type of the saved object.

        **Retention.** Each save deletes the steps that no rule keeps. Without a rule, all steps are
        kept. Kept steps and the step just saved are always kept. The rules are:

        * `keep_last`: keep this number of steps, those saved last.
        * `keep_every`: keep steps whose numbers are multiples of this number.
        * `keep_best=(metric, count, "min" or "max")`: keep the `count` steps with the best values
          of a metric. While no step has the metric, or all values are NaN, all steps are kept. The
          first save without the metric logs a warning, because its name may be misspelt.

        **Files.** `config` (a folder, or a mapping from paths to texts) is stored with each step,
        so that engines can load `store://RUN@STEP`. If the model is only a part of the saved
        object, as in `{"model": ..., "optimizer": ...}`, `weights="model"` says which part.

        **Encoding.** New tensors are encoded if that saves a tenth of their size. `compress` says
        when:

        * "auto": a save encodes only what is quick. A thread encodes the rest when no save has run
          for some time, and `close` and `gc` wait for that thread. If a program ends without
          `close`, the remaining tensors stay unencoded.
        * "always": each save encodes everything.
        * None: nothing is encoded.

        In all cases, leaves (2 MiB) of a new tensor that a stored tensor has at the same offset are
        not stored again, if that saves a tenth of the new tensor.

        The first step of a run is stored as differences from the checkpoint `base` of the store,
        which may be an import or a step of another run. Without `base`, the most similar checkpoint
        is found by comparing samples. Later steps are stored as differences from the step before.
        Tensors are paired by the ends of their names.

        **Background saves.** `pool_bytes` limits the memory for the copies that `save_async` makes,
        by default to a quarter of the machine's memory. It may also be a HostPool, whose limit
        several objects share. `in_flight` is the number of background saves that may be unfinished
        at the same time.

        **Second tier.** With `drain`, `root` is a fast tier and `drain` a slower and lasting second
        tier: the folder of a store, a remote, or the URL of a remote (`s3://`, `gs://`, `az://`,
        `file://`). A step is saved when it is committed in `root`. A thread then drains it, that
        is, copies the missing data to the second tier, in the order of saving. The step appears
        there when it is durable, with exactly the same content.

        * Steps, metrics and marks are those on both tiers, and a step is loaded from the tier that
          has it.
        * The retention rules apply to the steps on the second tier, and delete from both tiers.
        * `root` keeps the steps that are not drained yet and, of the drained steps, the `keep_fast`
          steps that were saved last, or all if `keep_fast` is None.
        * With `direct`, a remote also gets what changed in each step since the one before. A store
          that has that one pulls only this, which is less than the differences from the step
          that all are stored against.
        * A copy that fails is tried again after half a second to a minute. While `drain_backlog`
          steps are undrained, a save waits.
        * The second tier must be reachable during this call, because only the second tier knows
          which step is the latest. Afterwards it may be unreachable for a time.
        * A run on a second tier has one writer: the `root` with which it was opened last. An
          earlier one keeps the steps that it has not copied, and raises RunTakenError from its next
          copy on. To read a run that is trained elsewhere, open the second tier without `drain`.
        * When a `root` becomes the writer in place of another one, the steps that it had not copied
          before are stranded: they stay in `root`, are not copied, and are named in a warning. They
          count as saved before all others.
        * If `keep_fast` is a number, `root` records the second tier, and the run cannot be drained
          to another one.

        Raises:
            BadNameError: The run's name is invalid.
            BadOptionError: An option is invalid or needs `drain`, or the name of the run has the
                form of a step's name; `kind` says which.
            NotAStoreError: `root` or `drain` holds something else than a store.
            UnknownNameError: The run has no step, and the store has no checkpoint `base`.
            OtherTierError: `drain` is not the second tier to which the run was drained before, for
                example because its disk is not mounted.
            StoreIOError, StoreAccessError: The store at `drain` cannot be read.
            RemoteUrlError: `drain` is a URL that does not name a remote.
            RemoteUnreachableError: The remote at `drain` does not answer.
            RemoteAccessError, ReadOnlyRemoteError: The remote at `drain` refuses the credentials,
                or cannot be written to.
            NotARemoteError: The place at `drain` holds something else than a remote.
            NoConditionsError: The server at `drain` ignores conditions of writes, so steps could be
                lost.
        """
        options = SaveOptions(
            run_id, adapter, compress, base, config, weights, pool_bytes, in_flight
        )
        tier_options = TierOptions(run_id, drain, keep_fast, drain_backlog, direct)
        self.run_id = check_run(run_id)
        check_no_step_s_name(self.run_id)
        rules = Retention(keep_last, keep_every, keep_best)
        self.store = root if isinstance(root, LocalStore) else LocalStore.open(root)
        self._options, self._config = options, read_files(self.store, options.config)
        objects, workers = self.store.handle.objects, self.store.worker_count
        with self.store.handle.translated():
            self._steps = StepOrder(objects, self.run_id)
        self._retention = RunRetention(objects, self.run_id, rules)
        self._saver = Saver(objects, workers, self._steps, compress=compress, base=base)
        self._saves = Saves(
            self.commit, self._saver, options.pool(), in_flight=in_flight, threads=workers
        )
        # The steps in `root`, which are all of the run's if there is no second tier.
        self._near = OneTier(self.store, self._steps, self._retention)
        self._tiers: RunSteps = self._near
        self._drain: Drain | None = None
        if drain is not None:
            self._open_second_tier(drain, tier_options)
        if base is not None and not self._places():  # else nothing needs it any more
            with self.store.handle.locked():
                objects.ref(check_name(base))  # raises if there is none

    def _open_second_tier(
        self, drain: "StrPath | LocalStore | Remote", options: TierOptions
    ) -> None:
        """Open the second tier `drain`, and start to drain to it."""
        from tensor_dedup.training.tiers.remote_tier import second_tier

        keep_fast = options.keep_fast
        second = second_tier(
            *(drain, self.store, self._steps),
            lets_go=keep_fast is not None,
            direct=options.direct,
        )
        tiers = TwoTiers(self.store, second, self._steps, self._retention, keep_fast=keep_fast)
        wait, backlog = self._saver.wait_for_encoding, options.drain_backlog
        self._tiers, self._drain = tiers, Drain(tiers, wait_for_encoding=wait, backlog=backlog)
        weakref.finalize(self, self._drain.forsake)  # nobody waits for what fails any more

    def __repr__(self) -> str:
        count = "?"
        with suppress(StoreError), self.store.handle.translated():
            count = str(len(step_numbers(self.store.handle.objects, self.run_id)))
        shown = f"{str(self.store.path)!r}, {self.run_id!r}, steps={count}"
        if self._drain is not None:
            shown += f", undrained={len(self._drain.undrained())}"
        return f"CheckpointStore({shown})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, raised: BaseException | None, *_: object) -> None:
        try:
            if raised is not None:  # whoever sees to an error does not wait for less disk
                self._saves.close()
                self._saver.drop_encoding()
            self.close()
        except StoreError as error:
            if raised is None:
                raise
            what = "drained" if isinstance(error, DrainError | RunTakenError) else "saved"
            raised.add_note(f"and a step was not {what}: {with_notes(error)}")  # that comes first

    def close(self) -> None:
        """Wait for background saves and encoding, and free the memory and files held between saves.

        With a second tier, the method also waits until all steps are drained. The object can be
        used again afterwards.

        Raises:
            StoreError: A background save has failed; the exception is the error of the save.
            DrainError: A step could not be copied to the second tier.
            RunTakenError: Another `root` is the writer of the run on the second tier.
        """
        self._saves.check()
        if self._drain is not None:
            self._drain.release()
        self._saves.close()
        self._saver.close()
        try:
            self._saves.wait()
        except StoreError as error:
            try:
                self._close_drain()
            except StoreError as other:
                error.add_note(f"and {with_notes(other)}")
            raise
        self._close_drain()

    def _close_drain(self) -> None:
        if self._drain is not None:
            self._drain.close()

    def save(
        self,
        model: Any,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        files: "Mapping[str, str | bytes] | None" = None,
    ) -> Saved:
        """Save `model` as the step `step`, replacing an existing step with this number.

        The step is durable when the method returns. The model must not be changed during the call.
        `metrics` maps names to numbers. NaN is saved with a warning, and is never the best value.
        `files` maps paths to the content of small files, which are saved in addition to the
        constructor's `config`.

        Raises:
            ChangedModelError: A write to the model was noticed.
            KeptStepError: The step exists and is kept, so it is not replaced.
            NotATrainingError: An imported checkpoint has the name RUN@STEP, and is not replaced.
            BadStepError, BadMetricError, NamedTwiceError: An argument is invalid.
            StateError: The model cannot be taken apart.
            NestedSaveError: A signal handler or a provider has called this method during a save.
            RunTakenError: Another `root` is the writer of the run on the second tier.
            NoSpaceError, StoreIOError: The disk failed; all saved steps are unchanged.
        """
        self._saves.wait()
        return self.commit(self.snapshot(model, step, metrics, files=files))

    def append(
        self,
        model: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        files: "Mapping[str, str | bytes] | None" = None,
    ) -> Saved:
        """Save `model` as a new step, whose number is one more than the highest existing number.

        Checkpoints imported under a name RUN@STEP count too. Concurrent calls, in any process, get
        different numbers. The arguments and errors are those of `save`.
        """
        self._saves.wait()
        while True:
            step = max(self._tiers.numbers(), default=-1) + 1
            extracted = self.snapshot(model, step, metrics, files=files)
            with suppress(NameTakenError):  # somebody was quicker: what was written is used again
                return self.commit(extracted.as_new())

    def save_async(
        self,
        model: Any,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        files: "Mapping[str, str | bytes] | None" = None,
        lazy: bool | None = None,
    ) -> PendingSave:
        """Start to save a step in the background. Call `wait` on the result to get a `Saved`.

        If the allowed number of background saves (`in_flight`) is running, the method first waits
        until one of them has ended.

        By default, the save is `lazy` if an optimizer is hooked (`hook`). If it is not lazy, the
        model may be changed as soon as the method returns: tensors that the store lacks have then
        been copied or, if the pool has no room for them, written.

        If the save is lazy, the method returns earlier. Large torch tensors must then stay
        unchanged until `before_update` has returned. Earlier changes can make the save fail with a
        ChangedModelError. But a change through `.data`, or through an array that shares the memory,
        goes unnoticed, and the step may have wrong content.

        The error of a background save is raised by `wait` of its result or, if that was not called,
        by the next call of this method, `save`, `before_update` or `close`. If this method raises
        the error of an earlier save, it has saved nothing. It also raises the errors of `save`.
        """
        step_name(self.run_id, step)
        self._tiers.check_replaceable(step)
        return self._saves.start(lambda: self._extract(model, step, metrics, files), lazy=lazy)

    def before_update(self) -> None:
        """Wait until the model may be changed. Call this method before the optimizer's step.

        The method waits for the tensors that `save_async` has not copied yet. It does not wait for
        copies from a device, because the device finishes them before its next work.

        Raises:
            StoreError: A background save has failed; the exception is the error of the save.
        """
        self._saves.before_update()

    def hook(self, optimizer: "torch.optim.Optimizer") -> Hook:
        """Call `before_update` before each step of `optimizer`, and make `save_async` lazy.

        Hook every optimizer that changes saved tensors. The method `remove` of the result undoes
        the hook.
        """
        return self._saves.hook(optimizer)

    def snapshot(
        self,
        model: Any,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        files: "Mapping[str, str | bytes] | None" = None,
    ) -> StepSnapshot:
        """Return a step made of `model`, which can be passed to `commit`. Nothing is written.

        The result may share the model's memory, so the model must not be changed before the commit
        has ended. The arguments and errors are those of `save`.
        """
        return StepSnapshot.of(self._extract(model, step, metrics, files))

    def _extract(
        self,
        model: Any,
        step: int,
        metrics: Mapping[str, Any] | None,
        files: "Mapping[str, str | bytes] | None",
    ) -> ExtractedStep:
        step_name(self.run_id, step)
        adapter = self._options.adapter or adapter_for(model)
        # An adapter of tensorcas' own interface has no name, and needs none: it is given to `load`.
        name = getattr(adapter, "name", type(adapter).__name__)
        numbers, part = checked(metrics), self._options.weights
        goals = self._retention.rules.goals
        notes = Notes(self.run_id, step, name, numbers, part, goals=goals)
        small = {**self._config, **read_files(self.store, files)}
        return ExtractedStep(notes, chunks_of(adapter, model), small)

    def commit(self, snapshot: StepSource) -> Saved:
        """Store `snapshot`, and then delete the steps that no retention rule keeps.

        With a second tier, the method first waits until fewer than `drain_backlog` steps are still
        to be copied there. Old steps are deleted in the background, after the new step was copied.
        Safe from any thread. The errors are those of `save`.
        """
        self._saves.check()
        return self._saves.run(lambda: self._commit(snapshot))

    def _commit(self, snapshot: StepSource) -> Saved:
        step, of_this_run = snapshot.notes.step, snapshot.notes.run == self.run_id
        if of_this_run and not snapshot.new:  # before the work; it is looked at again after it
            self._tiers.check_replaceable(step)
        if self._drain is not None:
            self._drain.wait_for_room()
        try:
            saved = self._saver.commit(snapshot)
        except NoSpaceError:
            if self._drain is None or not self._drain.free_space():
                raise
            saved = self._saver.commit(snapshot)
        snapshot.committed()  # before the step is drained, and others are let go of
        self._retention.warn(snapshot.notes)
        if not of_this_run:  # it is for that run to apply its rules
            return saved
        if self._drain is not None:  # which applies them to what is drained
            self._drain.add(step)
        else:
            self._near.prune_after(saved)
        return saved

    def load(self, step: int, original: Any = None) -> Any:
        """Load and return the model of a step. Every byte is verified.

        `original` is an object like the saved one. If it is given, it is filled with the loaded
        values as far as possible. Use the returned object in any case. Some adapters need an
        `original`.

        Raises:
            UnknownStepError: The run has no such step.
            NotATrainingError: The checkpoint with the name RUN@STEP was imported.
            CorruptTensorError, MissingObjectError: The store has no intact copy of a tensor.
            StateError: The state cannot be restored, or does not fit `original`.
        """
        adapter, values = self._tiers.read(step, self._read)
        return adapter.reconstruct(values, original)

    def _read(self, checkpoint: StoredCheckpoint) -> tuple[ModelAdapter, dict[str, Value]]:
        notes = Notes.from_texts(checkpoint.notes)
        if notes is None:
            what = f"{checkpoint.name!r} was imported"
            raise NotATrainingError.at(self.store.path, what, name=checkpoint.name)
        adapter = self._options.adapter or by_name(notes.adapter)
        return adapter, load_values(checkpoint, self.store.worker_count)

    def manifest(self, step: int) -> str:
        """Return the name of the manifest of a step.

        The name is a hash of the content, so it changes when the step is saved again.

        Raises:
            UnknownStepError: The run has no such step.
            NotATrainingError: The checkpoint with the name RUN@STEP was imported.
        """
        return self._tiers.manifest(step)

    def steps(self) -> list[int]:
        """Return the numbers of the run's steps, sorted.

        Steps that are still being saved, and imported checkpoints, are left out.
        """
        return list(self._places())

    def _places(self) -> dict[int, StepPlace]:
        return self._tiers.places()

    def latest(self) -> int | None:
        """Return the number of the step that was saved last, or None if the run has no steps.

        This is the highest number, unless a training went back: if step 6 is saved after step 10,
        the latest step is 6. If two steps were saved at the same moment, either may be returned.
        """
        order = in_save_order(self._places())
        return order[-1] if order else None

    def metrics(self) -> dict[int, dict[str, float]]:
        """Return the metrics of each step, by step number, in the order of the numbers."""
        return {each.step: each.metrics for each in self._tiers.described()}

    def best(self, metric: str, mode: Mode | None = None) -> int:
        """Return the step with the lowest (`mode` "min") or highest ("max") value of a metric.

        If several steps have this value, the one with the lowest number is returned. If `mode` is
        not given, it is taken from the first of these that defines it:

        1. the argument `keep_best` of this object;
        2. the `keep_best` recorded in the saved steps;
        3. the name of the metric, such as `val_loss` or `accuracy`.

        Raises:
            UnknownMetricError: No step has the metric.
            UnknownGoalError: `mode` is not given, and none of these defines it.
        """
        steps = self._tiers.described()
        noted = (step.goals for step in reversed(steps))
        chosen = mode if mode is not None else goal(metric, (self._retention.rules.goals, *noted))
        return best({step.step: step.metrics for step in steps}, metric, chosen, self.run_id)

    def delete(self, step: int) -> None:
        """Delete a step.

        The next `gc` moves its files to the trash. A later `gc`, after a grace period, frees the
        space.

        Raises:
            UnknownStepError: The run has no such step.
            KeptStepError: The step is kept.
            NotATrainingError: The checkpoint with the name RUN@STEP is not a step of this run.
        """
        self._tiers.delete(step)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Context manager: while it is active, no name in the store changes. For subclasses."""
        with self.store.handle.naming():
            yield

    def prune(self, *, dry_run: bool = False, among: Collection[int] | None = None) -> list[int]:
        """Delete the steps that no retention rule keeps, and return their numbers.

        Each save does the same. With `dry_run`, the numbers are returned but nothing is deleted. If
        `among` is given, only steps in it are deleted. The step saved last, and steps that cannot
        be read, are never deleted. A step with which a running background save compares its tensors
        is deleted after a later save. The space is freed by a later `gc`, after a grace period.
        """
        return self._tiers.prune(dry_run=dry_run, among=among)

    def keep(self, step: int) -> None:
        """Protect a step from deletion and replacement, until `unkeep` is called.

        Raises:
            UnknownStepError: The run has no such step.
            NotATrainingError: The checkpoint with the name RUN@STEP is not a step of this run, or
                an imported checkpoint has the name of the mark, RUN@STEP@keep.
        """
        self._tiers.keep(step)

    def unkeep(self, step: int) -> None:
        """Remove the mark of a step. Do nothing if the step is not kept.

        Raises:
            NotATrainingError: An imported checkpoint has the name of the mark, RUN@STEP@keep.
        """
        self._tiers.unkeep(step)

    def kept(self) -> set[int]:
        """Return the numbers of the steps that are kept."""
        return self._tiers.kept()

    def gc(self, grace_hours: float = DEFAULT_GRACE_HOURS) -> GcPlan:
        """Move files that no checkpoint needs to the trash, and delete old files from the trash.

        Files are deleted when they have been in the trash for `grace_hours`. The method first waits
        for background saves and encoding. The errors are those of `Store.gc`.
        """
        self._saves.finish()
        self._saver.finish_encoding()
        return self.store.gc(grace_hours)

    def drain(
        self, *, wait: bool = True, timeout: float | None = None, step: int | None = None
    ) -> None:
        """Copy all steps that are only on the fast tier to the second tier.

        Without a second tier, do nothing. Every save starts the copy of the saved step. Call this
        method to drain steps that other processes, such as ranks, have committed, or to wait for
        the copies. With `wait`, the method returns when all steps are drained, or only `step` if
        that is given, or raises DrainError after `timeout` seconds. If `step` is given and is being
        copied already, steps of other processes are not looked for.

        Raises:
            DrainError: A step could not be copied, or was not copied in time. The step stays on the
                fast tier, and the copy is tried again.
            RunTakenError: Another `root` is the writer of the run on the second tier. Each copy
                looks whether it still is, and so does each call that starts one.
        """
        if self._drain is None:
            return
        # A step that is being drained needs no further look at all that the second tier has.
        if step is None or not self._drain.is_coming(step):
            self._drain.start()
        if wait:
            self._saves.check()  # a step is drained when it is encoded, so while no save runs
            self._drain.wait(timeout, step)

    def undrained(self) -> list[int]:
        """Return the steps that this object still has to copy to the second tier, or to keep there.

        They are in the order in which they will be copied. Steps that other processes have saved
        are included after the next call of `drain`. Without a second tier, the list is empty.
        """
        return [] if self._drain is None else self._drain.undrained()

    def stats(self) -> dict[str, object]:
        """Return figures about this run as a dict, without reading tensors.

        * `run_id` is the name of the run, and `checkpoints` the number of its steps.
        * `total_chunks` is the number of tensors in its steps, `unique_chunks` the number of
          distinct tensors, and `dedup_ratio` their quotient, unique / total. A lower ratio means
          more reuse.
        * `total_bytes` is the number of bytes that the distinct tensors take on disk.

        With a second tier, these figures are for the fast tier alone, and there are more keys:

        * `undrained` is the number of steps that are not on the second tier yet.
        * `drain_error` is the error of the last copy, or None.
        * `stranded` has the numbers of the steps on the fast tier that are not copied, because the
          second tier has gone on without them.
        """
        with self.store.handle.locked():
            found = run_stats(self.store.handle.objects, [self.run_id], self.run_id).to_dict()
        if self._drain is not None:
            error = self._drain.error
            found |= {
                "undrained": len(self._drain.undrained()),
                "drain_error": None if error is None else str(error),
                "stranded": self._drain.stranded(),
            }
        return found


class TensorCasStore(CheckpointStore):
    """A CheckpointStore with the name and the arguments that the package tensorcas uses."""


def list_runs(root: "StrPath | LocalStore") -> list[str]:
    """Return the names of the runs that have steps in the store `root`, sorted.

    `root` is an open store, or the folder of a store.

    Raises:
        NotAStoreError: The folder does not contain a store.
    """
    store = root if isinstance(root, LocalStore) else LocalStore.open(root, create=False)
    return store.runs()
