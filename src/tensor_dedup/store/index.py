"""The index from digests to containers: a SQLite database that is a cache and may be deleted.

The tables in the containers are authoritative. When a session opens the index, entries of missing
containers are dropped, and entries of new containers are added. If the SQLite file cannot be used,
the index is built in memory for that session.
"""

import contextlib
import re
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import msgspec
from blake3 import blake3

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.sqlite import marks, transaction
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    unreadable_as_damage,
)
from tensor_dedup.store.format.external import EXTERNAL, ExternalFile
from tensor_dedup.store.format.tables import DIGEST_BYTES, Record, Table
from tensor_dedup.store.objects import Objects

if TYPE_CHECKING:
    from tensor_dedup.store.files import Handle

_APPLICATION_ID = int.from_bytes(b"TDIX")  # which SQLite keeps in the file's header
_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE container (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, state TEXT NOT NULL);
CREATE TABLE place (
    digest BLOB NOT NULL, container INTEGER NOT NULL, offset INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, base BLOB, PRIMARY KEY (digest, container, offset)) WITHOUT ROWID;
CREATE TABLE leaf (
    digest BLOB NOT NULL, number INTEGER NOT NULL, container INTEGER NOT NULL,
    offset INTEGER NOT NULL, PRIMARY KEY (digest, number, container, offset)) WITHOUT ROWID;
CREATE TABLE part (
    container INTEGER NOT NULL, offset INTEGER NOT NULL, number INTEGER NOT NULL,
    digest BLOB NOT NULL, PRIMARY KEY (container, offset, number)) WITHOUT ROWID;
