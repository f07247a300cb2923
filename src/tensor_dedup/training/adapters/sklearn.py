"""The adapter for scikit-learn's estimators.

The state of an estimator may consist of arrays, plain values and further estimators. Objects are
taken apart by the methods that pickle uses, but nothing is pickled. The class of an object is
stored as a name. A load looks up the name only in scikit-learn's modules of estimators and their
parts. Objects of any other class can only be restored into an `original`.
"""

import importlib
import re
from functools import partial
from types import FunctionType
from typing import Any, Final

from tensor_dedup.training.adapters import sklearn_trees as trees
from tensor_dedup.training.adapters.base import (
    StateProvider,
    full_name,
    register_package,
    register_provider,
)
from tensor_dedup.training.adapters.ensembles import GrowingAdapter
from tensor_dedup.training.adapters.rebuild import mismatched
from tensor_dedup.training.adapters.sklearn_trees import PREDICTOR, check_object
from tensor_dedup.training.errors import (
    DamagedStateError,
    ForbiddenClassError,
    UnsupportedValueError,
)
from tensor_dedup.training.state import is_array

_MODULE: Final = re.compile(r"sklearn(\.[a-z_][a-z0-9_]*)+", re.ASCII)
# Nothing of an estimator is made of these.
_FORBIDDEN: Final = frozenset(
    {"conftest", "datasets", "experimental", "externals", "tests", "_build_utils", "_testing"}
)
# Compiled classes that are made with arguments; others are made empty, and their state is set.
_CALLED: Final = ("sklearn._loss.", "sklearn.linear_model._sgd_fast.")
# Functions that fitted estimators hold, and that do nothing but compute.
_FUNCTIONS: Final = re.compile(
    r"""sklearn\.(
        utils\.validation\.check_array
        | metrics(\._[a-z_]+)*\.[a-z_0-9]+
        | feature_selection\._(univariate_selection|mutual_info)\.[a-z_0-9]+
    )""",
    re.ASCII | re.VERBOSE,
)
_NEW: Final = "new"
_CALL: Final = "call"
_SPARSE: Final = {
    "csr": ("data", "indices", "indptr"),
    "csc": ("data", "indices", "indptr"),
    "bsr": ("data", "indices", "indptr"),
    "dia": ("data", "offsets"),
}


class SklearnAdapter(GrowingAdapter):
    """The adapter for scikit-learn's estimators, pipelines, and structures of them.

    Each tree of an ensemble is a piece, named `estimators_.tree_000000` and so on. The pieces stay
    unchanged when `warm_start` adds more trees. With `append_only`, saved trees of forests and of
    boosting are not read again. Predictions of a restored model are bit-identical.

    Without `original`, the class of an estimator is looked up in the installed scikit-learn. An
    estimator of a class of your own can only be restored into an `original`.

    Raises:
        ForbiddenClassError: The class of an object is not in scikit-learn, and there is no
            `original`.
        UnsupportedValueError: A function or another object cannot be stored. The error has its
            path.
    """

    name = "sklearn"


def _state(held: Any) -> dict[str, object]:
    kind: Any = type(held)
    if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        return _plain_state(held)
    function, arguments, *rest = held.__reduce_ex__(2)
    state = rest[0] if rest else None
    if any(part is not None for part in rest[1:]):
        raise _without_form(kind)
    if getattr(function, "__name__", "").startswith("__pyx_unpickle_") and arguments[0] is kind:
        # What Cython writes for a class: its type, a sum of its fields' names, and their values.
        return {"class": full_name(kind), "how": _NEW, "state": arguments[2] or state or None}
    if function is kind and full_name(kind).startswith(_CALLED):
        return {"class": full_name(kind), "how": _CALL, "arguments": arguments, "state": state}
    if getattr(function, "__name__", "") in ("newObj", "__newobj__") and arguments == (kind,):
        return {"class": full_name(kind), "how": _NEW, "state": state}
    raise _without_form(kind)


def _plain_state(held: Any) -> dict[str, object]:
    state = held.__getstate__()
    if state is not None and type(state) is not dict:
        raise _without_form(type(held))
    grown = {key: trees.recognised(key, value) or value for key, value in (state or {}).items()}
    found: dict[str, object] = {"class": full_name(type(held)), "how": _NEW, "state": grown}
    if isinstance(held, dict):
        found["items"] = dict(held)
    elif isinstance(held, list | tuple | set | str | int | float):
        raise _without_form(type(held))
    return found


def _without_form(kind: type) -> UnsupportedValueError:
    return UnsupportedValueError.at("", f"a {full_name(kind)} does not say its state in values")


def _parts(original: Any) -> dict[str, object]:
    """Return what may be filled in place: other objects, but not arrays, which may be shared."""
    held = vars(original) if hasattr(original, "__dict__") else {}
    return {"state": {key: value for key, value in held.items() if not is_array(value)}}


def _restore(state: Any, original: Any) -> Any:
    kind = _class(state["class"], original)
    if state["how"] == _CALL:
        if not state["class"].startswith(_CALLED):
            raise ForbiddenClassError.at("", f"a call of {state['class']}")
        held = kind(*state["arguments"])
    else:
        held = kind.__new__(kind) if original is None else original
    if isinstance(held, dict):
        held.clear()
        held.update(state.get("items", {}))
    _set_state(held, state["state"], original)
    check_object(held)
    return held


