"""The measurements of pipelines.py. Import it only after the environment is set."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from bench.fresh_start import forget_hints, require_nothing_resident
from bench.process_memory import drop_pages, pss, read_pages, settle, touch
from bench.results import MIB, Row, mib, ratio_row
from bench.stats import estimate, verdict
from bench.turns import in_pairs
from tensor_dedup import report
from tensor_dedup.loader.checkpoint_io.hints import QUIET_NS

# What a second pipeline may cost beyond what differs.
_ALLOWED_SHARE, _ALLOWED_BYTES = 0.02, 16 * MIB
# How long a pipeline may take until all was read: (which, state) -> times plain loading's.
_MOST = {
    (0, "cold, unknown"): 1.02,
    (0, "cached, unknown"): 1.5,
    (1, "cached, known"): 1.2,
}


@dataclass(frozen=True)
class Load:
    """One of two loads: seconds to load, seconds until all was read, and memory added.

    `read` are the bytes that were fetched of files or a store; 0 of a plain load, which maps.
    """

    seconds: float
    used: float
    added: int
    read: int


Both = tuple[Load, Load]


def run(paths: Sequence[Path], pairs: int, store: Path | None = None) -> list[Row]:
    """All rows. With a store, ours loads `store://NAME` from it."""
    for each in (diffusers.utils.logging, transformers.utils.logging):
        logging: Any = each
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    _wait_until_quiet(paths)
    differs = _differing_bytes(paths)
    for dedup in (False, True):  # imports and first uses are no pipeline's cost
        _both(paths, dedup=dedup, cold=False, known=True, store=store)
    return [
        row
        for cold in (True, False)
        for known in ((False, True) if store is None else (True,))
        for row in _rows(paths, pairs, differs, cold=cold, known=known, store=store)
    ]


def _rows(
    paths: Sequence[Path],
    pairs: int,
    differs: int,
    *,
    cold: bool,
    known: bool,
    store: Path | None,
) -> Iterator[Row]:
    how = "unknown" if not known else "known" if store is None else "from a store"
    state = f"{'cold' if cold else 'cached'}, {how}"

    def side(dedup: bool) -> Callable[[], Both]:
        return lambda: _both(paths, dedup=dedup, cold=cold, known=known, store=store)

    plain, ours = in_pairs(pairs, state, side(False), side(True))
    for index, which in enumerate(("first", "second")):
        sides = [[both[index].seconds for both in found] for found in (plain, ours)]
        yield ratio_row(f"{which} pipeline, {state}: seconds to load", sides)
        sides = [[both[index].used for both in found] for found in (plain, ours)]
        name = f"{which} pipeline, {state}: until all was read"
        yield ratio_row(name, sides, _MOST.get((index, state)))
    added = [[float(both[1].added) for both in found] for found in (plain, ours)]
    excess = estimate([value - differs for value in added[1]])
    most_excess = max(_ALLOWED_SHARE * estimate(added[0]).median, _ALLOWED_BYTES)
    yield Row(
        f"second pipeline, {state}: added memory",
        mib(estimate(added[0])),
        mib(estimate(added[1])),
        f"{mib(excess)} beyond the {differs / MIB:.2f} MiB that differ",
        f"≤ {most_excess / MIB:.1f} MiB",
        verdict(excess, most=most_excess),
    )
    if known:
        read = estimate([float(both[1].read - differs) for both in ours])
        yield Row(
            f"second pipeline, {state}: bytes read",
            "",
            mib(estimate([float(both[1].read) for both in ours])),
            f"{mib(read)} beyond the {differs / MIB:.2f} MiB that differ",
            f"≤ {_ALLOWED_SHARE:.0%} of these",
            verdict(read, most=_ALLOWED_SHARE * differs),
        )


def _both(
    paths: Sequence[Path], *, dedup: bool, cold: bool, known: bool, store: Path | None
) -> Both:
    """Load one after the other into one process, then let both go."""
    require_nothing_resident()
    if dedup and not known:
        forget_hints()
    for path in paths if store is None or not dedup else [store]:
        for file in (each for each in path.rglob("*") if each.is_file() and each.stat().st_size):
            (drop_pages if cold else read_pages)(file)
    kept: list[Any] = []
    found = [_load(path, dedup, kept, store) for path in paths]
    kept.clear()
    return found[0], found[1]


def _load(path: Path, dedup: bool, kept: list[Any], store: Path | None) -> Load:
    settle()
    before = pss()
    kind: Any = diffusers.DiffusionPipeline
    options: dict[str, Any] = {"tensor_dedup": True} if dedup else {}
    given: Path | str = path
    if store is not None and dedup:
        given, options = f"store://{path.name}", {"tensor_dedup": {"store": str(store)}}
    began = time.perf_counter()
    pipeline = kind.from_pretrained(given, dtype=torch.float16, local_files_only=True, **options)
    loaded = time.perf_counter()
    touch(_parameters(pipeline).values())
    used = time.perf_counter()
    kept.append(pipeline)
    gc.collect()
    settle()
    read = report().models[-1].bytes_read if dedup else 0
    return Load(loaded - began, used - began, pss() - before, read)


def _parameters(pipeline: Any) -> dict[str, nn.Parameter]:
    parts = ((n, c) for n, c in pipeline.components.items() if isinstance(c, nn.Module))
    return {f"{name}.{key}": p for name, part in parts for key, p in part.named_parameters()}


def _differing_bytes(paths: Sequence[Path]) -> int:
    kind: Any = diffusers.DiffusionPipeline
    first, second = (
        _parameters(kind.from_pretrained(path, dtype=torch.float16, local_files_only=True))
        for path in paths
    )
    return sum(
        p.nbytes for name, p in second.items() if name not in first or not p.equal(first[name])
    )


def _wait_until_quiet(paths: Sequence[Path]) -> None:
    """Hints are kept only of files that nobody has written just before."""
    newest = max(file.stat().st_ctime_ns for path in paths for file in path.rglob("*.safetensors"))
    time.sleep(max(0.0, (newest + QUIET_NS - time.time_ns()) / 1e9 + 0.1))
