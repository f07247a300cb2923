"""XGBoost's model from the trees that are known and a slice of those that are not.

XGBoost writes a slice of a booster as a model of its own. It differs from the whole one in what is
counted from its first round on: the numbers of trees, two lists, a count, and attributes that a
slice may lack. Those are put into the bytes of the slice; nothing else is made here.
"""

import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from tensor_dedup.store.checkpoints.adapters import ubjson
from tensor_dedup.store.checkpoints.state_errors import UnsupportedValueError

_MODEL: Final = ("learner", "gradient_booster", "model")
_ARRAY: Final = b"[#L"
_TEXT: Final = b"S"
_COUNT: Final = struct.Struct(">q")
# As XGBoost chooses: the least that has room, without its two ends.
_NUMBERS: Final = ((7, ">Bb", b"i"), (15, ">Bh", b"I"), (31, ">Bi", b"l"), (63, ">Bq", b"L"))

_Span = tuple[int, int]


class Parts(NamedTuple):
    """A model that was cut: its bytes, its trees, the numbers of the first trees of its rounds and
    of one more, and each tree's class, as they are written.

    `spans` are the places in it of what depends on how many rounds there are.
    """

    raw: bytes
    trees: list[bytes]
    rounds: list[bytes]
    classes: list[bytes]
    spans: dict[str, _Span]


def parts_of(raw: bytes) -> Parts | None:
    """The parts of trees of one model; None for other boosters, and where it is written otherwise.

    DART's weights change with each round: it is none.
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


_LISTS: Final = ("iteration_indptr", "tree_info")
_PATHS: Final = {
    "num_trees": ("gbtree_model_param", "num_trees"),
    "iteration_indptr": ("iteration_indptr",),
    "tree_info": ("tree_info",),
    "trees": ("trees",),
}


def joined(known: Parts, part: Parts, attributes: Mapping[str, str]) -> bytes | None:
    """The whole model: all rounds of `known` but the last, then those of `part`.

    None where the first round of the part is not the last one that is known.
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
