"""The callback says when; Lightning's own way to save says what; StoreIO where to."""

import sys
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tensor_dedup.store.checkpoints import CheckpointStore
from tensor_dedup.store.checkpoints.errors import BadStepError
from tensor_dedup.store.checkpoints.naming import StepName, parse, step_name
from tensor_dedup.store.checkpoints.retention import Mode

# Lightning has two names; classes of one are strangers to the other.
if TYPE_CHECKING or "lightning" not in sys.modules:
    from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
    from pytorch_lightning import Callback
else:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch import Callback

StrPath = str | PathLike[str]
SCHEME: Final = "store://"


class StoreIO(CheckpointIO):
    """What is called `store://RUN@STEP` goes to the store and comes from it; all else to files."""

    def __init__(self, run: CheckpointStore, other: CheckpointIO | None = None) -> None:
        self.metrics: Mapping[str, Any] = {}
        self._run, self._other = run, other or TorchCheckpointIO()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a step of this run. StoreError, StateError."""
        if (step := _step(path)) is None:
            self._other.save_checkpoint(checkpoint, path, storage_options)
            return
        self._of(step).save(checkpoint, step.step, self.metrics)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint of a step of any run in this store, on the CPU. UnknownStepError."""
        if (step := _step(path)) is None:
            found: dict[str, Any] = self._other.load_checkpoint(path, map_location, weights_only)
            return found
        loaded: dict[str, Any] = CheckpointStore(self._run.store, step.run).load(step.step)
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Forget a step. UnknownStepError, PinnedStepError."""
        if (step := _step(path)) is None:
            self._other.remove_checkpoint(path)
        else:
            self._of(step).delete(step.step)

    def _of(self, step: StepName) -> CheckpointStore:
        same = step.run == self._run.run_id
        return self._run if same else CheckpointStore(self._run.store, step.run)


class StoreCallback(Callback):
    """Saves all that Lightning puts into a checkpoint, as often as it is told.

    Metrics of a step are those that callbacks see. Strategies whose processes have a part of the
    model each gather it, or write it themselves, as they do for files; see
    `tensor_dedup.patches.dcp` for those.
    """

    def __init__(
        self,
        root: StrPath,
        run_id: str,
        *,
        every: "int | Literal['epoch']" = "epoch",
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, int, Mode] | None = None,
        config: "StrPath | Mapping[str, str | bytes] | None" = None,
    ) -> None:
        """`every` is a number of steps, or "epoch". The rest as CheckpointStore."""
        self._every, self._saved = every, -1
        self.run = CheckpointStore(
            root,
            run_id,
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            config=config,
            weights="state_dict",
        )
        self._io = StoreIO(self.run)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the trainer find steps by their URLs; everything else goes where it did."""
        if not isinstance(trainer.strategy.checkpoint_io, StoreIO):
            self._io = StoreIO(self.run, trainer.strategy.checkpoint_io)
            trainer.strategy.checkpoint_io = self._io

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

    def _save(self, trainer: Any) -> None:
        self._saved = trainer.global_step
        self._io.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
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
