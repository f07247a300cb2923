"""Push checkpoints to a remote: only pieces that the remote lacks are transferred.

A name must not appear before its pieces, so a push takes these steps in the order of a commit on
disk:

1. Write containers and their tables.
2. Write manifests and manifest pages.
3. Check that the objects on which the push relies exist.
4. Write the catalog.
5. Write the references.

An interrupted push leaves objects to which nothing refers. The next attempt finds these containers
again, because their names depend on their content alone.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from tensor_dedup.digest import hand
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.catalog import (
    DAMAGED,
    Catalog,
    CatalogChange,
    ListedContainer,
    Trash,
    catalog_of,
    commit,
    confirm,
    drop,
    is_damage_noted,
    listed,
    read_catalog,
    segment_blob,
    unheld,
    with_more,
)
from tensor_dedup.remote.conditions import (
    check_remote,
    check_still,
    genuine_damage,
    is_free,
    prepare,
)
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    MissingRemoteError,
    RemoteBusyError,
    RemoteNameTakenError,
)
from tensor_dedup.remote.holders import in_small_encoded, put_holders, relied_on, sizes_of
from tensor_dedup.remote.lease import LEASE_S, boottime
from tensor_dedup.remote.loads import DamagedRecordError, Load, Planner, content, fill
from tensor_dedup.remote.relatives import Relative, first_there, lost, pages_there
from tensor_dedup.remote.results import TransferListener, TransferResult
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    NewerFormatError,
)
from tensor_dedup.store.format.names import marked_by
from tensor_dedup.store.reading.reader import StoredPieces

_AT_ONCE: Final = 3
# Of a smaller container it costs less to send it again than to ask whether it is there.
_ASKED_BYTES: Final = 8 << 20
_ATTEMPTS: Final = 4
# What a push is to cost: so much of what it has to send, and so much beside. A request has about so
# many bytes of headers, the answer's included (some 820 were counted; S3's own answers are longer).
# The list, the head and a reference are the last.
_COST_SHARE: Final = 1.02
_COST_BYTES: Final = 64 << 10
_CALL_BYTES: Final = 900
_LAST_CALLS: Final = 3


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A checkpoint of the store that is to be pushed.

    * `manifest` is the name of the checkpoint's manifest.
    * `wanted` maps the digests of the checkpoint's pieces to their sizes.
    * `blobs` maps the names of the manifest and its pages to their encoded bytes.
    * `nbytes` is the size of the checkpoint.
    """

    name: str
    manifest: str
    wanted: Mapping[bytes, int]
    blobs: Mapping[str, bytes]
    nbytes: int


class NameGuard:
    """A check that can prevent a push from changing a name. This base class allows all changes."""

    def lock(self) -> AbstractContextManager[None]:
        """Return a context manager; while it is active, the result of `check` stays valid."""
        return nullcontext()

    def check(self, there: str | None) -> None:
        """Raise an error if the push must not change the name; otherwise return.

        `there` is the manifest for which the name stands on the remote, or None. The push calls
        this method when it begins, and before each attempt to change the name, inside `with
        self.lock():`.
        """


class _OutdatedError(Exception):
    """What the push relied on is gone from the remote: begin with what is there now."""


def push(
    bucket: Bucket,
    checkpoints: Sequence[Outgoing],
    open_pieces: Callable[[set[bytes]], StoredPieces],
    progress: TransferListener,
    *,
    replace: bool = False,
    guard: NameGuard | None = None,
    relatives: Callable[[], Iterable[Relative]] = tuple,
    dry_run: bool = False,
) -> TransferResult:
    """Push `checkpoints`, which are all in one store, under their own names.

    `open_pieces` opens pieces in the store, given by their digests, for reading. `relatives`
    returns other checkpoints of the store that share manifest pages with the pushed ones. `guard`
    is asked before a name changes, and its errors end the push. With `dry_run`, nothing is written.

    Raises:
        RemoteNameTakenError: On the remote, a name stands for another checkpoint, and `replace` is
            False.
        NoConditionsError: The server does not keep conditions of writes; nothing was written.
        RemoteBusyError: Other writers kept changing the remote.
    """
    began = time.monotonic()
    guard = guard or NameGuard()
    work = _Push(bucket, checkpoints, open_pieces, progress, replace, guard, relatives)
    for attempt in range(_ATTEMPTS):
        try:
            return work.run(began, dry_run=dry_run)
        except _OutdatedError:
            if attempt == _ATTEMPTS - 1:
                what = "what it relied on was deleted there meanwhile, again and again"
                raise RemoteBusyError.at(bucket.url, what) from None
    raise AssertionError


