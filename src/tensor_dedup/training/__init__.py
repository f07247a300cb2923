"""Training checkpoints in a store. A step takes space only for the tensors that have changed.

    from tensor_dedup.training import CheckpointStore

    with CheckpointStore("checkpoints", "run-001", keep_last=5) as run:
        run.save(model, step=epoch, metrics={"val_loss": loss})
        model = run.load(run.best("val_loss"), original=model)

A step is an ordinary checkpoint of the store, named RUN@STEP.
"""

from tensor_dedup.store.steps.runs import Step
from tensor_dedup.store.upkeep.run_sizes import RunStats
from tensor_dedup.training.commit import Saved
from tensor_dedup.training.host_pool import HostPool
from tensor_dedup.training.pending_save import PendingSave
from tensor_dedup.training.run import (
    CheckpointStore,
    TensorCasStore,
    list_runs,
)

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
