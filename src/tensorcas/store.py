"""The store of training checkpoints, as tensorcas calls it."""

from tensor_dedup.training import TensorCasStore, list_runs

__all__ = ["TensorCasStore", "list_runs"]
