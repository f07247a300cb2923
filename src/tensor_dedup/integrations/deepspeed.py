"""Save DeepSpeed's checkpoints into a store, configured in DeepSpeed's JSON.

    import tensor_dedup.integrations.deepspeed as store
    store.enable()

    {"tensor_dedup": {"store": "checkpoints", "run": "run-001"}, ...}

`save_checkpoint` then writes the state into the store, and small pointer files in place of
DeepSpeed's files; `load_checkpoint` follows them. Without that entry DeepSpeed behaves as before.
To save in the background, and without `enable`, see `tensor_dedup.integrations.datastates`.

All checkpoint files with the same name belong to one run in the store, even if they are in
different folders. The steps of the run are numbered in the order in which they are saved. The
numbers do not depend on DeepSpeed's tags, so equal tags in different folders do not collide. Each
pointer file names its step.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.seams import Replacements, Seam, usable
from tensor_dedup.store.errors import AdvisedError, os_errors
from tensor_dedup.store.files import Files, RealFiles
from tensor_dedup.store.steps.errors import NotATrainingError, UnknownStepError
from tensor_dedup.store.steps.runs import StepPlace, parse_step_name
from tensor_dedup.store.store import LocalStore
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.adapters import StateProvider, register_provider

try:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
except ImportError:  # `enable` refuses, and says which version it was made for
    CheckpointEngine = TorchCheckpointEngine = object

__all__ = ["StoreEngine", "enable"]

KEY: Final = "tensor_dedup"
_FIELDS: Final = frozenset({"store", "run"})
VERSIONS: Final = "DeepSpeed 0.19.8"
_SEAM: Final = Seam(
    "deepspeed.runtime.engine:create_checkpoint_engine",
    "DeepSpeed saves to its own files",
    "it makes the engine that saves and loads",
    "(config_params, groups, zero_stage, has_moe_layers, optimize_dp_state)",
    versions=(VERSIONS,),
)
# A pointer file is a JSON list that begins with this title, and is no longer than this.
TITLE: Final = "tensor-dedup step"
_LONGEST: Final = 4096


@cache
def enable() -> None:
    """Make DeepSpeed engines use the entry `tensor_dedup` in their configuration.

    This affects engines that are created after the call. Further calls in the same process do
    nothing.

    Raises:
        UnsupportedError: The installed DeepSpeed differs from the version this was tested with.
    """
    if not usable(_SEAM):
        raise UnsupportedError(f"{_SEAM.target} is not what it was in {VERSIONS}")
    register_types()
    Replacements([(_SEAM, _choose_engine)]).__enter__()


@cache
def register_types() -> None:
    """Register the types of DeepSpeed's objects in checkpoints, so that they can be saved.

    Further calls in the same process do nothing.
    """
    for name in ("LossScaler", "DynamicLossScaler"):
        _register(f"deepspeed.runtime.fp16.loss_scaler.{name}", lambda held: dict(vars(held)))
    _register("deepspeed.utils.tensor_fragment.fragment_address", lambda held: dict(vars(held)))
    register_provider(
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        StateProvider("deepspeed.ZeroStageEnum", int, lambda state, _: _zero_stage(state)),
    )


def _choose_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(config_params: Any, *given: Any, **named: Any) -> Any:
        entry = getattr(config_params, "_param_dict", {}).get(KEY)
        if entry is None:
            return original(config_params, *given, **named)
        store, run = _settings(entry)
        return StoreEngine(config_params, store, run)

    return create


def _settings(entry: object) -> tuple[str, str]:
    """Return the store and the run that DeepSpeed's JSON names."""
    if isinstance(entry, Mapping) and entry.keys() == _FIELDS:
        return str(entry["store"]), str(entry["run"])
    raise ConfigError(
        f"DeepSpeed's {KEY!r} is {entry!r}; write {{'store': FOLDER, 'run': NAME}} there"
    )


def _register(name: str, state: Callable[[Any], object]) -> None:
    """Save objects of a class as their attributes."""
    module, _, kind = name.rpartition(".")

    def restore(held: Any, _: Any) -> Any:
        found = getattr(importlib.import_module(module), kind)
        made = found.__new__(found)
        made.__dict__.update(held)
        return made

    register_provider(name, StateProvider(f"deepspeed.{kind}", state, restore))


def _zero_stage(state: int) -> Any:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum(state)


