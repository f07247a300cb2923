"""One line of the table of results."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.stats import Estimate, estimate, verdict

MIB = 1 << 20
Sides = Sequence[Sequence[float]]  # plain, ours


@dataclass(frozen=True)
class Row:
    """A measurement: both sides (empty where there is one), what is compared, aim and verdict."""

    name: str
    plain: str
    ours: str
    compared: str
    aim: str
    verdict: str

    def text(self) -> str:
        """As a line of a Markdown table."""
        cells = (self.name, self.plain, self.ours, self.compared, self.aim, self.verdict)
        return f"| {' | '.join(cells)} |"


HEAD = f"| measurement | plain vLLM | tensor-dedup | compared | aim | |\n{'| --- ' * 6}|"


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
    )


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
