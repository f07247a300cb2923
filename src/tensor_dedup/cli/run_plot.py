"""The HTML page of `runs plot`: one file with charts that needs no network and runs no script.

Colours follow the reader's light or dark scheme. Charts widen with the window, and stand side by
side if there is room. Tables below the charts have the same numbers.
"""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from typing import Final

from tensor_dedup.store.steps.retention import Mode, goal, ranked
from tensor_dedup.store.steps.runs import Step
from tensor_dedup.store.upkeep.run_sizes import Growth

_MIB: Final = 1 << 20
_WIDTH, _HEIGHT = 480, 230
_TOP, _BOTTOM, _RIGHT = 16, 44, 18
# The widest digit of a sans-serif font takes less, in parts of its size.
_DIGIT: Final = 0.62
_FONT: Final = 12
_TICKS: Final = 5
_COLOURS: Final = 6
# Ranges that are narrower, and values that are greater, are beyond what floats can divide.
_LEAST, _MOST = 1e-300, 1e304

_STYLE: Final = """
:root{color-scheme:light dark;--page:#fff;--text:#1b1f24;--muted:#57606a;--line:#d0d7de;
--new:#0969da;--encoded:#8250df;--shared:#afb8c1;--plain:#bc4c00;
--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;--c3:#8250df;--c4:#bf3989;--c5:#4d5d2b}
@media (prefers-color-scheme:dark){:root{--page:#0d1117;--text:#e6edf3;--muted:#9198a1;
--line:#3d444d;
--new:#58a6ff;--encoded:#bc8cff;--shared:#6e7681;--plain:#f0883e;
--c0:#58a6ff;--c1:#f0883e;--c2:#3fb950;--c3:#bc8cff;--c4:#f778ba;--c5:#b5c689}}
body{margin:0 auto;padding:1.5rem;max-width:120rem;background:var(--page);color:var(--text);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0}h2{font-size:1.2rem;margin:2rem 0 0}h3{font-size:1rem;margin:1rem 0 0}
p{margin:.3rem 0;color:var(--muted)}
.charts{display:grid;gap:1rem 2rem;
grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr))}
figure{margin:0;max-width:44rem}svg{display:block;width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--muted)}
.grid{stroke:var(--line);stroke-width:1}.line{fill:none;stroke-width:2}
.new{fill:var(--new)}.encoded{fill:var(--encoded)}.shared{fill:var(--shared)}
.keys{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;font-size:.85rem;color:var(--muted)}
.keys i{display:inline-block;width:.8em;height:.8em;margin-right:.4em;background:currentColor}
.table{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
th,td{padding:.2rem .8rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--muted);font-weight:600}td.text,th.text{text-align:left}
"""


