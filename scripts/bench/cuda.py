#!/usr/bin/env python3
"""What device memory costs to share: handles, cold loads, attaching, and computing with it.

    scripts/bench/cuda.py [--only PART] [--size GIB] [--work DIR] [--write] [--rehearse]

*host*: how fast the host's half of an upload is, beside reading and hashing alone. *handles*:
making, exporting, importing, mapping and unmapping handles of 2 to 64 MiB. *load*: a file to the
GPU, in the page cache and then in no cache, beside safetensors, fastsafetensors and the Run:ai
streamer where they are installed, and the limits: reading the file, and copying pinned memory.
*attach*: a resident model of 1, 4 and 14 GB. *forward*: products with shared and with private
weights. Prints a section of Markdown, line by line, and names the GPU; `--write` puts it into
docs/benchmarks/tables.md. `--rehearse`: over the fake driver and tiny, to see that it runs; its
figures mean nothing, but for those of *host*, which uses no GPU anyway.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import gc
import importlib
import importlib.util
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import click
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from bench import host_half
from bench.gpu_place import MIB, Bench, Serving
from bench.process_memory import drop_pages, read_pages
from bench.stats import estimate, machine, verdict, write_section
from tensor_dedup.formats.safetensors import read_header
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.openers import MappedExtent
from tensor_dedup.loader.cuda.residents import DeviceRequest, Views, copy_of
from tensor_dedup.loader.cuda.transfers import Transfers, file_part
from tensor_dedup.loader.residents.manager import ResidentQuery
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.types import ResidentKey

PARTS = ("host", "handles", "load", "attach", "forward")
GIB = 1 << 30
REPEATS = 7
HOST_MIB = 256
LOAD_SECONDS = 40.0  # for each of the two tables
ATTACH_MOST_MS = 100.0
FORWARD_MOST = 1.01
UPLOAD_LEAST = 0.9


def _ms(values: Sequence[float]) -> str:
    return estimate([1000 * value for value in values]).text(2)


def handles(bench: Bench) -> list[str]:
    """Milliseconds for so much memory, by the size of its handles."""
    total = 16 * MIB if bench.rehearsal else 4 * GIB
    backend, gpu = VmmBackend(bench.driver(), "0"), Gpu(bench.driver(), "0")
    lines = [
        f"Milliseconds for {total / GIB:g} GiB in handles of each size; the smallest is "
        f"{backend.capabilities.layout.unit >> 10} KiB.",
        "",
        "| size, MiB | handles | make and export | import and map | unmap |",
        "| --- | --- | --- | --- | --- |",
    ]
    for size in (2, 4, 8, 16, 32, 64):
        count = max(1, total // (size * MIB))
        made, mapped, gone = [], [], []
        for _ in range(3 if bench.rehearsal else REPEATS):
            began = time.perf_counter()
            slabs = [backend.reserve(size * MIB) for _ in range(count)]
            made.append(time.perf_counter() - began)
            extents = [MappedExtent(slab.fileno, slab.nbytes, 0) for slab in slabs]
            began = time.perf_counter()
            mapping = gpu.map(extents, gpu.vmm(), slabs)
            mapped.append(time.perf_counter() - began)
            del mapping, slabs
            began = time.perf_counter()
            gpu.reap(wait=True)
            gone.append(time.perf_counter() - began)
        lines.append(f"| {size} | {count} | {_ms(made)} | {_ms(mapped)} | {_ms(gone)} |")
    return lines


def host(bench: Bench) -> Iterator[str]:
    """Return what `host_half` finds, with as much memory in a rehearsal as on a GPU."""
    return host_half.host(bench.work, HOST_MIB)


def load(bench: Bench) -> Iterator[str]:
    """GB a second of a file that is in the page cache, then of one that is in no cache."""
    file = bench.work / "model.safetensors"
    count = max(4, int(bench.gib * GIB) // bench.unit)
    save_file({f"w{n}": _weights(bench.unit, n) for n in range(count)}, file)
    nbytes = file.stat().st_size
    yield from (f"{nbytes / 1e9:.1f} GB.", "")
    with bench.serving() as serving:
        ways = _ways(bench, file, lambda: _ours(bench, file, serving))
        for state, prepare in (("cached", read_pages), ("cold", drop_pages)):
            # Reading past the page cache is of the disk, whatever is cached.
            here = {name: way for name, way in ways.items() if state == "cold" or name != _DISK}
            found = _in_turns(bench, serving, here, lambda prepare=prepare: prepare(file))  # type: ignore[misc]
            copies = _copy_rates(bench, len(found["ours"]))
            found["limit: copy of pinned memory"] = [nbytes / rate for rate in copies]
            yield from _load_table(state, nbytes, found)
    file.unlink()


_DISK = "limit: read of the file"


def _in_turns(
    bench: Bench,
    serving: Serving,
    ways: dict[str, Callable[[], object]],
    prepare: Callable[[], object],
) -> dict[str, list[float]]:
    """Seconds of each way, repeat by repeat, as many as there is time for."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    names, began = list(ways), time.monotonic()
    for turn in range(3 if bench.rehearsal else REPEATS):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            os.sync()
            prepare()
            found[name].append(bench.seconds(ways[name]))
            gc.collect()
            serving.forget()
        if time.monotonic() - began > LOAD_SECONDS:
            break
    return found


