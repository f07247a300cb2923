"""What a tensor takes in a store that has most of its leaves, and how long it takes to read.

    python scripts/bench/store_leaves.py [--pairs N]

An embedding of 64 MiB of float32 (random weights, rows of 896) is stored; then the same with one
changed row, with 256 new rows, and with fewer rows, as an import and as steps of a run, with codecs
and without. Each is read back and compared. Reading is compared, by the time of processors that it
takes, in pairs with a store that has nothing but the tensor, stored as it is; files are in the page
cache.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tensor_dedup import Store
from tensor_dedup.training import CheckpointStore

COLUMNS, ROWS = 896, (64 << 20) // 4 // 896
Array = NDArray[np.float32]


def embeddings() -> dict[str, Array]:
    """Return the embedding that others are stored against, and these."""
    dice = np.random.default_rng(0)
    base = (dice.standard_normal((ROWS, COLUMNS)) * 0.02).astype(np.float32)
    row = base.copy()
    row[ROWS // 3] = 1
    new = (dice.standard_normal((256, COLUMNS)) * 0.02).astype(np.float32)
    grown = np.concatenate([base, new])
    return {"base": base, "one row": row, "256 new rows": grown, "half": base[: ROWS // 2].copy()}


def container_bytes(root: Path) -> int:
    """Return the size of all containers of a store."""
    return sum(file.stat().st_size for file in (root / "containers").rglob("*") if file.is_file())


def saved(folder: Path, array: Array) -> Path:
    """Write a checkpoint of one tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"embedding": array}, str(folder / "model.safetensors"))
    return folder


def imports(folder: Path, arrays: Mapping[str, Array], *, encode: bool) -> list[str]:
    """Import each; return a line for each."""
    store, lines = Store.open(folder / "store"), []
    for name, array in arrays.items():
        path, before = saved(folder / name.replace(" ", "-"), array), container_bytes(store.path)
        began = time.monotonic()
        store.import_(path, compress="auto" if encode else None)
        seconds = time.monotonic() - began
        again = store.load(path.name, verify=True)["embedding"].numpy()
        assert np.array_equal(again, array)
        how = "auto" if encode else "None"
        taken = container_bytes(store.path) - before
        lines.append(
            f"{'import':<8}{how:<8}{name:<14}{array.nbytes:>12,}{taken:>12,}{seconds:>8.2f}"
        )
    assert store.verify(full=True).fine
    return lines


def steps(folder: Path, arrays: Mapping[str, Array], *, encode: bool) -> list[str]:
    """Save each as a step of a run; return a line for each, encoding afterwards included."""
    lines = []
    for step, (name, array) in enumerate(arrays.items()):
        with CheckpointStore(folder / "runs", "run", compress="auto" if encode else None) as run:
            before = container_bytes(run.store.path)
            seconds = run.save({"embedding": array}, step).seconds
        taken = container_bytes(run.store.path) - before
        how = "auto" if encode else "None"
        lines.append(f"{'save':<8}{how:<8}{name:<14}{array.nbytes:>12,}{taken:>12,}{seconds:>8.2f}")
    return lines


def reading(folder: Path, arrays: Mapping[str, Array], pairs: int) -> list[str]:
    """Compare reading each by leaf with reading it as it is; return a line for each."""
    lines = []
    both = Store.open(folder / "store")
    for name, array in arrays.items():
        alone = Store.open(folder / f"alone-{name}")
        path = saved(folder / name.replace(" ", "-"), array)
        alone.import_(path)
        ratios = []
        for number in range(pairs + 1):
            seconds = {}
            for store in (alone, both) if number % 2 else (both, alone):
                began = time.process_time()
                store.load(path.name)
                seconds[store.path] = time.process_time() - began
            if number:  # the first warms both
                ratios.append(seconds[both.path] / seconds[alone.path])
        ratios.sort()
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        middle = statistics.median(ratios)
        lines.append(
            f"{'read':<8}{'':<8}{name:<14}{middle:>10.2f} x as it is [{low:.2f}, {high:.2f}]"
        )
    return lines


@click.command()
@click.option("--pairs", default=15, help="How often each is read.")
def main(pairs: int) -> None:
    """Print a table."""
    arrays = embeddings()
    click.echo("         compress               bytes       taken  seconds")
    folder = Path(tempfile.mkdtemp(prefix="store-leaves-"))
    try:
        for encode in (False, True):
            place = folder / str(encode)
            for line in [
                *imports(place, arrays, encode=encode),
                *steps(place, arrays, encode=encode),
            ]:
                click.echo(line)
        for line in reading(folder / "False", arrays, pairs):
            click.echo(line)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
