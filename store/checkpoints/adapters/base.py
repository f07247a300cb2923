"""The protocol of adapters, and the registry of types whose objects become state.

An adapter takes a model apart into named values and puts it together again:

    class Mine:
        name = "mine"

        def extract(self, model): return {"weights": model.weights}
        def reconstruct(self, tensors, original): return MyModel(tensors["weights"])

Most types need no adapter of their own. `register_provider` says how their objects become plain
values, arrays, tensors and other objects; every built-in adapter then takes them wherever they
stand in what is saved:

    register_provider(Scaler, StateProvider(
        name="mine.scaler",
        state=lambda scaler: {"mean": scaler.mean, "steps": scaler.steps},
        restore=lambda state, original: Scaler(**state),
    ))
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from tensor_dedup.store.checkpoints.errors import ProviderTakenError, StateError

if TYPE_CHECKING:
    from tensor_dedup.store.checkpoints.state import Value


@runtime_checkable
class ModelAdapter(Protocol):
    """An object that takes models of some kind apart and puts them together.

    Its methods are called from several threads.
    """

    name: str

    def extract(self, model: Any) -> "Mapping[str, Value]":
        """Return the state of the model, by names that stay the same from step to step.

        Values may be the memory of the model itself.

        Raises:
            StateError: something has no form in a checkpoint.
        """
        ...

    def reconstruct(self, tensors: "Mapping[str, Value]", original: Any) -> Any:
        """Make the model of what `extract` returned, in `original` where that is possible.

        Values are writable and become the model's own.

        Raises:
            StateError: the values make no model, or do not fit `original`.
        """
        ...


@dataclass(frozen=True, slots=True)
class StateProvider:
    """The functions that turn objects of one type into state, and state into such an object.

    `name` is written to the checkpoint. `state` returns plain values, arrays, tensors, other
    objects that have a provider, and containers of them. `restore` takes the same, and the object
    to put it into (None to make one), and returns that. `parts`, if given, returns the like of
    `state` for an object to put things into, so that what it holds is filled in place.

    `flat` has the keys of the state that do not appear in the names of pieces, `fixed` those whose
    plain values hardly ever change; with `inline`, tensors of one element are plain values.
    """

    name: str
    state: Callable[[Any], Any]
    restore: Callable[[Any, Any], Any]
    parts: Callable[[Any], Any] | None = None
    flat: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    inline: bool = False


@dataclass(frozen=True, slots=True)
class PieceSeries:
    """Many byte strings in a state, each a piece `NAME_000000`, `NAME_000001` and so on.

    They are for what grows at its end, such as the trees of an ensemble: earlier pieces stay as
    they are. A series comes back with memoryviews.
    """

    name: str
    items: "Sequence[bytes | bytearray | memoryview]"


class Providers:
    """The registry of providers by type. Any thread.

    A type may be named in text, which imports nothing.
    """

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._of_type: Final[dict[str, StateProvider]] = {}
        self._of_package: Final[dict[str, StateProvider]] = {}
        self._named: Final[dict[str, StateProvider]] = {}

    def register(self, kind: type | str, provider: StateProvider) -> None:
        """Register a provider, which may serve several types.

        Raises:
            ProviderTakenError: its name, or the type, has another provider.
        """
        text = kind if isinstance(kind, str) else full_name(kind)
        self._add(self._of_type, text, provider)

    def register_package(self, package: str, provider: StateProvider) -> None:
        """Register a provider for all types of a package that have none of their own."""
        self._add(self._of_package, package, provider)

    def _add(self, kinds: dict[str, StateProvider], key: str, provider: StateProvider) -> None:
        with self._lock:
            if self._named.setdefault(provider.name, provider) is not provider:
                raise ProviderTakenError.at(provider.name, "a provider of this name is registered")
            if kinds.setdefault(key, provider) is not provider:
                raise ProviderTakenError.at(key, "this type has a provider")

    def find(self, kind: type) -> StateProvider | None:
        """Return the provider of a type, of the first of its bases with one, or of its package."""
        typed = (self._of_type.get(full_name(base)) for base in kind.__mro__)
        packages = (base.__module__.partition(".")[0] for base in kind.__mro__)
        whole = (self._of_package.get(package) for package in packages)
        return next(filter(None, chain(typed, whole)), None)

    def named(self, name: str) -> StateProvider | None:
        """Return the provider that a checkpoint calls by this name."""
        return self._named.get(name)


def full_name(kind: type) -> str:
    """Return a type's module and qualified name."""
    return f"{kind.__module__}.{kind.__qualname__}"


providers: Final = Providers()


def register_provider(kind: type | str, provider: StateProvider) -> None:
    """Register how objects of a type, and of types derived from it, become state.

    `kind` may be the type's module and name as text. Register before saving and before loading, in
    every process. Any thread.

    Raises:
        ProviderTakenError: the type, or the name of the provider, has another one.
    """
    providers.register(kind, provider)


def register_package(package: str, provider: StateProvider) -> None:
    """Register a provider for all types of a package that have none of their own."""
    providers.register_package(package, provider)


@dataclass(slots=True)
class ValuePath:
    """The place of a value in a model.

    `str` gives it as Python writes it, `name` as pieces are named.
    """

    above: "ValuePath | None" = None
    step: str = ""
    part: str = ""
    dotted: bool = False
    _name: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The keys that lead here, joined by dots."""
        if self._name is None:
            above = self.above.name if self.above else ""
            self._name = f"{above}.{self.part}" if above and self.part else above or self.part
        return self._name

    def __str__(self) -> str:
        steps, place = [], self
        while place.above is not None:
            steps.append(place.step)
            place = place.above
        return "".join(reversed(steps)).removeprefix(".")

    def key(self, key: object, *, attribute: bool = False, flat: bool = False) -> "ValuePath":
        """Return the place of a mapping's value."""
        if flat:
            return ValuePath(self, "", "", dotted=True)
        if not isinstance(key, str):
            return ValuePath(self, f"[{key!r}]", str(key))
        plain = key.isidentifier() and (attribute or self.dotted or self.above is None)
        return ValuePath(self, f".{key}" if plain else f'["{key}"]', key)

    def item(self, number: int) -> "ValuePath":
        """Return the place of a sequence's item."""
        return ValuePath(self, f"[{number}]", str(number))


@contextmanager
def located(place: ValuePath) -> Iterator[None]:
    """Add the place to StateErrors that are raised within without one."""
    try:
        yield
    except StateError as error:
        if error.facts.get("place"):
            raise
        raise placed(error, place) from error


def placed(error: StateError, place: ValuePath) -> StateError:
    """Return the same error, with the place."""
    what = error.message.removeprefix("the model: ").removesuffix(f"; {error.advice}")
    facts = {key: held for key, held in error.facts.items() if key != "place"}
    return type(error).at(str(place), what, **facts)
