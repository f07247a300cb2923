"""Hash the parameters of a loaded model in batches, and build residents of new ones.

A *resident* is an immutable tensor in memory that models share; it lies in a *slab*, a piece of
shared memory. Usually a parameter is hashed first, and is copied into a slab only if no resident
has its bytes. A parameter that cannot equal a resident from before the load is copied and hashed in
one pass where possible. Parameters that are mapped from files are read from the files, because page
faults on the mappings would wait for the disk one by one.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar
from weakref import WeakSet

from torch import nn

from tensor_dedup.digest import stream, submit
from tensor_dedup.loader.cuda.new_slabs import OWN_SLAB_BYTES, rounds, slab_batches
from tensor_dedup.loader.residents.compare import require_as_hashed
from tensor_dedup.loader.residents.leaves import may_have_parts
from tensor_dedup.loader.residents.manager import ResidentRequest
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM, registry
from tensor_dedup.loader.residents.resident import Resident, pack, resident_key, tensor_bytes
from tensor_dedup.loader.residents.slab import (
    SharedMemoryError,
    SlabExtent,
    SlabWriter,
    capacity_for,
)
from tensor_dedup.memory_manager.errors import BackendError, NoMemoryError
from tensor_dedup.memory_manager.protocol.layout import ALIGNMENT

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.post_load.mapped_files import FileRange, MappedFiles
    from tensor_dedup.loader.residents.process_mappings import ProcessMappings
    from tensor_dedup.loader.residents.provider import HostProvider
    from tensor_dedup.loader.residents.resident import ReadInto
    from tensor_dedup.types import ResidentKey

NamedParameter: TypeAlias = tuple[str, nn.Parameter]
_Geometry: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
_T = TypeVar("_T")
# Classes of parameters that are nothing but their bytes and plain attributes.
_PLAIN_CLASSES: Final = frozenset(
    {"torch.nn.parameter.Parameter", "diffusers.quantizers.gguf.utils.GGUFParameter"}
)
# Handing less to other threads takes longer than hashing it.
_MIN_THREADED_BYTES: Final = 128 << 10


def reason_of_class(parameter: nn.Parameter) -> str | None:
    """Return why the class of `parameter` prevents sharing, or None if it does not."""
    kind = type(parameter)
    if f"{kind.__module__}.{kind.__qualname__}" in _PLAIN_CLASSES:
        return None
    return f"a parameter of class {kind.__name__} is left alone"


def share_in_rounds(
    items: Iterable[_T],
    nbytes: Callable[[_T], int],
    share: Callable[[Sequence[_T]], None],
    refuse: Callable[[Sequence[_T], BackendError], bool],
) -> None:
    """Share `items` on a GPU by `share`, in rounds of at most 256 MiB or of one item.

    `nbytes` returns the size of an item. If a round finds no room on the GPU, its slabs are tried
    one by one. `refuse` gets the items for which `share` has failed and the error, and returns
    whether to go on with others.
    """
    sizes = [(item, nbytes(item)) for item in items]
    waiting = deque(rounds(sizes, itemgetter(1)))
    while waiting:
        batch = waiting.popleft()
        try:
            share([item for item, _ in batch])
        except BackendError as error:
            parts = [*slab_batches(batch, itemgetter(1), lambda sized: sized[1] >= OWN_SLAB_BYTES)]
            if isinstance(error, NoMemoryError) and len(parts) > 1:
                waiting.extendleft(reversed(parts))
            elif not refuse([item for item, _ in batch], error):
                return


def _resident_geometries() -> set[_Geometry]:
    return {(r.key.dtype, r.key.shape, r.key.stride) for r in registry.residents()}


@dataclass(slots=True)
class DedupContext:
    """The state shared by the models of one load, for example those of a pipeline. For one thread.

    - `files` has the mapped files. It is None if remembered digests of files are of no use, for
      example after a cast.
    - `accounted` has those residents in `built` that the report counts already.
    - `resident_before` has the dtype, shape and stride of each resident that existed before the
      load.
    - `remembered` is the number of tensors with a remembered digest, and `unknown` is the number of
      tensors without one.
    """

    config: TensorDedupConfig
    provider: HostProvider
    files: MappedFiles | None = None
    accounted: WeakSet[Resident] = field(default_factory=WeakSet)
    resident_before: set[_Geometry] = field(default_factory=_resident_geometries)
    bytes_hashed: int = 0
    remembered: int = 0
    unknown: int = 0
    hash_seconds: float = 0.0
    process_seconds: float = 0.0
    collisions: int = 0
    rng: random.Random = field(default_factory=random.Random)

    @property
    def built(self) -> WeakSet[Resident]:
        """The residents (shared tensors) that this load built."""
        return self.provider.built


@dataclass(frozen=True, slots=True)
class DedupCandidate:
    """A parameter to share.

    `data` is the parameter's tensor when the parameter was chosen. `file_range` is the range of the
    file from which the tensor is mapped, or None.
    """

    name: str
    parameter: nn.Parameter
    data: torch.Tensor
    file_range: FileRange | None

    @property
    def read(self) -> ReadInto | None:
        """A function that reads the tensor's bytes from its file, or None if there is no file."""
        return None if self.file_range is None else self.file_range.read


@dataclass(frozen=True, slots=True)
class MissingResident:
    """A resident (shared tensor) to build, because no existing one has the bytes of `candidate`.

    `replica` numbers residents with equal bytes: equal tensors of one model get different numbers.
    `number` is the parameter's index in the batch.
    """

    candidate: DedupCandidate
    replica: int
    digest: str
    number: int


def content_recipe(key: ResidentKey) -> str:
    """Return the recipe that identifies a tensor by its resident key alone, not by its origin."""
    return f"content:{key}"


class HashBatch:
    """A batch of parameters that are hashed together. For one thread.

    Call `begin`, then `digests`, and then `build` for the parameters that have no resident yet.
    From `begin` until `digests` or `abandon` returns, other threads read the memory and the files
    of the parameters.
    """

    def __init__(
        self, candidates: Sequence[DedupCandidate], context: DedupContext, memory: ProcessMappings
    ) -> None:
        self.candidates = candidates
        self._context, self._memory = context, memory
        self._sources = [SourceBytes(each.data, each.file_range) for each in candidates]
        self._fill: SlabFill | None = None
        self._copied: set[int] = set()
        self._begun: dict[int, Future[str]] = {}

    @property
    def is_all_files(self) -> bool:
        """Whether all candidates are mapped from files, so that later changes can be detected."""
        return all(each.file_range is not None for each in self.candidates)

    def begin(self) -> None:
        """Start to hash all parameters, in the background.

        Parameters that cannot have the bytes of a resident from before the load, or a part of them,
        may also be copied into a slab.

        Raises:
            ChangedFileError: A file has become shorter.
            UnreadableFileError: A file cannot be read.
        """
        began = time.perf_counter()
        if self._context.files is not None:
            ranges = (each.file_range for each in self.candidates)
            self._context.files.prefetch([each for each in ranges if each is not None])
        self._begin()
        self._context.hash_seconds += time.perf_counter() - began

    def digests(self) -> list[str]:
        """Wait for the digests of all candidates, and return them in the order of the candidates.

        Raises:
            ChangedFileError: A file has become shorter.
            UnreadableFileError: A file cannot be read.
        """
        began = time.perf_counter()
        self.abandon()  # nobody writes to the slab any more, whatever one of them has met
        try:
            found = self._results()
        except SharedMemoryError:  # it is met again, and said, when they are made
            self._fill, self._copied = None, set()
            self._begin_hashing(range(len(self.candidates)))
            found = self._results()
        self._context.bytes_hashed += sum(each.data.nbytes for each in self.candidates)
        self._context.hash_seconds += time.perf_counter() - began
        return found

    def leaves(self, number: int) -> Sequence[bytes]:
        """Return the leaf digests of candidate `number`. Call it after `digests`.

        The result is empty for a candidate that is small (below 8 MiB) or not mapped from a file,
        and if the hash algorithm is not BLAKE3.
        """
        return self._sources[number].leaves or ()

    def abandon(self) -> None:
        """Wait until no thread reads memory or files of the batch any more."""
        wait(self._begun.values())

    def _results(self) -> list[str]:
        return [self._begun[number].result() for number in range(len(self.candidates))]

    def _begin(self) -> None:
        new = {n for n, each in enumerate(self.candidates) if self._is_new(each)}
        self._begin_hashing(n for n in range(len(self.candidates)) if n not in new)
        if not new:
            return
        try:
            fill = SlabFill(self._sources, new)
            fill.begin(self._begun)
        except SharedMemoryError:
            self.abandon()
            self._begin_hashing(new)
        else:
            self._fill, self._copied = fill, new

    def _begin_hashing(self, numbers: Iterable[int]) -> None:
        algorithm = self._context.config.hash_algorithm
        self._begun.update((n, self._sources[n].digest(algorithm)) for n in numbers)

    def _is_new(self, candidate: DedupCandidate) -> bool:
        """Return whether no resident can have these bytes or a part of them."""
        context, data = self._context, candidate.data
        if context.provider.manager.in_use or context.config.hash_algorithm != "blake3":
            return False
        key = resident_key(data, "")
        if (key.dtype, key.shape, key.stride) in context.resident_before:
            return False
        return not may_have_parts(data, context.built, candidate.read)

    def build(self, missing: Sequence[MissingResident]) -> list[tuple[Resident, bool]]:
        """Build residents for `missing`; return each resident, and whether this batch built it.

        If an equal resident was registered meanwhile, that resident is returned instead.

        Raises:
            SharedMemoryError: There is no shared memory for the residents.
            ChangedFileError: A file changed after it was hashed.
        """
        if self._fill is None:
            return self._get_or_build(missing)
        made = self._fill.seal({each.number: each.digest for each in missing})
        self._check_copied(
            (each.candidate.data, made[each.number])
            for each in missing
            if each.number not in self._copied
        )
        return [_register(made[each.number], each.replica) for each in missing]

    def _get_or_build(self, missing: Sequence[MissingResident]) -> list[tuple[Resident, bool]]:
        firsts = [each for each in missing if each.replica == 0]
        # Further replicas are this process's own: a manager has one of each content.
        others = [each for each in missing if each.replica > 0]
        wanted = [(resident_key(m.candidate.data, m.digest), m) for m in firsts]
        made = self._context.provider.get_or_build(
            [
                ResidentRequest(
                    content_recipe(key), each.candidate.data, each.digest, each.candidate.read
                )
                for key, each in wanted
            ],
            self._check_copied,
        )
        items = [(each.candidate.data, each.digest) for each in others]
        packed = pack(items, keep_alignment=True) if items else []
        self._check_copied(zip((data for data, _ in items), packed, strict=True))
        more = [_register(r, each.replica) for r, each in zip(packed, others, strict=True)]
        found = dict(zip((id(each) for each in (*firsts, *others)), (*made, *more), strict=True))
        return [found[id(each)] for each in missing]

    def _check_copied(self, made: Iterable[tuple[torch.Tensor, Resident]]) -> None:
        require_as_hashed(made, self._memory, self._context.config.hash_algorithm)


