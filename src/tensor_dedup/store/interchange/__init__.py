"""State dicts in the folder format of ServerlessLLM and tensorcast. Needs torch.

    from tensor_dedup.store.interchange import load_dict, save_dict

    descriptor = save_dict(model.state_dict(), "folder")
    state_dict = load_dict("folder")

A folder holds the data files `tensor.data_0`, `tensor.data_1`, ..., the index (`tensor_index.json`
and `.cbor`), `artifact_descriptor.json` and `verification.json`. Each storage is written once,
however many tensors are views of it. `tensor_dedup.formats.serverless` describes the format and its
checks.

Importing this package loads torch; `tensor_dedup` and `tensor_dedup.store` do not.
"""

from tensor_dedup.formats.serverless.storage_graph import (
    StorageEntry,
    StorageGraph,
    TensorAlias,
    rebuild_index,
)
from tensor_dedup.store.interchange.load import load_dict
from tensor_dedup.store.interchange.save import MAX_FILE_BYTES, StreamingConfig, save_dict
from tensor_dedup.store.interchange.storages import storage_graph

__all__ = [
    "MAX_FILE_BYTES",
    "StorageEntry",
    "StorageGraph",
    "StreamingConfig",
    "TensorAlias",
    "load_dict",
    "rebuild_index",
    "save_dict",
    "storage_graph",
]
