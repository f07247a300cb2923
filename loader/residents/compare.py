"""Compare residents (shared tensors) byte by byte with the tensors that they replace."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from tensor_dedup.config import FORGEABLE
from tensor_dedup.digest import submit
from tensor_dedup.errors import AuditError, ChangedFileError
from tensor_dedup.loader.residents.resident import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tensor_dedup.loader.residents.process_mappings import ProcessMappings
    from tensor_dedup.loader.residents.resident import Resident


def raise_audit(name: str, shared: str, rebuilt: str) -> NoReturn:
    """Raise AuditError, because an audit found that two tensors differ.

    `name` is the tensor's name; `shared` and `rebuilt` describe the two tensors in the message.
    """
    raise AuditError(
        f"audit: {name}: {shared} differs from {rebuilt}; this model was not loaded. "
        "Load with tensor_dedup=False and report this with the output of `tensor-dedup --version`",
        tensor=name,
    )


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two gap-free tensors of equal shape and stride are equal bit by bit."""
    if a.dtype != b.dtype or a.nbytes != b.nbytes:
        return False
    return not a.nbytes or torch.equal(_flat_bytes(a), _flat_bytes(b))


def is_forgeable(digest: str) -> bool:
    """Return whether other bytes with the same digest could be made on purpose.

    This is so if the algorithm of the digest is not collision-resistant. If `digest` is derived
    from a cast (`cast_key`), the algorithm is that of the digest before the cast.
    """
    return any(f"{algorithm}:" in digest for algorithm in FORGEABLE)


def require_as_hashed(
    made: Iterable[tuple[torch.Tensor, Resident]], memory: ProcessMappings, algorithm: str
) -> None:
    """Check that residents copied from mapped files have their digests.

    A file may change after its tensor was hashed and before the tensor was copied. `made` has pairs
    of a tensor and its resident. If `memory` says that the tensor is mapped from a file, the
    resident is hashed. Call this before the residents are registered.

    Raises:
        ChangedFileError: A resident's bytes do not have its digest.
    """
    copied = [(file, each) for tensor, each in made if (file := memory.file(tensor)) is not None]
    views = [tensor_bytes(resident.seen()) for _, resident in copied]
    hashes = [submit(view, algorithm) for view in views]
    for (file, resident), found in zip(copied, hashes, strict=True):
        if found.result() != resident.key.digest:
            raise ChangedFileError(
                f"{file.path} changed while it was being loaded; load it again", path=file.path
            )


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(tensor_bytes(tensor), dtype=torch.uint8)
