"""What checkpoints have in common, found before anything is loaded."""

from tensor_dedup.analyze.analysis import Analysis, analyze
from tensor_dedup.analyze.digests import Progress

__all__ = ["Analysis", "Progress", "analyze"]
