"""Which manifest a checkpoint has, from digests that are known already. Writes nothing."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.format import manifests
from tensor_dedup.store.format.manifests import FileEntry, Piece
from tensor_dedup.store.writing.containers import hash_copy
from tensor_dedup.store.writing.hashing import Hasher
from tensor_dedup.store.writing.sources import ImportFile, ImportSource, Segment, aliases_of

# The digests known of an open file, by (start, nbytes).
Known: TypeAlias = Callable[[Path, int], Mapping[tuple[int, int], str]]


def expected_manifest(files: Files, hasher: Hasher, source: ImportSource, known: Known) -> str:
    """The name of the manifest that importing `source` would make; hashes only what is unknown.

    `known(path, fd)` answers for each open file. It is believed: what is decided by the result must
    be no more than whether something is imported again.
    """
    entries: list[FileEntry] = []
    pieces: list[Piece] = []
    for file in source.files:
        handle = files.open(file.path, "read")
        try:
            digests = _digests(hasher, handle, file, known(file.path, handle.fd))
        finally:
            files.close(handle)
        entries.append(FileEntry(file.stored_as, file.nbytes, len(digests), file.prefix))
        pieces += [
            Piece(digest, part.nbytes, part.name, part.dtype, part.shape)
            for part, digest in zip(file.segments, digests, strict=True)
        ]
    return manifests.build(entries, pieces, aliases_of(source.files))[0]


def _digests(
    hasher: Hasher, handle: Handle, file: ImportFile, known: Mapping[tuple[int, int], str]
) -> Sequence[bytes]:
    unknown: list[Segment] = [s for s in file.segments if (s.start, s.nbytes) not in known]
    hashed = {
        (segment.start, segment.nbytes): found.digest
        for segment, found in zip(unknown, hash_copy(hasher, handle, unknown, None), strict=True)
    }
    return [
        hashed.get((s.start, s.nbytes)) or bytes.fromhex(known[s.start, s.nbytes])
        for s in file.segments
    ]
