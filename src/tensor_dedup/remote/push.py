"""Push checkpoints to a remote: only pieces that the remote lacks are transferred.

A name must not appear before its pieces, so a push takes these steps in the order of a commit on
disk:

1. Read what the names stand for, and the catalog: which pieces the remote has.
2. Write containers with the missing pieces, each before its table.
3. Write manifests and manifest pages.
4. Check that the containers on which the push relies exist, and write the catalog.
5. Write the references.

An interrupted push leaves objects to which nothing refers. The next attempt finds these containers
again, because their names depend on their content alone. If another writer changes or deletes what
a push relies on, the push begins again.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from tensor_dedup.digest import hand
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.catalog import (
    Catalog,
    CatalogChange,
    Trash,
    catalog_of,
    commit,
    listed,
    note_damage,
    noted_damage,
    read_catalog,
    rebuilt,
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
from tensor_dedup.remote.lease import LEASE_S, boottime
from tensor_dedup.remote.loads import DamagedRecordError, Load, Planner, content, fill
from tensor_dedup.remote.results import TransferListener, TransferResult
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format.names import marked_by
from tensor_dedup.store.reading.reader import StoredPieces

_AT_ONCE: Final = 3
# Of a smaller container it costs less to send it again than to ask whether it is there.
_ASKED_BYTES: Final = 8 << 20
# Where there are more containers, a list costs fewer requests than to ask for each: a server sends
# it in pages of so many.
_ASKED_CONTAINERS: Final = 8
_PAGE: Final = 1000
_ATTEMPTS: Final = 4


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
    dry_run: bool = False,
) -> TransferResult:
    """Push `checkpoints`, which are all in one store, under their own names.

    `open_pieces` opens pieces in the store, given by their digests, for reading. With `replace`,
    names may change what they stand for; if one stands for its checkpoint already, everything that
    the remote has lost of it is sent again. `guard` is asked before a name changes, and its errors
    end the push. With `dry_run`, nothing is written.

    Raises:
        RemoteNameTakenError: On the remote, a name stands for another checkpoint, and `replace` is
            False.
        NoConditionsError: The server does not keep conditions of writes; nothing was written.
        RemoteBusyError: Other writers kept changing the remote.
    """
    began = time.monotonic()
    work = _Push(bucket, checkpoints, open_pieces, progress, replace, guard or NameGuard())
    for _ in range(_ATTEMPTS):
        with suppress(_OutdatedError):
            unchanged = work.run(dry_run=dry_run)
            return work.result(began, unchanged=unchanged, done=not dry_run)
    what = "what it relied on was deleted there meanwhile, again and again"
    raise RemoteBusyError.at(bucket.url, what)


@dataclass(frozen=True, slots=True)
class _Relied:
    """The pieces of the remote on which a push relies, and where they are.

    `places` maps pieces, each with whether it is held without a base, to containers.
    """

    places: Mapping[tuple[bytes, bool], ContainerId]

    @property
    def containers(self) -> set[ContainerId]:
        return {*self.places.values()}

    def is_in(self, catalog: Catalog) -> bool:
        """Whether a catalog still says so."""
        return all(
            container in catalog.holders(digest, alone=alone)
            for (digest, alone), container in self.places.items()
        )


class _Push:
    def __init__(
        self,
        bucket: Bucket,
        checkpoints: Sequence[Outgoing],
        open_pieces: Callable[[set[bytes]], StoredPieces],
        progress: TransferListener,
        replace: bool,
        guard: NameGuard,
    ) -> None:
        self._bucket, self._checkpoints, self._guard = bucket, checkpoints, guard
        self._before = bucket.traffic.counts()
        self._open_pieces, self._progress, self._replace = open_pieces, progress, replace
        self._sizes: dict[bytes, int] = {}
        for each in checkpoints:
            self._sizes |= {digest: nbytes for digest, nbytes in each.wanted.items() if nbytes}
        self._planner = Planner(self._sizes)
        # Names that were written too late to know that what they lead to is there.
        self._late: set[str] = set()
        # Names that this push has written, late or not.
        self._written: set[str] = set()
        # What each name stood for when it was looked at.
        self._seen: dict[str, str | None] = {}
        self._moved_pieces = self._anchor_pieces = self._moved_bytes = 0

    def run(self, *, dry_run: bool) -> bool:
        """Push once; return whether the remote had everything."""
        bucket, read = self._bucket, boottime()
        looked = [*bucket.each(self._look, self._checkpoints)]
        tags = {n: tag for n, (is_there, tag) in enumerate(looked) if not is_there}
        # Of a name that is there all is there, unless it was found damaged since.
        if not tags and not (noted_damage(bucket) and self._lost(catalog_of(bucket))):
            return True
        if dry_run:
            self._count()
            return False
        catalog = self._have()
        tags |= {n: looked[n][1] for n in self._lost(catalog)}
        missing = {d: n for d, n in self._sizes.items() if not catalog.holders(d)}
        self._progress.saved(sum(n for d, n in self._sizes.items() if d not in missing))
        checkpoints = [self._checkpoints[number] for number in tags]
        blobs = {part: blob for each in checkpoints for part, blob in each.blobs.items()}
        self._refuse_deleting(catalog, _keys(self._relied_on(catalog, missing, ()), (), blobs))
        loads = self._send_containers(catalog, missing)
        for _ in bucket.each(lambda part: self._send_manifest(part, blobs[part]), blobs):
            pass
        relied = self._relied_on(catalog, missing, loads)
        self._check_there(catalog, relied)
        self._publish(catalog, relied, loads, blobs)
        self._refer_all(tags, read)
        return False

    def result(self, began: float, *, unchanged: bool, done: bool) -> TransferResult:
        """Return what was pushed since `began`."""
        nbytes, calls = self._bucket.traffic.counts()
        counted = [each for each in self._checkpoints if marked_by(each.name) is None]
        return TransferResult(
            url=self._bucket.url,
            names=tuple(each.name for each in counted),
            pieces=len(self._sizes),
            nbytes=sum(each.nbytes for each in counted),
            moved_pieces=self._moved_pieces,
            moved_bytes=self._moved_bytes,
            wire_bytes=nbytes - self._before[0],
            requests=calls - self._before[1],
            seconds=time.monotonic() - began,
            unchanged=unchanged,
            anchor_pieces=self._anchor_pieces,
            done=done,
        )

    # --- what is there

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
        if checkpoint.name in self._written and manifest != checkpoint.manifest:
            # Another writer came after this push: to write it again would be to undo that.
            return True, tag
        self._guard.check(manifest)
        if manifest is not None and manifest != checkpoint.manifest and not self._replace:
            raise self._taken(checkpoint)
        self._seen[checkpoint.name] = manifest
        is_there = manifest == checkpoint.manifest and checkpoint.name not in self._late
        return is_there and not self._replace, tag

    def _taken(self, checkpoint: Outgoing) -> RemoteNameTakenError:
        what = f"{checkpoint.name!r} stands for another checkpoint there"
        return RemoteNameTakenError.at(self._bucket.url, what, name=checkpoint.name)

    def _lost(self, catalog: Catalog) -> list[int]:
        """The checkpoints of which something is lost, by the catalog and the damage it notes."""
        gone = {digest for digest in self._sizes if not catalog.holders(digest)}
        return [
            n
            for n, each in enumerate(self._checkpoints)
            if self._seen[each.name] == each.manifest
            and (
                not gone.isdisjoint(each.wanted)
                or not catalog.damaged.isdisjoint(map(layout.manifest_key, each.blobs))
            )
        ]

    @property
    def _is_mending(self) -> bool:
        """Whether a checkpoint is replaced by itself, so that what is lost of it is sent again."""
        return self._replace and any(
            self._seen[each.name] == each.manifest for each in self._checkpoints
        )

    def _count(self) -> None:
        """Count what is missing there, for a dry run."""
        bucket = self._bucket
        bucket.check_writable()
        missing = {*self._sizes}
        if not is_free(bucket):
            catalog = rebuilt(bucket) if self._is_mending else catalog_of(bucket)
            held = {digest: catalog.holders(digest) for digest in missing}
            gone = self._gone(catalog, {c for places in held.values() for c in places})
            missing = {
                digest
                for digest, places in held.items()
                if gone.issuperset(map(layout.container_key, places))
            }
        self._moved_pieces = len(missing)
        self._moved_bytes = sum(self._sizes[digest] for digest in missing)

    def _have(self) -> Catalog:
        """Read the catalog of a remote that may be written to; make one where nothing is."""
        bucket = self._bucket
        with suppress(DamagedRemoteError, MissingRemoteError, NewerFormatError):
            found = read_catalog(bucket, with_trash=True)
            if found is not None:
                check_still(bucket)
                return rebuilt(bucket) if self._is_mending else found
        # A new remote has no catalog, unless another first push was faster: `commit` sees that.
        return Catalog(rebuilt=True) if prepare(bucket) else catalog_of(bucket)

    def _relied_on(
        self, catalog: Catalog, missing: Collection[bytes], loads: Sequence[Load]
    ) -> _Relied:
        """What is there of the checkpoints, and the bases there of the deltas that are sent."""
        records = [record for load in loads for record in load.table.records]
        bases = {base for record in records for base in record.bases}
        places: dict[tuple[bytes, bool], ContainerId] = {}
        for digest in (d for d in self._sizes if d not in missing):
            alone = bool(catalog.holders(digest, alone=True))
            places[digest, alone] = catalog.holders(digest)[0]
        for digest in bases - {record.digest for record in records}:
            places[digest, True] = catalog.holders(digest, alone=True)[0]
        return _Relied(places)

    def _refuse_deleting(self, catalog: Catalog, keys: Collection[str]) -> None:
        """Refuse to rely on what a gc deletes. One that was killed stays on the list for an hour.

        Asked before anything is sent, too: what the catalog said when it was read, counts.
        """
        if not catalog.trash.deleting.isdisjoint(keys):
            what = "a gc deletes what this push needs; if none does, run one an hour later"
            raise RemoteBusyError.at(self._bucket.at(layout.HEAD), what)

    # --- what is sent

    def _send_containers(self, catalog: Catalog, missing: Mapping[bytes, int]) -> Sequence[Load]:
        """Send the missing pieces, in the containers that are returned."""
        loads: Sequence[Load] = ()
        if missing:
            with self._open_pieces({*missing}) as source:
                while True:
                    loads = self._planner.plan(source, missing, catalog)
                    relied = self._relied_on(catalog, missing, loads)
                    self._refuse_deleting(catalog, _keys(relied, loads, ()))
                    try:
                        self._upload(source, loads, catalog)
                        break
                    except DamagedRecordError as error:
                        self._planner.note(error)
        sent = [record for load in loads for record in load.table.records]
        self._moved_pieces, self._anchor_pieces = len(missing), len(sent) - len(missing)
        self._moved_bytes = sum(record.stored for record in sent)
        return loads

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
                is_damaged = layout.container_key(load.container) in catalog.damaged
                ask = may_be_there and load.nbytes >= _ASKED_BYTES and not is_damaged
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

    def _send_manifest(self, part: str, blob: bytes) -> None:
        self._bucket.put(layout.manifest_key(part), [memoryview(blob)])

    # --- what is committed

    def _check_there(self, catalog: Catalog, relied: _Relied) -> None:
        """Check that what the catalog says is there: a reference must not lead to nothing.

        What is not there is noted as damaged and leaves the catalog, so that whoever has lost it is
        told; the push begins anew and sends what was in it.
        """
        if gone := self._gone(catalog, relied.containers):
            check_remote(self._bucket)  # or a catalog would be made where all of it has gone
            note_damage(self._bucket, gone)
            raise _OutdatedError

    def _gone(self, catalog: Catalog, containers: Iterable[ContainerId]) -> set[str]:
        """The keys of those of the catalog's `containers` that are not there."""
        sizes = {layout.container_key(c): catalog.containers[c].nbytes for c in containers}
        if len(sizes) > max(_ASKED_CONTAINERS, len(catalog.containers) // _PAGE):
            found = self._bucket.list(layout.CONTAINERS)
            there = {s.key for s in found if sizes.get(s.key) == s.size}
            sizes = {key: nbytes for key, nbytes in sizes.items() if key not in there}
        return self._absent(sizes)

    def _absent(self, sizes: Mapping[str, int | None]) -> set[str]:
        """Those of these objects that are not there, or not with the size, if one is given.

        They are asked for twice: to note as damaged what is whole would be to send it again.
        """
        bucket, absent = self._bucket, {*sizes}
        for _ in range(2):
            found = {s.key: s.size for s in bucket.each(bucket.head, absent) if s is not None}
            absent = {k for k in absent if k not in found or sizes[k] not in (None, found[k])}
        return absent

    def _publish(
        self,
        catalog: Catalog,
        relied: _Relied,
        loads: Sequence[Load],
        blobs: Collection[str],
    ) -> None:
        """Enter the new containers in the catalog, and see that no gc takes what is relied on.

        A delta is relied on only where it is listed now: a gc leaves it out when it condemns what
        that is against, which this push does not know and so could not take off that list.
        """
        keys = _keys(relied, loads, blobs)
        new = [listed(load.container, load.table) for load in loads]

        def change(now: Catalog) -> CatalogChange:
            self._refuse_deleting(now, keys)
            if not relied.is_in(now) or not (now.damaged - catalog.damaged).isdisjoint(keys):
                raise _OutdatedError
            condemned = {k: when for k, when in now.trash.condemned.items() if k not in keys}
            trash = Trash(condemned, now.trash.deletion)
            return CatalogChange(*with_more(now, new), trash, now.damaged - keys)

        # Written even where it says nothing new: so a gc that has planned meanwhile begins anew.
        if commit(self._bucket, catalog, change).tag != catalog.tag:
            self._check_sent(_keys(_Relied({}), loads, blobs))

    def _check_sent(self, keys: Collection[str]) -> None:
        """Check that what was sent is there, where others wrote the catalog meanwhile.

        A gc may have deleted what was garbage until then, and was sent again between its last look
        and its deletion. From here on no gc does: what is entered is on the list of none.
        """
        if gone := self._absent(dict.fromkeys(keys)):
            note_damage(self._bucket, gone)
            raise _OutdatedError

    def _refer_all(self, tags: Mapping[int, str | None], read: float) -> None:
        """Write the references, unless so much time has passed that a gc may have deleted since."""
        for number, tag in tags.items():
            # What is relied on may be condemned and deleted in a lease: then begin with what is
            # there now, which costs no more than to ask for each container.
            if boottime() - read > LEASE_S / 2:
                raise _OutdatedError
            self._refer(self._checkpoints[number], tag)
            if boottime() - read > LEASE_S / 2:  # the machine slept in between
                self._late.add(self._checkpoints[number].name)
                raise _OutdatedError

    def _refer(self, checkpoint: Outgoing, tag: str | None) -> None:
        """Commit: the name stands for the checkpoint from here on."""
        bucket = self._bucket

        def check(there: str | None) -> None:
            if there is not None and not self._replace:
                raise self._taken(checkpoint)
            self._guard.check(there)

        with self._guard.lock():
            self._guard.check(self._seen.get(checkpoint.name))
            write_ref(bucket, checkpoint.name, checkpoint.manifest, tag, check)
        self._written.add(checkpoint.name)


def refer(
    bucket: Bucket, name: str, manifest: str | None, check: Callable[[str | None], None]
) -> None:
    """Make a checkpoint's name stand for `manifest`; if `manifest` is None, delete the name.

    A deleted name keeps a reference, which marks it as deleted. `check` is called before the
    change, and may raise an error to prevent it. Its argument is the result of `layout.state_of`
    for the existing reference, or None if there is none.

    Raises:
        RemoteBusyError: Another writer changed the name meanwhile.
    """
    key = layout.ref_key(name)
    found = bucket.get(key, layout.TEXT_BYTES)
    if found is None or found[0] != layout.reference(name, manifest):
        check(None if found is None else layout.state_of(found, name, bucket.at(key)))
        write_ref(bucket, name, manifest, None if found is None else found[1])


def write_ref(
    bucket: Bucket,
    name: str,
    manifest: str | None,
    tag: str | None,
    check: Callable[[str | None], None] = lambda _: None,
) -> None:
    """Write the reference of `name` if it still has the `tag` that it had when it was read.

    `manifest` is as for `refer`. A reference that another writer has changed is not written again:
    the first write may have been carried out although its answer was lost, and be what the other
    writer replaced. `check` is then called with the present state, and may raise an error.

    Raises:
        RemoteBusyError: Another writer changed the name.
    """
    key, text = layout.ref_key(name), layout.reference(name, manifest)
    for _ in range(_ATTEMPTS):
        if bucket.put_if(key, text, tag):
            return
        found = bucket.get(key, layout.TEXT_BYTES)
        if found is not None and found[0] == text:
            return  # ours, whose answer was lost, or the same of another
        if (None if found is None else found[1]) != tag:
            check(None if found is None else layout.state_of(found, name, bucket.at(key)))
            raise RemoteBusyError.at(bucket.at(key), f"another writer changed {name!r} meanwhile")
    raise RemoteBusyError.at(bucket.at(key), "the server refuses each change of this reference")


def _is_streamed(load: Load) -> bool:
    """Whether a container is read as it is sent, for it has one large piece."""
    return load.table.data_bytes > 2 * layout.CONTAINER_BYTES


def _keys(relied: _Relied, loads: Sequence[Load], manifests: Collection[str]) -> set[str]:
    """The keys of containers that a push relies on or sends, of their tables, and of manifests."""
    containers = relied.containers | {load.container for load in loads}
    keys = {layout.container_key(each) for each in containers}
    keys |= {layout.table_key(each.name) for each in containers}
    return keys | {layout.manifest_key(part) for part in manifests}
