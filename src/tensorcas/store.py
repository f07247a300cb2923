"""The store of training checkpoints, as tensorcas calls it."""

from tensor_dedup.store.checkpoints import TensorCasStore

__all__ = ["TensorCasStore"]
