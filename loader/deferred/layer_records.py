"""Layer records: what a layer key leads to, and how its sources are compared with others.

A record is held by the layers that use it; every table of records is weak.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensor_dedup.errors import StoreError, TensorDedupError
from tensor_dedup.loader.checkpoint_io.hints import FileIdentity
from tensor_dedup.loader.deferred.recipe import RecipeBook
from tensor_dedup.loader.residents.registry import RECORD as RECORD

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence
    from pathlib import Path

    from tensor_dedup.loader.checkpoint_io.sources import Read, Reread, SourceTensor
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.residents.resident import Resident

_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Where the source tensor behind a record was read: the file, its identity then, a byte range.

    `reread` reads a tensor that does not lie in a file of its own.
    """

    path: Path
    identity: FileIdentity
    start: int
    nbytes: int
    reread: Reread | None = None

    @classmethod
    def of(cls, source: SourceTensor) -> SourceLocation:
        """Return the location of an open source tensor."""
        file, spec = source.file, source.spec
        return cls(file.path, file.identity, spec.start, spec.nbytes, file.reread(spec))


@dataclass(eq=False, slots=True, weakref_slot=True)
class LayerRecord:
    """The final tensors of one layer, and what its processing set beside them.

    `residents` maps the name of each parameter to its resident and the parameter's class. `opaque`
    is a packed handler, which cannot be mapped or written: it is shared as the object it is and
    referenced weakly, because it holds the record; both end when the last layer drops it, also when
    a reload packs anew. `opaque_bytes` is the size of the plain weight it was packed from, and
    `plain_name` that weight's digest just before. `aliases` are records of equal bytes made by
    other recipes, with origins of their own; they live as long as this one.
    """

    key: str
    preimage: str
    residents: dict[str, tuple[Resident, type]] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    opaque: weakref.ref[Any] | None = None
    opaque_bytes: int = 0
    plain_name: str | None = None
    structure: str = ""  # the recipes with their sources numbered instead of named
    origins: tuple[SourceLocation, ...] = ()
    aliases: list[LayerRecord] = field(default_factory=list)


class OriginGoneError(TensorDedupError):
    """The source of a record is gone or has changed, so there is nothing to compare with."""


def same_source_bytes(
    mine: Sequence[SourceTensor], donor: Sequence[SourceLocation]
) -> tuple[bool, int]:
    """Compare sources byte by byte with those of a record; return the result and the bytes read.

    Raises:
        OriginGoneError: A file behind the record is gone or has changed since.
    """
    if len(mine) != len(donor):
        return False, 0
    read = 0
    for source, origin in zip(mine, donor, strict=True):
        equal, count = _same_range(source, origin)
        read += count
        if not equal:
            return False, read
    return True, read


def _same_range(source: SourceTensor, origin: SourceLocation) -> tuple[bool, int]:
    if source.spec.nbytes != origin.nbytes:
        return False, 0
    try:
        with (origin.reread or _by_path(origin))() as theirs:
            return _compare(source, theirs)
    except (OSError, StoreError) as error:
        raise OriginGoneError(f"{source.place}: nothing to compare with ({error})") from error


def _by_path(origin: SourceLocation) -> Reread:
    @contextmanager
    def opened() -> Iterator[Read]:
        fd = os.open(origin.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(fd, origin)
            yield lambda at, size: os.pread(fd, size, origin.start + at)
            _check(fd, origin)
        finally:
            os.close(fd)

    return opened


def _check(fd: int, origin: SourceLocation) -> None:
    if FileIdentity.of(fd) != origin.identity:
        raise OriginGoneError(f"{origin.path} changed since it was loaded")


def _compare(source: SourceTensor, read: Read) -> tuple[bool, int]:
    count = 0
    for offset in range(0, source.spec.nbytes, _CHUNK):
        size = min(_CHUNK, source.spec.nbytes - offset)
        theirs = read(offset, size)
        ours = source.file.read_range(source.spec.start + offset, size)
        count += len(theirs) + len(ours)
        if theirs != ours or len(ours) != size:
            return False, count
    return True, count


def structure_of(parameters: Sequence[DeferredParameter]) -> tuple[str, tuple[SourceLocation, ...]]:
    """Return the recipes with sources numbered instead of named, and where the sources lie."""
    sources = distinct_sources(parameters)
    numbers = {id(source): number for number, source in enumerate(sources)}
    book = RecipeBook(lambda source: ("source", numbers[id(source)], source.spec.dtype))
    names = [book.digest(each.view) for each in parameters if each.view is not None]
    return " ".join(names), tuple(SourceLocation.of(source) for source in sources)


def distinct_sources(parameters: Sequence[DeferredParameter]) -> list[SourceTensor]:
    """Return the source tensors of these parameters in order, without repetitions."""
    return list({id(s): s for each in parameters for s in each.sources}.values())
