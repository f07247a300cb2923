"""Data types for deferred tensors, whose operations are recorded instead of executed.

A deferred tensor is a meta tensor and is identified by its storage. Writes into a storage are
recorded, and so are operations that create a new storage. Views are not recorded, because dtype,
shape, stride and offset describe them fully.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tensor_dedup.digest import digest
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.torch_dtypes import torch_dtype

if TYPE_CHECKING:
    from tensor_dedup.loader.checkpoint_io.sources import Placed, SourceTensor


class ExpressionKind(enum.Enum):
    """The origin of a storage's initial content."""

    SOURCE = "source"  # the tensor of a checkpoint, as it is in the file
    PARAMETER = "parameter"  # what the model's constructor left there
    NODE = "node"  # the result of an operation
    EMPTY = "empty"  # nothing yet: torch.empty and its kin


class Target(enum.Enum):
    """A placeholder in a recorded write: `HERE` stands for the tensor that is written to."""

    HERE = 0


class Const:
    """A copy of a real tensor that was an argument of a recorded operation, and its digest.

    Recipes name the tensor by the digest.
    """

    __slots__ = ("digest", "value")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.value = tensor.detach().clone()
        self.digest = digest(byte_view(self.value.contiguous()).numpy().data)


# Not frozen, here and below: a frozen dataclass takes three times as long to make, and tracing
# makes three for every source tensor. Nobody changes one.
@dataclass(eq=False, slots=True)
class View:
    """A view of a storage as it was after the storage's first `version` writes.

    `shape`, `stride` and `offset` are in elements of `dtype`.
    """

    storage: VirtualStorage
    version: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def is_whole(self) -> bool:
        """Return whether the view covers every byte of its storage exactly once."""
        whole = self.numel * self.dtype.itemsize == self.storage.nbytes
        return whole and self.offset == 0 and _is_packed(self.shape, self.stride)

    def is_contiguous(self) -> bool:
        """Return whether the view is contiguous in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True


@dataclass(eq=False, slots=True)
class Write:
    """One recorded in-place operation on `target`.

    `args` and `kwargs` are the operation's arguments. In place of the target they have
    `Target.HERE`, and in place of any other tensor a `View` or `Const`.
    """

    func: torch._ops.OpOverload
    target: View
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    overwrites: bool  # the old content of the target does not matter


@dataclass(eq=False, slots=True)
class Operation:
    """A recorded operation whose output is the initial content of a new storage.

    `index` tells which output it is, if the operation has several. `layout` is the output as a view
    of the storage.
    """

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int
    layout: View


@dataclass(eq=False, slots=True)
class VirtualStorage:
    """The storage of a deferred tensor: its initial content and the log of writes into it.

    `untyped` is the meta storage. It is kept alive while tracing, because its address identifies
    the deferred storage.
    """

    kind: ExpressionKind
    nbytes: int
    untyped: torch.UntypedStorage
    source: SourceTensor | None = None
    initial: torch.Tensor | None = None  # PARAMETER: the constructor's tensor, as bytes
    operation: Operation | None = None
    writes: list[Write] = field(default_factory=list)
    private: str | None = None  # why it must not be shared
    # What recipe.py found out about the first so many writes: they never change.
    starts: list[int] | None = None
    based: dict[int, bool] | None = None
    reached: dict[int, Reach] | None = None
    ordered: dict[int, list[Write]] | None = None

    def view(self, tensor: torch.Tensor) -> View:
        """Return a view that describes `tensor` after the writes that were recorded until now.

        `tensor` is a meta tensor over this storage.
        """
        return View(
            self,
            len(self.writes),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )


class Reach(NamedTuple):
    """The storages and views to which a recipe refers, in the recipe's order.

    `storages` has pairs (storage, version), each once. The recipe uses the storage as it was after
    its first `version` writes. `mentioned` lists a view again for each time that the recipe refers
    to it.
    """

    storages: list[tuple[VirtualStorage, int]]
    mentioned: list[View]


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 tensor, without a copy."""
    # Not reshape(-1): one element is contiguous whatever its stride, and would keep it.
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def as_view(flat: torch.Tensor, view: View) -> torch.Tensor:
    """Return a real tensor over `flat` with the dtype, shape, stride and offset of `view`.

    `flat` has the bytes of the view's storage (1-d, uint8).
    """
    usable = flat.numel() - flat.numel() % view.dtype.itemsize
    typed = flat[:usable].view(view.dtype)
    return torch.as_strided(typed, view.shape, view.stride, typed.storage_offset() + view.offset)


def within(source: torch.Tensor, place: Placed) -> torch.Tensor:
    """Return the tensor that lies at `place` in the bytes of `source`, as a view of `source`.

    In files of `torch.save`, the bytes of one source tensor may hold several tensors. `source` is
    the contiguous, deferred tensor that stands for all these bytes.

    Raises:
        UnsupportedError: The tensor is stored conjugated or negated.
    """
    if place.lazy:
        raise UnsupportedError(
            f"{place.name} is stored conjugated or negated; save it as it is", tensor=place.name
        )
    dtype = torch_dtype(place.dtype)
    count = source.nbytes - place.start
    count -= count % dtype.itemsize
    flat = source.view(-1).view(torch.uint8)[place.start : place.start + count].view(dtype)
    return flat.as_strided(place.shape, place.stride, flat.storage_offset())


def span_of(view: View) -> tuple[int, int]:
    """Return the byte range (start, stop) from the first to the last element of `view`.

    The positions are in bytes from the beginning of the storage.
    """
    last = sum((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
    itemsize = view.dtype.itemsize
    return view.offset * itemsize, (view.offset + last + 1) * itemsize


def _is_packed(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= size
    return True
