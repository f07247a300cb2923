"""The errors of saving and loading the steps of a run, and of converting models to state.

StoreError
  - caused by use: NamedTwiceError       two parts of a step have the same name
                   ForkedSaveError       a forked child waits for a save of its parent
                   NestedSaveError       a signal handler saves in the middle of a save
  - environment:   BrokenSaveError       a background save ended with an unexpected error
                   DrainError            steps are on the fast tier only
                   OtherTierError        the second tier is another one than before, or not mounted
                   RunTakenError         another fast tier writes the run to the second tier now
  - StateError, taking a model apart:
                   UnsupportedValueError    a Python value cannot be stored in a checkpoint
                   UnsupportedArrayError    an array or a tensor cannot be stored in a checkpoint
                   CyclicStateError         a container contains itself
                   UnknownModelError        no adapter accepts an object of this type
                   UnknownAdapterError      no adapter has this name
                   ProviderTakenError       a type or a name has another provider already
  - StateError, reassembling a model:
                   DamagedStateError        the stored state is not valid
                   UnknownProviderError     a provider that the state needs is not registered
                   ForbiddenClassError      the state names a class that is not on the list
                   MismatchedOriginalError  `original` is another kind of object

The message of a StateError names the place in the object as a Python expression. Every message ends
with advice. Errors about steps and their names are in `tensor_dedup.store.steps.errors`.
"""

from collections.abc import Sequence
from pathlib import PurePath
from typing import ClassVar, Self

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import AdvisedError


class NamedTwiceError(AdvisedError):
    """Two parts of one checkpoint have the same name."""

    advice = "give each tensor and each file a name of its own"


class ForkedSaveError(AdvisedError):
    """A forked child waited for a save that its parent had begun before the fork."""

    advice = "wait for it in the process that called save_async"


class BrokenSaveError(AdvisedError):
    """A background save ended with an unexpected error. Nothing was committed."""

    advice = "save again, and report what its thread has printed"


class NestedSaveError(AdvisedError):
    """A thread began or awaited a save in the middle of another save of the same CheckpointStore.

    This happens in a signal handler or a provider that saves. The inner call has saved nothing, and
    the outer save continues.
    """

    advice = "let the signal handler note the signal, and save when the call has returned"


class DrainError(AdvisedError):
    """Steps could not be copied to the second tier, so they are on the fast tier only.

    The steps stay on the fast tier. The `__cause__` of this error is the error of the copy.
    """

    advice = "see to its cause; the run copies them first when it is opened with this `drain` again"


class OtherTierError(StoreError):
    """The second tier is not the one to which this run's steps were copied before.

    Perhaps the disk of the earlier tier is not mounted, or another disk is mounted in its place.
    Nothing was written to the wrong tier, and the fast tier keeps its steps.
    """

    @classmethod
    def of(cls, fast: PurePath, run: str, known: str, where: str, note: PurePath) -> Self:
        """Return the error about the second tier at `where`, for a run with the fast tier `fast`.

        `known` is the place of the earlier second tier, and `note` the file that records it.
        """
        now = "what is there now" if known == where else where
        what = f"the run {run!r} was drained to {known}, and {now} is empty or another one"
        advice = "mount that disk, or give the second tier of before, where it was moved to; "
        advice += f"to start over with this one on purpose, delete {note}"
        facts = {"run": run, "second": where, "known": known, "note": str(note)}
        return cls(f"{fast}: {what}; {advice}", path=str(fast), **facts)


class RunTakenError(StoreError):
    """Another fast tier has become the writer of the run on the second tier.

    It has opened the run after this fast tier. Nothing was lost: steps that were not copied to the
    second tier before stay on this fast tier.
    """

    @classmethod
    def of(
        cls,
        fast: PurePath,
        run: str,
        *,
        second: str,
        where: str,
        generation: int,
        steps: Sequence[int],
    ) -> Self:
        """Return the error about a run with the fast tier `fast` and the second tier at `second`.

        `where` and `generation` are those of the writer, and empty and 0 if they cannot be read.
        `steps` has the steps that are on the fast tier only.
        """
        by = f"{where} (generation {generation})" if where else "a writer whose token is damaged"
        what = f"the run {run!r} is written to {second} by {by} now, and no more from here; "
        what += "nothing was lost"
        what += f", and what was not copied there stays here ({_numbered(steps)})" if steps else ""
        advice = "end this training; or, if the other one has ended, open the run again here, "
        advice += "which takes it back and names the steps that stay"
        facts = {"run": run, "second": second, "where": where, "generation": generation}
        return cls(f"{fast}: {what}; {advice}", path=str(fast), **facts, steps=[*steps])


class StateError(StoreError):
    """Base of the errors about converting a model to state or restoring it."""

    advice: ClassVar[str] = "see the documentation of adapters"

    @classmethod
    def at(cls, place: str, what: str, **facts: object) -> Self:
        """Return the error about the value at the path `place` in a model.

        `what` describes the fault. The message ends with the advice of the class.
        """
        return cls(f"{place or 'the model'}: {what}; {cls.advice}", place=place, **facts)


class UnsupportedValueError(StateError):
    """A Python value cannot be stored in a checkpoint."""

    advice = "remove it, save it as plain values and arrays, or register a StateProvider for it"


class UnsupportedArrayError(StateError):
    """An array or a tensor cannot be stored in a checkpoint."""

    advice = "convert it to a dense array of numbers first"


class CyclicStateError(StateError):
    """A container or an object contains itself, or is nested too deeply to follow."""

    advice = "save a structure without circles"


class UnknownModelError(StateError):
    """No adapter accepts an object of this type."""

    advice = "pass an adapter, or register a StateProvider for its type"


class UnknownAdapterError(StateError):
    """No adapter has this name."""

    advice = "pass the adapter that saved it"


class ProviderTakenError(StateError):
    """A type or a name already has another StateProvider, which cannot be replaced.

    Otherwise the new provider would be given states that the earlier provider has saved.
    """

    advice = "register each type, and each name, once in a process"


class DamagedStateError(StateError):
    """The stored state of a model is not valid."""

    advice = "load another step, or run `tensor-dedup verify --full`"


class UnknownProviderError(StateError):
    """The checkpoint needs a StateProvider that is not registered in this process."""

    advice = "register it (tensor_dedup.training.adapters.register_provider) and load again"


class ForbiddenClassError(StateError):
    """The checkpoint names a class that is not on the list of classes that a load may look up."""

    advice = "pass an `original` of that class"


class MismatchedOriginalError(StateError):
    """The object passed to a load as `original` does not fit the saved state."""

    advice = 'pass an `original` built like what was saved, such as {"model": model}'


def _numbered(steps: Sequence[int]) -> str:
    """Return steps, in order, as text."""
    if len(steps) == 1:
        return f"the step {steps[0]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def with_notes(error: StoreError) -> str:
    """Return the text of `error` and the texts of its notes on one line."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])
