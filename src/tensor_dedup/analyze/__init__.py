"""Finds out what checkpoints have in common, without loading them into an engine."""

from tensor_dedup.analyze.analysis import Analysis, analyze
from tensor_dedup.store.hashing import ProgressListener

__all__ = ["Analysis", "ProgressListener", "analyze"]
