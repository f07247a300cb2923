"""Steps that were made to crash whoever loads them: refused while they are loaded."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from sklearn import ensemble
from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor

from processes import fresh
from store_runs.stores import frozen, thawed, there_and_back
from tensor_dedup.training.adapters import NumpyAdapter, SklearnAdapter
from tensor_dedup.training.errors import DamagedStateError
from tensor_dedup.training.state import NamedValue

NUMPY, SKLEARN = NumpyAdapter(), SklearnAdapter()
RNG = np.random.default_rng(0)
X = np.column_stack([RNG.integers(0, 5, 200), RNG.normal(size=(200, 2))]).astype(float)
Y = (X[:, 0] % 2 + X[:, 1] > 0.5).astype(int)


def lazily_imported() -> list[str]:
    import sys

    import torch

    with_torch = set(sys.modules)
    held = frozen(NUMPY, [torch.float32])
    for name in (b"_inductor", b"_export", b"onnx"):
        data = bytes([0x91, 0x92, 0, 0x92, 48, 0xA0 + len(name)]) + name
        with pytest.raises(DamagedStateError):
            thawed(NUMPY, {**held, "#values": NamedValue("#values", "U8", (len(data),), data)})
    return sorted(set(sys.modules) - with_torch)


def test_no_package_is_imported_because_a_step_names_it() -> None:
    assert [name for name in fresh.call(lazily_imported) if name.startswith("torch.")] == []


def with_state(source: Any, path: tuple[str, ...], value: object) -> Any:
    """A generator in a state that numpy takes and nobody checks."""
    state = source.state if hasattr(source, "state") else source.get_state(legacy=False)
    held = state
    for key in path[:-1]:
        held = held[key]
    held[path[-1]] = value
    if hasattr(source, "state"):
        source.state = state
    else:
        source.set_state(state)
    return source


@pytest.mark.parametrize("given", [False, True], ids=["new", "original"])
@pytest.mark.parametrize(
    ("make", "path", "values"),
    [
        (np.random.MT19937, ("state", "pos"), (-1, 625, 1 << 30)),
        (np.random.RandomState, ("state", "pos"), (-1, 625, 1 << 30)),
        (np.random.Philox, ("buffer_pos",), (-1, 5, 1 << 30)),
    ],
)
def test_a_generator_does_not_read_beside_its_state(
    make: Any, path: tuple[str, ...], values: tuple[int, ...], given: bool
) -> None:
    for value in values:
        with pytest.raises(DamagedStateError, match="position"):
            there_and_back(NUMPY, with_state(make(1), path, value), make(2) if given else None)
    there_and_back(NUMPY, with_state(make(1), path, 0), make(2) if given else None)


def boosted(**options: Any) -> Any:
    made = ensemble.HistGradientBoostingClassifier(
        max_iter=3, categorical_features=[0], min_samples_leaf=2, random_state=0, **options
    )
    return made.fit(X, Y)


def splits(nodes: np.ndarray[Any, Any], *, categorical: bool) -> np.ndarray[Any, Any]:
    return np.flatnonzero((nodes["is_leaf"] == 0) & (nodes["is_categorical"] == categorical))


DAMAGES: Mapping[str, tuple[str, int, bool]] = {
    "a feature that is not there": ("feature_idx", 3, False),
    "a feature before the first": ("feature_idx", -1, False),
    "a set that is not there": ("bitset_idx", 1000, True),
    "a category of a number": ("feature_idx", 1, True),
    "the last node's child": ("left", 10_000, False),
}


@pytest.mark.parametrize("alone", [False, True], ids=["series", "alone"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_trees_of_histogram_boosting_stay_within_what_they_have(damage: str, alone: bool) -> None:
    field, value, categorical = DAMAGES[damage]
    model = boosted()
    tree = next(
        each[0]
        for each in model._predictors
        if (
            (each[0].nodes["is_leaf"] == 0) & (each[0].nodes["is_categorical"] == categorical)
        ).any()
    )
    tree.nodes[field][splits(tree.nodes, categorical=categorical)[0]] = value
    if alone:  # trees that are not alike are kept one by one
        tree.note = "an attribute more"
    with pytest.raises(DamagedStateError):
        there_and_back(SKLEARN, model)


@pytest.mark.parametrize("alone", [False, True], ids=["series", "alone"])
def test_trees_of_histogram_boosting_are_taken_when_they_are_right(alone: bool) -> None:
    model = boosted()
    if alone:
        model._predictors[0][0].note = "an attribute more"
    back = there_and_back(SKLEARN, model)
    assert np.array_equal(back.predict_proba(X), model.predict_proba(X))
    assert np.array_equal(there_and_back(SKLEARN, model, boosted()).predict(X), model.predict(X))


def test_a_tree_on_its_own_is_looked_at() -> None:
    tree = boosted()._predictors[0][0]
    assert isinstance(there_and_back(SKLEARN, tree), TreePredictor)
    tree.nodes["right"][0] = 0
    with pytest.raises(DamagedStateError):
        there_and_back(SKLEARN, tree)
    tree.nodes = tree.nodes[:0]
    with pytest.raises(DamagedStateError):
        there_and_back(SKLEARN, tree)


@pytest.mark.parametrize("name", ["RandomForestClassifier", "GradientBoostingClassifier"])
def test_trees_ask_for_no_feature_their_ensemble_lacks(name: str) -> None:
    model = getattr(ensemble, name)(n_estimators=2, max_depth=2, random_state=0).fit(X, Y)
    assert np.array_equal(there_and_back(SKLEARN, model).predict(X), model.predict(X))
    model.n_features_in_ = 1
    with pytest.raises(DamagedStateError, match="features"):
        there_and_back(SKLEARN, model)
