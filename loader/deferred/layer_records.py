"""Layer records: the processed tensors and attributes of a layer, found by its layer key.

The layers that use a record keep it alive. Tables refer to records weakly. To check that a record
fits a new layer, the source tensors of both can be compared byte by byte.
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

    from tensor_dedup.loader.checkpoint_io.sources import Columns, Read, Reread, SourceTensor
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.residents.resident import Resident

_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """The place from which a source tensor was read: file, identity of the file, and byte range.

    With `columns`, `start` is the first byte of these columns, and `nbytes` the size of all. If the
    tensor was read from a store, `reread` opens it for reading again. Otherwise `reread` is None,
    and the tensor lies in the file at `path`.
    """

    path: Path
    identity: FileIdentity
    start: int
    nbytes: int
    reread: Reread | None = None
    columns: Columns | None = None

    @classmethod
    def of(cls, source: SourceTensor) -> SourceLocation:
        """Return the location of `source`, a source tensor whose file is open."""
        file, spec = source.file, source.spec
        again = file.reread(spec)
        return cls(file.path, file.identity, spec.start, spec.nbytes, again, source.columns)

    def read(self, fd: int, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from byte `offset` on, of the file that is open as `fd`.

        At the end of the file there are fewer.
        """
        if self.columns is None:
            return os.pread(fd, nbytes, self.start + offset)
        data = bytearray(nbytes)
        count = self.columns.gather(
            memoryview(data), offset, lambda parts, at, _: os.preadv(fd, parts, self.start + at)
        )
        return bytes(data[:count])


@dataclass(eq=False, slots=True, weakref_slot=True)
class LayerRecord:
    """The result of processing one layer: its final tensors, and the attributes that were set.

    - `key` and `preimage` are the layer key: its digest, and the text that was hashed.
    - `residents` maps the name of each parameter to its resident (the shared tensor) and the
      parameter's class.
    - `opaque` is a weak reference to the object that holds a packed weight. Packed weights cannot
      be mapped, so layers share this object instead. The object keeps this record alive.
    - `opaque_bytes` and `plain_name` are the size and the digest of the weight before packing.
    - `origins` are the places from which the source tensors were read.
    - `aliases` are records with other layer keys and the same `opaque`. This record keeps them
      alive.
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
    """A source file of a record is gone or has changed, so the record cannot be compared."""


def same_source_bytes(
    mine: Sequence[SourceTensor], donor: Sequence[SourceLocation]
) -> tuple[bool, int]:
    """Compare the source tensors of a new layer byte by byte with those of a layer record.

    `mine` are the tensors of the new layer, and `donor` has the places of the record's tensors.
    Returns whether all are equal, and the number of bytes read. The comparison ends at the first
    difference.

    Raises:
        OriginGoneError: A source file of the record is gone or has changed.
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
            yield lambda at, size: origin.read(fd, at, size)
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
        ours = source.read(offset, size)
        count += len(theirs) + len(ours)
        if theirs != ours or len(ours) != size:
            return False, count
    return True, count


def structure_of(parameters: Sequence[DeferredParameter]) -> tuple[str, tuple[SourceLocation, ...]]:
    """Return a text that tells how `parameters` are computed, and the places of their sources.

    Two layers that compute their tensors in the same way have equal texts, even if they read other
    source tensors. The places are in the order in which the parameters first use the sources.
    """
    sources = distinct_sources(parameters)
    numbers = {id(source): number for number, source in enumerate(sources)}
    book = RecipeBook(lambda source: ("source", numbers[id(source)], source.spec.dtype))
    names = [book.digest(each.view) for each in parameters if each.view is not None]
    return " ".join(names), tuple(SourceLocation.of(source) for source in sources)


def distinct_sources(parameters: Sequence[DeferredParameter]) -> list[SourceTensor]:
    """Return the distinct source tensors of `parameters`, in order of first use."""
    return list({id(s): s for each in parameters for s in each.sources}.values())
