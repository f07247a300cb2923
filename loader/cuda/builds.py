"""Build what a load needs on a GPU: whole tensors, tensors in blocks, and tensors in files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tensor_dedup.digest import combine
from tensor_dedup.loader.cuda.blocks import (
    BLOCK_BYTES,
    BlockLog,
    TensorInBlocks,
    block_keys,
    blocks_of,
    bytes_key,
    is_block,
    may_be_in_blocks,
)
from tensor_dedup.loader.cuda.new_slabs import SlabTensor, make_resident, slabs_of
from tensor_dedup.loader.cuda.residents import DeviceContent, DeviceRequest
from tensor_dedup.loader.cuda.shared import can_be_lent
from tensor_dedup.loader.cuda.transfers import HostContent
from tensor_dedup.loader.residents.manager import ResidentQuery
from tensor_dedup.loader.residents.resident import ReplicaKey, nbytes_of
from tensor_dedup.memory_manager.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents
    from tensor_dedup.loader.cuda.new_slabs import NewSlab
    from tensor_dedup.loader.cuda.residents import DeviceResident, UnreadTensor, Write
    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.types import ResidentKey


class DeviceBuilds:
    """One load's builds on one GPU. For one thread; builds on the same GPU run one at a time.

    `log` tells which blocks this load has built, and why it builds no more.
    """

    def __init__(
        self, gpu: SharedGpu, manager: DeviceManagerResidents, log: BlockLog | None = None
    ) -> None:
        """Build on `gpu`, in memory of `manager` or, if it does not take it, of this process."""
        self._gpu: Final = gpu
        self._manager: Final = manager
        self.log: Final = BlockLog() if log is None else log

    def get_or_build(
        self,
        wanted: Sequence[tuple[ReplicaKey, str, HostContent | DeviceContent | Write]],
    ) -> list[tuple[DeviceResident, bool]]:
        """Return a resident for each (key, recipe, content), and whether this call wrote it.

        The results are in the order of `wanted`. Missing residents are put into the manager's
        memory or, if it does not take them, into memory of this process.

        A large tensor whose content can be divided is built of blocks (pieces of 16 MiB) where
        possible, and only the missing blocks are written.

        Raises:
            BackendError: The GPU has no room, its driver refuses, or a tensor has changed since it
                was hashed. Keep the tensors private.
        """
        with self._gpu.lock:
            found: dict[int, tuple[DeviceResident, bool]] = {}
            missing = []
            in_blocks = self._in_blocks(wanted)
            for index, (known, recipe, content) in enumerate(wanted):
                resident = self._gpu.lookup(known) if known.key.digest else None
                if index in in_blocks:
                    found[index] = in_blocks[index]
                elif resident is not None:
                    found[index] = resident, False
                else:
                    nbytes = nbytes_of(known.key)
                    one = DeviceRequest(recipe, known.key, nbytes, content, known.copy)
                    missing.append((index, one))
            made = self._put([each for _, each in missing])
            for (index, each), (resident, new) in zip(missing, made, strict=True):
                known = ReplicaKey(resident.key, each.copy)
                found[index] = self._gpu.enter(known, resident), new
            return [found[index] for index in range(len(wanted))]

    def _put(self, wanted: Sequence[DeviceRequest]) -> list[tuple[DeviceResident, bool]]:
        """Put whole tensors into slabs, the manager's where it takes them."""
        lendable = [each for each in wanted if can_be_lent(ReplicaKey(each.key, each.copy))]
        lent: dict[int, tuple[DeviceResident, bool] | None] = {}
        for slab in slabs_of(lendable):
            lent.update(zip(map(id, slab), self._manager.put(slab), strict=True))
        rest = [each for each in wanted if lent.get(id(each)) is None]
        local = iter(self._gpu.local.put(rest) if rest else ())
        return [lent.get(id(each)) or next(local) for each in wanted]

    def _in_blocks(
        self,
        wanted: Sequence[tuple[ReplicaKey, str, HostContent | DeviceContent | Write]],
    ) -> dict[int, tuple[DeviceResident, bool]]:
        """Return those of `get_or_build`, by number, that are in blocks or need not be built."""
        large = [
            (index, known, content)
            for index, (known, _, content) in enumerate(wanted)
            # Replicas of a tensor must not become one memory.
            if isinstance(content, HostContent | DeviceContent)
            and known.copy == 0
            and may_be_in_blocks(known.key, content.nbytes)
        ]
        if not large or self._manager.whole_only is not None:
            return {}
        there = self._gpu.find([known for _, known, _ in large], self._manager)
        found: dict[int, tuple[DeviceResident, bool]] = {}
        new: dict[int, list[SlabTensor]] = {}
        for (index, known, content), resident in zip(large, there, strict=True):
            if resident is not None:
                found[index] = resident, False
            elif self.log.admits(blocks_of(content.nbytes) + sum(map(len, new.values()))):
                digests_known = isinstance(content, DeviceContent) or not content.hashed
                if digests_known:
                    _require_digest(known.key, content)
                new[index] = _blocks_of(content, content.leaves if digests_known else None)
        self._look([one for each in new.values() for one in each if one.key.digest])
        new = {index: blocks for index, blocks in new.items() if _may_be_joined(blocks)}
        if not self._make_resident([one for each in new.values() for one in each]):
            return found
        for index, blocks in new.items():
            made = self._published(wanted[index], blocks)
            if made is not None:
                found[index] = made
        return found

    def _published(
        self,
        wanted: tuple[ReplicaKey, str, HostContent | DeviceContent | Write],
        blocks: Sequence[SlabTensor],
    ) -> tuple[DeviceResident, bool] | None:
        """Return the tensor that consists of blocks, which others now find; None if it cannot."""
        known, recipe, content = wanted
        assert isinstance(content, HostContent | DeviceContent)
        _require_digest(known.key, content)
        first = self._gpu.lookup(known)  # of a tensor that is wanted twice
        if first is not None:
            return first, False
        made = self._joined(known.key, blocks, content.leaves)
        if made is None:
            return None
        self._manager.publish_parts(recipe, made)
        return self._gpu.enter(known, made), True

    def build_unread(self, wanted: Sequence[UnreadTensor]) -> list[tuple[DeviceResident, bool]]:
        """Upload tensors whose digests are not known, and return a resident for each.

        The results are in the order of `wanted`; True says that this call made the resident. If a
        resident has the bytes after all, it is used, and the memory of the upload is freed. Errors
        of reading and of `UnreadTensor.learned` are passed on.

        Raises:
            BackendError: The GPU has no room, or its driver refuses. Keep the tensors private.
        """
        with self._gpu.lock:
            new = [self._new(each) for each in wanted]
            if not self._make_resident([one for each in new for one in each]):
                new = [self._new(each) for each in wanted]  # whole: `log` says so
                self._make_resident([one for each in new for one in each])
            return [self._learned(each, these) for each, these in zip(wanted, new, strict=True)]

    def _new(self, each: UnreadTensor) -> list[SlabTensor]:
        blocks = blocks_of(each.content.nbytes)
        if blocks and self._manager.whole_only is None and self.log.admits(blocks):
            return _blocks_of(each.content)
        return [SlabTensor(each.content, each.geometry, 0, each.content.nbytes)]

    def _learned(
        self,
        each: UnreadTensor,
        made: Sequence[SlabTensor],
    ) -> tuple[DeviceResident, bool]:
        """Return the resident of a tensor that was uploaded, and publish it under its recipe."""
        key = replace(each.geometry, digest=each.content.digest)
        recipe = each.learned()
        known = ReplicaKey(key, 0)
        first = self._gpu.lookup(known)
        if first is not None:
            return first, False
        if made[0].is_block:
            whole = self._joined(key, made, each.content.leaves)
            if whole is not None:
                self._manager.publish_parts(recipe, whole)
                return self._gpu.enter(known, whole), True
            # As a block lies in a slab with others: whole, now that its digest is known.
            request = DeviceRequest(recipe, key, each.content.nbytes, each.content)
            [(resident, new)] = self._put([request])
            return self._gpu.enter(known, resident), new
        [one] = made
        assert one.resident is not None
        self._manager.publish_whole(recipe, one.resident)
        return self._gpu.enter(known, one.resident), one.written

    def _make_resident(self, tensors: Sequence[SlabTensor]) -> bool:
        """Write what has no resident into new slabs, the manager's where it has room.

        Returns False if the manager's memory comes in slabs that are larger than blocks, and blocks
        are wanted.
        """
        has_blocks = any(each.is_block for each in tensors)

        def lent(sizes: Sequence[int]) -> NewSlab | None:
            slab = self._manager.open_slab(sizes)
            whole = slab is not None and has_blocks and [*sizes] == [BLOCK_BYTES]
            if slab is not None and whole and self.log.note_larger(slab.extent.nbytes):
                slab.abandon()
                raise _LargerError
            return slab

        try:
            make_resident(
                self._gpu.gpu,
                tensors,
                [lent, self._gpu.local.open_slab],
                self._look,
            )
        except _LargerError:
            return False
        return True

    def build_known(
        self,
        key: ResidentKey,
        content: HostContent,
        found: dict[int, DeviceResident],
    ) -> TensorInBlocks | None:
        """Build a tensor of which some blocks are resident; upload only the others.

        `found` maps numbers of blocks to residents, whose leaf digests `content` knows. The digest
        of `key` is ignored. Returns the tensor, which nobody else can see yet, or None if it cannot
        consist of blocks.

        Raises:
            BackendError: The GPU has no room, or its driver refuses.
        """
        with self._gpu.lock:
            blocks = _blocks_of(content)
            for number, resident in found.items():
                blocks[number].resident = resident
            if not self._make_resident(blocks):
                return None
            key = replace(key, digest=content.digest)
            return self._joined(key, blocks, content.leaves)

    def _look(self, tensors: Sequence[SlabTensor]) -> None:
        """Set `resident` of those tensors that are resident, in this process or the manager."""
        for each in tensors:
            each.resident = self._gpu.here(each.key)
        missing = {each.key: None for each in tensors if each.resident is None}
        lent = self._manager.find([ResidentQuery("", each) for each in missing])
        found = dict(zip(missing, lent, strict=True))
        for each in tensors:
            each.resident = each.resident or found.get(each.key)

    def _joined(
        self,
        key: ResidentKey,
        blocks: Sequence[SlabTensor],
        leaves: Sequence[bytes],
    ) -> TensorInBlocks | None:
        """Return the tensor that consists of blocks, or None if one of them can be no block."""
        if not _may_be_joined(blocks):
            return None
        found = []
        shared = 0
        for block in blocks:
            resident = block.resident
            assert resident is not None
            if block.written:
                self.log.built.add(resident)
            if resident not in self.log.built:
                shared += block.nbytes
            self._gpu.enter_block(resident)
            found.append(resident)
        return TensorInBlocks(key, found, leaves, shared)


class _LargerError(Exception):
    """The manager's slabs are larger than blocks."""


def _blocks_of(
    content: HostContent | DeviceContent, leaves: Sequence[bytes] | None = None
) -> list[SlabTensor]:
    """Return the blocks of a tensor, with their keys if its leaf digests are known."""
    nbytes = content.nbytes
    places = [(at, min(at + BLOCK_BYTES, nbytes)) for at in range(0, nbytes, BLOCK_BYTES)]
    keys = (
        [bytes_key(end - start, "") for start, end in places]
        if leaves is None
        else block_keys(nbytes, leaves)
    )
    return [
        SlabTensor(content, key, start, end, is_block=True)
        for key, (start, end) in zip(keys, places, strict=True)
    ]


def _may_be_joined(blocks: Sequence[SlabTensor]) -> bool:
    """Return whether none of the blocks that are resident lies in a slab with other tensors."""
    return all(each.resident is None or is_block(each.resident) for each in blocks)


def _require_digest(key: ResidentKey, content: HostContent | DeviceContent) -> None:
    if combine(content.nbytes, content.leaves) != key.digest:
        raise BackendError(
            f"a tensor of {key.digest} has changed since it was hashed; load it privately",
            digest=key.digest,
        )
