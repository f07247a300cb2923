"""The adapter for LightGBM: a booster is stored as one piece for each tree, and a remainder.

LightGBM writes a model as text: a head that ends in the sizes of the trees, the trees, and a tail
with importances and parameters. The sizes in the head say where the text is cut into pieces. They
are not stored, because they follow from the pieces. The remainder does not grow with the number of
trees.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple
from weakref import ref

from xxhash import xxh3_128_digest

from tensor_dedup.training.adapters import ensembles
from tensor_dedup.training.adapters.base import (
    PieceSeries,
    StateProvider,
    register_provider,
)
from tensor_dedup.training.adapters.ensembles import GrowingAdapter, estimator_provider
from tensor_dedup.training.adapters.rebuild import mismatched
from tensor_dedup.training.errors import DamagedStateError

_SIZES: Final = b"\ntree_sizes="
_AFTER_SIZES: Final = b"\n\n"
_PARAMETERS: Final = b"\nparameters:"
_DART: Final = b"[boosting: dart]"
# What a booster knows beside its model; the rest of its attributes belongs to its data.
_KEPT: Final = ("best_iteration", "best_score", "params")


class LightGBMAdapter(GrowingAdapter):
    """The adapter for boosters, LightGBM's scikit-learn estimators, and structures of them.

    Each tree is a piece of bytes, named `tree_000000` and so on. Predictions of a restored model
    are bit-identical. With `append_only`, LightGBM writes only the new trees of a booster.

    A restore into a booster calls LightGBM's `model_from_string`, and the booster then has no
    training data. To continue the training, pass the booster to `lightgbm.train(init_model=)`.
    """

    name = "lightgbm"


class _Known(NamedTuple):
    """A booster as it was taken apart last, with `width` trees a round.

    `slices` tells whether a model of known trees and a slice was equal to the whole one; None
    before they were compared.
    """

    booster: "ref[Any]"
    head: bytes
    trees: list[bytes]
    width: int
    slices: bool | None


def _state(booster: Any) -> dict[str, object]:
    memory = ensembles.append_only_memory()
    parts = _whole(booster) if memory is None else _grown(booster, memory)
    kept = {name: getattr(booster, name) for name in _KEPT if hasattr(booster, name)}
    return {"kept": kept, **parts, "sum": xxh3_128_digest(_joined(parts))}


def _whole(booster: Any, start: int = 0) -> dict[str, Any]:
    """Cut the model from a round on."""
    # -1: all rounds; the best ones only would be another model.
    return _cut(booster.model_to_string(num_iteration=-1, start_iteration=start).encode())


def _grown(booster: Any, memory: ensembles.AppendOnlyMemory) -> dict[str, Any]:
    known: _Known | None = memory.known(booster)
    if known is not None and known.booster() is not booster:
        known = None
    slices = None if known is None else known.slices
    parts = None
    if known is not None and slices is not False:
        parts = _longer(booster, known)
        if parts is None:
            ensembles.warn_not_append_only("booster")
        elif slices is None:
            # Once for each booster: this LightGBM may write slices otherwise.
            sliced, parts = parts, _whole(booster)
            slices = _joined(sliced) == _joined(parts)
    parts = parts or _whole(booster)
    trees = parts["trees"].items
    # DART weighs trees anew that are there.
    if trees and not any(_DART in bytes(part) for part in parts["parameters"].items):
        width = booster.num_model_per_iteration()
        memory.keep(booster, _Known(ref(booster), parts["head"], trees, width, slices))
    return parts


def _longer(booster: Any, known: _Known) -> dict[str, Any] | None:
    """Return known trees and those of a slice; None where the slice does not continue them."""
    width = known.width
    before = len(known.trees) - width
    parts = _whole(booster, before // width)
    trees = [_numbered(tree, at, before) for at, tree in enumerate(parts["trees"].items)]
    if parts["head"] != known.head or trees[:width] != known.trees[before:]:
        return None
    return {**parts, "trees": PieceSeries("tree", [*known.trees[:before], *trees])}


def _numbered(tree: bytes, at: int, before: int) -> bytes:
    """Give a tree of a slice the number that it has in the whole model."""
    mark = b"Tree=%d\n" % at
    return b"Tree=%d\n" % (before + at) + tree[len(mark) :] if tree.startswith(mark) else tree


def _cut(text: bytes) -> dict[str, Any]:
    head, found, rest = text.partition(_SIZES)
    sizes, ended, rest = rest.partition(_AFTER_SIZES)
    trees: list[bytes] = []
    if found and ended and sizes.replace(b" ", b"").isdigit():
        bounds = list(accumulate(map(int, sizes.split()), initial=0))
        trees = [rest[start:stop] for start, stop in pairwise(bounds)]
        rest = rest[bounds[-1] :]
    else:
        head, rest = text, b""  # no trees yet
    scores, parameters, last = rest.partition(_PARAMETERS)
    parts = {
        "head": head,
        "trees": PieceSeries("tree", trees),
        "scores": scores,
        "parameters": PieceSeries("parameters", [parameters + last]),
    }
    if _joined(parts) != text:  # another version of LightGBM, which writes otherwise
        none = {"trees": PieceSeries("tree", []), "parameters": PieceSeries("parameters", [])}
        return {"head": text, "scores": b"", **none}
    return parts


def _joined(parts: Mapping[str, Any]) -> bytes:
    trees = [bytes(tree) for tree in parts["trees"].items]
    sizes = [b" ".join(b"%d" % len(tree) for tree in trees), _AFTER_SIZES] if trees else []
    rest = [parts["scores"], *map(bytes, parts["parameters"].items)]
    return b"".join([parts["head"], *([_SIZES] if trees else []), *sizes, *trees, *rest])


def _restore(state: Any, original: Any) -> Any:
    import lightgbm

    if original is not None and not isinstance(original, lightgbm.Booster):
        raise mismatched(original, "a lightgbm.Booster")
    data = _joined(state)
    if xxh3_128_digest(data) != state["sum"]:
        # LightGBM believes what it reads, and what is not a model can end the process.
        raise DamagedStateError.at("", "its parts are not the model that was saved")
    try:
        text = data.decode()
        if original is None:
            booster = lightgbm.Booster(model_str=text)
        else:
            booster = original.model_from_string(text)
    except (lightgbm.basic.LightGBMError, UnicodeDecodeError) as error:
        raise DamagedStateError.at("", f"LightGBM does not take its model: {error}") from error
    for name in _KEPT:
        if name in state["kept"]:
            setattr(booster, name, state["kept"][name])
    return booster


register_provider(
    "lightgbm.basic.Booster",
    StateProvider("lightgbm.booster", _state, _restore, flat=frozenset({"trees", "parameters"})),
)
register_provider(
    "lightgbm.sklearn.LGBMModel",
    estimator_provider("lightgbm", "LightGBM", "lightgbm.sklearn:LGBMModel"),
)