"""
# A delta can be read only with its base and all of its parts, and each only from a place that is no
# delta itself, nor in a file that others may change.
_ANCHORED = (
    "EXISTS (SELECT 1 FROM place b JOIN container d ON d.id = b.container "
    f"WHERE b.digest = {{}} AND b.base IS NULL AND d.kind != '{EXTERNAL}')"
)
_READABLE = (
    f"(p.base IS NULL OR ({_ANCHORED.format('p.base')} AND NOT EXISTS (SELECT 1 FROM part q "
    f"WHERE q.container = p.container AND q.offset = p.offset "
    f"AND NOT {_ANCHORED.format('q.digest')})))"
)
_EMPTY = (0, 0)
_PAGE_BYTES = 1024
# A digest stands in the index by so many bytes where what it finds is compared anyway.
_LEAF_BYTES_KEPT = 16
# So many pieces that have a leaf in common with another one are looked at.
_MOST_ALIKE = 8
_MEMORY = Path(":memory:")
_BATCH = 500
_SIZE = re.compile("[: ]")  # what ends the size of the file, with which every state begins
_LOCK_WAIT_S = 10.0  # it is held for as long as it takes to unlink three files
# These speak of the moment or of the disk, and say nothing against the file.
_PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_PERM,
    }
)
# But these are said of a page that the disk cannot read: no other session will read it either.
_LOST = frozenset(
    {
        sqlite3.SQLITE_IOERR_READ,
        sqlite3.SQLITE_IOERR_SHORT_READ,
        sqlite3.SQLITE_IOERR_DATA,
        sqlite3.SQLITE_IOERR_CORRUPTFS,
    }
)
_NAME = re.compile("[0-9a-f]{64}")
_KIND = re.compile("[a-z0-9_]+")


@dataclass(frozen=True, slots=True)
class PieceLocation:
    """The location of a stored piece: its container, its offset there, and its decoded size.

    `file_bytes` is the size of the container's file. If other pieces are needed to decode the
    piece, `base` and `parts` are their digests.
    """

    container: ContainerId
    offset: int
    nbytes: int
    base: bytes | None = None
    file_bytes: int = 0
    parts: tuple[bytes, ...] = ()

    @property
    def bases(self) -> tuple[bytes, ...]:
        """The digests of all other pieces that are needed to decode the piece at this location."""
        return () if self.base is None else (self.base, *self.parts)


@dataclass(frozen=True, slots=True)
class PieceAlike:
    """The location of a stored piece that shares leaves with the piece that was searched for."""

    container: ContainerId
    offset: int


Entry: TypeAlias = tuple[bytes, int, int, bytes | None, tuple[bytes, ...]]
"""A digest, its offset and size, its base, and its parts, in order."""


def entry_of(record: Record) -> Entry:
    """Return the index entry for `record`, a piece in the table of a container."""
    parts = tuple(record.parts.values())
    return record.digest, record.offset, record.nbytes, record.base, parts


class StoreIndex:
    """The index from digests to containers, opened by `open_index`. Use it from one thread."""

    def __init__(self, db: sqlite3.Connection, objects: Objects) -> None:
        self.broken = False
        self.fresh = False
        self._db = db
        self._objects = objects

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def relax(self) -> None:
        """Let later commits return without waiting for the disk.

        Entries that a crash loses are rebuilt from the containers.
        """
        with contextlib.suppress(sqlite3.DatabaseError):
            self._db.execute("PRAGMA synchronous = NORMAL")

    def refresh(self, written: Collection[ContainerId] = ()) -> None:
        """Add entries of new containers and drop those of missing ones.

        The containers in `written` are read even if the index has entries for them, because these
        entries may be damaged. If SQLite fails, the index continues in memory.
        """
        try:
            self.update(written)
        except sqlite3.DatabaseError:
            self._fall_back()

    def update(self, written: Collection[ContainerId] = ()) -> None:
        """Add entries of new containers and drop those of missing ones.

        The containers in `written` are read even if the index has entries for them. Errors of
        SQLite propagate.
        """
        rows = self._rows("SELECT name, kind, state FROM container")
        known = {_container(name, kind): str(state) for name, kind, state in rows}
        bad = set(self._objects.bad_containers())
        there = set()
        for container in self._objects.containers:
            state = self._state(container, bad, known.get(container))
            if state is not None:
                there.add(container)
                if known.get(container) != state or container in written:
                    self._take(container, state)
        with transaction(self._db):
            self._delete(known.keys() - there)
        self.fresh = True

    def add(self, container: ContainerId, table: Table, file_bytes: int) -> None:
        """Add the entries of a container that was just written.

        `table` is its table, and `file_bytes` is the size of its file.
        """
        try:
            with transaction(self._db):
                # To delete looks at every place of every container.
                if self._known_state(container) is not None:
                    self._delete([container])
                self._insert(container, table, str(file_bytes), frozenset())
        except sqlite3.DatabaseError:
            self._fall_back()

    def still_so(self, containers: Iterable[ContainerId]) -> bool:
        """Return whether `containers` all exist and have not changed since they were indexed."""
        wanted = list(containers)
        bad = set(self._objects.bad_containers())
        try:
            known = {container: self._known_state(container) for container in wanted}
        except sqlite3.DatabaseError:
            self._fall_back()
            return False
        return all(
            state is not None and self._state(container, bad, state) == state
            for container, state in known.items()
        )

    def _known_state(self, container: ContainerId) -> str | None:
        rows = self._rows(
            "SELECT state FROM container WHERE name = ? AND kind = ?",
            (container.name, container.kind),
        )
        return str(rows[0][0]) if rows else None

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """All rows of a query."""
        return self._db.execute(query, values).fetchall()

    def find(
        self, digests: Iterable[bytes], *, external: bool = False
    ) -> dict[bytes, list[PieceLocation]]:
        """Return the readable locations of each digest. Digests without a location are left out.

        With `external`, locations in files outside the store are included; these files may change.
        """
        wanted = list(digests)
        try:
            return self._find(wanted, external=external)
        except sqlite3.DatabaseError:
            self._fall_back()
            return self._find(wanted, external=external)

    def _fall_back(self) -> None:
        # It could be opened, so the damage is deeper inside: the containers know it all. The file
        # goes when this session ends.
        self.broken = True
        self._db = _in_memory(self._objects)
        self.update()

    def _find(self, wanted: list[bytes], *, external: bool) -> dict[bytes, list[PieceLocation]]:
        whose = "" if external else f"AND c.kind != '{EXTERNAL}' "
        found: dict[bytes, list[PieceLocation]] = {}
        for start in range(0, len(wanted), _BATCH):
            part = wanted[start : start + _BATCH]
            marks = ",".join("?" * len(part))
            rows = self._rows(
                "SELECT p.digest, c.name, c.kind, c.id, p.offset, p.nbytes, p.base, c.state "
                "FROM place p "
                f"JOIN container c ON c.id = p.container WHERE p.digest IN ({marks}) "
                f"AND {_READABLE} {whose}ORDER BY c.kind DESC, c.name, p.offset",
                part,
            )
            for digest, name, kind, row, offset, nbytes, base, state in rows:
                parts = self._parts(row, offset) if base is not None else ()
                key, at, length, under, own = _entry(digest, offset, nbytes, base, parts)
                with _malformed():
                    size = int(_SIZE.split(state, maxsplit=1)[0])
                place = PieceLocation(_container(name, kind), at, length, under, size, own)
                found.setdefault(key, []).append(place)
        return found

    def _parts(self, container: int, offset: int) -> list[bytes]:
        """The digests of the leaves of a record that are pieces of their own, in order."""
        rows = self._rows(
            "SELECT digest FROM part WHERE container = ? AND offset = ? ORDER BY number",
            (container, offset),
        )
        return [digest for (digest,) in rows]

    def find_alike(self, leaves: bytes) -> list[PieceAlike]:
        """Return the locations of up to eight pieces that seem to share leaves with a new piece.

        `leaves` are the concatenated leaf digests of the new piece. A leaf is shared if both pieces
        have it at the same offset. The piece with the most shared leaves comes first.

        Only a prefix of each digest is compared. The caller must compare the digests in the
        containers' tables. Some pieces are never found: those smaller than a leaf, those stored as
        differences, and those in files outside the store.
        """
        try:
            return self._find_alike(leaves)
        except sqlite3.DatabaseError:
            self._fall_back()
            return self._find_alike(leaves)

    def _find_alike(self, leaves: bytes) -> list[PieceAlike]:
        wanted = _numbered(leaves)
        common: Counter[tuple[str, str, int]] = Counter()
        for start in range(0, len(wanted), _BATCH):
            part = wanted[start : start + _BATCH]
            rows = self._rows(
                f"WITH wanted(digest, number) AS (VALUES {','.join(['(?, ?)'] * len(part))}) "
                "SELECT c.kind, c.name, l.offset, count(*) FROM wanted w "
                "JOIN leaf l ON l.digest = w.digest AND l.number = w.number "
                "JOIN container c ON c.id = l.container GROUP BY c.id, l.offset",
                [value for leaf in part for value in leaf],
            )
            with _malformed():
                for kind, name, at, count in rows:
                    common[str(kind), str(name), int(at)] += int(count)
        best = sorted(common, key=lambda place: (-common[place], place))[:_MOST_ALIKE]
        return [PieceAlike(_container(name, kind), at) for kind, name, at in best]

    def places(self, container: ContainerId) -> set[Entry]:
        """Return all entries of one container.

        The set is empty if the container is not in the index.
        """
        try:
            return self._places(container)
        except sqlite3.DatabaseError:
            self._fall_back()
            return self._places(container)

    def _places(self, container: ContainerId) -> set[Entry]:
        rows = self._rows(
            "SELECT p.digest, p.offset, p.nbytes, p.base, c.id FROM place p "
            "JOIN container c ON c.id = p.container WHERE c.name = ? AND c.kind = ?",
            (container.name, container.kind),
        )
        return {
            _entry(digest, offset, nbytes, base, self._parts(row, offset))
            for digest, offset, nbytes, base, row in rows
        }

    def containers(self) -> list[ContainerId]:
        """Return the containers in the index, sorted by name."""
        try:
            return self._containers()
        except sqlite3.DatabaseError:
            self._fall_back()
            return self._containers()

    def _containers(self) -> list[ContainerId]:
        rows = self._rows("SELECT name, kind FROM container ORDER BY name")
        return [_container(name, kind) for name, kind in rows]

    def _state(self, container: ContainerId, bad: set[str], known: str | None) -> str | None:
        """Changes when what can be read from a container changes; None: nothing can be."""
        state = self._own_state(container, bad)
        if container.kind != EXTERNAL or state is None:
            return state
        origin = self._origin(container, known)
        if origin is None:
            return None
        there = False
        with contextlib.suppress(DamagedFileError), unreadable_as_damage(origin.path):
            there = origin.is_still(self._objects.files.status(origin.path))
        return f"{state} {there} {msgspec.json.encode(origin.to_texts()).decode()}"

    def _origin(self, container: ContainerId, known: str | None) -> ExternalFile | None:
        """Which file a container indexes: as it was noted here, or as its table says."""
        with contextlib.suppress(msgspec.MsgspecError, IndexError, ValueError, DamagedFileError):
            texts = msgspec.json.decode((known or "").split(" ", 2)[2], type=list[str])
            return ExternalFile.from_texts(texts, int(texts[1]), _MEMORY)
        with contextlib.suppress(DamagedFileError, NewerFormatError, MissingObjectError):
            return self._objects.containers.origin(
                container, self._objects.containers.table(container)
            )
        return None

    def _own_state(self, container: ContainerId, bad: set[str]) -> str | None:
        layout, files = self._objects.layout, self._objects.files
        path = layout.container(container.name, container.kind)
        try:
            with unreadable_as_damage(path):
                status = files.status(path)
            if status is None:
                return None
            if container.name not in bad:
                return str(status.size)
            offsets = self._objects.bad_offsets(container.name)
        except (DamagedFileError, NewerFormatError):
            return None  # all of it is, or some, and nobody knows what
        return f"{status.size}:{blake3(repr(sorted(offsets)).encode()).hexdigest()}"

    def _take(self, container: ContainerId, state: str) -> None:
        try:
            table = self._objects.containers.table(container)
            bad = self._objects.bad_offsets(container.name)
        except (DamagedFileError, NewerFormatError, MissingObjectError):
            table = None  # verify names it; here it is a miss
        with transaction(self._db):
            # In one step with what follows: other processes refresh the same file.
            self._delete([container])
            if table is None:
                return
            if self._objects.containers.data_is_whole(container, table):
                self._insert(container, table, state, bad)
            elif container.kind == EXTERNAL:
                # Noted, so that its table is not read in every session; and nothing in it is there.
                self._insert(container, table, state, frozenset(r.offset for r in table.records))

    def _insert(
        self, container: ContainerId, table: Table, state: str, bad: frozenset[int]
    ) -> None:
        row = self._db.execute(
            "INSERT INTO container (name, kind, state) VALUES (?, ?, ?)",
            (container.name, container.kind, state),
        ).lastrowid
        self._db.executemany(
            "INSERT OR IGNORE INTO place VALUES (?, ?, ?, ?, ?)",
            [
                (record.digest, row, record.offset, record.nbytes, record.base)
                for record in table.records
                if record.offset not in bad
            ],
        )
        self._db.executemany(
            "INSERT INTO part VALUES (?, ?, ?, ?)",
            [
                (row, record.offset, number, digest)
                for record in table.records
                if record.offset not in bad
                for number, digest in record.parts.items()
            ],
        )
        if container.kind == EXTERNAL:
            return  # nothing is stored against what others may change
        self._db.executemany(
            "INSERT OR IGNORE INTO leaf VALUES (?, ?, ?, ?)",
            [
                (leaf, number, row, record.offset)
                for record in table.records
                if record.offset not in bad and record.base is None
                if record.nbytes >= LEAF_BYTES
                for leaf, number in _numbered(record.leaves)
            ],
        )

    def _delete(self, containers: Iterable[ContainerId]) -> None:
        names = [container.name for container in containers]
        for start in range(0, len(names), _BATCH):
            part = names[start : start + _BATCH]
            found = f"(SELECT id FROM container WHERE name IN ({','.join('?' * len(part))}))"
            # Looks at every leaf of every container, so not for those that have none.
            if self._rows(
                f"SELECT 1 FROM place WHERE container IN {found} "
                f"AND base IS NULL AND nbytes >= {LEAF_BYTES} LIMIT 1",
                part,
            ):
                self._db.execute(f"DELETE FROM leaf WHERE container IN {found}", part)
            self._db.execute(f"DELETE FROM part WHERE container IN {found}", part)
            self._db.execute(f"DELETE FROM place WHERE container IN {found}", part)
            self._db.execute(f"DELETE FROM container WHERE id IN {found}", part)


@contextlib.contextmanager
def _malformed() -> Iterator[None]:
    """Turn values that nobody wrote into SQLite's own error for a damaged file."""
    try:
        yield
    except (TypeError, ValueError) as error:
        found = sqlite3.DatabaseError(f"the database is malformed ({error})")
        found.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise found from error


