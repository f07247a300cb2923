"""What checkpoints have in common, found before anything is loaded."""

from tensor_dedup.analyze.analysis import Analysis, analyze
from tensor_dedup.store.hashing import ProgressListener

__all__ = ["Analysis", "ProgressListener", "analyze"]
