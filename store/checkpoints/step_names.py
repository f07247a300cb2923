"""What the steps of a run are called in the store: RUN@STEP, and RUN@STEP@pin. No I/O.

Numbers are written as people write them, without zeros before them: a name is what somebody types
after store://. Whoever lists steps sorts them by number.
"""

import re
from dataclasses import dataclass

from tensor_dedup.store.checkpoints.errors import BadStepError
from tensor_dedup.store.format.names import check_name

# Eighteen digits fit everywhere; nobody counts further.
_NAME = re.compile(r"(?P<run>.+)@(?P<step>0|[1-9][0-9]{0,17})(?P<pin>@pin)?", re.DOTALL)
_PIN = "@pin"
_LARGEST = 10**18 - 1


@dataclass(frozen=True, slots=True)
class StepName:
    """A reference that a run has made: of a step, or the one that keeps a pinned step."""

    run: str
    step: int
    pin: bool

    @property
    def name(self) -> str:
        """As the store has it."""
        return f"{self.run}@{self.step}{_PIN if self.pin else ''}"


def step_name(run: str, step: int, *, pin: bool = False) -> str:
    """The name of a step. BadStepError; BadNameError: the run's name does not fit."""
    if type(step) is not int or not 0 <= step <= _LARGEST:
        raise BadStepError.at(f"run {run!r}", f"the step {step!r}", step=repr(step))
    return check_name(f"{run}@{step}{_PIN if pin else ''}")


def check_run(run: str) -> str:
    """`run` itself when a run can be called so. BadNameError."""
    # With the longest step, so that a run that began can go on.
    check_name(f"{run}@{_LARGEST}{_PIN}")
    return run


def parse(name: str) -> StepName | None:
    """What a name says; None: no step is called so."""
    found = _NAME.fullmatch(name)
    return StepName(found["run"], int(found["step"]), bool(found["pin"])) if found else None
