"""Boosters of LightGBM: trees shared between steps, predictions to the last bit."""

from typing import Any

import lightgbm as lgb
import numpy as np
import pytest

from store_runs.stores import frozen, new_bytes, thawed, there_and_back, unchanged
from tensor_dedup.training.adapters import LightGBMAdapter, adapter_for, by_name
from tensor_dedup.training.adapters.lightgbm import _cut, _joined
from tensor_dedup.training.errors import (
    DamagedStateError,
    MismatchedOriginalError,
    UnsupportedValueError,
)
from tensor_dedup.training.state import NamedValue

ADAPTER = LightGBMAdapter()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 6))
X[::7, 2] = np.nan
X[:, 5] = RNG.integers(0, 5, 300)
GROUPS = np.digitize(np.nan_to_num(X[:, 0] + X[:, 1] * X[:, 2]), [-0.5, 0.5])
KINDS: dict[str, dict[str, Any]] = {
    "binary": {"objective": "binary", "num_leaves": 6},
    "regression": {"objective": "regression", "linear_tree": True},
    "classes": {"objective": "multiclass", "num_class": 3, "num_leaves": 4},
    "dart": {"objective": "regression", "boosting": "dart"},
    "forest": {"objective": "binary", "boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.7},
}


def train(kind: str, rounds: int, start: lgb.Booster | None = None) -> lgb.Booster:
    parameters = {"num_threads": 1, "verbosity": -1, "seed": 3, "deterministic": True}
    target = GROUPS if kind == "classes" else GROUPS > 0
    data = lgb.Dataset(X, target.astype(int), categorical_feature=[5], params={"verbosity": -1})
    return lgb.train({**parameters, **KINDS[kind]}, data, rounds, init_model=start)


def bits(booster: lgb.Booster) -> bytes:
    return np.asarray(booster.predict(X, raw_score=True, num_iteration=-1)).tobytes()


def text(booster: lgb.Booster) -> str:
    return booster.model_to_string(num_iteration=-1)


@pytest.mark.parametrize("kind", ["binary", "classes"])
def test_trees_that_were_there_are_shared(kind: str) -> None:
    data = lgb.Dataset(X, GROUPS if kind == "classes" else (GROUPS > 0).astype(int))
    parameters = {"num_threads": 1, "verbosity": -1, **KINDS[kind]}
    booster = lgb.Booster(parameters, data)
    for _ in range(30):
        booster.update()
    before = frozen(ADAPTER, booster)
    for _ in range(5):
        booster.update()
    after = frozen(ADAPTER, booster)
    trees = {name for name in before if name.startswith("tree_")}
    assert len(trees) == booster.num_trees() * 30 // 35
    assert trees <= unchanged(before, after)
    added = {name for name in after if name.startswith("tree_")} - trees
    assert new_bytes(before, after) < sum(after[name].nbytes for name in added) + 6000


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_the_same_to_the_last_bit(kind: str) -> None:
    booster = train(kind, 12)
    held = frozen(ADAPTER, booster)
    back = thawed(ADAPTER, held)
    assert bits(back) == bits(booster)
    assert text(back) == text(booster)
    assert frozen(ADAPTER, back) == held
    other = train("binary", 2)
    assert thawed(ADAPTER, held, other) is other
    assert bits(other) == bits(booster)


@pytest.mark.parametrize("kind", ["binary", "classes", "regression"])
def test_training_goes_on_as_if_nothing_had_been(kind: str) -> None:
    booster = train(kind, 8)
    back = there_and_back(ADAPTER, booster)
    assert text(train(kind, 4, back)) == text(train(kind, 4, booster))


def test_the_best_round_is_kept_beside_all_of_them() -> None:
    data = lgb.Dataset(X, GROUPS, params={"verbosity": -1})
    booster = lgb.train(
        {"num_threads": 1, "verbosity": -1, "metric": "l2"},
        data,
        30,
        valid_sets=[lgb.Dataset(X[:40], RNG.normal(size=40), reference=data)],
        callbacks=[lgb.early_stopping(3, verbose=False)],
        keep_training_booster=True,
    )
    back = there_and_back(ADAPTER, {"model": booster, "round": 30})["model"]
    assert back.best_iteration == booster.best_iteration < booster.num_trees() == back.num_trees()
    assert back.best_score == booster.best_score
    assert back.predict(X).tobytes() == booster.predict(X).tobytes()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["LGBMClassifier", "LGBMRegressor", "LGBMRanker"])
def test_estimators_come_back_whole(kind: str) -> None:
    estimator = getattr(lgb, kind)(n_estimators=6, num_leaves=5, n_jobs=1, verbosity=-1)
    estimator.fit(X, GROUPS, **({"group": [10] * 30} if kind == "LGBMRanker" else {}))
    assert adapter_for(estimator).name == "lightgbm"
    back = there_and_back(ADAPTER, estimator)
    assert type(back) is type(estimator)
    assert back.predict(X).tobytes() == estimator.predict(X).tobytes()
    assert back.get_params() == estimator.get_params()
    assert there_and_back(ADAPTER, estimator, back) is back


class Mine(lgb.LGBMRegressor):
    """Somebody's own estimator."""


def test_what_cannot_be_made_again_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="Mine, made from LightGBM's"):
        ADAPTER.extract(Mine(n_estimators=1))
    with pytest.raises(MismatchedOriginalError, match=r"not a lightgbm\.Booster"):
        there_and_back(ADAPTER, train("binary", 1), {"a": 1})
    with pytest.raises(MismatchedOriginalError, match=r"not a lightgbm\.LGBMRegressor"):
        there_and_back(ADAPTER, lgb.LGBMRegressor(), lgb.LGBMClassifier())


def test_a_model_without_trees_is_all_head() -> None:
    booster = lgb.Booster({"verbosity": -1}, lgb.Dataset(X, GROUPS, params={"verbosity": -1}))
    back = there_and_back(ADAPTER, booster)
    # LightGBM itself drops the parameters of a model without trees when it reads one.
    assert back.num_trees() == 0
    assert text(booster).startswith(text(back).partition("end of trees")[0])


@pytest.mark.parametrize("sizes", ["", "x", "5 x", "5", "99999999999", "-3 7"])
def test_a_layout_nobody_knows_is_kept_whole(sizes: str) -> None:
    text = f"tree\ntree_sizes={sizes}\n\nTree=0\nend\n\nparameters:\n".encode()
    for each in (text, text.replace(b"\n\n", b"\n"), b"", b"\ntree_sizes="):
        assert _joined(_cut(each)) == each


def test_a_tree_that_is_gone_or_broken_is_damage() -> None:
    held = frozen(ADAPTER, train("binary", 3))
    broken = dict(held)
    broken["tree_000001"] = NamedValue("tree_000001", "U8", (3,), b"\xff\xfe\x00")
    del held["tree_000002"]
    for pieces in (held, broken):
        with pytest.raises(DamagedStateError):
            thawed(ADAPTER, pieces)


def test_the_adapter_is_found() -> None:
    assert adapter_for({"model": train("binary", 1), "epoch": 1}).name == "lightgbm"
    assert by_name("lightgbm").name == "lightgbm"
