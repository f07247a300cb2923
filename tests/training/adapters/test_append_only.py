"""Ensembles declared to grow only: what was read is not read again, and nothing differs."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import lightgbm as lgb
import numpy as np
import pytest
import xgboost as xgb
from sklearn import ensemble

from store_runs.stores import frozen, thawed
from tensor_dedup.training.adapters import (
    LightGBMAdapter,
    ModelAdapter,
    SklearnAdapter,
    XGBoostAdapter,
    sklearn_trees,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 5))
CLASSES = np.digitize(X[:, 0] + X[:, 1] * X[:, 2], [-0.5, 0.5])
Reads = list[int]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """From which round on LightGBM wrote each time; how many rounds XGBoost wrote, and how many
    trees of scikit-learn were read.
    """
    found: Reads = []
    write: Any = lgb.Booster.model_to_string
    save: Any = xgb.Booster.save_raw
    for name in ("_taken", "_predictor_columns"):
        read = getattr(sklearn_trees, name)

        def taken(trees: Sequence[Any], *more: Any, read: Callable[..., Any] = read) -> Any:
            found.append(len(trees))
            return read(trees, *more)

        monkeypatch.setattr(sklearn_trees, name, taken)

    def model_to_string(self: lgb.Booster, **how: Any) -> Any:
        found.append(how["start_iteration"])
        return write(self, **how)

    def save_raw(self: xgb.Booster, raw_format: str) -> Any:
        found.append(self.num_boosted_rounds())
        return save(self, raw_format)

    monkeypatch.setattr(lgb.Booster, "model_to_string", model_to_string)
    monkeypatch.setattr(xgb.Booster, "save_raw", save_raw)
    return found


def booster(**more: Any) -> lgb.Booster:
    parameters = {"num_threads": 1, "verbosity": -1, "num_leaves": 6, "seed": 1, **more}
    data = lgb.Dataset(X, CLASSES, categorical_feature=[], params={"verbosity": -1})
    return lgb.Booster(parameters, data)


def updated(model: lgb.Booster, rounds: int) -> None:
    for _ in range(rounds):
        model.update()


def same(adapter: ModelAdapter, plain: ModelAdapter, model: Any) -> None:
    """What is saved is what is saved of it without the declaration, bit for bit."""
    ours, theirs = frozen(adapter, model), frozen(plain, model)
    assert list(ours) == list(theirs)
    for name, piece in theirs.items():
        assert bytes(ours[name].data) == bytes(piece.data), name


KINDS: dict[str, dict[str, Any]] = {
    "regression": {"objective": "regression"},
    "classes": {"objective": "multiclass", "num_class": 3},
    "forest": {"objective": "regression", "boosting": "rf", "bagging_freq": 1, "subsample": 0.7},
}


@pytest.mark.parametrize("kind", KINDS)
def test_lightgbm_writes_new_rounds_only(kind: str, reads: Reads) -> None:
    adapter, model = LightGBMAdapter(append_only=True), booster(**KINDS[kind])
    for count in (4, 3, 0, 2, 1):
        updated(model, count)
        same(adapter, LightGBMAdapter(), model)
    # Each time the last round that is known is read again, once all to be compared. The other
    # adapter reads from 0 on.
    assert reads == [0, 0, 3, 0, 0, 6, 0, 6, 0, 8, 0]
    found = thawed(adapter, frozen(adapter, model))
    expected: Any = model.predict(X, num_iteration=-1)
    assert np.asarray(found.predict(X, num_iteration=-1)).tobytes() == expected.tobytes()


def test_lightgbm_that_shrank_or_changed_is_read_whole(
    reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    adapter, model = LightGBMAdapter(append_only=True), booster(objective="regression")
    updated(model, 5)
    frozen(adapter, model)
    model.rollback_one_iter()
    model.rollback_one_iter()
    same(adapter, LightGBMAdapter(), model)
    assert caplog.text.count("was declared append-only") == 1
    updated(model, 3)
    same(adapter, LightGBMAdapter(), model)
    assert caplog.text.count("was declared append-only") == 1
    model.set_leaf_output(5, 0, 7.0)
    same(adapter, LightGBMAdapter(), model)
    assert caplog.text.count("was declared append-only") == 2


def test_lightgbm_whose_weights_move_is_always_read_whole(reads: Reads) -> None:
    adapter, model = LightGBMAdapter(append_only=True), booster(boosting="dart", drop_rate=0.9)
    for _ in range(3):
        updated(model, 4)
        same(adapter, LightGBMAdapter(), model)
    assert set(reads) == {0}


def test_another_booster_is_another_one(reads: Reads) -> None:
    adapter = LightGBMAdapter(append_only=True)
    for seed in (1, 2):
        model = booster(seed=seed, subsample=0.5, bagging_freq=1)
        updated(model, 4)
        same(adapter, LightGBMAdapter(), model)
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None
    assert set(reads) == {0}


ENSEMBLES: dict[str, Callable[[], Any]] = {
    "boosting": lambda: ensemble.GradientBoostingClassifier(max_depth=2, random_state=1),
    "forest": lambda: ensemble.RandomForestRegressor(max_depth=3, random_state=1),
    "histograms": lambda: ensemble.HistGradientBoostingClassifier(
        max_depth=2, early_stopping=False, random_state=1
    ),
}


def fitted(model: Any, rounds: int) -> None:
    key = "max_iter" if hasattr(model, "max_iter") else "n_estimators"
    model.set_params(warm_start=True, **{key: rounds})
    model.fit(X, CLASSES)


@pytest.mark.parametrize("kind", ENSEMBLES)
def test_scikit_learn_is_asked_for_new_trees_only(kind: str, reads: Reads) -> None:
    adapter, model = SklearnAdapter(append_only=True), ENSEMBLES[kind]()
    width = 1 if kind == "forest" else 3
    for rounds in (4, 7, 8):
        fitted(model, rounds)
        same(adapter, SklearnAdapter(), model)
    counts = [4, 4, 3, 7, 1, 8]
    more = [0, 0, 1, 0, 1, 0]  # the last one that is known
    assert reads == [width * count + one for count, one in zip(counts, more, strict=True)]
    found = thawed(adapter, frozen(adapter, model))
    assert found.predict(X).tobytes() == model.predict(X).tobytes()


def test_scikit_learn_that_was_fitted_anew_or_changed_is_read_whole(
    reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = SklearnAdapter(append_only=True)
    model = ensemble.GradientBoostingRegressor(max_depth=2, random_state=1)
    fitted(model, 6)
    frozen(adapter, model)
    model.estimators_[5, 0].tree_.value[0, 0, 0] += 1
    same(adapter, SklearnAdapter(), model)
    assert caplog.text.count("was declared append-only") == 1
    model.estimators_ = model.estimators_[:4]
    model.n_estimators_ = 4
    same(adapter, SklearnAdapter(), model)
    assert caplog.text.count("was declared append-only") == 2
    model.set_params(warm_start=False, n_estimators=9)
    model.fit(X, CLASSES)
    same(adapter, SklearnAdapter(), model)
    assert reads == [6, 1, 6, 6, 4, 4, 9, 9]


DATA = xgb.DMatrix(X, CLASSES)
TREES: dict[str, dict[str, Any]] = {
    "regression": {"objective": "reg:squarederror"},
    "classes": {"objective": "multi:softprob", "num_class": 3},
    "forests": {"objective": "reg:squarederror", "num_parallel_tree": 2, "subsample": 0.7},
}


def boosted(model: xgb.Booster, rounds: int) -> None:
    for _ in range(rounds):
        model.update(DATA, model.num_boosted_rounds())


def tree_booster(**more: Any) -> xgb.Booster:
    return xgb.Booster({"nthread": 1, "max_depth": 2, "seed": 1, **more}, [DATA])


@pytest.mark.parametrize("kind", TREES)
def test_xgboost_writes_new_rounds_only(kind: str, reads: Reads) -> None:
    adapter, model = XGBoostAdapter(append_only=True), tree_booster(**TREES[kind])
    for count in (4, 3, 0, 140, 1):
        boosted(model, count)
        model.set_attr(best_iteration=str(count), note="L\u00e4nge")
        same(adapter, XGBoostAdapter(), model)
    # The other adapter reads all, and once so does this one, to compare.
    assert reads == [4, 4, 4, 7, 7, 1, 7, 141, 147, 2, 148]
    found = thawed(adapter, frozen(adapter, model))
    assert found.predict(DATA).tobytes() == model.predict(DATA).tobytes()


def test_xgboost_that_shrank_or_changed_is_read_whole(
    reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    adapter, model = XGBoostAdapter(append_only=True), tree_booster()
    boosted(model, 6)
    frozen(adapter, model)
    shorter = model[:4]
    model.load_model(shorter.save_raw("ubj"))
    same(adapter, XGBoostAdapter(), model)
    assert caplog.text.count("was declared append-only") == 1
    other = tree_booster(max_depth=1)
    boosted(other, 5)
    model.load_model(other.save_raw("ubj"))
    same(adapter, XGBoostAdapter(), model)
    assert caplog.text.count("was declared append-only") == 2
    assert len(reads) == 8


@pytest.mark.parametrize("kind", ["dart", "gblinear"])
def test_xgboost_whose_weights_move_is_always_read_whole(kind: str, reads: Reads) -> None:
    adapter, model = XGBoostAdapter(append_only=True), xgb.Booster({"booster": kind}, [DATA])
    for _ in range(2):
        boosted(model, 3)
        same(adapter, XGBoostAdapter(), model)
    assert len(reads) == 4
    assert len(set(reads)) <= 2
