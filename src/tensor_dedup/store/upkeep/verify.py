"""Verification of a store: check its metadata and a share of its data, and act on the faults.

- A container with a damaged table is moved to the quarantine. So are damaged manifests and damaged
  pages of manifests.
- A damaged piece stays in its container, but is listed as damaged and not read again.
- A damaged reference stays in place, because it is the only trace of its name. As long as it
  exists, gc deletes nothing.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    CorruptFrameError,
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    is_unreadable,
)
from tensor_dedup.store.files import Handle
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.layout import TABLE_SUFFIX
from tensor_dedup.store.format.names import marked_by
from tensor_dedup.store.format.tables import ENCODED, Record, Table
from tensor_dedup.store.hashing import Hasher, ProgressListener, Range
from tensor_dedup.store.index import Entry, StoreIndex, entry_of
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.decoding import base_of, fill_leaves, read_chunk, read_head
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.upkeep.inventory import Inventory, Problem, take_inventory


class Scrubber:
    """A checker for the encoded pieces in delta containers.

    It checks both the stored bytes and the decoded bytes. Use it inside `with locks.session(...):`.
    """

    def __init__(
        self, objects: Objects, index: StoreIndex, hasher: Hasher, progress: ProgressListener
    ) -> None:
        self._objects, self._index = objects, index
        self._hasher, self._progress = hasher, progress

    def wrong(self, handle: Handle, records: Sequence[Record]) -> "list[BadRecord]":
        """Return those of `records` whose stored or decoded bytes are wrong or cannot be read.

        `handle` is the file that holds the pieces. If a piece that a delta is encoded against
        cannot be read, only the stored bytes of the delta are checked.
        """
        bases = {base for record in records for base in record.bases}
        with StoredPieces(self._objects, self._index, bases) as pieces:
            found = self._hasher.each(partial(self._checked, handle, pieces), records)
            return [bad for bad in found if bad is not None]

    def _checked(self, handle: Handle, pieces: StoredPieces, record: Record) -> "BadRecord | None":
        try:
            right = self._chunks_right(handle, record)
            right = right and self._leaves_right(handle, pieces, record)
            return None if right else BadRecord(record)
        except (CorruptTensorError, MissingObjectError):
            return None  # of the base, which is named where it is checked itself
        except OSError as error:
            if not is_unreadable(error):
                raise
            return BadRecord(record, unreadable=True)
        finally:
            self._progress.advance(record.nbytes)

    def _chunks_right(self, handle: Handle, record: Record) -> bool:
        files = self._objects.files
        try:
            return all(
                chunk.holds(read_chunk(files, handle, record, chunk))
                for chunk in read_head(files, handle, record)
            )
        except CorruptFrameError:
            return False

    def _leaves_right(self, handle: Handle, pieces: StoredPieces, record: Record) -> bool:
        base = base_of(record, pieces.read_leaf)
        memory = memoryview(bytearray(min(LEAF_BYTES, record.nbytes)))
        for start in range(0, record.nbytes, LEAF_BYTES):
            view = memory[: record.nbytes - start]
            if not fill_leaves(self._objects.files, handle, record, start, view, base):
                return False
        return True


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A stored piece whose bytes are wrong. If `unreadable` is True, the disk cannot read them."""

    record: Record
    unreadable: bool = False


