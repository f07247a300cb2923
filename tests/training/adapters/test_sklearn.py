"""Estimators of scikit-learn: what grows is shared, predictions are the same to the last bit."""

import re
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import (
    cluster,
    compose,
    decomposition,
    discriminant_analysis,
    ensemble,
    feature_extraction,
    feature_selection,
    gaussian_process,
    impute,
    isotonic,
    kernel_ridge,
    linear_model,
    mixture,
    model_selection,
    multioutput,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.exceptions import ConvergenceWarning, InconsistentVersionWarning

from store_runs.stores import Frozen, frozen, new_bytes, thawed, there_and_back, unchanged
from tensor_dedup.store.gathered import flat_bytes
from tensor_dedup.training.adapters import SklearnAdapter, adapter_for, by_name, sklearn_trees
from tensor_dedup.training.adapters.sklearn import _class, _restore_function
from tensor_dedup.training.errors import (
    DamagedStateError,
    ForbiddenClassError,
    MismatchedOriginalError,
    StateError,
    UnsupportedValueError,
)
from tensor_dedup.training.state import NamedValue

ADAPTER = SklearnAdapter()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(160, 5))
# Other memory than what it was fitted to: kernels take another way where they are one.
SEEN = X.copy()
Y = np.digitize(X[:, 0] + X[:, 1] * X[:, 2], [-0.5, 0.5])
TEXT = np.array(["low", "mid", "high"], object)[Y]


def trees(held: Frozen) -> set[str]:
    return {name for name in held if re.search(r"\.tree_\d{6}$", name)}


def warm(estimator: Any, more: int, target: Any = Y) -> Any:
    return estimator.set_params(n_estimators=estimator.n_estimators + more).fit(X, target)


def outputs(estimator: Any, data: Any = SEEN) -> bytes:
    """All that it says about some rows."""
    methods = ("predict", "predict_proba", "decision_function", "transform")
    results = [getattr(estimator, name)(data) for name in methods if hasattr(estimator, name)]
    assert results
    return b"".join(said(result) for result in results)


def said(result: Any) -> bytes:
    if isinstance(result, list):
        return b"".join(map(said, result))
    held = result.toarray() if hasattr(result, "toarray") else np.asarray(result)
    return repr(held.tolist()).encode() if held.dtype == object else held.tobytes()


