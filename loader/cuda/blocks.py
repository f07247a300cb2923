"""Large tensors on a GPU in blocks of 16 MiB, so that tensors with equal parts can share them.

A *resident* is an immutable tensor in memory that models share. CUDA maps memory by whole handles
(cuMemMap takes no offset but 0), so tensors can only share whole handles. A tensor of `BLOCKS_FROM`
bytes and more therefore consists of several handles, which are mapped side by side. Each of these
handles is a *block*: a resident of plain bytes that is found by its own digest, whatever its
position in other tensors.

A *record* describes a tensor in blocks to other processes. It contains the tensor's leaf digests,
one for each 2 MiB. From these, a process that gets the record computes the digests of the blocks
and of the whole tensor. If the record lists blocks of another tensor, the digests differ, and the
process refuses them. But no process can check that a block's bytes have the digest that their
writer announced, because the memory manager does not read GPU memory.
"""

from __future__ import annotations

import logging
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakSet

import msgspec
from blake3 import blake3

from tensor_dedup.digest import LEAF_BYTES, combine
from tensor_dedup.errors import IntegrityError
from tensor_dedup.loader.cuda.residents import DeviceResident
from tensor_dedup.loader.residents.resident import is_of_bytes
from tensor_dedup.loader.residents.slab import SlabUsageError
from tensor_dedup.types import ResidentKey

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger(__name__)
# A block of 16 MiB is a descriptor in the manager and in every process that maps it, and some six
# requests to put. 14 GB are 834 blocks; in handles of a leaf, 2 MiB, they would be 6,676. On an
# H200, 4 GiB in blocks of 16 MiB are mapped in 13 ms, of 2 MiB in 146, of 64 MiB in 3. What differs
# costs whole blocks: one changed row 16 MiB.
BLOCK_BYTES: Final = 16 << 20
# With fewer than two blocks there is nothing to share that is not the whole.
BLOCKS_FROM: Final = 2 * BLOCK_BYTES
# The record of a tensor has 32 bytes a leaf, and must fit the protocol (MAX_RECORD, 32 KiB), as its
# blocks must (MAX_RECORD_DIGESTS, 128). What is larger is shared whole.
_MOST_LEAVES: Final = 1008
_NAME_CONTEXT: Final = "tensor-dedup block name v1"
# Of the descriptors that this process may have; the rest is for whatever else runs in it.
_USABLE: Final = 0.75


def may_be_in_blocks(key: ResidentKey, nbytes: int) -> bool:
    """Return whether a tensor with this `key` and size can be stored in blocks.

    The size must be 32 to 2016 MiB, and the digest a BLAKE3 of the tensor's bytes. Whether the
    GPU's memory allows blocks is not checked here.
    """
    # Other algorithms have no leaves, and their digests a prefix.
    plain = key.digest != "" and is_of_bytes(key) and ":" not in key.digest
    return plain and blocks_of(nbytes) > 0


