"""Layer records by key. Their content is opaque to the manager, and for engines only."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

# Records without tensors hold no slab, so their number needs a bound of its own.
MAX_BYTES: Final = 256 << 20
_ENTRY_BYTES: Final = 640
_DIGEST_BYTES: Final = 272  # its text, and the key among those that name its tensor


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """The record of a layer key: opaque bytes, and the tensors they refer to."""

    record: bytes
    digests: tuple[str, ...]

    def cost(self, key: str) -> int:
        """Return the most memory that it takes under this key, in bytes."""
        return len(self.record) + len(key) + _DIGEST_BYTES * len(self.digests) + _ENTRY_BYTES


class Records:
    """A bounded table of records; the least recently used goes first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._table: OrderedDict[str, KeyRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def get(self, key: str) -> KeyRecord | None:
        """Return the record of a key, and mark it as used."""
        if key in self._table:
            self._table.move_to_end(key)
        return self._table.get(key)

    def put(self, key: str, record: KeyRecord) -> bool:
        """Enter a record; return False if the key has one."""
        if key in self._table:
            return False
        self._table[key] = record
        self._nbytes += record.cost(key)
        return True

    def oldest_in_excess(self) -> str | None:
        """Return the key to drop next, while the table is larger than its limit."""
        return self.oldest if self._nbytes > self._max_bytes else None

    @property
    def oldest(self) -> str | None:
        """The key of the least recently used record, if there is any."""
        return next(iter(self._table), None)

    def drop(self, key: str) -> KeyRecord | None:
        """Remove the record of a key, and return it."""
        record = self._table.pop(key, None)
        if record is not None:
            self._nbytes -= record.cost(key)
        return record

    def items(self) -> list[tuple[str, KeyRecord]]:
        """Return all records."""
        return list(self._table.items())
