"""Store tree ensembles of scikit-learn with one piece for each tree.

The piece of a tree has one row of bytes for each node: scikit-learn's own record of the node, and
then the node's values. All trees are read together; 5,000 trees take about 20 ms.

In scikit-learn, each tree belongs to an estimator with attributes. Attributes that are equal in all
estimators of the ensemble are stored once. The attributes that differ, a few numbers for each tree,
are stored in pieces for 256 trees each.

scikit-learn walks trees in C without bounds checks. Since a step may come from an untrusted source,
a tree whose nodes refer to places outside its memory is refused as damaged.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from operator import is_not
from typing import Any, Final

import msgspec

from tensor_dedup.training.adapters import plain
from tensor_dedup.training.adapters.arrays import blank_gaps
from tensor_dedup.training.adapters.base import PieceSeries, full_name
from tensor_dedup.training.adapters.ensembles import read_columns
from tensor_dedup.training.errors import DamagedStateError
from tensor_dedup.training.state import is_array

PREDICTOR: Final = "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"
_CHUNK: Final = 256
_TREE: Final = "tree_"
_LEAF: Final = -1
# Bytes of trees that are put together at a time.
_ROOM: Final = 16 << 20
# What ensembles keep a number of for each round.
_SCORES: Final = frozenset(
    {
        "train_score_",
        "validation_score_",
        "oob_improvement_",
        "oob_scores_",
        "estimator_weights_",
        "estimator_errors_",
    }
)
# Numbers in a piece of such an array.
_GROWING: Final = 1024
_HOME: Final = "sklearn.tree._classes"
_PREDICTOR_FIELDS: Final = ["nodes", "binned_left_cat_bitsets", "raw_left_cat_bitsets"]
_BITSET: Final = (8, "<u4")
_BOOSTING: Final = "sklearn.ensemble._hist_gradient_boosting.gradient_boosting"
# They hand trees what they were asked about, and trees do not look at how many features it has.
_TRUSTING: Final = frozenset(
    {"sklearn.ensemble._forest", "sklearn.ensemble._gb", "sklearn.ensemble._iforest"}
)
_TREES: Final = "sklearn.tree._classes"
_SET_WORDS: Final = 8


@dataclass(frozen=True)
class Trees:
    """The fitted trees of an ensemble, all of one class.

    `shape` is the shape of the object array that held them, or None if they were in a list.
    """

    estimators: Sequence[Any]
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Predictors:
    """The trees of histogram-based boosting as one flat sequence, with `width` trees a round."""

    trees: Sequence[Any]
    width: int


@dataclass(frozen=True)
class Growing:
    """A 1-dimensional array of numbers to which every boosting round appends."""

    array: Any


def recognised(name: str, value: Any) -> Trees | Predictors | Growing | None:
    """Wrap `value`, the attribute `name` of an ensemble, if training appends to it.

    Fitted trees are returned as Trees or Predictors, and a long array of scores as Growing. For any
    other value, the result is None.
    """
    import numpy as np

    if isinstance(value, np.ndarray):
        if value.dtype == object and value.size:
            return _trees(value.reshape(-1).tolist(), value.shape)
        numbers = name in _SCORES and value.ndim == 1 and value.dtype.str == "<f8"
        return Growing(value) if numbers and value.size > _GROWING else None
    if type(value) is not list or not value:
        return None
    if type(value[0]) is list:
        return _predictors(value)
    return _trees(value, None)


def _trees(estimators: Sequence[Any], shape: tuple[int, ...] | None) -> Trees | None:
    kind = type(estimators[0])
    if kind.__module__ != _HOME or set(map(type, estimators)) != {kind}:
        return None
    if _TREE not in vars(estimators[0]):
        return None
    return Trees(estimators, shape)


def _predictors(rounds: Sequence[Any]) -> Predictors | None:
    width = len(rounds[0])
    trees = [tree for each in rounds if type(each) is list for tree in each]
    if not width or len(trees) != width * len(rounds):
        return None
    alike = all(
        full_name(type(tree)) == PREDICTOR
        and list(vars(tree)) == _PREDICTOR_FIELDS
        and tree.nodes.dtype == trees[0].nodes.dtype
        and tree.binned_left_cat_bitsets.shape == tree.raw_left_cat_bitsets.shape
        for tree in trees
    )
    return Predictors(trees, width) if alike else None


def trees_state(trees: Trees) -> Any:
    """Return the state of the trees of an ensemble.

    Each tree becomes a piece. Attributes that are equal in all estimators are stored once, and the
    other attributes for each estimator. If the estimators differ too much, the state has the
    estimators themselves.
    """
    first = vars(trees.estimators[0])
    if first[_TREE] is None:
        return {"several": _as_given(trees)}
    _, (features, classes, outputs), state = first[_TREE].__reduce__()
    dtype = state["nodes"].dtype
    taken = read_columns(trees.estimators, lambda some: _columns(some, trees.estimators[0], dtype))
    if taken is None:
        return {"several": _as_given(trees)}
    pieces, depths, differences = taken
    return {
        "class": full_name(type(trees.estimators[0])),
        "shape": trees.shape,
        "common": {key: held for key, held in first.items() if key != _TREE},
        "arguments": (features, classes.tolist(), outputs),
        "dtype": dtype,
        "trees": PieceSeries("tree", pieces),
        "differences": PieceSeries("differences", _chunks(depths, differences)),
    }


def _as_given(trees: Trees) -> Any:
    import numpy as np

    if trees.shape is None:
        return list(trees.estimators)
    held = np.empty(len(trees.estimators), object)
    held[:] = trees.estimators
    return held.reshape(trees.shape)


@dataclass
class _Taken:
    """What is in trees, as bytes, which a garbage collector need not look at."""

    nodes: list[bytes]
    values: list[bytes]
    depths: list[int]
    differences: list[dict[str, plain.Wire]]


def _columns(estimators: Sequence[Any], model: Any, dtype: Any) -> tuple[list[Any], ...] | None:
    """Of each: its piece, its depth, and what it has that is not as in `model`; None as `_taken`"""
    taken = _taken(estimators, model)
    if taken is None:
        return None
    return _pieces(taken, dtype), taken.depths, taken.differences


def _taken(estimators: Sequence[Any], model: Any) -> _Taken | None:
    """None when they cannot be said to be one, but for plain values. One pass: there are many."""
    keys, first = list(vars(model)), list(vars(model).values())
    taken, made, nothing = _Taken([], [], [], []), set(), dict[str, plain.Wire]()
    for estimator in estimators:
        held = vars(estimator)
        tree = held.get(_TREE)
        if tree is None or list(held) != keys:
            return None
        made.add((tree.n_features, tree.n_outputs, tree.max_n_classes))
        state = tree.__getstate__()
        taken.nodes.append(state["nodes"].tobytes())
        taken.values.append(state["values"].tobytes())
        taken.depths.append(state["max_depth"])
        # Nearly always all is the same object, but for the tree itself.
        other: dict[str, plain.Wire] | None = nothing
        if sum(map(is_not, held.values(), first)) > 1:
            other = _difference(keys, list(held.values()), first)
        if other is None:
            return None
        taken.differences.append(other)
    return taken if len(made) == 1 and _of_equal_classes(estimators) else None


def _of_equal_classes(estimators: Sequence[Any]) -> bool:
    if vars(estimators[0])[_TREE].n_outputs == 1:
        return True  # then the most is the number
    return len({vars(estimator)[_TREE].n_classes.tobytes() for estimator in estimators}) == 1


def _difference(
    keys: list[str], values: list[Any], first: list[Any]
) -> dict[str, plain.Wire] | None:
    """Return what differs from the first; None when plain values cannot say it."""
    found = {}
    for place, (value, other) in enumerate(zip(values, first, strict=True)):
        if value is other or keys[place] == _TREE or _alike(value, other):
            continue
        if not plain.is_scalar(values[place]):
            return None
        found[keys[place]] = plain.scalar(values[place], keys[place])
    return found


def _alike(a: Any, b: Any) -> bool:
    """Return whether both are the same number, text or array, of the same type."""
    import numpy as np

    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        same = (a.shape, a.dtype) == (b.shape, b.dtype) and not a.dtype.hasobject
        return bool(same and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return a.hex() == str(b.hex())
    return plain.is_scalar(a) and bool(a == b)


def _pieces(taken: _Taken, dtype: Any) -> list[bytes]:
    """Return each tree's rows, made of many trees at once within bounded memory."""
    sums = list(accumulate(map(len, taken.nodes), initial=0))
    pieces: list[bytes] = []
    while len(pieces) < len(taken.nodes):
        start = len(pieces)
        stop = max(start + 1, bisect_right(sums, sums[start] + _ROOM) - 1)
        pieces += _rows(taken.nodes[start:stop], taken.values[start:stop], dtype)
    return pieces


