"""Common code of the adapters for tree ensembles: append-only saving, and estimators.

With `append_only=True` the caller declares that an ensemble only grows. Trees that an adapter has
read before are then not read again, so a change to a saved tree goes unnoticed. Every save checks
that there are at least as many trees as before, and that the last known tree is unchanged. If this
does not hold, all trees are read again.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import is_
from typing import Any, NamedTuple, TypeVar

from tensor_dedup.training.adapters.base import StateProvider
from tensor_dedup.training.adapters.rebuild import StructureAdapter, mismatched
from tensor_dedup.training.errors import DamagedStateError, UnsupportedValueError
from tensor_dedup.training.state import StateChunk

_log = logging.getLogger(__name__)
_Columns = TypeVar("_Columns", bound=tuple[list[Any], ...])
_BROKEN = (
    "a %s was declared append-only, and trees of it that were saved are gone or changed: all of "
    "it is read"
)


class _Read(NamedTuple):
    """Objects, and a column of values for each thing that was read of them."""

    objects: list[Any]
    columns: tuple[list[Any], ...]


class AppendOnlyMemory:
    """Values that an adapter keeps of a model, to reuse them at the next step of the same model.

    Use the object from one thread at a time.
    """

    def __init__(self) -> None:
        # By the identity of the first object, which is held, or of what holds the trees.
        self._last: dict[int, Any] = {}
        self._next: dict[int, Any] = {}

    def begin(self) -> None:
        """Begin to process a model: values passed to `keep` from now on belong to it."""
        self._next = {}

    def end(self) -> None:
        """End the processing of the current model, and forget the values of the one before it."""
        self._last, self._next = self._next, {}

    def known(self, key: object) -> Any:
        """Return the value kept for the object `key` of the previous model, or None.

        Objects are compared by identity.
        """
        return self._last.get(id(key))

    def keep(self, key: object, value: object) -> None:
        """Keep `value` for the object `key` until the next model has been processed.

        `value` must hold a reference to the object, so that its identity is not reused.
        """
        self._next[id(key)] = value


_current: ContextVar[AppendOnlyMemory | None] = ContextVar("appended", default=None)


def append_only_memory() -> AppendOnlyMemory | None:
    """Return the memory of the adapter that is processing a model in this context.

    Returns None if no adapter is running, or if the adapter was made without `append_only`.
    """
    return _current.get()


def warn_not_append_only(kind: str) -> None:
    """Log a warning that an ensemble was declared append-only, but did not only grow.

    `kind` is the name of the type of its members.
    """
    _log.warning(_BROKEN, kind)


def read_columns(
    objects: Sequence[Any], columns_of: Callable[[Sequence[Any]], _Columns | None]
) -> _Columns | None:
    """Return the result of `columns_of(objects)`: columns with one item for each object.

    If the adapter was made with `append_only`, only the objects added since the previous step are
    read, and the last object of that step. All objects are read if that last one has changed, or if
    an object of the previous step was removed or replaced.
    """
    memory = append_only_memory()
    if memory is None:
        return columns_of(objects)
    columns = _longer(memory.known(objects[0]), objects, columns_of) or columns_of(objects)
    if columns is not None:
        memory.keep(objects[0], _Read(list(objects), columns))
    return columns


def _longer(
    known: _Read | None,
    objects: Sequence[Any],
    columns_of: Callable[[Sequence[Any]], _Columns | None],
) -> _Columns | None:
    """Return the known columns with the new items; None where known objects have changed."""
    if known is None:
        return None
    count = len(known.objects)
    # Which objects they are is cheap to ask; what is in them, of the last one only.
    if count <= len(objects) and all(map(is_, known.objects, objects)):
        new = columns_of(objects[count - 1 :])
        if new is not None and [column[0] for column in new] == [c[-1] for c in known.columns]:
            pairs = zip(known.columns, new, strict=True)
            return tuple(old + column[1:] for old, column in pairs)  # type: ignore[return-value]
    warn_not_append_only(type(objects[0]).__name__)
    return None


class GrowingAdapter(StructureAdapter):
    """Base class of adapters for ensembles, with the option not to read saved trees again."""

    def __init__(self, *, append_only: bool = False) -> None:
        """With `append_only`, do not read saved trees again while the same object grows.

        The adapter then keeps the saved trees in memory, so use a separate adapter for each run. Do
        not use the option if trees are changed, pruned or reweighted after they were added (as by
        DART and refitting), because the old trees would be saved. Every save checks that there are
        at least as many trees as before, and that the last known tree is unchanged. Otherwise the
        save logs a warning and reads all trees.
        """
        self._memory = AppendOnlyMemory() if append_only else None
        self._lock = threading.Lock()

    def chunks(self, model: Any) -> Iterator[StateChunk]:
        # docstring inherited
        if self._memory is None:
            return super().chunks(model)
        with self._lock, _at_work(self._memory):  # which others must not find while they take some
            return iter(list(super().chunks(model)))


@contextmanager
def _at_work(memory: AppendOnlyMemory) -> Iterator[None]:
    token = _current.set(memory)
    memory.begin()
    try:
        yield
        memory.end()
    finally:
        _current.reset(token)


def estimator_provider(package: str, title: str, base: str) -> StateProvider:
    """Return a provider for the scikit-learn-style estimators in the boosting package `package`.

    `title` is the name of the package in messages. `base` is the common base class of the
    estimators, as "module:name". The provider restores only classes of the package itself, because
    a checkpoint does not contain the code of other classes. Nothing is imported before an estimator
    is restored.
    """
    module, _, name = base.partition(":")

    def state(estimator: Any) -> dict[str, object]:
        kind = type(estimator)
        if kind.__module__.partition(".")[0] != package:
            what = f"a {kind.__qualname__}, made from {title}'s estimators"
            raise UnsupportedValueError.at("", what)
        return {"class": kind.__name__, "state": dict(vars(estimator))}

    def restore(state: Any, original: Any) -> Any:
        found = getattr(importlib.import_module(package), state["class"], None)
        every = getattr(importlib.import_module(module), name)
        if not isinstance(found, type) or not issubclass(found, every):
            raise DamagedStateError.at("", f"{title} has no estimator {state['class']!r}")
        kind: Any = found
        if original is not None and type(original) is not kind:
            article = "an" if package[0] in "aeioux" else "a"
            raise mismatched(original, f"{article} {package}.{kind.__name__}")
        estimator = kind.__new__(kind) if original is None else original
        estimator.__dict__.clear()
        estimator.__dict__.update(state["state"])
        return estimator

    return StateProvider(f"{package}.estimator", state, restore, flat=frozenset({"state"}))
