"""The interface of adapters, and the registry of types whose objects can be saved.

An adapter takes a model apart into named values, and reassembles it:

    class Mine:
        name = "mine"

        def extract(self, model): return {"weights": model.weights}
        def reconstruct(self, tensors, original): return MyModel(tensors["weights"])

Most types need no adapter of their own. `register_provider` says how their objects become plain
values, arrays, tensors and other objects. All built-in adapters then accept such objects anywhere
in a saved structure:

    register_provider(Scaler, StateProvider(
        name="mine.scaler",
        state=lambda scaler: {"mean": scaler.mean, "steps": scaler.steps},
        restore=lambda state, original: Scaler(**state),
    ))

A save reads a model as a stream of chunks (StateChunk). The providers for the parts of the model
yield the chunks one by one, and each chunk is processed before the next one is made. So a state may
be an iterator over its keys and values, and a value may be a chunk with hints:

    def state(corpus):
        yield "embedding", StateChunk(corpus.embedding, frozen=True)  # is not copied
        yield "index", StateChunk(make=corpus.dump, frozen=True)      # made in the background
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from tensor_dedup.store.steps.errors import BadOption, BadOptionError
from tensor_dedup.training.errors import ProviderTakenError, StateError

if TYPE_CHECKING:
    from tensor_dedup.training.state import Value


@runtime_checkable
class ModelAdapter(Protocol):
    """An object that takes models of some kind apart and reassembles them.

    An adapter may also have a method `chunks(model)`, which returns an iterator of named
    StateChunks. A save then calls `chunks` instead of `extract`. The memory of a chunk must stay
    unchanged until the model may be changed. So do not fill one buffer for several chunks: the save
    may read a chunk after it has requested all others, and would then save wrong content without an
    error.

    The methods are called from several threads.
    """

    name: str

    def extract(self, model: Any) -> "Mapping[str, Value]":
        """Return the state of `model` as named values.

        The names must stay the same from step to step. Values may share the model's memory.

        Raises:
            StateError: A part of the model cannot be stored.
        """
        ...

    def reconstruct(self, tensors: "Mapping[str, Value]", original: Any) -> Any:
        """Return the model rebuilt from `tensors`, the values that `extract` returned.

        If possible, the values are restored into `original`. The values are writable, and belong to
        the model from now on.

        Raises:
            StateError: The values do not form a model, or do not fit `original`.
        """
        ...


@dataclass(frozen=True, slots=True)
class StateProvider:
    """Functions that convert objects of one type to a state that can be stored, and back.

    * `name` identifies the provider in checkpoints.
    * `state(obj)` returns the state of an object: plain values, arrays, tensors, other objects that
      have a provider, StateChunks, or containers of all these. Instead of a dict, it may return an
      iterator over keys and values. A save then takes each value apart before it requests the next
      one, but may read its memory later. So do not fill one buffer for several values: a save
      fails with a StateError if the first or last 4 KiB of the buffer show it.
    * `restore(state, original)` restores a state into the object `original`, and returns the
      object. If `original` is None, it returns a new object. A StateChunk in the saved state comes
      back as its source. If the source was bytes, or the chunk had a `make`, it comes back as a
      NamedValue.
    * `parts(original)` is optional. It returns the tensors and arrays of `original` that are to be
      filled in place, in the same structure as the state.
    * `flat` has the keys of the state that are left out of the names of pieces.
    * `fixed` has the keys of the state whose plain values hardly ever change.
    * `inline` says whether 0-dimensional CPU tensors are stored as plain values.
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
    """A series of byte strings in a state, stored as pieces `NAME_000000`, `NAME_000001`, ...

    Use a series for data that grows at its end, such as the trees of an ensemble, because earlier
    pieces then stay unchanged. The items of a restored series are memoryviews.
    """

    name: str
    items: "Sequence[bytes | bytearray | memoryview]"


