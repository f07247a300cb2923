"""Encode tensors after a save, so that they take less space a moment later.

A save with much to store writes tensors unencoded to a container. A thread then reads the container
again, stores the tensors that become smaller in a second container and all others in a third, and
removes the first container. No name has to change, because manifests name digests and not
containers. A process that is reading the first container can continue, because it has the file
open.

The new containers are durable under their names before the old container is removed. For the
removal, the thread holds the store's exclusive lock, as a gc does. It first checks, in the tables
on disk, that each piece is in another container that is complete and readable. After a crash before
the removal, the pieces are stored twice, and the next gc keeps the old container and deletes the
new ones.

The thread pauses while a save runs, and continues when no save has run for a moment. It ends when
nothing is left to encode. If the program ends without `close`, the remaining tensors stay
unencoded.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tensor_dedup.errors import StoreError
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    StoreBusyError,
    UnknownNameError,
    os_errors,
)
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.format.tables import ENCODED, Record
from tensor_dedup.store.hashing import Hashed, Hasher
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.writing.containers import ContainerWriter, NewPiece
from tensor_dedup.store.writing.deltas import EncodedWriter, LeafSharing, Plan
from tensor_dedup.store.writing.run_cache import LastStep, Places, Rewritten, RunCache
from tensor_dedup.store.writing.transaction import BatchTransaction, SyncedFolders
from tensor_dedup.training.encoding.decisions import Deltas, LeftTensor
from tensor_dedup.training.encoding.first_base import FirstStep

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)
# Steps of background saves that may wait; a training that is never idle would pile them up.
_MOST_WAITING = 8
# A session that stands still for saves keeps the gc of others waiting.
_PATIENCE_S = 5.0
# How long the last attempt to remove a container waits for those that read or write the store.
_LAST_WAIT_S = 2.0
_POLL_S = 0.2
# A training that saves again sooner leaves no time to encode: beginning would only take from it.
_REST_S = 0.1
# After so many interrupted attempts a step stays as it was saved.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class EncodingJob:
    """The task to encode those tensors of a step that one container holds unencoded.

    * `name` and `manifest` are those of the step, and `left` has the tensors.
    * `first` says how to find a base if the run has no earlier step; otherwise it is None.
    * `background` is True for a background save. If too many of these jobs are waiting, the oldest
      is dropped.
    * `attempts` counts how often the job was interrupted. A job that was interrupted too often is
      dropped.
    """

    container: ContainerId
    name: str
    manifest: str
    left: list[LeftTensor]
    first: FirstStep | None
    background: bool
    attempts: int = 0


class _GivenUpError(Exception):
    """A job was interrupted."""


class BackgroundEncoder:
    """Encodes the tensors that saves of one CheckpointStore have stored unencoded.

    `last` returns the step that was saved last. `moved` is called after a container was replaced.
    Safe from any thread.
    """

    def __init__(
        self,
        objects: Objects,
        workers: int,
        deltas: Deltas,
        last: Callable[[], LastStep],
        moved: Callable[[Rewritten], None],
    ) -> None:
        self._objects, self._workers, self._deltas = objects, workers, deltas
        self._last, self._moved = last, moved
        self._bases: dict[ContainerId, frozenset[bytes]] = {}
        self.reset()

    def reset(self) -> None:
        """Reset the state in a forked child, where the parent's thread does not exist.

        The jobs stay with the parent.
        """
        self._state = threading.Condition()
        self._waiting: deque[EncodingJob] = deque()
        self._superseded: list[Rewritten] = []
        self._thread: threading.Thread | None = None
        self._current = ""
        self._saving = self._awaited = 0
        self._saved_at = 0.0
        self._dropping = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager: while it is active, the encoding pauses.

        A save then has all processors.
        """
        with self._state:
            self._saving += 1
        try:
            yield
        finally:
            with self._state:
                self._saving -= 1
                self._saved_at = time.monotonic()
                self._state.notify_all()

    def add(self, job: EncodingJob) -> None:
        """Queue `job`, the encoding of tensors of a committed step, and start the thread."""
        with self._state:
            self._waiting.append(job)
            old = [each for each in self._waiting if each.background]
            if len(old) > _MOST_WAITING:
                self._waiting.remove(old[0])
            self._start()

    def _start(self) -> None:
        """Start the thread unless it runs; the caller holds the lock."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name="tensor-dedup-encode")
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, or the program is ending
            self._thread = None
            self._waiting.clear()
            self._state.notify_all()

    @property
    def busy(self) -> bool:
        """Whether the encoding thread is running."""
        return self._thread is not None

    def superseded(self) -> dict[bytes, bytes]:
        """Return the pieces that were encoded as deltas, and whose old container still exists.

        The result maps the digest of each piece to the digest of its new base.
        """
        return {piece: base for each in self._superseded for piece, base in each.deltas.items()}

    def finish(self) -> None:
        """Wait until all jobs are done, and replaced containers are removed if that is possible."""
        with self._state, self._hurried():
            if self._superseded:
                self._start()
            self._state.wait_for(lambda: self._thread is None)

    @contextmanager
    def _hurried(self) -> Iterator[None]:
        """Let the thread begin at once; the caller holds the lock, and waits for it."""
        self._awaited += 1
        self._state.notify_all()
        try:
            yield
        finally:
            self._awaited -= 1

    def wait_for(self, name: str, enough: Callable[[], bool]) -> None:
        """Wait until no job for the step `name` is left, or until `enough` returns True.

        `enough` is called again and again during the wait.
        """
        with self._state, self._hurried():
            while self._thread is not None and not enough():
                if name not in {each.name for each in self._waiting} and self._current != name:
                    return
                self._state.wait(_POLL_S)

    def drop(self) -> None:
        """Discard all jobs, and wait until the thread has ended. The tensors stay unencoded."""
        with self._state:
            self._dropping = True
            self._waiting.clear()
            self._state.notify_all()
            self._state.wait_for(lambda: self._thread is None)
            self._dropping = False

    def _run(self) -> None:
        cache = RunCache(self._objects, self._workers)
        try:
            while (job := self._next()) is not None:
                self._do(cache, job)
                with self._state:
                    self._current = ""
                    self._state.notify_all()
            if not self._given_up():
                self._remove_superseded(_LAST_WAIT_S)
        finally:
            with suppress(StoreError, OSError):
                cache.close()
            with self._state:
                self._thread, self._current = None, ""
                if self._waiting and not self._given_up():  # added since
                    self._start()
                self._state.notify_all()

    def _next(self) -> EncodingJob | None:
        with self._state:
            while not self._given_up() and (rest := self._rest()) != 0:
                self._state.wait(rest)
            if self._given_up() or not self._waiting:
                return None
            job = self._waiting.popleft()
            self._current = job.name
            return job

    def _rest(self) -> float | None:
        """How many seconds to wait before work begins; None for as long as a save runs."""
        if self._saving:
            return None
        if self._awaited or not self._waiting:
            return 0
        return max(0, self._saved_at + _REST_S - time.monotonic())

    def _given_up(self) -> bool:
        return self._dropping or not threading.main_thread().is_alive()

    def _stand_still(self) -> None:
        """Wait while a save runs; not for ever, since the caller holds a session."""
        with self._state:
            free = self._state.wait_for(lambda: not self._saving or self._given_up(), _PATIENCE_S)
        if not free or self._given_up():
            raise _GivenUpError

    def _do(self, cache: RunCache, job: EncodingJob) -> None:
        try:
            done = self._rewrite(cache, job)
            self._superseded += [] if done is None else [done]
        except _GivenUpError:
            with self._state:
                if not self._given_up() and job.attempts + 1 < _ATTEMPTS:
                    self._waiting.appendleft(replace(job, attempts=job.attempts + 1))
        except (MissingObjectError, UnknownNameError):
            pass  # deleted meanwhile
        except StoreError as error:
            _log.warning("%s is not encoded, and stays as it was saved: %s", job.name, str(error))
        self._remove_superseded(0)

    def _rewrite(self, cache: RunCache, job: EncodingJob) -> "Rewritten | None":
        """Store what gets smaller encoded, and the rest of its container in another one."""
        objects = self._objects
        with cache.session() as (index, hasher):
            if not self._in_use(job) or job.container.name in objects.bad_containers():
                return None
            path = objects.layout.container(job.container.name, job.container.kind)
            records = {
                record.digest: record for record in objects.containers.table(job.container).records
            }
            status = objects.files.status(path)
            room = 0 if status is None else 2 * status.size
            if objects.files.free_bytes(objects.layout.root) < room or not self._can_remove():
                return None
            source = objects.files.open(path, "read")
            try:
                work = _Rewriting(
                    objects, index, hasher, source, records, self._in_need(), self._superseded
                )
                return work.run(job, self._deltas, self._stand_still, self._now_needed)
            finally:
                objects.files.close(source)

    def _in_use(self, job: EncodingJob) -> bool:
        """Whether the step is there, or the last one still refers to what it has stored."""
        if job.container in self._last().containers:
            return True
        with suppress(UnknownNameError, DamagedFileError):
            return self._objects.ref(job.name) == job.manifest
        return False

    def _remove_superseded(self, wait_s: float) -> None:
        """Remove the containers that others have replaced; those that cannot go now go later."""
        while self._superseded:
            each = self._superseded[0]
            try:
                with os_errors(self._objects.layout.root):
                    self._scan()  # most of it before anybody has to wait
                    removed = self._remove(each, wait_s)
            except StoreBusyError:
                return
            except StoreError as error:
                what = "%s: a container that was encoded stays for now: %s"
                _log.warning(what, self._objects.layout.root, str(error))
                return
            self._superseded = self._superseded[1:]
            if removed:
                self._moved(each)

    def _remove(self, change: Rewritten, wait_s: float) -> bool:
        """Unlink a container, if that is safe; return whether it is gone."""
        objects, container = self._objects, change.gone
        path = objects.layout.container(container.name, container.kind)
        with objects.sweep(wait_s):
            # A delta is readable only beside its base as a whole.
            if not self._can_remove() or not self._in_need().isdisjoint(change.deltas):
                return False
            if not self._is_whole(change):
                return False
            with suppress(FileNotFoundError):
                objects.files.unlink(path)
            objects.files.sync_folder(path.parent)
        return True

    def _can_remove(self) -> bool:
        """Whether it is known what all of the store is for."""
        return self._scan() and not any(self._objects.aliens())

    def _is_whole(self, change: Rewritten) -> bool:
        """Whether what replaces a container is there, as the tables on disk say it."""
        objects, bad = self._objects, set(self._objects.bad_containers())
        tables: dict[ContainerId, dict[bytes, Record]] = {}
        try:
            for each, (file, size) in change.files.items():
                status = objects.files.status(file)
                if status is None or status.size != size or each.name in bad:
                    return False
                tables[each] = {
                    record.digest: record for record in objects.containers.table(each).records
                }
        except (MissingObjectError, DamagedFileError, NewerFormatError):
            return False
        for digest, (own, *under) in change.places.items():
            record = tables[own].get(digest)
            if record is None or (record.base is None) != (not under):
                return False
            anchor = tables[under[0]].get(record.base) if under and record.base else None
            if under and (anchor is None or anchor.base is not None):
                return False
        return True

    def _now_needed(self) -> frozenset[bytes]:
        """What some delta of the store is against by now."""
        self._scan()
        return self._in_need()

    def _in_need(self) -> frozenset[bytes]:
        """What some delta of the store is against, as far as `_scan` has seen."""
        return frozenset().union(*self._bases.values())

    def _scan(self) -> bool:
        """Read what the deltas of the store are against; return whether all could be read.

        A container never changes, so each is read once.
        """
        there = {each for each in self._objects.containers if each.kind == ENCODED}
        self._bases = {each: held for each, held in self._bases.items() if each in there}
        try:
            for each in there - self._bases.keys():
                records = self._objects.containers.table(each).records
                self._bases[each] = frozenset(base for each in records for base in each.bases)
        except (MissingObjectError, DamagedFileError, NewerFormatError):
            return False
        return True


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
    def leaves(self) -> bytes:
        return self.record.leaves

    def read(self, start: int, stop: int) -> memoryview:
        view = memoryview(bytearray(stop - start))
        self.files.pread(self.source, view, self.record.offset + start)
        return view


@dataclass(slots=True)
class _Rewriting:
    """The rewriting of one open container, in a session.

    What is in `needed` others are stored against: it becomes no delta. Against what lies in
    `superseded` containers, which wait to be removed, nothing is stored.
    """

    objects: Objects
    index: StoreIndex
    hasher: Hasher
    source: Handle
    records: dict[bytes, Record]
    needed: frozenset[bytes]
    superseded: Sequence[Rewritten]
    anchors: dict[bytes, ContainerId] = field(default_factory=dict)

    def run(
        self,
        job: EncodingJob,
        deltas: Deltas,
        stand_still: Callable[[], None],
        now_needed: Callable[[], frozenset[bytes]],
    ) -> "Rewritten | None":
        """Write the new containers; None if nothing gets smaller."""
        tensors = [self._in_file(left) for left in job.left if left.digest in self.records]
        if job.first is not None:
            near = job.first.bases(self.objects, self.index, tensors)
            tensors = [self._in_file(each.left.against(near.get(each.name))) for each in tensors]
        bases = {base for base in (self._before(each.left) for each in tensors) if base is not None}
        # What they are stored against must stay, and nothing of this container does.
        without = self.records.keys() | {d for each in self.superseded for d in each.deltas}
        with (
            closing(StoredPieces(self.objects, self.index, bases)) as pieces,
            closing(LeafSharing(self.objects, self.index, without)) as sharing,
            BatchTransaction(self.objects, self.index, self.hasher, SyncedFolders()) as changes,
        ):
            encoded = changes.own(EncodedWriter(self.objects, self.hasher))
            rest = changes.own(ContainerWriter(self.objects, self.hasher, job.container.kind))
            done = set()
            for tensor in tensors:
                if tensor.left.digest not in done:
                    stand_still()
                    if self._encode(tensor, encoded, deltas, pieces, sharing, stand_still):
                        done.add(tensor.left.digest)
            if not done:
                return None
            for record in self.records.values():
                if record.digest not in done:
                    stand_still()
                    rest.add(self.source, [_piece(record)])
            changes.seal()
            result = self._result(job.container, changes)
            if not now_needed().isdisjoint(result.deltas):
                raise _GivenUpError  # a save has stored something against them meanwhile
            changes.publish()
            return result

    def _in_file(self, left: LeftTensor) -> _InFile:
        return _InFile(self.objects.files, self.source, left, self.records[left.digest])

    def _encode(
        self,
        tensor: _InFile,
        encoded: EncodedWriter,
        deltas: Deltas,
        pieces: StoredPieces,
        sharing: LeafSharing,
        stand_still: Callable[[], None],
    ) -> bool:
        record, before, alike = tensor.record, self._before(tensor.left), None
        if record.digest not in self.needed:
            hashed = Hashed(record.digest, record.leaves)
            found = sharing.find([(hashed, record.nbytes)], readable=True)
            alike = found.get(record.digest)
        anchor, stored = deltas.anchor(tensor, record.digest, before, pieces, alike)
        if anchor is not None and not self._stays(anchor.digest):
            anchor, stored = None, 0
        plan: Plan | None = deltas.plan(tensor, anchor, stored)
        if plan is None:
            return False
        nbytes = encoded.encode(
            self.source, _piece(record), record.leaves, plan, before_leaf=stand_still
        )
        deltas.stored(tensor, plan, nbytes)
        return nbytes is not None

    def _before(self, left: LeftTensor) -> bytes | None:
        """What the anchor of a tensor is looked for by."""
        if left.before is None or left.digest in self.needed:
            return None
        instead = (each.deltas.get(left.before) for each in self.superseded)
        return next((base for base in instead if base is not None), left.before)

    def _stays(self, digest: bytes) -> bool:
        """Whether a table shows this piece, no delta, in a container that is not being replaced."""
        if digest in self.records:
            return False
        if digest not in self.anchors:
            gone = {each.gone for each in self.superseded}
            for place in self.index.find([digest]).get(digest, ()):
                if place.container in gone:
                    continue
                with suppress(MissingObjectError, DamagedFileError, NewerFormatError):
                    records = self.objects.containers.table(place.container).records
                    if any(each.digest == digest and each.base is None for each in records):
                        self.anchors[digest] = place.container
                        break
        return digest in self.anchors

    def _result(self, gone: ContainerId, changes: BatchTransaction) -> "Rewritten":
        places: dict[bytes, Places] = {}
        files: dict[ContainerId, tuple[Path, int]] = {}
        for sealed in changes.sealed:
            path = self.objects.layout.container(sealed.container.name, sealed.container.kind)
            files[sealed.container] = path, sealed.file_bytes
            for record in sealed.table.records:
                under = () if record.base is None else (self.anchors[record.base],)
                places[record.digest] = (sealed.container, *under)
        for container in {each for held in places.values() for each in held} - files.keys():
            path = self.objects.layout.container(container.name, container.kind)
            status = self.objects.files.status(path)
            files[container] = path, -1 if status is None else status.size
        written = (record for sealed in changes.sealed for record in sealed.table.records)
        deltas = {each.digest: each.base for each in written if each.base is not None}
        return Rewritten(gone, places, files, deltas)


def _piece(record: Record) -> NewPiece:
    return NewPiece(record.offset, record.nbytes, record.digest)