class _Push:
    def __init__(
        self,
        bucket: Bucket,
        checkpoints: Sequence[Outgoing],
        open_pieces: Callable[[set[bytes]], StoredPieces],
        progress: TransferListener,
        replace: bool,
        guard: NameGuard,
        relatives: Callable[[], Iterable[Relative]],
    ) -> None:
        self._bucket, self._checkpoints, self._guard = bucket, checkpoints, guard
        self._relatives = relatives
        self._before = bucket.traffic.counts()
        self._open_pieces, self._progress, self._replace = open_pieces, progress, replace
        self._sizes: dict[bytes, int] = {}
        for each in checkpoints:
            self._sizes |= {digest: nbytes for digest, nbytes in each.wanted.items() if nbytes}
        self._planner = Planner(self._sizes)
        # Names that were written too late to know that what they lead to is there.
        self._late: set[str] = set()
        # What each name stood for when it was looked at.
        self._seen: dict[str, str | None] = {}
        self._moved_pieces = self._anchor_pieces = self._moved_bytes = 0

    def run(self, began: float, *, dry_run: bool = False) -> TransferResult:
        bucket = self._bucket
        tags = dict(enumerate(bucket.each(self._look, self._checkpoints)))
        # What was read may be an old answer, and a name that was deleted would be said to be there.
        found = [(self._checkpoints[n].name, tag) for n, (there, tag) in tags.items() if there]
        if not all([*bucket.each(lambda each: self._is_still(*each), found)]):
            raise _OutdatedError
        changing = {n: tag for n, (there, tag) in tags.items() if not there}
        # Of a name that is there all is there, unless it was found damaged since.
        changing = changing or {n: tags[n][1] for n in self._damaged_there()}
        if changing and dry_run:
            self._count()
        elif changing:
            read = boottime()
            self._send(self._catalog(), changing, read)
        nbytes, calls = bucket.traffic.counts()
        counted = [each for each in self._checkpoints if marked_by(each.name) is None]
        return TransferResult(
            url=bucket.url,
            names=tuple(each.name for each in counted),
            pieces=len(self._sizes),
            nbytes=sum(each.nbytes for each in counted),
            moved_pieces=self._moved_pieces,
            moved_bytes=self._moved_bytes,
            wire_bytes=nbytes - self._before[0],
            requests=calls - self._before[1],
            seconds=time.monotonic() - began,
            unchanged=not changing,
            anchor_pieces=self._anchor_pieces,
            done=not dry_run,
        )

    def _count(self) -> None:
        """Count what is missing there, as `_send` would find it."""
        bucket = self._bucket
        bucket.check_writable()
        missing = {*self._sizes}
        if not is_free(bucket):
            mending = any(self._seen[each.name] == each.manifest for each in self._checkpoints)
            suspicious = self._replace and mending
            missing = unheld(bucket, catalog_of(bucket), self._sizes, suspicious=suspicious)
        self._moved_pieces = len(missing)
        self._moved_bytes = sum(self._sizes[digest] for digest in missing)

    def _damaged_there(self) -> list[int]:
        """The checkpoints of which something is lost; looked for where something was noted."""
        bucket = self._bucket
        if not is_damage_noted(bucket):
            return []
        catalog = catalog_of(bucket)
        gone = unheld(bucket, catalog, self._sizes)
        noted = {k for k, since in catalog.trash.condemned.items() if since == DAMAGED}
        return [
            n
            for n, each in enumerate(self._checkpoints)
            if gone & each.wanted.keys() or noted & {*map(layout.manifest_key, each.blobs)}
        ]

    def _catalog(self) -> Catalog:
        """Read the catalog of a remote that may be written to; make one where nothing is."""
        bucket = self._bucket
        with suppress(DamagedRemoteError, MissingRemoteError, NewerFormatError):
            found = read_catalog(bucket, with_trash=True)
            if found is not None:
                check_still(bucket)
                return found
        # A new remote has no catalog, unless another first push was faster: `commit` sees that.
        return Catalog(rebuilt=True) if prepare(bucket) else catalog_of(bucket)

    def _look(self, checkpoint: Outgoing) -> tuple[bool, str | None]:
        """Whether the name stands for this already, and the tag of its reference."""
        key = layout.ref_key(checkpoint.name)
        self._seen[checkpoint.name] = found = manifest = None
        try:
            with genuine_damage(self._bucket):
                found = self._bucket.get(key, layout.TEXT_BYTES)
                if found is not None:
                    manifest = layout.referred(found[0], checkpoint.name, self._bucket.at(key))
        except DamagedRemoteError:
            if found is None or not self._replace:
                raise
            manifest = layout.damaged_state(found[1])
        tag = None if found is None else found[1]
        self._guard.check(manifest)
        if manifest is not None and manifest != checkpoint.manifest and not self._replace:
            raise self._taken(checkpoint)
        self._seen[checkpoint.name] = manifest
        # To replace a checkpoint by itself is to send what was found damaged or lost of it.
        is_there = manifest == checkpoint.manifest and checkpoint.name not in self._late
        return is_there and not self._replace, tag

    def _is_still(self, name: str, tag: str | None) -> bool:
        return tag is not None and self._bucket.still_has(layout.ref_key(name), tag)

    def _taken(self, checkpoint: Outgoing) -> RemoteNameTakenError:
        what = f"{checkpoint.name!r} stands for another checkpoint there"
        return RemoteNameTakenError.at(self._bucket.url, what, name=checkpoint.name)

    def _send(self, catalog: Catalog, tags: Mapping[int, str | None], read: float) -> None:
        bucket = self._bucket
        # To replace a checkpoint by itself is to mend it, whatever has been noted.
        mending = any(self._seen[each.name] == each.manifest for each in self._checkpoints)
        relative = self._relative(catalog)
        unheld_ = unheld(bucket, catalog, self._sizes, suspicious=self._replace and mending)
        missing = {d: n for d, n in self._sizes.items() if d in unheld_}
        saved = sum(n for d, n in self._sizes.items() if d not in missing)
        self._progress.saved(saved)
        checkpoints = [self._checkpoints[number] for number in tags]
        blobs = {part: blob for each in checkpoints for part, blob in each.blobs.items()}
        others = {layout.manifest_key(part) for part in blobs}
        others |= {layout.ref_key(each.name) for each in checkpoints}
        loads: list[Load] = []
        if missing:
            with self._open_pieces({*missing}) as source:
                places = (record for digest in missing for _, record in source.own_places(digest))
                bases = {base for record in places for base in record.bases}
                confirm(bucket, catalog, bases - missing.keys(), alone=True)
                while True:
                    loads = self._planner.plan(source, missing, catalog)
                    reused = self._reused(catalog, missing, loads)
                    self._refuse_deleting(catalog, others | _keys(reused, loads))
                    try:
                        self._upload(source, loads, catalog)
                        break
                    except DamagedRecordError as error:
                        self._planner.note(error)
        else:
            reused = self._reused(catalog, missing, loads)
            self._refuse_deleting(catalog, others | _keys(reused, loads))
        sent = [record for load in loads for record in load.table.records]
        self._moved_pieces, self._anchor_pieces = len(missing), len(sent) - len(missing)
        self._moved_bytes = sum(record.stored for record in sent)

        def write(part: str) -> None:
            bucket.put(layout.manifest_key(part), [memoryview(blobs[part])])

        there = pages_there(bucket, catalog, relative, blobs, self._moved_bytes) if relative else ()
        for _ in bucket.each(write, [part for part in blobs if part not in there]):
            pass
        reused = self._reused(catalog, missing, loads)
        self._check_there(catalog, reused, loads)
        self._put_holders(catalog, reused, loads, checkpoints)
        self._publish(catalog, reused, loads, [*blobs], others | _keys(reused, loads))
        for number, tag in tags.items():
            # What is relied on may be condemned and deleted in a lease: then begin with what is
            # there now, which costs no more than to ask for each container.
            if boottime() - read > LEASE_S / 2:
                raise _OutdatedError
            self._refer(self._checkpoints[number], tag)
            if boottime() - read > LEASE_S / 2:  # the machine slept in between
                self._late.add(self._checkpoints[number].name)
                raise _OutdatedError

    def _relative(self, catalog: Catalog) -> Relative | None:
        """A checkpoint of the remote that has pages in common with these, and is whole there.

        To replace is to mend, and what was relied on in vain once is not again.
        """
        candidates, self._relatives = self._relatives, tuple
        if self._replace or catalog.rebuilt or DAMAGED in catalog.trash.condemned.values():
            return None
        # Pages are looked for too, so either answer may be an old one. Of a piece that no table is
        # read for, its reference alone says that it is there.
        surely = any(map(catalog.is_doubtful, catalog.containers))
        found = first_there(self._bucket, candidates(), surely=surely)
        if found is not None and surely:
            with suppress(StoreError):
                catalog.assure(found.pieces())
        return found

    def _put_holders(
        self,
        catalog: Catalog,
        reused: Mapping[tuple[bytes, bool], ContainerId],
        loads: Sequence[Load],
        checkpoints: Sequence[Outgoing],
    ) -> None:
        """Write beside each manifest which containers hold its pieces, and what they are against.

        Of what was there and is a delta, it is not known against what; a pull that has to know it
        reads the catalog.
        """
        relied = Catalog()
        for each in relied_on(catalog, reused):
            relied.add(each)
        for load in loads:
            relied.add(listed(load.container, load.table))
        bases = {r.digest: r.bases for load in loads for r in load.table.records}
        sizes = {r.digest: r.stored for load in loads for r in load.table.records}
        if encoded := in_small_encoded(catalog, reused):
            with self._open_pieces(encoded) as source:
                sizes |= sizes_of(source, encoded)

        def write(checkpoint: Outgoing) -> None:
            own = [digest for digest, nbytes in checkpoint.wanted.items() if nbytes]
            anchors = dict.fromkeys(b for digest in own for b in bases.get(digest, ()))
            put_holders(self._bucket, checkpoint.manifest, relied.only([*own, *anchors]), sizes)

        for _ in self._bucket.each(write, {each.manifest: each for each in checkpoints}.values()):
            pass

    def _upload(self, source: StoredPieces, loads: Sequence[Load], catalog: Catalog) -> None:
        """Send containers, some at once, and their tables in order.

        So those that have tables when it is cut short are the first ones, and what is left is laid
        out as it was: then a container is found that was sent and has no table yet.

        Up to `_AT_ONCE` containers are in memory, or some parts of a larger one, which goes alone.
        Memory that was sent at the first try is filled again: fresh memory costs more than what is
        read into it.
        """
        self._progress.start(sum(load.nbytes for load in loads))
        sending: deque[tuple[Load, Future[tuple[bool, bool]], memoryview | None]] = deque()
        may_be_there, spare = True, list[memoryview]()
        # What of it is not written to takes no memory.
        largest = max((load.nbytes for load in loads if not _is_streamed(load)), default=0)

        def settle() -> None:
            nonlocal may_be_there
            load, sent, memory = sending.popleft()
            # One that was cut short had not begun what now begins once this one is missing.
            found, is_free = sent.result()
            may_be_there = found and may_be_there
            key = layout.table_key(load.container.name)
            self._bucket.put(key, [memoryview(load.frame.blob)])
            self._progress.advance(load.nbytes)
            if memory is not None and is_free:
                spare.append(memory)

        with ExitStack() as undo:
            # Not `Bucket.each`: containers are read here, one by one, while others are sent.
            pool = undo.enter_context(ThreadPoolExecutor(_AT_ONCE))
            undo.callback(lambda: [each.cancel() for _, each, _ in sending])
            for load in loads:
                streamed = _is_streamed(load)
                while len(sending) >= (1 if streamed else _AT_ONCE):
                    settle()
                memory: memoryview | None = None
                parts: memoryview | Iterator[memoryview] = content(source, load)
                if not streamed:
                    # Read and checked here, sent by the threads.
                    memory = spare.pop() if spare else memoryview(bytearray(largest))
                    parts = memory[: load.nbytes]
                    fill(source, load, parts)
                # What was condemned may have been so because it is damaged.
                condemned = layout.container_key(load.container) in catalog.trash.condemned
                ask = may_be_there and load.nbytes >= _ASKED_BYTES and not condemned
                sent = hand(pool, partial(self._send_one, load, parts, ask))
                sending.append((load, sent, memory))
                if streamed:
                    settle()  # it is read as it is sent
            while sending:
                settle()

    def _send_one(
        self, load: Load, parts: memoryview | Iterator[memoryview], ask: bool
    ) -> tuple[bool, bool]:
        """Send a container unless it is there.

        Return False where it was asked for and is missing, and whether memory of it is free again.
        """
        bucket, key = self._bucket, layout.container_key(load.container)
        status = bucket.head(key) if ask else None
        if status is not None and status.size == load.nbytes:
            bucket.settle(key)
            return True, True
        if isinstance(parts, memoryview):
            return not ask, bucket.put_once(key, parts)
        bucket.put(key, parts)
        return not ask, False

    def _reused(
        self, catalog: Catalog, missing: Collection[bytes], loads: Sequence[Load]
    ) -> dict[tuple[bytes, bool], ContainerId]:
        """The pieces of the remote that the checkpoints, or deltas among them, rely on, and where.

        Each is given with whether it is held there without a base.
        """
        found: dict[tuple[bytes, bool], ContainerId] = {}
        records = [record for load in loads for record in load.table.records]
        bases = {base for record in records for base in record.bases}
        for digest in (d for d in self._sizes if d not in missing):
            held = catalog.holders(digest)
            if not held:
                # No table was to be read for it (`assure`); one was for another, and is gone.
                raise _OutdatedError
            found[digest, held[0] in catalog.holders(digest, alone=True)] = held[0]
        for digest in bases - {record.digest for record in records}:
            found[digest, True] = catalog.holders(digest, alone=True)[0]
        return found

    def _left(
        self,
        catalog: Catalog,
        reused: Mapping[tuple[bytes, bool], ContainerId],
        loads: Sequence[Load],
    ) -> int:
        """The bytes that are left of what a push is to cost, when it has written what it must."""
        nbytes, calls = self._bucket.traffic.counts()
        new = [listed(load.container, load.table) for load in loads]
        due = [[*new, *relied_on(catalog, reused)]]  # the holders, at most
        segments = with_more(catalog, new)
        due += [held for name, held in segments.items() if name not in catalog.segments]
        nbytes += sum(len(segment_blob(each)) for each in due) - self._before[0]
        calls += len(due) + _LAST_CALLS - self._before[1]
        allowed = int(_COST_SHARE * self._moved_bytes) + _COST_BYTES
        return allowed - nbytes - calls * _CALL_BYTES

    def _check_there(
        self,
        catalog: Catalog,
        reused: Mapping[tuple[bytes, bool], ContainerId],
        loads: Sequence[Load],
    ) -> None:
        """Check that what the catalog says is there: a reference must not lead to nothing.

        What is not there leaves the catalog and is noted as damaged, so that whoever has lost it
        is told; the push begins anew and sends what was in it.
        """
        bucket = self._bucket
        containers, left = {*reused.values()}, self._left(catalog, reused, loads)
        gone = lost(bucket, catalog, containers, self._moved_bytes, left, mending=self._replace)
        if gone:
            check_remote(bucket)  # or a catalog would be made where all of it has gone
            drop(bucket, gone)
            raise _OutdatedError

    def _publish(
        self,
        catalog: Catalog,
        reused: Mapping[tuple[bytes, bool], ContainerId],
        loads: Sequence[Load],
        objects: Sequence[str],
        keys: Collection[str],
    ) -> None:
        """Enter the new containers in the catalog, and see that no gc takes what is relied on.

        The `keys` are those of all that is relied on, the new ones too.

        A delta is relied on only where it is listed now: a sweep leaves it out when it condemns
        what that is against, which this push does not know and so could not take off that list.
        """
        new = [listed(load.container, load.table) for load in loads]

        def change(now: Catalog) -> CatalogChange | None:
            self._refuse_deleting(now, keys)
            condemned, before = now.trash.condemned, catalog.trash.condemned
            found_damaged = {key for key, since in condemned.items() if since == DAMAGED}
            if any(before.get(key) != DAMAGED for key in found_damaged.intersection(keys)):
                raise _OutdatedError
            again = dict[ContainerId, ListedContainer]()
            for (digest, alone), each in reused.items():
                if each in now.containers:
                    if each not in now.holders(digest, alone=alone):
                        raise _OutdatedError
                elif not alone or layout.container_key(each) not in condemned:
                    raise _OutdatedError
                else:
                    # Of its deltas nobody knows whether what they are against is there still.
                    entry = catalog.containers[each]
                    again[each] = msgspec.structs.replace(entry, deltas=b"")
            trash = Trash(
                {key: since for key, since in condemned.items() if key not in keys},
                now.trash.deleting,
            )
            segments = with_more(now, [*again.values(), *new])
            same = segments.keys() == now.segments.keys() and trash == now.trash
            return None if same and not now.rebuilt else (segments, trash)

        if commit(self._bucket, catalog, change).tag != catalog.tag:
            self._check_sent(loads, objects)

    def _refuse_deleting(self, now: Catalog, keys: Collection[str]) -> None:
        """Refuse to rely on what a gc deletes. One that was killed stays on the list for an hour.

        Asked before anything is sent, too: what the catalog said when it was read, counts.
        """
        if not now.trash.deleting.keys().isdisjoint(keys):
            what = "a gc deletes what this push needs; if none does, run one an hour later"
            raise RemoteBusyError.at(self._bucket.at(layout.HEAD), what)

    def _check_sent(self, loads: Sequence[Load], objects: Sequence[str]) -> None:
        """Check that what was sent is there, where others wrote the catalog meanwhile.

        A gc may have deleted what was garbage until then, and was sent again between its last look
        and its deletion. From here on no gc does: what is entered is on the list of none.
        """
        wanted: dict[str, ContainerId | None] = {
            key: load.container
            for load in loads
            for key in (
                layout.container_key(load.container),
                layout.table_key(load.container.name),
            )
        }
        wanted |= dict.fromkeys(map(layout.manifest_key, objects))
        gone = {*wanted}
        for _ in range(2):  # an answer may be old
            gone -= {s.key for s in self._bucket.each(self._bucket.head, gone) if s is not None}
        if gone:
            if containers := {c for key in gone if (c := wanted[key]) is not None}:
                drop(self._bucket, containers)
            raise _OutdatedError

    def _refer(self, checkpoint: Outgoing, tag: str | None) -> None:
        """Commit: the name stands for the checkpoint from here on."""
        bucket, key = self._bucket, layout.ref_key(checkpoint.name)
        text = layout.reference(checkpoint.name, checkpoint.manifest)

        def check(there: str | None) -> None:
            if there is not None and not self._replace:
                raise self._taken(checkpoint)
            self._guard.check(there)

        with self._guard.lock():
            self._guard.check(self._seen.get(checkpoint.name))
            if not bucket.put_if(key, text, tag):
                refer(bucket, checkpoint.name, checkpoint.manifest, check)


