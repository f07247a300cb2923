"""XGBoost: a booster as one piece a tree, and a rest that hardly grows.

The bytes of the model as XGBoost itself writes them are cut, never parsed to objects and never
written anew: put together they are the same bytes. Trees that are there stay as they are while more
are added. The two lists that grow with every round become pieces of 1 KiB, of which the last one
changes; what is left, some 2 KB, is a plain value.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final, NamedTuple
from weakref import ref

from xxhash import xxh3_128_digest

from tensor_dedup.store.checkpoints.adapters import appended, ubjson
from tensor_dedup.store.checkpoints.adapters.appended import GrowingAdapter
from tensor_dedup.store.checkpoints.adapters.base import (
    PieceSeries,
    StateProvider,
    register_provider,
)
from tensor_dedup.store.checkpoints.adapters.estimators import estimator_provider
from tensor_dedup.store.checkpoints.adapters.rebuild import mismatched
from tensor_dedup.store.checkpoints.adapters.xgboost_slices import Parts, joined, parts_of
from tensor_dedup.store.checkpoints.state_errors import DamagedStateError, UnsupportedValueError

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


class XGBoostAdapter(GrowingAdapter):
    """Boosters, XGBoost's scikit-learn estimators, and structures of them.

    Pieces are `tree_000000` and so on, bytes of their own; predictions are the same to the last
    bit. With `append_only` XGBoost writes the new rounds of a booster only. The parameters of
    training are saved, so that `update` goes on with them. `original` may be a booster, which is
    then filled; without, a new one is made.
    """

    name = "xgboost"


class _Known(NamedTuple):
    """A booster as it was taken apart last; `slices` as in LightGBM's."""

    booster: "ref[Any]"
    parts: Parts
    slices: bool | None


def _raw(booster: Any) -> bytes:
    """The bytes of a model."""
    memory = appended.current()
    return bytes(booster.save_raw("ubj")) if memory is None else _grown(booster, memory)


def _grown(booster: Any, memory: appended.Appended) -> bytes:
    known: _Known | None = memory.known(booster)
    if known is not None and known.booster() is not booster:
        known = None
    slices = None if known is None else known.slices
    raw = None
    if known is not None and slices is not False:
        raw = _longer(booster, known.parts)
        if raw is None:
            appended.said_otherwise("booster")
        elif slices is None:
            # Once for each booster: this XGBoost may write slices otherwise.
            sliced, raw = raw, bytes(booster.save_raw("ubj"))
            slices = sliced == raw
    if raw is None:
        raw = bytes(booster.save_raw("ubj"))
    if (parts := parts_of(raw)) is not None:
        memory.keep(booster, _Known(ref(booster), parts._replace(raw=b""), slices))
    return raw


def _longer(booster: Any, known: Parts) -> bytes | None:
    """What is known and a slice from its last round on; None where these are not one model."""
    last = len(known.rounds) - 2
    if booster.num_boosted_rounds() <= last:
        return None
    part = parts_of(bytes(booster[last:].save_raw("ubj")))
    return None if part is None else joined(known, part, booster.attributes())


def _state(booster: Any) -> dict[str, object]:
    raw = _raw(booster)
    state: dict[str, object] = {"config": booster.save_config()}
    plan: list[object] = []
    done = 0
    for name, bounds in _cuts(raw):
        plan += [raw[done : bounds[0]], [name, len(bounds) - 1]]
        state[name] = PieceSeries(name, [raw[start:stop] for start, stop in pairwise(bounds)])
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


register_provider(
    "xgboost.core.Booster",
    StateProvider("xgboost.booster", _state, _restore, flat=frozenset({_TREE, _WHOLE, *_COLUMNS})),
)
register_provider(
    "xgboost.sklearn.XGBModel", estimator_provider("xgboost", "XGBoost", "xgboost.sklearn:XGBModel")
)
