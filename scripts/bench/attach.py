#!/usr/bin/env python3
"""How fast a process gets at a model that is resident in a memory manager, and what that costs.

    scripts/bench/attach.py [--size MB] [--tensors N] [--repeats N] [--pairs N | --quick]
                            [--only PART] [--work DIR] [--write]

*attach*: from connecting to the first and to the last page of every tensor, beside
`safetensors.torch.load_file` of a cached and of a cold file, and its copy into private memory.
*requests*: look-ups a second under several clients. *plain*: tokens a second of real engines whose
weights are in the form that processes can share. Prints a section of Markdown; `--write` puts it
into docs/benchmarks/tables.md.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import mmap
import multiprocessing
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from typing import TYPE_CHECKING

import click
import torch
from safetensors.torch import load_file, save_file

from bench import options
from bench.fresh_start import own_hints
from bench.process_memory import drop_pages, read_pages
from bench.results import table
from bench.stats import Estimate, Section, estimate, verdict
from demonstration import models
from tensor_dedup.memory_manager.client import Client, connect
from tensor_dedup.memory_manager.errors import ManagerGoneError

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

PARTS = ("attach", "requests", "plain")
LAYERS = 12
REQUEST_SECONDS = 1.5
CLIENTS = (1, 16, 64)
MAPPED_MOST_MS = 20.0
FASTER_LEAST = 50.0
_NOTES = """\
- *Mapped*: all tensors are tensors. *First page*: one byte of each was read. *All pages*: one byte
  of every page was. A file that is mapped has read nothing before.
- Each repeat does all of them once, in an order that moves on by one. *Cold*: the file's pages were
  dropped from this machine's page cache just before.
- *Faster*: seconds to the first page of a private copy of the cached file, which is what a loader
  makes that shares nothing, over ours, repeat by repeat.
- *Requests*: look-ups of one layer that is not there, as many processes at once, on the same
  cores.
- *All weights plain*: new engines of a 0.5B model in each pair, vLLM's own with its packed weights
  and ours with `cpu_weights="plain"`, in one process, sharing with nobody: the form is compared.
