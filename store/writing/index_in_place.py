"""Indexing a file where it is: a container that is a table only."""

from collections.abc import Sequence

from tensor_dedup.store.files import FileStatus
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.external import EXTERNAL, ExternalFile
from tensor_dedup.store.format.tables import Table
from tensor_dedup.store.objects import ContainerId, Objects
from tensor_dedup.store.writing.containers import record_of
from tensor_dedup.store.writing.hashing import Hashed
from tensor_dedup.store.writing.sources import ImportFile


def index_in_place(
    objects: Objects, file: ImportFile, status: FileStatus, hashed: Sequence[Hashed]
) -> ContainerId:
    """Make a file whose segments have these digests a container, durably; it is only read.

    `status` is what the file was before and after it was hashed.
    """
    records = [
        record_of(segment.start, segment.nbytes, found)
        for segment, found in zip(file.segments, hashed, strict=True)
        if segment.nbytes
    ]
    origin = ExternalFile.of(file.path.absolute(), status)
    name, blob = tables.encode(Table(EXTERNAL, status.size, records, origin.to_texts()))
    objects.publish(blob, objects.layout.container(name, EXTERNAL))
    return ContainerId(name, EXTERNAL)
