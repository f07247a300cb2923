"""Give a model private memory (`unshare`), and check the bytes of shared memory (`verify`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.device_digests import hash_on_gpu
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.residents.mappings import is_as_mapped
from tensor_dedup.loader.residents.registry import RECORD, registry
from tensor_dedup.loader.residents.resident import digest_of, is_of_bytes
from tensor_dedup.loader.unsharing.device_copies import COPIES
from tensor_dedup.loader.unsharing.lookup import is_mapped
from tensor_dedup.loader.unsharing.model_digests import note_write
from tensor_dedup.loader.unsharing.private import (
    PrivateCopies,
    make_private_in_place,
    needs_private_copy,
    require_private_in_place,
)

if TYPE_CHECKING:
    from tensor_dedup.loader.cuda.gpu import Gpu


@dataclass(frozen=True, slots=True)
class ResidentCheck:
    """The result of `verify`: how many residents (shared tensors) and bytes were hashed.

    - `mismatches` has the digests of residents whose bytes have changed.
    - `not_verifiable` lists the shared tensors that cannot be checked. Packed weights are listed by
      the key of their layer. Tensors that were cast on a device are listed as `DEVICE:DIGEST`.
    """

    residents: int
    nbytes: int
    mismatches: tuple[str, ...]
    not_verifiable: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every resident that was hashed still has its digest."""
        return not self.mismatches

    def __str__(self) -> str:
        """Return a one-line summary, and a line for each resident whose bytes have changed."""
        lines = [
            f"{self.residents} residents of {self.nbytes} bytes hashed again: "
            + ("all as they were" if self.ok else f"{len(self.mismatches)} DIFFER"),
            *(f"  differs: {name}" for name in self.mismatches),
        ]
        if self.not_verifiable:
            lines[0] += f"; {len(self.not_verifiable)} packed or cast copies cannot be hashed"
        return "\n".join(lines)


def verify() -> ResidentCheck:
    """Hash every resident (shared tensor) of this process again, and compare with its digest.

    Tensors on GPUs are hashed on their way through page-locked buffers; those on other devices are
    copied to the host for hashing, one by one. Packed weights and tensors that were cast on a
    device cannot be checked; the result lists them. Safe from any thread.

    Raises:
        BackendError: The driver of a GPU refuses.
    """
    unknown = registry.packed_keys()
    hashed, nbytes, mismatches = 0, 0, []
    for name, tensor, gpu in _shared_tensors(unknown):
        hashed, nbytes = hashed + 1, nbytes + tensor.nbytes
        if not _hashes_to(tensor, name, gpu):
            mismatches.append(name)
    return ResidentCheck(hashed, nbytes, tuple(mismatches), tuple(sorted(unknown)))


def _shared_tensors(unknown: list[str]) -> Iterator[tuple[str, torch.Tensor, Gpu | None]]:
    """Yield every shared tensor with its digest, and the GPU whose memory it maps, or None.

    Add what cannot be hashed to `unknown`.
    """
    for resident in registry.residents():
        yield resident.key.digest, resident.seen(), None
    for entry, tensor in COPIES.alive():
        if is_of_bytes(entry.known.key) and not tensor.is_meta:
            yield entry.known.key.digest, tensor, None
        else:
            unknown.append(f"{entry.device}:{entry.known.key.digest}")
    for gpu in DEVICES.opened():
        for known, lent in gpu.alive():
            if is_of_bytes(known.key):
                yield known.key.digest, gpu.seen(lent), gpu.gpu
            else:
                unknown.append(f"{gpu.device}:{known.key.digest}")


def _hashes_to(tensor: torch.Tensor, name: str, gpu: Gpu | None) -> bool:
    algorithm = name.partition(":")[0] if ":" in name else "blake3"
    if gpu is not None and algorithm == "blake3" and tensor.nbytes:
        return hash_on_gpu(gpu, [tensor])[0].digest == name
    return digest_of(tensor, algorithm) == name


def unshare(target: object) -> int:
    """Give a model private memory for everything it shares; return the bytes copied.

    `target` is an engine that runs in this process (`LLM`), a module, or a pipeline with a dict of
    `components`. No other thread may use the model meanwhile.

    - On the CPU, addresses do not change, so compiled code stays valid.
    - On a GPU, memory is replaced at its address if possible, so captured graphs stay valid.
      Otherwise a module or pipeline gets new addresses, and for an engine OutOfMemoryError is
      raised.
    - On other devices, addresses change.
    - Packed weights are never written, so they stay shared.

    Raises:
        UnsupportedError: `target` is none of the three.
        OutOfMemoryError: There is no host memory for the copies, or an engine's GPU memory cannot
            be replaced at its address.
        torch.OutOfMemoryError: There is no GPU memory for the copies of a module or pipeline.
    """
    engine = _engine_model(target)
    replaced = 0 if engine is None else leave_gpus(engine)
    own = PrivateCopies()
    for module in _modules(target):
        note_write(module)  # which is what memory of its own is for
        _forget_records(module)
        for tensor in chain(module.parameters(), module.buffers()):
            replaced += make_private_in_place(tensor)
            if needs_private_copy(tensor) or is_mapped(tensor):
                own.give(tensor)
    return own.nbytes + replaced


def leave_gpus(model: nn.Module) -> int:
    """Make all memory that `model` shares on GPUs private in place; return the bytes copied.

    Call it before the model is written to, because GPU memory is not copied on write. Host memory
    stays shared.

    Raises:
        OutOfMemoryError: Some memory could not be made private. The model's values and addresses
            are unchanged. Do not write to the model.
    """
    return require_private_in_place([*model.parameters(), *model.buffers()])


def let_go_of_written(model: nn.Module) -> int:
    """Give private memory to the parameters and buffers that were written to while shared.

    Returns the bytes copied. Other models do not see such writes (copy-on-write), but a written
    tensor still keeps its slab in memory. After this call, it does not. Tensors on other devices
    than the CPU are left as they are. No thread may write to the model meanwhile.

    Raises:
        OutOfMemoryError: There is no memory for the copies.
    """
    own = PrivateCopies()
    for module in model.modules():
        for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            if is_mapped(tensor) and not is_as_mapped(tensor.data_ptr(), tensor.nbytes):
                vars(module).pop(RECORD, None)
                own.give(tensor)
    return own.nbytes


def _forget_records(model: nn.Module) -> None:
    """Drop the records of a model's layers, which would keep the residents they lead to."""
    for module in model.modules():
        vars(module).pop(RECORD, None)


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
    """Return the model of a vLLM engine that runs in this process, or None."""
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