@dataclass(frozen=True, slots=True)
class PlottedRun:
    """A run to plot: its steps, the space that each step added, and the step that was saved last.

    `growth` has an entry for each step.
    """

    run: str
    steps: Sequence[Step]
    growth: Sequence[Growth]
    latest: int

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics of the run, sorted."""
        return sorted({name for step in self.steps for name in step.metrics})

    def goal(self, metric: str) -> Mode | None:
        """Return whether the least ("min") or the greatest ("max") value of a metric is best.

        The result is None if this is not known.
        """
        return goal(metric, [step.goals for step in reversed(self.steps)])

    def best(self, metric: str) -> int | None:
        """Return the step with the best value of a metric.

        The result is None if no step has the metric, or if it is not known which value is best.
        """
        mode = self.goal(metric)
        found = ranked({s.step: s.metrics for s in self.steps}, metric, mode) if mode else []
        return found[0] if found else None


def page(runs: Sequence[PlottedRun]) -> str:
    """Return the page about one or more runs as HTML."""
    title = ", ".join(each.run for each in runs)
    parts = [_run(each) for each in runs]
    metrics = sorted({name for each in runs for name in each.metrics})
    if metrics:
        charts = "".join(_metric(name, runs) for name in metrics)
        marks = "★ best &nbsp; ◯ latest &nbsp; ◻ kept"
        parts.insert(
            len(parts) if len(runs) > 1 else 1,
            f'<section><h2>Metrics</h2><p>{marks}</p><div class="charts">{charts}</div></section>',
        )
    parts += [_table(each) for each in runs]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><main><h1>{html.escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _run(each: PlottedRun) -> str:
    """The bytes of a run: of each step, and altogether."""
    plain = list(accumulate(float(one.nbytes) / _MIB for one in each.growth))
    kept = list(accumulate(float(one.stored_bytes) / _MIB for one in each.growth))
    share = 100 * (1 - kept[-1] / plain[-1]) if plain[-1] else 0.0
    saved = f", {share:.0f} % saved" if share >= 0 else ""
    sizes = f"{len(each.steps)} x {plain[-1] / len(plain):,.1f} MiB = {plain[-1]:,.1f} MiB"
    return (
        f"<section><h2>{html.escape(each.run)}</h2>"
        f"<p>{sizes} kept in {kept[-1]:,.1f} MiB{saved}</p>"
        f'<div class="charts">{_bars(each)}{_growth(each, plain, kept)}</div></section>'
    )


@dataclass
class _Chart:
    """A chart in the making: its scales, and what is drawn on them."""

    low: float
    high: float
    first: float
    last: float
    y_name: str
    x_name: str = "step"
    marks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.high - self.low < _LEAST:
            pad = abs(self.low) * 0.05 or 1.0
            self.low, self.high = self.low - pad, self.high + pad
        self.ticks = ticks(self.low, self.high)
        self.low, self.high = min(self.low, self.ticks[0]), max(self.high, self.ticks[-1])
        self.labels = labels(self.ticks)
        # Room for the longest label and, beside it, the name of the axis.
        self.left = 30 + _DIGIT * _FONT * max(map(len, self.labels))

    def x(self, value: float) -> float:
        width = _WIDTH - self.left - _RIGHT
        return self.left + width * (value - self.first) / ((self.last - self.first) or 1.0)

    def y(self, value: float) -> float:
        height = _HEIGHT - _TOP - _BOTTOM
        return _HEIGHT - _BOTTOM - height * (value - self.low) / (self.high - self.low)

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool) -> None:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        dashes = ' stroke-dasharray="6 4"' if dashed else ""
        self.marks.append(
            f'<polyline class="line" style="stroke:var({colour})"{dashes} points="{path}"/>'
        )

    def point(self, shape: str, x: float, y: float, colour: str, told: str) -> None:
        at_x, at_y = self.x(x), self.y(y)
        self.marks.append(
            f"<g>{_SHAPES[shape](at_x, at_y, f'var({colour})')}"
            f"<title>{html.escape(told)}</title></g>"
        )

    def svg(self, told: str, x_labels: Iterable[tuple[float, str]]) -> str:
        """Return the drawing; `told` says it for those who do not see it."""
        bottom, middle = _HEIGHT - _BOTTOM, (_TOP + _HEIGHT - _BOTTOM) / 2
        parts = []
        for tick, label in zip(self.ticks, self.labels, strict=True):
            y = self.y(tick)
            parts.append(
                f'<line class="grid" x1="{self.left:.1f}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" '
                f'y2="{y:.1f}"/><text class="y" x="{self.left - 6:.1f}" y="{y + 4:.1f}" '
                f'text-anchor="end">{label}</text>'
            )
        for at, label in x_labels:
            parts.append(
                f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{label}</text>'
            )
        middle_x = (self.left + _WIDTH - _RIGHT) / 2
        parts += [
            f'<text x="{middle_x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{self.x_name}</text>',
            f'<text transform="translate(12 {middle:.1f}) rotate(-90)" text-anchor="middle">'
            f"{html.escape(self.y_name)}</text>",
        ]
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(told)}">'
            f"{''.join(parts)}{''.join(self.marks)}</svg>"
        )


def _star(x: float, y: float, colour: str) -> str:
    corners = (
        (
            x + (8, 3.4)[n % 2] * math.sin(n * math.pi / 5),
            y - (8, 3.4)[n % 2] * math.cos(n * math.pi / 5),
        )
        for n in range(10)
    )
    points = " ".join(f"{px:.1f},{py:.1f}" for px, py in corners)
    return f'<polygon points="{points}" style="fill:{colour};stroke:var(--page)"/>'


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" style="fill:{colour}"/>'


def _ring(x: float, y: float, colour: str) -> str:
    style = f"fill:none;stroke:{colour};stroke-width:2"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" style="{style}"/>'


def _square(x: float, y: float, colour: str) -> str:
    style = f"fill:none;stroke:{colour};stroke-width:1.5"
    return f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" style="{style}"/>'


_SHAPES: Final[Mapping[str, Callable[[float, float, str], str]]] = {
    "star": _star,
    "dot": _dot,
    "ring": _ring,
    "square": _square,
}


def ticks(low: float, high: float) -> list[float]:
    """Return axis ticks: evenly spaced round numbers that cover the range from `low` to `high`."""
    rough = (high - low) / _TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def labels(values: Sequence[float]) -> list[str]:
    """Return axis labels for numbers, with only as many digits as it takes to tell them apart."""
    for digits in range(1, 17):
        found = [f"{value:,.0f}" if _is_plain(value) else f"{value:.{digits}g}" for value in values]
        if len(set(found)) == len(values) and all(
            math.isclose(float(text.replace(",", "")), value, rel_tol=1e-9, abs_tol=1e-300)
            for text, value in zip(found, values, strict=True)
        ):
            return found
    return [f"{value:.17g}" for value in values]


def _is_plain(value: float) -> bool:
    return abs(value) < 1e7 and math.isclose(value, round(value), rel_tol=1e-9)


def _bars(each: PlottedRun) -> str:
    """What each step is made of: what it adds to the disk, what encoding saves, what was there."""
    parts = [
        (
            one,
            one.stored_bytes / _MIB,
            max(0, one.new_bytes - one.stored_bytes) / _MIB,
            max(0, one.nbytes - one.new_bytes) / _MIB,
        )
        for one in each.growth
    ]
    high = max(sum(sizes) for _, *sizes in parts)
    chart = _Chart(0.0, high, 0.0, float(len(parts)), "MiB")
    gap = 0.15 if len(parts) < 200 else 0.0
    for number, (one, *sizes) in enumerate(parts):
        x, width = chart.x(number + gap), chart.x(number + 1 - gap) - chart.x(number + gap)
        told = f"step {one.step}: " + ", ".join(
            f"{size:,.2f} MiB {what}" for size, what in zip(sizes, _KINDS.values(), strict=True)
        )
        top, rows = 0.0, []
        for kind, size in zip(_KINDS, sizes, strict=True):
            if size > 0:
                y, top = chart.y(top + size), top + size
                height = chart.y(top - size) - y
                rows.append(
                    f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" '
                    f'height="{height:.2f}"/>'
                )
        chart.marks.append(f"<g>{''.join(rows)}<title>{told}</title></g>")
    told = f"Bytes of each of {len(parts)} steps of {each.run}, in MiB; the table below has them"
    keys = ((f"--{kind}", what) for kind, what in _KINDS.items())
    return _figure("Each step", chart.svg(told, _step_labels(chart, each)), keys)


_KINDS: Final = {
    "new": "new on disk",
    "encoded": "new, saved by encoding",
    "shared": "shared with earlier steps",
}


def _step_labels(chart: _Chart, each: PlottedRun) -> list[tuple[float, str]]:
    """The steps under a chart with as much room for each, as many as do not touch each other."""
    texts = [str(one.step) for one in each.growth]
    room = (_WIDTH - _RIGHT - chart.left) / (_DIGIT * _FONT * max(map(len, texts)) + _FONT)
    every = math.ceil(len(texts) / max(1.0, room))
    return [(chart.x(n + 0.5), text) for n, text in enumerate(texts) if n % every == 0]


def _growth(each: PlottedRun, plain: Sequence[float], kept: Sequence[float]) -> str:
    """What the run takes up to each step, against a plain file for each."""
    chart = _Chart(0.0, max(*plain, *kept), 0.0, float(len(plain)), "MiB")
    for sizes, colour, dashed in ((plain, "--plain", True), (kept, "--new", False)):
        points = [(number + 0.5, size) for number, size in enumerate(sizes)]
        chart.line(points, colour, dashed=dashed)
        for one, (x, size) in zip(each.growth, points, strict=True):
            chart.point("dot", x, size, colour, f"up to step {one.step}: {size:,.2f} MiB")
    told = f"{each.run} takes {kept[-1]:,.1f} MiB; plain files would take {plain[-1]:,.1f} MiB"
    keys = (("--plain", "plain files, one a step"), ("--new", "this run in the store"))
    drawing = chart.svg(told, _step_labels(chart, each))
    return _figure("All steps so far", drawing, keys)


def _metric(name: str, runs: Sequence[PlottedRun]) -> str:
    """One metric of all runs, on its own range."""
    lines = [
        (number, each, [(s.step, s.metrics[name]) for s in each.steps if name in s.metrics])
        for number, each in enumerate(runs)
    ]
    drawn = [
        (number, each, [(step, value) for step, value in points if abs(value) < _MOST])
        for number, each, points in lines
    ]
    values = [value for _, _, points in drawn for _, value in points]
    if not values:
        return f"<figure><h3>{html.escape(name)}</h3><p>no finite values</p></figure>"
    steps = [step for _, _, points in drawn for step, _ in points]
    chart = _Chart(min(values), max(values), float(min(steps)), float(max(steps)), name)
    for number, each, points in drawn:
        colour = f"--c{number % _COLOURS}"
        chart.line([(float(step), value) for step, value in points], colour, dashed=False)
        best, kept = each.best(name), {s.step for s in each.steps if s.kept}
        for step, value in points:
            marks = {"square": step in kept, "ring": step == each.latest, "star": step == best}
            what = [_MARKS[mark] for mark, there in marks.items() if there]
            told = f"{each.run}@{step}: {value:g}" + "".join(f", {word}" for word in what)
            for mark in ["dot", *(mark for mark, there in marks.items() if there)]:
                chart.point(mark, float(step), value, colour, told)
    first, last = min(steps), max(steps)
    x_labels = [(chart.x(first), f"{first}")] + [(chart.x(last), f"{last}")] * (last > first)
    told = f"{name} from step {first} to {last}, between {min(values):g} and {max(values):g}"
    keys = [(f"--c{number % _COLOURS}", each.run) for number, each, points in drawn if points]
    return _figure(name, chart.svg(told, x_labels), keys if len(runs) > 1 else [])


_MARKS: Final = {"square": "kept", "ring": "latest", "star": "best"}


def _figure(title: str, drawing: str, keys: Iterable[tuple[str, str]]) -> str:
    told = "".join(
        f'<span><i style="color:var({colour})"></i>{html.escape(what)}</span>'
        for colour, what in keys
    )
    named = f'<figcaption class="keys">{told}</figcaption>' if told else ""
    return f"<figure><h3>{html.escape(title)}</h3>{drawing}{named}</figure>"


def _table(each: PlottedRun) -> str:
    """All numbers that are drawn, one row a step."""
    names = each.metrics
    best = {name: each.best(name) for name in names}
    heads = ["MiB", *(f"MiB {what}" for what in _KINDS.values()), *names]
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    rows = []
    for step, one in zip(each.steps, each.growth, strict=True):
        encoded = max(0, one.new_bytes - one.stored_bytes)
        shared = max(0, one.nbytes - one.new_bytes)
        cells = [f"{n / _MIB:,.2f}" for n in (one.nbytes, one.stored_bytes, encoded, shared)]
        for name in names:
            star = " ★" * (best[name] == step.step)
            cells.append(f"{step.metrics[name]:g}{star}" if name in step.metrics else "")
        said = ["latest"] * (step.step == each.latest) + ["kept"] * step.kept
        saved = datetime.fromtimestamp(step.saved_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        rows.append(
            f'<tr><th scope="row">{step.step}</th>'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + f'<td class="text">{", ".join(said)}</td><td class="text">{saved}</td></tr>'
        )
    return (
        f"<section><h2>Steps of {html.escape(each.run)}</h2>"
        f'<div class="table" tabindex="0" role="region" aria-label="Steps of '
        f'{html.escape(each.run)}"><table><thead><tr><th scope="col">step</th>{head}'
        '<th class="text" scope="col">mark</th><th class="text" scope="col">saved</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )
