"""Encode the tensors of a container that a save has written, and store them in a new one.

The tensors that become smaller are stored in one container and all others in another. The old one
stays until it is removed (`superseded`). No name has to change, because manifests name digests and
not containers.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import DamagedFileError, MissingObjectError, NewerFormatError
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.format.tables import Record
from tensor_dedup.store.hashing import Hashed, Hasher
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.writing.containers import ContainerWriter, NewPiece
from tensor_dedup.store.writing.deltas import EncodedWriter, LeafSharing, Plan
from tensor_dedup.store.writing.run_cache import Places, Rewritten
from tensor_dedup.store.writing.transaction import BatchTransaction, SyncedFolders
from tensor_dedup.training.encoding.decisions import Decisions
from tensor_dedup.training.encoding.first_base import FirstStep
from tensor_dedup.training.encoding.in_save import LeftTensor
from tensor_dedup.training.encoding.superseded import SupersededContainers

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class EncodingJob:
    """The task to encode those tensors of a step that one container holds unencoded.

    * `file_bytes` is the size of the container.
    * `name` and `manifest` are those of the step, and `left` has the tensors.
    * `first` says how to find a base if the run has no earlier step; otherwise it is None.
    * `background` is True for a background save. If too many of these jobs are waiting, the oldest
      is dropped.
    * `attempts` counts how often the job was interrupted. A job that was interrupted too often is
      dropped.
    """

    container: ContainerId
    file_bytes: int
    name: str
    manifest: str
    left: list[LeftTensor]
    first: FirstStep | None
    background: bool
    attempts: int = 0


class GivenUpError(Exception):
    """A job was interrupted."""


class ContainerRewrite:
    """The rewriting of one container, in a session. Use it from one thread, and call `run` once.

    `pause` is called before each tensor and each leaf. It may wait, or raise an exception.

    Pieces that others are stored against become no deltas. Nothing is stored against the pieces
    in containers that wait to be removed.
    """

    def __init__(
        self,
        objects: Objects,
        index: StoreIndex,
        hasher: Hasher,
        decisions: Decisions,
        superseded: SupersededContainers,
        pause: Callable[[], None],
    ) -> None:
        self._objects, self._index, self._hasher = objects, index, hasher
        self._decisions, self._superseded, self._pause = decisions, superseded, pause
        self._needed, self._instead = superseded.needed(), superseded.bases()
        # The containers of what tensors are stored against.
        self._anchors: dict[bytes, ContainerId] = {}

    def run(self, job: EncodingJob, source: Handle, table: Iterable[Record]) -> Rewritten | None:
        """Write the new containers; return None if nothing gets smaller.

        `source` is the open container of the job, and `table` has its records.

        Raises:
            GivenUpError: Another process has stored something against a piece meanwhile.
        """
        objects, index, pause = self._objects, self._index, self._pause
        records = {record.digest: record for record in table}

        def in_file(left: LeftTensor) -> _InFile:
            return _InFile(objects.files, source, left, records[left.digest])

        tensors = [in_file(left) for left in job.left if left.digest in records]
        if job.first is not None:
            near = job.first.bases(objects, index, tensors)
            tensors = [in_file(each.left.against(near.get(each.name))) for each in tensors]
        bases = {base for base in map(self._before, tensors) if base is not None}
        # What they are stored against must stay, and nothing of this container does.
        without = records.keys() | self._instead.keys()
        with (
            closing(StoredPieces(objects, index, bases)) as pieces,
            closing(LeafSharing(objects, index, without)) as sharing,
            BatchTransaction(objects, index, self._hasher, SyncedFolders()) as changes,
        ):
            encoded = changes.own(EncodedWriter(objects, self._hasher))
            rest = changes.own(ContainerWriter(objects, self._hasher, job.container.kind))
            done = set[bytes]()
            for tensor in tensors:
                if tensor.record.digest not in done:
                    pause()
                    plan = self._plan(tensor, records, pieces, sharing)
                    if plan is not None and self._encode(tensor, plan, encoded):
                        done.add(tensor.record.digest)
            if not done:
                return None
            for record in records.values():
                if record.digest not in done:
                    pause()
                    rest.add(source, [_piece(record)])
            changes.seal()
            result = self._result(job.container, changes)
            if not self._superseded.needed_now().isdisjoint(result.deltas):
                raise GivenUpError  # a save has stored something against them meanwhile
            changes.publish()
            return result

    def _plan(
        self,
        tensor: "_InFile",
        there: Collection[bytes],
        pieces: StoredPieces,
        sharing: LeafSharing,
    ) -> Plan | None:
        """Plan how to encode a tensor; `there` are the pieces of the container that goes."""
        alike = None
        if tensor.record.digest not in self._needed:
            found = sharing.find([(tensor.hashed, tensor.nbytes)], readable=True)
            alike = found.get(tensor.record.digest)
        anchor = self._decisions.anchor(tensor, self._before(tensor), pieces, alike)
        if anchor is not None and (anchor.digest in there or not self._stays(anchor.digest)):
            anchor = None
        return self._decisions.plan(tensor, anchor)

    def _encode(self, tensor: "_InFile", plan: Plan, encoded: EncodedWriter) -> bool:
        piece, leaves = _piece(tensor.record), tensor.record.leaves
        nbytes = encoded.encode(tensor.source, piece, leaves, plan, before_leaf=self._pause)
        self._decisions.stored(tensor, plan, nbytes)
        return nbytes is not None

    def _before(self, tensor: "_InFile") -> bytes | None:
        """What the anchor of a tensor is looked for by."""
        before = tensor.left.before
        if before is None or tensor.record.digest in self._needed:
            return None
        return self._instead.get(before, before)

    def _stays(self, digest: bytes) -> bool:
        """Whether a table shows this piece, no delta, in a container that is not being replaced."""
        if digest not in self._anchors:
            gone = self._superseded.containers()
            for place in self._index.find([digest]).get(digest, ()):
                if place.container in gone:
                    continue
                with suppress(MissingObjectError, DamagedFileError, NewerFormatError):
                    records = self._objects.containers.table(place.container).records
                    if any(each.digest == digest and each.base is None for each in records):
                        self._anchors[digest] = place.container
                        break
        return digest in self._anchors

    def _result(self, gone: ContainerId, changes: BatchTransaction) -> Rewritten:
        places: dict[bytes, Places] = {}
        files: dict[ContainerId, tuple[Path, int]] = {}
        for sealed in changes.sealed:
            path = self._objects.layout.container(sealed.container.name, sealed.container.kind)
            files[sealed.container] = path, sealed.file_bytes
            for record in sealed.table.records:
                under = () if record.base is None else (self._anchors[record.base],)
                places[record.digest] = (sealed.container, *under)
        for container in {each for held in places.values() for each in held} - files.keys():
            path = self._objects.layout.container(container.name, container.kind)
            status = self._objects.files.status(path)
            files[container] = path, -1 if status is None else status.size
        written = (record for sealed in changes.sealed for record in sealed.table.records)
        deltas = {each.digest: each.base for each in written if each.base is not None}
        return Rewritten(gone, places, files, deltas)


@dataclass(frozen=True, slots=True)
class _InFile:
    """A tensor in a container, as a candidate for encoding."""

    files: Files
    source: Handle
    left: LeftTensor
    record: Record

    @property
    def name(self) -> str:
        return self.left.name

    @property
    def dtype(self) -> str:
        return self.left.dtype

    @property
    def nbytes(self) -> int:
        return self.record.nbytes

    @property
    def hashed(self) -> Hashed:
        return Hashed(self.record.digest, self.record.leaves)

    def read(self, start: int, stop: int) -> memoryview:
        view = memoryview(bytearray(stop - start))
        self.files.pread(self.source, view, self.record.offset + start)
        return view


def _piece(record: Record) -> NewPiece:
    return NewPiece(record.offset, record.nbytes, record.digest)
