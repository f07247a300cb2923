"""The storages of the tensors in a state dict, as flat bytes. Needs torch."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tensor_dedup import libc
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.formats.serverless.storage_graph import StorageEntry, StorageGraph, TensorAlias
from tensor_dedup.formats.serverless.tensor_index import DTYPES
from tensor_dedup.store.buffers import copy

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    name: dtype
    for name in DTYPES
    if isinstance(dtype := getattr(torch, name.removeprefix("torch."), None), torch.dtype)
}


@dataclass(frozen=True)
class HeldStorages:
    """The storages of a state dict, and a graph of which tensors are views of which storages.

    `storages` maps the id of each storage to its bytes, as a flat tensor on the storage's device.
    """

    graph: StorageGraph
    storages: Mapping[str, torch.Tensor]


def storage_graph(state_dict: Mapping[str, torch.Tensor]) -> StorageGraph:
    """Return the distinct storages of the tensors, and a description of each tensor as a view.

    Raises:
        UnsupportedError: A tensor has no dense storage of its own (sparse, quantised, meta).
    """
    return hold(state_dict).graph


def hold(state_dict: Mapping[str, torch.Tensor]) -> HeldStorages:
    """Return the storages of a state dict and their graph. The result keeps the memory alive.

    Lazily conjugated or negated tensors are materialised. Storages that begin at the same address
    count as one, the largest.

    Raises:
        UnsupportedError: A tensor has no dense storage of its own (sparse, quantised, meta).
    """
    plain = {name: _plain(name, state_dict[name]) for name in sorted(state_dict)}
    largest: dict[tuple[str, int], torch.Tensor] = {}
    for tensor in plain.values():
        found = _bytes_of(tensor)
        other = largest.get(_key(tensor))
        if other is None or other.nbytes < found.nbytes:
            largest[_key(tensor)] = found
    ids = {key: f"s{number}" for number, key in enumerate(largest)}
    entries = (
        StorageEntry(ids[key], str(found.device), found.nbytes) for key, found in largest.items()
    )
    aliases = (_alias(name, tensor, ids[_key(tensor)]) for name, tensor in plain.items())
    graph, renamed = StorageGraph(tuple(entries), tuple(aliases)).normal()
    storages = {renamed[ids[key]]: s for key, s in largest.items() if ids[key] in renamed}
    return HeldStorages(graph, storages)


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(
            f"{name!r} is a {type(tensor).__name__}, not a tensor; leave it out", tensor=name
        )
    if tensor.layout != torch.strided or tensor.is_meta or str(tensor.dtype) not in DTYPES:
        raise UnsupportedError(
            f"{name!r} is {tensor.dtype}, {tensor.layout}, on {tensor.device}: not plain memory; "
            "make it dense first",
            tensor=name,
        )
    return tensor.detach().resolve_conj().resolve_neg()


def _key(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _alias(name: str, tensor: torch.Tensor, storage_id: str) -> TensorAlias:
    return TensorAlias(
        name,
        storage_id,
        int(tensor.storage_offset()),
        tensor.numel() * tensor.element_size(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        str(tensor.dtype),
    )


def copy_into(room: memoryview, storage: torch.Tensor, start: int) -> int:
    """Copy bytes of `storage` from offset `start` into `room`; return the number of bytes copied.

    Copying stops when `room` is full or the storage ends.
    """
    part = storage[start : start + room.nbytes]
    with room[: part.nbytes] as target:
        if part.device.type == "cpu":
            # Not by torch: its threads wait for each other on a busy machine, and one is enough.
            copy(libc.view(part.data_ptr(), part.nbytes), target)
        else:
            torch.frombuffer(target, dtype=torch.uint8).copy_(part)
    return part.nbytes
