"""Lines over steps, as a page of HTML that needs nothing, or as PNG by matplotlib."""

import html
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensor_dedup.cli.errors import WrongUse
from tensor_dedup.errors import UnsupportedError

_WIDTH, _HEIGHT, _MARGIN = 720, 180, 60
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;margin:2em}}h2{{font-size:1em;margin-bottom:0}}
svg text{{font-size:11px}}polyline{{fill:none;stroke:#1f6fb2;stroke-width:1.5}}
circle{{fill:#1f6fb2}}.axis{{stroke:#999}}</style></head>
<body><h1>{title}</h1>
{charts}
</body></html>
"""


@dataclass(frozen=True, slots=True)
class PlotSeries:
    """Values at steps; what is no finite number is left out."""

    title: str
    steps: Sequence[int]
    values: Sequence[float]

    @property
    def points(self) -> list[tuple[int, float]]:
        """The steps that have a value."""
        both = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in both if math.isfinite(value)]


def plot_to(path: Path, title: str, series: Sequence[PlotSeries]) -> None:
    """Write a file. WrongUse: its name ends in neither; UnsupportedError: no matplotlib."""
    if path.suffix == ".html":
        charts = "\n".join(_chart(each) for each in series)
        path.write_text(_PAGE.format(title=html.escape(title), charts=charts), encoding="utf-8")
    elif path.suffix == ".png":
        _png(path, title, series)
    else:
        raise WrongUse(f"{path} ends neither in .html nor in .png; name a file that does")


def _png(path: Path, title: str, series: Sequence[PlotSeries]) -> None:
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ImportError as error:
        raise UnsupportedError(
            "PNG needs matplotlib, which is not installed; `pip install matplotlib`, or write a "
            ".html file",
            path=str(path),
        ) from error
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(len(series), 1, figsize=(9, 2.5 * len(series)), squeeze=False)
    for each, (axis,) in zip(series, axes, strict=True):
        axis.plot([step for step, _ in each.points], [value for _, value in each.points], ".-")
        axis.set_title(each.title, fontsize=9)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _chart(series: PlotSeries) -> str:
    points = series.points
    if not points:
        return f"<h2>{html.escape(series.title)}</h2><p>no values</p>"
    low, high = min(0.0, *(v for _, v in points)), max(v for _, v in points)
    first, last = points[0][0], points[-1][0]

    def x(step: int) -> float:
        return _MARGIN + (step - first) / max(1, last - first) * (_WIDTH - 2 * _MARGIN)

    def y(value: float) -> float:
        return _HEIGHT - 25 - (value - low) / ((high - low) or 1.0) * (_HEIGHT - 40)

    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    dots = "".join(
        f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5">'
        f"<title>step {step}: {value:g}</title></circle>"
        for step, value in points
    )
    bottom = y(low)
    return (
        f"<h2>{html.escape(series.title)}</h2>"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">'
        f'<line class="axis" x1="{_MARGIN}" y1="{bottom}" x2="{_WIDTH - _MARGIN}" y2="{bottom}"/>'
        f'<line class="axis" x1="{_MARGIN}" y1="15" x2="{_MARGIN}" y2="{bottom}"/>'
        f'<text x="{_MARGIN - 5}" y="20" text-anchor="end">{high:.4g}</text>'
        f'<text x="{_MARGIN - 5}" y="{bottom}" text-anchor="end">{low:.4g}</text>'
        f'<text x="{_MARGIN}" y="{_HEIGHT - 8}">{first}</text>'
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 8}" text-anchor="end">{last}</text>'
        f'<polyline points="{line}"/>{dots}</svg>'
    )
