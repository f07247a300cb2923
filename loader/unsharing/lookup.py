"""Look up which parameters are shared, and which resident (shared tensor) each of them uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.residents.mappings import (
    MAPPINGS,
    SlabRange,
    are_as_mapped,
    is_as_mapped,
)
from tensor_dedup.loader.residents.param_data import param_data
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import (
    ReplicaKey,
    Resident,
    is_of_bytes,
    resident_key,
    sharable,
)
from tensor_dedup.loader.unsharing.device_copies import COPIES

if TYPE_CHECKING:
    from torch import nn


def residents_of(parameters: Iterable[nn.Parameter]) -> dict[int, tuple[ReplicaKey, Resident]]:
    """Find the residents (shared tensors in host memory) that `parameters` are mappings of.

    The result maps the id of a parameter to the resident's replica key and the resident. Parameters
    that are private or on another device, or that were written to, are left out.
    """
    places = [(each, place) for each in parameters if (place := _place(each)) is not None]
    if not places:
        return {}
    known = {r.place: (copy, r) for copy, r in registry.entries()}
    found = {}
    for parameter, place in places:
        copy, resident = known.get(place, (0, None))
        data = param_data(parameter)
        if resident is None or not sharable(data) or not is_as_mapped(*_range(data)):
            continue
        if resident.key == resident_key(data, resident.key.digest):
            found[id(parameter)] = ReplicaKey(resident.key, copy), resident
    return found


def replica_keys_of(parameters: Iterable[nn.Parameter]) -> dict[int, ReplicaKey]:
    """Return the replica key of each shared parameter, by the id of the parameter.

    A replica key identifies one of several equal residents (shared tensors). Parameters on GPUs and
    other devices are included.
    """
    every = list(parameters)
    found = {number: known for number, (known, _) in residents_of(every).items()}
    for parameter in every:
        data = param_data(parameter)
        copy = COPIES.known(data)
        known = copy.known if copy is not None else DEVICES.known(data)
        if known is not None:
            found[id(parameter)] = known
    return found


def shared_digests(tensors: Iterable[torch.Tensor]) -> dict[int, str]:
    """Return the digest of each shared tensor whose bytes are those of its resident, by its id.

    `tensors` are plain ones, as `param_data` returns them. The digest is that of the bytes in
    memory order. Tensors that are private, that were written to, or whose residents are known by
    another digest than that of their bytes, are left out. Tensors on GPUs and other devices are
    included.
    """
    known = {r.place: r.key.digest for r in registry.residents()}
    found: dict[int, str] = {}
    mapped: list[tuple[int, str, tuple[int, int]]] = []
    for data in tensors:
        if not data.is_cpu:
            copy = COPIES.known(data)
            replica = copy.known if copy is not None else DEVICES.known(data)
            if replica is not None and is_of_bytes(replica.key):
                found[id(data)] = replica.key.digest
        elif data.layout is torch.strided and (nbytes := data.nbytes):
            span = data.data_ptr(), nbytes
            digest = known.get(tuple(MAPPINGS.ranges(*span)))
            if digest is not None and (data.is_contiguous() or sharable(data)):
                mapped.append((id(data), digest, span))
    unchanged = are_as_mapped([span for _, _, span in mapped])
    return found | {
        key: digest for (key, digest, _), same in zip(mapped, unchanged, strict=True) if same
    }


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in GPU memory that models share read-only."""
    return DEVICES.holds(param_data(tensor))


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a mapping of any resident, even if it was written to."""
    return _place(tensor) is not None


def is_mapping_of(tensor: torch.Tensor, resident: Resident) -> bool:
    """Return whether `tensor` is a mapping of `resident`, even if it was written to."""
    return _place(tensor) == resident.place


def _place(tensor: torch.Tensor) -> tuple[SlabRange, ...] | None:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.nbytes:
        return None
    return tuple(MAPPINGS.ranges(*_range(param_data(tensor)))) or None


def _range(data: torch.Tensor) -> tuple[int, int]:
    return data.data_ptr(), data.nbytes
