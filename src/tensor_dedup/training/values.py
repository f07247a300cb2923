"""Read all tensors of a step at once, with several threads where there is much to read."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from tensor_dedup.store.buffers import BufferPool
from tensor_dedup.store.reading.bulk_reader import BulkReader, plan
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint, StoredTensor
from tensor_dedup.training.state import NUMPY_CODES, NamedValue, Value, value

_READERS: Final = 8  # the disk wants several requests even where there are fewer cores
# A region of memory is let go when the tensors in it are copied.
_REGION: Final = 64 << 20
_AHEAD: Final = 2
# Up to so much, threads take longer to begin than one takes to read it all.
_ALONE_BYTES: Final = 4 << 20
_ALONE_PIECES: Final = 256


def load_values(checkpoint: StoredCheckpoint, threads: int) -> dict[str, Value]:
    """Read and verify the tensors in `checkpoint`, an open step; return them by name, in order.

    Each value is a numpy array, or a NamedValue if numpy lacks the dtype, and has memory of its
    own. A large step is read by `threads` threads or more. Peak memory is little more than the size
    of the step.

    Raises:
        CorruptTensorError, MissingObjectError: The store has no intact copy of a tensor.
    """
    tensors = {tensor.name: tensor for tensor in checkpoint}
    named = defaultdict(list)
    for tensor in tensors.values():
        named[bytes.fromhex(tensor.digest) if tensor.nbytes else b""].append(tensor)
    found: dict[str, Value] = {}
    for tensor in named.pop(b"", ()):
        found[tensor.name] = _value(tensor, memoryview(b""))
    sizes = {digest: same[0].nbytes for digest, same in named.items()}
    for digest, view in _read(checkpoint, sizes, max(_READERS, threads)):
        for tensor in named[digest]:
            found[tensor.name] = _value(tensor, view[: tensor.nbytes])
    return {name: found[name] for name in tensors}


def _read(
    checkpoint: StoredCheckpoint, sizes: Mapping[bytes, int], threads: int
) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the bytes of pieces, in any order, each valid until the next is asked for."""
    if len(sizes) <= _ALONE_PIECES and sum(sizes.values()) <= _ALONE_BYTES:
        for digest, nbytes in sizes.items():
            yield digest, memoryview(checkpoint.read_piece(digest, 0, nbytes, nbytes))
        return
    waiting = dict(sizes)
    with BulkReader(checkpoint, threads, BufferPool(0), verify=True, mapped=False) as filler:
        for filled in filler.fill(plan(checkpoint, sizes, _REGION), _AHEAD):
            for record in filled.span.records:
                start = record.offset - filled.span.start
                if waiting.pop(record.digest, None) is not None:
                    yield record.digest, filled.memory[start : start + record.nbytes]
        yield from filler.read(list(waiting.items()), _AHEAD * _REGION)


def _value(tensor: StoredTensor, view: memoryview) -> Value:
    if tensor.dtype in NUMPY_CODES:
        return value(NamedValue(tensor.name, tensor.dtype, tensor.shape, view))
    return NamedValue(tensor.name, tensor.dtype, tensor.shape, bytearray(view))
