"""What it costs to publish each step of a real training, beside other ways to send it.

    python scripts/bench/publish.py [--only SETUP] [--steps N | --quick] [--warm-up N]
                                    [--millions N] [--work DIR] [--json FILE] [--write]

A Llama with random weights of the usual initial scale is trained in bf16 on text, with AdamW, with
a copy of the weights in float32 and without. Each step is published to an S3 server behind a proxy
that counts what goes through its sockets, and to a folder; a host that follows pulls it. The same
step is counted in the formats of TRL (index and value of each changed element) and slime (XOR with
the step before, zstd-1), and whole. Prints a section of Markdown; `--write` puts it into
docs/benchmarks/tables.md.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
# Of the tests' helpers, the server and the proxy that counts.
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import click
import numpy as np
import torch
import zstandard

from bench import options
from bench.publish_training import SETUPS, Setup, Training, Weights
from bench.results import Figures, write_figures
from bench.stats import Section
from bench.turns import say
from demonstration import models
from remote_runs.remotes import Proxy, s3
from tensor_dedup import Publisher, Store

PACKAGES: Final = ("torch", "transformers", "zstandard", "obstore")
HEAD: Final = (
    "| training | changed since the step before | since the first | a follower fetches | aim | |"
    " the trainer sends | a folder grows by | TRL: int32 + bf16 | slime: XOR + zstd-1 |"
    " GB of model a CPU second | slime |\n"
    f"{'| --- ' * 12}|"
)
_NOTES: Final = """\
- Shares of the bytes of the whole model, means of all steps but the first, which is sent whole;
  *since the first* is of the last step. *Fetches* and *sends* are all that goes through the sockets
  in both directions, headers included.
- *Aim*: 0.75 % at 1 % of changed elements and 1.8 % at 3 %, and on the line through both.
- *A CPU second* is one of a publish to a folder, which hashes, encodes, and decodes to compare; for
  slime, one of XOR and zstd-1 alone.
- TRL's format is 6 bytes for each changed element; slime's is computed for each tensor.
"""
_TRL_BYTES: Final = 6


@dataclass(frozen=True)
class Cost:
    """One step: shares of changed elements, and of the bytes of the model."""

    changed: float
    since_first: float
    fetched: float
    sent: float
    stored: float
    trl: float
    slime: float
    rate: float
    slime_rate: float


@click.command(context_settings=options.CONTEXT)
@options.repeats("--steps", 50)
@options.only([setup.name for setup in SETUPS])
@click.option("--warm-up", default=20, show_default=True, help="Steps before the first published.")
@click.option("--millions", default=100, show_default=True, help="Parameters of the model.")
@options.work("five times the model")
@options.json_file("what each step costs")
@options.write
def main(
    steps: int,
    quick: bool,
    only: tuple[str, ...],
    warm_up: int,
    millions: int,
    work: Path | None,
    json_file: Path | None,
    write: bool,
) -> None:
    """Publish the steps of trainings."""
    steps, warm_up, millions = (options.QUICK, 1, 1) if quick else (steps, warm_up, millions)
    folder = work or models.default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    figures, lines = Figures(), [HEAD]
    section = Section("publish.py", "Publishing the steps of a training", PACKAGES)
    for setup in SETUPS:
        if setup.name in (only or [each.name for each in SETUPS]):
            with tempfile.TemporaryDirectory(dir=folder, prefix="publish-bench-") as root:
                training = Training(setup, millions)
                for _ in range(warm_up):
                    training.step()
                costs = [*_costs(training, steps, Path(root))]
            lines.append(_line(setup, costs))
            nbytes = training.nbytes
            figures[f"{setup.name}: bytes that a follower fetches"] = (
                [_aim(_mean(costs, "changed")) * nbytes],
                [_mean(costs, "fetched") * nbytes],
            )
            say(lines[-1])
    how = f"{steps} steps of a model of {millions} million parameters, after {warm_up}"
    section.finish("publish", how, lines, _NOTES, write=write)
    if json_file is not None:
        write_figures(json_file, figures)


def _costs(training: Training, steps: int, root: Path) -> Iterator[Cost]:
    """Publish so many steps; yield what each but the first costs."""
    url = "s3://bucket/policy"
    first = before = training.weights()
    nbytes = sum(each.nbytes for each in before.values())
    with (
        s3() as proxy,
        Publisher(url, work=root / "work") as remote,
        Publisher(root / "policy") as folder,
    ):
        follower = Store.open(root / "host")
        for step in range(steps + 1):
            if step:
                training.step()
            now = training.weights()
            began = time.process_time()
            published = folder.publish(training.model, step)
            seconds = time.process_time() - began
            sent = _counted(proxy, lambda step=step: remote.publish(training.model, step))
            fetched = _counted(proxy, lambda step=step: follower.pull(url, f"policy@{step}"))
            if step:
                slime, slime_seconds = _slime(now, before)
                changed = _changed(now, before)
                yield Cost(
                    changed,
                    _changed(now, first),
                    fetched / nbytes,
                    sent / nbytes,
                    published.stored_bytes / nbytes,
                    changed * _TRL_BYTES / 2,
                    slime / nbytes,
                    nbytes / 1e9 / seconds,
                    nbytes / 1e9 / slime_seconds,
                )
                if step > 1:
                    follower.delete(f"policy@{step - 2}")
            say(f"step {step} of {steps}: sent {sent / nbytes:.2%}, fetched {fetched / nbytes:.2%}")
            before = now


def _counted(proxy: Proxy, work: object) -> int:
    assert callable(work)
    before = proxy.nbytes
    work()
    return proxy.nbytes - before


def _changed(one: Weights, other: Weights) -> float:
    """The share of elements whose bits differ."""
    differing = sum(int((one[name] != other[name]).sum()) for name in one)
    return differing / sum(each.numel() for each in one.values())


def _slime(now: Weights, before: Weights) -> tuple[int, float]:
    """The bytes that slime would send, and the CPU seconds that XOR and zstd-1 take."""
    began, nbytes = time.process_time(), 0
    compressor = zstandard.ZstdCompressor(level=1)
    for name, tensor in now.items():
        diff = np.bitwise_xor(tensor.numpy(), before[name].numpy())
        if diff.any():
            nbytes += len(compressor.compress(diff.view(np.uint8).reshape(-1)))
    return nbytes, time.process_time() - began


def _aim(changed: float) -> float:
    return 0.0075 + (changed - 0.01) * (0.018 - 0.0075) / 0.02


def _mean(costs: list[Cost], name: str) -> float:
    values: list[float] = [getattr(each, name) for each in costs]
    return statistics.fmean(values)


def _line(setup: Setup, costs: list[Cost]) -> str:
    def mean(name: str) -> float:
        return _mean(costs, name)

    aim, fetched = _aim(mean("changed")), mean("fetched")
    cells = (
        setup.name,
        f"{mean('changed'):.2%}",
        f"{costs[-1].since_first:.1%}",
        f"{fetched:.2%}",
        f"≤ {aim:.2%}",
        "met" if fetched <= aim else "missed",
        *(f"{mean(name):.2%}" for name in ("sent", "stored", "trl", "slime")),
        *(f"{mean(name):.2f}" for name in ("rate", "slime_rate")),
    )
    return f"| {' | '.join(cells)} |".replace("%", " %")


if __name__ == "__main__":
    main()
