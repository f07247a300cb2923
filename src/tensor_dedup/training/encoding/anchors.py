"""Anchors whose decoded leaves a run keeps: an anchor serves many steps, and is decoded once."""

import threading
from dataclasses import dataclass

from tensor_dedup.store.writing.deltas import Anchor

_MOST = 64 << 20


class AnchorMemory:
    """A cache of decoded leaves, kept between the saves of a run. Safe from any thread.

    The leaves are those of anchors, the stored pieces that others are stored against. The cache
    holds up to `most_bytes`. When it is full, no more leaves are added.
    """

    def __init__(self, most_bytes: int = _MOST) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._leaves: dict[tuple[bytes, int], bytearray] = {}
        self._used: set[tuple[bytes, int]] = set()
        self._nbytes = 0

    def begin(self) -> None:
        """Begin a save: drop the leaves that were not used during the previous save."""
        with self._lock:
            self._leaves = {key: self._leaves[key] for key in self._used if key in self._leaves}
            self._nbytes = sum(map(len, self._leaves.values()))
            self._used = set()

    def read(self, anchor: Anchor, start: int, stop: int) -> bytearray:
        """Return a leaf of `anchor`, verified. The caller must not modify it.

        `start` and `stop` are the offsets of the leaf. Raises the errors of `Anchor.read`.
        """
        key = (anchor.digest, start)
        with self._lock:
            self._used.add(key)
            known = self._leaves.get(key)
        if known is not None and len(known) == stop - start:
            return known
        data = Anchor.read(anchor, start, stop)
        with self._lock:
            if key not in self._leaves and self._nbytes + len(data) <= self._most:
                self._leaves[key] = data
                self._nbytes += len(data)
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnchor(Anchor):
    """An anchor whose decoded leaves are kept in `memory`. `stored` is its size on disk."""

    memory: AnchorMemory
    stored: int

    def read(self, start: int, stop: int) -> bytearray:
        """Return a leaf of the anchor, verified. The caller must not modify it.

        `start` and `stop` are the offsets of the leaf. Raises the errors of `Anchor.read`.
        """
        return self.memory.read(self, start, stop)
