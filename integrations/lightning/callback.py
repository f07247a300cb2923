"""The callback says when; Lightning's own way to save says what; StoreIO where to."""

import sys
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.store.checkpoints import CheckpointStore
from tensor_dedup.store.checkpoints.errors import BadStepError
from tensor_dedup.store.checkpoints.retention import Rules
from tensor_dedup.store.checkpoints.step_names import StepName, parse, step_name

# Lightning has two names; classes of one are strangers to the other.
if TYPE_CHECKING or "lightning" not in sys.modules:
    from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
    from pytorch_lightning import Callback
    from pytorch_lightning.strategies import Strategy
else:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import Strategy

StrPath = str | PathLike[str]
SCHEME: Final = "store://"


class StoreIO(CheckpointIO):
    """What is called `store://RUN@STEP` goes to the store and comes from it; all else to files.

    Each run that was added is saved by its own rules into its own store. Any other is looked for in
    the stores of all of them, in the order in which they were added.
    """

    def __init__(self, run: CheckpointStore, other: CheckpointIO | None = None) -> None:
        """Of one run; `add` takes more. `other` saves and loads files."""
        self._other = other or TorchCheckpointIO()
        self._runs = {run.run_id: run}
        self._metrics: dict[str, Mapping[str, Any]] = {}

    def add(self, run: CheckpointStore) -> None:
        """Save and find the steps of one more run."""
        self._runs[run.run_id] = run

    def note(self, run_id: str, metrics: Mapping[str, Any]) -> None:
        """What the metrics of the next steps of a run are."""
        self._metrics[run_id] = metrics

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a step of the run that its name says. StoreError, StateError."""
        if (step := _step(path)) is None:
            self._other.save_checkpoint(checkpoint, path, storage_options)
            return
        self._of(step).save(checkpoint, step.step, self._metrics.get(step.run))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint of a step of any run in these stores, on the CPU. UnknownStepError."""
        if (step := _step(path)) is None:
            found: dict[str, Any] = self._other.load_checkpoint(path, map_location, weights_only)
            return found
        loaded: dict[str, Any] = self._of(step).load(step.step)
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Forget a step. UnknownStepError, PinnedStepError."""
        if (step := _step(path)) is None:
            self._other.remove_checkpoint(path)
        else:
            self._of(step).delete(step.step)

    def teardown(self) -> None:
        """Have the other one finish what it has begun."""
        self._other.teardown()

    def _of(self, step: StepName) -> CheckpointStore:
        if step.run in self._runs:
            return self._runs[step.run]
        # A run of nobody's here: where the step is, or else where the first run is.
        found = [CheckpointStore(run.store, step.run) for run in self._runs.values()]
        return next((run for run in found if step.step in run.steps()), found[0])


class StoreCallback(Callback):
    """Saves all that Lightning puts into a checkpoint, as often as it is told.

    Metrics of a step are those that callbacks see. A trainer may have several callbacks, of a run
    each. Strategies that write files themselves, in parts (FSDP, DeepSpeed, tensor parallel ones),
    are refused (UnsupportedError); see `tensor_dedup.integrations.dcp` for those.
    """

    def __init__(
        self,
        root: StrPath,
        run_id: str,
        *,
        every: "int | Literal['epoch']" = "epoch",
        config: "StrPath | Mapping[str, str | bytes] | None" = None,
        **keep: Unpack[Rules],
    ) -> None:
        """`every` is a number of steps, or "epoch"; `keep_last`, `keep_every` and `keep_best`, and
        the rest, as CheckpointStore.
        """
        self._every, self._saved = every, -1
        self.run = CheckpointStore(root, run_id, config=config, weights="state_dict", **keep)
        self._io = StoreIO(self.run)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the trainer find steps by their URLs; everything else goes where it did.

        UnsupportedError: this strategy reads and writes checkpoints past CheckpointIO; another
        callback saves this run.
        """
        strategy = trainer.strategy
        if type(strategy).load_checkpoint is not Strategy.load_checkpoint:
            raise UnsupportedError(
                f"{type(strategy).__name__} writes its own files; use StoreWriter of "
                "tensor_dedup.integrations.dcp with it, or a strategy that uses CheckpointIO"
            )
        self._check_alone(trainer.callbacks)
        if not isinstance(strategy.checkpoint_io, StoreIO):
            strategy.checkpoint_io = StoreIO(self.run, strategy.checkpoint_io)
        self._io = strategy.checkpoint_io
        self._io.add(self.run)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save, when it is time: once for each step of the optimizer."""
        step = trainer.global_step
        if self._every != "epoch" and step % self._every == 0 and step != self._saved:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save, when each epoch is saved."""
        if self._every == "epoch":
            self._save(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Let go of what is held between saves."""
        self.run.close()

    def _check_alone(self, callbacks: Iterable[object]) -> None:
        mine = self.run.run_id
        of_it = [
            each
            for each in callbacks
            if isinstance(each, StoreCallback) and each.run.run_id == mine
        ]
        if len(of_it) > 1:
            raise UnsupportedError(
                f"{len(of_it)} callbacks save the run {mine!r}; give each a run_id of its own"
            )

    def _save(self, trainer: Any) -> None:
        self._saved = trainer.global_step
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._io.note(self.run.run_id, metrics)
        name = step_name(self.run.run_id, trainer.global_step)
        trainer.save_checkpoint(f"{SCHEME}{name}", weights_only=False)


def _step(path: str | Path) -> StepName | None:
    """The step that a URL names; None: it is an ordinary path. BadStepError."""
    text = str(path)
    if not text.startswith(SCHEME):
        return None
    found = parse(text.removeprefix(SCHEME))
    if found is None or found.pin:
        raise BadStepError.at(text, f"no step in {text!r}; write {SCHEME}RUN@STEP")
    return found
