"""The adapter for scikit-learn."""

from tensor_dedup.training.adapters import SklearnAdapter

__all__ = ["SklearnAdapter"]
