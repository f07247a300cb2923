"""The protocol of adapters: implement it for models of your own."""

from tensor_dedup.training.adapters import ModelAdapter

__all__ = ["ModelAdapter"]
