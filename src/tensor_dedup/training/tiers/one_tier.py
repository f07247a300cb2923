"""The steps of a run as a CheckpointStore sees them, and those of a run that is in one store."""

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol, TypeVar

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import DamagedFileError, MissingObjectError, UnknownNameError
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint
from tensor_dedup.store.steps.errors import KeptStepError, NotATrainingError, UnknownStepError
from tensor_dedup.store.steps.runs import (
    Step,
    StepOrder,
    StepPlace,
    check_mark,
    check_not_kept,
    check_replaceable,
    describe_all,
    keep_step,
    kept_steps,
    manifest_of,
    step_name,
    step_numbers,
)
from tensor_dedup.store.store import LocalStore
from tensor_dedup.training.commit import Saved
from tensor_dedup.training.retention import RunRetention

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class RunSteps(Protocol):
    """The steps of a run on its one or two tiers. Safe from any thread.

    The errors are those of the methods of CheckpointStore that call these, and StoreErrors of the
    disks and remotes.
    """

    def places(self) -> dict[int, StepPlace]:
        """Return the run's steps, each with its place in the order of saving."""
        ...

    def numbers(self) -> set[int]:
        """Return the step numbers that are taken.

        Numbers taken by checkpoints that are not steps of this run are included.
        """
        ...

    def described(self) -> list[Step]:
        """Return a description of each step that can be read, in the order of the step numbers."""
        ...

    def manifest(self, step: int) -> str:
        """Return the name of a step's manifest."""
        ...

    def read(self, step: int, read: Callable[[StoredCheckpoint], _T]) -> _T:
        """Open a step, call `read` with the open checkpoint, and return its result.

        If the step is damaged on one tier, `read` may be called again for the other one.
        """
        ...

    def check_replaceable(self, step: int) -> None:
        """Check that a step may be saved. Nothing is read from a second tier.

        Raises:
            KeptStepError: The step is kept.
            NotATrainingError: The step's name stands for a checkpoint that is not a step of this
                run.
        """
        ...

    def delete(self, step: int) -> None:
        """Delete a step."""
        ...

    def prune(self, *, dry_run: bool, among: Collection[int] | None) -> list[int]:
        """Delete the steps that no retention rule keeps, and return their numbers."""
        ...

    def kept(self) -> set[int]:
        """Return the numbers of the kept steps."""
        ...

    def keep(self, step: int) -> None:
        """Keep a step, whatever the retention rules say."""
        ...

    def unkeep(self, step: int) -> None:
        """Remove the mark of a step. Do nothing if the step is not kept."""
        ...


class OneTier:
    """The steps of a run in one store."""

    def __init__(self, store: LocalStore, order: StepOrder, retention: RunRetention) -> None:
        self._store, self._run = store, order.run
        self._order, self._retention = order, retention

    @property
    def _objects(self) -> Objects:
        return self._store.handle.objects

    def places(self) -> dict[int, StepPlace]:
        # docstring inherited
        with self._store.handle.locked():
            return self._order.places()

    def numbers(self) -> set[int]:
        # docstring inherited
        with self._store.handle.locked():
            return {*step_numbers(self._objects, self._run)}

    def described(self) -> list[Step]:
        # docstring inherited
        with self._store.handle.locked():
            return describe_all(self._objects, self._run)

    def manifest(self, step: int) -> str:
        # docstring inherited
        with self._store.handle.locked():
            return manifest_of(self._objects, self._run, step)[0]

    def read(self, step: int, read: Callable[[StoredCheckpoint], _T]) -> _T:
        # docstring inherited
        try:
            opened = self._store.checkpoint(step_name(self._run, step))
        except UnknownNameError:
            self.manifest(step)  # raises an error that says which steps there are
            raise
        with opened as checkpoint, self._store.handle.translated():
            return read(checkpoint)

    def check_replaceable(self, step: int) -> None:
        # docstring inherited
        with self._store.handle.translated():
            check_replaceable(self._objects, self._run, step)

    def delete(self, step: int) -> None:
        # docstring inherited
        self._delete(step)

    def _delete(self, step: int, seen: object = None) -> None:
        """Delete a step; one that is not as it was `seen` has been saved again, and stays."""
        objects, name = self._objects, step_name(self._run, step)
        with self._store.handle.naming():
            if seen is not None and self._order.status(step) != seen:
                return
            # Under the lock of names: whoever keeps it meanwhile comes before or after.
            check_not_kept(objects, self._run, step)
            with suppress(DamagedFileError, MissingObjectError):  # that may be why it is to go
                manifest_of(objects, self._run, step)
            try:
                objects.files.unlink(objects.layout.refs / file_of(name))
            except FileNotFoundError as error:
                raise UnknownStepError.of(self._store.path, self._run, step) from error
            objects.files.sync_folder(objects.layout.refs)

    def prune(self, *, dry_run: bool, among: Collection[int] | None) -> list[int]:
        # docstring inherited
        return self._prune(None, dry_run=dry_run, among=among)

    def prune_after(self, saved: Saved) -> None:
        """Delete the steps that no retention rule keeps after a step was saved.

        An error is only logged, because the save has succeeded.
        """
        try:
            self._prune(saved.step)
        except StoreError as error:
            _log.warning("saved %s; no older step was let go of: %s", saved.name, str(error))

    def _prune(
        self,
        saved: int | None,
        *,
        dry_run: bool = False,
        among: Collection[int] | None = None,
    ) -> list[int]:
        """Delete the steps that no rule keeps. `saved`, if not None, was saved just now."""
        if not self._retention.rules.any:
            return []
        with self._store.handle.locked():
            places = self._order.places(readable=True)
        found = self._retention.unretained(places, self.kept(), self._metrics, saved)
        dropped = [step for step in found if among is None or step in among]
        for step in dropped if not dry_run else ():
            with suppress(UnknownStepError, KeptStepError, NotATrainingError):
                self._delete(step, places[step].reference)
        return dropped

    def _metrics(self) -> dict[int, dict[str, float]]:
        return {each.step: each.metrics for each in self.described()}

    def kept(self) -> set[int]:
        # docstring inherited
        with self._store.handle.locked():
            return kept_steps(self._objects, self._run)

    def keep(self, step: int) -> None:
        # docstring inherited
        with self._store.handle.locked():
            keep_step(self._objects, self._run, step)

    def unkeep(self, step: int) -> None:
        # docstring inherited
        objects, name = self._objects, step_name(self._run, step, kept=True)

        def check() -> None:
            check_mark(objects, self._run, step)

        with self._store.handle.locked(), suppress(UnknownNameError):
            objects.drop_ref(name, check_name=check)
