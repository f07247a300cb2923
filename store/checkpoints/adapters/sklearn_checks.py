"""What scikit-learn takes for granted of trees: it walks them in C, and looks at nothing.

A step may have been made by anybody, so whatever leads out of a tree's memory is damage.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

from tensor_dedup.store.checkpoints.adapters.base import full_name
from tensor_dedup.store.checkpoints.state import is_array
from tensor_dedup.store.checkpoints.state_errors import DamagedStateError

PREDICTOR: Final = "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"
_BOOSTING: Final = "sklearn.ensemble._hist_gradient_boosting.gradient_boosting"
# They hand trees what they were asked about, and trees do not look at how many features it has.
_TRUSTING: Final = frozenset(
    {"sklearn.ensemble._forest", "sklearn.ensemble._gb", "sklearn.ensemble._iforest"}
)
_TREES: Final = "sklearn.tree._classes"
_SET_WORDS: Final = 8


def check_links(left: Any, right: Any, leaves: Any) -> None:
    """DamagedStateError unless every node leads to later ones, or nowhere."""
    import numpy as np

    numbers, count = np.arange(len(left)), len(left)
    for child in (left, right):
        wrong = ~leaves & ((child <= numbers) | (child >= count))
        if wrong.any() or not count:
            raise DamagedStateError.at("", "a node of a tree leads out of it")


def check_object(held: Any) -> None:
    """DamagedStateError for an estimator or a tree that would read beside its arrays."""
    kinds = type(held).__mro__
    modules, state = {kind.__module__ for kind in kinds}, getattr(held, "__dict__", {})
    if any(full_name(kind) == PREDICTOR for kind in kinds):
        check_predictor(held)
    elif _BOOSTING in modules and "_predictors" in state:
        _check_rounds(state)
    elif _TREES in modules and "tree_" in state:
        _check_features([held], _number(state["n_features_in_"]))
    elif modules & _TRUSTING and "estimators_" in state:
        _check_features(_each(state["estimators_"]), _number(state["n_features_in_"]))


def check_predictor(tree: Any) -> None:
    """DamagedStateError for a tree of histogram-based boosting whose nodes lead out of it."""
    import numpy as np

    nodes, sets = tree.nodes, (tree.binned_left_cat_bitsets, tree.raw_left_cat_bitsets)
    if nodes.ndim != 1 or any(each.shape != (len(each), _SET_WORDS) for each in sets):
        raise DamagedStateError.at("", "a tree of arrays of other shapes")
    inner = nodes["is_leaf"] == 0
    check_links(nodes["left"].astype(np.int64), nodes["right"].astype(np.int64), ~inner)
    sorts = inner & (nodes["is_categorical"] != 0)
    if (nodes["bitset_idx"][sorts] >= min(map(len, sets))).any():
        raise DamagedStateError.at("", "a node of a tree asks for a set that is not there")
    if (nodes["feature_idx"][inner] < 0).any():
        raise DamagedStateError.at("", "a node of a tree asks for a feature before the first")


def _check_rounds(state: dict[str, Any]) -> None:
    import numpy as np

    categorical = np.asarray(state["_bin_mapper"].is_categorical_).reshape(-1) != 0
    count = min(_number(state["n_features_in_"]), _number(state["_n_features"]), len(categorical))
    for tree in chain.from_iterable(state["_predictors"]):
        nodes = tree.nodes[tree.nodes["is_leaf"] == 0]
        if (nodes["feature_idx"] >= count).any():
            raise _asks_for_more(count)
        if not categorical[nodes["feature_idx"][nodes["is_categorical"] != 0]].all():
            raise DamagedStateError.at("", "a node of a tree asks for categories of a number")


def _check_features(estimators: Any, count: int) -> None:
    for estimator in estimators:
        tree = getattr(estimator, "tree_", None)
        if tree is not None and tree.n_features > count:
            raise _asks_for_more(count)


def _asks_for_more(count: int) -> DamagedStateError:
    return DamagedStateError.at("", f"a tree asks for more than the {count} features there are")


def _each(estimators: Any) -> Iterator[Any]:
    return iter(estimators.reshape(-1).tolist() if is_array(estimators) else estimators)


def _number(held: Any) -> int:
    import numpy as np

    if not isinstance(held, int | np.integer):
        raise DamagedStateError.at("", f"{held!r} features")
    return int(held)
