"""The content of a fused tensor, named part by part.

Loading code fills a fused tensor by writes side by side, mostly whole source tensors. Their digests
are known by then, so the name of the whole is made of them and its bytes are not hashed twice. The
parts follow from the places of the writes: equal bytes written in other parts have another name,
and then nothing is shared by content.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from tensor_dedup.loader.deferred.recipe import COPY, live_writes, needs_base, whole_source
from tensor_dedup.loader.deferred.storage import View, Write

if TYPE_CHECKING:
    from tensor_dedup.loader.checkpoint_io.sources import SourceTensor

_CONTEXT = "tensor-dedup parts v1"


@dataclass(frozen=True, slots=True)
class StorageRange:
    """Bytes `start` to `stop` of a storage; `source` when they are those of one source tensor."""

    start: int
    stop: int
    source: SourceTensor | None


def parts_of(view: View) -> list[StorageRange]:
    """The parts of a view that is the whole of its storage, in order, without gap or overlap."""
    storage, version = view.storage, view.version
    whole = [StorageRange(0, storage.nbytes, whole_source(view))]
    writes = live_writes(storage, version)
    if len(writes) < 2 or needs_base(storage, version):
        return whole
    parts = [_part(write) for write in writes]
    found = sorted((part for part in parts if part is not None), key=lambda part: part.start)
    tiled = all(a.stop == b.start for a, b in itertools.pairwise(found))
    return found if len(found) == len(parts) and tiled else whole


def _part(write: Write) -> StorageRange | None:
    target = write.target
    if not write.overwrites or not target.is_contiguous():
        return None
    start = target.offset * target.dtype.itemsize
    return StorageRange(start, start + target.numel * target.dtype.itemsize, _copied_whole(write))


def _copied_whole(write: Write) -> SourceTensor | None:
    """The source whose bytes, in the same order, this write puts there."""
    value = write.args[1] if write.func is COPY else None
    if not isinstance(value, View) or not value.is_contiguous():
        return None
    same = value.dtype is write.target.dtype and value.shape == write.target.shape
    return whole_source(value) if same else None


def composite_digest(
    view: View, data: memoryview, digest: Callable[[memoryview], str], *, trusted: bool = True
) -> str:
    """Name the bytes `data` of the whole of `view`: their digest when there is one part.

    `digest` hashes what no source's digest covers, and everything when those are not `trusted`.
    """
    names = []
    for part in parts_of(view):
        known = part.source.digest if trusted and part.source is not None else None
        names.append((part.stop - part.start, known or digest(data[part.start : part.stop])))
    if len(names) == 1:
        return names[0][1]
    return "parts:" + blake3(repr(names).encode(), derive_key_context=_CONTEXT).hexdigest()