- Intervals are of medians, 95 %, from order statistics.
"""
Times = dict[str, float]


@contextmanager
def manager(folder: Path, budget: int) -> Iterator[Path]:
    """A manager for the length of the context; the path of its socket."""
    path = folder / "m.sock"
    command = [sys.executable, "-m", "tensor_dedup.memory_manager.server", "--socket", str(path)]
    process = subprocess.Popen([*command, "--budget", str(budget)], stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                connect(path, keep_connected=False).close()
                break
            except ManagerGoneError:
                time.sleep(0.05)
        yield path
    finally:
        process.terminate()
        process.wait()


def publish(client: Client, tensors: dict[str, torch.Tensor]) -> float:
    """Put a model in, layer by layer; seconds."""
    began = time.perf_counter()
    names = list(tensors)
    for layer in range(LAYERS):
        mine = [tensors[name] for name in names[layer::LAYERS]]
        put = client.reserve([f"layer-{layer}"], "model").put
        assert put is not None
        with put:
            put.allocate([tensor.nbytes for tensor in mine])
            for index, tensor in enumerate(mine):
                put.write(index, tensor.numpy().data.cast("B"))
            leases = put.seal()
            put.publish(f"layer-{layer}", b"record", [lease.digest for lease in leases])
    return time.perf_counter() - began


def attach(path: Path) -> Times:
    """Seconds from connecting until all tensors are mapped, and until pages have been read."""
    began = time.perf_counter()
    with connect(path, keep_connected=False) as client:
        found = client.get([f"layer-{layer}" for layer in range(LAYERS)], "model")
        views = []
        for layer in found:
            assert layer is not None
            for lease in layer.leases:
                start = lease.offset % mmap.PAGESIZE
                view = mmap.mmap(
                    lease.slab.fileno,
                    start + lease.nbytes,
                    flags=mmap.MAP_PRIVATE,
                    offset=lease.offset - start,
                )
                views.append((view, start))
        tensors = [torch.frombuffer(view, dtype=torch.uint8)[start:] for view, start in views]
        return _used(began, tensors)


def load(path: Path, *, private: bool) -> Times:
    """Seconds of load_file until the first and all pages were read, or copied."""
    began = time.perf_counter()
    tensors = load_file(path)
    if private:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return _used(began, [tensor.view(torch.uint8).flatten() for tensor in tensors.values()])


def _used(began: float, tensors: Sequence[torch.Tensor]) -> Times:
    mapped = time.perf_counter()
    total = sum(int(tensor[0]) for tensor in tensors)
    first = time.perf_counter()
    total += sum(int(tensor[:: mmap.PAGESIZE].sum()) for tensor in tensors)
    last = time.perf_counter()
    assert total >= 0
    return {"mapped": mapped - began, "first page": first - began, "all pages": last - began}


def ask(path: Path, together: Barrier, answered: "SimpleQueue[int]") -> None:
    """Count the requests that one client gets answered."""
    count = 0
    with connect(path, keep_connected=False) as client:
        together.wait()
        deadline = time.monotonic() + REQUEST_SECONDS
        while time.monotonic() < deadline:
            client.get(["none"])
            count += 1
    answered.put(count)


def requests_a_second(path: Path, clients: int) -> float:
    """Look-ups of one layer that is not there, by so many processes at once."""
    context = multiprocessing.get_context("fork")
    together, answered = context.Barrier(clients), context.SimpleQueue()
    crowd = [context.Process(target=ask, args=(path, together, answered)) for _ in range(clients)]
    for each in crowd:
        each.start()
    counts: list[int] = [answered.get() for _ in crowd]
    for each in crowd:
        each.join()
    return sum(counts) / REQUEST_SECONDS


def attaching(path: Path, file: Path, repeats: int) -> list[str]:
    """The table of a resident model, its file, and a private copy; the aims."""

    def cold() -> Times:
        drop_pages(file)
        return load(file, private=False)

    def cached(*, private: bool) -> Times:
        read_pages(file)
        return load(file, private=private)

    ways: dict[str, Callable[[], Times]] = {
        "attach: connect, look up, map": lambda: attach(path),
        "`load_file`, cached": lambda: cached(private=False),
        "`load_file`, cached, copied into private memory": lambda: cached(private=True),
        "`load_file`, cold": cold,
    }
    names = list(ways)
    found: dict[str, list[Times]] = {name: [] for name in names}
    for number in range(repeats):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            found[name].append(ways[name]())
    lines = ["| | mapped, ms | first page, ms | all pages, ms |", "| --- | --- | --- | --- |"]
    for name, times in found.items():
        cells = [_ms([each[what] for each in times]).text(1) for what in times[0]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    ours, private = found[names[0]], found[names[2]]
    mapped = _ms([each["mapped"] for each in ours])
    pairs = zip(ours, private, strict=True)
    faster = estimate([theirs["first page"] / mine["first page"] for mine, theirs in pairs])
    return [
        *lines,
        "",
        f"Mapped in {mapped.text(1)} ms (aim: under {MAPPED_MOST_MS:g}): "
        f"{verdict(mapped, most=MAPPED_MOST_MS)}. To the first page of every tensor "
        f"{faster.text(1)} times faster than a private copy (aim: {FASTER_LEAST:g}): "
        f"{verdict(faster, least=FASTER_LEAST)}.",
    ]


def _ms(seconds: Sequence[float]) -> Estimate:
    return estimate([1000 * each for each in seconds])


def asking(path: Path, repeats: int) -> str:
    """Look-ups a second, by clients."""
    found = {
        count: estimate([requests_a_second(path, count) for _ in range(repeats)])
        for count in CLIENTS
    }
    return "Requests a second: " + "; ".join(
        f"{count} clients {each.text(0)}" for count, each in found.items()
    )


def resident(folder: Path, size: int, count: int, repeats: int, parts: Sequence[str]) -> list[str]:
    """All that is measured against one resident model."""
    generator = torch.Generator().manual_seed(1)
    each = size // count // 2
    tensors = {
        f"t{n}": torch.randint(-(2**15), 2**15, (each,), dtype=torch.int16, generator=generator)
        for n in range(count)
    }
    file = folder / "model.safetensors"
    save_file(tensors, file)
    with manager(folder, 2 * size + (64 << 20)) as path:
        with connect(path, keep_connected=False) as client:
            seconds = publish(client, tensors)
        del tensors
        head = (
            f"{count} tensors, {2 * each * count / 1e9:.2f} GB, in a memory manager. Making them "
            f"resident (copy, seal, hash) took {seconds:.1f} s, once."
        )
        lines = [head]
        if "attach" in parts:
            lines += ["", *attaching(path, file, repeats)]
        if "requests" in parts:
            lines += ["", asking(path, repeats)]
        return lines


def decoding_plainly(work: Path, pairs: int) -> list[str]:
    """Tokens a second with all weights plain."""
    with own_hints(work):
        # They load vllm, which reads the environment then.
        from bench import decoding
        from bench.fine_tunes import made
        from bench.loading import prepare_process

        base = made(work)[models.BASE]
        prepare_process(base)
        return ["", *table(decoding.plain_weights(base, pairs))]


@click.command(context_settings=options.CONTEXT)
@click.option("--size", default=1000, show_default=True, help="MB of the resident model.")
@click.option("--tensors", default=300, show_default=True, type=click.IntRange(min=LAYERS))
@click.option("--repeats", default=12, show_default=True, type=click.IntRange(min=1))
@options.repeats("--pairs", 10)
@options.only(PARTS)
@options.work("the checkpoints")
@options.write
def main(
    size: int,
    tensors: int,
    repeats: int,
    pairs: int,
    quick: bool,
    only: tuple[str, ...],
    work: Path | None,
    write: bool,
) -> None:
    """Measure attaching to a resident model, and decoding with weights that can be shared."""
    repeats, pairs = (options.QUICK,) * 2 if quick else (repeats, pairs)
    parts, section = only or PARTS, Section("attach.py", "Attaching to a resident model")
    folder = work or models.default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    body: list[str] = []
    if set(parts) & {"attach", "requests"}:
        with tempfile.TemporaryDirectory(prefix="tensor-dedup-attach-") as where:
            body += resident(Path(where), size * 1_000_000, tensors, repeats, parts)
    if "plain" in parts:
        body += decoding_plainly(folder, pairs)
    how = f"{repeats} repeats, engines in {pairs} pairs"
    section.finish("attach", how, body, _NOTES, write=write)


if __name__ == "__main__":
    main()