def _rows(nodes: list[bytes], values: list[bytes], dtype: Any) -> list[bytes]:
    """Return a row for each node of each tree, and the part that is each tree's."""
    import numpy as np

    # Joined as bytes: joining records compares their types, thirty times slower.
    records = np.frombuffer(b"".join(nodes), np.uint8).reshape(-1, dtype.itemsize)
    numbers = np.frombuffer(b"".join(values), np.uint8).reshape(len(records), -1)
    rows = np.concatenate([records, numbers], 1)
    blank_gaps(rows[:, : dtype.itemsize], dtype)
    data = rows.tobytes()
    counts = map(len, nodes)
    width = rows.shape[1]
    ends = accumulate((size // dtype.itemsize * width for size in counts), initial=0)
    return [data[start:stop] for start, stop in pairwise(ends)]


def _chunks(*columns: Sequence[Any]) -> list[bytes]:
    encode = msgspec.msgpack.encode
    starts = range(0, len(columns[0]), _CHUNK)
    return [
        encode(list(zip(*(c[at : at + _CHUNK] for c in columns), strict=True))) for at in starts
    ]


def _unchunked(series: PieceSeries, count: int) -> list[Any]:
    try:
        parts = [msgspec.msgpack.decode(item, type=list[Any]) for item in series.items]
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DamagedStateError.at(series.name, str(error)) from error
    items = [item for part in parts for item in part]
    if len(items) != count or any(type(item) is not list or len(item) != 2 for item in items):
        raise DamagedStateError.at(series.name, f"{len(items)} entries for {count} trees")
    return items


def restore_trees(state: Any, kind: Any) -> Any:
    """Return the list or array of estimators whose state `trees_state` has returned.

    `kind` is the class of the estimators. The caller must have checked that this class is allowed.
    """
    import numpy as np

    arguments = state["arguments"]
    items = state["trees"].items
    differences = _unchunked(state["differences"], len(items))
    estimators = []
    for item, (depth, other) in zip(items, differences, strict=True):
        estimator = kind.__new__(kind)
        given = {**state["common"], **{key: plain.decode(wire) for key, wire in other.items()}}
        given[_TREE] = _tree_of(item, state["dtype"], arguments, depth)
        estimator.__setstate__({**given, "_sklearn_version": _version()})
        check_object(estimator)
        estimators.append(estimator)
    if state["shape"] is None:
        return estimators
    held = np.empty(len(estimators), object)
    held[:] = estimators
    return held.reshape(state["shape"])


def _version() -> str:
    import sklearn

    return str(sklearn.__version__)  # the ensemble around them says which it was


def _tree_of(item: Any, dtype: Any, arguments: Any, depth: int) -> Any:
    import numpy as np

    features, classes, outputs = arguments
    width = dtype.itemsize + outputs * max(classes) * 8
    rows = np.frombuffer(item, np.uint8).reshape(-1, width)
    nodes = np.ascontiguousarray(rows[:, : dtype.itemsize]).view(dtype).reshape(-1)
    values = np.ascontiguousarray(rows[:, dtype.itemsize :]).view("<f8")
    shaped = values.reshape(len(rows), outputs, max(classes))
    return made_tree(features, np.array(classes, np.intp), outputs, depth, nodes, shaped)


def made_tree(
    features: int, classes: Any, outputs: int, depth: int, nodes: Any, values: Any
) -> Any:
    """Build a scikit-learn Tree from its arrays.

    Raises:
        DamagedStateError: The tree has no nodes, a child is not a later node of the tree, a feature
            does not exist, or the length of `classes` is not `outputs`.
    """
    from sklearn.tree._tree import Tree

    check_links(nodes["left_child"], nodes["right_child"], nodes["left_child"] == _LEAF)
    inner = nodes["left_child"] != _LEAF
    if (nodes["feature"][inner] < 0).any() or (nodes["feature"][inner] >= features).any():
        raise DamagedStateError.at("", "a node of a tree asks for a feature that is not there")
    if len(classes) != outputs:
        raise DamagedStateError.at("", f"a tree of {outputs} outputs and {len(classes)} classes")
    tree = Tree(features, classes, outputs)
    state = {"max_depth": depth, "node_count": len(nodes), "nodes": nodes, "values": values}
    tree.__setstate__(state)
    return tree


def predictors_state(predictors: Predictors) -> dict[str, object]:
    """Return the state of the trees of histogram-based boosting.

    Its entry `trees` has one byte string for each tree: the nodes, followed by the two arrays of
    category sets. Its entry `differences` has the numbers of nodes and of category sets in each
    tree. Both entries are of type `PieceSeries`.
    """
    trees = predictors.trees
    found = read_columns(trees, _predictor_columns)
    assert found is not None
    parts, *sizes = found
    return {
        "width": predictors.width,
        "dtype": trees[0].nodes.dtype,
        "trees": PieceSeries("tree", parts),
        "differences": PieceSeries("differences", _chunks(*sizes)),
    }


def _predictor_columns(trees: Sequence[Any]) -> tuple[list[Any], ...]:
    return (
        [b"".join([getattr(tree, f).tobytes() for f in _PREDICTOR_FIELDS]) for tree in trees],
        [len(tree.nodes) for tree in trees],
        [len(tree.raw_left_cat_bitsets) for tree in trees],
    )


def restore_predictors(state: Any, kind: type) -> list[list[Any]]:
    """Return the list of rounds, each a list of trees, whose state `predictors_state` returned."""
    items, width = state["trees"].items, state["width"]
    sizes = _unchunked(state["differences"], len(items))
    trees = [
        kind(*_predictor_parts(item, state["dtype"], *size))
        for item, size in zip(items, sizes, strict=True)
    ]
    for tree in trees:
        check_object(tree)
    return [trees[at : at + width] for at in range(0, len(trees), width)]


def _predictor_parts(item: Any, dtype: Any, nodes: int, sets: int) -> Iterator[Any]:
    import numpy as np

    columns, code = _BITSET
    first, each = nodes * dtype.itemsize, sets * columns * 4
    held = np.frombuffer(item, np.uint8).copy()
    if len(held) != first + 2 * each:
        raise DamagedStateError.at("", f"{len(held)} bytes of a tree, not {first + 2 * each}")
    yield held[:first].view(dtype)
    for at in (first, first + each):
        yield held[at : at + each].view(code).reshape(sets, columns)


def growing_state(growing: Growing) -> dict[str, object]:
    """Return the state of a growing array: its dtype, and its bytes as a series of parts.

    All parts have the same length, except for the last one, which may be shorter.
    """
    import numpy as np

    array = np.ascontiguousarray(growing.array)
    step = _GROWING * array.itemsize
    data = array.view(np.uint8).data
    parts = [data[at : at + step] for at in range(0, array.nbytes, step)]
    return {"dtype": array.dtype, "parts": PieceSeries("part", parts)}


def restore_growing(state: Any) -> Any:
    """Return the array whose state `growing_state` has returned."""
    import numpy as np

    return np.frombuffer(bytearray().join(state["parts"].items), state["dtype"])


def check_links(left: Any, right: Any, leaves: Any) -> None:
    """Check that the children of every inner node are later nodes of the same tree.

    `left` and `right` have the numbers of each node's children, and `leaves` is a mask of the nodes
    without children.

    Raises:
        DamagedStateError: A child is not a later node of the tree.
    """
    import numpy as np

    numbers, count = np.arange(len(left)), len(left)
    for child in (left, right):
        wrong = ~leaves & ((child <= numbers) | (child >= count))
        if wrong.any() or not count:
            raise DamagedStateError.at("", "a node of a tree leads out of it")


def check_object(held: Any) -> None:
    """Check that `held`, if it is an estimator or a tree, does not read outside its arrays.

    Objects of other classes are not checked.

    Raises:
        DamagedStateError: The estimator or the tree would read outside its arrays.
    """
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
    """Check that a tree of histogram-based boosting does not refer outside its own arrays.

    Raises:
        DamagedStateError: The tree refers outside its arrays.
    """
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