def _container(name: object, kind: object) -> ContainerId:
    with _malformed():
        if not (isinstance(name, str) and isinstance(kind, str)):
            raise TypeError("a container is called otherwise")
        if _NAME.fullmatch(name) is None or _KIND.fullmatch(kind) is None:
            raise ValueError("no container is called so")
    return ContainerId(name, kind)


def _entry(
    digest: object, offset: object, nbytes: object, base: object, parts: Sequence[object]
) -> Entry:
    with _malformed():
        if not (isinstance(digest, bytes) and isinstance(offset, int) and isinstance(nbytes, int)):
            raise TypeError("an entry has other types")
        if not (base is None or isinstance(base, bytes)):
            raise TypeError("an entry has a base of another type")
        own = tuple(part for part in parts if isinstance(part, bytes))
        if len(own) != len(parts):
            raise TypeError("an entry has a part of another type")
    return digest, offset, nbytes, base, own


def _numbered(leaves: bytes) -> list[tuple[bytes, int]]:
    """Return the leaves by which a piece is found, as the index has them, and their numbers."""
    starts = range(0, len(leaves), DIGEST_BYTES)
    return [(leaves[at : at + _LEAF_BYTES_KEPT], number) for number, at in enumerate(starts)]


class _IndexFile:
    """The SQLite file, under the lock that keeps others from replacing it meanwhile."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._lock: Handle | None = None
        self.db: sqlite3.Connection | None = None

    def connect(self) -> sqlite3.Connection:
        files, layout = self._objects.files, self._objects.layout
        self._lock = files.open(layout.index_lock, "lock")
        if not files.flock(self._lock, exclusive=False, wait_s=_LOCK_WAIT_S):
            # Whoever replaces the file is stuck: this session does without.
            error = sqlite3.OperationalError(f"{layout.index_lock}: held for {_LOCK_WAIT_S:g} s")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        self.db = files.database(layout.index)
        _prepare(self.db)
        return self.db

    def close(self) -> None:
        if self.db is not None:
            self.db.close()
        if self._lock is not None:
            self._objects.files.close(self._lock)

    def remove(self) -> None:
        """Delete the broken file, unless another process still uses it."""
        self.close()
        files, layout = self._objects.files, self._objects.layout
        lock = files.open(layout.index_lock, "lock")
        try:
            if files.flock(lock, exclusive=True, wait_s=0):
                for path in layout.database_files():
                    with contextlib.suppress(FileNotFoundError):
                        files.unlink(path)
        finally:
            files.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def open_index(objects: Objects, *, update: bool = True) -> Iterator[StoreIndex]:
    """Context manager: while it is active, the index of a store is open; it provides the index.

    If `update` is True, the index is brought up to date first. If it is False, opening is fast even
    for a large store, but entries may be outdated or missing. A broken index is rebuilt, or
    replaced by an index in memory.
    """
    with contextlib.ExitStack() as undo:
        index = _usable(objects, undo, update=update)
        undo.callback(index.close)
        yield index
    if index.broken:
        with contextlib.suppress(OSError):
            drop_index(objects)


def _usable(objects: Objects, undo: contextlib.ExitStack, *, update: bool) -> StoreIndex:
    broken = False
    for _ in range(2):
        file = _IndexFile(objects)
        try:
            index = StoreIndex(file.connect(), objects)
            if update:
                index.update()
        except sqlite3.DatabaseError as error:
            file.close()
            if _says_nothing_of_the_file(error):
                break
            broken = broken or not isinstance(error, _OtherIndexError)
            with contextlib.suppress(OSError):
                file.remove()
        except BaseException:
            file.close()
            raise
        else:
            undo.callback(file.close)
            index.broken = broken
            return index
    index = StoreIndex(_in_memory(objects), objects)
    index.update()
    index.broken = broken
    return index


def _says_nothing_of_the_file(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF in _PASSING and code not in _LOST


def _in_memory(objects: Objects) -> sqlite3.Connection:
    db = objects.files.database(_MEMORY)
    _prepare(db)
    return db


def drop_index(objects: Objects) -> None:
    """Delete the index. The next session rebuilds it.

    If another session is using the index, do nothing.
    """
    _IndexFile(objects).remove()


class _OtherIndexError(sqlite3.DatabaseError):
    """The file is whole, and another database or another version of the index."""


def _prepare(db: sqlite3.Connection) -> None:
    found, wanted = marks(db), (_APPLICATION_ID, _SCHEMA_VERSION)
    if found not in (_EMPTY, wanted):
        raise _OtherIndexError(f"it is marked {found}, not {wanted}")
    # A small store has six tables that are nearly empty, each of at least a page.
    db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")  # of a new file
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA wal_autocheckpoint = 4000")  # pages: 4 MB, as with SQLite's own
    # A commit is durable before the manifest that relies on it is written.
    db.execute("PRAGMA synchronous = FULL")
    if found == _EMPTY:
        with transaction(db):
            if marks(db) == _EMPTY:  # another process may have been first
                for statement in _SCHEMA.split(";"):  # `executescript` would commit first
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
