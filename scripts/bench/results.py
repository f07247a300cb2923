"""What benchmarks measure: the values of both sides, and the line of a table that says them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.stats import Estimate, estimate, verdict

MIB = 1 << 20
Sides = Sequence[Sequence[float]]  # plain, ours: a value a pair
Figures = dict[str, Sides]


@dataclass(frozen=True)
class Row:
    """A measurement: both sides (empty where there is one), what is compared, aim and verdict."""

    name: str
    plain: str
    ours: str
    compared: str
    aim: str
    verdict: str
    sides: Sides = ((), ())

    def text(self) -> str:
        """As a line of a Markdown table."""
        cells = (self.name, self.plain, self.ours, self.compared, self.aim, self.verdict)
        return f"| {' | '.join(cells)} |"


def write_figures(path: Path, figures: Mapping[str, Sides]) -> None:
    """Write the values of both sides by what they are of, as JSON."""
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def table(rows: Sequence[Row], plain: str = "plain vLLM") -> list[str]:
    """Rows as a Markdown table; `plain` names the other side."""
    head = f"| measurement | {plain} | tensor-dedup | compared | aim | |"
    return [head, "| --- " * 6 + "|", *(row.text() for row in rows)]


def ratio_row(name: str, seconds: Sides, most: float | None = None) -> Row:
    """Seconds of both sides, and the median of the ratios of pairs, against an upper aim."""
    plain, ours = seconds
    ratio = estimate([b / a for a, b in zip(plain, ours, strict=True)])
    return Row(
        name,
        _seconds(plain),
        _seconds(ours),
        f"{ratio.text()} x",
        "" if most is None else f"≤ {most} x",
        "" if most is None else verdict(ratio, most=most),
        seconds,
    )


def extra_row(name: str, seconds: Sides, most: float) -> Row:
    """Seconds of both sides, and the median of the differences of pairs."""
    plain, ours = seconds
    extra = estimate([b - a for a, b in zip(plain, ours, strict=True)])
    return Row(
        name,
        _seconds(plain),
        _seconds(ours),
        f"{extra.text()} s more",
        f"≤ {most:.3f} s more",
        verdict(extra, most=most),
        seconds,
    )


def own_row(name: str, seconds: Sequence[float], most: float) -> Row:
    """Seconds of ours, which nothing is compared with."""
    found = estimate(seconds)
    aim = f"≤ {most:g} s"
    return Row(name, "", _seconds(seconds), "", aim, verdict(found, most=most), ((), seconds))


def mib(found: Estimate) -> str:
    """An estimate of bytes in MiB."""
    return estimate_scaled(found, MIB).text(2, "") + " MiB"


def estimate_scaled(found: Estimate, unit: float) -> Estimate:
    """The same in another unit."""
    low, high = found.spread
    return Estimate(
        found.median / unit,
        found.low / unit,
        found.high / unit,
        (low / unit, high / unit),
        found.count,
    )


def _seconds(values: Sequence[float]) -> str:
    return f"{estimate(values).text()} s"