def _register(resident: Resident, replica: int) -> tuple[Resident, bool]:
    first = registry.register(resident, replica)
    return first, first is resident


class SourceBytes:
    """The bytes of a tensor in memory, and the file range from which the tensor is mapped, if any.

    If the tensor is mapped from a file and has 8 MiB or more, hashing with BLAKE3 adds the leaf
    digests to the list `leaves`. For other tensors, `leaves` is None.
    """

    def __init__(self, tensor: torch.Tensor, file_range: FileRange | None) -> None:
        self.tensor: Final = tensor
        self._file_range = file_range
        large = file_range is not None and tensor.nbytes >= LEAF_SHARED_FROM
        self.leaves: list[bytes] | None = [] if large else None

    @property
    def misalignment(self) -> int:
        """The tensor's address modulo 64 bytes.

        The address of a copy must have the same remainder, because compute kernels may otherwise
        round differently.
        """
        return self.tensor.data_ptr() % ALIGNMENT

    def digest(self, algorithm: str) -> Future[str]:
        """Start to hash the bytes; return a future of the digest."""
        nbytes, file_range = self.tensor.nbytes, self._file_range
        if file_range is None or algorithm != "blake3" or nbytes < _MIN_THREADED_BYTES:
            return submit(tensor_bytes(self.tensor), algorithm)
        if self.leaves:  # it is hashed again
            self.leaves.clear()
        return stream(nbytes, file_range.read, self.leaves)

    def copy_into(self, writer: SlabWriter) -> tuple[int, Future[str]]:
        """Start to copy the bytes into the slab of `writer`, and to hash them with BLAKE3.

        Returns the offset in the slab and a future of the digest.

        Raises:
            OutOfMemoryError: There is no memory for the copy.
        """
        nbytes, data = self.tensor.nbytes, tensor_bytes(self.tensor)
        start = writer.take(nbytes + self.misalignment) + self.misalignment
        if nbytes < _MIN_THREADED_BYTES:
            copy = memoryview(bytes(data))
            writer.put(copy, start)
            return start, submit(copy, "blake3")
        file_range = self._file_range

        def read(piece: memoryview, offset: int) -> None:
            if file_range is not None:
                file_range.read(piece, offset)
                writer.put(piece, start + offset)
            else:  # copied by the kernel alone, so that other threads go on
                writer.put(data[offset : offset + len(piece)], start + offset)
                writer.get(piece, start + offset)

        return start, stream(nbytes, read, self.leaves)


