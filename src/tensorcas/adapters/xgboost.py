"""The adapter for XGBoost."""

from tensor_dedup.store.checkpoints.adapters import XGBoostAdapter

__all__ = ["XGBoostAdapter"]
