"""The space of the steps that were deleted from the fast tier of a run."""

import logging

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import StoreBusyError
from tensor_dedup.store.steps.runs import step_name
from tensor_dedup.store.store import LocalStore
from tensor_dedup.store.upkeep.gc import sweep_now
from tensor_dedup.training.in_flight import BaseStep

_log = logging.getLogger(__name__)


class FastSpace:
    """What steps that were deleted from a fast tier still occupy there.

    * `released` is the number of steps that were deleted since the last sweep.
    * `freed` is the number of bytes that all sweeps of this object have freed.
    """

    def __init__(self, fast: LocalStore) -> None:
        self._fast, self._objects = fast, fast.handle.objects
        self.released = self.freed = 0

    def is_base(self, run: str, step: int) -> bool:
        """Return whether a save in flight counts on what the fast tier has of a step.

        Such a step stays. It goes after a later step, which that save adds.
        """
        name = step_name(run, step)
        return any(each.name == name for each in BaseStep.in_store(self._objects))

    def sweep(self, wait_s: float) -> None:
        """Delete what nothing on the fast tier uses, waiting `wait_s` seconds for those who use it.

        There is no grace: what was let go of is on the second tier. Where others have the fast tier
        open for longer than a while, or a step was deleted or replaced that a save in flight counts
        on, that comes after the next step.
        """
        try:
            with self._fast.handle.translated():
                self.freed += sweep_now(self._objects, wait_s, self._check_bases).freed_bytes
            self.released = 0
        except StoreBusyError:
            pass
        except StoreError as error:
            what = "%s: the space of what was let go of is not freed: %s"
            _log.warning(what, self._fast.path, str(error))

    def _check_bases(self) -> None:
        """Check that every step is there that saves in flight count on: it keeps what they need.

        Raises:
            StoreBusyError: One was deleted or replaced.
        """
        for base in BaseStep.in_store(self._objects):
            if not base.is_there():
                what = f"a save counts on {base.name}, which was deleted or replaced"
                raise StoreBusyError.at(self._fast.path, what)