class SlabFill:
    """A slab that threads of the hash pool fill with the tensors of one batch. For one thread.

    If a copied tensor turns out to be resident already, `seal` frees the memory of the copy.
    """

    def __init__(self, sources: Sequence[SourceBytes], copied: Collection[int]) -> None:
        """Create a slab for `sources`; `copied` has the indices of the sources that `begin` copies.

        Raises:
            OutOfMemoryError: There is no memory for the slab.
        """
        self._sources = sources
        self._copied = sorted(copied)
        rest = (number for number in range(len(sources)) if number not in copied)
        order = (sources[number] for number in (*self._copied, *rest))
        self._writer = SlabWriter(capacity_for(s.tensor.nbytes + s.misalignment for s in order))
        self._starts: dict[int, int] = {}

    def begin(self, begun: dict[int, Future[str]]) -> None:
        """Start to copy and hash the sources whose indices the constructor got as `copied`.

        Puts a future of each digest into `begun`, by the index of the source. Call no other method
        until all of these futures are done.

        Raises:
            OutOfMemoryError: There is no memory for a copy.
        """
        for number in self._copied:
            self._starts[number], begun[number] = self._sources[number].copy_into(self._writer)

    def seal(self, digests: dict[int, str]) -> dict[int, Resident]:
        """Seal the slab, and return residents for the sources in `digests`, by index.

        `digests` maps the index of a source to its digest. Sources in `digests` that `begin` did
        not copy are copied first. Copies that `begin` made of other sources are freed.

        Raises:
            OutOfMemoryError: There is no memory for the copies.
        """
        for number in digests:
            if number not in self._starts:
                source = self._sources[number]
                data = tensor_bytes(source.tensor)
                self._starts[number] = self._writer.write(data, source.misalignment)
        for number in set(self._copied) - digests.keys():
            self._writer.give_back(self._starts[number], self._sources[number].tensor.nbytes)
        slab = self._writer.seal()
        return {
            number: Resident(
                resident_key(self._sources[number].tensor, found),
                [SlabExtent(slab, self._starts[number], self._sources[number].tensor.nbytes)],
            )
            for number, found in digests.items()
        }
