"""Save DeepSpeed checkpoints into a store in the background, configured in DeepSpeed's JSON alone.

    {"datastates_ckpt": {"store": "checkpoints", "run": "run-001"}, ...}

For this key DeepSpeed imports a module `datastates`, which the separate distribution in
packaging/datastates provides.

`save_checkpoint` returns before anything is written. The next optimizer step waits until the state
that it changes has been copied. Each file of a checkpoint is saved as a step in the store. When the
step is durable, a small pointer file that names the step is written in place of DeepSpeed's file.
When all files of a checkpoint are durable, the file `latest` is set to the tag of the checkpoint:

    mp_rank_00_model_states.pt                   names step 7 of RUN/mp_rank_00_model_states
    zero_pp_rank_1_mp_rank_00_optim_states.pt    names step 7 of RUN/zero_pp_rank_1_...
    latest                                       is written by the rank that finishes last

DeepSpeed does not pass `save_latest` to the engine, so `latest` is always written. All ranks need
one shared file system with locks for the store, and one for the checkpoint's folder.

The entry may also have `pool_bytes`, `compress`, `keep_last` and `drain`. They have the same
meaning as in `CheckpointStore`, with two exceptions:

* `pool_bytes` limits all copies that a rank holds. DataStates' own `host_cache_size`, in GiB, may
  be there instead.
* `keep_last` counts complete checkpoints in one folder. When a checkpoint is complete, older ones
  are deleted, with their pointer files and with folders that contain nothing else. With `drain`,
  each rank deletes its own files, at its next save or at its end.

If each checkpoint has its own tag, `load_checkpoint` without a tag always finds the last checkpoint
that is complete on all ranks, even if a rank was killed during a save. Saving under an existing tag
replaces the pointers one by one. If a save then fails or a rank is killed, the tag cannot be loaded
until all of its files are saved again.

A checkpoint is complete when all of it is in `store`, even if it has not been copied to `drain`. If
`store` is lost before that, `latest` names steps that no longer exist. A load then fails, and the
error message names a tag that can be loaded, if there is one. A program that restarts automatically
can call `newest_tag`.
"""

import json
import logging
import math
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tensor_dedup.errors import ConfigError, StoreError, UnsupportedError
from tensor_dedup.integrations.deepspeed import (
    TITLE,
    VERSIONS,
    DamagedPointerError,
    Pointer,
    register_types,
    write_part,
)
from tensor_dedup.seams import Seam, usable
from tensor_dedup.store.errors import os_errors
from tensor_dedup.store.files import RealFiles
from tensor_dedup.store.steps.errors import KeptStepError, NotATrainingError, UnknownStepError
from tensor_dedup.store.steps.retention import Retention
from tensor_dedup.store.store import LocalStore
from tensor_dedup.training import CheckpointStore, HostPool, PendingSave, Saved
from tensor_dedup.training.errors import BrokenSaveError, with_notes
from tensor_dedup.training.host_pool import default_bytes
from tensor_dedup.training.snapshot import StepSource

try:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
except ImportError:  # the engine refuses, and says which version it was made for
    TorchCheckpointEngine = object

