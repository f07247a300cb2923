"""The module that DeepSpeed imports for the key "datastates_ckpt" of its JSON.

DeepSpeed names the engine of DataStates there, and any module of this name can be one. This one
saves into a store; see `tensor_dedup.integrations.datastates`.
"""

from tensor_dedup.integrations.datastates import DecoupledStoreEngine as CheckpointEngine

__all__ = ["CheckpointEngine"]
