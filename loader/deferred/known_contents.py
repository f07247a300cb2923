"""Describe a large final tensor by its source tensors, if all their digests are known.

Such a tensor can be built from parts of residents (shared tensors), and only the other parts are
read (`tensor_dedup.loader.residents.partial`).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NoReturn

from tensor_dedup.digest import digest
from tensor_dedup.loader.checkpoint_io.sources import raise_stale
from tensor_dedup.loader.deferred.recipe import parts_of
from tensor_dedup.loader.residents.partial import Content, KnownTensor
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM
from tensor_dedup.loader.torch_dtypes import has_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensor_dedup.loader.checkpoint_io.sources import SourceReader, SourceTensor
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.residents.resident import Write


def known_tensor(
    each: DeferredParameter, key: Callable[[DeferredParameter], str], reader: SourceReader
) -> KnownTensor | None:
    """Return the description of the final tensor `each`, whose parts `reader` reads, or None.

    `key` returns the key of its recipe. `KnownTensor.read` and `differs` raise StaleHintError if a
    part that was read, or that was found by its leaves, does not have its remembered digest.

    Returns None in these cases:

    - The tensor is smaller than 8 MiB, or its dtype has no safetensors name.
    - A part of the tensor is neither zeros nor a whole source tensor with a known digest.
    - All parts are zeros.
    - The algorithm of the digests is not BLAKE3.
    """
    if each.nbytes < LEAF_SHARED_FROM or not has_name(each.parameter.dtype):
        return None
    parts = _parts(each) if reader.algorithm == "blake3" else None
    if parts is None or all(source is None for source, _ in parts):
        return None

    def read(number: int, leaves: Sequence[int] | None, write: Write) -> None:
        source, content = parts[number]
        if source is None:
            write(memoryview(bytes(content.end - content.start)), 0)
        elif leaves is None:
            reader.read_pieces(source, write)
        else:
            reader.read_leaves(source, leaves, write)

    def differs(number: int, found: str) -> NoReturn:
        source, content = parts[number]
        assert source is not None, "of zeros no single leaf is taken"
        raise_stale(source, found, "it", content.digest)

    def fill(number: int, into: memoryview, offset: int) -> bytes | None:
        source, _ = parts[number]
        if source is not None:
            return source.read_into(into, offset)
        zeros(into)
        return None

    def counted(number: int, nbytes: int) -> None:
        source, _ = parts[number]
        reader.count(source, nbytes)

    contents = [content for _, content in parts]
    return KnownTensor(
        key(each), each.geometry, contents, read, reader.digest, differs, fill, counted
    )


def zeros(into: memoryview, _offset: int = 0) -> None:
    """Fill a buffer with zeros."""
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(into)), 0, len(into))


def _parts(each: DeferredParameter) -> list[tuple[SourceTensor | None, Content]] | None:
    """Return the source tensor of each part, or None for zeros, with its bytes; None if unknown."""
    found: list[tuple[SourceTensor | None, Content]] = []
    for start, stop, source, empty in parts_of(each.require_view()):
        if start == stop:  # padding of a vocabulary that needs none
            continue
        if empty:
            found.append((None, Content(start, stop, digest(bytes(stop - start)), ())))
        elif source is None or source.digest is None:
            return None
        else:
            found.append((source, Content(start, stop, source.digest, source.leaves)))
    return found
