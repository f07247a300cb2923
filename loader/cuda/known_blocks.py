"""Build a large tensor on a GPU of which others have blocks, and upload only the rest.

A block is a piece of 16 MiB. `residents.partial` has the algorithm; this is what memory of a GPU
does for its steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from tensor_dedup.digest import LEAF_BYTES, combine
from tensor_dedup.loader.cuda.blocks import (
    BLOCK_BYTES,
    TensorInBlocks,
    block_names,
    blocks_of,
    is_block,
)
from tensor_dedup.loader.cuda.transfers import HostContent, UploadPart
from tensor_dedup.loader.residents.resident import ReplicaKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.loader.cuda.builds import DeviceBuilds
    from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents
    from tensor_dedup.loader.cuda.residents import DeviceResident
    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.loader.residents.partial import Content, KnownTensor, Progress


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A tensor to build: its content, and its blocks that are resident, by number."""

    content: HostContent
    found: dict[int, DeviceResident] = field(default_factory=dict)


class KnownBlocks:
    """The `PartialMemory` of one load on a GPU, where the pieces are blocks. For one thread."""

    def __init__(
        self, gpu: SharedGpu, manager: DeviceManagerResidents, builds: DeviceBuilds
    ) -> None:
        self._gpu: Final = gpu
        self._manager: Final = manager
        self._builds: Final = builds
        self._found: list[tuple[DeviceResident, tuple[bytes, ...]] | None] = []

    def donors(self, tensor: KnownTensor) -> Sequence[DeviceResident]:
        """Return the blocks of `tensor` that are resident. No tensor data is read."""
        own = _own_digests(tensor.contents)
        if own is None or tensor.fill is None or not blocks_of(tensor.nbytes):
            return []
        if self._manager.whole_only is not None:
            return []
        names = block_names(tensor.nbytes, own)
        self._found = self._gpu.blocks_named(names, self._manager)
        return [each[0] for each in self._found if each is not None]

    def pieces(self, tensor: KnownTensor, donors: Sequence[DeviceResident]) -> BlockPlan | None:
        """Return which blocks of `tensor` are resident; None if one can be no block."""
        assert tensor.fill is not None
        parts = [
            UploadPart(each.start, each.end - each.start, partial(tensor.fill, number))
            for number, each in enumerate(tensor.contents)
        ]
        plan = BlockPlan(HostContent(tensor.nbytes, parts))
        for number, each in enumerate(self._found):
            if each is not None:
                plan.found[number], leaves = each
                plan.content.know(number * BLOCK_BYTES, leaves)
        return plan if all(map(is_block, donors)) else None

    def admit(self, tensor: KnownTensor, plan: BlockPlan) -> Progress | None:
        """Return a function that does nothing, or None if there are too few descriptors."""
        return _nothing if self._builds.log.admits(blocks_of(tensor.nbytes)) else None

    def build(
        self, tensor: KnownTensor, plan: BlockPlan, progress: Progress
    ) -> TensorInBlocks | None:
        """Upload the missing blocks, and return the tensor, which nobody else can see yet."""
        made = self._builds.build_known(tensor.geometry, plan.content, plan.found)
        self._count(tensor, plan)
        if made is None:
            return None
        # All contents begin at leaves of the tensor, so their digests follow from its leaf digests.
        for number, (start, end, _, _) in enumerate(tensor.contents):
            digest = combine(end - start, plan.content.leaves_of(start, end))
            if not tensor.is_as_known(number, digest):
                return None
        return made

    def _count(self, tensor: KnownTensor, plan: BlockPlan) -> None:
        for at in range(0, tensor.nbytes, BLOCK_BYTES):
            if at // BLOCK_BYTES not in plan.found:
                for number, each in enumerate(tensor.contents):
                    nbytes = min(at + BLOCK_BYTES, each.end) - max(at, each.start)
                    if nbytes > 0:
                        tensor.counted(number, nbytes)

    def publish(self, tensor: KnownTensor, built: DeviceResident) -> tuple[DeviceResident, bool]:
        """Let others find `built`; return the resident to use, and whether this call made it."""
        self._manager.publish_parts(tensor.recipe, built)
        first = self._gpu.enter(ReplicaKey(built.key, 0), built)
        return first, first is built

    def note_contents(self, resident: DeviceResident, contents: Sequence[Content]) -> None:
        """Do nothing: a tensor in blocks is found by the names of its blocks."""

    def release(self) -> None:
        """Let go of the blocks that were found."""
        self._found = []


def _own_digests(contents: Sequence[Content]) -> list[str] | None:
    """Return the digest that each leaf of a tensor has by itself, or None if they are not known.

    They are known if all contents begin at leaves of the tensor and have the digests of theirs.
    """
    found: list[str] = []
    for start, end, digest, leaves in contents:
        if start % LEAF_BYTES or (not leaves and end - start > LEAF_BYTES):
            return None
        found += leaves or (digest,)
    return found


def _nothing() -> None:
    """Do nothing."""
