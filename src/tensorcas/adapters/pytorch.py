"""The adapter for PyTorch."""

from tensor_dedup.store.checkpoints.adapters import PyTorchAdapter

__all__ = ["PyTorchAdapter"]
