"""A content-addressed store for checkpoints, which keeps every distinct tensor once on disk.

    from tensor_dedup.store import LocalStore

    with LocalStore.open() as store:
        store.import_("my-model")
        with store.checkpoint("my-model") as checkpoint:
            for tensor in checkpoint:
                data = checkpoint.read(tensor)

FORMAT.md specifies the files on disk and the guarantees of the format.
"""

from tensor_dedup.errors import StoreError
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint, StoredTensor
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.store import LocalStore
from tensor_dedup.store.upkeep.gc import GcPlan
from tensor_dedup.store.upkeep.repair import RepairResult
from tensor_dedup.store.upkeep.stats import Listed, Stats
from tensor_dedup.store.upkeep.verify import Fault, VerifyResult
from tensor_dedup.store.writing.import_ import ImportResult

__all__ = [
    "Fault",
    "GcPlan",
    "ImportResult",
    "Listed",
    "LocalStore",
    "RepairResult",
    "Stats",
    "StoreError",
    "StoredCheckpoint",
    "StoredPieces",
    "StoredTensor",
    "VerifyResult",
]
