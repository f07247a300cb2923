"""Build a parameter from equal leaves of other tensors, if its leaf digests are remembered.

A leaf is a part of 2 MiB. Only the leaves that no resident (shared tensor) has are read. This works
for parameters that the loader has mapped from a file. Merged or cast parameters have been read
already.
"""

from __future__ import annotations

import time
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tensor_dedup.digest import leaf_places, stream
from tensor_dedup.loader.post_load.batch import content_recipe
from tensor_dedup.loader.residents.leaves import Content, build_from_contents
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM
from tensor_dedup.loader.residents.resident import Resident, digest_of, resident_key
from tensor_dedup.loader.residents.slab import SharedMemoryError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from tensor_dedup.digest import Fill
    from tensor_dedup.loader.post_load.batch import DedupCandidate, DedupContext
    from tensor_dedup.loader.post_load.mapped_files import FileRange, MappedFiles
    from tensor_dedup.loader.residents.provider import Admit
    from tensor_dedup.loader.residents.resident import Write


def build_of_known_leaves(candidate: DedupCandidate, context: DedupContext) -> Resident | None:
    """Build a resident for `candidate` from leaves of other residents; read only the missing ones.

    Pass the result to `HostProvider.enter_known`, which registers it. Then call
    `HostProvider.end_known`, also after an error or a result of None.

    Returns None if this would save nothing or is not possible, for example in these cases:

    - No resident has a leaf in common with the parameter.
    - The parameter is small (below 8 MiB), or its leaf digests are not remembered.
    - There is no shared memory for the remaining leaves.

    Raises:
        StaleHintError: A leaf that was read does not have its remembered digest.
        ChangedFileError, UnreadableFileError: The file cannot be read any more.
    """
    file_range, files = candidate.file_range, context.files
    if file_range is None or files is None or candidate.data.nbytes < LEAF_SHARED_FROM:
        return None
    whole, leaves = file_range.remembered, file_range.remembered_leaves
    if whole is None or not leaves or context.config.hash_algorithm != "blake3":
        return None
    content = Content(0, file_range.nbytes, whole, leaves)
    geometry = resident_key(candidate.data, "")
    began = time.perf_counter()

    def build(others: Sequence[Resident], admit: Admit | None) -> Resident | None:
        others = [each for each in others if each not in context.built]
        read = partial(_read, file_range, files, context)
        return build_from_contents(geometry, [content], read, _check, digest_of, others, admit)

    recipe = content_recipe(replace(geometry, digest=whole))
    try:
        made = context.provider.build_known(recipe, geometry, [content], build)
    except SharedMemoryError:
        return None  # met again, and said, on the ordinary way
    context.hash_seconds += time.perf_counter() - began
    if made is not None:
        context.bytes_hashed += made.nbytes
        files.learn(file_range, made.key.digest)
    return made


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


def _read(
    file_range: FileRange,
    files: MappedFiles,
    context: DedupContext,
    _number: int,
    numbers: Sequence[int] | None,
    write: Write,
) -> None:
    """Read those leaves of a range, or all of it, and compare each with what is remembered."""
    for start, size, found in read_leaves(file_range.nbytes, numbers, file_range.read, write):
        context.bytes_hashed += size
        part = file_range._replace(start=file_range.start + start, nbytes=size)
        files.learn(part, found)


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


def _check(_number: int, _data: memoryview) -> None:
    """Check nothing: there is one content, and its digest is compared with the whole's."""
