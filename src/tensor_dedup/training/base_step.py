"""What a save counts on: the step that it compares with, until it is committed."""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

from tensor_dedup.errors import StoreError
from tensor_dedup.store.objects import ContainerId, Objects
from tensor_dedup.store.writing.containers import PACK_BELOW
from tensor_dedup.store.writing.run_cache import LastStep, StoredPiece


class BaseStep:
    """The step that a save compares with, from when it begins until it is committed.

    The save keeps no bytes of what it finds there (`pieces`, by change hash), so these must stay:
    they do while the step's name leads to them.
    """

    _all: ClassVar[set["BaseStep"]] = set()

    def __init__(self, objects: Objects, step: LastStep) -> None:
        self.root, self.name = objects.layout.root, step.name
        self._objects, self._manifest = objects, step.manifest
        self.pieces: Mapping[bytes, StoredPiece] = {}
        BaseStep._all.add(self)  # first: what is swept from here on knows of it
        try:
            if step.name and self.is_there():
                known = step.known(containers_there(objects, step))
                self.pieces = {k: each for k, each in known.items() if each.nbytes >= PACK_BELOW}
        finally:
            if not self.pieces:
                self.release()

    @staticmethod
    def all() -> "list[BaseStep]":
        """Return those of all saves in this process, of any handle and store."""
        return list(BaseStep._all.copy())

    def is_there(self) -> bool:
        """Return whether its name still leads to it."""
        with suppress(StoreError, OSError):
            return self._objects.ref(self.name) == self._manifest
        return False

    def release(self) -> None:
        """Let it go: the save has ended. May be called twice."""
        BaseStep._all.discard(self)


# The saves of a parent are none of a forked child.
os.register_at_fork(after_in_child=BaseStep._all.clear)


def containers_there(objects: Objects, last: LastStep) -> set[ContainerId]:
    """Return the containers of a step that are still what they were."""
    files, bad = objects.files, set(objects.bad_containers())
    return {
        container
        for container, (path, size) in last.containers.items()
        if (status := files.status(path)) is not None
        and status.size == size
        and container.name not in bad
    }
