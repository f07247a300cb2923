"""Remotes: checkpoints in object storage. A push or pull transfers only missing pieces."""

from tensor_dedup.remote.remote import Remote
from tensor_dedup.remote.results import TransferResult
from tensor_dedup.remote.step_costs import RemoteRun, RemoteStep
from tensor_dedup.remote.sweep import RemoteGcPlan
from tensor_dedup.remote.upkeep import RemoteCheckpoint, RemoteUsage
from tensor_dedup.remote.verify import RemoteVerifyResult

__all__ = [
    "Remote",
    "RemoteCheckpoint",
    "RemoteGcPlan",
    "RemoteRun",
    "RemoteStep",
    "RemoteUsage",
    "RemoteVerifyResult",
    "TransferResult",
]
