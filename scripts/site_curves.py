"""The curves of the study of substitution, drawn from its tables: quality against memory.

A curve is a form of a fine-tune at several sizes; each point has its interval, and is ringed where
nothing else in its table is both smaller and better.
"""

import html
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import site_charts

SECTION: Final = "substitution"
# By the titles of the section's tables.
CURVES: Final = {
    f"substitution-{task}": f"**{task}, everything**" for task in ("sections", "docstrings")
}
_FORM, _SIZE, _SCORE, _BEST = 0, 1, 2, 3
_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 16, 12, 40
_TICKS: Final = (1, 2, 5, 10, 20)
_MOST_TICKS: Final = 6
_POINTS: Final = r"([+-]?[\d.]+)"
_INTERVAL: Final = re.compile(rf"{_POINTS} \[{_POINTS}, {_POINTS}\]")
_INT: Final = re.compile(r"INT\d")


@dataclass(frozen=True, slots=True)
class PlottedForm:
    """A row of a table: a form of the fine-tune, its size in MB and its score with an interval."""

    form: str
    size: float
    score: float
    low: float
    high: float
    best: bool
    said: str

    @property
    def series(self) -> str:
        """The curve that it belongs to."""
        return "fewer bits" if _INT.match(self.form) else self.form


def plotted(name: str, text: str) -> list[PlottedForm]:
    """Return the rows of a curve's table, from the text of all tables.

    Raises:
        LookupError: the section or the table is not there.
    """
    found = list[PlottedForm]()
    for cells in _table(name, text)[1]:
        score = _INTERVAL.match(cells[_SCORE])
        if score is None:
            raise LookupError(f"{site_charts.TABLES}: no score in {cells}")
        middle, low, high = map(float, score.groups())
        best = cells[_BEST] == "best"
        said = f"{cells[_FORM]}: {cells[_SIZE]} MB, {cells[_SCORE]}"
        found.append(PlottedForm(cells[_FORM], float(cells[_SIZE]), middle, low, high, best, said))
    return found


def _table(name: str, text: str) -> tuple[list[str], list[list[str]]]:
    section = text.partition(f"<!-- {SECTION}: begin -->")[2].partition("<!-- ")[0]
    titles = re.findall(r"^\*\*.*\*\*$", section, re.MULTILINE)
    if CURVES[name] not in titles:
        raise LookupError(f"{site_charts.TABLES}: no {CURVES[name]} in {SECTION!r}")
    return site_charts.table(SECTION, titles.index(CURVES[name]), text)


def svg(name: str) -> str:
    """Return the drawing of curves as HTML in one line, as Markdown takes it."""
    text = site_charts.TABLES.read_text(encoding="utf-8")
    forms = plotted(name, text)
    unit = _table(name, text)[0][_SCORE]
    most = max(each.size for each in forms) * 1.04
    low, high = min(each.low for each in forms), max(each.high for each in forms)
    low, high = low - (high - low) * 0.04, high + (high - low) * 0.04

    def x(size: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * size / most

    def y(score: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - score) / (high - low)

    parts = []
    for at in _ticks(low, high):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(at):.1f}" '
            f'y2="{y(at):.1f}"/><text x="{_LEFT - 6}" y="{y(at) + 4:.1f}" '
            f'text-anchor="end">{at:g}</text>'
        )
    for at in _ticks(0, most):
        parts.append(
            f'<text x="{x(at):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{at:g}</text>'
        )
    series = dict[str, list[PlottedForm]]()
    for each in forms:
        series.setdefault(each.series, []).append(each)
    keys = []
    for number, (title, some) in enumerate(series.items()):
        some.sort(key=lambda each: each.size)
        path = " ".join(f"{x(each.size):.1f},{y(each.score):.1f}" for each in some)
        parts.append(f'<polyline class="c{number}" points="{path}"/>')
        parts += [_point(each, number, x(each.size), y) for each in some]
        keys.append(f'<span><i class="c{number}"></i>{html.escape(title)}</span>')
    parts.append(
        f'<text class="unit" x="{_LEFT}" y="{_HEIGHT - 6}">{html.escape(unit)}, by MB that a '
        "variant adds</text>"
    )
    told = "; ".join(each.said for each in forms)
    return (
        '<figure class="bars curves">'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{html.escape(f"{unit}. {told}")}">{"".join(parts)}</svg>'
        f"<figcaption>{' '.join(keys)}</figcaption></figure>"
    )


def _point(each: PlottedForm, number: int, at: float, y: Callable[[float], float]) -> str:
    ring = f'<circle class="best" cx="{at:.1f}" cy="{y(each.score):.1f}" r="7"/>'
    return (
        f"<g><title>{html.escape(each.said)}</title>"
        f'<line class="c{number}" x1="{at:.1f}" x2="{at:.1f}" y1="{y(each.low):.1f}" '
        f'y2="{y(each.high):.1f}"/>'
        f'<circle class="c{number}" cx="{at:.1f}" cy="{y(each.score):.1f}" r="4"/>'
        f"{ring if each.best else ''}</g>"
    )


def _ticks(low: float, high: float) -> list[float]:
    step = next(each for each in _TICKS if (high - low) / each <= _MOST_TICKS)
    return [step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
