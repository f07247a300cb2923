"""Fill new slabs of a GPU with tensors, many at once.

A slab is a piece of GPU memory that holds one or more tensors. It belongs to this process or to a
memory manager. All tensors of a call are on their way to the GPU at the same time, and the call
waits for the GPU once, at its end.
"""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from tensor_dedup.digest import combine
from tensor_dedup.loader.cuda.residents import DeviceContent
from tensor_dedup.loader.cuda.transfers import HostContent, awaited
from tensor_dedup.memory_manager.errors import NoMemoryError
from tensor_dedup.memory_manager.protocol.limits import MAX_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tensor_dedup.loader.cuda.gpu import Gpu
    from tensor_dedup.loader.cuda.openers import MappedExtent, Opener
    from tensor_dedup.loader.cuda.residents import DeviceResident, Write
    from tensor_dedup.loader.cuda.transfers import DeviceTransfer
    from tensor_dedup.types import ResidentKey

# A slab is a handle of the driver, in whole granules of 2 MiB, and is freed whole: tensors from the
# first size on have their own, smaller ones lie in one together, and larger ones in `blocks`.
OWN_SLAB_BYTES: Final = 16 << 20
# Smaller ones are norms and biases, of which a step of a training changes few, while it changes all
# matrices: apart, so that the former step's matrices do not stay with them.
TINY_BYTES: Final = 128 << 10
BATCH_BYTES: Final = 64 << 20
# What is on its way at the same time. A tensor whose digest is not known yet needs so much memory
# beside what others have of it, or the size of its slab if that is larger.
ROUND_BYTES: Final = 256 << 20


@dataclass(eq=False, slots=True)
class SlabTensor:
    """A tensor, or a block of one, that is to be resident on a GPU. For one thread.

    - `content` is the tensor in host memory, files or GPU memory, or a function that writes all of
      it to an address.
    - `start` and `end` are the bytes of `content` that are meant.
    - `key` is the resident key. Its digest is "" until it is known.
    - `resident` is None until there is one, and `written` says that it was made of `content`.
    """

    content: HostContent | DeviceContent | Write
    key: ResidentKey
    start: int
    end: int
    is_block: bool = False
    resident: DeviceResident | None = None
    written: bool = False

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.end - self.start

    def learn(self) -> bool:
        """Complete the key of a tensor that was uploaded; return whether its digest was unknown."""
        if self.key.digest or not isinstance(self.content, HostContent):
            return False
        digest = combine(self.nbytes, self.content.leaves_of(self.start, self.end))
        self.key = replace(self.key, digest=digest)
        return True

    def begin(self, gpu: Gpu, address: int, begun: list[DeviceTransfer]) -> str:
        """Begin to write it to an address; add a transfer to `begun` if it is to be waited for.

        Returns what a function that is the content returned, or "".
        """
        content = self.content
        if isinstance(content, HostContent):
            begun.append(gpu.transfers.upload_range(address, content, self.start, self.end))
            return ""
        if isinstance(content, DeviceContent):
            content = content.part(self.start, self.end)
        return content(address) or ""


class NewSlab(Protocol):
    """An interface for a slab that this process is to fill. For one thread."""

    @property
    def opener(self) -> Opener:
        """The opener that maps the slab."""

    @property
    def extent(self) -> MappedExtent:
        """The slab's descriptor and size."""

    @property
    def offsets(self) -> Sequence[int]:
        """The offset of each tensor in the slab."""

    def progress(self) -> object:
        """Tell who waits for the slab that this process is still working. Never fails."""

    def seal(self, keys: Sequence[ResidentKey]) -> list[tuple[DeviceResident, bool]] | None:
        """Make residents of the tensors, which were written and have these `keys`.

        Returns, in order, each resident and whether it lies in this slab: another process may have
        put equal bytes first. Returns None if the slab cannot be used any more.
        """

    def abandon(self) -> None:
        """Free the slab, unless it was sealed. No mapping of it may be left."""