GROWING: dict[str, Any] = {
    "boosting": ensemble.GradientBoostingClassifier(
        n_estimators=20, max_depth=3, warm_start=True, random_state=0, subsample=0.8
    ),
    "regression": ensemble.GradientBoostingRegressor(
        n_estimators=20, max_depth=2, warm_start=True, random_state=0
    ),
    "forest": ensemble.RandomForestClassifier(20, warm_start=True, random_state=0),
    "extra": ensemble.ExtraTreesRegressor(20, warm_start=True, random_state=0),
    "bagging": ensemble.BaggingClassifier(
        tree.DecisionTreeClassifier(), 20, warm_start=True, random_state=0
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_trees_that_were_there_are_shared(name: str) -> None:
    estimator = clone(GROWING[name]).fit(X, Y)
    before = frozen(ADAPTER, estimator)
    warm(estimator, 10)
    after = frozen(ADAPTER, estimator)
    count = 3 * 20 if name == "boosting" else 20
    assert len(trees(before)) == count
    assert trees(before) <= unchanged(before, after)
    assert len(trees(after)) == count * 3 // 2
    added = sum(after[name].nbytes for name in trees(after) - trees(before))
    # The rest: numbers of trees, scores, a generator of random numbers.
    assert new_bytes(before, after) < added + 9000


@pytest.mark.parametrize("name", GROWING)
def test_ensembles_come_back_and_grow_as_they_would_have(name: str) -> None:
    target = TEXT if name == "forest" else Y
    estimator = clone(GROWING[name]).fit(X, target)
    held = frozen(ADAPTER, estimator)
    back = thawed(ADAPTER, held)
    assert type(back) is type(estimator)
    assert outputs(back) == outputs(estimator)
    assert frozen(ADAPTER, back) == held
    assert outputs(warm(back, 5, target)) == outputs(warm(estimator, 5, target))


def test_the_rest_does_not_grow_with_the_trees() -> None:
    def rest(count: int) -> int:
        estimator = ensemble.GradientBoostingRegressor(
            n_estimators=count, max_depth=1, warm_start=True, random_state=0
        ).fit(X[:20], Y[:20])
        before = frozen(ADAPTER, estimator)
        estimator.set_params(n_estimators=count + 1).fit(X[:20], Y[:20])
        after = frozen(ADAPTER, estimator)
        return new_bytes(before, after) - sum(
            after[name].nbytes for name in trees(after) - trees(before)
        )

    # 2,500 scores are 20 KB; the part that changes is 8 KiB at most, and 256 differences.
    assert rest(2500) < rest(20) + 8192 + 1024


def test_many_coefficients_are_one_array() -> None:
    wide = np.hstack([X] * 300)
    held = frozen(ADAPTER, linear_model.Ridge().fit(wide, Y))
    assert (held["coef_"].dtype, held["coef_"].shape) == ("F64", (1500,))


def test_histogram_boosting_is_one_piece_a_tree() -> None:
    data = X.copy()
    data[:, 4] = RNG.integers(0, 6, len(X))
    data[::9, 1] = np.nan
    estimator = ensemble.HistGradientBoostingClassifier(
        max_iter=12, warm_start=True, categorical_features=[4], random_state=0, early_stopping=False
    ).fit(data, Y)
    before = frozen(ADAPTER, estimator)
    estimator.set_params(max_iter=15).fit(data, Y)
    after = frozen(ADAPTER, estimator)
    assert len(trees(before)) == 3 * 12
    assert trees(before) <= unchanged(before, after)
    back = thawed(ADAPTER, after)
    assert outputs(back, data) == outputs(estimator, data)
    again = [each.set_params(max_iter=17).fit(data, Y) for each in (back, estimator)]
    assert outputs(again[0], data) == outputs(again[1], data)


ONE_BY_ONE = ensemble.RandomForestRegressor(5, random_state=0).fit(X, np.stack([Y, X[:, 0]], 1))
ESTIMATORS: dict[str, Any] = {
    "linear": linear_model.LinearRegression(),
    "logistic": linear_model.LogisticRegression(),
    "ridge": linear_model.Ridge(),
    "lasso": linear_model.LassoCV(cv=3),
    "sgd": linear_model.SGDClassifier(random_state=0),
    "perceptron": linear_model.Perceptron(),
    "huber": linear_model.HuberRegressor(max_iter=500),
    "bayes": linear_model.BayesianRidge(),
    "poisson": linear_model.PoissonRegressor(),
    "tree": tree.DecisionTreeClassifier(random_state=0),
    "ada": ensemble.AdaBoostClassifier(n_estimators=5, random_state=0),
    "isolation": ensemble.IsolationForest(n_estimators=10, random_state=0),
    "voting": ensemble.VotingClassifier(
        [("a", linear_model.LogisticRegression()), ("b", naive_bayes.GaussianNB())], voting="soft"
    ),
    "stacking": ensemble.StackingRegressor(
        [("a", linear_model.Ridge()), ("b", tree.DecisionTreeRegressor(max_depth=2))], cv=2
    ),
    "svc": svm.SVC(),
    "svr": svm.SVR(),
    "linear svc": svm.LinearSVC(),
    "neighbours": neighbors.KNeighborsClassifier(algorithm="kd_tree"),
    "ball tree": neighbors.KNeighborsRegressor(algorithm="ball_tree"),
    "brute": neighbors.KNeighborsRegressor(algorithm="brute"),
    "mlp": neural_network.MLPClassifier((8,), max_iter=20, random_state=0),
    "kmeans": cluster.KMeans(3, random_state=0, n_init=2),
    "minibatch": cluster.MiniBatchKMeans(3, random_state=0, n_init=2),
    "mixture": mixture.GaussianMixture(2, random_state=0),
    "pca": decomposition.PCA(3, random_state=0),
    "nmf": decomposition.TruncatedSVD(2, random_state=0),
    "lda": discriminant_analysis.LinearDiscriminantAnalysis(),
    "nb": naive_bayes.BernoulliNB(),
    "scaler": preprocessing.StandardScaler(),
    "one hot": preprocessing.OneHotEncoder(handle_unknown="ignore"),
    "quantile": preprocessing.QuantileTransformer(n_quantiles=20, random_state=0),
    "power": preprocessing.PowerTransformer(),
    "splines": preprocessing.SplineTransformer(),
    "polynomial": preprocessing.PolynomialFeatures(),
    "imputer": impute.SimpleImputer(),
    "gp": gaussian_process.GaussianProcessRegressor(
        gaussian_process.kernels.RBF() + gaussian_process.kernels.WhiteKernel(), random_state=0
    ),
    "kernel ridge": kernel_ridge.KernelRidge(kernel="rbf"),
    "several": multioutput.MultiOutputClassifier(linear_model.LogisticRegression()),
    "pipeline": pipeline.make_pipeline(
        compose.ColumnTransformer(
            [("a", preprocessing.MinMaxScaler(), [0, 1]), ("b", "passthrough", slice(2, 5))]
        ),
        preprocessing.PolynomialFeatures(2),
        ensemble.GradientBoostingClassifier(n_estimators=3, random_state=0),
    ),
}


def fitted(name: str) -> Any:
    estimator = ESTIMATORS[name]
    target = np.stack([Y, Y > 1], 1) if name == "several" else Y
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(X, target)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_come_back_to_the_last_bit(name: str) -> None:
    estimator = fitted(name)
    held = frozen(ADAPTER, estimator)
    back = thawed(ADAPTER, held)
    assert type(back) is type(estimator)
    if name not in ("voting", "stacking"):  # a Bunch leaves something behind, with pickle too
        assert frozen(ADAPTER, back) == held
    assert outputs(back) == outputs(estimator)
    assert repr(back) == repr(estimator)


def test_searches_and_selections_name_the_functions_they_use() -> None:
    search = model_selection.GridSearchCV(
        pipeline.make_pipeline(
            feature_selection.SelectKBest(feature_selection.f_classif, k=2),
            linear_model.LogisticRegression(),
        ),
        {"logisticregression__C": [0.1, 1.0], "selectkbest__k": [2, 3]},
        scoring="f1_macro",
        cv=2,
    ).fit(X, Y)
    back = there_and_back(ADAPTER, search)
    assert outputs(back) == outputs(search)
    assert back.score(SEEN, Y) == search.score(SEEN, Y)
    assert back.cv_results_["params"] == search.cv_results_["params"]
    scores = "mean_test_score"
    assert back.cv_results_[scores].tobytes() == search.cv_results_[scores].tobytes()


@pytest.mark.parametrize("name", ["os.system", "sklearn.metrics.os", "sklearn.metrics._no.f", 3])
def test_no_other_function_is_looked_up(name: Any) -> None:
    with pytest.raises(ForbiddenClassError):
        _restore_function(name, None)


def test_text_and_sparse_features() -> None:
    texts = ["a rose is a rose", "a cat", "the cat is a rose"]
    counting = feature_extraction.text.TfidfVectorizer().fit(texts)
    back = there_and_back(ADAPTER, counting)
    assert (back.transform(texts) != counting.transform(texts)).nnz == 0
    matrix = counting.transform(texts)
    for form in ("csr", "csc", "bsr"):
        again = there_and_back(ADAPTER, {"m": matrix.asformat(form)})["m"]
        assert type(again) is type(matrix.asformat(form))
        assert again.toarray().tobytes() == matrix.toarray().tobytes()


def test_functions_of_numpy_are_names() -> None:
    estimator = preprocessing.FunctionTransformer(np.abs, np.sqrt, check_inverse=False).fit(X)
    back = there_and_back(ADAPTER, estimator)
    assert (back.func, back.inverse_func) == (np.abs, np.sqrt)


def test_one_dimension() -> None:
    estimator = isotonic.IsotonicRegression(out_of_bounds="clip").fit(X[:, 0], Y)
    assert outputs(there_and_back(ADAPTER, estimator), X[:, 0]) == outputs(estimator, X[:, 0])


def test_large_trees_are_put_together_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = clone(GROWING["forest"]).fit(X, Y)
    held = frozen(ADAPTER, estimator)
    for room in (0, 4000):
        monkeypatch.setattr(sklearn_trees, "_ROOM", room)
        assert frozen(ADAPTER, estimator) == held


def test_trees_with_several_outputs() -> None:
    back = there_and_back(ADAPTER, ONE_BY_ONE)
    assert outputs(back) == outputs(ONE_BY_ONE)
    assert len(trees(frozen(ADAPTER, ONE_BY_ONE))) == 5


def test_trees_that_differ_more_than_by_numbers_are_taken_one_by_one() -> None:
    estimator = ensemble.RandomForestClassifier(4, random_state=0).fit(X, Y)
    estimator.estimators_[2].random_state = np.random.RandomState(3)
    held = frozen(ADAPTER, estimator)
    assert not trees(held)
    assert outputs(thawed(ADAPTER, held)) == outputs(estimator)


def test_partial_training_goes_on_as_if_nothing_had_been() -> None:
    estimator = neural_network.MLPClassifier((6,), random_state=0)
    for start in (0, 40):
        estimator.partial_fit(X[start : start + 40], Y[start : start + 40], classes=[0, 1, 2])
    back = there_and_back(ADAPTER, estimator)
    for each in (estimator, back):
        each.partial_fit(X[80:], Y[80:])
    assert outputs(back) == outputs(estimator)


class Doubler(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Somebody's own estimator."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def fit(self, X: Any, y: Any = None) -> "Doubler":
        self.mean_ = X.mean(0)
        return self

    def transform(self, X: Any) -> Any:
        return X * self.factor + self.mean_


def test_an_estimator_of_ones_own_needs_an_original() -> None:
    def chain(factor: float) -> Any:
        return pipeline.make_pipeline(Doubler(factor), linear_model.Ridge())

    estimator = chain(3.0).fit(X, Y)
    held = frozen(ADAPTER, {"model": estimator})
    with pytest.raises(ForbiddenClassError, match=r"Doubler is no class of scikit-learn.*original"):
        thawed(ADAPTER, held)
    original = {"model": chain(1.0)}
    mine = original["model"].steps[0][1]
    back = thawed(ADAPTER, held, original)["model"]
    assert (back is original["model"], back.steps[0][1] is mine) == (False, False) or back
    assert outputs(back) == outputs(estimator)


def test_an_original_stays_the_same_object() -> None:
    estimator = linear_model.Ridge().fit(X, Y)
    original = linear_model.Ridge(5.0)
    assert there_and_back(ADAPTER, estimator, original) is original
    assert outputs(original) == outputs(estimator)
    with pytest.raises(MismatchedOriginalError, match=r"not a sklearn\.linear_model"):
        there_and_back(ADAPTER, estimator, linear_model.Lasso())


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "sklearn.datasets._base.Bunch",
        "sklearn.linear_model.LinearRegression.fit",
        "sklearn.linear_model._base.np",
        "sklearn.linear_model.LinearRegression",
        "sklearn.externals._x.Y",
        "sklearn.no_such_module.X",
        "sklearn.utils.os.system",
        "sklearn",
        "sklearn..X",
    ],
)
def test_no_other_class_is_looked_up(name: str) -> None:
    with pytest.raises(ForbiddenClassError, match="original"):
        _class(name)


@pytest.mark.parametrize(
    ("estimator", "place"),
    [
        (preprocessing.FunctionTransformer(lambda x: x), "func: a function, .*lambda"),
        (preprocessing.FunctionTransformer(np.frompyfunc(abs, 1, 1)), "func: a numpy.ufunc"),
        ({"a": [neighbors.KNeighborsClassifier(metric=max)]}, r"a\[0\].metric: a builtins."),
    ],
)
def test_functions_are_refused_by_their_place(estimator: Any, place: str) -> None:
    with pytest.raises(UnsupportedValueError, match=f"^{place}"):
        ADAPTER.extract(estimator)


@pytest.mark.parametrize("damage", ["child", "feature", "short", "gone"])
def test_a_tree_that_leads_nowhere_is_damage(damage: str) -> None:
    estimator = ensemble.RandomForestClassifier(3, random_state=0, max_depth=2).fit(X, Y)
    held = frozen(ADAPTER, estimator)
    name = sorted(trees(held))[1]
    data = bytearray(flat_bytes(held[name].data)[:])
    if damage == "child":
        data[0:8] = (1 << 40).to_bytes(8, "little")
    if damage == "feature":
        data[16:24] = (77).to_bytes(8, "little")
    if damage == "short":
        del data[-3:]
    held[name] = NamedValue(name, "U8", (len(data),), bytes(data))
    if damage == "gone":
        del held[name]
    with pytest.raises(DamagedStateError):
        thawed(ADAPTER, held)


DAMAGED = frozen(
    ADAPTER,
    pipeline.make_pipeline(
        preprocessing.StandardScaler(), ensemble.GradientBoostingClassifier(n_estimators=2)
    ).fit(X, Y),
)


@given(st.sampled_from(["#structure", "#values"]), st.integers(0, 2000), st.binary(max_size=3))
@settings(max_examples=200)
def test_damage_is_an_error_of_ours(name: str, at: int, noise: bytes) -> None:
    data = bytes(DAMAGED[name].data)
    at %= len(data)
    data = data[:at] + noise + data[at + max(1, len(noise)) :]
    # A version that differs is a warning of scikit-learn's.
    with suppress(StateError, InconsistentVersionWarning):
        thawed(ADAPTER, {**DAMAGED, name: NamedValue(name, "U8", (len(data),), data)})


def test_the_adapter_is_found() -> None:
    assert adapter_for(linear_model.Ridge()).name == "sklearn"
    assert adapter_for([1, {"m": Doubler()}]).name == "sklearn"
    assert by_name("sklearn").name == "sklearn"
