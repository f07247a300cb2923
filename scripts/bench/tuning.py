"""Fine-tunes of MiniLM, trained for real: what the codecs are measured on.

In-batch contrastive learning on adjacent lines of the Python library's source, AdamW with weight
decay 0.01, linear decay, gradients clipped at 1.0, batches of 4 pairs of 24 tokens, 300 steps in
one thread. The weights of training are float32; what is saved is what people publish: bfloat16.
"""

import itertools
import random
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

STEPS, PAIRS, TOKENS = 300, 4, 24
RATES: Mapping[str, float] = {"A": 2e-5, "B": 1e-5}
_SCALE = 20.0


def tuned(base: Path, work: Path) -> dict[str, Path]:
    """A folder each for the bf16 base and its bf16 fine-tunes; trained where they are missing."""
    found = {"base": _saved(work / "base-bf16", load_file(base / "model.safetensors"))}
    for name, rate in RATES.items():
        folder = work / f"{name}{STEPS}-bf16"
        if not (folder / "model.safetensors").exists():
            _saved(folder, train(base, rate))
        found[name] = folder
    return found


def _saved(folder: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    half = {
        name: tensor.bfloat16().contiguous() if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    partial = folder / "partial"
    save_file(half, partial)
    partial.rename(folder / "model.safetensors")
    return folder


def train(base: Path, rate: float) -> dict[str, torch.Tensor]:
    """The weights after STEPS steps from `base` at this learning rate."""
    import transformers as hf

    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(base)
    model: Any = hf.AutoModel.from_pretrained(base, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    losses = []
    for batch in _batches():
        loss = _loss(model, tokenizer, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    first, last = (sum(part) / 20 for part in (losses[:20], losses[-20:]))
    print(f"rate {rate}: loss {first:.3f} -> {last:.3f}", file=sys.stderr)  # noqa: T201
    # Under the names of the file it came from, with what is no parameter (position numbers) too.
    state = model.state_dict()
    return {
        name: state.get(name, tensor)
        for name, tensor in load_file(base / "model.safetensors").items()
    }


def _loss(model: Any, tokenizer: Any, batch: list[tuple[str, str]]) -> Any:
    first, second = (_embedded(model, tokenizer, list(side)) for side in zip(*batch, strict=True))
    return torch.nn.functional.cross_entropy(first @ second.T * _SCALE, torch.arange(len(batch)))


def _embedded(model: Any, tokenizer: Any, lines: list[str]) -> torch.Tensor:
    tokens = tokenizer(lines, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def _batches() -> Iterator[list[tuple[str, str]]]:
    library = Path(sysconfig.get_path("stdlib"))
    pairs = []
    for path in sorted(library.glob("*.py")):
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
        lines = [line for line in lines if len(line) > 20]
        pairs += list(itertools.pairwise(lines))
    dice = random.Random(0)
    for _ in range(STEPS):
        yield dice.sample(pairs, PAIRS)
