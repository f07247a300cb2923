"""The adapter for XGBoost."""

from tensor_dedup.training.adapters import XGBoostAdapter

__all__ = ["XGBoostAdapter"]
