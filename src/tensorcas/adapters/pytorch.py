"""The adapter for PyTorch."""

from tensor_dedup.training.adapters import PyTorchAdapter

__all__ = ["PyTorchAdapter"]