def _set_state(held: Any, state: Any, original: Any) -> None:
    if state is None:
        return
    if original is not None:
        held.__dict__.clear()
    if hasattr(held, "__setstate__"):
        held.__setstate__(state)
    elif isinstance(state, dict):
        held.__dict__.update(state)
    else:
        raise DamagedStateError.at("", f"no state of a {full_name(type(held))}")


def _class(name: str, original: Any = None) -> Any:
    """Return the class of this name: the original's, or scikit-learn's own."""
    if original is not None:
        if full_name(type(original)) != name:
            raise mismatched(original, f"a {name}")
        return type(original)
    module, _, simple = name.rpartition(".")
    parts = set(module.split("."))
    if not _MODULE.fullmatch(module) or parts & _FORBIDDEN or not simple.isidentifier():
        raise ForbiddenClassError.at("", f"{name} is no class of scikit-learn's estimators")
    try:
        found = getattr(importlib.import_module(module), simple, None)
    except ImportError as error:
        raise ForbiddenClassError.at("", f"no module {module} in this scikit-learn") from error
    if not isinstance(found, type) or full_name(found) != name:
        raise ForbiddenClassError.at("", f"no class {name} in this scikit-learn")
    return found


def _tree_state(tree: Any) -> dict[str, object]:
    _, (features, classes, outputs), state = tree.__reduce__()
    return {"features": features, "classes": classes, "outputs": outputs, "state": state}


def _restore_tree(state: Any, original: Any) -> Any:
    held = state["state"]
    return trees.made_tree(
        state["features"],
        state["classes"],
        state["outputs"],
        held["max_depth"],
        held["nodes"],
        held["values"],
    )


def _restore_trees(state: Any, original: Any) -> Any:
    if "several" in state:
        return state["several"]
    return trees.restore_trees(state, _class(state["class"]))


def _restore_predictors(state: Any, original: Any) -> Any:
    return trees.restore_predictors(state, _class(PREDICTOR))


def _sparse_state(matrix: Any) -> dict[str, object]:
    parts = {field: getattr(matrix, field) for field in _SPARSE[matrix.format]}
    return {"class": type(matrix).__name__, "shape": matrix.shape, "parts": parts}


def _restore_sparse(state: Any, original: Any) -> Any:
    kind, _, flavour = state["class"].partition("_")
    if kind not in _SPARSE or flavour not in ("matrix", "array"):
        raise ForbiddenClassError.at("", f"no sparse {state['class']!r}")
    scipy = importlib.import_module("scipy.sparse")
    parts = tuple(state["parts"][field] for field in _SPARSE[kind])
    matrix = getattr(scipy, state["class"])(parts, shape=state["shape"])
    if hasattr(matrix, "check_format"):
        matrix.check_format(full_check=True)
    return matrix


def _function_state(function: Any) -> str:
    name = f"{function.__module__}.{function.__qualname__}"
    if not _FUNCTIONS.fullmatch(name):
        raise UnsupportedValueError.at("", f"a function, {name}")
    return name


def _restore_function(state: Any, original: Any) -> Any:
    if type(state) is not str or not _FUNCTIONS.fullmatch(state):
        raise ForbiddenClassError.at("", f"a function, {state!r}")
    module, _, name = state.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ForbiddenClassError.at("", f"no module {module} in this scikit-learn") from error
    if not isinstance(found, FunctionType) or f"{found.__module__}.{found.__qualname__}" != state:
        raise ForbiddenClassError.at("", f"no function {state} in this scikit-learn")
    return found


def _restore_partial(state: Any, original: Any) -> Any:
    if not isinstance(state["function"], FunctionType):  # one of those above
        raise DamagedStateError.at("", "arguments of no function")
    return partial(state["function"], *state["arguments"], **state["keywords"])


def _splines_state(splines: Any) -> dict[str, object]:
    return {name: getattr(splines, name) for name in ("t", "c", "k", "extrapolate", "axis")}


def _restore_splines(state: Any, original: Any) -> Any:
    return importlib.import_module("scipy.interpolate").BSpline(**state)


_FLAT: Final = frozenset({"state"})
register_package("sklearn", StateProvider("sklearn.object", _state, _restore, _parts, flat=_FLAT))
register_provider(
    "sklearn.tree._tree.Tree",
    StateProvider("sklearn.tree", _tree_state, _restore_tree, flat=_FLAT),
)
_ENSEMBLE: Final = frozenset({"trees", "differences", "parts", "several"})
register_provider(
    trees.Trees,
    StateProvider("sklearn.trees", trees.trees_state, _restore_trees, flat=_ENSEMBLE),
)
register_provider(
    trees.Predictors,
    StateProvider(
        "sklearn.predictors", trees.predictors_state, _restore_predictors, flat=_ENSEMBLE
    ),
)
register_provider(
    trees.Growing,
    StateProvider(
        "sklearn.growing",
        trees.growing_state,
        lambda state, original: trees.restore_growing(state),
        flat=_ENSEMBLE,
    ),
)
_MATRIX: Final = StateProvider(
    "scipy.sparse", _sparse_state, _restore_sparse, flat=frozenset({"parts"})
)
for _format in _SPARSE:
    register_provider(f"scipy.sparse._{_format}._{_format}_base", _MATRIX)
register_provider(FunctionType, StateProvider("function", _function_state, _restore_function))
register_provider(
    "functools.partial",
    StateProvider(
        "partial",
        lambda held: {"function": held.func, "arguments": held.args, "keywords": held.keywords},
        _restore_partial,
    ),
)
register_provider(
    "scipy.interpolate._bsplines.BSpline",
    StateProvider("scipy.splines", _splines_state, _restore_splines),
)