class Providers:
    """The registry of providers, by the type of the objects that they serve. Safe from any thread.

    A type may be given as the string "module.name", so that its module need not be imported.
    """

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._of_type: Final[dict[str, StateProvider]] = {}
        self._of_package: Final[dict[str, StateProvider]] = {}
        self._named: Final[dict[str, StateProvider]] = {}

    def register(self, kind: type | str, provider: StateProvider) -> None:
        """Register `provider` for the type `kind`. One provider may serve several types.

        Raises:
            BadOptionError: `kind` is not a type, or `provider` is not a StateProvider.
            ProviderTakenError: The name or the type already has another provider.
        """
        given: tuple[object, object] = (kind, provider)
        if not isinstance(given[0], type | str):
            what = f"{kind!r} is neither a type nor the name of one"
            raise BadOptionError.of(BadOption.PROVIDER, "register_provider", what)
        if not isinstance(given[1], StateProvider):
            what = f"{provider!r} is no StateProvider"
            raise BadOptionError.of(BadOption.PROVIDER, "register_provider", what)
        text = kind if isinstance(kind, str) else full_name(kind)
        self._add(self._of_type, text, provider)

    def register_package(self, package: str, provider: StateProvider) -> None:
        """Register `provider` for all types in `package` that have no provider of their own."""
        self._add(self._of_package, package, provider)

    def _add(self, kinds: dict[str, StateProvider], key: str, provider: StateProvider) -> None:
        with self._lock:
            if self._named.setdefault(provider.name, provider) is not provider:
                raise ProviderTakenError.at(provider.name, "a provider of this name is registered")
            if kinds.setdefault(key, provider) is not provider:
                raise ProviderTakenError.at(key, "this type has a provider")

    def find(self, kind: type) -> StateProvider | None:
        """Return the provider for the type `kind`, or None if there is none.

        A provider registered for the type itself comes first, then one for the nearest base class,
        then one for the package of the type or of a base class.
        """
        typed = (self._of_type.get(full_name(base)) for base in kind.__mro__)
        packages = (base.__module__.partition(".")[0] for base in kind.__mro__)
        whole = (self._of_package.get(package) for package in packages)
        return next(filter(None, chain(typed, whole)), None)

    def named(self, name: str) -> StateProvider | None:
        """Return the provider that checkpoints call `name`, or None if there is none."""
        return self._named.get(name)


def full_name(kind: type) -> str:
    """Return the name of a type as "module.name", with the qualified name in the module."""
    return f"{kind.__module__}.{kind.__qualname__}"


providers: Final = Providers()


def register_provider(kind: type | str, provider: StateProvider) -> None:
    """Register how objects of a type, and of types derived from it, are converted to state.

    `kind` is the type, or its module and name as the string "module.name". Register the provider in
    every process, before objects of the type are saved or loaded. Safe from any thread.

    Raises:
        BadOptionError: `kind` is not a type, or `provider` is not a StateProvider.
        ProviderTakenError: The type or the name already has another provider.
    """
    providers.register(kind, provider)


def register_package(package: str, provider: StateProvider) -> None:
    """Register `provider` for all types in `package` that have no provider of their own."""
    providers.register_package(package, provider)


@dataclass(slots=True)
class ValuePath:
    """The path to a value in a model, made of keys, attributes and indices.

    `str(path)` formats the path as a Python expression, and `path.name` as the name of a piece.
    """

    above: "ValuePath | None" = None
    step: str = ""
    part: str = ""
    dotted: bool = False
    _name: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The name of the piece at this path: the keys on the path, joined by dots."""
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
        """Return the path of the value under `key` in the mapping or object at this path.

        With `attribute`, the key is formatted as an attribute. With `flat`, the key is left out of
        the name of the piece.
        """
        if flat:
            return ValuePath(self, "", "", dotted=True)
        if not isinstance(key, str):
            return ValuePath(self, f"[{key!r}]", str(key))
        plain = key.isidentifier() and (attribute or self.dotted or self.above is None)
        return ValuePath(self, f".{key}" if plain else f'["{key}"]', key)

    def item(self, number: int) -> "ValuePath":
        """Return the path of the item `number` in the sequence at this path."""
        return ValuePath(self, f"[{number}]", str(number))


@contextmanager
def located(place: ValuePath) -> Iterator[None]:
    """Context manager: while it is active, a StateError without a path gets the path `place`."""
    try:
        yield
    except StateError as error:
        if error.facts.get("place"):
            raise
        raise placed(error, place) from error


def placed(error: StateError, place: ValuePath) -> StateError:
    """Return `error` with the path `place` added."""
    what = error.message.removeprefix("the model: ").removesuffix(f"; {error.advice}")
    facts = {key: held for key, held in error.facts.items() if key != "place"}
    return type(error).at(str(place), what, **facts)
