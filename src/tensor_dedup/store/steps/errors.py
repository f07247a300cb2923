"""The errors about the steps of a training run: names, numbers, metrics and options.

StoreError
  UnknownStepError      the run has no such step
  BadStepError          a step number is not a whole number from 0 on
  BadMetricError        a metric is not a number
    UnknownMetricError    no step has this metric
    UnknownGoalError      it is unknown whether the least or the greatest value is best
  BadOptionError        an option of CheckpointStore, or an argument of `register_provider`, is
                        invalid (`kind`)
  KeptStepError         a kept step would be replaced or deleted
  DrainedRunError       a run with a second tier cannot be renamed
  RenamedRunError       the run was renamed while it was open
  TakenStepError        an import would replace a step or a mark
  NotATrainingError     the checkpoint was imported, not saved by a run

The message of each error ends in the next step to take. The errors of saving and loading are in
`tensor_dedup.training.errors`, those of the store itself in `tensor_dedup.store.errors`.
"""

import shlex
from enum import Enum
from pathlib import PurePath
from typing import Any, Self

from tensor_dedup.errors import WRONG_USE
from tensor_dedup.store.errors import AdvisedError, NameTakenError, UnknownNameError


class UnknownStepError(UnknownNameError):
    """The run has no such step."""

    advice = "see `tensor-dedup runs show`"

    @classmethod
    def of(cls, root: PurePath, run: str, step: int, has: str = "") -> Self:
        """Return an error about a run that lacks a step, for the caller to raise.

        `root` is the store's folder. `has` describes the steps that exist in the run.
        """
        verb = "list" if has == "none" else f"show {shlex.quote(run)}"
        look = f"see `tensor-dedup runs {verb} --store {shlex.quote(str(root))}`"
        what = f"the run {run!r} has no step {step}{has and f'; it has {has}'}; {look}"
        return cls(f"{root}: {what}", path=str(root), run=run, step=step)


class BadStepError(AdvisedError):
    """A step number is not a whole number from 0 on."""

    exit_status = WRONG_USE
    advice = "count epochs, trees or batches from 0 or 1"


class BadMetricError(AdvisedError):
    """A metric is not a number."""

    exit_status = WRONG_USE
    advice = 'give numbers by name, as in {"val_loss": 0.5}'


class UnknownMetricError(BadMetricError):
    """No step of the run has a metric of this name."""

    advice = "name one that was saved with a step"


class UnknownGoalError(BadMetricError):
    """It is unknown whether the least or the greatest value of a metric is best.

    Neither the run's `keep_best` nor the name of the metric tells.
    """

    advice = 'say "min" or "max" (on the command line: --mode)'


class KeptStepError(AdvisedError):
    """The step is kept, so it cannot be replaced or deleted."""

    exit_status = WRONG_USE
    advice = "first `unkeep` it, or run `tensor-dedup runs keep RUN STEP --remove`"


class DrainedRunError(AdvisedError):
    """The run has a second tier, on which its steps have its name, so it cannot be renamed."""

    exit_status = WRONG_USE
    advice = "save further steps under the new name; those of this run can still be read"


class RenamedRunError(AdvisedError):
    """The run was renamed since it was opened, so a step saved now would begin another run.

    `facts` has the old name as `run` and the new one as `new_run`.
    """

    exit_status = WRONG_USE
    advice = "open the run under its new name, and save the step there"


class TakenStepError(NameTakenError):
    """The name for an import is that of an existing step, or of a mark."""

    advice = "choose another name; `tensor-dedup runs delete` is what deletes a step"


class NotATrainingError(AdvisedError):
    """The checkpoint has the name of a step, but was not saved by this run."""

    exit_status = WRONG_USE
    advice = "give the run another id, or the checkpoint another name"


class BadOption(Enum):
    """The kinds of invalid options. The value of each kind is the advice in the error's message."""

    RETENTION = 'keep_last=5, keep_every=10 or keep_best=("val_loss", 3, "min")'
    LIMIT = "let one save or more be unfinished, and give the pool bytes, or none"
    COMPRESS = 'give "auto", "always" or None'
    DRAIN = "drain to a folder or a remote of its own"
    FILES = 'give a folder, or texts by path, as in {"config.json": "{}"}'
    WEIGHTS = 'name a part of what is saved, as in weights="model", or give ""'
    RUN = "call the run something else, and give the step to `load`"
    FAST = "give keep_fast=1 or more, or None, and drain_backlog=1 or more, beside `drain`"
    ALSO = 'give also="slime", or leave it out'
    WORK = "give `work` only with the URL of a remote; the folder of a store needs none"
    PROVIDER = "give a type, or its module and name, and StateProvider(name=, state=, restore=)"


class BadOptionError(AdvisedError):
    """An option of CheckpointStore, or an argument of `register_provider`, is invalid.

    `kind` tells which option or argument it is.
    """

    exit_status = WRONG_USE

    # By position only: `facts` may have a `kind` of its own.
    def __init__(self, message: str, kind: BadOption, /, **facts: object) -> None:
        super().__init__(message, **facts)
        self.kind = kind

    @classmethod
    def of(cls, kind: BadOption, where: str, what: str, **facts: object) -> Self:
        """Return an error about an invalid option, for the caller to raise.

        The message consists of `where` (such as the run, class or option), `what` (the fault) and
        the advice for `kind`. `facts` are stored in the error's attribute of that name.
        """
        return cls(f"{where}: {what}; {kind.value}", kind, path=where, **facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.message, self.kind, self.facts)


def _rebuild(message: str, kind: BadOption, facts: dict[str, Any]) -> BadOptionError:
    return BadOptionError(message, kind, **facts)
