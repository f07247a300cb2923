"""One run's checkpoints in a store: saved, found again, kept and let go."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tensor_dedup.store.buffers import BufferPool
from tensor_dedup.store.checkpoints.state import NUMPY_CODES, NamedValue, value
from tensor_dedup.store.reading.bulk_reader import BulkReader, plan
from tensor_dedup.store.reading.reader import StoredCheckpoint, StoredTensor

if TYPE_CHECKING:
    from tensor_dedup.store.checkpoints.state import Value
import logging
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tensor_dedup.errors import StoreError
from tensor_dedup.store.checkpoints.adapters import ModelAdapter, adapter_for, by_name
from tensor_dedup.store.checkpoints.background import ExtractedStep, Hook, PendingSave, Saves, told
from tensor_dedup.store.checkpoints.capture import HostPool, default_bytes
from tensor_dedup.store.checkpoints.commit import Saved, Saver, StepSnapshot
from tensor_dedup.store.checkpoints.errors import (
    BadLimitError,
    NotATrainingError,
    PinnedStepError,
    UnknownStepError,
)
from tensor_dedup.store.checkpoints.notes import Notes, checked
from tensor_dedup.store.checkpoints.policy import Compress
from tensor_dedup.store.checkpoints.retention import Mode, Retention, best
from tensor_dedup.store.checkpoints.runs import (
    StepOrder,
    check_not_pinned,
    check_run,
    describe_all,
    in_order,
    manifest_of,
    pinned_steps,
    stats,
    step_name,
    step_numbers,
)
from tensor_dedup.store.checkpoints.state import pieces
from tensor_dedup.store.errors import (
    DamagedFileError,
    MissingObjectError,
    NameTakenError,
    UnknownNameError,
)
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.store import Store
from tensor_dedup.store.upkeep.gc import DEFAULT_GRACE_HOURS, GcPlan
from tensor_dedup.store.writing.sources import small_files

if TYPE_CHECKING:
    import torch


_LOG = logging.getLogger("tensor_dedup")


StrPath = str | PathLike[str]


_READERS = 8  # the disk wants several requests even where there are fewer cores


# A region of memory is let go when the tensors in it are copied.
_REGION = 64 << 20


_AHEAD = 2


# Up to so much, threads take longer to begin than one takes to read it all.
_ALONE_BYTES = 4 << 20


_ALONE_PIECES = 256


class CheckpointStore:
    """The checkpoints of one run in a store. Any number of handles, runs and processes at once.

        with CheckpointStore("checkpoints", "run-001", keep_last=5) as run:
            run.save(model, step=epoch, metrics={"val_loss": loss})
            model = run.load(run.best("val_loss"), original=model)

    Or without waiting for the disk, with the optimizer that changes the model:

            run.hook(optimizer)
            run.save_async({"model": model, "optimizer": optimizer}, step=step)

    A step costs what no step of any run in the store has yet. Every tensor is compared by content,
    in each save: one that was changed in place is saved, whatever its name or address. A training
    that goes back to a step and saves on from there makes greater steps of its first attempt stale:
    `latest` and `keep_last` go by the time of saving, of equal times by number. Methods may
    be called from any thread; saves take turns. They raise StoreError and nothing else about the
    store and its disk; StateError (one of them) about a model that cannot be taken apart.
    """

    def __init__(
        self,
        root: "StrPath | Store",
        run_id: str,
        adapter: ModelAdapter | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, int, Mode] | None = None,
        compress: Compress = "auto",
        config: "StrPath | Mapping[str, str | bytes] | None" = None,
        weights: str = "",
        pool_bytes: int | None = None,
        in_flight: int = 1,
    ) -> None:
        """Open, or make, the store in the folder `root` for the run `run_id`.

        `adapter` takes models apart and puts them together; by default the one for their type.
        After each save the steps go that no rule keeps: the `keep_last` ones that were saved last,
        the multiples of `keep_every`, the `keep_best` ones by a metric; pinned ones and the one
        just saved stay, and without a rule all do. `config` (a folder, or texts by path) is kept
        with each step, so that engines can load `store://RUN@STEP`; when the model is only one part
        of what is saved, as in `{"model": ..., "optimizer": ...}`, `weights="model"` says which.
        With `compress` what is new is stored encoded where that saves a tenth; with "auto" not
        what a training would stand still for. `pool_bytes` is how much memory the copies
        of `save_async` may take, by default a quarter of the machine's; `in_flight` how many of its
        saves may be unfinished at once. BadNameError, BadRetentionError, BadLimitError,
        BadCompressError, NotAStoreError.
        """
        _check_limits(run_id, in_flight, pool_bytes)
        self.run_id = check_run(run_id)
        self.store = root if isinstance(root, Store) else Store.open(root)
        self._adapter = adapter
        self._retention = Retention(keep_last, keep_every, keep_best)
        self._config, self._weights = self._small(config), weights
        self._steps = StepOrder(self.store.objects, self.run_id)
        self._saver = Saver(self.store.objects, self.store.worker_count, compress=compress)
        pool = HostPool(default_bytes() if pool_bytes is None else pool_bytes)
        threads = self.store.worker_count
        self._saves = Saves(self.commit, self._saver, pool, in_flight=in_flight, threads=threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, raised: BaseException | None, *_: object) -> None:
        try:
            self.close()
        except StoreError as error:
            if raised is None:
                raise
            raised.add_note(f"and a step was not saved: {told(error)}")  # that comes first

    def close(self) -> None:
        """Wait for saves in the background, and let go of what is held between saves.

        A later save takes it up again. Raises what a save in the background failed with.
        """
        self._saves.close()
        self._saver.close()
        self._saves.settle()

    def save(
        self,
        model: Any,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        files: "Mapping[str, str | bytes] | None" = None,
    ) -> Saved:
        """Save a step, in place of one that has this number; committed when this returns.

        Nobody may write to the model meanwhile (ChangedModelError where that is noticed).
        `metrics` are numbers; `files` small files by path, beside those of `config`.
        NoSpaceError, StoreIOError: all steps that were saved are as they were. PinnedStepError: a
        pinned step is not replaced. BadStepError, BadMetricError, NamedTwiceError, StateError.
        """
        self._saves.settle()
        return self.commit(self.snapshot(model, step, metrics, files=files))

    def append(
        self,
        model: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        files: "Mapping[str, str | bytes] | None" = None,
    ) -> Saved:
        """Save as the step after all that are there, imported ones too. Otherwise as `save`.

        Whoever does the same at this moment, in whatever process, gets another step.
        """
        self._saves.settle()
        while True:
            with self.store.locked():
                there = step_numbers(self.store.objects, self.run_id)
            taken = self.snapshot(model, max(there, default=-1) + 1, metrics, files=files)
            with suppress(NameTakenError):  # somebody was quicker: what was written is used again
                return self.commit(taken.as_new())

    def save_async(
        self,
        model: Any,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        files: "Mapping[str, str | bytes] | None" = None,
        lazy: bool | None = None,
    ) -> PendingSave:
        """Begin to save a step as it is now; `wait()` of what comes back says what was saved.

        When this returns, the model may be changed: what the store does not have was copied. When
        `lazy`, only small tensors, plain values and what is no tensor of torch's were (arrays of
        numpy, and tensors made in inference mode), and `before_update` waits for the rest: until
        then large tensors must stay as they are. ChangedModelError where torch counts the change;
        it counts none through `.data`, nor through an array that shares a tensor's memory. By
        default it is lazy when an optimizer was hooked. Waits while `in_flight` saves are
        unfinished; what does not fit into the pool is waited for until it is written.

        What a save in the background fails with is raised by the next call, once: this one, `save`,
        `before_update`, `close`, `wait` of its own. Then this one has saved nothing. As `save`.
        """

        step_name(self.run_id, step)
        self._check_not_pinned(step)
        return self._saves.start(lambda: self._taken(model, step, metrics, files), lazy=lazy)

    def before_update(self) -> None:
        """Return when the model may be changed: call it before the optimizer's step.

        Waits only for what `save_async` has not copied yet; copies from a device are waited for
        there, by what it is told next, and this returns at once. Raises what a save failed with.
        """
        self._saves.before_update()

    def hook(self, optimizer: "torch.optim.Optimizer") -> Hook:
        """Call `before_update` before each step of an optimizer, and make `save_async` lazy.

        Hook every optimizer that changes what is saved. `remove()` ends it.
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
        """A step as `commit` takes it. It may use the model's own memory; nothing is written."""
        taken = self._taken(model, step, metrics, files)
        return StepSnapshot(taken.notes, pieces(taken.values), taken.files)

    def _taken(
        self,
        model: Any,
        step: int,
        metrics: Mapping[str, Any] | None,
        files: "Mapping[str, str | bytes] | None",
    ) -> ExtractedStep:
        step_name(self.run_id, step)
        adapter = self._adapter or adapter_for(model)
        # An adapter of tensorcas' own interface has no name, and needs none: it is given to `load`.
        name = getattr(adapter, "name", type(adapter).__name__)
        notes = Notes(self.run_id, step, name, checked(metrics), self._weights)
        small = {**self._config, **self._small(files)}
        return ExtractedStep(notes, adapter.extract(model), small)

    def commit(self, snapshot: StepSnapshot) -> Saved:
        """Store a snapshot, then let go of the steps that no rule keeps. Any thread. As `save`."""
        step = snapshot.notes.step
        self._check_not_pinned(step)  # before the work; it is looked at again after it
        saved = self._saver.commit(snapshot)
        try:
            self._let_go(step)
        except StoreError as error:  # the step is there: a save that did its work does not fail
            _LOG.warning("saved %s; no older step was let go of: %s", saved.name, error)
        return saved

    def load(self, step: int, original: Any = None) -> Any:
        """The model as it was saved, put into `original` where the adapter can or must.

        Every byte is verified. What it costs depends on the step alone. UnknownStepError;
        NotATrainingError: it was imported; CorruptTensorError, MissingObjectError; StateError.
        """
        try:
            opened = self.store.checkpoint(step_name(self.run_id, step))
        except UnknownNameError:
            with self.store.locked():
                manifest_of(self.store.objects, self.run_id, step)  # says which steps there are
            raise
        with opened as checkpoint:
            notes = Notes.from_texts(checkpoint.notes)
            if notes is None:
                what = f"{checkpoint.name!r} was imported"
                raise NotATrainingError.at(self.store.path, what, name=checkpoint.name)
            adapter = self._adapter or by_name(notes.adapter)
            with self.store.translated():
                values = load_values(checkpoint, max(_READERS, self.store.worker_count))
        return adapter.reconstruct(values, original)

    def steps(self) -> list[int]:
        """The steps that are there, in order. Each is complete; what was imported is none."""
        with self.store.locked():
            return list(self._steps.saved())

    def latest(self) -> int | None:
        """The step that was saved last; None: nothing was saved yet.

        The greatest one, unless a training went back: saving step 6 when 10 is there makes 6 the
        latest. Time is that of the reference's file; of equal times the greater step is the later.
        """
        with self.store.locked():
            order = in_order(self._steps.saved())
        return order[-1] if order else None

    def metrics(self) -> dict[int, dict[str, float]]:
        """The metrics of each step, in order."""
        with self.store.locked():
            found = describe_all(self.store.objects, self.run_id)
        return {each.step: each.metrics for each in found}

    def best(self, metric: str, mode: Mode = "min") -> int:
        """The step with the least (or, with "max", greatest) metric, the earliest of equal ones.

        BadMetricError: no step has it.
        """
        return best(self.metrics(), metric, mode, self.run_id)

    def delete(self, step: int) -> None:
        """Forget a step; `gc` gives back its space. UnknownStepError, PinnedStepError.

        NotATrainingError: it was imported.
        """
        objects, name = self.store.objects, step_name(self.run_id, step)
        with self.store.locked(), objects.naming():
            # Under the lock of names: whoever pins it meanwhile comes before or after.
            check_not_pinned(objects, self.run_id, step)
            with suppress(DamagedFileError, MissingObjectError):  # that may be why it is to go
                manifest_of(objects, self.run_id, step)
            try:
                objects.files.unlink(objects.layout.refs / file_of(name))
            except FileNotFoundError as error:
                what = f"the run {self.run_id!r} has no step {step}"
                raise UnknownStepError.at(self.store.path, what, step=step) from error
            objects.files.sync_folder(objects.layout.refs)

    def pin(self, step: int) -> None:
        """Keep a step, whatever the rules say, until `unpin`; it is not replaced either.

        UnknownStepError.
        """
        objects, pin = self.store.objects, step_name(self.run_id, step, pin=True)
        with self.store.locked():
            manifest, _, _ = manifest_of(objects, self.run_id, step)
            objects.set_ref(pin, manifest, replace=True)
            try:
                found, _, _ = manifest_of(objects, self.run_id, step)
            except UnknownStepError:  # deleted just before
                objects.drop_ref(pin)
                raise
            if found != manifest:  # replaced just before; from now on it is not
                objects.set_ref(pin, found, replace=True)

    def unpin(self, step: int) -> None:
        """Let a step go again when the rules say so. Nothing happens when it is not pinned."""
        with self.store.locked(), suppress(UnknownNameError):
            self.store.objects.drop_ref(step_name(self.run_id, step, pin=True))

    def pinned(self) -> set[int]:
        """The steps that are pinned."""
        with self.store.locked():
            return pinned_steps(self.store.objects, self.run_id)

    def gc(self, grace_hours: float = DEFAULT_GRACE_HOURS) -> GcPlan:
        """Give back the space of what no step of any run, and no checkpoint, uses. As Store.gc.

        Saves in the background are waited for.
        """
        self._saves.finish()
        return self.store.gc(grace_hours)

    def stats(self) -> dict[str, object]:
        """Sizes of this run: run_id, checkpoints, total_chunks (tensors in its steps),
        unique_chunks (distinct ones), dedup_ratio (unique / total: lower is more reuse),
        total_bytes (what the distinct ones take on disk).
        """
        with self.store.locked():
            return stats(self.store.objects, [self.run_id], self.run_id).to_dict()

    def _let_go(self, saved: int) -> None:
        """Delete the steps that no rule keeps; never one whose manifest cannot be read."""
        if not self._retention.any:
            return
        with self.store.locked():
            order = in_order(self._steps.saved(readable=True))
        metrics = {step: {} for step in order} if self._retention.best is None else self.metrics()
        for old in self._retention.dropped(metrics, self.pinned(), saved, order):
            with suppress(UnknownStepError, PinnedStepError, NotATrainingError):
                self.delete(old)

    def _check_not_pinned(self, step: int) -> None:
        with self.store.translated():
            check_not_pinned(self.store.objects, self.run_id, step)

    def _small(self, config: "StrPath | Mapping[str, str | bytes] | None") -> dict[str, bytes]:
        if config is None:
            return {}
        if isinstance(config, Mapping):
            return {
                path: data.encode() if isinstance(data, str) else bytes(data)
                for path, data in config.items()
            }
        with self.store.translated():
            return small_files(self.store.objects.files, Path(config))


