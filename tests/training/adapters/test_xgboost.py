"""Boosters of XGBoost: trees shared between steps, predictions and training to the last bit."""

import random
import struct
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xgboost as xgb

from store_runs.stores import frozen, new_bytes, thawed, there_and_back, unchanged
from tensor_dedup.training.adapters import XGBoostAdapter, adapter_for, by_name, ubjson
from tensor_dedup.training.errors import (
    DamagedStateError,
    MismatchedOriginalError,
    UnsupportedValueError,
)
from tensor_dedup.training.state import NamedValue

ADAPTER = XGBoostAdapter()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 6)).astype(np.float32)
X[::7, 2] = np.nan
GROUPS = np.digitize(np.nan_to_num(X[:, 0] + X[:, 1] * X[:, 2]), [-0.5, 0.5])
KINDS: dict[str, dict[str, Any]] = {
    "binary": {"objective": "binary:logistic", "max_depth": 3},
    "regression": {"objective": "reg:squarederror", "subsample": 1.0, "max_leaves": 5},
    "classes": {"objective": "multi:softprob", "num_class": 3, "max_depth": 2},
    "parallel": {"objective": "reg:squarederror", "num_parallel_tree": 3, "max_depth": 2},
    "dart": {"booster": "dart", "objective": "reg:squarederror", "max_depth": 2},
    "drawn": {
        "max_depth": 3,
        "subsample": 0.5,
        "colsample_bytree": 0.5,
        "seed_per_iteration": True,
    },
    "dropped": {"booster": "dart", "max_depth": 3, "rate_drop": 0.3, "seed_per_iteration": True},
    "linear": {"booster": "gblinear", "objective": "reg:squarederror", "updater": "coord_descent"},
}


def data(objective: str = "") -> xgb.DMatrix:
    return xgb.DMatrix(X, GROUPS if objective == "multi:softprob" else GROUPS > 0)


def train(kind: str, rounds: int, start: Any = None, matrix: Any = None) -> xgb.Booster:
    parameters = {"nthread": 1, "seed": 3, **KINDS[kind]}
    matrix = matrix or data(KINDS[kind].get("objective", ""))
    return xgb.train(parameters, matrix, rounds, xgb_model=start)


def bits(booster: xgb.Booster) -> bytes:
    return bytes(booster.predict(data(), output_margin=True).tobytes())


@pytest.mark.parametrize("kind", ["binary", "regression", "classes", "parallel"])
def test_trees_that_were_there_are_shared(kind: str) -> None:
    booster = train(kind, 60)
    before = frozen(ADAPTER, booster)
    longer = train(kind, 10, booster)
    after = frozen(ADAPTER, longer)
    trees = {name for name in before if name.startswith("tree_")}
    assert len(trees) == len(booster.get_dump())
    assert trees <= unchanged(before, after)
    assert len([name for name in after if name.startswith("tree_")]) == len(longer.get_dump())
    added = sum(after[name].nbytes for name in set(after) - set(before))
    assert new_bytes(before, after) < added + 8000


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_the_same_to_the_last_bit(kind: str) -> None:
    booster = train(kind, 40)
    back = there_and_back(ADAPTER, booster)
    assert bits(back) == bits(booster)
    assert back.save_raw() == booster.save_raw()
    assert back.save_config() == booster.save_config()
    other = train("binary", 3)
    assert there_and_back(ADAPTER, booster, other) is other
    assert bits(other) == bits(booster)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dart"])
def test_training_goes_on_as_if_nothing_had_been(kind: str) -> None:
    matrix = data(KINDS[kind].get("objective", ""))
    booster = train(kind, 20, None, matrix)
    held = frozen(ADAPTER, booster)
    for step in range(20, 30):
        booster.update(matrix, step)
    back = thawed(ADAPTER, held)
    for step in range(20, 30):
        back.update(matrix, step)
    assert bits(back) == bits(booster)
    if kind not in ("drawn", "dropped"):  # `train` counts rounds anew, and draws by their number
        assert bits(train(kind, 10, thawed(ADAPTER, held))) == bits(booster)


