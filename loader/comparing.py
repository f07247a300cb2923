"""Comparing a resident with what it stands for, and saying so when they differ."""

from typing import NoReturn

import torch

from tensor_dedup.errors import AuditError
from tensor_dedup.loader.residents import tensor_bytes

COLLISION = "another tensor has the same digest"


def raise_audit(name: str, shared: str, rebuilt: str) -> NoReturn:
    """Stop a load whose audit found a difference. AuditError."""
    raise AuditError(
        f"audit: {name}: {shared} differs from {rebuilt}; this model was not loaded. "
        "Load with tensor_dedup=False and report this with the output of `tensor-dedup --version`",
        tensor=name,
    )


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Are two dense tensors of one dtype and geometry equal bit by bit (NaN payloads included)?"""
    if a.dtype != b.dtype or a.nbytes != b.nbytes:
        return False
    return not a.nbytes or torch.equal(_flat_bytes(a), _flat_bytes(b))


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(tensor_bytes(tensor), dtype=torch.uint8)
