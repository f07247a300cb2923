"""Slabs of a model that sleeps: what lies where in them, and what holds their bytes meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tensor_dedup.loader.cuda.blocks import TensorInBlocks
from tensor_dedup.memory_manager.client import Lease

if TYPE_CHECKING:
    from tensor_dedup.loader.cuda.gpu import DeviceMapping
    from tensor_dedup.loader.cuda.residents import DeviceResident
    from tensor_dedup.loader.residents.resident import ReplicaKey


class SleepingTensor(NamedTuple):
    """One tensor of a slab: where it lies, and what it is known as."""

    offset: int
    nbytes: int
    known: ReplicaKey

    @property
    def digest(self) -> str:
        """The digest of its bytes."""
        return self.known.key.digest


@dataclass(eq=False)
class SleepingSlab:
    """The tensors of one slab of `nbytes` bytes, in the order of their offsets, or a block.

    They are on the GPU as long as `held` is not empty, and in host memory where `backup` has a
    lease for each digest; one of the two holds.
    """

    nbytes: int
    tensors: list[SleepingTensor]
    held: list[DeviceResident] = field(default_factory=list)
    backup: dict[str, Lease] = field(default_factory=dict)
    given_up: bool = False  # copying it has failed for good: it stays on the GPU
    reason: str = ""  # why copying it has failed last
    asleep: bool = True

    @property
    def leases(self) -> list[Lease]:
        """The leases on the GPU's memory: none of what this process has made without a manager."""
        return [each.lease for each in self.held if isinstance(each.lease, Lease)]

    def sizes(self) -> dict[str, int]:
        """Return the size of each content in bytes."""
        return {each.digest: each.nbytes for each in self.tensors}

    def places(self) -> list[tuple[int, str, int]]:
        """Return offset, digest and size of each content at each place, in order."""
        return sorted({(each.offset, each.digest, each.nbytes) for each in self.tensors})


@dataclass(eq=False)
class SleepingMapping:
    """One mapping and what is to be mapped there: a slab, or the blocks of one tensor, in order.

    A block that occurs twice in the tensor is one object twice. `tensor` is what the blocks are,
    with its leaf digests.
    """

    mapping: DeviceMapping
    slabs: list[SleepingSlab]
    tensor: tuple[ReplicaKey, tuple[bytes, ...]] | None = None

    def each_slab(self) -> list[SleepingSlab]:
        """Return every slab once."""
        return list(dict.fromkeys(self.slabs))

    def residents(
        self, found: dict[SleepingSlab, list[DeviceResident]]
    ) -> list[tuple[ReplicaKey, DeviceResident]]:
        """Return the tensors that are seen through the mapping, of slabs that were found."""
        if self.tensor is None:
            [slab] = self.slabs
            return [
                (each.known, resident)
                for each, resident in zip(slab.tensors, found[slab], strict=True)
            ]
        known, leaves = self.tensor
        blocks = [block for slab in self.slabs for block in found[slab]]
        return [(known, TensorInBlocks(known.key, blocks, leaves))]


def key_asleep(digest: str) -> str:
    """Return the key under which a sleeping model puts a tensor into a memory manager."""
    return f"asleep:{digest}"
