"""`scripts/demo`: several checkpoints in one process, each tensor once, beside plain loading."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demonstration import gallery, models, pictures, run, show
from tensor_dedup.cli import INTERRUPTED, data_errors
from tensor_dedup.cli.terminal import console as console_of_tables
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.text_table import human

# Loads and answers, each of them done by both sides.
_STEPS = {"loaded": "loaded", "answered": "answered"}
_WORDS = {
    "starting": "starting",
    "loading": "loading",
    "answering": "answering with",
    "loaded": "loaded",
    "answered": "answered with",
}
# Somebody's own model may need more for one sequence than the demonstration's.
_OWN_KV_CACHE_BYTES = 512 << 20
# Measured on two idle cores, the checkpoints' making included.
_TAKES = "two minutes and 7.2 GiB of memory"
_PIPELINES_TAKE = "40 seconds and 2.5 GiB of memory"
_READ_BYTES = 16 << 20


@click.command(name="demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the checkpoints, 4 GB [default: in the user's cache directory].",
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the report."
)
@click.option("--off", is_flag=True, help="Switch sharing off: both sides are plain vLLM.")
@click.option("--diffusers", is_flag=True, help="Image pipelines instead of language models.")
def main(
    paths: Sequence[Path], work: Path | None, json_file: Path | None, off: bool, diffusers: bool
) -> None:
    """Load several checkpoints in one process with each tensor held once, beside plain vLLM.

    Without PATH, a base of Qwen2-0.5B shapes with random weights and three fine-tunes of it are
    made (4 GB, once). Ends with 1 when any model answers otherwise than plain vLLM.

    With --diffusers: two pipelines with the text encoder and VAE of Stable Diffusion 1.5 in true
    size and tiny UNets, random weights (1.7 GB, once), or those at PATH. Ends with 1 when any
    picture differs from plain Diffusers'.
    """
    console = Console(stderr=True)
    folder = work or models.default_folder()
    compare = _pipelines if diffusers else _language_models
    if not paths:
        takes = _PIPELINES_TAKE if diffusers else _TAKES
        console.print(f"demo: on two idle cores this takes {takes}", highlight=False)
    try:
        with data_errors():
            equal = compare(console, folder, paths, json_file, off=off)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise SystemExit(INTERRUPTED) from None
    if not paths:
        kept = [folder / "pipelines"] if diffusers else models.paths(folder)
        files = [file for path in kept for file in path.rglob("*") if file.is_file()]
        console.print(
            f"demo: {human(sum(file.stat().st_size for file in files))} of checkpoints stay in "
            f"{folder} for the next run; delete them to have the space back",
            highlight=False,
            soft_wrap=True,
        )
    if not equal:
        raise SystemExit(1)


def _language_models(
    console: Console, folder: Path, paths: Sequence[Path], json_file: Path | None, *, off: bool
) -> bool:
    busy = _busy()
    with _bar(console) as bar:
        chosen = list(paths) or _made(folder, bar)
        plain, shared = _both(chosen, folder, bar, own=bool(paths), off=off)
    show.show(
        console_of_tables(), [path.resolve().name for path in chosen], plain, shared, busy=busy
    )
    found = run.document(plain, shared)
    if json_file is not None:
        gallery.write_json(json_file, found)
    return bool(found["tokens_equal_plain"])


def _pipelines(
    console: Console, folder: Path, paths: Sequence[Path], json_file: Path | None, *, off: bool
) -> bool:
    gallery.require_libraries()
    work = folder / "pipelines"
    with _bar(console) as bar:
        chosen = list(paths) or gallery.made(work, bar)
        size = None if paths else pictures.SIZE
        files = [file.path for path in chosen for file in open_checkpoint(path).files]
        task = bar.add_task("reading all files once", total=len(files) + 4 * len(chosen))
        for file in files:
            _read(file)
            bar.advance(task)
        step = _steps(bar, task)
        results = models.results(folder)
        plain = gallery.run_side(chosen, results / "plain", step("plain"), None, size)
        config = {"enabled": not off}
        shared = gallery.run_side(chosen, results / "shared", step("sharing"), config, size)
    png = results / gallery.PNG
    gallery.save_png(plain, shared, png)
    gallery.show(console_of_tables(), chosen, plain, shared, png)
    found = gallery.document(plain, shared, png)
    if json_file is not None:
        gallery.write_json(json_file, found)
    return bool(found["pictures_equal_plain"])


def _busy() -> bool:
    """Whether others want more than half of this machine's processors."""
    return os.getloadavg()[0] > len(os.sched_getaffinity(0)) / 2


class _Said(Progress):
    """A bar; where nobody watches, a line for each thing that is begun."""

    def update(self, task_id: TaskID, *args: Any, **kwargs: Any) -> None:
        super().update(task_id, *args, **kwargs)
        what = kwargs.get("description")
        if what is not None and not self.console.is_terminal:
            self.console.print(f"demo: {what}", highlight=False)


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    bar = _Said(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        yield bar


def _made(folder: Path, bar: Progress) -> list[Path]:
    """The demonstration's checkpoints, making those that are not there."""
    missing = models.missing(folder)
    models.check_space(folder, missing)
    task = bar.add_task("making checkpoints", total=len(missing), visible=bool(missing))
    # A process of its own: what torch and transformers take is given back before engines start.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for name in missing:
            bar.update(task, description=f"making {name}")
            pool.submit(models.make, name, folder).result()
            bar.advance(task)
    bar.remove_task(task)
    return models.paths(folder)


def _both(
    chosen: Sequence[Path], folder: Path, bar: Progress, *, own: bool, off: bool
) -> tuple[run.Side, run.Side]:
    opened = [open_checkpoint(path) for path in chosen]
    kv = _OWN_KV_CACHE_BYTES if own else run.KV_CACHE_BYTES
    files = [file.path for checkpoint in opened for file in checkpoint.files]
    task = bar.add_task("reading all files once", total=len(files) + 4 * len(chosen))
    for file in files:
        _read(file)
        bar.advance(task)
    together = run.plain_fits([checkpoint.nbytes for checkpoint in opened])

    step = _steps(bar, task)
    results = models.results(folder)
    plain = run.run_plain(chosen, results / "plain.log", step("plain vLLM"), kv, together)
    config = {"enabled": not off}
    shared = run.run_shared(chosen, results / "shared.log", step("sharing"), kv, config)
    return plain, shared


def _steps(bar: Progress, task: TaskID) -> Callable[[str], run.Step]:
    """What to call with each event of one side."""

    def step(side: str) -> run.Step:
        def told(event: str, model: str) -> None:
            bar.update(task, description=f"{side}: {_WORDS[event]} {model}".rstrip())
            bar.advance(task, event in _STEPS)

        return told

    return step


def _read(file: Path) -> None:
    """Bring a file into the page cache, so that who comes second has no advantage."""
    buffer = bytearray(_READ_BYTES)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


if __name__ == "__main__":
    main(prog_name="scripts/demo")
