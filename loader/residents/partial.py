"""Build a large tensor of which others have parts, and read only the rest: the one algorithm.

A tensor is *known* if it consists of ranges of bytes, its *contents*, whose digests are known, and
these ranges can be read (`KnownTensor`). If *residents* (shared tensors in memory) have equal parts
of it at the same places, these parts are shared. `share_in_part` goes through these steps, for
every kind of memory:

    donors     find residents that may have parts
    pieces     plan which pieces of the tensor are there, and which are missing
    admit      make sure that there is room for the missing pieces
    build      read the missing pieces, and put the tensor together
    publish    let others find the tensor, and the digests of its contents

Kinds of memory differ in the piece: a leaf of 2 MiB in host memory, a block of 16 MiB on a GPU.
`PartialMemory` is what a kind of memory does for these steps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from tensor_dedup.loader.residents.resident import Write
    from tensor_dedup.types import ResidentKey

    Read: TypeAlias = Callable[[int, Sequence[int] | None, Write], None]
    Progress: TypeAlias = Callable[[], None]


class Content(NamedTuple):
    """Bytes `start` to `end` of a tensor in memory, with their `digest`.

    Usually they are the bytes of one tensor of a checkpoint. `leaves` has the digests of these
    bytes in pieces of 2 MiB, the first of which begins at `start`. Each is the digest that the
    piece has by itself, so the digest of the whole does not follow from them. It is empty if they
    are not known.
    """

    start: int
    end: int
    digest: str
    leaves: tuple[str, ...]


class Unit(NamedTuple):
    """Bytes of a tensor that another tensor has or has not: a leaf of a content.

    `content` is the number of the content, and `leaf` that of the leaf in it, or None if the unit
    is the whole content, because the digests of its leaves are not known.
    """

    start: int
    end: int
    content: int
    leaf: int | None


def _uncounted(_number: int, _nbytes: int) -> None:
    """Count nothing."""


@dataclass(frozen=True, slots=True)
class KnownTensor:
    """A tensor whose bytes are known by digest before they are read.

    - `recipe` is the recipe under which its resident is found.
    - `geometry` has its dtype, shape and stride; the digest is ignored.
    - `contents` are the contents that fill it, in order.
    - `read(number, leaves, write)` reads the leaves of content `number` whose numbers are in
      `leaves`, or the whole content if `leaves` is None. It calls `write(piece, offset)`, with the
      offset in the content, from any thread, and returns when everything is written. It raises an
      error if what it reads does not have its digest.
    - `hashed(data)` returns the digest of bytes in host memory, and counts them as hashed.
    - `differs(number, found)` is called if content `number` has the digest `found` and not its own,
      as put together from parts of others. It may raise an error. If it returns, the tensor is not
      shared in part.
    - `fill(number, into, offset)` fills a buffer with bytes of content `number`, from any thread.
      It is None if the contents can only be read by `read`.
    - `counted(number, nbytes)` counts bytes of content `number` as read by `fill` and hashed.
    """

    recipe: str
    geometry: ResidentKey
    contents: Sequence[Content]
    read: Read
    hashed: Callable[[memoryview], str]
    differs: Callable[[int, str], None]
    fill: Callable[[int, memoryview, int], bytes | None] | None = None
    counted: Callable[[int, int], None] = _uncounted

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.contents[-1].end

    def read_units(self, units: Collection[Unit], write: Write) -> None:
        """Read `units` of the tensor, and pass them to `write(piece, offset)`, from any thread.

        `offset` is counted from the beginning of the tensor. Errors of `read` are passed on.
        """
        wanted: defaultdict[int, list[Unit]] = defaultdict(list)
        for unit in units:
            wanted[unit.content].append(unit)
        for number, these in sorted(wanted.items()):
            content = self.contents[number]
            leaves = [unit.leaf for unit in these if unit.leaf is not None]
            some = leaves if 0 < len(leaves) < len(content.leaves) else None
            self.read(number, some, partial(_write_from, write, content.start))

    def is_as_known(self, number: int, found: str) -> bool:
        """Return whether content `number` has the digest `found`; call `differs` if it has not."""
        if found == self.contents[number].digest:
            return True
        self.differs(number, found)
        return False


def _write_from(write: Write, start: int, piece: memoryview, offset: int) -> None:
    write(piece, start + offset)


_Plan = TypeVar("_Plan")
_Held = TypeVar("_Held")


class PartialMemory(Protocol[_Plan, _Held]):
    """An interface to a kind of memory in which tensors can share parts. For one load and thread.

    Residents are of the type `_Held`, and `_Plan` tells which pieces of a tensor are there.
    """

    def donors(self, tensor: KnownTensor) -> Sequence[_Held]:
        """Return residents that may have parts of `tensor`. No tensor data is read."""

    def pieces(self, tensor: KnownTensor, donors: Sequence[_Held]) -> _Plan | None:
        """Return which pieces of `tensor` the `donors` have, found by digest.

        Returns None if none is worth sharing.
        """

    def admit(self, tensor: KnownTensor, plan: _Plan) -> Progress | None:
        """Reserve what the missing pieces of `plan` need, before anything is read.

        Returns None if they cannot be had. Otherwise returns a function that is called now and then
        during reading, from any thread.
        """

    def build(self, tensor: KnownTensor, plan: _Plan, progress: Progress) -> _Held | None:
        """Read the missing pieces of `plan`, and return `tensor`, which nobody else can see yet.

        Each content has its digest then, or the result is None (`KnownTensor.is_as_known`).
        """

    def publish(self, tensor: KnownTensor, built: _Held) -> tuple[_Held, bool] | None:
        """Let others find `built`, and return the resident to use, and whether this call made it.

        If others find another resident with these bytes already, that one is returned. Returns None
        if the tensor cannot be put where others would find it.
        """

    def note_contents(self, resident: _Held, contents: Sequence[Content]) -> None:
        """Register the `contents` of `resident`, so that others find its parts."""

    def release(self) -> None:
        """Give back the donors and what `admit` has reserved and `publish` has not used."""


def share_in_part(
    tensor: KnownTensor,
    memory: PartialMemory[_Plan, _Held],
    accept: Callable[[_Held], bool],
) -> tuple[_Held, bool] | None:
    """Return a resident of `tensor` that shares parts with others, and whether this call made it.

    `accept` gets what was built before anybody else can see it, and returns whether it may be used.
    A resident that this call did not make was not accepted: it was found by digest, like any other.

    Returns None if the tensor is smaller than 8 MiB, if nobody has a part of it that is worth
    sharing, if there is no room, or if it is not accepted. Nothing stays then. Errors of reading
    and of `accept` are passed on.

    Raises:
        SharedMemoryError: There is no memory for the missing pieces.
    """
    if tensor.nbytes < LEAF_SHARED_FROM:
        return None
    try:
        donors = memory.donors(tensor)
        plan = memory.pieces(tensor, donors) if donors else None
        progress = None if plan is None else memory.admit(tensor, plan)
        if plan is None or progress is None:
            return None
        built = memory.build(tensor, plan, progress)
        if built is None or not accept(built):
            return None
        published = memory.publish(tensor, built)
        if published is not None and published[1]:
            memory.note_contents(published[0], tensor.contents)
        return published
    finally:
        memory.release()


def units_of(contents: Sequence[Content]) -> Iterator[Unit]:
    """Yield the units of a tensor that consists of `contents`, in order."""
    for number, (start, end, _, leaves) in enumerate(contents):
        if not leaves:
            yield Unit(start, end, number, None)
        for leaf in range(len(leaves)):
            at = start + leaf * LEAF_BYTES
            yield Unit(at, min(at + LEAF_BYTES, end), number, leaf)


def units_in_common(
    contents: Sequence[Content], units: Sequence[Unit], theirs: Sequence[Content]
) -> list[Unit]:
    """Return those `units` of a tensor that another one has at the same place, found by digest.

    `contents` are those of the tensor, and `theirs` those of the other one.
    """
    by_start = {content.start: content for content in theirs}
    return [
        unit
        for unit in units
        if (other := by_start.get(contents[unit.content].start)) is not None
        and _has(other, contents[unit.content], unit.leaf)
    ]


def _has(theirs: Content, mine: Content, leaf: int | None) -> bool:
    """Return whether two contents have this leaf in common, or None: are equal."""
    if theirs.digest == mine.digest:
        return True
    # A digest is of the size, too: equal leaves are of one size.
    return (
        leaf is not None and leaf < len(theirs.leaves) and theirs.leaves[leaf] == mine.leaves[leaf]
    )
