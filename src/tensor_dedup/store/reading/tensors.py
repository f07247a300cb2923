"""Loading of stored checkpoints as torch tensors on the CPU.

    from tensor_dedup.store.reading.tensors import iter_tensors, load_tensors

    with store.checkpoint("my-model") as checkpoint:
        state_dict = load_tensors(checkpoint)

Importing this module loads torch; `tensor_dedup` and `tensor_dedup.store` do not.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from tensor_dedup.dtypes import TORCH_NAMES
from tensor_dedup.errors import NotInstalledError, UnsupportedError
from tensor_dedup.formats.errors import CheckpointFault, CheckpointFilesError
from tensor_dedup.formats.pytorch.geometry import PickledTensor
from tensor_dedup.formats.weights import parse_pickled
from tensor_dedup.store.buffers import BufferPool
from tensor_dedup.store.init import workers
from tensor_dedup.store.reading.bulk_reader import BulkReader, Filled, plan
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint, StoredFile, StoredTensor
from tensor_dedup.suggestions import install_hint

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise NotInstalledError(
        f"loading tensors needs torch; {install_hint('torch')}, or read bytes with "
        "Store.checkpoint(name).read(tensor)",
        module="torch",
    ) from error

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: getattr(torch, attribute) for name, attribute in TORCH_NAMES.items()
}
# Only where the file says so, and in torch's shape: in safetensors an element is half as large.
_PAIRS: Final = "F4"
_MOST: Final = (1 << 63) - 1  # of a dimension in PyTorch; safetensors has larger ones
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
    """Load all tensors of an open checkpoint, or those in `names`, by name.

    The tensors are writable and belong to the caller. Several tensors may share a region of memory,
    which is freed with the last of them. Safe from any thread. The checkpoint may be closed
    afterwards.

    Every byte is compared with its digest. If `verify` is False, this is done only for encoded
    tensors and for tensors in files indexed in place. `pool` provides memory that is reused.

    With `mapped`, tensors are private mappings of the containers' files. They share the page cache
    until they are written to. Pages that the kernel drops and reads again are not verified again.
    An access to a page that the disk cannot read ends the process (SIGBUS).

    A tensor whose dtype torch lacks (GGUF, 4 and 6 bits) is returned as flat bytes. The tensors of
    a torch.save file have the names, strides and shared storages that torch.load would give them.

    Raises:
        UnknownTensorError: The checkpoint has no tensor of one of these names.
        UnsupportedError: A tensor is sparse; export the file and load it with torch.load. Or it is
            empty, and a dimension is too large for PyTorch.
        FormatError: A torch.save file could be read differently by torch.load.
        CorruptTensorError, MissingObjectError: No intact copy of a tensor is in the store.
        StoreIOError: The disk failed.
    """
    wanted = _wanted(checkpoint, names)
    memory = pool or BufferPool(0)
    filler = BulkReader(checkpoint, max(_THREADS, workers()), memory, verify=verify, mapped=mapped)
    with filler:
        found = dict(_tensors(checkpoint, wanted, filler, _REGION, None))
    return {source.name: found[source.name] for source in wanted}


def iter_tensors(
    checkpoint: StoredCheckpoint,
    names: Collection[str] | None = None,
    *,
    verify: bool = True,
    buffer_bytes: int = 64 << 20,
    ahead: int = 2,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of an open checkpoint in disk order, in bounded memory.

    The tensors are read into buffers of `buffer_bytes`. A larger tensor gets a larger buffer.
    `ahead` buffers are read in advance. A buffer is reused when none of its tensors is referenced
    any more, so copy a tensor that you keep for long. Keep the checkpoint open until the end.

    `names` selects tensors. If `verify` is False, only encoded tensors and tensors in files indexed
    in place are compared with their digests. Raises the errors of `load_tensors`.
    """
    wanted = _wanted(checkpoint, names)
    pool = BufferPool(buffer_bytes * (ahead + 2))
    with BulkReader(
        checkpoint, max(_THREADS, workers()), pool, verify=verify, mapped=False
    ) as filler:
        yield from _tensors(checkpoint, wanted, filler, buffer_bytes, ahead)


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor by the name that a caller knows, and the stored tensor that has its bytes.

    `view` says, of a tensor in a file of torch.save, how it lies in them, from `start` on.
    """

    name: str
    stored: StoredTensor
    view: PickledTensor | None = None
    start: int = 0
    sparse: str | None = None


class _StoredBytes:
    """A stored file that its pieces put together; those that are no tensors are read once."""

    def __init__(self, checkpoint: StoredCheckpoint, file: StoredFile) -> None:
        self.path = f"{checkpoint.name}/{file.path}"
        self.size = file.nbytes
        self._checkpoint = checkpoint
        self._pieces = file.pieces
        self._ends = list(accumulate(piece.nbytes for piece in file.pieces))
        self._read: dict[bytes, bytes] = {}

    def read(self, start: int, nbytes: int) -> bytes:
        found = bytearray()
        number = bisect_right(self._ends, start)
        while len(found) < nbytes:
            piece = self._pieces[number]
            at = start + len(found) - (self._ends[number] - piece.nbytes)
            stop = min(piece.nbytes, at + nbytes - len(found))
            if piece.name is not None:
                found += self._checkpoint.read_piece(piece.digest, at, stop, piece.nbytes)
            else:
                if (whole := self._read.get(piece.digest)) is None:
                    data = self._checkpoint.read_piece(piece.digest, 0, piece.nbytes, piece.nbytes)
                    whole = self._read[piece.digest] = bytes(data)
                found += whole[at:stop]
            number += 1
        return bytes(found)


def _wanted(checkpoint: StoredCheckpoint, names: Collection[str] | None) -> list[_Source]:
    sources = {tensor.name: _Source(tensor.name, tensor) for tensor in checkpoint}
    for file in checkpoint.files:
        if any(piece.name is not None for piece in file.pieces):
            _enter_views(sources, checkpoint, file)
    if names is None:
        wanted = list(sources.values())
    else:
        known = (name for name in dict.fromkeys(names))
        wanted = [
            sources[name] if name in sources else _unknown(checkpoint, name) for name in known
        ]
    for source in wanted:
        if source.sparse is not None:
            raise UnsupportedError(
                f"{checkpoint.name}: tensor {source.sparse!r} is sparse, and stored as its parts; "
                "export the checkpoint and read the file with torch.load(weights_only=True)",
                tensor=source.sparse,
            )
        if any(size > _MOST for size in source.stored.shape):  # of an empty tensor
            raise UnsupportedError(
                f"{checkpoint.name}: tensor {source.name!r} has the shape "
                f"{[*source.stored.shape]}, and PyTorch has no dimension above {_MOST}; load the "
                "other tensors by their names",
                tensor=source.name,
            )
    return wanted


def _unknown(checkpoint: StoredCheckpoint, name: str) -> _Source:
    return _Source(name, checkpoint[name])  # which raises


def _enter_views(
    sources: dict[str, _Source], checkpoint: StoredCheckpoint, file: StoredFile
) -> None:
    """Put the tensors of a file of torch.save in the place of the ranges that hold their bytes.

    What is stored is the file, so how they lie in it is read from there.
    """
    header = parse_pickled(_StoredBytes(checkpoint, file))
    if header is None:
        return
    starts = {spec.name: spec.start for spec in header.tensors}
    for name in starts:
        if checkpoint.counts(file, name):
            del sources[file.prefix + name]
    for member in header.members:
        if not checkpoint.counts(file, member.name):
            continue
        name = file.prefix + member.name
        if name in sources and sources[name].stored.alias_of is None:
            raise CheckpointFilesError.at(
                CheckpointFault.REPEATED_TENSOR, file.path, "another file holds it too", name
            )
        start = member.start - starts[member.held_by] if member.nbytes else 0
        whole = header.sparse.get(member.name)
        sources[name] = _Source(
            name,
            checkpoint[file.prefix + member.held_by],
            member,
            start,
            None if whole is None else file.prefix + whole,
        )


def _tensors(
    checkpoint: StoredCheckpoint,
    wanted: Sequence[_Source],
    filler: BulkReader,
    span_bytes: int,
    ahead: int | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    groups: dict[str, list[_Source]] = defaultdict(list)
    for source in wanted:
        if source.stored.nbytes:
            groups[source.stored.name].append(source)
        else:
            yield source.name, _shaped(torch.empty(0, dtype=torch.uint8), source)
    users: dict[bytes, list[list[_Source]]] = defaultdict(list)
    for group in groups.values():
        users[bytes.fromhex(group[0].stored.digest)].append(group)
    spans = plan(checkpoint, users, span_bytes)
    for filled in filler.fill(spans, ahead):
        yield from _of_span(filled, users)
        del filled
    others = [(digest, same[0][0].stored.nbytes) for digest, same in users.items()]
    ahead_bytes = None if ahead is None else ahead * span_bytes
    for digest, memory in filler.read(others, ahead_bytes):
        same = users.pop(digest)
        data = torch.frombuffer(memory, dtype=torch.uint8)[: same[0][0].stored.nbytes]
        del memory
        yield from _named(data, same)
        del data


def _of_span(
    filled: Filled, users: dict[bytes, list[list[_Source]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    region = torch.frombuffer(filled.memory, dtype=torch.uint8)
    for record in filled.span.records:
        start = record.offset - filled.span.start
        yield from _named(region[start : start + record.nbytes], users.pop(record.digest, ()))


def _named(
    data: torch.Tensor, same: Sequence[Sequence[_Source]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for number, group in enumerate(same):
        # Tensors with equal bytes are never one memory: a write to one would be a write to both.
        # Views of a stored tensor are, for the same reason: its file says that they are.
        held = data.clone() if number else data
        size = max(_itemsize(source) for source in group)
        if held.data_ptr() % size or held.storage_offset() % size:
            held = held.clone()
        for source in group:
            yield source.name, _shaped(held, source)


def _itemsize(source: _Source) -> int:
    dtype = _dtype(source)
    return 1 if dtype is None else dtype.itemsize


def _dtype(source: _Source) -> torch.dtype | None:
    if source.view is not None and source.view.dtype == _PAIRS:
        return torch.float4_e2m1fn_x2
    return TORCH_DTYPES.get(source.stored.dtype if source.view is None else source.view.dtype)


def _shaped(data: torch.Tensor, source: _Source) -> torch.Tensor:
    dtype, view = _dtype(source), source.view
    if dtype is None:
        return data
    if view is None:
        return data.view(dtype).reshape(source.stored.shape)
    shape = view.torch_shape
    last = sum((size - 1) * step for size, step in zip(shape, view.stride, strict=True))
    nbytes = (last + 1) * dtype.itemsize if view.nbytes else 0
    part = data[source.start : source.start + nbytes].view(dtype)
    found = part.as_strided(shape, view.stride, part.storage_offset())
    found = found.conj() if view.conjugated else found
    # What torch itself has for a negation that waits.
    return torch._neg_view(found) if view.negated else found
