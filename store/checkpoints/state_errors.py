"""The ways in which a model's state cannot be taken apart or put together, one class each.

StateError                  (a StoreError)
  - on the way in:   UnsupportedValueError    a Python value that has no form here
                     UnsupportedArrayError    an array or tensor that has none
                     CyclicStateError         a container that holds itself
                     UnknownModelError        no adapter takes an object of this type
                     UnknownAdapterError      no adapter has this name
                     ProviderTakenError       a type or a name that has a provider already
  - on the way out:  DamagedStateError        what was stored is not what extract wrote
                     UnknownProviderError     it needs a provider that is not registered here
                     ForbiddenClassError      it names a class that is not on the list
                     MissingOriginalError     it can only be put into an object that exists
                     MismatchedOriginalError  the object that was given is another kind of thing
                     MissingFrameworkError    the framework it belongs to is not installed

Each names the place in the object, as Python would write it, and the next step.
"""

from typing import ClassVar, Self

from tensor_dedup.errors import StoreError


class StateError(StoreError):
    """The state of a model cannot be taken apart or put together."""

    advice: ClassVar[str] = "see the documentation of adapters"

    @classmethod
    def at(cls, place: str, what: str, **facts: object) -> Self:
        """The error about the value at `place`, its message ending in the next step."""
        return cls(f"{place or 'the model'}: {what}; {cls.advice}", place=place, **facts)


class UnsupportedValueError(StateError):
    """A Python value that has no form in a checkpoint."""

    advice = "remove it, save it as plain values and arrays, or register a StateProvider for it"


class UnsupportedArrayError(StateError):
    """An array or a tensor whose elements have no form in a checkpoint."""

    advice = "convert it to a dense array of numbers first"


class CyclicStateError(StateError):
    """A list or dict that holds itself, or one nested too deeply to follow."""

    advice = "save a structure without circles"


class UnknownModelError(StateError):
    """No adapter takes an object of this type."""

    advice = "pass an adapter, or register a StateProvider for its type"


class UnknownAdapterError(StateError):
    """No adapter has this name."""

    advice = "pass the adapter that saved it"


class ProviderTakenError(StateError):
    """A type or a name has a provider already: a second one would read what the first wrote."""

    advice = "choose another name"


class DamagedStateError(StateError):
    """What was stored is not what an adapter wrote."""

    advice = "load another step, or run `tensor-dedup verify --full`"


class UnknownProviderError(StateError):
    """The checkpoint needs a provider that this process does not have."""

    advice = (
        "register it (tensor_dedup.store.checkpoints.adapters.register_provider) and load again"
    )


class ForbiddenClassError(StateError):
    """The checkpoint names a class that is never looked up because a checkpoint says so."""

    advice = "pass an `original` of that class"


class MissingOriginalError(StateError):
    """The state can only be put into an object that exists."""

    advice = "pass `original`"


class MismatchedOriginalError(StateError):
    """The object that was given cannot take this state."""

    advice = "pass an `original` built like the model that was saved"


class MissingFrameworkError(StateError):
    """The framework that the state belongs to is not installed."""

    advice = "install it, or the extra of this package that brings it"
