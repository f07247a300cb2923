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

A save reads a model as a stream of chunks (StateChunk). The providers of its parts yield them one
by one, and each is processed before the next is made. A state may be an iterator of its parts, and
a part may have hints:

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

    It may also have `chunks(model)`, an iterator of named StateChunks, which a save then uses
    instead of `extract`. Each chunk must have memory of its own that stays unchanged until the
    model may be changed: a save may read it after all other chunks were made. A buffer that is
    filled again would be saved with wrong content, and no error would be raised. Methods are called
    from several threads.
    """

    name: str

    def extract(self, model: Any) -> "Mapping[str, Value]":
        """Return the state of the model as named values; the names stay the same from step to step.

        Values may share the model's memory.

        Raises:
            StateError: A part of the model cannot be stored.
        """
        ...

    def reconstruct(self, tensors: "Mapping[str, Value]", original: Any) -> Any:
        """Rebuild the model from what `extract` returned, in `original` if possible.

        The values are writable, and the model takes ownership of them.

        Raises:
            StateError: The values do not form a model, or do not fit `original`.
        """
        ...


@dataclass(frozen=True, slots=True)
class StateProvider:
    """Functions that convert objects of one type to a state that can be stored, and back.

    `name` is written to the checkpoint. `state` returns plain values, arrays, tensors, other
    objects that have a provider, StateChunks, or containers of them. It may also return an iterator
    over the keys and values of a dict; each value is processed before the next is requested, and
    its memory must not be reused for another. A StateChunk is restored like its source; one of
    bytes or with `make` is restored as a NamedValue.

    `restore` takes a state and the object to restore into (None to make a new one), and returns
    that object. `parts`, if given, returns the equivalent of `state` for the object to restore
    into, so that its tensors and arrays are filled in place.

    `flat` has keys of the state that are left out of the names of pieces. `fixed` has keys whose
    plain values hardly ever change. With `inline`, tensors of one element are stored as plain
    values.
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

    Use it for data that grows at its end, such as the trees of an ensemble: earlier pieces stay
    unchanged. The items of a restored series are memoryviews.
    """

    name: str
    items: "Sequence[bytes | bytearray | memoryview]"


class Providers:
    """The registry of providers by type. Safe from any thread.

    A type may be given as "module.name", so that its module need not be imported.
    """

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._of_type: Final[dict[str, StateProvider]] = {}
        self._of_package: Final[dict[str, StateProvider]] = {}
        self._named: Final[dict[str, StateProvider]] = {}

    def register(self, kind: type | str, provider: StateProvider) -> None:
        """Register a provider, which may serve several types.

        Raises:
            BadOptionError: `kind` is no type, or `provider` no StateProvider.
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
        """Register a provider for all types of a package that have no provider of their own."""
        self._add(self._of_package, package, provider)

    def _add(self, kinds: dict[str, StateProvider], key: str, provider: StateProvider) -> None:
        with self._lock:
            if self._named.setdefault(provider.name, provider) is not provider:
                raise ProviderTakenError.at(provider.name, "a provider of this name is registered")
            if kinds.setdefault(key, provider) is not provider:
                raise ProviderTakenError.at(key, "this type has a provider")

    def find(self, kind: type) -> StateProvider | None:
        """Return the provider of a type, of its first base class with one, or of its package."""
        typed = (self._of_type.get(full_name(base)) for base in kind.__mro__)
        packages = (base.__module__.partition(".")[0] for base in kind.__mro__)
        whole = (self._of_package.get(package) for package in packages)
        return next(filter(None, chain(typed, whole)), None)

    def named(self, name: str) -> StateProvider | None:
        """Return the provider with this name in checkpoints, or None."""
        return self._named.get(name)


def full_name(kind: type) -> str:
    """Return the module and qualified name of a type, as "module.name"."""
    return f"{kind.__module__}.{kind.__qualname__}"


providers: Final = Providers()


def register_provider(kind: type | str, provider: StateProvider) -> None:
    """Register how objects of a type, and of types derived from it, are converted to state.

    `kind` may be the type's module and name as a string. Register before saving and before loading,
    in every process, from any thread.

    Raises:
        BadOptionError: `kind` is no type, or `provider` no StateProvider.
        ProviderTakenError: The type or the name already has another provider.
    """
    providers.register(kind, provider)


def register_package(package: str, provider: StateProvider) -> None:
    """Register a provider for all types of a package that have no provider of their own."""
    providers.register_package(package, provider)


@dataclass(slots=True)
class ValuePath:
    """The path to a value in a model, made of keys, attributes and indices.

    `str` formats it as a Python expression, and `name` as the name of a piece.
    """

    above: "ValuePath | None" = None
    step: str = ""
    part: str = ""
    dotted: bool = False
    _name: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The keys on the path, joined by dots."""
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

        `attribute` formats it as an attribute. `flat` leaves the key out of the name of the piece.
        """
        if flat:
            return ValuePath(self, "", "", dotted=True)
        if not isinstance(key, str):
            return ValuePath(self, f"[{key!r}]", str(key))
        plain = key.isidentifier() and (attribute or self.dotted or self.above is None)
        return ValuePath(self, f".{key}" if plain else f'["{key}"]', key)

    def item(self, number: int) -> "ValuePath":
        """Return the path of an item of the sequence at this path."""
        return ValuePath(self, f"[{number}]", str(number))


@contextmanager
def located(place: ValuePath) -> Iterator[None]:
    """Add the path to any StateError that is raised inside the block without a path."""
    try:
        yield
    except StateError as error:
        if error.facts.get("place"):
            raise
        raise placed(error, place) from error


def placed(error: StateError, place: ValuePath) -> StateError:
    """Return the same error with the path added."""
    what = error.message.removeprefix("the model: ").removesuffix(f"; {error.advice}")
    facts = {key: held for key, held in error.facts.items() if key != "place"}
    return type(error).at(str(place), what, **facts)
