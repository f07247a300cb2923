"""Memory of several fine-tunes resident at once, against the bytes that are different in them."""

import shutil
from pathlib import Path

import psutil

from bench.fine_tunes import Content, contents, fine_tune
from bench.fresh_start import require_nothing_resident
from bench.loading import load
from bench.process_memory import pss, settle, touch
from bench.results import MIB, Row
from bench.stats import slope
from bench.turns import say
from demonstration.models import LAYERS

SIZES = (1, 2, 4, 8)
PLAIN_MOST = 4
# Layers that each fine-tune changes, and no other does.
CHANGED = LAYERS // max(SIZES)
# What one more plain model needs, its checkpoint in memory while it is read included; and a rest
# for others.
_PLAIN_BYTES = 3 << 30
_SPARE_BYTES = 4 << 30

Points = list[tuple[float, float]]


def several(base: Path, work: Path) -> tuple[list[Row], str]:
    """Rows with both slopes, and the points as a Markdown table."""
    ours = _grow(base, work, dedup=True, most=max(SIZES))
    plain = _grow(base, work, dedup=False, most=PLAIN_MOST)
    slopes = [[slope(points)] if len(points) > 1 else [] for points in (plain, ours)]
    rows = [
        Row(
            f"PSS of 1 to {max(SIZES)} fine-tunes, slope over unique bytes",
            f"{slopes[0][0]:.1f}" if slopes[0] else "not run: too little memory",
            f"{slopes[1][0]:.3f}",
            "bytes a byte, least squares",
            "",
            "",
            slopes,
        )
    ]
    return rows, _table(plain, ours)


def _grow(base: Path, work: Path, *, dedup: bool, most: int) -> Points:
    """(unique bytes, PSS) with 1, 2, 4, ... fine-tunes resident, each with other layers changed.

    Each checkpoint is made, loaded and deleted: what is measured is memory.
    """
    require_nothing_resident()
    before, points = pss(), Points()
    unique: dict[Content, int] = {}
    resident: list[object] = []
    path = work / "one-of-several"
    for number in range(most):
        if not dedup and psutil.virtual_memory().available < _PLAIN_BYTES + _SPARE_BYTES:
            break
        shutil.rmtree(path, ignore_errors=True)
        fine_tune(base, path, range(number * CHANGED, (number + 1) * CHANGED))
        unique.update(contents(path))
        model, _ = load(path, dedup=dedup)
        touch(model.parameters())
        resident.append(model)
        settle()
        if number + 1 in SIZES:
            points.append((sum(unique.values()), pss() - before))
        say(f"resident at once, {'sharing' if dedup else 'plain'}: {number + 1} of {most}")
    del model
    resident.clear()
    settle()
    shutil.rmtree(path, ignore_errors=True)
    return points


def _table(plain: Points, ours: Points) -> str:
    lines = [
        "| fine-tunes | unique bytes | PSS, plain vLLM | PSS, tensor-dedup |",
        "| --- | --- | --- | --- |",
    ]
    for index, (unique, found) in enumerate(ours):
        other = f"{plain[index][1] / MIB:.0f} MiB" if index < len(plain) else "not run"
        lines.append(
            f"| {SIZES[index]} | {unique / MIB:.0f} MiB | {other} | {found / MIB:.0f} MiB |"
        )
    return "\n".join(lines)
