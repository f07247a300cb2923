"""Remotes with the catalog of many checkpoints, which is written directly.

The checkpoints have the tensors of Qwen2-0.5B in bfloat16. Of ten with one base, one is the base,
four have one layer of their own, three a LoRA merged into two matrices of each layer, and two are
full fine-tunes that take 12 % as deltas. Containers are laid out and listed as a push does it; the
bytes in them, and manifests, are not there.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from tensor_dedup.digest import LEAF_BYTES, combine, digest
from tensor_dedup.remote import layout, loads
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.catalog import (
    Catalog,
    CatalogChange,
    ListedContainer,
    commit,
    listed,
    read_catalog,
    segment_blob,
    with_more,
)
from tensor_dedup.store.format.tables import PLAIN, Record

_HIDDEN, _INNER, _KEYS, _WORDS, _LAYERS = 896, 4864, 128, 151_936, 24
_LAYER: Final = (
    *(2 * _HIDDEN * _HIDDEN, 2 * _HIDDEN * _KEYS, 2 * _HIDDEN * _HIDDEN, 2 * _HIDDEN * _KEYS),
    *(2 * _HIDDEN * _INNER,) * 3,
    *(2 * _HIDDEN, 2 * _KEYS, 2 * _KEYS, 2 * _HIDDEN, 2 * _HIDDEN),
)
_SIZES: Final = (2 * _HIDDEN * _WORDS, *_LAYER * _LAYERS, 2 * _HIDDEN)
_DELTA: Final = 0.12


class _Dice:
    def __init__(self, seed: int) -> None:
        self._dice = np.random.default_rng(seed)

    def record(self, nbytes: int, base: bytes | None = None) -> Record:
        """A piece that is nowhere; a delta if it has a base and is not small."""
        leaves = [self._dice.bytes(32) for _ in range(0, nbytes, LEAF_BYTES)]
        name = bytes.fromhex(combine(nbytes, leaves))
        if base is None or nbytes < LEAF_BYTES:
            return Record(name, 0, nbytes, nbytes, PLAIN, None, b"".join(leaves))
        stored = int(_DELTA * nbytes)
        return Record(name, 0, stored, nbytes, "diff2", base, b"".join(leaves))

    def alike(self, entry: ListedContainer) -> ListedContainer:
        """A container of other pieces, as many and as large."""
        drawn = (self._dice.bytes(len(b)) for b in (entry.name, entry.alone, entry.deltas))
        name, alone, deltas = drawn
        return ListedContainer(name, entry.kind, entry.nbytes, alone, deltas)


def _family(dice: _Dice) -> Iterator[list[ListedContainer]]:
    """The containers that each of ten checkpoints with one base brings."""
    base = [dice.record(nbytes) for nbytes in _SIZES]
    yield _listed(base)
    for _ in range(4):
        yield _listed([dice.record(nbytes) for nbytes in _LAYER])
    for _ in range(3):
        yield _listed([dice.record(2 * _HIDDEN * _HIDDEN) for _ in range(2 * _LAYERS)])
    for _ in range(2):
        yield _listed([dice.record(each.nbytes, each.digest) for each in base])


def _listed(records: Sequence[Record]) -> list[ListedContainer]:
    ordered = sorted(records, key=lambda record: record.base is not None)
    laid_out = loads.laid_out([(record, None) for record in ordered])
    return [listed(load.container, load.table) for load in laid_out]


def add(bucket: Bucket, count: int, *, swept: bool) -> None:
    """Enter `count` more checkpoints, a multiple of ten, in the catalog of a remote.

    It has one segment if it was `swept` since, and else those that pushes leave.
    """
    dice = _Dice(count)
    family = [entry for brought in _family(dice) for entry in brought]
    families = ([dice.alike(entry) for entry in family] for _ in range(count // 10))
    found = read_catalog(bucket)
    assert found is not None
    segments = _segments(found, families, swept)
    names = [_put(bucket, held) for held in segments]
    commit(bucket, found, lambda now: CatalogChange(names, (), now.trash, now.damaged))
    for key in (layout.container_key(entry.container) for held in segments for entry in held):
        if bucket.head(key) is None:
            bucket.put(key, [memoryview(b"")])


def _put(bucket: Bucket, held: Sequence[ListedContainer]) -> bytes:
    """Put a segment; its name."""
    blob = segment_blob(sorted(held, key=lambda entry: entry.name), bytes(8))
    name = digest(blob)
    bucket.put(layout.segment_key(name), [memoryview(blob)])
    return bytes.fromhex(name)


def _segments(
    found: Catalog, families: Iterable[list[ListedContainer]], swept: bool
) -> list[Sequence[ListedContainer]]:
    if swept:
        return [[*found.containers.values(), *(entry for held in families for entry in held)]]
    now = Catalog(segments=dict(found.segments))
    for number, held in enumerate(families):
        kept, more = with_more(now, held)
        segments = {name: now.segments[name] for name in kept}
        now.segments = {**segments, b"%d" % number: more}
    return [*now.segments.values()]
