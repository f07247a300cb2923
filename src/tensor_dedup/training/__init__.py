"""Training checkpoints in the store: every step of every run, at the cost of what changed.

    from tensor_dedup.store.checkpoints import CheckpointStore

    with CheckpointStore("checkpoints", "run-001", keep_last=5) as run:
        run.save(model, step=epoch, metrics={"val_loss": loss})
        model = run.load(run.best("val_loss"), original=model)

A step is an ordinary checkpoint of the store, named RUN@STEP.
"""

from tensor_dedup.store.checkpoints.background import PendingSave
from tensor_dedup.store.checkpoints.capture import HostPool
from tensor_dedup.store.checkpoints.checkpoint_store import (
    CheckpointStore,
    TensorCasStore,
    list_runs,
)
from tensor_dedup.store.checkpoints.commit import Saved
from tensor_dedup.store.steps.runs import Step
from tensor_dedup.store.upkeep.run_sizes import RunStats

__all__ = [
    "CheckpointStore",
    "HostPool",
    "PendingSave",
    "RunStats",
    "Saved",
    "Step",
    "TensorCasStore",
    "list_runs",
]
