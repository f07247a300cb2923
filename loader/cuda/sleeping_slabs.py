"""The layout of a sleeping model's slabs, and the leases that keep their bytes meanwhile.

A slab is a piece of GPU memory that holds shared tensors. While a model sleeps, its slabs are
unmapped, and their bytes are kept on the GPU or in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from tensor_dedup.loader.cuda.blocks import TensorInBlocks
from tensor_dedup.loader.cuda.new_slabs import rounds
from tensor_dedup.memory_manager.client import Lease

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tensor_dedup.loader.cuda.gpu import DeviceMapping
    from tensor_dedup.loader.cuda.residents import DeviceResident
    from tensor_dedup.loader.residents.resident import ReplicaKey


class SleepingTensor(NamedTuple):
    """One tensor of a slab: its offset and size in bytes, and its replica key."""

    offset: int
    nbytes: int
    known: ReplicaKey

    @property
    def digest(self) -> str:
        """The digest of the tensor's bytes."""
        return self.known.key.digest


@dataclass(eq=False)
class SleepingSlab:
    """One slab of a sleeping model: its size in bytes, and its tensors in the order of offsets.

    - `held` has the residents that keep the tensors on the GPU. It is empty once the tensors have
      been copied to host memory.
    - `backup` then maps each digest to a lease on the copy.
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
        """The leases on the slab's GPU memory.

        There are none if this process allocated the memory by itself, or if the slab is no longer
        on the GPU.
        """
        return [each.lease for each in self.held if isinstance(each.lease, Lease)]

    def is_of(self, residents: Sequence[DeviceResident | None]) -> bool:
        """Return whether `residents` are the tensors of this slab, in one slab of its layout."""
        slabs = {each.slabs if each is not None else () for each in residents}
        if len(slabs) > 1 or [slab.nbytes for slab in next(iter(slabs))] != [self.nbytes]:
            return False
        return [(each.key, each.offset) for each in residents if each is not None] == [
            (each.known.key, each.offset) for each in self.tensors
        ]

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each distinct tensor, by digest."""
        return {each.digest: each.nbytes for each in self.tensors}

    def places(self) -> list[tuple[int, str, int]]:
        """Return (offset, digest, size) of each tensor in the slab, in order of the offsets.

        Tensors with the same bytes at the same offset are listed once.
        """
        return sorted({(each.offset, each.digest, each.nbytes) for each in self.tensors})


@dataclass(eq=False)
class SleepingMapping:
    """An unmapped address range of a sleeping model, and the slabs to map there again.

    - `slabs` has a single slab, or one slab for each block (16 MiB) of a large tensor, in order. A
      block that occurs twice in the tensor is listed twice, as the same object.
    - `tensor` has the replica key and the leaf digests of the large tensor. It is None if there is
      no large tensor in blocks.
    """

    mapping: DeviceMapping
    slabs: list[SleepingSlab]
    tensor: tuple[ReplicaKey, tuple[bytes, ...]] | None = None

    def each_slab(self) -> list[SleepingSlab]:
        """Return the slabs in order, each of them once."""
        return list(dict.fromkeys(self.slabs))

    def residents(
        self, found: dict[SleepingSlab, list[DeviceResident]]
    ) -> list[tuple[ReplicaKey, DeviceResident]]:
        """Return the replica key and the resident of each tensor in the mapping.

        `found` maps each slab to the residents that have its tensors on the GPU.
        """
        if self.tensor is None:
            [slab] = self.slabs
            return [
                (each.known, resident)
                for each, resident in zip(slab.tensors, found[slab], strict=True)
            ]
        known, leaves = self.tensor
        blocks = [block for slab in self.slabs for block in found[slab]]
        return [(known, TensorInBlocks(known.key, blocks, leaves))]


# A model that is to wake waits for one batch that is on its way down: 40 ms at 0.15 s a GB. On the
# way up each slab is a put, where a manager lends it, and the models of a process have 64 together.
_BATCH_SLABS: Final = 16


def batches_of(slabs: Iterable[SleepingSlab]) -> Iterator[list[SleepingSlab]]:
    """Yield slabs in batches of at most 256 MiB, or of one larger slab, and at most 16 slabs."""
    return rounds(slabs, lambda slab: slab.nbytes, _BATCH_SLABS)


def key_asleep(digest: str) -> str:
    """Return the key under which a sleeping model's tensor is put into a memory manager.

    `digest` is the digest of the tensor's bytes.
    """
    return f"asleep:{digest}"