class StoreEngine(CheckpointEngine):  # type: ignore[misc]  # where DeepSpeed is not installed
    """A DeepSpeed checkpoint engine that saves to a store, and also loads DeepSpeed's own files.

    `save` writes a new, durable step, and a pointer file that names the step. If the same file is
    saved again, the pointer file names the new step, and the old step stays in the store.
    Processes that save at the same moment get separate steps.
    """

    def __init__(self, config_params: Any, store: str, run: str) -> None:
        """Open the store in the folder `store`, to save to runs called `run`/FILE.

        Raises:
            NotAStoreError: The folder `store` holds something other than a store.
            BadNameError: `run` is not a valid name of a run.
        """
        super().__init__(config_params)
        self.name = "StoreEngine"
        self._store, self._run = LocalStore.open(store), run
        self._runs: dict[str, CheckpointStore] = {}
        self._others = TorchCheckpointEngine(config_params)

    def create(self, info: Any) -> None:
        """Do nothing, because no preparation is needed before the first file of a checkpoint."""

    def save(self, state_dict: Any, path: str) -> None:
        """Save `state_dict` as a step, and write a pointer to that step to the file `path`.

        Raises:
            StateError: The state contains a value that cannot be saved.
            StoreError: The save failed.
        """
        saved = self._run_of(Path(path).stem).append(dict(state_dict))
        target = Path(path)
        with os_errors(target):
            publish(RealFiles(), json.dumps([TITLE, saved.name, saved.manifest]), target)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the state that was saved to `path`.

        If `path` is a pointer file, the step that it names is loaded, with tensors on the CPU. Any
        other file is loaded by DeepSpeed, with `map_location`.

        Raises:
            UnknownStepError: The step was deleted or replaced.
            CorruptTensorError: The step is damaged.
        """
        pointer = Pointer.read(Path(path))
        if pointer is None:
            return self._others.load(path, map_location)
        return pointer.load(lambda run: CheckpointStore(self._store, run), path)

    def commit(self, info: Any) -> bool:
        """Return True, because `save` has already written each file."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return False, so that DeepSpeed does not copy views before it saves them.

        The copies are not needed, because only the elements of a view are saved, never its whole
        storage.
        """
        return False

    def cleanup(self) -> None:
        """Release the memory and files that the runs keep between saves."""
        for run in self._runs.values():
            run.close()

    def _run_of(self, file: str) -> CheckpointStore:
        if file not in self._runs:
            self._runs[file] = CheckpointStore(self._store, f"{self._run}/{file}")
        return self._runs[file]


def publish(files: Files, text: str, target: Path) -> None:
    """Write the file `target` atomically and durably.

    A crash of the machine leaves what was there before, or `text`.

    Raises:
        OSError: The file could not be written; what was there before is unchanged.
    """
    part = target.with_name(f".{target.name}.part")
    write_part(files, text, part)
    files.rename(part, target)
    files.sync_folder(target.parent)


def write_part(files: Files, text: str, part: Path) -> None:
    """Write a small durable file that is to be renamed. What a kill has left of it is replaced.

    No other process writes a file of this name at the same time.
    """
    with suppress(FileNotFoundError):
        files.unlink(part)
    handle = files.open(part, "create")
    try:
        files.pwrite(handle, text.encode(), 0)
        files.fsync(handle)
    finally:
        files.close(handle)


class DamagedPointerError(AdvisedError):
    """A pointer file is damaged."""

    advice = "delete it; `tensor-dedup runs list` shows the steps, and other tags can be loaded"


class Pointer(msgspec.Struct, frozen=True, array_like=True, tag=TITLE, forbid_unknown_fields=True):
    """The content of a pointer file, which stands in place of a file of DeepSpeed.

    * `name` is the name of a step, and `manifest` the name of the step's manifest.
    * `key` is the same in all pointer files of one checkpoint.
    * `counts` is a pair: how many files of model states, and how many files of optimizer states, a
      complete checkpoint has. Only pointers to model states have it.

    `key` and `counts` are set by `tensor_dedup.integrations.datastates` only.
    """

    name: str
    manifest: str
    key: str = ""
    counts: tuple[int, int] | None = None

    @classmethod
    def read(cls, path: Path) -> "Pointer | None":
        """Return the pointer in the file at `path`.

        Returns None if the file does not exist or is not a pointer file.

        Raises:
            DamagedPointerError: The file begins like a pointer, but cannot be decoded.
        """
        with suppress(FileNotFoundError), path.open("rb") as file:
            blob = file.read(_LONGEST)
            if blob.startswith(f'["{TITLE}", '.encode()):
                try:
                    return msgspec.json.decode(blob, type=cls)
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    raise DamagedPointerError.at(path, f"it names no step ({error})") from error
        return None

    def load(
        self,
        open_run: Callable[[str], CheckpointStore],
        path: str,
        advise: Callable[[], str] = lambda: UnknownStepError.advice,
    ) -> Any:
        """Return the state in the step that the pointer names.

        `open_run` is called with the name of a run and returns the run. `path`, the path of the
        pointer file, is used in error messages only. `advise` returns the text with which the
        message of an UnknownStepError ends.

        Raises:
            UnknownStepError: The step was deleted, lost or replaced.
            CorruptTensorError: The step is damaged.
        """
        what = f"{self.name} is not what it was when this was saved"
        if (step := parse_step_name(self.name)) is not None:
            run = open_run(step.run)
            try:
                if run.manifest(step.step) == self.manifest:
                    return run.load(step.step)
            except UnknownStepError:
                what = f"{self.name} is absent: it was deleted, or lost with a tier"
            except NotATrainingError:
                pass
        raise UnknownStepError(f"{path}: {what}; {advise()}", path=path)

    def place(self, places: Callable[[str], Mapping[int, StepPlace]]) -> int | None:
        """Return the sequence number of the pointer's step.

        Later saves of the same run have higher numbers. The result is None if the step was
        deleted, or was saved again after the pointer was written.

        `places(run)` maps the step numbers of a run to sequence numbers and manifests.
        """
        step = parse_step_name(self.name)
        found = None if step is None else places(step.run).get(step.step)
        return None if found is None or found.manifest != self.manifest else found.sequence
