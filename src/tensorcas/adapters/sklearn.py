"""The adapter for scikit-learn."""

from tensor_dedup.store.checkpoints.adapters import SklearnAdapter

__all__ = ["SklearnAdapter"]
