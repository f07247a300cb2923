#!/usr/bin/env python3
"""Loads of a full fine-tune that a store keeps against its base, and how fast codecs decode.

    scripts/bench/stored_fine_tune.py [--pairs N | --quick] [--models BASE FINE_TUNE] [--work DIR]
                                      [--json FILE] [--write]

One process, one run, both sides in turns. The models are 475 MB of random weights in bfloat16 and
a fine-tune that moves most of them by a few units in the last place; with `--models` they are two
folders, each with a `model.safetensors`. Prints a section of Markdown; `--write` puts it into
docs/benchmarks/tables.md instead of the one there.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import shutil
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import click
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from bench import options
from bench.process_memory import drop_pages, read_pages, settle, touch
from bench.results import Row, own_row, ratio_row, table, write_figures
from bench.stats import Section
from bench.turns import in_pairs, say, timed
from demonstration import models
from tensor_dedup import Store
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.store.codecs.choice import CodecChoice, Sample, choose, places
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.reading.tensors import load_tensors

PACED: Final = "a full fine-tune at 200 MB/s"
DISK: Final = "a full fine-tune, file cold"
RATE: Final = 200e6
_WEIGHTS: Final = "model.safetensors"
_WIDTH, _LAYERS, _WORDS = 896, 14, 32_000
_SPREAD: Final = 0.02
_MOVED: Final = 2e-5
_DECODED: Final = 24 << 20
_NOTES = """\
- *Plain* at 200 MB/s reads the file into fresh memory, 2 MiB at a time; on the disk as it is,
  safetensors maps it and a byte of every page is read. Ours is from the name in the store to
  tensors, every byte compared with its digest.
- *At most*: plain's time, times the stored share and 0.03; of a cold file, divided by 1.2.
- The base is in the store unencoded, and in the page cache. What is read at 200 MB/s, or dropped
  from the page cache just before, are the containers of the fine-tune and the plain file.
- *Decoding* is processor time of one thread for a GB, each leaf compared with its digest, with the
  codec that `auto` chooses for random weights and those that a fine-tune (or 1 %) moves.
- An interval is of the median, 95 %, from order statistics; ratios are taken pair by pair.
"""


@click.command(context_settings=options.CONTEXT)
@options.repeats("--pairs", 9)
@click.option(
    "--models",
    "folders",
    nargs=2,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folders of a base and a fine-tune instead of random ones.",
)
@options.work("models and a store, 2 GB")
@options.json_file("the values of all pairs")
@options.write
def main(
    pairs: int,
    quick: bool,
    folders: tuple[Path, Path] | None,
    work: Path | None,
    json_file: Path | None,
    write: bool,
) -> None:
    """Measure loads of a fine-tune from a store."""
    pairs = options.QUICK if quick else pairs
    folder = (work or models.default_folder()) / "stored-fine-tune"
    folder.mkdir(parents=True, exist_ok=True)
    section = Section("stored_fine_tune.py", "A fine-tune in a store", ("torch", "zstandard"))
    base, tuned = folders or _made(folder, layers=1 if quick else _LAYERS)
    rows, share = _loads(base, tuned, folder / "store", pairs)
    rows += [_decoding(kind, pairs) for kind in KINDS]
    if json_file is not None:
        write_figures(json_file, {row.name: row.sides for row in rows})
    nbytes = (tuned / _WEIGHTS).stat().st_size
    how = f"{pairs} pairs. {nbytes / 1e6:.0f} MB in bfloat16, stored at {share:.1%}"
    section.finish("fine-tune", how, table(rows, "at most"), _NOTES, write=write)


def _made(folder: Path, layers: int) -> tuple[Path, Path]:
    shapes = {"embedding": (_WORDS, _WIDTH)}
    for layer in range(layers):
        sizes = {"q": (896, _WIDTH), "k": (128, _WIDTH), "v": (128, _WIDTH), "o": (896, _WIDTH)}
        sizes |= {"gate": (4864, _WIDTH), "up": (4864, _WIDTH), "down": (_WIDTH, 4864)}
        shapes |= {f"{layer}.{name}": shape for name, shape in sizes.items()}
    generator = torch.Generator().manual_seed(0)
    base, tuned = {}, {}
    for name, shape in shapes.items():
        base[name], tuned[name] = _moved(shape, torch.bfloat16, generator)
    made = folder / f"base-{layers}", folder / f"tuned-{layers}"
    for path, tensors in zip(made, (base, tuned), strict=True):
        path.mkdir(exist_ok=True)
        save_file(tensors, path / _WEIGHTS)
    return made


def _moved(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, share: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights, and the same after a training that moved `share` of them."""
    values = torch.randn(shape, generator=generator) * _SPREAD
    steps = torch.randn(shape, generator=generator) * _MOVED
    if share < 1:
        steps = values * 2**-7 * (torch.rand(shape, generator=generator) < share)
    return values.to(dtype), (values + steps).to(dtype)


