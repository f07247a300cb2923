"""Describe a parameter by the leaf digests that are remembered of its file.

A leaf is a part of 2 MiB. Only the leaves that no resident (shared tensor) has are read
(`tensor_dedup.loader.residents.partial`). This works for parameters that the loader has mapped from
a file. Merged or cast parameters have been read already.
"""

from __future__ import annotations

import time
from concurrent.futures import wait
from dataclasses import replace
from typing import TYPE_CHECKING

from tensor_dedup.digest import digest, leaf_places, stream
from tensor_dedup.loader.post_load.batch import content_recipe
from tensor_dedup.loader.residents.partial import Content, KnownTensor
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM
from tensor_dedup.loader.residents.resident import resident_key

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from tensor_dedup.digest import Fill
    from tensor_dedup.loader.post_load.batch import DedupCandidate, DedupContext
    from tensor_dedup.loader.residents.resident import Resident, Write


def known_tensor(candidate: DedupCandidate, context: DedupContext) -> KnownTensor | None:
    """Return the description of `candidate` by the leaf digests that are remembered, or None.

    Its leaves are read from the file, and are counted as hashed in `context`. Returns None if the
    parameter is small (below 8 MiB), or if its leaf digests are not remembered.

    `KnownTensor.read` and `differs` raise these errors:

    - StaleHintError: A leaf that was read, or the whole, does not have its remembered digest.
    - ChangedFileError, UnreadableFileError: The file cannot be read any more.
    """
    file_range, files = candidate.file_range, context.files
    if file_range is None or files is None or candidate.data.nbytes < LEAF_SHARED_FROM:
        return None
    whole, leaves = file_range.remembered, file_range.remembered_leaves
    if whole is None or not leaves or context.config.hash_algorithm != "blake3":
        return None

    def read(_: int, numbers: Sequence[int] | None, write: Write) -> None:
        began = time.perf_counter()
        for start, size, found in read_leaves(file_range.nbytes, numbers, file_range.read, write):
            context.bytes_hashed += size
            part = file_range._replace(start=file_range.start + start, nbytes=size)
            files.learn(part, found)
        context.hash_seconds += time.perf_counter() - began

    def hashed(data: memoryview) -> str:
        began = time.perf_counter()
        found = digest(data)
        context.bytes_hashed += data.nbytes
        context.hash_seconds += time.perf_counter() - began
        return found

    def differs(_: int, found: str) -> None:
        files.learn(file_range, found)

    content = Content(0, file_range.nbytes, whole, leaves)
    geometry = resident_key(candidate.data, "")
    recipe = content_recipe(replace(geometry, digest=whole))
    return KnownTensor(recipe, geometry, [content], read, hashed, differs)


def note_leaves(resident: Resident, candidate: DedupCandidate, context: DedupContext) -> None:
    """Register the leaf digests of `resident`, so that other tensors can share its leaves.

    The digests are those known from the file of `candidate`. Nothing happens if the resident is
    small (below 8 MiB), or if the digests are not known.
    """
    file_range = candidate.file_range
    if file_range is None or resident.nbytes < LEAF_SHARED_FROM:
        return
    leaves = file_range.learned_leaves or file_range.remembered_leaves
    if leaves:
        content = Content(0, resident.nbytes, resident.key.digest, leaves)
        context.provider.note_contents(resident, [content])


def read_leaves(
    nbytes: int, numbers: Sequence[int] | None, read: Fill, write: Write
) -> list[tuple[int, int, str]]:
    """Read leaves of a tensor of `nbytes` bytes; return (start, size, digest) of each leaf.

    `numbers` selects the leaves; None means all. `read(piece, offset)` fills a buffer with bytes of
    the tensor, which is then passed to `write(piece, offset)`. Both functions are called from
    threads of the hash pool. No such call is still running when this function returns or raises.
    """
    places = leaf_places(0, nbytes)

    def begin(start: int, size: int) -> Future[str]:
        def pass_on(piece: memoryview, offset: int) -> bytes | None:
            compared = read(piece, start + offset)
            write(piece, start + offset)
            return compared

        return stream(size, pass_on)

    wanted = places if numbers is None else [places[number] for number in numbers]
    begun = [begin(*place) for place in wanted]
    wait(begun)  # all of them, whatever happened to one
    return [(*place, future.result()) for place, future in zip(wanted, begun, strict=True)]