__all__ = ["DecoupledStoreEngine", "newest_tag"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_FILES: Final = RealFiles()
KEY: Final = "datastates_ckpt"
_NEEDED: Final = frozenset({"store", "run"})
# DataStates' own option, in GiB, and ours, in bytes.
_CACHE, _POOL = "host_cache_size", "pool_bytes"
_FIELDS: Final = _NEEDED | {_POOL, _CACHE, "compress", "keep_last", "drain"}
_SEAM: Final = Seam(
    "deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine:DataStatesCheckpointEngine",
    "DeepSpeed cannot save into a store by its JSON alone",
    "it imports the module datastates, for which ours stands in, and passes save, load and wait on",
    "(deepspeed_config, rank)",
    versions=(VERSIONS,),
)
_LATEST: Final = "latest"
# What DeepSpeed reads again itself; other files (`save_16bit_model`) are for other programs.
_STATES: Final = "_states.pt"
_OPTIMIZER: Final = "_optim_states.pt"
# A rank whose own files are durable waits this long for those of the others, when it loads them.
_OTHERS_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class _Job:
    """A file to be saved. `key` is one for all files of one checkpoint.

    `counts` has the numbers of files with model and with optimizer states that make a checkpoint
    whole; only files with model states know them. `previous` is this rank's save before.
    """

    path: Path
    key: str
    counts: tuple[int, int] | None
    previous: PendingSave | None


class _FileRun(CheckpointStore):
    """The run of one of DeepSpeed's files, whose commits write its pointer and perhaps `latest`."""

    def __init__(
        self,
        store: LocalStore,
        run: str,
        keep_last: int | None,
        completed: Callable[[Path, str], None] | None = None,
        **options: Any,
    ) -> None:
        """Open the run; `completed` is called with the folder and the key of a whole checkpoint."""
        super().__init__(store, run, **options)
        self._jobs: dict[int, _Job] = {}
        self._next: int | None = None
        self._replaced: set[int] = set()
        self._file: Path | None = None
        self._swept = set[Path]()
        self._kept, self._completed = keep_last, completed

    def begin(self, state: Any, job: _Job, *, lazy: bool) -> PendingSave:
        """Start saving a state as the step after all others."""
        if self._next is None:
            self._next = max(self.steps(), default=-1) + 1
        step, self._next = self._next, self._next + 1
        self._jobs[step] = job
        return self.save_async(state, step, lazy=lazy)

    def commit(self, snapshot: StepSource) -> Saved:
        # docstring inherited; runs in the background, one after the other
        saved = super().commit(snapshot)
        job = self._jobs.pop(saved.step)
        if job.previous is not None:  # files of a rank get their names in the order of saving
            job.previous.finish()
            if (error := job.previous.failed) is not None:
                what = f"{job.previous.name} was not saved, so {saved.name} completes nothing"
                raise BrokenSaveError.at(self.store.path, what) from error
        with os_errors(job.path):
            whole = self._name(saved, job)
        self.prune_file(job.path)
        if whole and self._completed is not None:
            with _only_warned(job.path):
                self._completed(job.path.parent, job.key)
        return saved

    def _name(self, saved: Saved, job: _Job) -> bool:
        """Write the pointer of a file; return whether its checkpoint is whole now."""
        with suppress(DamagedPointerError):
            if (before := Pointer.read(job.path)) is not None:
                self._replaced |= self._steps_of([before])
        pointer = [TITLE, saved.name, saved.manifest, job.key, job.counts]
        folder = job.path.parent
        self._sweep(folder.parent, job.path.name)
        # Beside the folder, of which all may be pruned meanwhile, and before others have to wait.
        part = _written(job.path, json.dumps(pointer))
        # The lock, so that no rank removes a pointer that was just written.
        with self._naming(), os_errors(job.path):
            folder.mkdir(exist_ok=True)
            part.replace(job.path)
        self._file = job.path
        whole = _is_whole(folder, job.key)
        _FILES.sync_folder(folder)  # with what other ranks have named in it until now
        if whole:
            _written(job.path, folder.name).replace(folder.parent / _LATEST)
            _FILES.sync_folder(folder.parent)
        return whole

    def _sweep(self, folder: Path, name: str) -> None:
        """Remove, once, what a kill left of pointers of this file, which nobody else writes."""
        if folder in self._swept:
            return
        self._swept.add(folder)
        for left in folder.glob(f".*.{escape(name)}.part"):
            with suppress(OSError):
                left.unlink()

    def close(self) -> None:
        # docstring inherited
        super().close()
        if self._file is not None:  # a rank that ends first has seen less of what is whole now
            self.prune_file(self._file)

    def prune_file(self, path: Path, is_whole: Callable[[Path, str], bool] | None = None) -> None:
        """Delete steps of checkpoints in this folder that are older than the last whole ones.

        Never one after `latest`: another rank may not have saved its part of a later one. Pointers
        to them go too, and folders that held nothing else. What fails is logged: the checkpoint is
        there. `is_whole` is `_is_whole`, or what remembers its answers for several files.
        """
        if self._kept is None:
            return
        is_whole = is_whole or _is_whole
        with _only_warned(path), suppress(FileNotFoundError):
            newest = path.parents[1] / _tag(path.parents[1])
            latest = Pointer.read(newest / path.name)
            if latest is None:
                return
            read = ((each, Pointer.read(each)) for each in path.parents[1].glob(f"*/{path.name}"))
            pointers = {each: pointer for each, pointer in read if pointer is not None}
            steps = {s: each for each, found in pointers.items() for s in self._steps_of([found])}
            last = max(self._steps_of([latest]), default=-1)
            back = [step for step in sorted(steps, reverse=True) if step <= last]
            gone = [step for step in sorted(self._replaced) if step < last and step not in steps]
            if len(back) <= self._kept and not gone:
                return  # after most saves; whether one is whole is in the files of all ranks
            if not is_whole(newest, latest.key):
                return  # what is named may be saved anew, and not by all ranks yet
            whole = (s for s in back if is_whole(steps[s].parent, pointers[steps[s]].key))
            kept = list(islice(whole, self._kept))
            first = kept[-1] if len(kept) == self._kept else 0
            old = [step for step in sorted(steps) if step < first]
            for step in (*old, *gone):
                with suppress(KeptStepError, NotATrainingError):
                    with suppress(UnknownStepError):
                        self.delete(step)
                    for each, pointer in pointers.items():
                        if self._steps_of([pointer]) == {step}:
                            self._forget(each, pointer)
                self._replaced.discard(step)

    def _forget(self, path: Path, pointer: Pointer) -> None:
        """Remove a pointer that leads nowhere, unless the file was saved again."""
        with self._naming():
            if Pointer.read(path) == pointer:
                path.unlink()
                with suppress(OSError):  # others have written there, too
                    path.parent.rmdir()

    def _steps_of(self, pointers: Iterable[Pointer]) -> set[int]:
        places = (each.name.rpartition("@") for each in pointers)
        return {int(step) for run, _, step in places if run == self.run_id}


class DecoupledStoreEngine:
    """A checkpoint engine that saves to a store, and takes the place of the DataStates engine.

    Saves run in the background. The error of a failed save is raised once, by the next optimizer
    step, the next `save` or the next `wait`. Only one training at a time may save to a run, because
    two would replace each other's steps. Loading a checkpoint with replaced steps raises an error.
    """

    def __init__(self, deepspeed_config: Any, rank: int) -> None:
        """Open the store that is named in `deepspeed_config`.

        All ranks must create their engines together, as DeepSpeed does.

        Raises:
            ConfigError: The entry `datastates_ckpt` in DeepSpeed's JSON is not valid.
            UnsupportedError: The installed DeepSpeed differs from the version this was tested with.
            BadOptionError, BadNameError, NotAStoreError: A value in the entry is invalid.
        """
        if not usable(_SEAM):
            raise UnsupportedError(f"{_SEAM.target} is not what it was in {VERSIONS}")
        register_types()
        given = _settings(deepspeed_config)
        self._store, self._run = LocalStore.open(given.pop("store")), given.pop("run")
        self._keep_last = Retention(last=given.pop("keep_last", None)).last
        pool = given.pop(_POOL, None)
        self._options = {**given, "pool_bytes": HostPool(_share() if pool is None else pool)}
        # What is wrong is said now, and not at the first save.
        CheckpointStore(self._store, self._run, **self._options).close()
        self._rank, self._session = rank, _session()
        self._lazy = _stays_in_place(deepspeed_config)
        self._runs: dict[str, _FileRun] = {}
        self._calls: dict[Path, tuple[int, set[str]]] = {}
        self._last: PendingSave | None = None
        self._others = TorchCheckpointEngine(deepspeed_config)
        itself = weakref.ref(self)
        hook = register_optimizer_step_pre_hook(lambda *_: _before_update(itself))
        weakref.finalize(self, hook.remove)

    def save(self, state_dict: Any, path: str) -> None:
        """Start to save `state_dict`, the state that DeepSpeed would write to the file `path`.

        Only model and optimizer states are saved to the store. Other states are written to `path`
        as plain files before the method returns.

        Raises:
            StoreError: An earlier save failed, or this state cannot be saved.
        """
        file = Path(path)
        if not file.name.endswith(_STATES):
            self._others.save(state_dict, path)
            return
        number = self._number(file)
        counts = None if file.name.endswith(_OPTIMIZER) else _counts(file, state_dict)
        last = self._last if self._last is not None and not self._last.done() else None
        job = _Job(file, f"{self._session}.{number}", counts, last)
        run = self._run_of(f"{self._run}/{file.stem}")
        self._last = run.begin(dict(state_dict), job, lazy=self._lazy)

    def _number(self, file: Path) -> int:
        """Return which `save_checkpoint` into its folder a file is from, the same on all ranks.

        Where a save raises, DeepSpeed saves no further file of that checkpoint. So files are not
        counted each by itself: a file that comes again, failed or not, begins the next checkpoint.
        """
        number, files = self._calls.get(file.parent, (0, set()))
        if file.name in files:
            number, files = number + 1, set()
        self._calls[file.parent] = number, files | {file.name}
        return number

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the state that was saved to `path`, after waiting for the saves of this engine.

        If `path` is a pointer file, the step that it names is loaded, with tensors on the CPU. Any
        other file is loaded by DeepSpeed, with `map_location`.

        Raises:
            UnknownStepError: The step was deleted or lost, or its checkpoint is not complete.
            CorruptTensorError: The step is damaged.
            StoreError: A save of this engine failed.
        """
        self.wait(persist=True)
        file = Path(path)
        pointer = Pointer.read(file)
        if pointer is None:
            if file.name.endswith(_STATES) and not file.exists():
                what = f"{file.parent.name!r} was pruned, or never saved"
                raise UnknownStepError(f"{file}: {what}; {self._advice(file.parents[1])}")
            return self._others.load(path, map_location)
        self._check_whole(file, pointer)
        return pointer.load(self._open_run, path, lambda: self._advice(file.parents[1]))

    def wait(self, persist: bool = False) -> None:
        """Wait until the saved state has been copied and may be changed.

        With `persist`, wait until all saves are durable.

        Raises:
            StoreError: A save failed.
        """
        errors = list[StoreError]()
        for run in self._runs.values():
            try:
                run.close() if persist else run.before_update()
            except StoreError as error:
                errors.append(error)
        for other in errors[1:]:
            errors[0].add_note(f"and another file was not saved: {with_notes(other)}")
        if errors:
            raise errors[0]

    def _run_of(self, run_id: str) -> _FileRun:
        if run_id not in self._runs:
            itself = weakref.WeakMethod(self._prune_others)

            def completed(folder: Path, key: str) -> None:
                if (prune := itself()) is not None:
                    prune(folder, key)

            given = self._options
            self._runs[run_id] = _FileRun(self._store, run_id, self._keep_last, completed, **given)
        return self._runs[run_id]

    def _prune_others(self, folder: Path, key: str) -> None:
        """Apply `keep_last` to all files of a checkpoint that is whole now.

        Whoever saved its files before has not seen that. With a second tier, those of other ranks
        are left to them: opening their runs here would drain them twice.
        """
        if self._keep_last is None:
            return
        is_whole = cache(_is_whole)
        for file, pointer in list(_with_key(folder, key)):
            run_id = pointer.name.rpartition("@")[0]
            run = self._runs.get(run_id)
            if run is None and "drain" not in self._options:
                run = _FileRun(self._store, run_id, self._keep_last)
            if run is not None:
                run.prune_file(file, is_whole)

    def _open_run(self, run_id: str) -> CheckpointStore:
        """Return a run to load from: that of a file of any rank, also of another training."""
        if run_id in self._runs:
            return self._runs[run_id]
        return CheckpointStore(self._store, run_id, **self._options)

    def _advice(self, folder: Path) -> str:
        tag = _newest(folder, self._open_run)
        if tag is None:
            return "no checkpoint beside it has all its files; see `tensor-dedup runs list`"
        return (
            f"the newest checkpoint of which every file is there is {tag!r}: load it by "
            f"`load_checkpoint({str(folder)!r}, tag={tag!r})`"
        )

    def _check_whole(self, file: Path, pointer: Pointer) -> None:
        """Raise `UnknownStepError` if files of this file's checkpoint are missing."""
        if not pointer.key:  # saved by `tensor_dedup.integrations.deepspeed`, file by file
            return
        end = time.monotonic()
        if pointer.key.startswith(f"{self._session}."):  # other ranks may be about to end it
            end += _OTHERS_S
        while not _is_whole(file.parent, pointer.key):
            if time.monotonic() >= end:
                what = f"{file.parent.name!r} was not saved by all ranks; load {_LATEST!r}"
                raise UnknownStepError.at(file, what)
            time.sleep(0.02)


def newest_tag(
    folder: str | os.PathLike[str], store: str | os.PathLike[str], *, drain: str | None = None
) -> str | None:
    """Return the tag of the last checkpoint in `folder` that can be loaded now, or None.

        engine.load_checkpoint(folder, tag=newest_tag(folder, "fast", drain="lasting"))

    `store` and `drain` are the values in DeepSpeed's JSON. A checkpoint can be loaded if the steps
    for all files of all ranks are in `store` or `drain`. The checkpoint that the file `latest`
    names is preferred. If it cannot be loaded, the most recently written checkpoint that can be
    loaded is chosen.

    If torch.distributed is initialized, all ranks must call this function together, and all get the
    result of rank 0. The call also starts to copy to `drain` the steps that `drain` does not have.

    Raises:
        NotAStoreError: `store` or `drain` is something other than a store.
        StoreError: A tier cannot be read. All ranks raise the error of rank 0.
    """
    found: list[str | Exception | None] = [None]
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        try:
            with os_errors(Path(folder)):
                opened = LocalStore.open(store)
                open_run = partial(CheckpointStore, opened, drain=drain)
                found = [_newest(Path(folder), open_run)]
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks wait
            found = [error]
    tag = _of_first_rank(found[0])
    if isinstance(tag, Exception):
        raise tag
    return tag


def _newest(folder: Path, open_run: Callable[[str], CheckpointStore]) -> str | None:
    """Return the tag of the last checkpoint whose pointers all lead to a step, or None.

    That is the one that `latest` names, or else the one whose pointers were written last. The order
    of saving decides only where these times are equal: it is kept on the fast tier, and where that
    was lost, another run begins at its start again.
    """
    places, latest = cache(lambda run: open_run(run)._places()), ""
    with suppress(FileNotFoundError):
        latest = _tag(folder)
    found = list[tuple[bool, int, int, str]]()
    for tag in {path.parent for path in folder.glob(f"*/*{_STATES}")}:
        for key in {pointer.key for _, pointer in _pointers(tag)} - {""}:
            files = list(_with_key(tag, key))
            steps = [pointer.place(places) for _, pointer in files]
            there = [place for place in steps if place is not None]
            if len(there) == len(files) and _is_whole(tag, key):
                with suppress(FileNotFoundError):  # pruned just now
                    written = max(path.stat().st_mtime_ns for path, _ in files)
                    found.append((tag.name == latest, written, max(there), tag.name))
    return max(found)[3] if found else None


def _before_update(engine: "Callable[[], DecoupledStoreEngine | None]") -> None:
    if (found := engine()) is not None:
        found.wait()


def _settings(config: Any) -> dict[str, Any]:
    """Return what DeepSpeed's JSON has under the key."""
    entry = config.datastates_config.config
    if isinstance(entry, Mapping) and _NEEDED <= entry.keys() <= _FIELDS:
        return _with_pool(dict(entry))
    raise ConfigError(
        f"DeepSpeed's {KEY!r} is {entry!r}; write {{'store': FOLDER, 'run': NAME}} there, and as "
        f"you need them {', '.join(sorted(_FIELDS - _NEEDED))}"
    )


def _with_pool(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry with the size of DataStates' host cache as `pool_bytes`."""
    if _CACHE not in entry:
        return entry
    if _POOL in entry:
        raise ConfigError(f"DeepSpeed's {KEY!r} has {_CACHE!r} and {_POOL!r}; give one of them")
    size = entry.pop(_CACHE)
    if type(size) not in (int, float) or not 0 < size < math.inf:
        what = f"has {_CACHE!r} {size!r}; give a number of GiB above 0"
        raise ConfigError(f"DeepSpeed's {KEY!r} {what}")
    return {**entry, _POOL: int(size * (1 << 30))}


def _share() -> int:
    """Return a rank's share of a quarter of the machine's memory, in bytes."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return default_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def _session() -> str:
    """Return what no other start of a training has, the same on all ranks."""
    return _of_first_rank(uuid.uuid4().hex)


def _of_first_rank(value: _T) -> _T:
    """Return the value that the first rank has; all ranks call it together."""
    values = [value]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(values)
    return values[0]


def _stays_in_place(config: Any) -> bool:
    """Return whether nothing but a torch optimizer's step changes what is saved."""
    zero = config.zero_config
    parts = (zero.offload_optimizer, zero.offload_param)
    offloaded = any(part is not None and str(part.device) != "none" for part in parts)
    return not offloaded and zero.zenflow is None


def _counts(file: Path, state: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many files with model states and with optimizer states a checkpoint has."""
    if "dp_world_size" not in state:  # an expert's
        return None
    parallel, data = state["mp_world_size"], state["dp_world_size"]
    partitioned = file.name.startswith("zero_pp_rank_")
    models = parallel * data if partitioned else parallel
    return models, parallel * data if state["param_shapes"] is not None else 0


def _is_whole(folder: Path, key: str) -> bool:
    """Return whether all files of a checkpoint are there."""
    found = list(_with_key(folder, key))
    counts = next((pointer.counts for _, pointer in found if pointer.counts is not None), None)
    if counts is None:
        return False
    models = sum(pointer.counts is not None for _, pointer in found)
    optimizers = sum(path.name.endswith(_OPTIMIZER) for path, _ in found)
    return models >= counts[0] and optimizers >= counts[1]


def _with_key(folder: Path, key: str) -> Iterator[tuple[Path, Pointer]]:
    return ((path, pointer) for path, pointer in _pointers(folder) if pointer.key == key)


def _pointers(folder: Path) -> Iterator[tuple[Path, Pointer]]:
    """Yield the pointers of a checkpoint's folder. A damaged one makes nothing whole."""
    for path in folder.glob(f"*{_STATES}"):
        with suppress(DamagedPointerError):
            if (pointer := Pointer.read(path)) is not None:
                yield path, pointer


@contextmanager
def _only_warned(path: Path) -> Iterator[None]:
    """Log what keeps older checkpoints than the one of this file, which is saved."""
    try:
        with os_errors(path):
            yield
    except (StoreError, ValueError) as error:
        what = "%s is saved, but older checkpoints were not deleted; the next one tries again: %s"
        _log.warning(what, path, str(error))


def _tag(folder: Path) -> str:
    return (folder / _LATEST).read_text().strip()


def _written(file: Path, text: str) -> Path:
    """Write a small durable file that is to be renamed, whose name no other rank writes.

    What a kill leaves of it is removed when the next training saves this file.
    """
    part = file.parents[1] / f".{file.parent.name}.{file.name}.part"
    write_part(_FILES, text, part)
    return part