_SHOWN_USERS = 5
_GIVE = "run `tensor-dedup repair --from PATH` with a path that holds them"
_IN_PLACE = "in a file indexed in place; run `tensor-dedup repair`"
_GAP_STEP = 1 << 20
_STAIN = "is not zero"
_UNREADABLE = "cannot be read from the disk"
# Damage to these leaves nothing that could be read: the whole file is set aside.
_SET_ASIDE = frozenset({"manifest", "page", "table", "container"})


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in a store: its kind, the file, a description, and the affected checkpoints.

    The kinds are:

    - `reference`, `manifest`, `page`, `table`, `container`, `list` (of damaged pieces) and `index`
      name what is damaged.
    - `alien` is a file that the format does not define.
    - `tensor` is a damaged piece.
    - `padding` is a gap in a container that is not zero.
    - `lost` is a piece without an intact copy.
    - `exposed` is a piece whose only intact copy is in a file outside the store.
    """

    kind: str
    path: str
    what: str
    affected: tuple[str, ...] = ()


@dataclass
class VerifyResult:
    """The result of `verify`: the faults that were found, and how much was checked."""

    level: str
    faults: list[Fault] = field(default_factory=list)
    containers: int = 0
    checkpoints: int = 0
    bytes_checked: int = 0

    @property
    def fine(self) -> bool:
        """Whether no faults were found."""
        return not self.faults

    def to_dict(self) -> dict[str, object]:
        """Return the result as a dict for JSON."""
        return {
            "fine": self.fine,
            "level": self.level,
            "checkpoints": self.checkpoints,
            "containers": self.containers,
            "bytes_checked": self.bytes_checked,
            "faults": [
                {"kind": f.kind, "path": f.path, "what": f.what, "affected": list(f.affected)}
                for f in self.faults
            ],
        }


@dataclass(frozen=True, slots=True)
class Level:
    """How much data is verified: a share of the pieces, from 0 (none) to 1 (all).

    With a share of 1, the padding between pieces is checked, too. `seed` makes the choice of the
    pieces repeatable.
    """

    share: float
    seed: int | None = None

    @property
    def name(self) -> str:
        """The name of the level: `structure`, `sample` or `full`."""
        if self.share >= 1:
            return "full"
        return "sample" if self.share > 0 else "structure"


def verify(
    objects: Objects, index: StoreIndex, hasher: Hasher, level: Level, progress: ProgressListener
) -> VerifyResult:
    """Check a store and quarantine faults, without repairing; return the result.

    Call it inside `with locks.session(...):`.
    """
    found = take_inventory(objects)
    result = VerifyResult(level.name, checkpoints=len(found.checkpoints))
    for problem in found.problems:
        _set_aside(objects, problem)
        name = problem.checkpoint
        affected = (marked_by(name) or name,) if name else ()
        result.faults.append(Fault(problem.kind, str(problem.path), str(problem.error), affected))
    _check_index(objects, index, found, result)
    scrubber = Scrubber(objects, index, hasher, progress)
    work = _Check(objects, hasher, found, result, progress, scrubber)
    chosen = _choose(found, level)
    progress.start(sum(record.nbytes for records in chosen.values() for record in records))
    for container, records in chosen.items():
        result.containers += 1
        if level.share > 0:
            work.check(container, records, padding=level.share >= 1)
    _say_what_is_lost(objects, found, result, work.named)
    return result


def _say_what_is_lost(
    objects: Objects, found: Inventory, result: VerifyResult, damaged: Sequence[tuple[int, bytes]]
) -> None:
    """Add what helps to the faults of damaged pieces, and a fault for each other that is lost.

    Damaged ones are given with the numbers of their faults.
    """
    lost, exposed = found.lost(), found.exposed()
    needed = lost.keys() | found.lost_anchors()
    for number, digest in damaged:
        fault = result.faults[number]
        if digest in needed:
            step = _GIVE
        elif digest in exposed:
            step = f"the copy that is right is {_IN_PLACE}"
        else:
            step = "no checkpoint needs this copy"
        result.faults[number] = replace(fault, what=f"{fault.what}; {step}")
    named = {digest for _, digest in damaged}
    for digest, nbytes in lost.items():
        if digest in named:
            continue
        gone = found.missing_bases(digest)
        where = "in no container" if not gone else f"stored against {gone[0].hex()}, which is lost"
        what = f"{nbytes} bytes of digest {digest.hex()} are {where}; {_GIVE}"
        result.faults.append(Fault("lost", str(objects.layout.root), what, _users(found, digest)))
    for digest, nbytes in exposed.items():
        if digest in named:
            continue
        what = (
            f"of {nbytes} bytes of digest {digest.hex()} the copy here is damaged, and the one "
            f"that is right is {_IN_PLACE}"
        )
        users = _users(found, digest)
        result.faults.append(Fault("exposed", str(objects.layout.root), what, users))


def _choose(found: Inventory, level: Level) -> dict[ContainerId, list[Record]]:
    dice = random.Random(level.seed)
    return {
        container: [r for r in table.records if level.share >= 1 or dice.random() < level.share]
        for container, table in sorted(found.tables.items(), key=lambda item: _rank(item[0]))
        if container not in found.changed  # a file of somebody else's, who may
    }


def _rank(container: ContainerId) -> tuple[bool, ContainerId]:
    """What deltas are against is read before them: it must be right for them to be right."""
    return container.kind == ENCODED, container


def _set_aside(objects: Objects, problem: Problem) -> None:
    if not isinstance(problem.error, DamagedFileError) or problem.kind not in _SET_ASIDE:
        return
    path = problem.path
    paths = [path]
    if path.name.endswith(TABLE_SUFFIX):
        paths.append(path.with_name(path.name.removesuffix(".table")))
    elif path.suffix == ".raw":
        paths.insert(0, path.with_name(path.name + ".table"))
    for each in paths:
        try:
            objects.set_aside(each, objects.layout.quarantine)
        except FileNotFoundError:  # two checkpoints may lead to one page
            pass
        except OSError as error:  # where not even its inode can be read it stays in its place
            if not is_unreadable(error):
                raise


class _Check:
    """Reads containers and keeps their lists of bad places right."""

    def __init__(
        self,
        objects: Objects,
        hasher: Hasher,
        found: Inventory,
        result: VerifyResult,
        progress: ProgressListener,
        scrubber: Scrubber,
    ) -> None:
        self._scrubber = scrubber
        self._objects, self._hasher = objects, hasher
        self._found, self._result, self._progress = found, result, progress
        # The numbers of faults that say which piece is damaged, and not yet what helps.
        self.named: list[tuple[int, bytes]] = []

    def check(self, container: ContainerId, records: Sequence[Record], *, padding: bool) -> None:
        """Compare records with their digests, and the padding with zeros."""
        table, before = self._found.tables[container], self._found.bad[container]
        path = self._objects.containers.data_path(container, table)
        try:
            handle = self._objects.containers.open_data(container, table)
        except OSError as error:
            if not is_unreadable(error):
                raise
            wrong = [BadRecord(record, unreadable=True) for record in table.records]
            stained: dict[int, str] = {}
        else:
            try:
                check = self._scrubber.wrong if container.kind == ENCODED else self._wrong
                suspects = check(handle, records)
                wrong = [again for bad in suspects for again in check(handle, [bad.record])]
                stained = dict(_stained(self._objects, handle, table)) if padding else {}
            finally:
                self._objects.files.close(handle)
        self._result.bytes_checked += sum(record.nbytes for record in records)
        for bad in wrong:
            self._say(path, bad, before)
        self._result.faults += [
            Fault("padding", str(path), f"the padding at {at} {what}")
            for at, what in stained.items()
            if what == _STAIN or at not in before  # of a page that is lost once is enough
        ]
        checked = {record.offset for record in records}
        kept = before - checked if not padding else frozenset[int]()
        now = kept | {bad.record.offset for bad in wrong} | stained.keys()
        if now != before:
            self._objects.set_bad_offsets(container.name, sorted(now))
            self._found.bad[container] = frozenset(now)

    def _wrong(self, handle: Handle, records: Sequence[Record]) -> list[BadRecord]:
        ranges = [Range(record.offset, record.nbytes) for record in records]
        hashed = self._hasher.hash_readable(handle, ranges, self._progress)
        return [
            BadRecord(record, unreadable=found is None)
            for record, found in zip(records, hashed, strict=True)
            if found is None or found.digest != record.digest
        ]

    def _say(self, path: Path, bad: BadRecord, before: frozenset[int]) -> None:
        record = bad.record
        if record.offset in before:
            return  # known and kept from being read; `lost` says so if nothing replaces it
        how = "cannot be read from the disk: digest" if bad.unreadable else "do not have the digest"
        what = f"the {record.stored} bytes at {record.offset} {how} {record.digest.hex()}"
        self.named.append((len(self._result.faults), record.digest))
        self._result.faults.append(
            Fault("tensor", str(path), what, _users(self._found, record.digest))
        )


def _stained(objects: Objects, handle: Handle, table: Table) -> Iterator[tuple[int, str]]:
    """Where padding is not zero, or cannot be read."""
    for start, nbytes in tables.gaps(table):
        for at in range(start, start + nbytes, _GAP_STEP):
            data = bytearray(min(_GAP_STEP, start + nbytes - at))
            try:
                objects.files.pread(handle, memoryview(data), at)
            except OSError as error:
                if not is_unreadable(error):
                    raise
                yield start, _UNREADABLE
                break
            if any(data):
                yield start, _STAIN
                break


def _check_index(
    objects: Objects, index: StoreIndex, found: Inventory, result: VerifyResult
) -> None:
    """Compare what the index says with what the tables say; a wrong one is dropped."""
    wrong = [
        container
        for container in index.containers()
        if container in found.tables and index.places(container) != _places(found, container)
    ]
    if wrong or index.broken:
        what = f"it is wrong about {len(wrong)} containers" if wrong else "it was broken"
        fault = Fault("index", str(objects.layout.index), f"{what}; it is made anew by itself")
        result.faults.append(fault)
        index.broken = True


def _places(found: Inventory, container: ContainerId) -> set[Entry]:
    return {entry_of(record) for record in found.good(container)}


def _users(found: Inventory, digest: bytes) -> tuple[str, ...]:
    users = list(found.users.get(digest, ()))
    for other in found.deltas_of(digest):
        users += found.users.get(other, ())
    return tuple(dict.fromkeys(users))[:_SHOWN_USERS]