def write_slabs(
    gpu: Gpu,
    opener: Opener,
    slabs: Sequence[tuple[MappedExtent, Sequence[int], Sequence[SlabTensor]]],
    progress: Callable[[], object] | None = None,
) -> list[list[str]]:
    """Write tensors to their offsets in slabs, which `opener` maps.

    Each slab is given with the offsets of its tensors. Returns for each slab what functions that
    are contents returned, with "" for None and for all other tensors. `progress` is called now and
    then. When this returns or raises, the GPU has ended all copies, and the slabs are unmapped.

    Raises:
        BackendError: The driver refuses.
        ChangedFileError, OSError: A file cannot be read.
    """
    from_host = all(isinstance(one.content, HostContent) for *_, these in slabs for one in these)
    # What torch copies on the GPU goes in the order of torch's streams.
    fence = gpu.transfers.fence if from_host else gpu.driver.synchronize
    with (
        gpu.writable([[extent] for extent, *_ in slabs], opener, fence) as addresses,
        awaited(progress) as begun,
    ):
        return [
            [
                each.begin(gpu, address + offset, begun)
                for offset, each in zip(offsets, these, strict=True)
            ]
            for address, (_, offsets, these) in zip(addresses, slabs, strict=True)
        ]


class Look(Protocol):
    """A function that sets `resident` of those tensors of which there is one, by their keys."""

    def __call__(self, tensors: Sequence[SlabTensor], /) -> object: ...


def make_resident(
    gpu: Gpu,
    tensors: Sequence[SlabTensor],
    memories: Sequence[Callable[[Sequence[int]], NewSlab | None]],
    look: Look,
) -> None:
    """Make all tensors resident that are not, and set `resident` and `written` of each.

    Blocks and large tensors get a slab each, and small ones share slabs. Slabs are filled in rounds
    of 256 MiB. Before a digest is known, a tensor is written; if `look` then finds a resident with
    its bytes, that one is used, and the slab is freed.

    `memories` are functions that allocate a slab for tensors of given sizes, or return None. The
    second is used for what the first does not take, and so on. The last must take everything.

    Raises:
        BackendError: There is no room, or the driver refuses.
        ChangedFileError, OSError: A file cannot be read.
    """
    first: dict[ResidentKey, SlabTensor] = {}
    missing = []
    for each in tensors:
        if each.resident is None and (
            not each.key.digest or first.setdefault(each.key, each) is each
        ):
            missing.append(each)
    for slabs in rounds(slabs_of(missing), slab_bytes):
        for open_slab in memories:
            slabs = _write_round(gpu, slabs, open_slab, look)  # what is left
    for each in tensors:
        if each.resident is None:  # as another one that was wanted
            each.resident = first[each.key].resident


def _write_round(
    gpu: Gpu,
    slabs: Sequence[list[SlabTensor]],
    open_slab: Callable[[Sequence[int]], NewSlab | None],
    look: Look,
) -> list[list[SlabTensor]]:
    """Write these slabs at the same time, and return those that this memory did not take."""
    with ExitStack() as stack:

        def opened(tensors: list[SlabTensor]) -> NewSlab | None:
            slab = open_slab([each.nbytes for each in tensors])
            if slab is not None:
                stack.callback(slab.abandon)
            return slab

        new = [(opened(tensors), tensors) for tensors in slabs]
        written = [(slab, tensors) for slab, tensors in new if slab is not None]
        rest = [tensors for slab, tensors in new if slab is None]
        if not written:
            return rest
        places = [(slab.extent, slab.offsets, tensors) for slab, tensors in written]
        write_slabs(
            gpu, written[0][0].opener, places, lambda: [slab.progress() for slab, _ in written]
        )
        look([each for _, tensors in written for each in tensors if each.learn()])
        wanted = _without_found(gpu, written, opened)
        return rest + [tensors for slab, tensors in wanted if not _sealed(slab, tensors)]


_Filled = tuple[NewSlab, list[SlabTensor]]


