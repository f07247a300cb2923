"""The containers whose pieces the background encoding has stored again, until they are removed.

The new containers are durable under their names before an old one is removed. For the removal, the
store's exclusive lock is held, as by a gc. It is first checked, in the tables on disk, that each
piece is in another container that is complete and readable. After a crash before the removal, the
pieces are stored twice, and the next gc keeps the old container and deletes the new ones.
"""

import logging
from collections.abc import Callable
from contextlib import suppress

from tensor_dedup.errors import StoreError
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    StoreBusyError,
    os_errors,
)
from tensor_dedup.store.format.tables import ENCODED, Record
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.writing.run_cache import Rewritten

_log = logging.getLogger(__name__)


class SupersededContainers:
    """Containers that others have replaced, and that wait to be removed.

    `moved` is called with each replacement after its old container was removed. Only the encoding
    thread changes the object. `bases` and the truth value are safe from any thread.
    """

    def __init__(self, objects: Objects, moved: Callable[[Rewritten], None]) -> None:
        self._objects, self._moved = objects, moved
        self._replaced: list[Rewritten] = []
        # What the deltas in each container of the store are against.
        self._needed: dict[ContainerId, frozenset[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def add(self, change: Rewritten) -> None:
        """Add a container that has just been replaced."""
        self._replaced.append(change)

    def bases(self) -> dict[bytes, bytes]:
        """Return the pieces that were encoded as deltas, and whose old container still exists.

        The result maps the digest of each piece to the digest of its new base.
        """
        return {piece: base for each in self._replaced for piece, base in each.deltas.items()}

    def containers(self) -> set[ContainerId]:
        """Return the containers that wait to be removed."""
        return {each.gone for each in self._replaced}

    def remove(self, wait_s: float) -> None:
        """Remove the containers; those that cannot be removed now stay until the next call.

        The method waits up to `wait_s` seconds for those that read or write the store.
        """
        while self._replaced:
            each = self._replaced[0]
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
            self._replaced = self._replaced[1:]
            if removed:
                self._moved(each)

    def _remove(self, change: Rewritten, wait_s: float) -> bool:
        """Unlink a container, if that is safe; return whether it is gone."""
        objects, container = self._objects, change.gone
        path = objects.layout.container(container.name, container.kind)
        with objects.sweep(wait_s):
            # A delta is readable only beside its base as a whole.
            if not self.can_remove() or not self.needed().isdisjoint(change.deltas):
                return False
            if not self._is_whole(change):
                return False
            with suppress(FileNotFoundError):
                objects.files.unlink(path)
            objects.files.sync_folder(path.parent)
        return True

    def can_remove(self) -> bool:
        """Return whether it is known what all of the store is for, so that a container may go."""
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

    def needed_now(self) -> frozenset[bytes]:
        """Return the pieces that some delta of the store is against by now."""
        self._scan()
        return self.needed()

    def needed(self) -> frozenset[bytes]:
        """Return the pieces that some delta is against, as far as the store was read already."""
        return frozenset().union(*self._needed.values())

    def _scan(self) -> bool:
        """Read what the deltas of the store are against; return whether all could be read.

        A container never changes, so each is read once.
        """
        there = {each for each in self._objects.containers if each.kind == ENCODED}
        self._needed = {each: held for each, held in self._needed.items() if each in there}
        try:
            for each in there - self._needed.keys():
                records = self._objects.containers.table(each).records
                self._needed[each] = frozenset(base for each in records for base in each.bases)
        except (MissingObjectError, DamagedFileError, NewerFormatError):
            return False
        return True
