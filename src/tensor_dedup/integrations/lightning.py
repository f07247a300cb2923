"""Save steps and epochs of Lightning into a store, and resume from `store://RUN@STEP`.

    from tensor_dedup.integrations.lightning import StoreCallback

    callback = StoreCallback("checkpoints", "run-001", every=100)
    trainer = Trainer(callbacks=[callback])
    trainer.fit(model, ckpt_path="store://run-001@200")

`StoreCallback` determines when to save, Lightning determines the content of a checkpoint, and
`StoreIO` determines where to save it. The packages `lightning` and `pytorch_lightning` are both
supported; the one that the program has imported is used.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from tensor_dedup.errors import NotInstalledError, UnsupportedError
from tensor_dedup.integrations.freezing import Frozen, check_frozen, freeze
from tensor_dedup.remote.on_demand import pull_missing
from tensor_dedup.settings import remote_url
from tensor_dedup.store.steps.errors import BadStepError
from tensor_dedup.store.steps.retention import Rules
from tensor_dedup.store.steps.runs import StepName, parse_step_name, step_name
from tensor_dedup.store.store import LocalStore
from tensor_dedup.training import CheckpointStore, HostPool, PendingSave
from tensor_dedup.training.background import Hook
from tensor_dedup.training.encoding.decisions import Compress
from tensor_dedup.types import STORE_SCHEME, StrPath

# Lightning is published under two names, and one does not accept the classes of the other.
if TYPE_CHECKING or "lightning" not in sys.modules:
    try:
        from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
        from pytorch_lightning import Callback
        from pytorch_lightning.strategies import Strategy
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(("lightning_fabric", "pytorch_lightning")):
            raise
        raise NotInstalledError(
            "these callbacks need Lightning: run `pip install pytorch-lightning`, or, with the "
            "package `lightning`, import it before this module",
            module=error.name,
        ) from error
else:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import Strategy

__all__ = ["FreezeCallback", "StoreCallback", "StoreIO"]


class StoreIO(CheckpointIO):
    """A checkpoint plugin that saves and loads paths `store://RUN@STEP` through a store.

    Other paths are handled as files. Each run that was passed to `__init__` or `add` has its own
    store and retention rules. For a step of any other run, the first of these stores that has
    the step is used. If none has it, the first store is used.
    """

    def __init__(self, run: CheckpointStore, other: CheckpointIO | None = None) -> None:
        """Handle the steps of `run`. Further runs can be passed to `add`.

        `other` is the plugin for ordinary files, by default Lightning's own.
        """
        self._other = other or TorchCheckpointIO()
        self._runs = {run.run_id: run}
        self._asynchronous: set[str] = set()
        self._metrics: dict[str, Mapping[str, Any]] = {}
        self._last: dict[str, PendingSave] = {}

    def add(self, run: CheckpointStore, *, asynchronous: bool = False) -> None:
        """Handle the steps of `run` too.

        If `asynchronous` is True, the steps of `run` are saved in the background.
        """
        self._runs[run.run_id] = run
        if asynchronous:
            self._asynchronous.add(run.run_id)

    def note(self, run_id: str, metrics: Mapping[str, Any]) -> None:
        """Set the metrics that are saved with the next steps of the run `run_id`."""
        self._metrics[run_id] = metrics

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save `checkpoint` as the step or to the file that `path` names.

        Raises:
            StateError: The checkpoint contains a value that cannot be saved in a step.
            StoreError: The save failed.
        """
        if (step := _step(path)) is None:
            self._other.save_checkpoint(checkpoint, path, storage_options)
            return
        run = self._of(step)
        metrics = self._metrics.get(step.run)
        if step.run in self._asynchronous:
            self._last[step.run] = run.save_async(checkpoint, step.step, metrics)
        else:
            run.save(checkpoint, step.step, metrics)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in the step or the file that `path` names.

        To load a step, the method first waits for background saves of the run. The tensors of a
        step are on the CPU. If no store has the step, it is pulled from the first of these remotes
        that is set:

        1. the environment variable TENSOR_DEDUP_REMOTE;
        2. `remote` in a configuration file.

        Raises:
            StoreError: A background save of the run has failed, or the remote has no such step.
            UnknownStepError: No store has the step, and no remote is set.
        """
        if (step := _step(path)) is None:
            found: dict[str, Any] = self._other.load_checkpoint(path, map_location, weights_only)
            return found
        run = self._of(step)
        run.close()
        pull_missing(run.store, step_name(step.run, step.step), remote_url())
        loaded: dict[str, Any] = run.load(step.step)
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete the step or the file that `path` names.

        For a step, the method first waits until the last background save of the run has ended.

        Raises:
            UnknownStepError: There is no such step.
            KeptStepError: The step is kept.
        """
        if (step := _step(path)) is None:
            self._other.remove_checkpoint(path)
        else:
            if step.run in self._last:  # saves end in their order
                self._last[step.run].finish()
            self._of(step).delete(step.step)

    def teardown(self) -> None:
        """Call the `teardown` of the plugin that handles ordinary files."""
        self._other.teardown()

    def _of(self, step: StepName) -> CheckpointStore:
        if step.run in self._runs:
            return self._runs[step.run]
        # No callback saves this run: take the store that has the step, or else the first one.
        found = [CheckpointStore(run.store, step.run) for run in self._runs.values()]
        return next((run for run in found if step.step in run.steps()), found[0])