def _without_found(
    gpu: Gpu, written: Sequence[_Filled], opened: Callable[[list[SlabTensor]], NewSlab | None]
) -> list[_Filled]:
    """Return slabs with what was written and has no resident, without those that were found.

    A slab is freed whole, so what is left of slabs that are not needed whole is copied to others.
    """
    counts = [sum(each.resident is None for each in these) for _, these in written]
    whole = [one for one, count in zip(written, counts, strict=True) if count == len(one[1])]
    mixed = [one for one, count in zip(written, counts, strict=True) if 0 < count < len(one[1])]
    if not mixed:
        return whole
    opener = mixed[0][0].opener
    moving: dict[SlabTensor, SlabTensor] = {}
    with gpu.writable([[slab.extent] for slab, _ in mixed], opener, _nothing) as addresses:
        for address, (slab, these) in zip(addresses, mixed, strict=True):
            for offset, each in zip(slab.offsets, these, strict=True):
                if each.resident is None:
                    copy = partial(_copy, gpu, address + offset, each.nbytes)
                    moving[each] = replace(each, content=copy)
        try:
            places = [(opened(these), these) for these in slabs_of([*moving])]
        except NoMemoryError:
            places = []
        moved = [(slab, these) for slab, these in places if slab is not None]
        if len(moved) < len(places) or not places:
            return [*whole, *mixed]  # no room for both: they keep what others have, too
        write_slabs(
            gpu,
            opener,
            [(slab.extent, slab.offsets, [moving[e] for e in these]) for slab, these in moved],
        )
    return [*whole, *moved]


def _copy(gpu: Gpu, source: int, nbytes: int, address: int) -> None:
    gpu.driver.copy(address, source, nbytes)


def _nothing() -> None:
    """Do nothing."""


def _sealed(new: NewSlab, tensors: Sequence[SlabTensor]) -> bool:
    """Make residents of the tensors of a slab; return False if it cannot be used."""
    made = new.seal([each.key for each in tensors])
    if made is None:
        return False
    for each, (resident, written) in zip(tensors, made, strict=True):
        if each.resident is None:
            each.resident, each.written = resident, written
    return True


class _Sized(Protocol):
    """An interface for a tensor that is to lie in a slab."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""


_T = TypeVar("_T")
_Tensor = TypeVar("_Tensor", bound=_Sized)


def slabs_of(tensors: Iterable[_Tensor]) -> Iterator[list[_Tensor]]:
    """Group tensors into slabs: blocks and large tensors alone, small and tiny ones together."""

    def is_alone(each: _Tensor) -> bool:
        return each.nbytes >= OWN_SLAB_BYTES or (isinstance(each, SlabTensor) and each.is_block)

    every = list(tensors)
    tiny = [each for each in every if each.nbytes < TINY_BYTES and not is_alone(each)]
    rest = [each for each in every if each.nbytes >= TINY_BYTES or is_alone(each)]
    for group in (tiny, rest):
        # An engine that wakes reserves a layer key for each tensor of a slab, all at once.
        yield from slab_batches(group, lambda each: each.nbytes, is_alone, MAX_KEYS)


def slab_batches(
    items: Iterable[_T],
    nbytes: Callable[[_T], int],
    is_alone: Callable[[_T], bool],
    most: float = math.inf,
) -> Iterator[list[_T]]:
    """Group `items` into batches, each for one slab, and yield the batches.

    `nbytes` returns the size of an item in bytes, and `is_alone` whether it gets a slab by itself.
    A batch has at most `most` items. `items` is only read as far as the next batch needs.
    """
    batch: list[_T] = []
    size = 0
    for item in items:
        if is_alone(item):
            yield [item]
            continue
        batch.append(item)
        size += nbytes(item)
        if size >= BATCH_BYTES or len(batch) >= most:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def rounds(
    items: Iterable[_T], nbytes: Callable[[_T], int], most: int = sys.maxsize
) -> Iterator[list[_T]]:
    """Group items into rounds of at most ROUND_BYTES, or of one larger item, and at most `most`.

    `nbytes` returns the size of an item.
    """
    found: list[_T] = []
    size = 0
    for item in items:
        new = nbytes(item)
        if found and (size + new > ROUND_BYTES or len(found) == most):
            yield found
            found, size = [], 0
        found.append(item)
        size += new
    if found:
        yield found


def slab_bytes(tensors: Iterable[_Tensor]) -> int:
    """Return the number of bytes that tensors of one slab have."""
    return sum(each.nbytes for each in tensors)