def _load_table(state: str, nbytes: int, found: dict[str, list[float]]) -> Iterator[str]:
    yield from (f"| {state} | GB/s | seconds |", "| --- | --- | --- |")
    for name, values in found.items():
        rates = estimate([nbytes / value / 1e9 for value in values])
        yield f"| {name} | {rates.text(2)} | {estimate(values).text(2)} |"
    limits = [
        max(values) for values in zip(*(v for n, v in found.items() if "limit" in n), strict=True)
    ]
    share = estimate([limit / ours for limit, ours in zip(limits, found["ours"], strict=True)])
    aim = "" if state == "cached" else f"; aim {UPLOAD_LEAST}: {verdict(share, least=UPLOAD_LEAST)}"
    which = "the copy of pinned memory" if state == "cached" else "the slower limit"
    yield from ("", f"Ours, of {which}: {share.text(2)}{aim}.")
    plain = found[_SAFETENSORS]
    ratio = estimate([ours / each for ours, each in zip(found["ours"], plain, strict=True)])
    yield from (
        f"Seconds of ours, hashed, over those of safetensors, not hashed: {ratio.text(2)} x.",
        "",
    )


_SAFETENSORS = 'safetensors, `load_file(device="cuda")`'


def _weights(nbytes: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    side = 4096 if nbytes % 8192 == 0 and nbytes >= MIB else 64
    return torch.randn(nbytes // 2 // side, side, generator=made).to(torch.bfloat16)


def _ways(bench: Bench, file: Path, ours: Callable[[], object]) -> dict[str, Callable[[], object]]:
    ways: dict[str, Callable[[], object]] = {
        "ours": ours,
        _SAFETENSORS: lambda: load_file(file, str(bench.place)),
        _DISK: lambda: _read_directly(file),
    }
    if importlib.util.find_spec("fastsafetensors"):
        ways["fastsafetensors"] = lambda: _fastsafetensors(bench, file)
    if importlib.util.find_spec("runai_model_streamer"):
        ways["Run:ai streamer, then to the GPU"] = lambda: _runai(bench, file)
    return ways


def _ours(bench: Bench, file: Path, serving: Serving) -> None:
    """From the file through the manager: hashed, sealed, and seen as tensors."""
    lender, views, header = serving.lender(), Views(bench.kind), read_header(file)
    kept = []
    with file.open("rb") as opened:
        for start in range(0, len(header.tensors), 16):
            wanted = []
            for spec in header.tensors[start : start + 16]:
                place = opened.fileno(), spec.start, spec.nbytes
                write = partial(_upload, serving.gpu.transfers, *place)
                key = ResidentKey(spec.dtype, tuple(spec.shape), (spec.shape[1], 1), "")
                recipe = f"{file} {spec.start}"
                wanted.append(DeviceRequest(recipe, key, spec.nbytes, write))
            kept += [views.tensor(each[0]) for each in lender.put(wanted) if each is not None]
    assert len(kept) == len(header.tensors)
    bench.wait()


def _upload(transfers: Transfers, fd: int, start: int, nbytes: int, address: int) -> str:
    made = transfers.upload(address, nbytes, [file_part(fd, start, nbytes)])
    made.wait()
    return made.digest


def _fastsafetensors(bench: Bench, file: Path) -> None:
    module: Any = importlib.import_module("fastsafetensors")
    parallel: Any = importlib.import_module("fastsafetensors.parallel_loader")
    loader = parallel.ParallelLoader(
        pg=module.SingleGroup(), hf_weights_files=[str(file)], device=str(bench.place), nogds=True
    )
    kept = dict(loader.iterate_weights())
    bench.wait()
    kept.clear()
    loader.close()


def _runai(bench: Bench, file: Path) -> None:
    module: Any = importlib.import_module("runai_model_streamer")
    with module.SafetensorsStreamer() as streamer:
        streamer.stream_files([str(file)])
        kept = [tensor.to(bench.place) for _, tensor in streamer.get_tensors()]
    bench.wait()
    kept.clear()


def _read_directly(file: Path, piece: int = 16 * MIB) -> None:
    """Past the page cache where the file system can, with several reads at once."""
    size = file.stat().st_size
    try:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        fd = os.open(file, os.O_RDONLY)

    def read(start: int) -> None:
        with mmap.mmap(-1, piece) as into:
            os.preadv(fd, [into], start)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(0, size, piece)))
    os.close(fd)


