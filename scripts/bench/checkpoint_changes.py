"""How much stays the same between two checkpoints, and what the differences weigh."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import torch
import zstandard
from numpy.typing import NDArray

from bench import checkpoint_models as models
from bench.checkpoint_methods import SKLEARN, TORCH, XGBOOST, Kind, emptied, size_of
from tensor_dedup.store.gathered import flat_bytes
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.adapters import adapter_for
from tensor_dedup.training.state import pieces

_CHUNK: Final = 256 << 10  # the article's ratios late in training are at this size
Bytes = dict[str, bytes]


def unchanged(quick: bool) -> list[str]:
    """Of the arrays of a checkpoint, how many are byte for byte in the next one."""
    head = "| checkpoints | arrays as TensorCAS cuts them | as tensor-dedup does | the article |\n"
    lines = [head + "| --- " * 4 + "|"]
    steps = 3 if quick else 10
    cases: Sequence[tuple[str, Kind, Iterator[Any], str]] = (
        ("scikit-learn, 10 more trees a step", SKLEARN, _trees(steps), "100 %"),
        ("XGBoost, 10 trees and more", XGBOOST, _rounds(steps), "90.9 %"),
        ("ResNet-18 frozen, eval mode", TORCH, _frozen(steps, "eval"), "~99 %"),
        ("ResNet-18 frozen, train mode", TORCH, _frozen(min(steps, 4), "train"), "48 %"),
        ("ResNet-18, all trained", TORCH, _all(min(steps, 4)), "~0 %"),
    )
    for name, kind, sequence, article in cases:
        theirs, ours = [], []
        for model in sequence:
            theirs.append({key: array.tobytes() for key, array in kind.arrays(model).items()})
            parts = pieces(adapter_for(model).extract(model))
            ours.append({piece.name: bytes(flat_bytes(piece.data)[:]) for piece in parts})
        lines.append(f"| {name} | {_share(theirs)} | {_share(ours)} | {article} |")
    return lines


def deltas(work: Path, quick: bool) -> list[str]:
    """Ratios of arithmetic differences as the article takes them, and what ours stores."""
    head = (
        "| training of all tensors | the difference by zstd, to the tensors by zstd (τ) |"
        " to the tensors raw | stored by tensor-dedup, to the tensors raw | the article's τ |\n"
    )
    lines = [head + "| --- " * 5 + "|"]
    steps, pairs = (1, 2) if quick else (4, 3)
    for name, rate, article in (
        ("early, AdamW, rate 1e-3", 1e-3, "1.17 to 1.31"),
        ("late, AdamW, rate 1e-5", 1e-5, "0.58 to 0.92"),
    ):
        taken = list(_pairs(models.pretrained(), rate, steps, pairs))
        found = [_ratios(before, after) for before, after in itertools.pairwise(taken)]
        stored = _stored(emptied(work / "deltas"), taken)
        cells = [name, *(_span(each) for each in zip(*found, strict=True)), _span(stored), article]
        lines.append(f"| {' | '.join(cells)} |")
    emptied(work / "deltas")
    return lines


def _trees(steps: int) -> Iterator[Any]:
    forest = models.Forest(10)
    return (forest.grow(10) if step else forest.model for step in range(steps))


def _rounds(steps: int) -> Iterator[Any]:
    rounds = models.Rounds(10)
    return (rounds.grow(1) if step else rounds.model for step in range(steps))


def _frozen(steps: int, mode: str) -> Iterator[Any]:
    model = models.pretrained()
    if mode == "eval":
        yield from models.Head(model, 0.01, 0).epochs(steps)
        return
    for step in range(steps):
        models.train(model, [*model.fc.parameters()], torch.optim.SGD, 0.01, 1, step)
        yield model


def _all(steps: int) -> Iterator[Any]:
    model = models.pretrained()
    for step in range(steps):
        models.train(model, [*model.parameters()], torch.optim.SGD, 0.01, 1, step)
        yield model


def _share(steps: Sequence[Bytes]) -> str:
    """Over the arrays of the first step, as the article counts: those that grow are not in it."""
    same = sum(
        after.get(name) == before[name]
        for before, after in itertools.pairwise(steps)
        for name in steps[0]
    )
    count = len(steps[0])
    return f"{same / (count * (len(steps) - 1)):.1%} of {count}"


def _pairs(model: Any, rate: float, steps: int, count: int) -> Iterator[dict[str, torch.Tensor]]:
    parameters = [*model.parameters()]
    models.train(model, parameters, torch.optim.AdamW, rate, steps, 1)
    for number in range(count):
        models.train(model, parameters, torch.optim.AdamW, rate, steps, 2 + number)
        yield {name: value.clone() for name, value in model.state_dict().items()}


def _ratios(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> tuple[float, float]:
    difference = plain = raw = 0
    for name, tensor in after.items():
        difference += _compressed((tensor - before[name]).numpy())
        plain += _compressed(tensor.numpy())
        raw += tensor.nbytes
    return difference / plain, difference / raw


def _compressed(array: NDArray[Any]) -> int:
    data, packer = array.tobytes(), zstandard.ZstdCompressor()
    return sum(len(packer.compress(data[at : at + _CHUNK])) for at in range(0, len(data), _CHUNK))


def _stored(folder: Path, taken: Sequence[dict[str, torch.Tensor]]) -> list[float]:
    sizes = []
    for step, state in enumerate(taken):
        with closing(CheckpointStore(folder, "run")) as store:
            nbytes = store.save(state, step).nbytes
        # Only now: encoding goes on after `save` and ends with `close`.
        sizes.append((size_of(folder / "containers").apparent, nbytes))
    return [(after - before) / nbytes for (before, _), (after, nbytes) in itertools.pairwise(sizes)]


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"
