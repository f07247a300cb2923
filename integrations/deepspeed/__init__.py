"""DeepSpeed: checkpoints into the store, switched on in its JSON.

    import tensor_dedup.integrations.deepspeed as store
    store.enable()

    {"tensor_dedup": {"store": "checkpoints", "run": "run-001"}, ...}

`save_checkpoint` then writes small files that say where in the store their state is, and
`load_checkpoint` follows them. Without the entry DeepSpeed does what it did.
"""

from tensor_dedup.integrations.deepspeed.enable_ import enable

__all__ = ["enable"]