def _check_limits(run: str, in_flight: int, pool_bytes: int | None) -> None:
    if in_flight < 1 or (pool_bytes or 0) < 0:
        what = f"in_flight={in_flight}, pool_bytes={pool_bytes}"
        raise BadLimitError.at(f"run {run!r}", what)


class TensorCasStore(CheckpointStore):
    """CheckpointStore under the name and with the arguments of tensorcas."""


def load_values(checkpoint: StoredCheckpoint, threads: int) -> "dict[str, Value]":
    """The tensors of an open step by name: arrays of their own, or pieces of their own.

    CorruptTensorError, MissingObjectError: one is right nowhere. Memory: the step, and a little.
    """
    tensors = {tensor.name: tensor for tensor in checkpoint}
    named = defaultdict(list)
    for tensor in tensors.values():
        named[bytes.fromhex(tensor.digest) if tensor.nbytes else b""].append(tensor)
    found: dict[str, Value] = {}
    for tensor in named.pop(b"", ()):
        found[tensor.name] = _value(tensor, memoryview(b""))
    sizes = {digest: same[0].nbytes for digest, same in named.items()}
    for digest, view in _read(checkpoint, sizes, threads):
        for tensor in named[digest]:
            found[tensor.name] = _value(tensor, view[: tensor.nbytes])
    return {name: found[name] for name in tensors}