def refer(
    bucket: Bucket, name: str, manifest: str | None, check: Callable[[str | None], None]
) -> None:
    """Make a checkpoint's name stand for `manifest`; if `manifest` is None, delete the name.

    A deleted name keeps a reference, which marks it as deleted. `check` is called before each
    attempt, and may raise an error to prevent the change. Its argument is the result of
    `layout.state_of` for the existing reference, or None if there is none.

    Raises:
        RemoteBusyError: Other writers kept changing the name.
    """
    key, text = layout.ref_key(name), layout.reference(name, manifest)
    for _ in range(_ATTEMPTS * 4):
        found = bucket.get(key, layout.TEXT_BYTES)
        if found is not None and found[0] == text:
            return  # ours, whose answer was lost, or the same of another
        check(None if found is None else layout.state_of(found, name, bucket.at(key)))
        if bucket.put_if(key, text, None if found is None else found[1]):
            return
    raise RemoteBusyError.at(bucket.at(key), "others wrote this reference again and again")


def _is_streamed(load: Load) -> bool:
    """Whether a container is read as it is sent, for it has one large piece."""
    return load.table.data_bytes > 2 * layout.CONTAINER_BYTES


def _keys(reused: Mapping[tuple[bytes, bool], ContainerId], loads: Sequence[Load]) -> set[str]:
    """The keys of the containers that a push relies on or sends, and of their tables."""
    containers = {*reused.values(), *(load.container for load in loads)}
    keys = {layout.container_key(each) for each in containers}
    return keys | {layout.table_key(each.name) for each in containers}
