"""Rounds of loads and imports, in random order, and what follows from them."""

import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from bench.process_memory import drop_pages, read_pages, settle, touch
from bench.results import Row
from bench.stats import Estimate, estimate, verdict
from bench.store_methods import OURS, Method, Tensorfs
from bench.turns import say, timed
from tensor_dedup import Store

TENSORFS_LEAST = 2.0
Seconds = dict[str, list[float]]
State = Callable[[Path], None]
STATES: Mapping[str, State] = {"cold": drop_pages, "warm": read_pages}
GB = 1e9


def rounds(methods: Sequence[Method], state: str, count: int) -> Seconds:
    """`count` loads by each method, one after the other in an order drawn for each round."""
    order = random.Random(0)
    found: Seconds = {method.name: [] for method in methods}
    for number in range(count):
        for method in order.sample(methods, len(methods)):
            settle()
            for path in method.files():
                STATES[state](path)
            began = time.perf_counter()
            tensors = method.load()
            touch(tensors.values())
            found[method.name].append(time.perf_counter() - began)
            del tensors
            method.release()
        say(f"{state}: {number + 1} of {count}")
    settle()
    return found


def rates(found: Mapping[str, Seconds], nbytes: int) -> str:
    """Median seconds and GB/s of every method in every state, as a table."""
    states = list(found)
    head = "| load to CPU tensors | " + " | ".join(f"{s}, s | {s}, GB/s" for s in states) + " |"
    lines = [head, "| --- " * (1 + 2 * len(states)) + "|"]
    for name in found[states[0]]:
        cells = [name]
        for state in states:
            seconds = found[state][name]
            speed = [nbytes / GB / value for value in seconds]
            cells += [estimate(seconds).text(2), estimate(speed).text(2)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def comparisons(found: Mapping[str, Seconds], best_of: str) -> list[Row]:
    """Our loads against the best of each state, and against tensorfs."""
    rows = []
    for state, seconds in found.items():
        best = min(seconds, key=lambda name: estimate(seconds[name]).median)
        for method in OURS:
            if method.name in seconds:
                rows.append(_against_best(state, seconds, method.name, best, best_of))
    cold = found.get("cold", {})
    if Tensorfs.name in cold:
        for method in OURS:
            ratio = _ratio(cold[Tensorfs.name], cold[method.name])
            rows.append(
                Row(
                    f"cold: {method.name}",
                    f"tensorfs {estimate(cold[Tensorfs.name]).text(2)} s",
                    f"{estimate(cold[method.name]).text(2)} s",
                    f"{ratio.text(2)} x as fast",
                    f"≥ {TENSORFS_LEAST} x",
                    verdict(ratio, least=TENSORFS_LEAST),
                )
            )
    return rows


def _against_best(state: str, seconds: Seconds, name: str, best: str, best_of: str) -> Row:
    slowest = max(seconds[best])
    ratio = _ratio(seconds[name], seconds[best])
    return Row(
        f"{state}: {name}",
        f"{best}: {estimate(seconds[best]).text(2)} s",
        f"{estimate(seconds[name]).text(2)} s",
        f"{ratio.text(2)} x the time",
        f"median within the spread of the best {best_of} (≤ {slowest:.2f} s)",
        "met" if estimate(seconds[name]).median <= slowest else "missed",
    )


def _ratio(first: Sequence[float], second: Sequence[float]) -> Estimate:
    return estimate([a / b for a, b in zip(first, second, strict=True)])


def imports(work: Path, source: Path, nbytes: int, count: int) -> list[str]:
    """How fast a checkpoint is taken in: new, then all of it known; bytes durable both times."""
    folder = work / "imported"
    found: Seconds = {}
    for number in range(count):
        for state, prepare in STATES.items():
            shutil.rmtree(folder, ignore_errors=True)
            store = Store.open(folder)
            for what in ("new", "known"):
                for path in source.iterdir():
                    prepare(path)
                took = timed(partial(store.import_, source, "model", replace=True))
                found.setdefault(f"{what}, {state}", []).append(took)
        say(f"imports: {number + 1} of {count}")
    shutil.rmtree(folder, ignore_errors=True)
    lines = ["| import | s | GB/s |", "| --- | --- | --- |"]
    for name, seconds in found.items():
        speed = estimate([nbytes / GB / value for value in seconds])
        lines.append(f"| {name} | {estimate(seconds).text(2)} | {speed.text(2)} |")
    return lines


def make_source(work: Path, gigabytes: float) -> Path:
    """A checkpoint of random bfloat16 in two shards, of the shapes of a small Llama."""
    from safetensors.torch import save_file

    folder = work / f"source-{gigabytes:g}"
    if (folder / "model-00002-of-00002.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    hidden, inner = 1024, 2816
    block: dict[str, tuple[int, ...]] = dict.fromkeys("qkvo", (hidden, hidden))
    block |= {"gate": (inner, hidden), "up": (inner, hidden)}
    block |= {"down": (hidden, inner), "norm": (hidden,), "norm2": (hidden,)}
    elements = sum(torch.Size(shape).numel() for shape in block.values())
    layers = max(2, round(gigabytes * GB / 2 / elements))
    for shard in (0, 1):
        numbers = range(shard * layers // 2, (shard + 1) * layers // 2)
        tensors = {
            f"layers.{number}.{name}": torch.randn(shape, generator=generator).bfloat16()
            for number in numbers
            for name, shape in block.items()
        }
        save_file(tensors, folder / f"model-0000{shard + 1}-of-00002.safetensors")
    return folder