def blocks_of(nbytes: int) -> int:
    """Return the number of blocks for a tensor of `nbytes` bytes, or 0 if it is stored whole."""
    return -(-nbytes // BLOCK_BYTES) if BLOCKS_FROM <= nbytes <= _MOST_LEAVES * LEAF_BYTES else 0


def bytes_key(nbytes: int, digest: str) -> ResidentKey:
    """Return the resident key of a block: `nbytes` elements of uint8 with this `digest`."""
    return ResidentKey("U8", (nbytes,), (1,), digest)


def block_keys(nbytes: int, leaves: Sequence[bytes]) -> list[ResidentKey]:
    """Return the resident keys of the blocks of a tensor of `nbytes` bytes, in order.

    `leaves` are the tensor's leaf digests.
    """
    keys = []
    for start in range(0, nbytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, nbytes - start)
        first = start // LEAF_BYTES
        digest = combine(size, leaves[first : first + -(-size // LEAF_BYTES)])
        keys.append(bytes_key(size, digest))
    return keys


def own_digests(nbytes: int, leaves: Sequence[bytes]) -> list[str]:
    """Return the digest that each leaf of `nbytes` bytes has by itself, as hints have it.

    `leaves` are the leaf digests.
    """
    sizes = (min(LEAF_BYTES, nbytes - at) for at in range(0, nbytes, LEAF_BYTES))
    return [combine(size, [leaf]) for size, leaf in zip(sizes, leaves, strict=True)]


def block_names(nbytes: int, own: Sequence[str]) -> list[str]:
    """Return a name for each block of a tensor of `nbytes` bytes, by which equal blocks are found.

    The names follow from `own`, the digests that the tensor's leaves have by themselves. So a block
    can be looked up before it was read. A block's digest does not follow from them.
    """
    step = BLOCK_BYTES // LEAF_BYTES
    names = []
    for at in range(0, len(own), step):
        size = min(BLOCK_BYTES, nbytes - at * LEAF_BYTES)
        text = f"{size} {' '.join(own[at : at + step])}"
        names.append(blake3(text.encode(), derive_key_context=_NAME_CONTEXT).hexdigest())
    return names


class TensorInBlocks(DeviceResident):
    """A resident that consists of several blocks (pieces of 16 MiB) side by side.

    Each block lies in a slab of its own. The object keeps the blocks alive.
    """

    __slots__ = ("_leaf_shared_bytes", "blocks", "leaves")

    def __init__(
        self,
        key: ResidentKey,
        blocks: Sequence[DeviceResident],
        leaves: Sequence[bytes],
        leaf_shared_bytes: int = 0,
    ) -> None:
        """Describe the tensor `key`, which consists of `blocks` and has the leaf digests `leaves`.

        Raises:
            SlabUsageError: The blocks are not those of this tensor, or cannot lie side by side.
        """
        nbytes = sum(each.nbytes for each in blocks)
        try:
            keys = block_keys(nbytes, leaves)
            true = key.digest == combine(nbytes, leaves)
        except IntegrityError:
            keys, true = [], False  # not as many leaves as that
        if not true or keys != [each.key for each in blocks] or not blocks:
            raise SlabUsageError(
                f"these {len(blocks)} blocks of {nbytes} bytes are not those of {key.digest}",
                nbytes=nbytes,
            )
        if not all(map(is_block, blocks)):
            raise SlabUsageError("blocks that are not all of a slab cannot lie side by side")
        # A slab that is larger than its block is the last: the others are as large as blocks.
        super().__init__(key, [each.slabs[0] for each in blocks], 0)
        if self.nbytes != nbytes:
            raise SlabUsageError(f"{key} is of {self.nbytes} bytes, its blocks of {nbytes}")
        self.blocks: Final = tuple(blocks)
        self.leaves: Final = tuple(leaves)
        self._leaf_shared_bytes: Final = leaf_shared_bytes

    @property
    def leaf_shared_bytes(self) -> int:
        """The number of the tensor's bytes that were resident before the load that built it."""
        return self._leaf_shared_bytes

    def named_blocks(self) -> list[tuple[str, DeviceResident, tuple[bytes, ...]]]:
        """Return the name of each block, the block, and its leaf digests."""
        names = block_names(self.nbytes, own_digests(self.nbytes, self.leaves))
        step = BLOCK_BYTES // LEAF_BYTES
        leaves = (self.leaves[at : at + step] for at in range(0, len(self.leaves), step))
        return [*zip(names, self.blocks, leaves, strict=True)]


def is_block(resident: DeviceResident) -> bool:
    """Return whether `resident` can be a block of a large tensor.

    It can if it lies at the beginning of a single slab that is no larger than a block.
    """
    [slab, *others] = resident.slabs
    return not others and not resident.offset and slab.nbytes <= BLOCK_BYTES


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The record of a tensor in blocks: its key, leaf digests, and which tensor each block is."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    digest: str
    leaves: bytes
    blocks: tuple[int, ...]


def record_of_blocks(resident: TensorInBlocks) -> tuple[bytes, list[str]]:
    """Return the encoded record of `resident` for other processes, and the digests of its blocks.

    Blocks with equal digests are listed once.
    """
    key = resident.key
    digests = list(dict.fromkeys(each.key.digest for each in resident.blocks))
    number = {digest: n for n, digest in enumerate(digests)}
    record = _Record(
        key.dtype,
        tuple(key.shape),
        tuple(key.stride),
        key.digest,
        b"".join(resident.leaves),
        tuple(number[each.key.digest] for each in resident.blocks),
    )
    return msgspec.msgpack.encode(record), digests


class BlockComposition(NamedTuple):
    """The decoded record of a tensor in blocks: its resident key, leaf digests and blocks.

    A record is published together with a list of the digests of its distinct blocks. `blocks` has
    an index into that list for each block of the tensor, in order.
    """

    key: ResidentKey
    leaves: tuple[bytes, ...]
    blocks: tuple[int, ...]


def blocks_in(record: bytes) -> BlockComposition | None:
    """Decode `record` as that of a tensor in blocks; return None if it is of another kind."""
    try:
        found = msgspec.msgpack.decode(record, type=_Record)
    except msgspec.MsgspecError:
        return None
    leaves = tuple(found.leaves[at : at + 32] for at in range(0, len(found.leaves), 32))
    key = ResidentKey(found.dtype, found.shape, found.stride, found.digest)
    return BlockComposition(key, leaves, found.blocks)


def spare_descriptors(usable: float = _USABLE) -> int:
    """Return how many more file descriptors this process may open; the result may be negative.

    `usable` is the share of the limit (RLIMIT_NOFILE), from 0.0 to 1.0, that may be used. Without a
    limit the result is sys.maxsize.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return sys.maxsize if most == resource.RLIM_INFINITY else int(usable * most) - there


def too_many(blocks: int) -> str:
    """Return the message for a tensor of `blocks` blocks that needs too many file descriptors."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"{blocks} blocks come too near to the {most} descriptors that this process may have, "
        "beside those that it has; raise ulimit -n to share parts of tensors"
    )


@dataclass(slots=True)
class BlockLog:
    """The blocks that one load has built, and the reason if it builds no more. For one thread.

    `built` has the blocks. `why_whole` is the reason why the load now stores large tensors whole,
    or None while it still builds blocks.
    """

    built: WeakSet[DeviceResident] = field(default_factory=WeakSet)
    why_whole: str | None = None

    def admits(self, blocks: int) -> bool:
        """Return whether a tensor may be built of this number of `blocks`.

        Each block needs a file descriptor. If there are too few, the load stops building blocks, so
        this and all later calls return False.
        """
        if self.why_whole is None and blocks > spare_descriptors():
            self.refuse(too_many(blocks))
        return self.why_whole is None

    def note_larger(self, nbytes: int) -> bool:
        """Stop building blocks in this load if the manager's slabs are larger than a block.

        `nbytes` is the size of the slab that the manager made for a block. Returns whether it is
        larger.
        """
        if nbytes > BLOCK_BYTES:
            self.refuse(
                f"the manager's slabs are multiples of {nbytes} bytes, and a block has "
                f"{BLOCK_BYTES}; start it with a smaller --handle to share parts of tensors"
            )
        return nbytes > BLOCK_BYTES

    def refuse(self, reason: str) -> None:
        """Stop building blocks in this load because of `reason`.

        The first reason is logged and becomes `why_whole`; later ones are ignored.
        """
        if self.why_whole is None:
            self.why_whole = reason
            _log.warning("large tensors are shared whole on the GPU: %s", reason)
