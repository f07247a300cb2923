"""Metrics as a manifest holds them: JSON that every reader takes, and errors that say which."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from store_runs.stores import handle, network, shares
from tensor_dedup.store.steps.errors import BadMetricError
from tensor_dedup.store.steps.notes import Notes, checked


def refuse(constant: str) -> None:
    pytest.fail(f"{constant} is no JSON")


def test_numbers_that_json_lacks_are_texts() -> None:
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5}
    texts = Notes("run", 1, "numpy", metrics).to_texts()
    held = json.loads(texts["metrics"], parse_constant=refuse)
    assert held == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.5}
    back = Notes.from_texts(texts)
    assert back is not None
    assert math.isnan(back.metrics["a"])
    assert (back.metrics["b"], back.metrics["c"], back.metrics["d"]) == (math.inf, -math.inf, 0.5)


@pytest.mark.parametrize(
    "text",
    ['{"a": 1' + "0" * 400 + "}", '{"a": "1.5"}', '{"a": "nan"}', '{"a": []}', "[" * 100_000, "1"],
    ids=["too large", "a text", "another text", "a list", "deep", "no object"],
)
def test_what_no_run_wrote_is_no_step(text: str) -> None:
    assert Notes.from_texts(Notes("run", 1, "numpy").to_texts() | {"metrics": text}) is None


@pytest.mark.parametrize(
    "value",
    [10**400, 10**5000, -(10**400), "low", None, torch.ones(2)],
    ids=["large", "larger", "less", "a text", "None", "a tensor"],
)
def test_what_is_no_number_is_named(value: object) -> None:
    with pytest.raises(BadMetricError, match="the metric 'l' is"):
        checked({"l": value})


@pytest.mark.parametrize("value", [1, [1], "loss"])
def test_metrics_without_names(tmp_path: Path, value: Any) -> None:
    run = handle(tmp_path)
    with pytest.raises(BadMetricError, match="give numbers by name"):
        run.save(network(1), 0, value)
    assert run.steps() == []


def test_a_run_keeps_numbers_that_are_not_finite(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    run.save(model, 0, {"loss": math.inf, "acc": 1})
    run.save(model, 1, {"loss": math.nan, "acc": torch.tensor(0.5)})
    with pytest.raises(BadMetricError):
        run.save(model, 2, {"loss": 10**400})
    assert shares(run)
    assert run.steps() == [0, 1]
    assert run.metrics()[0] == {"acc": 1.0, "loss": math.inf}
    assert run.best("loss") == 0
