"""Writing containers from memory that somebody else owns, and may be writing to.

What is written is a copy that was compared with what was hashed: a container never holds bytes that
do not have their digest, whatever happens to a model while it is saved.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tensor_dedup.digest import LEAF_BYTES, combine, leaf_digests
from tensor_dedup.store.checkpoints.errors import ChangedModelError
from tensor_dedup.store.writing.containers import ContainerWriter, SealedContainer, record_of
from tensor_dedup.store.writing.hashing import (
    Hashed,
    Hasher,
    change_hasher,
    change_hashes,
)

# Small pieces are put together until there is this much: one system call for many of them.
_TOGETHER = 1 << 20
_HANDED_OVER = 256 << 10
# The disk begins with so much while more is encoded.
_BEGUN = 4 << 20

Want: TypeAlias = tuple[str, str | None, memoryview]
"""A piece: a name for messages, the type of a tensor, its bytes, flat."""
Wanted: TypeAlias = Mapping[bytes, Want]
"""Pieces by fast hash."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """A piece that is to be stored: its bytes, flat, their fast hash, digest and leaf digests."""

    name: str
    dtype: str | None
    view: memoryview
    fast: bytes
    hashed: Hashed


def hash_all(hasher: Hasher, wanted: Wanted) -> list[Fresh]:
    """BLAKE3 of pieces by their fast hash, on all threads where they are large.

    ChangedModelError: one was written to.
    """
    parts = [
        (view[at : at + LEAF_BYTES], key)
        for key, (_, _, view) in wanted.items()
        for at in range(0, view.nbytes, LEAF_BYTES)
    ]
    leaves: dict[bytes, list[bytes]] = {key: [] for key in wanted}
    # Handing over a small one takes longer than hashing it.
    large = [(view, key) for view, key in parts if view.nbytes >= _HANDED_OVER]
    each = hasher.each if len(large) > 1 else map
    found = each(leaf_digests, (view for view, _ in large))
    for (_, key), digests in zip(large, found, strict=True):
        leaves[key] += digests
    for view, key in parts:
        if view.nbytes < _HANDED_OVER:  # the last of its piece
            leaves[key] += leaf_digests(view)
    now = change_hashes(hasher, [view for _, _, view in wanted.values()])
    return [
        _checked(key, is_now, *held, leaves[key])
        for (key, held), is_now in zip(wanted.items(), now, strict=True)
    ]


def _checked(
    was: bytes, now: bytes, name: str, dtype: str | None, view: memoryview, leaves: list[bytes]
) -> Fresh:
    if now != was:
        raise changed(name)
    digest = bytes.fromhex(combine(view.nbytes, leaves))
    return Fresh(name, dtype, view, was, Hashed(digest, b"".join(leaves)))


def changed(name: str) -> ChangedModelError:
    """The error for a tensor that is not what it was when this save began."""
    return ChangedModelError.at(f"tensor {name!r}", "it was written to while it was saved")


class MemoryWriter(ContainerWriter):
    """A slab or a pack while it is being written. As ContainerWriter."""

    _buffer: bytearray | None = None
    _buffer_at = 0
    _begun = 0

    def put(self, piece: Fresh) -> None:
        """Store a piece. ChangedModelError: it is not what it was."""
        start = self._reserve(piece.view.nbytes)
        check = change_hasher()
        for at in range(0, piece.view.nbytes, LEAF_BYTES):
            part = bytes(piece.view[at : at + LEAF_BYTES])
            check.update(part)
            self._write(part, start + at)
        if check.digest() != piece.fast:
            raise changed(piece.name)
        self._records.append(record_of(start, piece.view.nbytes, piece.hashed))

    def _write(self, part: bytes, at: int) -> None:
        if self._buffer is None:
            self._buffer, self._buffer_at = bytearray(), at
        gap = at - self._buffer_at - len(self._buffer)
        if len(part) >= _TOGETHER or gap + len(self._buffer) + len(part) > _TOGETHER:
            self._flush()
            self._pwrite(part, at)
            self._buffer = None
            return
        self._buffer += bytes(gap)
        self._buffer += part

    def _flush(self) -> None:
        if self._buffer:
            self._pwrite(memoryview(self._buffer), self._buffer_at)
        self._buffer = None

    def _pwrite(self, data: bytes | memoryview, at: int) -> None:
        files, handle, end = self._objects.files, self._opened(), at + len(data)
        files.pwrite(handle, data, at)
        if end - self._begun >= _BEGUN:
            files.begin_writing(handle, self._begun, end - self._begun)
            self._begun = end

    def seal(self) -> SealedContainer | None:
        # docstring inherited
        self._flush()
        return super().seal()