class StoreCallback(Callback):
    """A callback that saves Lightning's complete checkpoints to a run in a store.

    The metrics of a step are the callback metrics of the trainer. A trainer may have several of
    these callbacks, each with a run of its own.

    Strategies that write sharded files themselves (FSDP, DeepSpeed, tensor parallelism) are refused
    with an `UnsupportedError`. Use `tensor_dedup.integrations.dcp` with these strategies.
    """

    def __init__(
        self,
        root: StrPath | LocalStore,
        run_id: str,
        *,
        every: "int | Literal['epoch']" = "epoch",
        config: "StrPath | Mapping[str, str | bytes] | None" = None,
        asynchronous: bool = False,
        pool_bytes: int | HostPool | None = None,
        in_flight: int = 1,
        compress: Compress = "auto",
        **keep: Unpack[Rules],
    ) -> None:
        """Save after every `every` optimizer steps, or after every epoch.

        If `asynchronous` is True:

        * The training continues while a step is saved.
        * An optimizer waits until the tensors that it changes have been copied. With automatic
          optimization, the forward and backward passes wait too. With `accumulate_grad_batches`,
          only those of the last batch wait.
        * If a save fails, its error ends the training at the next step.
        * At the end, the training waits for the last save.

        All other arguments are those of `CheckpointStore`.
        """
        self._every, self._saved, self._asynchronous = every, -1, asynchronous
        self.run = CheckpointStore(
            *(root, run_id),
            config=config,
            weights="state_dict",
            pool_bytes=pool_bytes,
            in_flight=in_flight,
            compress=compress,
            **keep,
        )
        self._io, self._hooks = StoreIO(self.run), list[Hook]()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Install `StoreIO` in the trainer, so that it saves and loads `store://` URLs.

        Raises:
            UnsupportedError: The strategy does not use `CheckpointIO`, or another callback saves
                the same run.
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
        self._io.add(self.run, asynchronous=self._asynchronous)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Prepare for asynchronous saves, and note the step at which the training starts.

        If saves are asynchronous, each optimizer will wait until the tensors that it changes have
        been copied. `on_train_batch_end` does not save the step at which the training starts.
        """
        self._saved = trainer.global_step
        if self._asynchronous and trainer.is_global_zero:
            self._hooks = [self.run.hook(each) for each in trainer.optimizers]

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if the current step is due, at most once for each optimizer step."""
        step = trainer.global_step
        if self._every != "epoch" and step % self._every == 0 and step != self._saved:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if the callback saves every epoch; then wait until the weights have been copied.

        The wait is needed because callbacks that average weights may swap them at this point.
        """
        if self._every == "epoch":
            self._save(trainer)
        self.run.before_update()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Wait until the weights have been copied, because other callbacks may swap them now."""
        self.run.before_update()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the last save, and release the memory and files that the run keeps.

        Raises:
            StoreError: A background save has failed; the exception is the error of the save.
        """
        self._unhook()
        self.run.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait for the last save. If the save has failed too, add a note to `exception`."""
        self._unhook()
        self.run.__exit__(type(exception), exception, None)

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _check_alone(self, callbacks: Iterable[object]) -> None:
        mine = self.run.run_id
        runs = [each.run.run_id for each in callbacks if isinstance(each, StoreCallback)]
        if (count := runs.count(mine)) > 1:
            raise UnsupportedError(
                f"{count} callbacks save the run {mine!r}; give each a run_id of its own"
            )

    def _save(self, trainer: Any) -> None:
        self._saved = trainer.global_step
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._io.note(self.run.run_id, metrics)
        name = step_name(self.run.run_id, trainer.global_step)
        trainer.save_checkpoint(f"{STORE_SCHEME}{name}", weights_only=False)


class FreezeCallback(Callback):
    """A callback that keeps layers bit-identical, as `tensor_dedup.integrations.freeze` does.

    `layers` lists numbered layers and patterns of names in the LightningModule's `state_dict`, as
    in `FreezeCallback("0-5,*embed*")`. If a frozen tensor has changed, a `FrozenLayerError` is
    raised at the next save or at the end of the training.
    """

    def __init__(self, layers: str) -> None:
        self._layers = layers
        self._frozen: Frozen | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Freeze the layers before the optimizers are made.

        Raises:
            ConfigError: A part of `layers` matches no tensor of the module, or `layers` is empty.
        """
        if stage == "fit" and self._frozen is None:
            self._frozen = freeze(pl_module, self._layers)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the current weights as those to keep.

        Lightning may have loaded them from a checkpoint after `setup`.
        """
        if self._frozen is not None:
            self._frozen.note()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Check the frozen layers before a checkpoint is saved.

        Raises:
            FrozenLayerError: A frozen tensor has changed.
        """
        check_frozen(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Check the frozen layers at the end of the training.

        Raises:
            FrozenLayerError: A frozen tensor has changed.
        """
        check_frozen(pl_module)


def _step(path: str | Path) -> StepName | None:
    """Return the step that a URL names, or None for an ordinary path."""
    text = str(path)
    if not text.startswith(STORE_SCHEME):
        return None
    found = parse_step_name(text.removeprefix(STORE_SCHEME))
    if found is None or found.kept:
        raise BadStepError.at(text, f"no step in {text!r}; write {STORE_SCHEME}RUN@STEP")
    return found
