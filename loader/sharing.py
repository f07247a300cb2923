"""Taking sharing back, and checking it: `unshare` and `verify`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensor_dedup.digest import digest
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.mappings import MAPPINGS
from tensor_dedup.loader.records import LayerRecord
from tensor_dedup.loader.registry import registry
from tensor_dedup.loader.residents import tensor_bytes


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found: residents and bytes hashed, keys whose bytes differ, and how many
    packed copies there are, which cannot be hashed."""

    residents: int
    nbytes: int
    mismatches: tuple[str, ...]
    not_verifiable: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Did every resident that can be hashed match?"""
        return not self.mismatches

    def __str__(self) -> str:
        """One line for people; another for each resident whose bytes have changed."""
        lines = [
            f"{self.residents} residents of {self.nbytes} bytes hashed again: "
            + ("all as they were" if self.ok else f"{len(self.mismatches)} DIFFER"),
            *(f"  differs: {name}" for name in self.mismatches),
        ]
        if self.not_verifiable:
            lines[0] += f"; {len(self.not_verifiable)} packed copies cannot be hashed"
        return "\n".join(lines)


def verify() -> Verification:
    """Hash every resident of this process again. Safe from any thread; takes as long as hashing.

    Packed copies are opaque: they are listed by layer key and never read.
    """
    residents = registry.residents()
    mismatches = []
    for resident in residents:
        name = resident.key.digest
        algorithm = name.partition(":")[0] if ":" in name else "blake3"
        if digest(tensor_bytes(resident.map(writable=False)), algorithm) != name:
            mismatches.append(name)
    packed = [
        key
        for key, record in registry.records().items()
        if isinstance(record, LayerRecord) and record.opaque is not None and record.key == key
    ]
    nbytes = sum(resident.nbytes for resident in residents)
    return Verification(len(residents), nbytes, tuple(mismatches), tuple(sorted(packed)))


def unshare(target: object) -> int:
    """Give a model memory of its own for every parameter that others may share; bytes copied.

    `target`: an engine that runs in this process (`LLM`), a module, or an object with a `modules()`
    or `components` of modules. Addresses change, so not under captured graphs. A packed copy is
    never written by anybody and stays shared. Raises UnsupportedError for anything else.
    """
    copied = 0
    seen: set[int] = set()
    for module in _modules(target):
        for parameter in module.parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if _is_mapped(parameter):
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
                copied += parameter.nbytes
    return copied


def _is_mapped(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu" or not tensor.nbytes:
        return False
    return MAPPINGS.find(tensor.data_ptr(), tensor.nbytes) is not None


def _modules(target: object) -> Iterator[nn.Module]:
    if isinstance(target, nn.Module):
        yield target
        return
    components = getattr(target, "components", None)
    if isinstance(components, dict):
        yield from (each for each in components.values() if isinstance(each, nn.Module))
        return
    model = _engine_model(target)
    if model is None:
        raise UnsupportedError(
            f"unshare takes an engine of this process, a pipeline or a module, not "
            f"{type(target).__name__}; for an engine in another process call it there "
            "(`LLM.collective_rpc`)"
        )
    yield model


def _engine_model(target: object) -> nn.Module | None:
    """The model of a vLLM engine that runs in this process."""
    found: Any = target
    for name in (
        "llm_engine",
        "model_executor",
        "driver_worker",
        "worker",
        "model_runner",
        "model",
    ):
        found = getattr(found, name, None)
        if found is None:
            return None
    return found if isinstance(found, nn.Module) else None
