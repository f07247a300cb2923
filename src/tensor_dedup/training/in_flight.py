"""The earlier step with which a running save compares its tensors, and on which it depends."""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

from tensor_dedup.errors import StoreError
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.writing.containers import PACK_BELOW
from tensor_dedup.store.writing.run_cache import LastStep, StoredPiece


class BaseStep:
    """The earlier step with which a running save compares its tensors.

    `pieces` maps change hashes to the large pieces of the earlier step. A change hash is a fast
    hash of the content. If the save finds a tensor in `pieces`, it does not store the tensor again,
    but refers to the stored piece. The pieces stay in the store as long as `is_there` returns True.
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

    @classmethod
    def in_store(cls, objects: Objects) -> "list[BaseStep]":
        """Return the base steps of all running saves in this process to a store, to any run.

        `objects` gives access to the store, which another save may know by another path.
        """
        return [each for each in cls._all.copy() if each._is_in(objects)]

    def _is_in(self, objects: Objects) -> bool:
        if self.root == objects.layout.root:
            return True
        with suppress(OSError):
            one, other = (objects.files.status(path) for path in (self.root, objects.layout.root))
            if one is not None and other is not None:
                return (one.device, one.inode) == (other.device, other.inode)
        return False

    def is_there(self) -> bool:
        """Return whether the earlier step was neither deleted nor replaced."""
        with suppress(StoreError, OSError):
            return self._objects.ref(self.name) == self._manifest
        return False

    def release(self) -> None:
        """Remove the base step from `all` after the save has ended. Further calls do nothing."""
        BaseStep._all.discard(self)


# The saves of a parent are none of a forked child.
os.register_at_fork(after_in_child=BaseStep._all.clear)


def containers_there(objects: Objects, last: LastStep) -> set[ContainerId]:
    """Return those containers of the step `last` that still exist with the same size.

    Containers that are noted as damaged are left out.
    """
    files, bad = objects.files, set(objects.bad_containers())
    return {
        container
        for container, (path, size) in last.containers.items()
        if (status := files.status(path)) is not None
        and status.size == size
        and container.name not in bad
    }
