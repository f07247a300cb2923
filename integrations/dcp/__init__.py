"""PyTorch Distributed Checkpoint over the store: `StoreWriter` and `StoreReader`.

    import torch.distributed.checkpoint as dcp
    from tensor_dedup.integrations.dcp import StoreReader, StoreWriter

    writer = StoreWriter("checkpoints", "run-001")
    dcp.save(state, checkpoint_id=step, storage_writer=writer)
    dcp.load(state, checkpoint_id=step, storage_reader=StoreReader("checkpoints", "run-001"))

`async_save` takes a writer too. Keep one writer for a run: what it knows of the last step makes the
next one quick.
"""

from tensor_dedup.integrations.dcp.reader import StoreReader
from tensor_dedup.integrations.dcp.writer import StoreWriter

__all__ = ["StoreReader", "StoreWriter"]
