"""A bounded table of layer records by layer key.

A layer record is a run of bytes that only engines write and read.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

# Records without tensors hold no slab, so their number needs a bound of its own.
MAX_BYTES: Final = 256 << 20
_RECORD_BYTES: Final = 768
_DIGEST_BYTES: Final = 272  # its text, and the record among those that name its tensor
_KEY_BYTES: Final = 384


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A layer record: opaque bytes, and the digests of the tensors they refer to."""

    record: bytes
    digests: tuple[str, ...]

    @property
    def cost(self) -> int:
        """An upper bound of the memory that the record takes, without its keys, in bytes."""
        return len(self.record) + _DIGEST_BYTES * len(self.digests) + _RECORD_BYTES


def key_cost(key: str) -> int:
    """Return an upper bound of the memory that a key takes, without its record, in bytes."""
    return len(key) + _KEY_BYTES


class Records:
    """A bounded table of layer records by key.

    The table does not drop keys by itself. While it exceeds its limit, the caller must drop the
    least recently used key. Equal records are stored once, even if many keys lead to them.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._table: OrderedDict[str, KeyRecord] = OrderedDict()
        self._keys: dict[KeyRecord, set[str]] = {}

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def get(self, key: str) -> KeyRecord | None:
        """Return the record of a key, and mark the key as just used.

        The result is None if the key has no record.
        """
        if key in self._table:
            self._table.move_to_end(key)
        return self._table.get(key)

    def keys_of(self, record: KeyRecord) -> list[str]:
        """Return all keys that lead to this record or an equal one."""
        return list(self._keys.get(record, ()))

    def cost(self, key: str, record: KeyRecord) -> int:
        """Return by how many bytes `put` would enlarge the table."""
        return key_cost(key) + (0 if record in self._keys else record.cost)

    def put(self, key: str, record: KeyRecord) -> bool:
        """Enter a record under a key.

        Return True, or False if the key has a record already.
        """
        if key in self._table:
            return False
        self._nbytes += self.cost(key, record)
        keys = self._keys.setdefault(record, set())
        self._table[key] = self._table[next(iter(keys))] if keys else record
        keys.add(key)
        return True

    def oldest_in_excess(self) -> str | None:
        """Return the least recently used key if the table exceeds its limit, otherwise None."""
        return self.oldest if self._nbytes > self._max_bytes else None

    @property
    def oldest(self) -> str | None:
        """The least recently used key, or None if the table is empty."""
        return next(iter(self._table), None)

    def drop(self, key: str) -> int:
        """Remove a key; a record that has lost its last key is removed, too.

        Return the bytes that this frees, or 0 for an unknown key.
        """
        record = self._table.pop(key, None)
        if record is None:
            return 0
        keys = self._keys[record]
        keys.discard(key)
        if not keys:
            del self._keys[record]
        freed = self.cost(key, record)
        self._nbytes -= freed
        return freed

    def items(self) -> list[tuple[str, KeyRecord]]:
        """Return all keys with their records."""
        return list(self._table.items())
