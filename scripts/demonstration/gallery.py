"""`scripts/demo --diffusers`: two pipelines in one process, beside plain Diffusers."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from demonstration import models, pictures
from demonstration.run import Side, Step, follow, one_process
from demonstration.show import BESIDE, new_table, ratio, signed
from tensor_dedup.cli.tables import Dotted
from tensor_dedup.errors import NotInstalledError
from tensor_dedup.text_table import human

PNG: Final = "pictures.png"
_NEEDED: Final = ("diffusers", "transformers", "accelerate", "PIL")
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_GAP: Final = 8  # pixels between two pictures


def require_libraries() -> None:
    """NotInstalledError when a library that draws is not installed."""
    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise NotInstalledError(
            f"--diffusers needs {', '.join(absent)}; install the extra: pip install '.[diffusers]'",
            missing=tuple(absent),
        )


def made(work: Path, bar: Progress) -> list[Path]:
    """The demonstration's pipelines, making those that are not there."""
    absent = pictures.missing(work)
    models.check_space(work, absent, each=pictures.PIPELINE_BYTES)
    task = bar.add_task("making pipelines", total=len(absent), visible=bool(absent))
    # A process of its own: what it takes is given back before anything is measured.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for name in absent:
            bar.update(task, description=f"making {name}")
            pool.submit(pictures.make, name, work).result()
            bar.advance(task)
    bar.remove_task(task)
    return [work / name for name in pictures.NAMES]


def run_side(
    paths: Sequence[Path],
    folder: Path,
    step: Step,
    config: Mapping[str, Any] | None,
    size: int | None,
) -> Side:
    """Load all pipelines into one process and draw with each. EngineFailedError."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {"size": size, "folder": str(folder)}
    result = follow("painter", paths, config, options, _ENVIRONMENT, folder / "log", step)
    return one_process(result)


def equal_pictures(plain: Side, shared: Side) -> list[bool]:
    """For each pipeline: is every number of its picture the same?"""
    import numpy

    both = zip(plain.answers, shared.answers, strict=True)
    loaded = ((numpy.load(a["picture"]), numpy.load(b["picture"])) for a, b in both)
    return [bool(a.shape == b.shape and (a == b).all()) for a, b in loaded]


def save_png(plain: Side, shared: Side, file: Path) -> None:
    """A row for each pipeline: on the left without sharing, on the right with it."""
    import numpy
    from PIL import Image

    rows = []
    for pair in zip(plain.answers, shared.answers, strict=True):
        arrays = [numpy.load(each["picture"]) for each in pair]
        cells = [(255 * each.clip(0, 1)).round().astype("uint8") for each in arrays]
        gap = numpy.full((cells[0].shape[0], _GAP, 3), 255, "uint8")
        rows.append(numpy.concatenate([cells[0], gap, cells[1]], axis=1))
    width = max(row.shape[1] for row in rows)
    height = sum(row.shape[0] + _GAP for row in rows) - _GAP
    sheet, top = numpy.full((height, width, 3), 255, "uint8"), 0
    for row in rows:
        sheet[top : top + row.shape[0], : row.shape[1]] = row
        top += row.shape[0] + _GAP
    Image.fromarray(sheet).save(file)


def document(plain: Side, shared: Side, png: Path) -> dict[str, Any]:
    """The report of our side, whether its pictures equal the other's, and what both cost."""
    found = shared.report or {"models": [], "registry_bytes": 0, "resident_bytes": 0}
    verdicts = equal_pictures(plain, shared)
    return {
        **found,
        "pictures_equal_plain": all(verdicts),
        "pictures_equal": verdicts,
        "pictures": str(png),
        "plain": plain.to_dict(),
        "dedup": shared.to_dict(),
    }


def show(console: Console, paths: Sequence[Path], plain: Side, shared: Side, png: Path) -> None:
    """Print what each load cost on both sides, and whether the pictures are equal."""
    verdicts = equal_pictures(plain, shared)
    table = new_table("Beside plain Diffusers", "pipeline", *BESIDE, "picture")
    added = zip(plain.added(), shared.added(), strict=True)
    loads = zip(plain.loads, shared.loads, strict=True)
    for path, sizes, times, same in zip(paths, added, loads, verdicts, strict=True):
        table.add_row(
            Dotted(path.resolve().name),
            *(signed(size["pss"]) for size in sizes),
            *(f"{each['seconds']:.1f}" for each in times),
            "[green]equal[/]" if same else "[bold red]differs[/]",
        )
    console.print(table)
    console.print("Memory: what a load added (PSS), every page of it read.")
    was, now = plain.total(), shared.total()
    table = new_table("All of it", "", "plain", "shared", "shared / plain")
    for label, before, after in (
        ("memory (PSS)", was["pss"], now["pss"]),
        ("most ever resident", plain.peak_rss, shared.peak_rss),
    ):
        table.add_row(label, human(before), human(after), ratio(after, before))
    console.print(table)
    console.print(f"Pictures, without sharing on the left: {png}")
    if not all(verdicts):
        console.print("[bold red]Pictures differ from plain Diffusers'.[/]")


def write_json(file: Path, found: Mapping[str, Any]) -> None:
    """The document as a file."""
    file.write_text(json.dumps(found, indent=2) + "\n")
