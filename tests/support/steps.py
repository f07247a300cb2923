"""Runs whose models are dicts of arrays, and what must hold of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stores import open_store
from tensor_dedup.store.checkpoints import CheckpointStore
from tensor_dedup.store.files import Files

Model = dict[str, NDArray[Any]]


class Arrays:
    """A dict of arrays as it is."""

    name = "test.arrays"

    def extract(self, model: Model) -> Model:
        return model

    def reconstruct(self, tensors: Mapping[str, Any], original: object) -> Model:
        return dict(tensors)


def handle(
    root: Path, run: str = "run", *, files: Files | None = None, **more: Any
) -> CheckpointStore:
    """A run's checkpoints, with one thread, so that operations come in one order."""
    return CheckpointStore(open_store(root, files), run, Arrays(), **more)


def network(seed: int, layers: int = 3) -> Model:
    """Layers with a large and a small tensor each."""
    dice = np.random.default_rng(seed)
    model: Model = {}
    for number in range(layers):
        model[f"layer{number}.weight"] = dice.standard_normal((160, 200)).astype(np.float32)
        model[f"layer{number}.bias"] = dice.standard_normal(160).astype(np.float32)
    return model


def forest(trees: int) -> Model:
    """An ensemble: any number of trees, of which the first are always the same."""
    return {
        f"tree{number:06}": np.random.default_rng(number).standard_normal((15, 3))
        for number in range(trees)
    }


def train(model: Model, seed: int, *names: str) -> None:
    """Change these tensors in place."""
    dice = np.random.default_rng(seed)
    for name in names:
        model[name] += dice.standard_normal(model[name].shape).astype(model[name].dtype) * 1e-3


def copied(model: Model) -> Model:
    return {name: array.copy() for name, array in model.items()}


def assert_same(found: Model, expected: Model) -> None:
    """The same names in the same order, the same types, shapes and bytes (any NaN is itself)."""
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes(), name


def shares(run: CheckpointStore) -> bool:
    """Whether the steps of a run have anything in common: else a test of sharing tests nothing."""
    found: Any = run.stats()
    return bool(found["unique_chunks"] < found["total_chunks"])