def test_what_changes_every_round_does_not_grow_with_the_rounds() -> None:
    def changed(rounds: int) -> int:
        booster = train("classes", rounds)
        longer = train("classes", 1, booster)
        return new_bytes(frozen(ADAPTER, booster), frozen(ADAPTER, longer))

    # A list of a thousand rounds takes 9 KB; pieces of 1 KiB are what may be new.
    assert changed(400) < changed(20) + 3 * 1024


def test_names_attributes_and_the_best_round_come_back() -> None:
    matrix = data()
    matrix.feature_names = list("abcdef")
    booster = xgb.train(
        {"objective": "binary:logistic", "nthread": 1},
        matrix,
        20,
        evals=[(matrix, "train")],
        early_stopping_rounds=2,
        verbose_eval=False,
    )
    booster.set_attr(note="[#L{L")
    back = there_and_back(ADAPTER, {"model": booster, "round": 20})
    assert back["round"] == 20
    assert back["model"].feature_names == list("abcdef")
    assert back["model"].best_iteration == booster.best_iteration
    assert back["model"].attributes() == booster.attributes()


def test_categories_are_part_of_their_tree() -> None:
    column = (np.arange(300) % 9).astype(np.float32)[:, None]
    matrix = xgb.DMatrix(
        np.hstack([column, X]), GROUPS > 0, feature_types=["c", *"qqqqqq"], enable_categorical=True
    )
    booster = xgb.train({"max_depth": 4, "nthread": 1, "max_cat_to_onehot": 1}, matrix, 20)
    held = frozen(ADAPTER, booster)
    assert len([name for name in held if name.startswith("tree_")]) == 20
    assert thawed(ADAPTER, held).predict(matrix).tobytes() == booster.predict(matrix).tobytes()


@pytest.mark.parametrize("kind", ["XGBClassifier", "XGBRegressor", "XGBRanker", "XGBRFClassifier"])
def test_estimators_come_back_whole(kind: str) -> None:
    estimator = getattr(xgb, kind)(n_estimators=12, max_depth=2, n_jobs=1)
    ranks = {"qid": np.arange(300) // 10} if kind == "XGBRanker" else {}
    estimator.fit(X, GROUPS, **ranks)
    assert adapter_for(estimator).name == "xgboost"
    back = there_and_back(ADAPTER, estimator)
    assert type(back) is type(estimator)
    assert back.predict(X).tobytes() == estimator.predict(X).tobytes()
    assert repr(back.get_params()) == repr(estimator.get_params())  # nan is not nan
    assert there_and_back(ADAPTER, estimator, back) is back


class Mine(xgb.XGBRegressor):
    """Somebody's own estimator."""


def test_what_cannot_be_made_again_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="Mine, made from XGBoost's"):
        ADAPTER.extract(Mine(n_estimators=2, n_jobs=1).fit(X, GROUPS))
    with pytest.raises(MismatchedOriginalError, match=r"not an xgboost\.Booster"):
        there_and_back(ADAPTER, train("binary", 1), {"a": 1})
    with pytest.raises(MismatchedOriginalError, match=r"not an xgboost\.XGBRegressor"):
        there_and_back(ADAPTER, xgb.XGBRegressor(), xgb.XGBClassifier())


def test_a_layout_nobody_knows_is_saved_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> int:
        raise UnsupportedValueError.at("", "no UBJSON as XGBoost writes it")

    booster = train("binary", 150)
    monkeypatch.setattr(ubjson, "find", unknown)
    held = frozen(ADAPTER, booster)
    assert {name[:6] for name in held if "#" not in name} == {"model_"}
    assert bits(thawed(ADAPTER, held)) == bits(booster)


def test_a_tree_that_is_gone_or_broken_is_damage() -> None:
    held = frozen(ADAPTER, train("binary", 3))
    broken = dict(held)
    data = bytes(held["tree_000001"].data)
    broken["tree_000001"] = NamedValue("tree_000001", "U8", (len(data) - 9,), data[9:])
    del held["tree_000002"]
    for pieces in (held, broken):
        with pytest.raises(DamagedStateError):
            thawed(ADAPTER, pieces)


