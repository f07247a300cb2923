"""The callback, and the way back: a folder as Trainer resumes from."""

import json
import random
import tempfile
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, Unpack

import numpy as np
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.store.checkpoints import CheckpointStore
from tensor_dedup.store.checkpoints.errors import UnknownStepError
from tensor_dedup.store.checkpoints.retention import Rules
from tensor_dedup.store.checkpoints.step_names import step_name

StrPath = str | PathLike[str]
_MODEL: Final = "model"
# What Trainer calls the files of a checkpoint, and what is in each. Not every training has all.
_FILES: Final = {
    "optimizer.pt": "optimizer",
    "scheduler.pt": "scheduler",
    "rng_state.pth": "rng",
    "scaler.pt": "scaler",
}
_CUTTING: Final = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class StoreCallback(TrainerCallback):
    """Saves model, optimizer, schedule, gradient scaler and random states, as often as it is told.

    Each step is a checkpoint of the store with the files of its config and tokenizer, so
    `store://RUN@STEP` is a model. Its metrics are the numbers that were logged last. Models of
    which every process has all are saved by the first process; of FSDP and DeepSpeed, which cut
    them up, they are refused (UnsupportedError): there, see `tensor_dedup.integrations.dcp`.

    Not resumed: the states of other callbacks are those that they began with, and of the random
    states of several processes none is put back, as Trainer says when it resumes.
    """

    def __init__(
        self,
        root: StrPath,
        run_id: str,
        *,
        every: "int | Literal['epoch']" = "epoch",
        **keep: Unpack[Rules],
    ) -> None:
        """`every` is a number of steps, or "epoch"; `keep_last`, `keep_every` and `keep_best`, and
        the rest, as CheckpointStore.
        """
        self._every = every
        self.run = CheckpointStore(root, run_id, weights=_MODEL, **keep)
        self._files: dict[str, str | bytes] = {}

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Refuse what is not saved before there is anything to lose. UnsupportedError."""
        _check_whole(args, given["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Take the small files that belong to the model. UnsupportedError: it is in parts."""
        _check_whole(args, given["model"])
        self._files = _small_files(given["model"], given.get("processing_class"))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Save, when it is time. StoreError: training ends, all saved steps are as they were."""
        if self._every != "epoch" and state.global_step % self._every == 0:
            self._save(state, given)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Save, when each epoch is saved."""
        if self._every == "epoch":
            self._save(state, given)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Let go of what is held between saves."""
        self.run.close()

    def check_out(self, folder: StrPath, step: int | None = None) -> str:
        """Make a folder that `Trainer.train(resume_from_checkpoint=...)` takes; its path.

        The latest step by default. UnknownStepError; TargetExistsError: the folder has something
        in it; CorruptTensorError, MissingObjectError.
        """
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
        (target / "trainer_state.json").write_text(found["trainer"])
        return str(target)

    def _save(self, state: TrainerState, given: dict[str, Any]) -> None:
        if not state.is_world_process_zero:
            return
        parts = {
            _MODEL: given["model"].state_dict(),
            "optimizer": given["optimizer"].state_dict(),
            "scheduler": given["lr_scheduler"].state_dict(),
            "rng": _random_states(),
            "trainer": json.dumps(asdict(state)),
        }
        if (scaler := getattr(given["optimizer"], "scaler", None)) is not None:
            parts["scaler"] = scaler.state_dict()
        self.run.save(parts, state.global_step, _metrics(state), files=self._files)


def _check_whole(args: TrainingArguments, model: Any) -> None:
    """Whether every process has all of the model, whoever might have cut it up. UnsupportedError.

    Trainer's arguments know nothing of what a launcher has switched on; Accelerate does.
    """
    launched = AcceleratorState._shared_state.get("distributed_type")
    if (
        args.fsdp
        or args.deepspeed
        or launched in _CUTTING
        or any(isinstance(each, FullyShardedDataParallel) for each in model.modules())
        or any(isinstance(each, DTensor) or hasattr(each, "ds_id") for each in model.parameters())
    ):
        raise UnsupportedError(
            "StoreCallback saves whole models; with FSDP, DeepSpeed or tensor parallelism use "
            "StoreWriter of tensor_dedup.integrations.dcp"
        )


def _random_states() -> dict[str, Any]:
    """As Trainer saves them."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    return states


def _metrics(state: TrainerState) -> dict[str, float]:
    """The last number of each name in the log."""
    logged: dict[str, object] = {}
    for entry in state.log_history:
        logged |= entry
    return {name: float(value) for name, value in logged.items() if isinstance(value, int | float)}


def _small_files(model: Any, processor: Any) -> dict[str, str | bytes]:
    """The files of a model's config and of its tokenizer, by name."""
    with tempfile.TemporaryDirectory(prefix="tensor-dedup-") as folder:
        parts = [getattr(model, "config", None), getattr(model, "generation_config", None)]
        for part in (*parts, processor):
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        files = (path for path in Path(folder).rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}
