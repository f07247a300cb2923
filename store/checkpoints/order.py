"""The steps of one run: which names are its steps, and in which order they were saved.

Time orders steps, not their numbers: a training that went back to step 5 and saved 6 again goes on
from there, and 8 to 10 of its first attempt are older than that. Of steps whose references have one
time (clocks of file systems tick every few milliseconds, some every second) the greater one counts
as the later.
"""

from tensor_dedup.store.checkpoints.errors import NotATrainingError, UnknownStepError
from tensor_dedup.store.checkpoints.runs import manifest_of, step_numbers
from tensor_dedup.store.checkpoints.step_names import step_name
from tensor_dedup.store.errors import DamagedFileError, MissingObjectError, NewerFormatError
from tensor_dedup.store.files import FileStatus
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.objects import Objects


class StepOrder:
    """What one handle knows of the steps of its run. Any thread, in a session.

    What was imported may be called as a step is: only its manifest tells, and is read once.
    """

    def __init__(self, objects: Objects, run: str) -> None:
        self._objects, self._run = objects, run
        self._known: dict[int, tuple[FileStatus, bool]] = {}

    def saved(self, *, readable: bool = False) -> dict[int, int]:
        """Each step in order, and when it was saved, in ns since 1970.

        One whose manifest cannot be read is a step, unless only the `readable` ones are wanted.
        """
        found: dict[int, int] = {}
        for step in step_numbers(self._objects, self._run):
            path = self._objects.layout.refs / file_of(step_name(self._run, step))
            status = self._objects.files.status(path)
            if status is not None and self._is_step(step, status, unreadable=not readable):
                found[step] = status.mtime_ns
        return found

    def _is_step(self, step: int, status: FileStatus, *, unreadable: bool) -> bool:
        known = self._known.get(step)
        if known is not None and known[0] == status:
            return known[1]
        try:
            manifest_of(self._objects, self._run, step)
        except UnknownStepError:  # deleted just now
            return False
        except (DamagedFileError, MissingObjectError, NewerFormatError):
            return unreadable
        except NotATrainingError:
            self._known[step] = (status, False)
            return False
        self._known[step] = (status, True)
        return True