def _loads(base: Path, tuned: Path, work: Path, pairs: int) -> tuple[list[Row], float]:
    """Rows of both states, and the stored share of the fine-tune."""
    shutil.rmtree(work, ignore_errors=True)
    store, plain = Store.open(work), tuned / _WEIGHTS
    store.import_(base, "base", compress=None)
    before = _containers(work)
    store.import_(tuned, "tuned", compress="auto", base="base")
    new = [path for path in _containers(work) if path not in before]
    share = sum(path.stat().st_size for path in new) / plain.stat().st_size
    pace = _Pace()

    def ours(files: RealFiles | None = None) -> None:
        with Store.open(work, files=files).checkpoint("tuned") as checkpoint:
            touch(load_tensors(checkpoint).values())

    def prepared(run: Callable[[], None], state: Callable[[Path], None]) -> Callable[[], float]:
        def turn() -> float:
            settle()
            for path in before:
                read_pages(path)
            for path in (*new, plain):
                state(path)
            return timed(run)

        return turn

    slow = in_pairs(
        pairs,
        PACED,
        prepared(lambda: pace.read(plain), read_pages),
        prepared(lambda: ours(_SlowFiles(pace)), read_pages),
    )
    cold = in_pairs(
        pairs,
        DISK,
        prepared(lambda: touch(load_file(plain).values()), drop_pages),
        prepared(ours, drop_pages),
    )
    aims = [[value * (share + 0.03) for value in slow[0]], [value / 1.2 for value in cold[0]]]
    rows = [
        ratio_row(name, (aim, sides[1]), most=1)
        for name, aim, sides in zip((PACED, DISK), aims, (slow, cold), strict=True)
    ]
    return rows, share


def _containers(store: Path) -> list[Path]:
    return [path for path in (store / "containers").rglob("*") if path.is_file()]


class _Pace:
    """Reads that take as long as a disk of 200 MB/s has for them, all threads together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until the disk has had the time for this read and all before it."""
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + nbytes / RATE
            until = self._free
        time.sleep(max(0.0, until - time.perf_counter()))

    def read(self, path: Path) -> None:
        """Read a file into fresh memory."""
        memory = memoryview(bytearray(path.stat().st_size))
        with path.open("rb", buffering=0) as file:
            for at in range(0, memory.nbytes, LEAF_BYTES):
                count = file.readinto(memory[at : at + LEAF_BYTES])
                self.take(count or 0)


class _SlowFiles(RealFiles):
    """Files of which what lies in containers of encoded pieces is read at a pace."""

    def __init__(self, pace: _Pace) -> None:
        super().__init__()
        self._pace = pace

    def pread(self, handle: Handle, view: memoryview, offset: int) -> int:
        count = super().pread(handle, view, offset)
        if handle.path.suffix == ".delta":
            self._pace.take(count)
        return count


# What is decoded, in which dtype, with a base of which what share has moved.
KINDS: Final[Mapping[str, tuple[torch.dtype, float | None]]] = {
    "a fine-tune in bfloat16": (torch.bfloat16, 1.0),
    "a fine-tune in float16": (torch.float16, 1.0),
    "a fine-tune in float32": (torch.float32, 1.0),
    "1 % moved, in bfloat16": (torch.bfloat16, 0.01),
    "no base, in bfloat16": (torch.bfloat16, None),
    "no base, in float32": (torch.float32, None),
}


def decoding(kind: str) -> str:
    """The name of the figure of one of KINDS."""
    return f"decoding a GB: {kind}"


def _decoding(kind: str, pairs: int) -> Row:
    """Processor seconds for a GB of one of KINDS, leaf by leaf, compared with digests."""
    dtype, share = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    count = _DECODED // dtype.itemsize
    both = _moved((count,), dtype, generator, 1.0 if share is None else share)
    base, tuned = (t.view(torch.uint8).numpy().data for t in both)
    chosen = _chosen(tuned, None if share is None else base, dtype.itemsize)
    leaves = []
    for at in range(0, tuned.nbytes, LEAF_BYTES):
        data = tuned[at : at + LEAF_BYTES]
        under = base[at : at + LEAF_BYTES] if chosen.codec.against_base else None
        chunk = chosen.codec.encode(data, under, chosen.effort)
        leaves.append((memoryview(chunk), under, blake3(data).digest()))
    out = memoryview(bytearray(LEAF_BYTES))
    seconds = []
    for _ in range(1 + pairs):
        began = time.process_time()
        for encoded, under, digest in leaves:
            chosen.codec.decode(encoded, under, out)
            assert blake3(out).digest() == digest
        seconds.append((time.process_time() - began) / tuned.nbytes * 1e9)
    say(f"{decoding(kind)}: {chosen.codec.name}")
    return own_row(decoding(kind), seconds[1:], most=0.5)


def _chosen(data: memoryview, base: memoryview | None, width: int) -> CodecChoice:
    samples = [
        Sample(data[start:stop], None if base is None else base[start:stop])
        for start, stop in places(data.nbytes, width)
    ]
    found = choose(samples, width)
    assert found is not None
    return found


if __name__ == "__main__":
    main()