def _copy_rates(bench: Bench, repeats: int) -> list[float]:
    """Bytes a second of copies of pinned memory to the GPU."""
    nbytes = 4 * MIB if bench.rehearsal else GIB
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not bench.rehearsal)
    target = torch.empty(nbytes, dtype=torch.uint8, device=bench.place)
    copy: Callable[[], object] = lambda: target.copy_(source, non_blocking=True)  # noqa: E731
    copy()
    return [nbytes / bench.seconds(copy) for _ in range(repeats)]


def attach(bench: Bench) -> list[str]:
    """Milliseconds from connecting until every tensor of a resident model is mapped."""
    lines = ["| resident, GB | tensors | attach, ms | aim |", "| --- | --- | --- | --- |"]
    sizes = (0.004, 0.008) if bench.rehearsal else (1, 4, 14)
    free = 1 << 40 if bench.rehearsal else torch.cuda.mem_get_info()[0]
    for size in sizes:
        count = max(1, int(size * 1e9) // bench.unit)
        if 1.2 * count * bench.unit > free:
            lines.append(f"| {size:g} | {count} | not run: {free / 1e9:.1f} GB are free | |")
            continue
        found = estimate([1000 * value for value in _attached(bench, count)])
        aim = f"{ATTACH_MOST_MS:g} ms for 14: {verdict(found, most=ATTACH_MOST_MS)}"
        lines.append(f"| {size:g} | {count} | {found.text(1)} | {aim if size == 14 else ''} |")
    return lines


def _attached(bench: Bench, count: int) -> list[float]:
    with bench.serving() as serving:
        lender = serving.lender()
        source = _weights(bench.unit, 0).to(bench.place)
        shape = tuple(source.shape)
        keys = [
            ResidentKey("BF16", shape, (shape[1], 1), blake3(str(n).encode()).hexdigest())
            for n in range(count)  # names of nothing: here only their number counts
        ]
        gpu = serving.gpu
        for start in range(0, count, 16):
            wanted = [
                DeviceRequest(key.digest, key, source.nbytes, copy_of(source, gpu))
                for key in keys[start : start + 16]
            ]
            assert all(lender.put(wanted))
        times = []
        for _ in range(3 if bench.rehearsal else REPEATS):
            views = Views(bench.kind)

            def see(views: Views = views) -> list[torch.Tensor]:
                residents = serving.lender().find([ResidentQuery("", key) for key in keys])
                return [views.tensor(each) for each in residents if each is not None]

            kept: list[list[torch.Tensor]] = []
            times.append(bench.seconds(lambda k=kept, s=see: k.append(s())))  # type: ignore[misc]
            assert len(kept[0]) == count
            kept.clear()
            gpu.reap(wait=True)
        return times


def forward(bench: Bench) -> list[str]:
    """Seconds of the same products with shared and with private weights, in turns."""
    layers = 4 if bench.rehearsal else 32
    with bench.serving() as serving:
        lender, views = serving.lender(), Views(bench.kind)
        made = [_weights(bench.unit, n).to(bench.place) for n in range(layers)]
        wanted = []
        for n, each in enumerate(made):
            shape = tuple(each.shape)
            key = ResidentKey("BF16", shape, (shape[1], 1), blake3(b"f%d" % n).hexdigest())
            wanted.append(DeviceRequest(key.digest, key, each.nbytes, copy_of(each, serving.gpu)))
        shared = [views.tensor(each[0]) for each in lender.put(wanted) if each is not None]
        x = torch.randn(16, made[0].shape[1], device=bench.place).to(torch.bfloat16)

        def run(weights: list[torch.Tensor]) -> None:
            for _ in range(1 if bench.rehearsal else 20):
                for each in weights:
                    torch.nn.functional.linear(x, each)

        run(shared)
        run(made)
        ratios, seconds = [], []
        for turn in range(3 if bench.rehearsal else 15):
            both = {}
            for weights in (shared, made) if turn % 2 else (made, shared):
                both[weights is shared] = bench.seconds(lambda w=weights: run(w))  # type: ignore[misc]
            ratios.append(both[True] / both[False])
            seconds.append(both[False])
        found = estimate(ratios)
        aim = verdict(found, least=2 - FORWARD_MOST, most=FORWARD_MOST)
        return [
            f"{layers} products of {bench.unit >> 20} MiB of weights with 16 rows: shared over "
            f"private {found.text(3)} x (aim 1.00 ± 0.01: {aim}); private {_ms(seconds)} ms.",
        ]


def gpu_name(*, rehearsal: bool) -> str:
    """What the figures are of."""
    return "the fake driver, no GPU" if rehearsal else torch.cuda.get_device_name(0)


@click.command()
@click.option("--only", type=click.Choice(PARTS), multiple=True)
@click.option("--size", type=float, default=8.0, show_default=True, help="GiB of the file.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=None)
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks/tables.md.")
@click.option("--rehearse", is_flag=True, help="Over the fake driver, tiny.")
def main(
    only: tuple[str, ...], size: float, work: Path | None, write: bool, rehearse: bool
) -> None:
    """Measure, print, and perhaps keep."""
    if not rehearse and not torch.cuda.is_available():
        raise click.ClickException("torch sees no GPU; --rehearse runs without one")
    parts: dict[str, Callable[[Bench], Iterable[str]]]
    parts = dict(zip(PARTS, (host, handles, load, attach, forward), strict=True))
    lines: list[str] = []

    def say(*more: str) -> None:
        # At once: a run that is ended early has said what it found.
        lines.extend(more)
        click.echo("\n".join(more))

    with tempfile.TemporaryDirectory(prefix="td-", dir=work) as folder:
        bench = Bench(Path(folder), rehearse, 0.004 if rehearse else size)
        say("## Memory of a GPU", "", f"- GPU: {gpu_name(rehearsal=rehearse)}")
        say(*machine(("torch", "cuda-bindings", "safetensors", "blake3")), "")
        for name in only or PARTS:
            say(f"### {name.capitalize()}", "")
            for line in parts[name](bench):
                say(line)
            say("")
    if write and not rehearse:
        write_section("cuda", "\n".join(lines))


if __name__ == "__main__":
    main()
