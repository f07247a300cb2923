"""What tracing costs a source tensor, without vLLM: for work on the tracer itself.

    python scripts/bench/tracing.py [--sources N] [--runs N] [--profile]

A made-up module of many sources with the usual loading pattern, `param.data.narrow(0, a, n)
.copy_(loaded)`: five sources a parameter, and, as experts are loaded, all in one. Processor time of
this thread, so that other work on the machine matters little. `load.py` has the figure that counts.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import cProfile
import pstats
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import click
import torch
from torch import nn

from bench.stats import estimate, machine, verdict
from tensor_dedup.loader.checkpoint_io.sources import SourceFile, SourceReader, SourceTensor
from tensor_dedup.loader.deferred.evaluate import Evaluator, Scratch
from tensor_dedup.loader.deferred.parameters import DeferredParameter, conclude, defer
from tensor_dedup.loader.deferred.recipe import RecipeBook, reason_to_keep_private
from tensor_dedup.loader.deferred.storage import View
from tensor_dedup.loader.deferred.trace import Tracer
from tensor_dedup.types import TensorSpec

ROWS, COLUMNS = 4, 8
MOST_US = 50.0
STEPS = ("recording", "conclude", "expect", "reason", "recipes")


class _File:
    """Stands for an open file: nothing here is read."""

    path = Path("made-up.safetensors")


def made_up(sources: int, each: int) -> nn.Module:
    """Parameters that take `each` of the sources in rows."""
    model = nn.Module()
    for number in range(sources // each):
        rows = torch.empty(each * ROWS, COLUMNS, dtype=torch.bfloat16)
        model.register_parameter(f"p{number}", nn.Parameter(rows, requires_grad=False))
    return model


def source_tensors(count: int) -> list[SourceTensor]:
    """Sources whose digests are known, all different."""
    size = ROWS * COLUMNS * 2
    file = cast("SourceFile", _File())
    return [
        SourceTensor(
            file, TensorSpec(f"s{i}", "BF16", (ROWS, COLUMNS), i * size, size), f"{i:064x}"
        )
        for i in range(count)
    ]


def record(tracer: Tracer, model: nn.Module, sources: Sequence[SourceTensor], each: int) -> None:
    """The loading code."""
    parameters = list(model.parameters())
    with tracer.recording():
        for number, source in enumerate(sources):
            loaded = tracer.source(source, torch.bfloat16)
            target = parameters[number // each].data.narrow(0, number % each * ROWS, ROWS)
            target.copy_(loaded)


def expect(evaluator: Evaluator, parameters: Iterable[DeferredParameter]) -> None:
    """What a load announces before it makes the first tensor."""
    for parameter in parameters:
        evaluator.expect(_view(parameter))


def run(count: int, each: int) -> dict[str, float]:
    """Microseconds a source tensor, by step."""
    model, sources = made_up(count, each), source_tensors(count)
    evaluator = Evaluator(SourceReader("blake3"), Scratch())
    tracer = Tracer(evaluator.value, torch.device("cpu"))
    deferred = defer(model, tracer)
    book = RecipeBook()
    steps: tuple[Callable[[], Any], ...] = (
        lambda: record(tracer, model, sources, each),
        lambda: conclude(model, deferred, tracer),
        lambda: expect(evaluator, deferred.values()),
        lambda: [reason_to_keep_private(_view(p)) for p in deferred.values()],
        lambda: [book.digest(_view(p)) for p in deferred.values()],
    )
    return {name: _timed(step) / count for name, step in zip(STEPS, steps, strict=True)}


def _view(parameter: DeferredParameter) -> View:
    assert parameter.view is not None
    return parameter.view


def _timed(step: Callable[[], Any]) -> float:
    began = time.thread_time()
    step()
    return (time.thread_time() - began) * 1e6


@contextmanager
def _profiled(wanted: bool) -> Iterator[None]:
    profile = cProfile.Profile()
    if wanted:
        profile.enable()
    yield
    profile.disable()
    if wanted:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sources", default=5000, show_default=True, type=click.IntRange(min=5))
@click.option("--runs", default=20, show_default=True, type=click.IntRange(min=1))
@click.option("--profile", is_flag=True, help="Profile one run, on the other stream.")
def main(sources: int, runs: int, profile: bool) -> None:
    """Measure tracing by itself."""
    click.echo("\n".join(machine(("torch", "blake3"))))
    click.echo("\nMicroseconds a source tensor, median and 95 % interval, least and greatest:\n")
    for each, pattern in ((5, "five sources a parameter"), (sources, "all sources in one")):
        count = sources // each * each
        run(count, each)  # warm up
        found = [run(count, each) for _ in range(runs)]
        for step in STEPS:
            seen = estimate([times[step] for times in found])
            low, high = seen.spread
            aim = f" (aim: {MOST_US:.0f}: {verdict(seen, most=MOST_US)})" * (step == STEPS[0])
            click.echo(f"- {pattern}, {step}: {seen.text(1)}, {low:.1f} to {high:.1f}{aim}")
    with _profiled(profile):
        run(sources // 5 * 5, 5)


if __name__ == "__main__":
    main()
