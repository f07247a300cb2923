"""The ways in which saving and loading the steps of a run can fail, one class each.

StoreError
  - of its use:    UnknownStepError      this run has no such step
                   BadStepError          a step is no number from 0 on
                   BadMetricError        a metric is no number, or no step has it
                   BadRetentionError     what is to be kept makes no sense
                   PinnedStepError       a pinned step is not deleted
                   NamedTwiceError       two tensors of one name, or a file in a tensor's place
                   NotATrainingError     a checkpoint of that name that no run has saved
                   BadLimitError         a bound of what saves in the background may use makes none
                   BadCompressError      `compress` is none of what there is
                   ForkedSaveError       a save that another process has begun is waited for
  - of the world:  ChangedModelError     a tensor was written to while it was saved
                   BrokenSaveError       a save in the background ended as none should

Those of the store itself are in store/errors.py.
"""

from tensor_dedup.store.errors import AdvisedError, UnknownNameError


class UnknownStepError(UnknownNameError):
    """The run has no such step."""

    advice = "see `tensor-dedup runs show`"


class BadStepError(AdvisedError):
    """A step is no whole number from 0 on."""

    advice = "count epochs, trees or batches from 0 or 1"


class BadMetricError(AdvisedError):
    """A metric is no number, or there is none of this name."""

    advice = 'give metrics={"val_loss": 0.5}, and `best` the name of one that was given'


class BadRetentionError(AdvisedError):
    """What is to be kept makes no sense."""

    advice = 'keep_last=5, keep_every=10 or keep_best=("val_loss", 3, "min")'


class PinnedStepError(AdvisedError):
    """A pinned step is not deleted."""

    advice = "unpin it first"


class NamedTwiceError(AdvisedError):
    """Two parts of one checkpoint have one name."""

    advice = "give each tensor and each file a name of its own"


class NotATrainingError(AdvisedError):
    """A checkpoint of this name is there, but no run has saved it."""

    advice = "give the run another id, or the checkpoint another name"


class ChangedModelError(AdvisedError):
    """A tensor was written to while it was saved. Nothing was committed."""

    advice = "save between two steps of the optimizer, or save a copy"


class BadLimitError(AdvisedError):
    """A bound of what saves in the background may use makes no sense."""

    advice = "let one save or more be unfinished, and give the pool bytes, or none"


class BadCompressError(AdvisedError):
    """`compress` is none of what there is."""

    advice = 'give "auto", "always" or None'


class ForkedSaveError(AdvisedError):
    """A save is waited for in a process that was forked after it had begun."""

    advice = "wait for it in the process that called save_async"


class BrokenSaveError(AdvisedError):
    """A save in the background ended as none should. Nothing was committed."""

    advice = "save again, and report what its thread has printed"
