"""LightGBM: a booster as one piece a tree, and a rest that does not grow.

LightGBM writes a model as text: a head that ends in the sizes of the trees, the trees, and a rest
with importances and parameters. The text is cut at those sizes; they follow from the pieces.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_128_digest

from tensor_dedup.store.checkpoints.adapters.base import Series, StateProvider, register_provider
from tensor_dedup.store.checkpoints.adapters.nested import take_apart
from tensor_dedup.store.checkpoints.adapters.rebuilding import mismatched, put_together
from tensor_dedup.store.checkpoints.state_errors import DamagedStateError, UnsupportedValueError

if TYPE_CHECKING:
    from tensor_dedup.store.checkpoints.state import Value

_SIZES: Final = b"\ntree_sizes="
_AFTER_SIZES: Final = b"\n\n"
_PARAMETERS: Final = b"\nparameters:"
# What a booster knows beside its model; the rest of its attributes belongs to its data.
_KEPT: Final = ("best_iteration", "best_score", "params")


class LightGBMAdapter:
    """Boosters, LightGBM's scikit-learn estimators, and structures of them.

    Pieces are `tree_000000` and so on. `original` may be a booster, which then forgets the data it
    was trained on, as `model_from_string` makes it; to go on, give the booster to
    `lightgbm.train(init_model=)`.
    """

    name = "lightgbm"

    def extract(self, model: Any) -> "Mapping[str, Value]":
        """One piece a tree; bytes of their own."""
        return take_apart(model)

    def reconstruct(self, tensors: "Mapping[str, Value]", original: Any = None) -> Any:
        """The booster; the same predictions to the last bit."""
        return put_together(tensors, original)


def _state(booster: Any) -> dict[str, object]:
    # -1: all rounds; the best ones only would be another model.
    text = booster.model_to_string(num_iteration=-1).encode()
    kept = {name: getattr(booster, name) for name in _KEPT if hasattr(booster, name)}
    return {"kept": kept, **_cut(text), "sum": xxh3_128_digest(text)}


def _cut(text: bytes) -> dict[str, object]:
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
        "trees": Series("tree", trees),
        "scores": scores,
        "parameters": Series("parameters", [parameters + last]),
    }
    if _joined(parts) != text:  # another version of LightGBM, which writes otherwise
        none = {"trees": Series("tree", []), "parameters": Series("parameters", [])}
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


def _estimator_state(estimator: Any) -> dict[str, object]:
    kind = type(estimator)
    if kind.__module__.partition(".")[0] != "lightgbm":
        raise UnsupportedValueError.at(
            "", f"a {kind.__qualname__}, made from LightGBM's estimators"
        )
    return {"class": kind.__name__, "state": dict(vars(estimator))}


def _restore_estimator(state: Any, original: Any) -> Any:
    import lightgbm

    kind = getattr(lightgbm, state["class"], None)
    if not isinstance(kind, type) or not issubclass(kind, lightgbm.LGBMModel):
        raise DamagedStateError.at("", f"LightGBM has no estimator {state['class']!r}")
    if original is not None and type(original) is not kind:
        raise mismatched(original, f"a lightgbm.{kind.__name__}")
    estimator = kind.__new__(kind) if original is None else original
    estimator.__dict__.clear()
    estimator.__dict__.update(state["state"])
    return estimator


register_provider(
    "lightgbm.basic.Booster",
    StateProvider("lightgbm.booster", _state, _restore, flat=frozenset({"trees", "parameters"})),
)
register_provider(
    "lightgbm.sklearn.LGBMModel",
    StateProvider(
        "lightgbm.estimator", _estimator_state, _restore_estimator, flat=frozenset({"state"})
    ),
)
