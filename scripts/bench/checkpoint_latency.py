"""How long saves and loads take: every method in turns, on the same model in the same state."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench import checkpoint_models as models
from bench.checkpoint_methods import (
    OURS,
    SKLEARN,
    TENSORCAS,
    TORCH,
    XGBOOST,
    Behind,
    Chunks,
    Distributed,
    Dvc,
    Files,
    Kind,
    Method,
    Ours,
    Snapshots,
    emptied,
)
from bench.results import estimate_scaled
from bench.stats import Estimate, estimate, verdict
from tensor_dedup.training.adapters import SklearnAdapter, XGBoostAdapter

HEAD: Final = "| what | method | ms | ours to it | aim | | the article, ms |\n" + "| --- " * 7 + "|"
_MS: Final = 1e-3
Say = Callable[[str], None]
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
        *([Snapshots(folder / "snapshots")] if find_spec("torchsnapshot") else []),
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

_README: Final[Sequence[tuple[str, Kind, Callable[[], Any], str]]] = (
    ("GBM, 50 trees", SKLEARN, lambda: models.Forest(50).model, "38 / 9 / 1.4"),
    ("booster, 50 rounds", XGBOOST, lambda: models.Rounds(50).model, "29 / 5 / 1.9"),
    ("perceptron 256 x 2", TORCH, lambda: models.perceptron(256, 2), "7 / 1 / 0.5"),
    ("perceptron 1024 x 4", TORCH, lambda: models.perceptron(1024, 4), "36 / 16 / -"),
)


def saves(work: Path, rounds: int, quick: bool, dvc: Path | None, say: Say) -> list[str]:
    """Saves of models that were saved before, in one store each: the article's tables."""
    lines = [HEAD]
    for case in CASES:
        if quick and case.name not in QUICK:
            continue
        say(f"latency: {case.name}")
        with _methods(case, emptied(work / "latency"), dvc) as methods:
            times = _in_turns(case, methods, rounds)
        lines += _rows(case, times)
    emptied(work / "latency")
    return lines


def readme(work: Path, rounds: int, say: Say) -> list[str]:
    """Save to an empty store, load, and save again unchanged: the table of the readme."""
    head = "| model | method | save, ms | load, ms | save again, ms | the readme |\n"
    lines = [head + "| --- " * 6 + "|"]
    for name, kind, make, article in _README:
        say(f"latency: {name}")
        model = make()
        times = [_cold(kind, model, emptied(work / "cold")) for _ in range(rounds + 1)][1:]
        for method in times[0]:
            found = [estimate([each[method][at] for each in times]) for at in range(3)]
            cells = [name, method, *(_ms(each) for each in found), article]
            lines.append(f"| {' | '.join(cells)} |")
            article = ""
    emptied(work / "cold")
    return lines


def history(work: Path, rounds: int, quick: bool, say: Say) -> list[str]:
    """What steps that are there already cost: loads and saves of ours with more and more."""
    lines = ["| steps in the store | load, ms | save, ms |\n| --- | --- | --- |"]
    method = Ours(emptied(work / "history"))
    model, head = models.half_frozen()

    def save(step: int) -> float:
        next(models.shaken(head, 1))
        return _timed(lambda: method.save(model, step))

    with closing(method):
        there = 0
        for count in (1, 10) if quick else (1, 100, 1000):
            say(f"latency: {count} steps")
            for step in range(there, count):
                save(step)
            there, last = count, count - 1
            loads = estimate([_timed(partial(method.load, last, model)) for _ in range(rounds)])
            again = estimate([save(last) for _ in range(rounds)])
            lines.append(f"| {count:,} | {_ms(loads)} | {_ms(again)} |")
    emptied(work / "history")
    return lines


@contextmanager
def _methods(case: Case, folder: Path, dvc: Path | None) -> Iterator[list[Method]]:
    with ExitStack() as stack:
        methods = [Ours(folder / "ours"), *_peers(case.kind, folder), *case.others(folder)]
        if dvc and case.faster:
            methods.append(Dvc(folder / "dvc", case.kind, dvc))
        for method in methods:
            stack.enter_context(closing(method))
        yield methods


def _peers(kind: Kind, folder: Path) -> list[Method]:
    files = [Files(name, folder / name, kind) for name in kind.files]
    return [Chunks(folder / "chunks", kind), *files]


def _in_turns(case: Case, methods: list[Method], rounds: int) -> Times:
    """Seconds of each method, once a round in an order drawn anew; the first round is dropped."""
    model, change = case.start()
    dice = random.Random(1)
    times: Times = {method.name: [] for method in methods}
    for step in range(rounds + 1):
        change()
        for method in dice.sample(methods, len(methods)):
            times[method.name].append(_timed(partial(method.save, model, step)))
            method.settle()
    return {name: seconds[1:] for name, seconds in times.items()}


def _cold(kind: Kind, model: Any, folder: Path) -> dict[str, tuple[float, float, float]]:
    methods: list[Method] = [Ours(folder / "ours"), Behind(folder / "behind")]
    methods += _peers(kind, folder)
    found = {}
    for method in random.Random(time.monotonic_ns()).sample(methods, len(methods)):
        with closing(method):
            first = _timed(partial(method.save, model, 1))
            method.settle()
            load = _timed(partial(method.load, 1, model))
            found[method.name] = first, load, _timed(partial(method.save, model, 2))
            method.settle()
    return {method.name: found[method.name] for method in methods}


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


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _ms(found: Estimate) -> str:
    return estimate_scaled(found, _MS).text(1)
