"""Leaves of what tensors are stored against, kept from one save to the next.

An anchor is the same for many steps, and reading it means decoding it: a third of what encoding a
step costs. What is kept is bounded; of a larger model the first tensors are.
"""

import threading
from dataclasses import dataclass

from tensor_dedup.store.writing.encoder import Anchor

_MOST = 64 << 20


class AnchorMemory:
    """What one handle keeps. Any thread."""

    def __init__(self, most_bytes: int = _MOST) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._leaves: dict[tuple[bytes, int], bytearray] = {}
        self._used: set[tuple[bytes, int]] = set()
        self._nbytes = 0

    def begin(self) -> None:
        """A save begins: what the one before did not use goes."""
        with self._lock:
            self._leaves = {key: self._leaves[key] for key in self._used if key in self._leaves}
            self._nbytes = sum(map(len, self._leaves.values()))
            self._used = set()

    def read(self, anchor: Anchor, start: int, stop: int) -> bytearray:
        """A leaf of an anchor, verified when it was read. Not to be written to."""
        key = (anchor.digest, start)
        with self._lock:
            self._used.add(key)
            known = self._leaves.get(key)
        if known is not None and len(known) == stop - start:
            return known
        data = anchor.pieces.read_piece(anchor.digest, start, stop, anchor.nbytes)
        with self._lock:
            if key not in self._leaves and self._nbytes + len(data) <= self._most:
                self._leaves[key] = data
                self._nbytes += len(data)
        return data


@dataclass(frozen=True, slots=True)
class KeptAnchor(Anchor):
    """An anchor of which leaves are kept. CorruptTensorError, MissingObjectError as Anchor."""

    memory: AnchorMemory

    def read(self, start: int, stop: int) -> bytearray:
        """A leaf of it, verified."""
        return self.memory.read(self, start, stop)
