"""The checkpoints that loads are measured with: the demonstration's, and further fine-tunes."""

import shutil
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import torch

from demonstration import models
from tensor_dedup.digest import digest
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.formats.safetensors import read_header

WEIGHTS: Final = "model.safetensors"
HALF: Final = "half-layers"

Content = tuple[str, str, tuple[int, ...]]  # digest, dtype, shape


def made(work: Path) -> dict[str, Path]:
    """Folders of `base`, `one-layer` and `half-layers` under `work`, made where they are missing.

    UnsupportedError when the disk cannot hold them and one more.
    """
    wanted = [models.BASE, "one-layer"]
    missing = [name for name in wanted if not (work / name).is_dir()]
    models.check_space(work, [*missing, HALF, "a fine-tune to load and delete"])
    # A process of its own: what transformers allocates and patches is not in what is measured.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for name in missing:
            pool.submit(models.make, name, work).result()
    if not (work / HALF).is_dir():
        fine_tune(work / models.BASE, work / HALF, range(models.LAYERS // 2, models.LAYERS))
    return {name: work / name for name in (*wanted, HALF)}


def fine_tune(base: Path, target: Path, layers: Iterable[int]) -> None:
    """Copy a bfloat16 checkpoint of one file and change every tensor of these layers."""
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(base, unfinished)
    parts = tuple(f".layers.{layer}." for layer in layers)
    generator = torch.Generator().manual_seed(sum(map(ord, target.name)))
    path = unfinished / WEIGHTS
    path.chmod(0o600)
    with path.open("r+b") as file:
        for spec in read_header(path).tensors:
            if any(part in spec.name for part in parts):
                file.seek(spec.start)
                values = torch.frombuffer(bytearray(file.read(spec.nbytes)), dtype=torch.bfloat16)
                noise = torch.randn(values.shape, generator=generator, dtype=torch.bfloat16)
                file.seek(spec.start)
                file.write((values * (1 + 0.1 * noise) + 0.01).view(torch.uint8).numpy().data)
    unfinished.rename(target)


def contents(path: Path) -> dict[Content, int]:
    """Every different tensor of a checkpoint, with its bytes, by what is in it."""
    found: dict[Content, int] = {}
    for _, file, spec in open_checkpoint(path).tensors():
        with file.path.open("rb") as opened:
            opened.seek(spec.start)
            found[digest(opened.read(spec.nbytes)), spec.dtype, spec.shape] = spec.nbytes
    return found


def differing_bytes(base: Path, fine_tuned: Path) -> int:
    """Bytes of the tensors of one checkpoint that another does not have."""
    there = contents(base)
    return sum(size for content, size in contents(fine_tuned).items() if content not in there)
