"""The adapter for XGBoost: a booster is stored as one piece for each tree, and a remainder.

The bytes that XGBoost writes for a model are cut into parts, without parsing or re-encoding, so the
parts in order are the same bytes. Trees stay unchanged while more trees are added. A model also has
two lists that grow with every round. They become pieces of 1 KiB, of which only the last one
changes. The remainder, about 2 KB, hardly grows and is stored as a plain value.

In append-only mode, XGBoost writes only a slice of the booster, from the last known round on. A
slice is itself a model: its trees are numbered from 0, and its two lists and its count of trees
cover only the rounds of the slice. It may also lack attributes. The bytes of the whole model are
made from it: the numbers, the lists, the count and the attributes are replaced by those of the
whole model, and the earlier trees are added.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final, NamedTuple
from weakref import ref

from xxhash import xxh3_128_digest

from tensor_dedup.training.adapters import ensembles, ubjson
from tensor_dedup.training.adapters.base import (
    PieceSeries,
    StateProvider,
    register_provider,
)
from tensor_dedup.training.adapters.ensembles import GrowingAdapter, estimator_provider
from tensor_dedup.training.adapters.rebuild import mismatched
from tensor_dedup.training.errors import DamagedStateError, UnsupportedValueError

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
_ARRAY: Final = b"[#L"
_TEXT: Final = b"S"
_COUNT: Final = struct.Struct(">q")
# As XGBoost chooses: the least that has room, without its two ends.
_NUMBERS: Final = ((7, ">Bb", b"i"), (15, ">Bh", b"I"), (31, ">Bi", b"l"), (63, ">Bq", b"L"))
_Span = tuple[int, int]
_LISTS: Final = ("iteration_indptr", "tree_info")
_PATHS: Final = {
    "num_trees": ("gbtree_model_param", "num_trees"),
    "iteration_indptr": ("iteration_indptr",),
    "tree_info": ("tree_info",),
    "trees": ("trees",),
}


class XGBoostAdapter(GrowingAdapter):
    """The adapter for boosters, XGBoost's scikit-learn estimators, and structures of them.

    Each tree is a piece of bytes, named `tree_000000` and so on. Predictions of a restored model
    are bit-identical. With `append_only`, XGBoost writes only the new rounds of a booster. The
    training parameters are saved too, so `update` continues the training with them.

    `original` may be a booster, which is then filled. Without `original`, a new booster is made.
    """

    name = "xgboost"


class Parts(NamedTuple):
    """The bytes of a model (`raw`), cut into parts as XGBoost wrote them.

    * `trees` has the bytes of each tree.
    * `rounds` has the index of the first tree of each round, and at its end the count of all trees.
      These are encoded numbers.
    * `classes` has the encoded class of each tree.
    * `spans` maps names to the byte ranges that depend on the number of rounds.
    """

    raw: bytes
    trees: list[bytes]
    rounds: list[bytes]
    classes: list[bytes]
    spans: dict[str, _Span]


class _Known(NamedTuple):
    """A booster as it was taken apart last; `slices` as for LightGBM."""

    booster: "ref[Any]"
    parts: Parts
    slices: bool | None


def _raw(booster: Any) -> bytes:
    """Return the bytes of a model."""
    memory = ensembles.append_only_memory()
    return bytes(booster.save_raw("ubj")) if memory is None else _grown(booster, memory)


def _grown(booster: Any, memory: ensembles.AppendOnlyMemory) -> bytes:
    known: _Known | None = memory.known(booster)
    if known is not None and known.booster() is not booster:
        known = None
    slices = None if known is None else known.slices
    raw = None
    if known is not None and slices is not False:
        raw = _longer(booster, known.parts)
        if raw is None:
            ensembles.warn_not_append_only("booster")
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
    """Return the known trees and a slice from their last round on; None if they do not fit."""
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
    """Return what is cut out: its name, and where its parts begin and the last one ends."""
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


def parts_of(raw: bytes) -> Parts | None:
    """Return the parts of the model `raw` if it is a tree booster in a known layout, else None.

    The result is also None for DART, because the weights of its trees change with each round.
    """
    try:
        return _parts_of(raw)
    except UnsupportedValueError:
        return None


def _parts_of(raw: bytes) -> Parts | None:
    model = ubjson.find(raw, 0, *_MODEL)
    attributes = ubjson.find(raw, 0, "learner", "attributes")
    if model is None or attributes is None:
        return None
    found = {key: ubjson.find(raw, model, *path) for key, path in _PATHS.items()}
    places = {"attributes": attributes} | {key: at for key, at in found.items() if at is not None}
    if places.keys() != {"attributes", *_PATHS}:
        return None
    items = ubjson.array(raw, places["trees"])
    rounds, classes = (ubjson.integers(raw, places[key]) for key in _LISTS)
    if items is None or rounds is None or classes is None or len(classes) != items[1]:
        return None
    if not classes or not raw.startswith(_TEXT, places["num_trees"]):
        return None
    bounds = ubjson.objects(raw, *items)
    spans = {key: (at, ubjson.skip(raw, at)) for key, at in places.items() if key != "trees"}
    spans["trees"] = places["trees"], bounds[-1]
    return Parts(raw, [raw[at:end] for at, end in pairwise(bounds)], rounds, classes, spans)


def joined(known: Parts, part: Parts, attributes: Mapping[str, str]) -> bytes | None:
    """Return the bytes of a model that has grown, joined from its old rounds and its new ones.

    `known` is the model at an earlier step. `part` has the rounds from the last one of `known` on.
    If that shared round differs between them, the result is None. `attributes` are those of the
    grown model.
    """
    before = ubjson.number(known.rounds[-2])
    trees = [_numbered(tree, before + at) for at, tree in enumerate(part.trees)]
    if trees[: len(known.trees) - before] != known.trees[before:]:
        return None
    every = [*known.trees[:before], *trees]
    starts = (_number(before + ubjson.number(item)) for item in part.rounds)
    new = {
        "attributes": b"{" + b"".join(map(_attribute, *_columns(attributes))) + b"}",
        "num_trees": _TEXT + _sized(str(len(every)).encode()),
        "iteration_indptr": _list([*known.rounds[:-2], *starts]),
        "tree_info": _list([*known.classes[:before], *part.classes]),
        "trees": _list(every),
    }
    pieces: list[bytes] = []
    done = 0
    for key, (start, end) in sorted(part.spans.items(), key=lambda item: item[1]):
        pieces += [part.raw[done:start], new[key]]
        done = end
    return b"".join([*pieces, part.raw[done:]])


def _numbered(tree: bytes, number: int) -> bytes:
    at = ubjson.find(tree, 0, "id")
    if at is None:
        return tree
    return tree[:at] + _number(number) + tree[ubjson.skip(tree, at) :]


def _number(number: int) -> bytes:
    _, form, marker = next(each for each in _NUMBERS if number < 2 ** each[0] - 1)
    return struct.pack(form, marker[0], number)


def _list(items: Sequence[bytes]) -> bytes:
    return _ARRAY + _COUNT.pack(len(items)) + b"".join(items)


def _columns(attributes: Mapping[str, str]) -> tuple[list[str], list[str]]:
    ordered = sorted(attributes.items(), key=lambda item: item[0].encode())
    return [key for key, _ in ordered], [value for _, value in ordered]


def _attribute(key: str, value: str) -> bytes:
    return _sized(key.encode()) + _TEXT + _sized(value.encode())


def _sized(text: bytes) -> bytes:
    return b"L" + _COUNT.pack(len(text)) + text


register_provider(
    "xgboost.core.Booster",
    StateProvider("xgboost.booster", _state, _restore, flat=frozenset({_TREE, _WHOLE, *_COLUMNS})),
)


register_provider(
    "xgboost.sklearn.XGBModel", estimator_provider("xgboost", "XGBoost", "xgboost.sklearn:XGBModel")
)
