"""Let a load read, hash and remember only the parts of source tensors that it uses.

A tensor-parallel rank uses some rows or columns of most of its source tensors. Such a part then is
a source tensor of its own, with its own digest, so no rank hashes what only others use.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, NamedTuple

from tensor_dedup.loader.checkpoint_io.sources import Columns
from tensor_dedup.loader.deferred.recipe import reached, references
from tensor_dedup.loader.deferred.storage import ExpressionKind, VirtualStorage
from tensor_dedup.loader.torch_dtypes import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.loader.checkpoint_io.sources import SourceTensor
    from tensor_dedup.loader.deferred.storage import View


class _Part(NamedTuple):
    """A part of a source tensor: `nbytes` bytes from its byte `start` on, or columns from there.

    Two parts of one kind are disjoint if `low` to `high` are.
    """

    low: int
    high: int
    start: int
    nbytes: int
    columns: Columns | None


def narrow_sources(views: Sequence[View]) -> None:
    """Let the recipes of `views` refer to parts of source tensors where they use nothing else.

    A part is a range of bytes, or the same columns of all rows. A source tensor is left as it is in
    these cases:

    - A recipe uses all of it, parts that overlap or are of both kinds, or any other elements.
    - One of `views` is a view of it whose strides have gaps. The parameter has the same strides.
    - It was read already.
    - Its file cannot give a part a digest of its own (`SourceFile.has_parts`).

    Call this once, for all views of a load, before anything else is asked about their recipes.
    """
    kept = {id(view.storage) for view in views if view.stride != _packed(view.shape)}
    used: dict[int, list[View]] = {}
    for mention in itertools.chain(views, *map(references, views)):
        if mention.storage.source is not None and id(mention.storage) not in kept:
            used.setdefault(id(mention.storage), []).append(mention)
    narrowed = [_narrow(mentions[0].storage, mentions) for mentions in used.values()]
    if any(narrowed):
        for storage in [storage for view in views for storage, _ in reached(view)]:
            storage.reached = None


def _narrow(storage: VirtualStorage, mentions: Sequence[View]) -> bool:
    source = storage.source
    assert source is not None
    if not _may_have_parts(storage, source, mentions):
        return False
    shapes: dict[_Part, tuple[int, ...]] = {}
    places: list[tuple[View, _Part]] = []
    for mention in mentions:
        place = _part(mention, source)
        if place is None:
            return False
        places.append((mention, place))
        shapes.setdefault(place, mention.shape)
    found = sorted(shapes)
    if any(a.high > b.low for a, b in itertools.pairwise(found)):
        return False
    if len({part.columns is None for part in found}) > 1:
        return False
    if sum(part.nbytes for part in found) >= storage.nbytes:
        return False
    parts: dict[_Part, VirtualStorage] = {}
    for part in found:
        made = source.file.part(source, part.start, part.nbytes, shapes[part], part.columns)
        parts[part] = VirtualStorage(
            ExpressionKind.SOURCE, part.nbytes, storage.untyped, source=made
        )
    for mention, part in places:
        mention.storage, mention.offset = parts[part], 0
        mention.stride = _packed(mention.shape)
    return True


def _may_have_parts(
    storage: VirtualStorage, source: SourceTensor, mentions: Sequence[View]
) -> bool:
    """Return False if `source` is left as it is, whatever parts there may be."""
    if any(each.numel * each.dtype.itemsize == storage.nbytes for each in mentions):
        return False  # nearly all there are without ranks
    was_read = source.digest is not None and not source.hinted
    return not storage.writes and not was_read and source.file.has_parts(source)


def _part(view: View, source: SourceTensor) -> _Part | None:
    """Return the part of `source` that `view` consists of, or None."""
    if not view.numel or view.dtype is not torch_dtype(source.spec.dtype):
        return None
    size = view.dtype.itemsize
    start, nbytes = view.offset * size, view.numel * size
    if view.is_contiguous():
        return _Part(start, start + nbytes, start, nbytes, None)
    shape = source.spec.shape
    if len(shape) < 2 or view.shape[:-1] != shape[:-1] or view.stride != _packed(shape):
        return None
    width, run = shape[-1], view.shape[-1] * size
    if start + run > width * size:
        return None
    return _Part(start, start + run, start, nbytes, Columns(run, width * size))


def _packed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    strides = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(strides)[::-1] if shape else ()
