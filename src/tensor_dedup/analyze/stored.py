"""Checkpoints of a store: their digests are in the manifests, so nothing is read or hashed."""

import os
from pathlib import Path

from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.errors import ConfigError
from tensor_dedup.store import Store
from tensor_dedup.types import Fingerprint

SCHEME = "store://"

StrPath = str | os.PathLike[str]


def is_stored(path: StrPath) -> bool:
    """Return whether a path names a checkpoint of a store: store://NAME."""
    return os.fspath(path).startswith(SCHEME)


def measure_stored(path: StrPath, store: Store, min_tensor_bytes: int) -> Measured:
    """Return the checkpoint `store://NAME`, from its manifest.

    Raises:
        StoreError: the checkpoint is missing or damaged.
    """
    name = os.fspath(path).removeprefix(SCHEME)
    tensors, small = [], []
    with store.checkpoint(name) as checkpoint:
        for tensor in checkpoint:
            if tensor.alias_of is not None:
                continue  # in a file it is counted once too
            if tensor.nbytes < min_tensor_bytes:
                small.append(tensor.name)
                continue
            found = Fingerprint(tensor.shape, tensor.dtype, tensor.digest)
            tensors.append(AnalyzedTensor(tensor.name, found, tensor.nbytes))
    return Measured(os.fspath(path), tensors, small)


def open_store(store: StrPath | None, algorithm: str) -> Store:
    """Open the store that `store://` refers to.

    Raises:
        ConfigError: digests of an algorithm other than the store's are requested.
    """
    if algorithm != "blake3":
        raise ConfigError(
            f"a store names bytes by blake3, not {algorithm}; leave the hash algorithm as it is",
            algorithm=algorithm,
        )
    return Store.open(Path(store) if store is not None else None, create=False)
