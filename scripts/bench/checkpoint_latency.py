"""How long saves and loads take: every method in turns, on the same model in the same state."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench import checkpoint_models as models
from bench.checkpoint_methods import (
    OURS,
    SKLEARN,
    TENSORCAS,
    TORCH,
    XGBOOST,
    Chunks,
    Distributed,
    Files,
    Kind,
    Method,
    Ours,
    emptied,
)
from bench.results import Figures, estimate_scaled
from bench.stats import Estimate, estimate, verdict
from bench.turns import say, timed
from tensor_dedup.training.adapters import SklearnAdapter, XGBoostAdapter

HEAD: Final = "| what | method | ms | ours to it | aim | | the article, ms |\n" + "| --- " * 7 + "|"
_MS: Final = 1e-3
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """A row of the article: what is saved, and what changes before each save."""

    name: str
    kind: Kind
    start: Callable[[], tuple[Any, Callable[[], object]]]
    article: str
    others: Callable[[Path], list[Method]] = field(default=lambda folder: [])
    most: float | None = None  # seconds
    within: tuple[str, float] | None = None  # a method, and how many seconds more than it
    faster: str | None = None  # than this method


def _network(part: models.Part | None) -> tuple[Any, Callable[[], object]]:
    model = models.pretrained().eval()
    return model, lambda: models.nudge(model, part) if part else None


def _forest(trees: int) -> tuple[Any, Callable[[], object]]:
    forest = models.Forest(trees)
    return forest.model, lambda: forest.grow(10)


def _rounds(rounds: int) -> tuple[Any, Callable[[], object]]:
    booster = models.Rounds(rounds)
    return booster.model, lambda: booster.grow(10)


def _more(folder: Path) -> list[Method]:
    return [
        Ours(folder / "raw", raw=True),
        Files("torch.save", folder / "synced", TORCH, synced=True),
        Distributed(folder / "dcp", behind=False),
        Distributed(folder / "dcp-async", behind=True),
    ]


def _forests(folder: Path) -> list[Method]:
    return [Ours(folder / "appended", appended=SklearnAdapter(append_only=True))]


def _boosters(folder: Path) -> list[Method]:
    return [Ours(folder / "appended", appended=XGBoostAdapter(append_only=True))]


CASES: Final = (
    Case("ResNet-18, all changes", TORCH, lambda: _network("full"), "36.0", _more),
    Case(
        "ResNet-18, frozen",
        TORCH,
        lambda: _network("frozen"),
        "14.0",
        _more,
        faster="torch.save",
    ),
    Case("ResNet-18, LoRA-like", TORCH, lambda: _network("LoRA-like"), "14.9", _more),
    Case("ResNet-18, nothing changes", TORCH, lambda: _network(None), ""),
    Case("500 trees, 10 new", SKLEARN, lambda: _forest(500), "63.5", _forests),
    Case("1,000 trees, 10 new", SKLEARN, lambda: _forest(1000), "70.5", _forests),
    Case("5,000 trees, 10 new", SKLEARN, lambda: _forest(5000), "70.2", _forests, most=0.030),
    Case("500 rounds, 10 new", XGBOOST, lambda: _rounds(500), "50.4", _boosters),
    Case(
        "5,000 rounds, 10 new",
        XGBOOST,
        lambda: _rounds(5000),
        "208.7",
        _boosters,
        within=("save_raw", 0.010),
    ),
)
QUICK: Final = ("ResNet-18, frozen", "500 trees, 10 new", "500 rounds, 10 new")
STATED: Final = ("ResNet-18, all changes", "ResNet-18, frozen")


def saves(work: Path, rounds: int, figures: Figures, *, quick: bool, stated: bool) -> list[str]:
    """Saves of models that were saved before, in one store each: the article's tables.

    Their seconds are entered in `figures`. `stated`: only what docs/results.md has.
    """
    lines, wanted = [HEAD], STATED if stated else QUICK
    for case in CASES:
        if (quick or stated) and case.name not in wanted:
            continue
        say(f"latency: {case.name}")
        with _methods(case, emptied(work / "latency")) as methods:
            times = _in_turns(case, methods, rounds)
        lines += _rows(case, times)
        for name, seconds in times.items():
            figures[f"save: {case.name}, {name}"] = seconds, times[OURS]
    emptied(work / "latency")
    return lines


@contextmanager
def _methods(case: Case, folder: Path) -> Iterator[list[Method]]:
    files = [Files(name, folder / name, case.kind) for name in case.kind.files]
    with ExitStack() as stack:
        methods: list[Method] = [
            Ours(folder / "ours"),
            Chunks(folder / "chunks", case.kind),
            *files,
            *case.others(folder),
        ]
        for method in methods:
            stack.enter_context(closing(method))
        yield methods


def _in_turns(case: Case, methods: list[Method], rounds: int) -> Times:
    """Seconds of each method, once a round in an order drawn anew; the first round is dropped."""
    model, change = case.start()
    dice = random.Random(1)
    times: Times = {method.name: [] for method in methods}
    for step in range(rounds + 1):
        change()
        for method in dice.sample(methods, len(methods)):
            times[method.name].append(timed(partial(method.save, model, step)))
            method.settle()
    return {name: seconds[1:] for name, seconds in times.items()}


def _rows(case: Case, times: Times) -> list[str]:
    ours = times[OURS]
    aim, met = "", ""
    if case.most is not None:
        aim, met = f"≤ {case.most / _MS:g} ms", verdict(estimate(ours), most=case.most)
    rows = [(case.name, OURS, _ms(estimate(ours)), "", aim, met, "")]
    for name, seconds in times.items():
        if name == OURS:
            continue
        article = case.article if name == TENSORCAS else ""
        rows.append(
            (case.name, name, _ms(estimate(seconds)), *_against(case, name, ours, seconds), article)
        )
    return [f"| {' | '.join(row)} |" for row in rows]


def _against(
    case: Case, name: str, ours: Sequence[float], other: Sequence[float]
) -> tuple[str, str, str]:
    """Ours compared with a method round by round, the aim, the verdict."""
    if case.within and case.within[0] == name:
        extra = estimate([a - b for a, b in zip(ours, other, strict=True)])
        most = case.within[1]
        return f"{_ms(extra)} more", f"≤ {most / _MS:g} ms more", verdict(extra, most=most)
    ratio = estimate([a / b for a, b in zip(ours, other, strict=True)])
    if case.faster == name:
        return f"{ratio.text(2)} x", "≤ 1 x", verdict(ratio, most=1)
    return f"{ratio.text(2)} x", "", ""


def _ms(found: Estimate) -> str:
    return estimate_scaled(found, _MS).text(1)
