"""What tests leave: residents, and their memory. And a gc.collect that collects.

An engine that vLLM keeps until the next is made may go during a later test. So what is left is
compared with what was there before by `beyond`, and not by counting.
"""

import gc
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import kernel
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.types import ResidentKey


@dataclass(frozen=True)
class Remains:
    """Residents and layer records by key; mappings and descriptors of slabs by the slab."""

    residents: frozenset[tuple[ResidentKey, int]]
    records: frozenset[str]
    mappings: Counter[str]
    descriptors: Counter[str]

    def beyond(self, before: "Remains") -> list[object]:
        """What is here and was not there before."""
        return [
            *(self.residents - before.residents),
            *(self.records - before.records),
            *(self.mappings - before.mappings),
            *(self.descriptors - before.descriptors),
        ]


def now() -> Remains:
    """What there is when the garbage is gone."""
    gc.collect()
    residents = frozenset((each.key, copy) for copy, each in registry.entries())
    records = frozenset(registry.records())
    return Remains(residents, records, kernel.mapped_slabs(), kernel.open_slabs())


class _Collections:
    """Counts the collections that each thread has made."""

    def __init__(self) -> None:
        self._collect = gc.collect
        self._made: Counter[int] = Counter()
        self._under_way: int | None = None

    def heard(self, phase: str, _info: dict[str, Any]) -> None:
        thread = threading.get_ident()
        self._under_way = thread if phase == "start" else None
        self._made[thread] += phase == "stop"

    def collect(self, generation: int = 2) -> int:
        """As gc.collect, which does nothing while another thread is collecting.

        What frees memory lets other threads run, so a test may ask for a collection just then.
        """
        thread = threading.get_ident()
        if self._under_way == thread:  # asked for by what is being collected
            return 0
        before = self._made[thread]
        found = 0
        found = self._collect(generation)
        while self._made[thread] == before:
            time.sleep(0.001)
            found += self._collect(generation)
        return found


def collect_surely() -> None:
    """Replace gc.collect in this process by one that has collected when it returns."""
    collections = _Collections()
    gc.callbacks.append(collections.heard)
    gc.collect = collections.collect
