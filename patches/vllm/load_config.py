"""`from vllm.config.load import TensorDedupConfig`, as the published snippet has it."""

from types import ModuleType

from tensor_dedup.config import TensorDedupConfig


def patch(load: ModuleType) -> None:
    """Offer the config in vllm.config.load. Idempotent; `unpatch` undoes it."""
    load.TensorDedupConfig = TensorDedupConfig  # type: ignore[attr-defined]


def unpatch(load: ModuleType) -> None:
    """Take the config out of vllm.config.load again. Idempotent."""
    vars(load).pop("TensorDedupConfig", None)
