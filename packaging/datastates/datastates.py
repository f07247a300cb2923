"""The module that DeepSpeed imports for the key `datastates_ckpt` in its JSON configuration.

DeepSpeed expects the DataStates checkpoint engine under this name and accepts any module that has
the same interface. This one saves into a store; see `tensor_dedup.integrations.datastates`.
"""

from tensor_dedup.integrations.datastates import DecoupledStoreEngine as CheckpointEngine

__all__ = ["CheckpointEngine"]
