"""Times of loads against plain vLLM, and the memory that a known fine-tune takes."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from bench.fine_tunes import WEIGHTS, differing_bytes
from bench.fresh_start import forget_hints, require_nothing_resident
from bench.loading import Load, load, load_and_drop, make_known
from bench.process_memory import allocated, drop_pages, pss, read_pages, settle, touch
from bench.results import MIB, Row, extra_row, mib, own_row, ratio_row
from bench.stats import estimate, verdict
from bench.turns import in_pairs
from tensor_dedup import UnsupportedError
from tensor_dedup.patches.vllm.run import LoadRun

COLD_MOST = 1.02
AGAIN_MOST = 0.05
PLANNING_MOST = 5.0
PLANNED_MOST = 1.0
HASH_BYTES_A_SECOND = 4e9
PSS_MOST = 32 * MIB


def unknown(base: Path, pairs: int) -> list[Row]:
    """A checkpoint never seen, with nothing resident: its file cold, then its file cached."""
    require_nothing_resident()
    file = base / WEIGHTS
    cold = in_pairs(pairs, "unknown, cold", *_both(base, lambda: drop_pages(file)))
    warm = in_pairs(pairs, "unknown, warm", *_both(base, lambda: read_pages(file)))
    cores = len(os.sched_getaffinity(0))
    allowed = file.stat().st_size / (HASH_BYTES_A_SECOND * cores)
    return [
        ratio_row("unknown checkpoint, file cold", _net(cold), COLD_MOST),
        ratio_row("unknown checkpoint, file cold, with collections", _totals(cold)),
        extra_row("unknown checkpoint, file cached", _net(warm), allowed),
        ratio_row("unknown checkpoint, file cached, as a ratio", _net(warm)),
        ratio_row("unknown checkpoint, file cached, with collections", _totals(warm)),
    ]


def _both(path: Path, prepare: Callable[[], None]) -> tuple[Callable[[], Load], Callable[[], Load]]:
    def plain() -> Load:
        prepare()
        return load_and_drop(path, dedup=False)

    def ours() -> Load:
        forget_hints()
        prepare()
        found = load_and_drop(path, dedup=True)
        if found.report is None or found.report.known or found.report.shared_bytes:
            raise UnsupportedError(f"{path} was known or shared something; nothing to measure")
        return found

    return plain, ours


def again(base: Path, pairs: int) -> list[Row]:
    """A model that is resident already, loaded once more."""
    require_nothing_resident()
    make_known(base)
    resident, _ = load(base, dedup=True)
    found = in_pairs(
        pairs,
        "same model again",
        lambda: load_and_drop(base, dedup=False),
        lambda: _resident_load(base),
    )
    del resident
    settle()
    return [
        ratio_row("same model again, weight phase", _phases(found), AGAIN_MOST),
        ratio_row("same model again, whole load", _totals(found)),
    ]


def planning(path: Path, tensors: int, times: int) -> list[Row]:
    """What comes before the first byte is read or shared: with nothing resident, with everything.

    Processor time of the thread that does all of it.
    """
    require_nothing_resident()
    make_known(path)
    without = [_planning_seconds(path, planned=False) for _ in range(times)]
    resident, _ = load(path, dedup=True)
    known = [_planning_seconds(path, planned=True) for _ in range(times)]
    del resident
    settle()
    what = f"planning {tensors:,} expert tensors"
    return [
        own_row(f"{what}, nothing resident", without, PLANNING_MOST),
        own_row(f"{what}, all resident", known, PLANNED_MOST),
    ]


def _planning_seconds(path: Path, *, planned: bool) -> float:
    """Load, and return the processor time of looking for a plan and, without one, of tracing."""
    spent: list[float] = []
    followed: list[bool] = []

    def timed(work: Callable[..., bool]) -> Callable[..., bool]:
        def call(*args: object, **kwargs: object) -> bool:
            began = time.thread_time()
            result = work(*args, **kwargs)
            spent.append(time.thread_time() - began)
            followed.append(work is follow and result)
            return result

        return call

    follow = LoadRun.follow_plan
    with (
        patch.object(LoadRun, "follow_plan", timed(follow)),
        patch.object(LoadRun, "trace", timed(LoadRun.trace)),
    ):
        load_and_drop(path, dedup=True)
    if any(followed) != planned:
        raise UnsupportedError(f"{path}: a plan was {'not ' if planned else ''}followed")
    return sum(spent)


def _resident_load(base: Path) -> Load:
    found = load_and_drop(base, dedup=True)
    if found.report is None or found.report.bytes_read:
        raise UnsupportedError(f"{base} is resident, and yet was read")
    return found


@dataclass(frozen=True)
class _Sized:
    """A load, and what the process grew by while its model was there."""

    load: Load
    allocated: int = 0
    pss: int = 0


def known(base: Path, fine_tuned: Path, name: str, pairs: int) -> list[Row]:
    """A known fine-tune beside its resident base."""
    require_nothing_resident()
    make_known(base)
    make_known(fine_tuned)
    differ = differing_bytes(base, fine_tuned)
    resident, _ = load(base, dedup=True)
    touch(resident.parameters())
    again: list[_Sized] = []

    def ours() -> _Sized:
        again.append(_sized(base))
        return _sized(fine_tuned)

    plain, mine = in_pairs(
        pairs, name, lambda: _Sized(load_and_drop(fine_tuned, dedup=False)), ours
    )
    del resident
    settle()
    both = [[each.load for each in side] for side in (plain, mine)]
    return [
        ratio_row(f"{name}, whole load", _totals(both)),
        ratio_row(f"{name}, weight phase", _phases(both)),
        *_memory(name, differ, mine, again),
    ]


def _sized(path: Path) -> _Sized:
    settle()
    before = allocated(), pss()
    model, found = load(path, dedup=True)
    touch(model.parameters())
    settle()
    after = allocated(), pss()
    del model
    settle()
    return _Sized(found, after[0] - before[0], after[1] - before[1])


def _memory(name: str, differ: int, mine: list[_Sized], again: list[_Sized]) -> list[Row]:
    made = {each.load.report.bytes_materialised for each in mine if each.load.report is not None}
    both = list(zip(mine, again, strict=True))
    malloc = estimate([own.allocated - other.allocated - differ for own, other in both])
    grown = [float(own.pss - other.pss - differ) for own, other in both]
    resident = estimate(grown)
    size = f"{differ / MIB:.2f} MiB differ"
    return [
        Row(
            f"{name}, weights given memory",
            "",
            ", ".join(f"{each:,} B" for each in sorted(made)),
            f"{differ:,} B differ",
            "equal",
            "met" if made == {differ} else "missed",
        ),
        Row(f"{name}, allocator's growth less what differs", "", mib(malloc), size, "", ""),
        Row(
            f"{name}, PSS growth less what differs",
            "",
            mib(resident),
            size,
            "within ± 32 MiB",
            verdict(resident, least=-PSS_MOST, most=PSS_MOST),
            ((), grown),
        ),
    ]


def _totals(sides: list[list[Load]]) -> list[list[float]]:
    return [[each.seconds for each in side] for side in sides]


def _net(sides: list[list[Load]]) -> list[list[float]]:
    return [[each.net for each in side] for side in sides]


def _phases(sides: list[list[Load]]) -> list[list[float]]:
    return [[each.weights for each in side] for side in sides]
