"""Describe final tensors that can go straight from their files to a GPU.

Such a tensor consists of source tensors side by side, and perhaps zeros. It needs no memory on the
host. The digests of the sources and of the tensor become known while it is uploaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.cuda.residents import UnreadTensor
from tensor_dedup.loader.cuda.transfers import HostContent, UploadPart
from tensor_dedup.loader.deferred.known_contents import zeros
from tensor_dedup.loader.torch_dtypes import has_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensor_dedup.loader.checkpoint_io.sources import SourceReader, SourceTensor
    from tensor_dedup.loader.deferred.evaluate import Evaluator
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.residents.provider import AnyResident


class ReadsStraight(Protocol):
    """An interface for making residents of tensors that are not in memory yet. For one thread."""

    @property
    def round_bytes(self) -> int:
        """The total size in bytes up to which tensors are best passed to `build_unread` at once."""

    def build_unread(self, wanted: Sequence[UnreadTensor]) -> Sequence[tuple[AnyResident, bool]]:
        """Read tensors to where they stay; return the resident of each, and whether it is new.

        The digests of the tensors become known on the way. If a resident has the bytes after all,
        it is used. Errors of reading are passed on.

        Raises:
            SharedMemoryError: There is no room; keep the tensors private.
        """


class _SourcePart(NamedTuple):
    part: UploadPart
    source: SourceTensor | None  # None for zeros


def unread_tensor(
    each: DeferredParameter,
    evaluator: Evaluator,
    reader: SourceReader,
    recipe: Callable[[DeferredParameter], str],
) -> UnreadTensor | None:
    """Describe the final tensor `each` for an upload, or return None.

    `recipe` returns the recipe of a tensor whose sources have their digests. When the digests are
    known, `reader` counts the sources as read, and compares digests that were known before.

    Returns None in these cases:

    - A part of the tensor is computed, or is neither a whole source tensor nor zeros.
    - A source tensor is used elsewhere, too, or was read already.
    - A source tensor that begins within a leaf of the tensor (2 MiB) can only be read in leaves of
      its own.
    - The tensor is empty, or its dtype has no safetensors name.
    """
    ranges = evaluator.placed(each.require_view())
    if ranges is None or not each.nbytes or not has_name(each.parameter.dtype):
        return None
    parts = []
    for start, stop, source, _ in ranges:
        if source is not None and start % LEAF_BYTES and not source.file.reads_any_range:
            return None
        fill = zeros if source is None else source.read_into
        part = UploadPart(start, stop - start, fill, has_leaves=source is not None)
        parts.append(_SourcePart(part, source))
    content = HostContent(each.nbytes, [part for part, _ in parts])

    def learned() -> str:
        reader.counters.bytes_hashed += content.bytes_hashed
        for part, source in parts:
            if source is not None:
                reader.enter_read(source, content.part_leaves(part))
        return recipe(each)

    return UnreadTensor(each.geometry, content, learned)