def test_the_adapter_is_found() -> None:
    booster = train("binary", 1)
    assert adapter_for(booster).name == "xgboost"
    assert adapter_for({"model": booster, "epoch": 1}).name == "xgboost"
    assert by_name("xgboost").name == "xgboost"


def written(value: Any) -> bytes:
    """UBJSON of our own: every way to write an array, and numbers of every size."""
    if isinstance(value, dict):
        items = (key_of(key) + written(held) for key, held in value.items())
        return b"{" + b"".join(items) + b"}"
    if isinstance(value, list):
        return b"[#" + count(len(value)) + b"".join(map(written, value))
    if isinstance(value, str):
        return b"S" + key_of(value)
    if isinstance(value, bytes):
        return b"[$U#" + count(len(value)) + value
    if isinstance(value, tuple):
        return b"[" + b"".join(map(written, value)) + b"]"
    if isinstance(value, float):
        return b"D" + struct.pack(">d", value)
    return {None: b"Z", True: b"T", False: b"F"}.get(value, b"L" + struct.pack(">q", value or 0))


def key_of(text: str) -> bytes:
    return count(len(text.encode())) + text.encode()


def count(number: int) -> bytes:
    return b"U" + bytes([number]) if number < 256 else b"I" + struct.pack(">h", number)


def test_every_kind_of_value_is_skipped() -> None:
    value = {"a": [1, "x", None, True, {"b": 2.5}], "c": b"bytes", "d": (1, (2,), "]"), "e": {}}
    data = written(value)
    assert ubjson.skip(data + b"rest", 0) == len(data)
    starts = dict(ubjson.members(data, 0))
    assert list(starts) == list(value)
    assert ubjson.find(data, 0, "a") == starts["a"]
    assert ubjson.find(data, 0, "a", "b") is None
    assert ubjson.find(data, 0, "no") is None


@pytest.mark.parametrize("runs", [1, 2, 700, 3000])
def test_numbers_of_every_width_are_skipped(runs: int) -> None:
    # Numbers whose bytes look like markers, in runs that are longer and shorter than a look ahead.
    dice = random.Random(runs)
    sizes = {b"i": 1, b"U": 1, b"I": 2, b"l": 4, b"L": 8, b"d": 4}
    items: list[bytes] = []
    while len(items) < 3000:
        marker = dice.choice([*sizes])
        items += [marker + marker * sizes[marker]] * dice.randint(1, runs)
    data = b"[#" + count(len(items)) + b"".join(items)
    assert ubjson.skip(data + b"llll", 0) == len(data)
    at = data.rindex(items[-1])
    with pytest.raises(UnsupportedValueError, match="no UBJSON"):
        ubjson.skip(data[:at], 0)


@pytest.mark.parametrize("alike", [True, False])
def test_objects_are_cut_where_they_begin(alike: bool) -> None:
    # An object whose text looks like the beginning of another one must not be cut in two.
    values: list[Any] = [{"a": b"x" * n, "b": n} for n in range(40)]
    data = written(values)
    if not alike:
        values[3] = {"a": b"\x00", "b": written(values[0])[:5].decode("latin-1")}
        values[9] = {"other": 1}
        data = written(values)
    start = len(b"[#") + len(count(40))
    ends = ubjson.objects(data, start, 40)
    assert [data[a:b] for a, b in pairwise(ends)] == list(map(written, values))
    assert ubjson.skip(data, 0) == len(data)


@pytest.mark.parametrize(
    "bad", [b"", b"x", b"{U\xff", b"[#Z", b"S", b"[$S#U\x01", b"[" * 80, b"{L"]
)
def test_what_is_no_ubjson_is_refused(bad: bytes) -> None:
    with pytest.raises(UnsupportedValueError, match="no UBJSON"):
        ubjson.skip(bad, 0)
