#!/usr/bin/env python3
"""How long it takes to take ensembles apart, beside pickle and XGBoost's own writing.

    scripts/bench/extract.py [--rounds N] [--write]

Needs scikit-learn and XGBoost. Prints a section of Markdown; `--write` puts it into
docs/benchmarks.md instead of the one there. A minute.
"""

import pickle
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import click
import numpy as np
import xgboost
from sklearn.ensemble import GradientBoostingClassifier

from stats import Section, estimate
from tensor_dedup.store.checkpoints.adapters import (
    ModelAdapter,
    SklearnAdapter,
    XGBoostAdapter,
)
from tensor_dedup.store.checkpoints.state import NamedValue, pieces

PACKAGES = ("numpy", "scikit-learn", "xgboost-cpu", "xgboost", "xxhash")
_TREES = (500, 1_000, 5_000)
_ROUNDS = (500, 5_000)
_NOTES = """\
- *Extract* ends with all pieces, every byte of every tree among them, ready to be compared; none is
  trusted to be what it was. 1,000 rows of 20 numbers, depth 3.
- scikit-learn: 5,000 trees are trained one by one, none is there twice.
- In every round each runs once, in an order drawn anew, in one process, one thread. Medians and
  95 % intervals of the median.
"""
Work = Callable[[], object]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(min=10))
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks.md.")
def main(rounds: int, write: bool) -> None:
    """Measure how long extraction takes."""
    section = Section("extract.py", "Taking ensembles apart", PACKAGES)
    rows = [*_sklearn(rounds), *_xgboost(rounds)]
    section.finish("extract", f"{rounds} rounds", [*_table(rows)], _NOTES, write=write)


def _sklearn(rounds: int) -> Iterator[tuple[str, ...]]:
    x, y = _data()
    adapter = SklearnAdapter()
    model = GradientBoostingClassifier(
        n_estimators=0, max_depth=3, warm_start=True, random_state=0, subsample=0.2
    )
    for trees in _TREES:
        model.set_params(n_estimators=trees).fit(x, y)
        times = _timed(
            rounds,
            {
                "extract": partial(_pieces, adapter, model),
                "pickle": partial(pickle.dumps, model, pickle.HIGHEST_PROTOCOL),
            },
        )
        yield _row(f"scikit-learn, {trees:,} trees", times, "pickle")


def _xgboost(rounds: int) -> Iterator[tuple[str, ...]]:
    x, y = _data()
    adapter = XGBoostAdapter()
    matrix = xgboost.DMatrix(x, y)
    for count in _ROUNDS:
        parameters = {"objective": "binary:logistic", "max_depth": 3, "nthread": 1}
        booster = xgboost.train(parameters, matrix, count)
        times = _timed(
            rounds,
            {
                "extract": partial(_pieces, adapter, booster),
                "save_raw": partial(booster.save_raw, "ubj"),
                "pickle": partial(pickle.dumps, booster, pickle.HIGHEST_PROTOCOL),
            },
        )
        yield _row(f"XGBoost, {count:,} rounds", times, "save_raw")


def _pieces(adapter: ModelAdapter, model: object) -> list[NamedValue]:
    return pieces(adapter.extract(model))


def _data() -> tuple[Any, Any]:
    dice = np.random.default_rng(0)
    x = dice.normal(size=(1_000, 20))
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(int)


def _timed(rounds: int, works: Mapping[str, Work]) -> dict[str, list[float]]:
    """Milliseconds of each, in an order drawn anew in every round; the first round is dropped."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name in random.sample(sorted(works), len(works)):
            began = time.perf_counter()
            held = works[name]()
            took = (time.perf_counter() - began) * 1e3
            del held
            if number:
                times[name].append(took)
    return times


def _row(what: str, times: Mapping[str, list[float]], beside: str) -> tuple[str, ...]:
    over = [ours - theirs for ours, theirs in zip(times["extract"], times[beside], strict=True)]
    cells = [_said(times[name]) if name in times else "" for name in ("pickle", "save_raw")]
    return (what, _said(times["extract"]), *cells, _said(over) + f" over {beside}")


def _said(values: list[float]) -> str:
    return estimate(values).text(1)


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield "| milliseconds | extract | pickle.dumps | save_raw | difference |"
    yield "|---|---|---|---|---|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    main()
