"""Recipes: canonical, hashable descriptions of how a tensor is computed from source tensors.

A recipe is derived from the log of writes after tracing. Equal recipes give equal bytes, because
the operations are deterministic, and source tensors and constants are named by their digests. Two
different recipes may still give equal bytes, which only a comparison of content shows.

A fused tensor mostly consists of whole source tensors, one beside the other. If their digests are
known, `composite_digest` makes a name for the fused tensor from these digests, without hashing its
bytes. Equal bytes that were written in other pieces get another name, and are not shared by
content.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from blake3 import blake3

from tensor_dedup.digest import digest
from tensor_dedup.loader.checkpoint_io.sources import SourceTensor
from tensor_dedup.loader.deferred.coverage import Coverage
from tensor_dedup.loader.deferred.storage import (
    Const,
    ExpressionKind,
    Reach,
    Target,
    View,
    VirtualStorage,
    Write,
    span_of,
)
from tensor_dedup.loader.not_shared import NotShared

_CONTEXT = "tensor-dedup recipe v1"

_PARTS_CONTEXT = "tensor-dedup parts v1"
_HERE = repr(Target.HERE)
COPY = torch.ops.aten.copy_.default
# What gives a new tensor the elements of others, unchanged if all are of one dtype.
_MOVES = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.stack.default,
}
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


def live_writes(storage: VirtualStorage, version: int) -> list[Write]:
    """Return those of the first `version` writes that determine the bytes of `storage`.

    Writes before the last one that overwrites the whole storage are left out.
    """
    if version == 0:
        return []
    if storage.starts is None:
        storage.starts = [0]
    starts = storage.starts
    for index in range(len(starts) - 1, version):
        write = storage.writes[index]
        hides = write.overwrites and write.target.is_whole()
        starts.append(index if hides else starts[index])
    return storage.writes[starts[version] : version]


def needs_base(storage: VirtualStorage, version: int) -> bool:
    """Return whether a storage's content after `version` writes depends on its initial content.

    Writes like `copy_` only replace bytes, writes like `add_` also read them. The result is False
    if writes of the first kind replace every byte before the first write of the second kind.
    """
    if version == 0:
        return storage.nbytes > 0
    if storage.based is None:
        storage.based = {}
    if version not in storage.based:
        storage.based[version] = not _is_covered(storage, version)
    return storage.based[version]


def _is_covered(storage: VirtualStorage, version: int) -> bool:
    coverage = Coverage(storage.nbytes)
    for write in live_writes(storage, version):
        if not write.overwrites:
            break
        target = write.target
        size = target.dtype.itemsize
        strides = [step * size for step in target.stride]
        coverage.add(target.offset * size, target.shape, strides, size)
    return coverage.complete()


def whole_source(view: View) -> SourceTensor | None:
    """Return the source tensor whose bytes, in the same order, are those of `view`, or None."""
    storage = view.storage
    if not view.is_whole():
        return None
    writes = live_writes(storage, view.version)
    if storage.kind is ExpressionKind.SOURCE and not writes:
        return storage.source
    if len(writes) != 1 or writes[0].func is not COPY:
        return None
    target, value = writes[0].target, writes[0].args[1]
    if not isinstance(value, View) or value.dtype is not target.dtype or not target.is_whole():
        return None
    if (value.shape, value.stride) != (target.shape, target.stride):
        return None
    return whole_source(value)


def only_moves(view: View) -> bool:
    """Return whether the bytes of `view` are moved and filled in, but never computed.

    This is true of a tensor that is whole, fused, stacked, sliced, transposed or padded, and false
    of one that was cast, scaled or added to. The bytes then follow from the recipe alone, whatever
    the settings of the process are.
    """
    for storage, version in reached(view):
        operation = storage.operation
        if operation is not None and needs_base(storage, version):
            dtype = operation.layout.dtype
            if operation.func not in _MOVES or not _all_of(dtype, operation.args):
                return False
        if not all(map(_is_move, live_writes(storage, version))):
            return False
    return True


def _is_move(write: Write) -> bool:
    if write.func is COPY:
        return _all_of(write.target.dtype, write.args[1:2])
    return write.func in _FILLS


def _all_of(dtype: torch.dtype, values: Sequence[Any]) -> bool:
    """Return whether every tensor among `values`, which may hold lists of them, is of `dtype`."""
    for value in values:
        if isinstance(value, (list, tuple)):
            if not _all_of(dtype, value):
                return False
        elif isinstance(value, Const):
            if value.value.dtype is not dtype:
                return False
        elif isinstance(value, View) and value.dtype is not dtype:
            return False
    return True


class RecipeBook:
    """A cache of recipe digests. All sources must have their digests before a recipe is hashed."""

    def __init__(
        self, identity: Callable[[SourceTensor], tuple[object, ...]] = SourceTensor.identity
    ) -> None:
        """Use `identity` to identify source tensors, by default by digest, dtype and shape."""
        self._identity = identity
        self._known: dict[tuple[int, int], str] = {}

    def digest(self, view: View) -> str:
        """Return the digest of the recipe of `view`.

        It identifies the bytes, dtype, shape and stride of the view.
        """
        return _hash(self._view(view))

    def _view(self, view: View) -> tuple[Any, ...]:
        return ("view", self._storage(view.storage, view.version), *_place(view))

    def _storage(self, storage: VirtualStorage, version: int) -> str:
        key = (id(storage), version)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _hash(self._describe(storage, version))
        return known

    def _describe(self, storage: VirtualStorage, version: int) -> tuple[Any, ...]:
        if version == 0 and storage.source is not None and storage.nbytes:  # nearly all there are
            return (storage.nbytes, self._identity(storage.source), ())
        base = self._base(storage) if needs_base(storage, version) else ("none",)
        if version == 0:
            return (storage.nbytes, base, ())
        writes = tuple(self._write(write) for write in _in_order(storage, version))
        return (storage.nbytes, base, writes)

    def _base(self, storage: VirtualStorage) -> tuple[Any, ...]:
        if storage.source is not None:
            return self._identity(storage.source)
        if storage.initial is not None:
            return ("initial", digest(storage.initial.numpy().data))
        operation = storage.operation
        if storage.kind is ExpressionKind.EMPTY or operation is None:
            return ("undefined",)
        call = self._call(operation)
        # Later views are in terms of the layout, which follows from the strides of constants too.
        return ("node", str(operation.func), operation.index, _place(operation.layout), *call)

    def _write(self, write: Write) -> tuple[Any, ...]:
        return (_name(write.func), _place(write.target), *self._call(write))

    def _call(self, call: Any) -> tuple[Any, ...]:
        args = tuple([self._argument(value) for value in call.args])
        if not call.kwargs:
            return (args, ())
        return (args, tuple((key, self._argument(call.kwargs[key])) for key in sorted(call.kwargs)))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, View):
            return self._view(value)
        if value is Target.HERE:
            return _HERE
        if isinstance(value, Const):
            tensor = value.value
            return ("const", value.digest, str(tensor.dtype), tuple(tensor.shape))
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(item) for item in value)
        if isinstance(value, torch.device):
            return "device"  # equal recipes on two devices give equal bytes
        return repr(value)


@functools.cache
def _name(thing: object) -> str:
    """Return an operation or a dtype as text, cached: 45,000 tensors have a handful of them."""
    return str(thing)


def _place(view: View) -> tuple[Any, ...]:
    return (_name(view.dtype), view.shape, view.stride, view.offset)


def _hash(description: tuple[Any, ...]) -> str:
    return blake3(repr(description).encode(), derive_key_context=_CONTEXT).hexdigest()


def sources_of(view: View) -> list[SourceTensor]:
    """Return the distinct source tensors that the bytes of `view` depend on, in recipe order."""
    return [s.source for s, v in reached(view) if s.source is not None and needs_base(s, v)]


def uses_initial(view: View) -> bool:
    """Return whether the bytes of `view` depend on what a constructor left in a parameter."""
    return any(
        storage.kind is ExpressionKind.PARAMETER and needs_base(storage, version)
        for storage, version in reached(view)
    )


def reason_to_keep_private(view: View) -> str | None:
    """Return why other models must not share the bytes of `view`, or None if they may."""
    for storage, version in reached(view):
        if storage.private is not None:
            return storage.private
        if storage.kind is ExpressionKind.EMPTY and needs_base(storage, version):
            return NotShared.NEVER_WRITTEN
    return None


def references(view: View) -> Sequence[View]:
    """Return all views to which the recipe of `view` refers.

    A view to which the recipe refers several times is listed as often.
    """
    return _reached(view).mentioned


def reached(view: View) -> Sequence[tuple[VirtualStorage, int]]:
    """Return every storage to which the recipe of `view` refers, at its version, once, in order."""
    return _reached(view).storages


def _reached(view: View) -> Reach:
    storage, version = view.storage, view.version
    if storage.reached is None:
        storage.reached = {}
    found = storage.reached.get(version)
    if found is None:
        found = storage.reached[version] = _walk(view)
    return found


def _walk(view: View) -> Reach:
    found: dict[tuple[int, int], tuple[VirtualStorage, int]] = {}
    mentioned: list[View] = []
    waiting = [view]
    while waiting:
        current = waiting.pop()
        storage, version = current.storage, current.version
        key = (id(storage), version)
        if key not in found:
            found[key] = (storage, version)
            if version or storage.operation is not None:  # a source as it is mentions nothing
                children = list(_children(storage, version))
                mentioned += children
                waiting += reversed(children)
    return Reach(list(found.values()), mentioned)


def _children(storage: VirtualStorage, version: int) -> Iterator[View]:
    if storage.operation is not None and needs_base(storage, version):
        yield from _views(storage.operation.args)
        yield from _views(tuple(storage.operation.kwargs.values()))
    for write in _in_order(storage, version):
        yield from _views(write.args)
        if write.kwargs:
            yield from _views(tuple(write.kwargs.values()))


def _in_order(storage: VirtualStorage, version: int) -> list[Write]:
    """Return the live writes sorted by place, or as recorded where their order may matter.

    The order of the files of a checkpoint, and of the tensors in them, does not affect the bytes.
    What is written is a snapshot, so writes that each replace different bytes can be reordered.
    """
    writes = live_writes(storage, version)
    if len(writes) < 2:
        return writes
    if storage.ordered is None:
        storage.ordered = {}
    found = storage.ordered.get(version)
    if found is None:
        found = storage.ordered[version] = _by_place(writes)
    return found


def _by_place(writes: list[Write]) -> list[Write]:
    if not all(write.overwrites for write in writes):
        return writes
    placed = sorted(((*span_of(write.target), n) for n, write in enumerate(writes)))
    if any(first[1] > second[0] for first, second in itertools.pairwise(placed)):
        return writes
    return [writes[number] for _, _, number in placed]


def _views(value: Any) -> Iterator[View]:
    if isinstance(value, View):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _views(item)


def initial_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage as a flat uint8 tensor, without a copy."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage)


def drop_what_is_overwritten(views: Sequence[View]) -> None:
    """Free the initial content of those storages of `views` that are overwritten before any use."""
    mentioned = {id(mention.storage) for view in views for mention in references(view)}
    for view in views:
        storage = view.storage
        if id(storage) not in mentioned and not needs_base(storage, view.version):
            storage.initial = None


class StorageRange(NamedTuple):
    """Bytes `start` to `stop` of a storage.

    `source` is the source tensor whose bytes these are, or None. `zeros` is True if they are zeros,
    for example the padding of a vocabulary.
    """

    start: int
    stop: int
    source: SourceTensor | None
    zeros: bool = False


def parts_of(view: View) -> list[StorageRange]:
    """Divide the storage of `view` into the ranges that single writes fill; return them in order.

    `view` must cover its whole storage. The storage is divided only if its writes fill it without
    gap or overlap, and each of them is contiguous and ignores the old bytes. Otherwise the result
    is one range, the whole storage.
    """
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
    stop = start + target.numel * target.dtype.itemsize
    return StorageRange(start, stop, _copied_whole(write), _is_zeros(write))


def _is_zeros(write: Write) -> bool:
    """Return whether a write that overwrites its target leaves nothing but zero bytes there."""
    if write.func is torch.ops.aten.fill_.Scalar:
        return write.args[1:] == (0,) and isinstance(write.args[1], int)
    return write.func is torch.ops.aten.zero_.default


def _copied_whole(write: Write) -> SourceTensor | None:
    """Return the source whose bytes, in the same order, this write copies, or None."""
    value = write.args[1] if write.func is COPY else None
    if not isinstance(value, View) or not value.is_contiguous():
        return None
    same = value.dtype is write.target.dtype and value.shape == write.target.shape
    return whole_source(value) if same else None


def composite_digest(
    view: View, data: memoryview, digest: Callable[[memoryview], str], *, trusted: bool = True
) -> str:
    """Return a name for the content of `view`, made from the sizes and digests of its parts.

    Each part is a range that one write fills (see `parts_of`). `data` has the bytes of `view`. The
    function `digest` hashes the parts. With `trusted`, a part that is a whole source tensor with a
    known digest is not hashed again. If there is only one part, its digest is the name.
    """
    names = []
    for part in parts_of(view):
        known = part.source.digest if trusted and part.source is not None else None
        names.append((part.stop - part.start, known or digest(data[part.start : part.stop])))
    if len(names) == 1:
        return names[0][1]
    return "parts:" + blake3(repr(names).encode(), derive_key_context=_PARTS_CONTEXT).hexdigest()
