"""What DCP knows of a checkpoint, as JSON: no pickle. And what the store calls its parts."""

import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.store.checkpoints.state_errors import DamagedStateError
from tensor_dedup.store.reading.synthesized import STATE_MARK

# Names that begin with the mark are no weights to an engine that loads the step.
METADATA: Final = f"{STATE_MARK}dcp"
_BYTES: Final = f"{STATE_MARK}bytes "
_SHARD: Final = f"{STATE_MARK}part "


def tensor_name(index: MetadataIndex, *, shard: bool) -> str:
    """What a tensor is called in the store, or a part of one, by its offsets."""
    if not shard:
        return index.fqn
    return f"{_SHARD}{','.join(map(str, index.offset or ()))} {index.fqn}"


def bytes_name(index: MetadataIndex) -> str:
    """What a value that is no tensor is called in the store."""
    return _BYTES + index.fqn


def to_json(metadata: Metadata, shards: Mapping[str, bool]) -> bytes:
    """The metadata; `shards` says whose chunks were written as parts.

    UnsupportedError: a planner of its own keeps something there that is no path.
    """
    parts = {
        name: _of_tensor(held, shards.get(name, False))
        for name, held in metadata.state_dict_metadata.items()
        if isinstance(held, TensorStorageMetadata)
    }
    values = [name for name in metadata.state_dict_metadata if name not in parts]
    paths = metadata.planner_data
    if not _are_paths(paths):
        raise UnsupportedError(
            f"a planner with data of its own ({type(paths).__name__}): StoreWriter keeps what "
            "DefaultSavePlanner does; use FileSystemWriter with this planner"
        )
    return json.dumps({"tensors": parts, "bytes": values, "paths": paths}).encode()


def from_json(blob: bytes, where: str) -> tuple[Metadata, dict[str, bool]]:
    """The same back. DamagedStateError."""
    try:
        found = json.loads(blob)
        state: dict[str, Any] = {name: BytesStorageMetadata() for name in found["bytes"]}
        state |= {name: _to_tensor(each) for name, each in found["tensors"].items()}
        paths = found["paths"] and {name: tuple(path) for name, path in found["paths"].items()}
        shards = {name: bool(each["shard"]) for name, each in found["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedStateError.at(where, f"no metadata of a checkpoint: {error}") from error
    return Metadata(state, planner_data=paths, storage_data={}), shards


def _are_paths(paths: object) -> bool:
    return paths is None or (
        isinstance(paths, dict)
        and all(isinstance(part, str | int) for path in paths.values() for part in path)
    )


def _of_tensor(held: TensorStorageMetadata, shard: bool) -> dict[str, object]:
    return {
        "dtype": str(held.properties.dtype).removeprefix("torch."),
        "grad": held.properties.requires_grad,
        "size": list(held.size),
        "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in held.chunks],
        "shard": shard,
    }


def _to_tensor(found: dict[str, Any]) -> TensorStorageMetadata:
    dtype = getattr(torch, found["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(found["dtype"])
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in found["chunks"]
    ]
    properties = TensorProperties(dtype=dtype, requires_grad=bool(found["grad"]))
    return TensorStorageMetadata(properties, torch.Size(found["size"]), chunks)
