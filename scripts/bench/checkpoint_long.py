"""Fine-tuning a network of GPT-2's size on text: the benchmark the article leaves undone."""

import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from checkpoint_methods import TORCH, Chunks, Files, Method, Ours, emptied
from stats import estimate

_BLOCK: Final = 64
_BATCH: Final = 2
Say = Callable[[str], None]


def gpt2(work: Path, quick: bool, say: Say) -> list[str]:
    """Weights after each step of two fine-tunes: only the last block, and all weights."""
    lines = [
        "GPT-2's architecture with random weights (no released ones are at hand), on Python's own"
        " library as text, a byte a token, AdamW. A checkpoint a step; weights only.",
        "",
        "| trained | checkpoints | method | MB, apparent | median save, s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for frozen in (True, False):
        say(f"GPT-2: {'last block' if frozen else 'all'}")
        lines += _rows(emptied(work / "gpt2"), frozen, 2 if quick else 5)
    emptied(work / "gpt2")
    return lines


def _rows(folder: Path, frozen: bool, steps: int) -> Iterator[str]:
    methods: list[Method] = [Ours(folder / "ours"), Chunks(folder / "chunks", TORCH)]
    methods.append(Files("torch.save", folder / "files", TORCH))
    times: dict[str, list[float]] = {method.name: [] for method in methods}
    with ExitStack() as stack:
        for method in methods:
            stack.enter_context(closing(method))
        for step, model in enumerate(_trained(frozen, steps)):
            for method in methods:
                began = time.perf_counter()
                method.save(model, step)
                times[method.name].append(time.perf_counter() - began)
    for method in methods:
        size, seconds = method.size().apparent / 1e6, estimate(times[method.name]).text(2)
        part = "the last block" if frozen else "all weights"
        yield f"| {part} | {steps + 1} | {method.name} | {size:,.1f} | {seconds} |"


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
