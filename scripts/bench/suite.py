"""The measurements of load.py, in order. Import it only after the environment is set."""

from collections.abc import Callable, Sequence
from pathlib import Path

from bench import decoding, experts, residency, timings
from bench.fine_tunes import HALF, made
from bench.loading import prepare_process
from bench.results import Row
from demonstration import models


def run(work: Path, pairs: int, parts: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Run these parts; the rows of their results, and what follows these as Markdown."""
    paths = made(work)
    base, one, half = paths[models.BASE], paths["one-layer"], paths[HALF]
    # vLLM makes the process group of experts at once, if its first model has some, or never.
    prepare_process(experts.made(work) if "planning" in parts else base)
    more: list[str] = []

    def several() -> list[Row]:
        rows, table = residency.several(base, work)
        more.extend(["", table])
        return rows

    measurements: dict[str, Callable[[], list[Row]]] = {
        "unknown": lambda: timings.unknown(base, pairs),
        "again": lambda: timings.again(base, pairs),
        "planning": lambda: timings.planning(experts.made(work), experts.TENSORS, min(pairs, 6)),
        "known": lambda: [
            *timings.known(base, one, "known, one layer changed", pairs),
            *timings.known(base, half, "known, half the layers changed", pairs),
        ],
        "residency": several,
        "decode": lambda: decoding.decode(base, one, pairs),
    }
    rows = [row for part in measurements if part in parts for row in measurements[part]()]
    return rows, more
