"""Evaluate recipes: read the source tensors that they name, and replay the recorded operations.

A recipe describes how the bytes of a *final tensor* (a weight as the engine uses it) follow from
the checkpoint's tensors. The results are computed in scratch memory that is reused for layer after
layer, because fresh memory costs more than reading a cached file. While one layer is processed,
threads read and hash the next.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tensor_dedup.loader.deferred.recipe import (
    COPY,
    live_writes,
    needs_base,
    parts_of,
    references,
    sources_of,
    whole_source,
)
from tensor_dedup.loader.deferred.storage import (
    Const,
    Operation,
    Target,
    View,
    VirtualStorage,
    Write,
    as_view,
)

if TYPE_CHECKING:
    from tensor_dedup.loader.checkpoint_io.sources import SourceReader, SourceTensor
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.deferred.recipe import StorageRange


# A block much larger than what is asked for stays free for what needs it.
_SLACK = 1 << 20
# What is larger keeps all threads busy by itself, and twice its memory would be noticed.
MAX_AHEAD_BYTES = 64 << 20


class Scratch:
    """A pool of reusable blocks of memory (flat uint8 CPU tensors), for one load and one thread.

    The pool never keeps more memory than was in use at one time, which is about the size of the
    largest layer. `peak` is the largest number of bytes that were in use at one time.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lent = 0
        self.peak = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a block of at least `nbytes` uninitialised bytes.

        Pass the block to `give_back` or `forget` when it is not needed any more.
        """
        fitting = [block for block in self._free if nbytes <= block.numel() <= 2 * nbytes + _SLACK]
        if fitting:
            block = min(fitting, key=torch.Tensor.numel)
            self._free = [kept for kept in self._free if kept is not block]
        else:
            self._make_room(nbytes)
            block = torch.empty(nbytes, dtype=torch.uint8)
        self._lent += block.numel()
        self.peak = max(self.peak, self._lent)
        return block

    def give_back(self, block: torch.Tensor) -> None:
        """Return a block from `take` to the pool. Its memory must not be used any more."""
        self._lent -= block.numel()
        self._free.append(block)

    def forget(self, block: torch.Tensor) -> None:
        """Remove a block from the pool for good, because the memory of the block stays in use."""
        self._lent -= block.numel()

    def close(self) -> None:
        """Free every block that is not in use."""
        self._free.clear()

    def _make_room(self, nbytes: int) -> None:
        """Drop the smallest blocks until a new one keeps the total within the peak."""
        self._free.sort(key=torch.Tensor.numel)
        while self._free and self._total() + nbytes > max(self.peak, self._lent + nbytes):
            self._free.pop(0)

    def _total(self) -> int:
        return self._lent + sum(block.numel() for block in self._free)


class Evaluator:
    """An evaluator that computes the bytes of one load's final tensors on the CPU. For one thread.

    A source tensor (a tensor of the checkpoint) that is used several times is read once. It is kept
    until `release` was called for every final tensor that uses it. `unhashed` has the ids of the
    source tensors that are read without being hashed.
    """

    def __init__(self, reader: SourceReader, scratch: Scratch) -> None:
        self._reader = reader
        self._scratch = scratch
        self._users: dict[int, int] = {}  # source -> final tensors that still may need it
        self._uses: dict[int, int] = {}  # source, storage -> times recipes mention it
        self._kept: dict[int, torch.Tensor] = {}
        self._nodes: dict[tuple[int, int], torch.Tensor] = {}
        self.unhashed: set[int] = set()  # sources nobody will ask the digest of

    def expect(self, view: View) -> None:
        """Announce that `view` may be evaluated, so that its sources are kept until `release`."""
        for source in sources_of(view):
            self._users[id(source)] = self._users.get(id(source), 0) + 1
        for mention in references(view):
            for used in (mention.storage, mention.storage.source):
                if used is not None:
                    self._uses[id(used)] = self._uses.get(id(used), 0) + 1

    def release(self, view: View) -> None:
        """Declare that `view` is not evaluated again; free sources that no other view needs."""
        for source in sources_of(view):
            key = id(source)
            self._users[key] = self._users.get(key, 1) - 1
            if self._users[key] <= 0 and key in self._kept:
                self._scratch.give_back(self._kept.pop(key))
        self._nodes.clear()

    def fill(self, view: View, out: torch.Tensor) -> None:
        """Compute all bytes of the storage of `view`, and write them to `out`.

        The bytes are those after the first `view.version` writes into the storage. `out` is a flat
        uint8 tensor of at least the size of the storage.
        """
        self._fill(view.storage, view.version, out)
        self._reader.settle()

    def begin(self, view: View, out: torch.Tensor) -> bool:
        """Start to read the bytes of the storage of `view` into `out`, in the background.

        `out` is a flat uint8 tensor of at least the size of the storage. Call `SourceReader.settle`
        before you use its bytes. Returns False, and starts nothing, unless the storage consists of
        copies of whole source tensors that have no other use.
        """
        storage, version = view.storage, view.version
        writes = live_writes(storage, version)
        if not writes or needs_base(storage, version):
            return False
        spans = [self._direct_span(write) for write in writes]
        found = sorted(span for span in spans if span is not None)
        if len(found) < len(spans) or any(a[1] > b[0] for a, b in itertools.pairwise(found)):
            return False
        self._fill(storage, version, out)
        return True

    def alone(self, view: View) -> SourceTensor | None:
        """Return the source tensor that `view` is a copy of, or None.

        Returns None if `view` is not a copy of one whole source tensor, or if that source tensor
        has another use.
        """
        storage, version = view.storage, view.version
        writes = live_writes(storage, version)
        if len(writes) != 1 or needs_base(storage, version):
            return None
        source = whole_source(view)
        if source is None or self._direct_span(writes[0]) != (0, storage.nbytes):
            return None
        return source if source.spec.nbytes == storage.nbytes else None

    def placed(self, view: View) -> list[StorageRange] | None:
        """Return the ranges of `view`, which covers its storage, if it is only put together.

        Each range is then a whole source tensor or zeros. Returns None if a range is anything else,
        or if a source tensor has another use or was read already.
        """
        storage, version = view.storage, view.version
        if needs_base(storage, version):
            return None
        ranges = parts_of(view)
        if not all(each.zeros or each.source is not None for each in ranges):
            return None
        copied = {self._direct_span(write) for write in live_writes(storage, version)} - {None}
        wanted = {(each.start, each.stop) for each in ranges if not each.zeros}
        return ranges if wanted and wanted == copied else None

    def value(self, view: View) -> torch.Tensor:
        """Return the value of `view` as a CPU tensor.

        Do not write to the tensor. It is valid until the next `release`.
        """
        return as_view(self._flat(view.storage, view.version), view)

    def digest_sources(self, view: View) -> None:
        """Read and hash every source of `view` whose digest is not known yet."""
        for source in sources_of(view):
            if source.digest is None:
                self._begin(source)
        self._reader.settle()

    def _flat(self, storage: VirtualStorage, version: int) -> torch.Tensor:
        if storage.source is not None and not live_writes(storage, version):
            return self._read_kept(storage.source)
        key = (id(storage), version)
        if key not in self._nodes:
            flat = torch.empty(storage.nbytes, dtype=torch.uint8)
            self._fill(storage, version, flat)
            self._reader.settle()
            self._nodes[key] = flat
        return self._nodes[key]

    def _read_kept(self, source: SourceTensor) -> torch.Tensor:
        self._begin(source)
        self._reader.settle()
        return self._kept[id(source)][: source.spec.nbytes]

    def _begin(self, source: SourceTensor) -> None:
        """Start reading a source that is kept, unless it is here already or being read."""
        if id(source) not in self._kept:
            block = self._scratch.take(source.spec.nbytes)
            self._kept[id(source)] = block
            self._read(source, block[: source.spec.nbytes])

    def _read(self, source: SourceTensor, memory: torch.Tensor) -> None:
        self._reader.fill(source, memory, hashed=id(source) not in self.unhashed)

    def _fill(self, storage: VirtualStorage, version: int, out: torch.Tensor) -> None:
        out = out[: storage.nbytes]
        if needs_base(storage, version):
            self._base(storage, out)
        writes = live_writes(storage, version)
        spans = [self._direct_span(write) for write in writes]
        for write, span in zip(writes, spans, strict=True):
            if span is None:
                self._begin_all(write)  # so that several are on their way at once
        being_read: list[tuple[int, int]] = []
        for write, span in zip(writes, spans, strict=True):
            if span is None or _overlaps(span, being_read):
                self._reader.settle()  # what is read and hashed there must not change meanwhile
                being_read.clear()
            if span is None:
                self._replay(write, out)
            else:
                source = whole_source(write.args[1])
                assert source is not None
                self._read(source, out[span[0] : span[1]])
                bisect.insort(being_read, span)

    def _begin_all(self, call: Write | Operation) -> None:
        """Start reading the sources that this uses unchanged, directly or via casts and slices."""
        for value in (*call.args, *call.kwargs.values()):
            if isinstance(value, View) and not live_writes(value.storage, value.version):
                if value.storage.source is not None:
                    self._begin(value.storage.source)
                elif value.storage.operation is not None:
                    self._begin_all(value.storage.operation)

    def _direct_span(self, write: Write) -> tuple[int, int] | None:
        """Return the bytes of the target into which a source can be read unchanged, or None."""
        value, target = (write.args[1] if len(write.args) > 1 else None), write.target
        if write.func is not COPY or not isinstance(value, View) or not target.is_contiguous():
            return None
        if value.dtype is not target.dtype or not value.is_contiguous():
            return None
        source = whole_source(value)
        if source is None or id(source) in self._kept or not self._used_once(source, value):
            return None
        start = target.offset * target.dtype.itemsize
        stop = start + source.spec.nbytes
        return (start, stop) if value.shape == target.shape else None

    def _used_once(self, source: SourceTensor, view: View) -> bool:
        """Return whether nothing between `view` and its whole source is mentioned anywhere else."""
        storage = view.storage
        while storage.source is None and self._uses.get(id(storage), 0) == 1:
            view = live_writes(storage, view.version)[0].args[1]
            storage = view.storage
        return self._uses.get(id(storage), 0) == 1 and self._uses.get(id(source), 0) == 1

    def _base(self, storage: VirtualStorage, out: torch.Tensor) -> None:
        if storage.source is not None:
            out.copy_(self._read_kept(storage.source))
        elif storage.initial is not None:
            out.copy_(storage.initial)
        elif storage.operation is not None:
            operation = storage.operation
            result = operation.func(*self._real(operation.args), **self._named(operation.kwargs))
            if isinstance(result, (list, tuple)):
                result = result[operation.index]
            # The meta tensor's layout is what later views refer to, whatever the real one is.
            as_view(out, operation.layout).copy_(result)

    def _replay(self, write: Write, out: torch.Tensor) -> None:
        target = as_view(out, write.target)
        write.func(*self._real(write.args, target), **self._named(write.kwargs, target))

    def _named(self, kwargs: dict[str, Any], target: torch.Tensor | None = None) -> dict[str, Any]:
        return {key: self._real(value, target) for key, value in kwargs.items()}

    def _real(self, value: Any, target: torch.Tensor | None = None) -> Any:
        if isinstance(value, View):
            return self.value(value)
        if isinstance(value, Const):
            return value.value
        if value is Target.HERE:
            return target
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, (list, tuple)):
            return type(value)(self._real(item, target) for item in value)
        return value


def _overlaps(span: tuple[int, int], others: list[tuple[int, int]]) -> bool:
    """Return whether a span overlaps one of `others`, which are sorted and disjoint."""
    place = bisect.bisect(others, span)
    before = place > 0 and others[place - 1][1] > span[0]
    return before or (place < len(others) and others[place][0] < span[1])


@dataclass(slots=True)
class Prefetcher:
    """A prefetcher that reads one final tensor at a time into scratch memory, ahead of its use.

    For one thread.
    """

    reader: SourceReader
    scratch: Scratch
    evaluator: Evaluator
    _waiting: deque[DeferredParameter] = field(default_factory=deque)
    _begun: tuple[DeferredParameter, torch.Tensor, int] | None = None

    def plan(self, parameters: Iterable[DeferredParameter]) -> None:
        """Set `parameters` as the final tensors to read ahead, in the order of probable use."""
        self._waiting = deque(parameters)

    def has(self, each: DeferredParameter) -> bool:
        """Return whether the read of `each` was started by `begin` and not yet ended by `take`."""
        return self._begun is not None and self._begun[0] is each

    def take(self, each: DeferredParameter) -> torch.Tensor | None:
        """Wait until `each` is read, and return the scratch memory with its bytes.

        The caller must give the memory back to the pool. Returns None if `each` is not being read
        ahead.
        """
        if self._begun is None or self._begun[0] is not each:
            return None
        (_, block, mark), self._begun = self._begun, None
        self.reader.settle(mark)
        return block

    def begin(self, needed: Callable[[DeferredParameter], bool]) -> None:
        """Start reading the next planned tensor for which `needed` returns True.

        - While another tensor is being read ahead, nothing is started.
        - Tensors of more than 64 MiB are skipped.
        - If the tensor cannot be read in the background, it is removed from the plan, and nothing
          is started.
        """
        if self._begun is not None:
            return
        while self._waiting:
            each = self._waiting.popleft()
            if each.view is None or not 0 < each.nbytes <= MAX_AHEAD_BYTES or not needed(each):
                continue
            nbytes = each.view.storage.nbytes
            block = self.scratch.take(nbytes)
            if self.evaluator.begin(each.view, block[:nbytes]):
                self._begun = each, block, self.reader.begun
            else:
                self.scratch.give_back(block)
            return

    def close(self) -> None:
        """Forget the plan and the read in progress.

        This method does not wait for the read. Call `SourceReader.abandon` first.
        """
        self._waiting.clear()
        self._begun = None
