"""Save steps or epochs of Transformers' Trainer into a store.

    from tensor_dedup.integrations.trainer import StoreCallback

    callback = StoreCallback("checkpoints", "run-001", every=100)
    trainer = Trainer(..., callbacks=[callback])
    trainer.train()
    trainer.train(resume_from_checkpoint=callback.check_out(folder))

`PublishCallback` publishes the model for engines that follow the training, also in trainers that
are built on Trainer, such as those of TRL. `FreezeCallback` keeps chosen layers bit-identical
during the training.
"""

import json
import random
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, gather_object
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import ParallelMode

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.integrations.freezing import Frozen, FrozenLayerError, check_frozen, freeze
from tensor_dedup.publishing.publisher import Publisher
from tensor_dedup.store.steps.errors import UnknownStepError
from tensor_dedup.store.steps.retention import Rules
from tensor_dedup.store.steps.runs import step_name
from tensor_dedup.store.store import LocalStore
from tensor_dedup.training import CheckpointStore, HostPool
from tensor_dedup.training.encoding.decisions import Compress
from tensor_dedup.types import StrPath

if TYPE_CHECKING:
    from tensor_dedup.training.background import Hook

__all__ = ["FreezeCallback", "PublishCallback", "StoreCallback"]

_MODEL: Final = "model"
# The files of a Trainer checkpoint, and the part of a step that each holds. Few runs have all.
_FILES: Final = {
    "optimizer.pt": "optimizer",
    "scheduler.pt": "scheduler",
    "rng_state.pth": "rng",
    "scaler.pt": "scaler",
}
_SHARDING: Final = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class _SavingCallback(TrainerCallback):
    """A callback that saves models by `saves`, with their config and tokenizer files."""

    def __init__(self, saves: CheckpointStore | Publisher, *, asynchronous: bool) -> None:
        self._saves, self._asynchronous = saves, asynchronous
        self._hook: Hook | None = None
        self._files: dict[str, str | bytes] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Collect the config and tokenizer files for all steps, and hook the optimizer.

        Raises:
            UnsupportedError: The model is sharded.
        """
        _check_whole(args, given["model"])
        self._unhook()  # of a training that ended with an error
        if self._asynchronous and state.is_world_process_zero:
            self._hook = self._saves.hook(_inner(given["optimizer"]))
        self._files = _small_files(given["model"], given.get("processing_class"))

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class StoreCallback(_SavingCallback):
    """A callback that saves the complete training state to a run in a store.

    The state is that of the model, the optimizer, the scheduler, the gradient scaler and the random
    generators. Each step is a checkpoint in the store and contains the model's config and tokenizer
    files, so `store://RUN@STEP` can be loaded as a model. The metrics of a step are the numbers
    that Trainer has logged for it.

    A step is saved just before the next step begins. Trainer has then logged and evaluated the
    step, so its metrics are known, and random states and learning rates are those after the
    evaluation.

    With several processes, process 0 saves the model, which every process must hold in full. Models
    sharded by FSDP or DeepSpeed are refused with an `UnsupportedError`; use
    `tensor_dedup.integrations.dcp` for them. Each process gets its own random states back if the
    number of processes is the same as before. The state of other callbacks is not restored.
    """

    def __init__(
        self,
        root: StrPath | LocalStore,
        run_id: str,
        *,
        every: "int | Literal['epoch']" = "epoch",
        asynchronous: bool = False,
        pool_bytes: int | HostPool | None = None,
        in_flight: int = 1,
        compress: Compress = "auto",
        **keep: Unpack[Rules],
    ) -> None:
        """Save after every `every` steps, or after every epoch.

        With `asynchronous`, the training continues while a step is saved, and the optimizer waits
        until the tensors that it changes have been copied. If a save fails in the background, its
        error ends the training at the next step. At the end, the training waits for the last save.

        All other arguments are those of `CheckpointStore`.
        """
        self._every = every
        self.run = CheckpointStore(
            *(root, run_id),
            weights=_MODEL,
            pool_bytes=pool_bytes,
            in_flight=in_flight,
            compress=compress,
            **keep,
        )
        super().__init__(self.run, asynchronous=asynchronous)
        self._due = False

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Check that the model is not sharded, before any training is done.

        Raises:
            UnsupportedError: The model is sharded.
        """
        _check_whole(args, given["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Collect the config and tokenizer files for all steps, and hook the optimizer.

        Raises:
            UnsupportedError: The model is sharded.
        """
        super().on_train_begin(args, state, control, **given)
        self._due = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Note that a save is due if the number of the step is a multiple of `every`."""
        self._due |= self._every != "epoch" and state.global_step % self._every == 0

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Note that a save is due if `every` is "epoch"."""
        self._due |= self._every == "epoch"

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Save the last step of the previous epoch if a save is due.

        A `StoreError` ends the training; all saved steps stay intact.
        """
        self._save_if_due(args, state, given)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Save the previous step if a save is due.

        A `StoreError` ends the training; all saved steps stay intact.
        """
        self._save_if_due(args, state, given)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """When Trainer logs its final summary, save the last step if a save is due.

        The method then waits until the state has been copied, because Trainer may load its best
        model next.
        """
        if "train_runtime" in given.get("logs", {}):
            self._save_if_due(args, replace(state, log_history=state.log_history[:-1]), given)
            self.run.before_update()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Wait for the last save, and release the memory and files that the run keeps.

        Raises:
            StoreError: A background save has failed; the exception is the error of the save.
        """
        self._unhook()
        self.run.close()

    def check_out(self, folder: StrPath, step: int | None = None) -> str:
        """Write the step `step` to `folder`, from which Trainer can resume; return the path.

        Pass the path to `Trainer.train(resume_from_checkpoint=...)`. Without `step`, the latest
        step is written. The method first waits for background saves.

        Raises:
            StoreError: A background save has failed.
            UnknownStepError: The run has no such step.
            TargetExistsError: The folder is not empty.
            CorruptTensorError: The store has no intact copy of a tensor.
            MissingObjectError: The store has lost an object.
        """
        self.run.close()
        wanted = self.run.latest() if step is None else step
        if wanted is None:
            what = f"the run {self.run.run_id!r} has no step"
            raise UnknownStepError.at(self.run.store.path, what)
        target = Path(folder)
        self.run.store.export(step_name(self.run.run_id, wanted), target)
        found = self.run.load(wanted)
        for file, part in _FILES.items():
            if part in found:
                torch.save(found[part], target / file)
        for number, states in enumerate(found.get("rngs", ())):
            torch.save(states, target / f"rng_state_{number}.pth")
        (target / "trainer_state.json").write_text(found["trainer"])
        return str(target)

    def _save_if_due(
        self, args: TrainingArguments, state: TrainerState, given: dict[str, Any]
    ) -> None:
        due, self._due = self._due, False
        if not due:
            return
        # All processes come here at the same step.
        several = args.world_size > 1
        random_states = gather_object([_random_states(args)]) if several else _random_states(args)
        if not state.is_world_process_zero:
            return
        check_frozen(given["model"])
        parts = {
            _MODEL: given["model"].state_dict(),
            "optimizer": given["optimizer"].state_dict(),
            "scheduler": given["lr_scheduler"].state_dict(),
            "rngs" if several else "rng": random_states,
            "trainer": json.dumps(asdict(state)),
        }
        if (scaler := getattr(given["optimizer"], "scaler", None)) is not None:
            parts["scaler"] = scaler.state_dict()
        save = self.run.save_async if self._asynchronous else self.run.save
        save(parts, state.global_step, _metrics(state), files=self._files)


class PublishCallback(_SavingCallback):
    """A callback that publishes the model after every `every` steps, with config and tokenizer.

        policy = Publisher("s3://bucket/policy")
        trainer = GRPOTrainer(..., callbacks=[PublishCallback(policy, every=10)])

    The step `global_step` is published as soon as the optimizer has made it. Process 0 publishes,
    and must hold the model in full. Models sharded by FSDP or DeepSpeed are refused with an
    `UnsupportedError`.
    """

    def __init__(self, policy: Publisher, *, every: int = 1, asynchronous: bool = False) -> None:
        """Publish with `policy`, which the end of the training closes.

        With `asynchronous`, the training continues while a step is published, and the optimizer
        waits until the tensors that it changes have been copied. The error of a publish then ends
        the training at a later one.
        """
        super().__init__(policy, asynchronous=asynchronous)
        self.policy = policy
        self._every = every

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Publish the step if its number is a multiple of `every`.

        A `StoreError` ends the training; all published steps stay intact.
        """
        if state.global_step % self._every or not state.is_world_process_zero:
            return
        publish = self.policy.publish_async if self._asynchronous else self.policy.publish
        publish(given["model"], state.global_step, files=self._files)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Wait until all steps are published.

        Raises:
            StoreError: A step could not be published.
        """
        self._unhook()
        self.policy.close()


class FreezeCallback(TrainerCallback):
    """A callback that keeps layers bit-identical, as `tensor_dedup.integrations.freeze` does.

    `layers` lists numbered layers and patterns of names, as in `FreezeCallback("0-5,*embed*")`. A
    `FrozenLayerError` ends the training in these cases:

    * A frozen tensor has changed. This is checked before Trainer or `StoreCallback` saves, and at
      the end of the training.
    * A training is resumed from a checkpoint whose frozen layers differ from those of the model
      that was passed to Trainer.
    """

    def __init__(self, layers: str) -> None:
        self._layers = layers
        self._frozen: Frozen | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Freeze the layers before Trainer makes its optimizer and wraps the model.

        Raises:
            ConfigError: A part of `layers` matches no tensor of the model, or `layers` is empty.
        """
        self._frozen = freeze(given["model"], self._layers)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Record the current weights as those to keep; in a resumed training, check them instead.

        Raises:
            FrozenLayerError: The checkpoint from which the training is resumed has different bytes
                in the frozen layers.
        """
        if self._frozen is None:
            return
        if state.global_step == 0:
            self._frozen.note()
            return
        try:
            self._frozen.check()
        except FrozenLayerError as error:
            error.add_note(
                "The checkpoint that is resumed has them so. Resume an earlier one; or, if it is "
                "right, make the model from it (from_pretrained) before you give it to Trainer."
            )
            raise

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Raise `FrozenLayerError` if a frozen tensor has changed and Trainer is about to save."""
        if control.should_save:
            self._check()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Raise `FrozenLayerError` if a frozen tensor has changed and Trainer is about to save."""
        if control.should_save:
            self._check()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Raise `FrozenLayerError` if a frozen tensor has changed and `save_strategy` is "best".

        With this strategy, Trainer decides after the evaluation whether to save.
        """
        if args.save_strategy == "best":
            self._check()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Raise `FrozenLayerError` if a frozen tensor has changed.

        Another callback may have changed the tensor after the last check.
        """
        self._check()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Raise `FrozenLayerError` if a frozen tensor has changed."""
        self._check()

    def _check(self) -> None:
        if self._frozen is not None:
            self._frozen.check()


def _check_whole(args: TrainingArguments, model: Any) -> None:
    """Raise `UnsupportedError` unless every process holds the whole model."""
    # Trainer's arguments do not show what a launcher has switched on; Accelerate's state does.
    launched = AcceleratorState._shared_state.get("distributed_type")
    if (
        args.fsdp
        or args.deepspeed
        or launched in _SHARDING
        or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        or any(isinstance(each, DTensor) or hasattr(each, "ds_id") for each in model.parameters())
    ):
        raise UnsupportedError(
            "this callback saves whole models; with FSDP, DeepSpeed or tensor parallelism use "
            "StoreWriter of tensor_dedup.integrations.dcp"
        )


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer in Accelerate's wrapper, which has no hooks."""
    inner: torch.optim.Optimizer = optimizer
    if isinstance(optimizer, AcceleratedOptimizer):
        inner = optimizer.optimizer
    return inner


def _random_states(args: TrainingArguments) -> dict[str, Any]:
    """Return the states of this process's generators in the form in which Trainer saves them."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        several = args.parallel_mode == ParallelMode.DISTRIBUTED
        cuda = torch.cuda.random
        states["cuda"] = cuda.get_rng_state_all() if several else cuda.get_rng_state()
    return states


def _metrics(state: TrainerState) -> dict[str, float]:
    """Return the numbers logged at the step, by name."""
    logged: dict[str, object] = {}
    for entry in state.log_history:
        if entry.get("step") == state.global_step:
            logged |= entry
    return {name: float(value) for name, value in logged.items() if isinstance(value, int | float)}


def _small_files(model: Any, processor: Any) -> dict[str, str | bytes]:
    """Return the files of a model's config and tokenizer, by name."""
    with tempfile.TemporaryDirectory(prefix="tensor-dedup-") as folder:
        parts = [getattr(model, "config", None), getattr(model, "generation_config", None)]
        for part in (*parts, processor):
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        files = (path for path in Path(folder).rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}
