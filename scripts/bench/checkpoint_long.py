"""Fine-tuning a network of GPT-2's size on text: the benchmark the article leaves undone."""

import random
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bench.checkpoint_methods import TORCH, Chunks, Files, Method, Ours, emptied
from bench.results import Figures
from bench.stats import estimate
from bench.turns import say, timed

NOTES: Final = """\
- GPT-2's architecture (124 million parameters) with random weights, for no released ones are at
  hand, trained on Python's own library as text, a byte a token, with AdamW at 5e-5. A checkpoint
  before the training and one a step; weights only.
- Each method saves every step, in an order drawn anew. *Save* is the median of all but the first.
  Ours is on the disk when `save` returns, and may wait there for what others left to the kernel
  before it, as may `torch.save + fsync`.
"""
_STEPS: Final = 8
_BLOCK: Final = 64
_BATCH: Final = 2


def gpt2(work: Path, figures: Figures, *, quick: bool, stated: bool) -> tuple[int, list[str]]:
    """Weights after each step of two fine-tunes: only the last block, and all weights.

    Their bytes are entered in `figures`. `stated`: only ours and plain files.
    """
    steps = 2 if quick else _STEPS
    lines = [
        "| trained | checkpoints | method | MB, apparent | save, s | the first save, s |",
        "| --- " * 6 + "|",
    ]
    for frozen in (True, False):
        say(f"GPT-2: {'last block' if frozen else 'all'}")
        lines += _rows(emptied(work / "gpt2"), figures, frozen, steps, stated)
    shutil.rmtree(work / "gpt2")
    return steps, lines


def _rows(folder: Path, figures: Figures, frozen: bool, steps: int, stated: bool) -> Iterator[str]:
    ours, files = Ours(folder / "ours"), Files("torch.save", folder / "files", TORCH)
    methods: list[Method] = [ours, files]
    if not stated:
        methods += [
            Ours(folder / "raw", raw=True),
            Chunks(folder / "chunks", TORCH),
            Files("torch.save", folder / "synced", TORCH, synced=True),
        ]
    part = "the last block" if frozen else "all weights"
    times: dict[str, list[float]] = {method.name: [] for method in methods}
    dice = random.Random(1)
    with ExitStack() as stack:
        for method in methods:
            stack.enter_context(closing(method))
        for step, model in enumerate(_trained(frozen, steps)):
            for method in dice.sample(methods, len(methods)):
                times[method.name].append(timed(partial(method.save, model, step)))
    for method in methods:
        size, (first, *later) = method.size().apparent / 1e6, times[method.name]
        cells = (part, str(steps + 1), method.name, f"{size:,.1f}", estimate(later).text(2))
        yield f"| {' | '.join(cells)} | {first:.2f} |"
    figures[f"bytes: GPT-2's size, {part}"] = [files.size().apparent], [ours.size().apparent]


def _trained(frozen: bool, steps: int) -> Iterator[Any]:
    """The model before training and after each step."""
    import transformers

    torch.manual_seed(0)
    make: Any = transformers.GPT2LMHeadModel
    model = make(transformers.GPT2Config())
    yield model
    if frozen:
        model.requires_grad_(False)
        model.transformer.h[-1].requires_grad_(True)
    moved = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepper = torch.optim.AdamW(moved, 5e-5)
    for tokens in _text(steps):
        stepper.zero_grad()
        torch.autograd.backward(model(input_ids=tokens, labels=tokens).loss)
        stepper.step()
        yield model


def _text(steps: int) -> Iterator[Tensor]:
    """Batches of bytes of the standard library's sources, in order."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    size = _BLOCK * _BATCH
    data = b"".join(path.read_bytes() for path in sources[:8])[: size * steps]
    for at in range(0, size * steps, size):
        yield torch.tensor(list(data[at : at + size])).view(_BATCH, _BLOCK)
