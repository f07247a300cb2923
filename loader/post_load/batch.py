"""Hashing parameters, and making residents of those whose bytes nobody has."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakSet

from tensor_dedup.loader.post_load.slab_fill import SlabFill, SourceBytes
from tensor_dedup.loader.residents.compare import require_as_hashed
from tensor_dedup.loader.residents.manager import ResidentRequest
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import Resident, pack, resident_key
from tensor_dedup.loader.residents.slab import SharedMemoryError
from tensor_dedup.loader.torch_dtypes import dtype_name

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch
    from torch import nn

    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.post_load.mapped_files import FileRange, MappedFiles
    from tensor_dedup.loader.residents.process_mappings import ProcessMappings
    from tensor_dedup.loader.residents.provider import HostProvider

_Geometry: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]


def _resident_geometries() -> set[_Geometry]:
    return {(r.key.dtype, r.key.shape, r.key.stride) for r in registry.residents()}


@dataclass(slots=True)
class DedupContext:
    """What the adoptions of one load have in common. One thread.

    `origins`: None where hints are no help, as after a cast. `remembered` and `unknown` count
    tensors whose digest a hint gave, and others. `before` is what residents there were.
    """

    config: TensorDedupConfig
    provider: HostProvider
    origins: MappedFiles | None = None
    own: WeakSet[Resident] = field(default_factory=WeakSet)
    before: set[_Geometry] = field(default_factory=_resident_geometries)
    bytes_hashed: int = 0
    remembered: int = 0
    unknown: int = 0
    hash_seconds: float = 0.0
    process_seconds: float = 0.0
    collisions: int = 0
    rng: random.Random = field(default_factory=random.Random)


@dataclass(frozen=True, slots=True)
class DedupCandidate:
    """A parameter to share, and what it holds; `place`: the file range that this is."""

    name: str
    parameter: nn.Parameter
    data: torch.Tensor
    place: FileRange | None


@dataclass(frozen=True, slots=True)
class MissingResident:
    """A parameter whose bytes are nowhere resident; it will be this copy of its key.

    `number`: which one of its batch it is.
    """

    candidate: DedupCandidate
    copy: int
    digest: str
    number: int


class HashBatch:
    """Some parameters that are hashed together, and of which some become residents. One thread.

    What nobody can have, by its type and shape, is copied while it is hashed. Its pool's threads
    read files between `begin` and `digests`, or `abandon`.
    """

    def __init__(
        self, candidates: Sequence[DedupCandidate], terms: DedupContext, memory: ProcessMappings
    ) -> None:
        self.candidates = candidates
        self._terms, self._memory = terms, memory
        self._sources = [SourceBytes(each.data, each.place) for each in candidates]
        self._pouring: SlabFill | None = None
        self._poured: set[int] = set()
        self._begun: dict[int, Future[str]] = {}

    @property
    def of_files(self) -> bool:
        """Are all of them ranges of files? Then a write to one of them can be told later."""
        return all(each.place is not None for each in self.candidates)

    def begin(self) -> None:
        """Start hashing, and copying what is copied."""
        began = time.perf_counter()
        self._expect()
        self._begin()
        self._terms.hash_seconds += time.perf_counter() - began

    def digests(self) -> list[str]:
        """The digest of each, as soon as all are there."""
        began = time.perf_counter()
        self.abandon()  # nobody writes to the slab any more, whatever one of them has met
        try:
            found = self._results()
        except SharedMemoryError:  # it is met again, and said, when they are made
            self._pouring, self._poured = None, set()
            self._begin_hashing(range(len(self.candidates)))
            found = self._results()
        self._terms.bytes_hashed += sum(each.data.nbytes for each in self.candidates)
        self._terms.hash_seconds += time.perf_counter() - began
        return found

    def abandon(self) -> None:
        """Wait until nothing is read any more."""
        wait(self._begun.values())

    def _results(self) -> list[str]:
        return [self._begun[number].result() for number in range(len(self.candidates))]

    def _expect(self) -> None:
        if self._terms.origins is not None:
            places = (each.place for each in self.candidates)
            self._terms.origins.expect([place for place in places if place is not None])

    def _begin(self) -> None:
        wanted = {n for n, each in enumerate(self.candidates) if self._is_new(each.data)}
        self._begin_hashing(n for n in range(len(self.candidates)) if n not in wanted)
        if not wanted:
            return
        try:
            pouring = SlabFill(self._sources, wanted)
            pouring.begin(self._begun)
        except SharedMemoryError:
            self.abandon()
            self._begin_hashing(wanted)
        else:
            self._pouring, self._poured = pouring, wanted

    def _begin_hashing(self, numbers: Iterable[int]) -> None:
        algorithm = self._terms.config.hash_algorithm
        self._begun.update((n, self._sources[n].digest(algorithm)) for n in numbers)

    def _is_new(self, data: torch.Tensor) -> bool:
        terms = self._terms
        if terms.provider.manager.in_use or terms.config.hash_algorithm != "blake3":
            return False
        geometry = dtype_name(data.dtype), tuple(data.shape), tuple(data.stride())
        return geometry not in terms.before

    def make(self, missing: Sequence[MissingResident]) -> list[tuple[Resident, bool]]:
        """A resident for each, and whether it was made just now. SharedMemoryError."""
        if self._pouring is None:
            return self._make(missing)
        made = self._pouring.seal({each.number: each.digest for each in missing})
        self._check_copied(
            (each.candidate.data, made[each.number])
            for each in missing
            if each.number not in self._poured
        )
        return [self._publish(made[each.number], each.copy) for each in missing]

    def _make(self, missing: Sequence[MissingResident]) -> list[tuple[Resident, bool]]:
        firsts = [each for each in missing if each.copy == 0]
        # Further copies are this process's own: a manager has one of each content.
        twins = [each for each in missing if each.copy > 0]
        wanted = [(resident_key(m.candidate.data, m.digest), m) for m in firsts]
        made = self._terms.provider.get_or_build(
            [
                ResidentRequest(f"content:{key}", each.candidate.data, each.digest)
                for key, each in wanted
            ],
            self._check_copied,
        )
        items = [(each.candidate.data, each.digest) for each in twins]
        packed = pack(items, keep_alignment=True) if items else []
        self._check_copied(zip((data for data, _ in items), packed, strict=True))
        more = [self._publish(r, each.copy) for r, each in zip(packed, twins, strict=True)]
        found = dict(zip((id(each) for each in (*firsts, *twins)), (*made, *more), strict=True))
        return [found[id(each)] for each in missing]

    def _publish(self, resident: Resident, copy: int) -> tuple[Resident, bool]:
        first = registry.register(resident, copy)
        return first, first is resident

    def _check_copied(self, made: Iterable[tuple[torch.Tensor, Resident]]) -> None:
        require_as_hashed(made, self._memory, self._terms.config.hash_algorithm)
