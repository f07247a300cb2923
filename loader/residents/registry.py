"""The process-wide registry of residents, and of layer records by layer key.

A resident is an immutable tensor in memory that models share. A layer record has what a layer holds
after it was processed: its residents and other attributes. The registry refers to both weakly, so
they are freed when the last model that uses them is dropped.
"""

import itertools
import os
import sys
import threading
from collections import defaultdict
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

from tensor_dedup.loader import report
from tensor_dedup.loader.residents.resident import Resident
from tensor_dedup.types import ResidentKey

# A weak reference (72) and its slot in a dict (about 100 when two thirds full).
_ENTRY_BYTES: Final = 172
# From this size on, a tensor that is no other's equal may still have leaves in common with one.
LEAF_SHARED_FROM: Final = 8 << 20
# The attribute by which a layer, or its packed function, holds its record: a record lives as long
# as a layer uses it.
RECORD: Final = "_tensor_dedup_record"


_RowGeometry: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]


def _row_geometry(key: ResidentKey) -> _RowGeometry:
    """Return what two tensors share of which one has more rows: dtype, shape of a row, stride."""
    return key.dtype, key.shape[1:], key.stride


class Registry:
    """The tables of the residents and layer records of this process.

    A resident is found by its key and replica number, or by a recipe. The replica number tells
    equal tensors of one model apart. A layer record is found by its layer key. Safe from any thread
    and after fork.
    """

    def __init__(self) -> None:
        self._residents: WeakValueDictionary[tuple[ResidentKey, int], Resident] = (
            WeakValueDictionary()
        )
        self._records: WeakValueDictionary[str, object] = WeakValueDictionary()
        # By number, so that they stay in order.
        self._large: defaultdict[_RowGeometry, WeakValueDictionary[int, Resident]] = defaultdict(
            WeakValueDictionary
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def lookup(self, key: ResidentKey, copy: int = 0) -> Resident | None:
        """Return the resident with this `key` and replica number, or None.

        `copy` is the replica number, which tells equal tensors of one model apart. The caller must
        keep the resident alive, because the registry does not.
        """
        return self._residents.get((key, copy))

    def register(self, resident: Resident, copy: int = 0) -> Resident:
        """Register `resident`, if its key and replica number are not taken yet.

        `copy` is the replica number, which tells equal tensors of one model apart. Returns the
        resident that is registered now, which may be an earlier one.
        """
        # Two steps that must not be torn: setdefault of a weak dictionary is not atomic.
        with self._lock:
            first = self._residents.get((resident.key, copy))
            if first is not None:
                return first
            self._residents[resident.key, copy] = resident
            if resident.nbytes >= LEAF_SHARED_FROM and not resident.lent:
                self._large[_row_geometry(resident.key)][next(self._numbers)] = resident
            return resident

    def alike(self, key: ResidentKey) -> list[Resident]:
        """Return the large residents (8 MiB and more) that may share leaves with a tensor.

        They have the dtype, row shape and stride of `key`, and are ordered from old to new.
        Residents that a memory manager lends are left out.
        """
        with self._lock:
            found = self._large.get(_row_geometry(key))
            return [] if found is None else list(found.values())

    def entries(self) -> list[tuple[int, Resident]]:
        """Return (replica number, resident) for all residents in use.

        The replica number tells equal tensors of one model apart.
        """
        with self._lock:
            return [(copy, resident) for (_, copy), resident in self._residents.items()]

    def residents(self) -> list[Resident]:
        """Return all residents in use."""
        with self._lock:
            return list(self._residents.values())

    def lookup_record(self, key: str) -> object | None:
        """Return the layer record or resident registered under a layer key or recipe, or None."""
        return self._records.get(key)

    def register_record(self, key: str, record: object) -> object:
        """Register a layer record or resident under `key`, if `key` is not taken yet.

        `key` is a layer key or recipe. Returns the object that is registered now, which may be an
        earlier one.
        """
        with self._lock:
            first = self._records.get(key)
            if first is not None:
                return first
            self._records[key] = record
            return record

    def records(self) -> dict[str, object]:
        """Return all layer records and residents in use, by layer key or recipe."""
        # Not dict(self._records), which looks each key up again after its record may have died.
        with self._lock:
            return dict(self._records.items())

    def packed_keys(self) -> list[str]:
        """Return the layer keys of packed weights, whose bytes cannot be read or hashed."""
        return [
            key
            for key, record in self.records().items()
            if getattr(record, "opaque", None) is not None and getattr(record, "key", "") == key
        ]

    def resident_bytes(self) -> int:
        """Return the size in bytes of all slabs and packed weights in use, each counted once.

        A packed weight counts with the size of the plain weight that was packed.
        """
        slabs = {e.slab.serial: e.slab.nbytes for r in self.residents() for e in r.extents}
        # Several records may lead to one packed copy; weak references to one object are one.
        packed = {
            id(opaque): int(getattr(record, "opaque_bytes", 0))
            for record in self.records().values()
            if (opaque := getattr(record, "opaque", None)) is not None
        }
        return sum(slabs.values()) + sum(packed.values())

    def overhead_bytes(self) -> int:
        """Return an estimate of the registry's own memory in bytes, without the tensors."""
        residents = self.residents()
        return (
            sum(_ENTRY_BYTES + sys.getsizeof(r) + _key_bytes(r.key) for r in residents)
            + sum(_ENTRY_BYTES + sys.getsizeof(key) for key in list(self._records))
            + sys.getsizeof(self._residents)
            + sys.getsizeof(self._records)
        )

    def _renew_lock(self) -> None:
        # A thread that does not exist in the child may have held it.
        self._lock = threading.Lock()


def _key_bytes(key: ResidentKey) -> int:
    return sum(map(sys.getsizeof, (key, key.shape, key.stride, key.digest)))


registry: Final = Registry()
os.register_at_fork(after_in_child=registry._renew_lock)
report.measure_with(registry.overhead_bytes, registry.resident_bytes)
