"""What a push and a pull of a fine-tune send and receive, whatever else the remote holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.results import Figures
from bench.turns import say
from remote_runs import many_checkpoints
from remote_runs.bounds import Cost, Scene
from remote_runs.remotes import MemoryBucket

MIB: Final = 1 << 20
HEAD: Final = (
    "| other checkpoints | transfer | missing | on the wire | at most | requests | at most | |\n"
    f"{'| --- ' * 8}|"
)


@dataclass(frozen=True)
class _Past:
    """What a remote holds beside the base."""

    count: int
    swept: bool

    @property
    def name(self) -> str:
        return f"{self.count:,}" + ("" if self.swept else ", never swept")

    def enter(self, bucket: MemoryBucket) -> None:
        if self.count:
            many_checkpoints.add(bucket, self.count, swept=self.swept)


PASTS: Final = (_Past(0, True), _Past(100, True), _Past(10_000, True), _Past(10_000, False))


def wire(root: Path, figures: Figures, *, quick: bool) -> Iterator[str]:
    """Count what fine-tunes of a base of 980 MB cost (1.5 MB if `quick`); the lines of a table."""
    say("a base, and fine-tunes")
    scene = Scene(root, layers=6 if quick else 36, layer_bytes=MIB // 4 if quick else 26 * MIB)
    yield HEAD
    for past in PASTS[:2] if quick else PASTS:
        say(f"{past.name} other checkpoints")
        for cost in scene.costs(past.enter):
            if cost.missing:
                name = f"{cost.verb} of {cost.kind}, {past.name}"
                figures[f"{name}: bytes"] = [[cost.most_bytes], [cost.nbytes]]
                figures[f"{name}: requests"] = [[cost.most_requests], [cost.requests]]
            yield _line(past.name, cost)


def _line(past: str, cost: Cost) -> str:
    again = "" if cost.missing else ", again"
    counts = (cost.missing, cost.nbytes, cost.most_bytes, cost.requests, cost.most_requests)
    cells = (past, f"{cost.verb}, {cost.kind}{again}", *(f"{each:,}" for each in counts))
    return f"| {' | '.join(cells)} | {'met' if cost.is_met else 'missed'} |"
