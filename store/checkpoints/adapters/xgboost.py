"""XGBoost: a booster as one piece a tree, and a rest that hardly grows.

The bytes of the model as XGBoost itself writes them are cut, never parsed to objects and never
written anew: put together they are the same bytes. Trees that are there stay as they are while more
are added. The two lists that grow with every round become pieces of 1 KiB, of which the last one
changes; what is left, some 2 KB, is a plain value.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_128_digest

from tensor_dedup.store.checkpoints.adapters import ubjson
from tensor_dedup.store.checkpoints.adapters.base import Series, StateProvider, register_provider
from tensor_dedup.store.checkpoints.adapters.nested import take_apart
from tensor_dedup.store.checkpoints.adapters.rebuilding import mismatched, put_together
from tensor_dedup.store.checkpoints.state_errors import DamagedStateError, UnsupportedValueError

if TYPE_CHECKING:
    from tensor_dedup.store.checkpoints.state import Value

_TREES: Final = "trees"
_TREE: Final = "tree"
# Lists with an item for each round or tree.
_COLUMNS: Final = ("iteration_indptr", "tree_info", "weight_drop")
_CHUNK: Final = 1 << 10
_WHOLE: Final = "model"
_PART: Final = 1 << 16
_BOOSTER: Final = ("learner", "gradient_booster")
_MODEL: Final = (*_BOOSTER, "model")
_DART: Final = (*_BOOSTER, "gbtree", "model")


class XGBoostAdapter:
    """Boosters, XGBoost's scikit-learn estimators, and structures of them.

    Pieces are `tree_000000` and so on. With the parameters of training, so that `update` goes on
    with them. `original` may be a booster, which is then filled; without, a new one is made.
    """

    name = "xgboost"

    def extract(self, model: Any) -> "Mapping[str, Value]":
        """One piece a tree; bytes of their own."""
        return take_apart(model)

    def reconstruct(self, tensors: "Mapping[str, Value]", original: Any = None) -> Any:
        """The booster; the same predictions to the last bit."""
        return put_together(tensors, original)


def _state(booster: Any) -> dict[str, object]:
    raw = bytes(booster.save_raw("ubj"))
    state: dict[str, object] = {"config": booster.save_config()}
    plan: list[object] = []
    done = 0
    for name, bounds in _cuts(raw):
        plan += [raw[done : bounds[0]], [name, len(bounds) - 1]]
        state[name] = Series(name, [raw[start:stop] for start, stop in pairwise(bounds)])
        done = bounds[-1]
    plan.append(raw[done:])
    return {**state, "plan": plan, "sum": xxh3_128_digest(raw)}


def _cuts(raw: bytes) -> list[tuple[str, list[int]]]:
    """What is cut out: its name, and where each part of it begins and the last one ends."""
    try:
        return _known_cuts(raw)
    except UnsupportedValueError:
        # Another version of XGBoost, which writes otherwise: then parts of equal length it is.
        return [(_WHOLE, [*range(0, len(raw), _PART), len(raw)])]


def _known_cuts(raw: bytes) -> list[tuple[str, list[int]]]:
    if (place := ubjson.find(raw, 0, *_MODEL)) is not None:
        return list(_cuts_of(raw, place))
    if (place := ubjson.find(raw, 0, *_DART)) is None:
        return []  # linear: no trees
    booster = ubjson.find(raw, 0, *_BOOSTER) or 0
    return [*_cuts_of(raw, place), *_cuts_of(raw, booster)]


def _cuts_of(raw: bytes, place: int) -> Iterator[tuple[str, list[int]]]:
    members = ubjson.members(raw, place)
    with suppress(StopIteration):  # of next and send: no more members
        key, start = next(members)
        while True:
            items = ubjson.array(raw, start)
            if key == _TREES and items is not None and items[1]:
                yield _TREE, ubjson.objects(raw, *items)
                return  # the last there, and the one that is long to skip
            end = ubjson.skip(raw, start)
            if key in _COLUMNS and items is not None and end - items[0] > _CHUNK:
                yield key, [*range(items[0], end, _CHUNK), end]
            key, start = members.send(end)


def _restore(state: Any, original: Any) -> Any:
    import xgboost

    if original is not None and not isinstance(original, xgboost.Booster):
        raise mismatched(original, "an xgboost.Booster")
    raw = bytearray().join(_parts(state))
    if xxh3_128_digest(raw) != state["sum"]:
        # XGBoost believes what it reads, and what is not a model can end the process.
        raise DamagedStateError.at("", "its parts are not the model that was saved")
    booster = xgboost.Booster() if original is None else original
    try:
        booster.load_model(raw)
        booster.load_config(state["config"])
    except xgboost.core.XGBoostError as error:
        raise DamagedStateError.at("", f"XGBoost does not take its model: {error}") from error
    return booster


def _parts(state: Any) -> Iterator[Any]:
    for part in state["plan"]:
        if isinstance(part, bytes):
            yield part
            continue
        name, count = part
        items = state[name].items
        if len(items) != count:
            raise DamagedStateError.at("", f"{len(items)} of {count} pieces of {name}")
        yield from items


def _estimator_state(estimator: Any) -> dict[str, object]:
    kind = type(estimator)
    if kind.__module__.partition(".")[0] != "xgboost":
        raise UnsupportedValueError.at("", f"a {kind.__qualname__}, made from XGBoost's estimators")
    return {"class": kind.__name__, "state": dict(vars(estimator))}


def _restore_estimator(state: Any, original: Any) -> Any:
    import xgboost
    from xgboost.sklearn import XGBModel

    kind = getattr(xgboost, state["class"], None)
    if not isinstance(kind, type) or not issubclass(kind, XGBModel):
        raise DamagedStateError.at("", f"XGBoost has no estimator {state['class']!r}")
    if original is not None and type(original) is not kind:
        raise mismatched(original, f"an xgboost.{kind.__name__}")
    estimator = kind.__new__(kind) if original is None else original
    estimator.__dict__.clear()
    estimator.__dict__.update(state["state"])
    return estimator


register_provider(
    "xgboost.core.Booster",
    StateProvider("xgboost.booster", _state, _restore, flat=frozenset({_TREE, _WHOLE, *_COLUMNS})),
)
register_provider(
    "xgboost.sklearn.XGBModel",
    StateProvider(
        "xgboost.estimator", _estimator_state, _restore_estimator, flat=frozenset({"state"})
    ),
)
