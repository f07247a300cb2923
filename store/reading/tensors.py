"""Loading stored checkpoints as torch tensors on the CPU, at the speed of disk and memory.

    from tensor_dedup.store.reading.tensors import iter_tensors, load_tensors

    with store.checkpoint("my-model") as checkpoint:
        state_dict = load_tensors(checkpoint)

Importing this module loads torch; `tensor_dedup` and `tensor_dedup.store` do not.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import torch

from tensor_dedup.dtypes import SAFETENSORS, TORCH_NAMES
from tensor_dedup.store.buffers import BufferPool
from tensor_dedup.store.init import workers
from tensor_dedup.store.reading.bulk_reader import BulkReader, Filled, plan
from tensor_dedup.store.reading.reader import StoredCheckpoint, StoredTensor

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: getattr(torch, attribute)
    for name, attribute in TORCH_NAMES.items()
    if name in SAFETENSORS
}
# Memory of a load comes in regions of this size and is given back region by region.
_REGION: Final = 256 << 20
# The disk wants several requests even where there are fewer cores.
_THREADS: Final = 8


def load_tensors(
    checkpoint: StoredCheckpoint,
    names: Collection[str] | None = None,
    *,
    verify: bool = True,
    mapped: bool = False,
    pool: BufferPool | None = None,
) -> dict[str, torch.Tensor]:
    """Load all tensors of an open checkpoint, or those with these names, by name.

    Every byte is compared with its digest; `verify=False` skips that, for a caller that has just
    done so. Tensors share large regions of memory: a region is freed when the last of its tensors
    is gone. They are writable and belong to the caller alone. With `mapped` they are private
    mappings of the containers, shared with the page cache until they are written, and what the
    kernel drops and reads again is not compared again; where the disk cannot read it any more, a
    touch ends the process (SIGBUS). `pool` provides memory that is used again.

    Tensors of a dtype that torch lacks (GGUF, 4 and 6 bits) are returned as flat bytes. Any thread
    may call it; the checkpoint may be closed afterwards.

    Raises:
        UnknownTensorError: the checkpoint has no tensor of one of these names.
        CorruptTensorError, MissingObjectError: no intact copy of a tensor is in the store.
        StoreIOError: the disk failed.
    """
    wanted = _wanted(checkpoint, names)
    memory = pool or BufferPool(0)
    filler = BulkReader(checkpoint, max(_THREADS, workers()), memory, verify=verify, mapped=mapped)
    with filler:
        found = dict(_tensors(checkpoint, wanted, filler, _REGION, None))
    return {tensor.name: found[tensor.name] for tensor in wanted}


def iter_tensors(
    checkpoint: StoredCheckpoint,
    names: Collection[str] | None = None,
    *,
    verify: bool = True,
    buffer_bytes: int = 64 << 20,
    ahead: int = 2,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors one by one, in the order in which they lie on disk, in bounded memory.

    `ahead` buffers of `buffer_bytes` (or of one tensor that is larger) are read in advance. A
    tensor is valid as long as it is referenced; its buffer is used again once none of its tensors
    is, so copy those to be kept for long. Keep the checkpoint open meanwhile.
    """
    wanted = _wanted(checkpoint, names)
    pool = BufferPool(buffer_bytes * (ahead + 2))
    with BulkReader(
        checkpoint, max(_THREADS, workers()), pool, verify=verify, mapped=False
    ) as filler:
        yield from _tensors(checkpoint, wanted, filler, buffer_bytes, ahead)


def _wanted(checkpoint: StoredCheckpoint, names: Collection[str] | None) -> list[StoredTensor]:
    if names is None:
        return list(checkpoint)
    return [checkpoint[name] for name in dict.fromkeys(names)]


def _tensors(
    checkpoint: StoredCheckpoint,
    wanted: Sequence[StoredTensor],
    filler: BulkReader,
    span_bytes: int,
    ahead: int | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    users: dict[bytes, list[StoredTensor]] = defaultdict(list)
    for tensor in wanted:
        users[bytes.fromhex(tensor.digest) if tensor.nbytes else b""].append(tensor)
    for tensor in users.pop(b"", ()):
        yield tensor.name, _shaped(torch.empty(0, dtype=torch.uint8), tensor)
    spans = plan(checkpoint, users, span_bytes)
    for filled in filler.fill(spans, ahead):
        yield from _of_span(filled, users)
        del filled
    others = [(digest, same[0].nbytes) for digest, same in users.items()]
    ahead_bytes = None if ahead is None else ahead * span_bytes
    for digest, memory in filler.read(others, ahead_bytes):
        same = users.pop(digest)
        data = torch.frombuffer(memory, dtype=torch.uint8)[: same[0].nbytes]
        del memory
        yield from _named(data, same)
        del data


def _of_span(
    filled: Filled, users: dict[bytes, list[StoredTensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    region = torch.frombuffer(filled.memory, dtype=torch.uint8)
    for record in filled.span.records:
        start = record.offset - filled.span.start
        yield from _named(region[start : start + record.nbytes], users.pop(record.digest, ()))


def _named(data: torch.Tensor, same: Sequence[StoredTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, tensor in enumerate(same):
        # Names with equal bytes are never one memory: a write to one would be a write to both.
        yield tensor.name, _shaped(data.clone() if number else data, tensor)


def _shaped(data: torch.Tensor, tensor: StoredTensor) -> torch.Tensor:
    dtype = TORCH_DTYPES.get(tensor.dtype)
    if dtype is None:
        return data
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).reshape(tensor.shape)
