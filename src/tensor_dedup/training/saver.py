"""Saver: commits the steps of one CheckpointStore, and keeps between them what makes that fast.

It keeps the step saved last (`run_cache.LastStep`), with which the next one is compared, the index
and the hashing threads (`RunCache`), and how tensors are encoded (`encoding.encoder`).
"""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from tensor_dedup.store.errors import NoSpaceError, os_errors
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.steps.runs import StepOrder, latest_digests, step_name
from tensor_dedup.store.writing.containers import PACK_BELOW
from tensor_dedup.store.writing.run_cache import LastStep, Rewritten, RunCache
from tensor_dedup.store.writing.transaction import BatchTransaction, SyncedFolders
from tensor_dedup.training.commit import Saved, StepCommit
from tensor_dedup.training.encoding.decisions import Compress
from tensor_dedup.training.encoding.encoder import RunEncoder
from tensor_dedup.training.in_flight import BaseStep
from tensor_dedup.training.piece_writer import PieceWriter
from tensor_dedup.training.reentry import SaveLock
from tensor_dedup.training.snapshot import StepSource


class Saver:
    """Commits the steps of one CheckpointStore, one at a time. Safe from any thread."""

    def __init__(
        self,
        objects: Objects,
        workers: int,
        order: StepOrder,
        *,
        compress: Compress,
        base: str | None,
    ) -> None:
        self._objects, self._order, self._workers = objects, order, workers
        self._compress, self._base = compress, base
        self._cache = RunCache(objects, workers)
        self._synced = SyncedFolders()
        self.reset()

    @property
    def root(self) -> Path:
        """The folder of the store."""
        return self._objects.layout.root

    def reset(self) -> None:
        """Reset the state in a forked child, where a thread that held a lock does not exist."""
        self._lock = SaveLock()
        self._order.renew_lock()
        self._last = self._shown = LastStep()
        self._encoder = RunEncoder(
            self._objects,
            self._workers,
            self._compress,
            self._base,
            last=lambda: self._shown,
            moved=self._moved,
        )

    def finish_encoding(self) -> None:
        """Wait until all tensors that saves have stored unencoded are encoded."""
        self._encoder.background.finish()

    def wait_for_encoding(self, step: int, enough: Callable[[], bool]) -> None:
        """Wait until no tensor of a step is still to be encoded, or until `enough` returns True.

        `enough` is called again and again during the wait.
        """
        self._encoder.background.wait_for(step_name(self._order.run, step), enough)

    def drop_encoding(self) -> None:
        """Discard the pending encoding. The tensors stay unencoded in the store."""
        self._encoder.background.drop()

    def close(self) -> None:
        """Wait for the encoding, and free the memory and files kept between saves.

        The next save has to look up everything in the store.
        """
        self._encoder.background.finish()
        with self._lock:
            self._last = self._shown = LastStep()
            self._cache.close()

    def _moved(self, change: Rewritten) -> None:
        with self._lock:
            self._last, self._shown = self._last.moved(change), self._shown.moved(change)

    def base(self) -> BaseStep:
        """Return the step committed last, with which the next save compares its large pieces.

        This method does not wait for a running commit. Call `release` on the result when the save
        has ended. Until then the retention rules do not delete the step and, if there are two
        tiers, it stays on the fast tier even if it was copied to the second tier. An explicit
        deletion still removes it.
        """
        with os_errors(self._objects.layout.root):
            return BaseStep(self._objects, self._shown)

    def commit(self, step: StepSource) -> Saved:
        """Store `step` under its name atomically, replacing an existing step of the same name.

        After any error, earlier steps are unchanged. If the disk fails at the very end, the new
        step may or may not exist.

        Raises:
            KeptStepError: The step exists and is kept, perhaps since this commit began.
            NotATrainingError: An imported checkpoint has the step's name.
            NameTakenError: The step must be new, and the name exists.
            ChangedModelError: The model was written to during the commit.
            NamedTwiceError, EscapingPathError, NotTextError: A name is invalid.
            NestedSaveError: The calling thread is already committing a step of the same
                CheckpointStore.
            StoreError: The disk failed. The error is a NoSpaceError, a StoreIOError or another
                subclass.
        """
        try:
            return self._commit(step)
        except NoSpaceError:
            if not self._encoder.background.busy:
                raise
            # What is being encoded takes space a second time, which a save needs more.
            self._encoder.background.drop()
            return self._commit(step)

    def _commit(self, step: StepSource) -> Saved:
        began, objects = time.monotonic(), self._objects
        self._lock.check(self.root)
        with self._encoder.background.saving(), self._lock:
            last, self._last = self._last, LastStep()  # an error leaves none: the next save asks
            with self._cache.session() as (index, hasher):
                order = self._order_of(step.notes.run)

                def before() -> Mapping[str, bytes]:
                    if last.pages:
                        return last.digests()
                    return latest_digests(objects, order, PACK_BELOW)

                with (
                    closing(self._encoder.begin(index, step.notes.run, before)) as encoding,
                    BatchTransaction(objects, index, hasher, self._synced) as transaction,
                ):
                    writer = PieceWriter(objects, index, hasher, transaction, encoding)
                    commit = StepCommit(objects, hasher, writer, transaction, last, order)
                    saved = commit.run(step, began)
            self._last = self._shown = commit.next
            self._encoder.encode_later(encoding, step, saved.manifest, transaction.sealed)
        return saved

    def _order_of(self, run: str) -> StepOrder:
        """The order of the handle's own run, or of another one whose snapshot it was given."""
        return self._order if run == self._order.run else StepOrder(self._objects, run)