def _read(
    checkpoint: StoredCheckpoint, sizes: Mapping[bytes, int], threads: int
) -> Iterator[tuple[bytes, memoryview]]:
    """The bytes of pieces, in any order; valid until the next is asked for."""
    if len(sizes) <= _ALONE_PIECES and sum(sizes.values()) <= _ALONE_BYTES:
        for digest, nbytes in sizes.items():
            yield digest, memoryview(checkpoint.read_piece(digest, 0, nbytes, nbytes))
        return
    waiting = dict(sizes)
    with BulkReader(checkpoint, threads, BufferPool(0), verify=True, mapped=False) as filler:
        for filled in filler.fill(plan(checkpoint, sizes, _REGION), _AHEAD):
            for record in filled.span.records:
                start = record.offset - filled.span.start
                if waiting.pop(record.digest, None) is not None:
                    yield record.digest, filled.memory[start : start + record.nbytes]
        yield from filler.read(list(waiting.items()), _AHEAD * _REGION)


def _value(tensor: StoredTensor, view: memoryview) -> "Value":
    if tensor.dtype in NUMPY_CODES:
        return value(NamedValue(tensor.name, tensor.dtype, tensor.shape, view))
    return NamedValue(tensor.name, tensor.dtype, tensor.shape, bytearray(view))
