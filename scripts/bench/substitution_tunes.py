"""Fine-tunes of a small encoder, what they score, and their weights in fewer bits."""

import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from bench.substitution_texts import Example, Texts

WEIGHTS: Final = "model.safetensors"
# What is nobody's in common, and stays as it is in every way of keeping the rest.
HEAD: Final = "classifier."
_SCALE: Final = 20.0
_AT_ONCE: Final = 64
_HEAD_RATE: Final = 3e-3
_BY_ROW: Final = 8
_GROUP: Final = 64
_SCALE_BYTES: Final = 2
# Fractions of the largest number of a group that its largest step may stand for.
_CLIPS: Final = tuple(1 - step / 40 for step in range(21))

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a task is learned: AdamW, weight decay 0.01, linear decay, gradients clipped at 1."""

    examples: int
    epochs: int
    batch: int
    rate: float
    tokens: int = 32


def fine_tune(base: Path, folder: Path, texts: Texts, recipe: Recipe, seed: int) -> None:
    """Write `folder/base` and `folder/tune` in bfloat16, under the same names of tensors.

    The head of a classifier is in `tune` only. Training has weights and moments in float32, and
    products in bfloat16.
    """
    import transformers as hf

    torch.manual_seed(seed)
    model = _fresh(base, texts)
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(base)
    start = {name: tensor for name, tensor in _half(model).items() if not name.startswith(HEAD)}
    examples = texts.training(seed, recipe.examples)
    order = random.Random(seed)
    steps = recipe.epochs * (len(examples) // recipe.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, weight_decay=0.01, fused=True)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    model.train()
    for _ in range(recipe.epochs):
        shuffled = order.sample(examples, len(examples))
        for at in range(0, len(shuffled) - recipe.batch + 1, recipe.batch):
            some = shuffled[at : at + recipe.batch]
            with _mixed():
                loss = _loss(model, tokenizer, some, texts.labels, recipe.tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            decay.step()
            optimizer.zero_grad()
    _save(folder / "base", start, model.config, tokenizer, "BertModel")
    _save(folder / "tune", _half(model), model.config, tokenizer, type(model).__name__)


def _mixed() -> torch.autocast:
    """Products in bfloat16, which takes a quarter of the time where the processor has them."""
    return torch.autocast("cpu", torch.bfloat16)


def _fresh(base: Path, texts: Texts) -> Any:
    import transformers as hf

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if not texts.labels:
        return hf.AutoModel.from_pretrained(base, **options)
    with _quiet():  # it says that the head is new
        return hf.AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=len(texts.labels), **options
        )


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _half(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().bfloat16() for name, each in model.named_parameters()}


def _save(
    folder: Path, weights: Mapping[str, torch.Tensor], config: Any, tokenizer: Any, kind: str
) -> None:
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    written = {**config.to_dict(), "architectures": [kind], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    save_file(dict(weights), folder / WEIGHTS, {"format": "pt"})


def _loss(
    model: Any, tokenizer: Any, some: Sequence[Example], labels: Sequence[str], tokens: int
) -> Any:
    texts, others = zip(*some, strict=True)
    if labels:
        targets = torch.tensor([labels.index(each) for each in others])
        return torch.nn.functional.cross_entropy(
            model(**_tokens(tokenizer, texts, tokens)).logits, targets
        )
    first, second = (_embedded(model, tokenizer, side, tokens) for side in (texts, others))
    with torch.autocast("cpu", enabled=False):
        scores = first @ second.T * _SCALE
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(some)))


def _tokens(tokenizer: Any, texts: Sequence[str], tokens: int) -> Any:
    return tokenizer(
        list(texts), padding=True, truncation=True, max_length=tokens, return_tensors="pt"
    )


def _embedded(model: Any, tokenizer: Any, texts: Sequence[str], tokens: int) -> torch.Tensor:
    """Means over the tokens of each text, of length one."""
    inputs = _tokens(tokenizer, texts, tokens)
    mask = inputs["attention_mask"].unsqueeze(-1)
    mean = (model(**inputs).last_hidden_state.float() * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


class Judge:
    """Scores weights on what was held out; products are in bfloat16, whatever weights are kept in.

    Of a classifier the scores are 1 where the class is right and 0 where it is wrong; of retrieval
    they are 1 over the rank of the right function among all that were held out.
    """

    def __init__(self, tune: Path, texts: Texts, tokens: int) -> None:
        import transformers as hf

        self._tokenizer: Any = hf.AutoTokenizer.from_pretrained(tune)
        kind = hf.AutoModelForSequenceClassification if texts.labels else hf.AutoModel
        self._model: Any = kind.from_pretrained(tune, dtype=torch.float32).eval()
        self._texts, self._tokens = texts, tokens

    @torch.inference_mode()
    def scores(self, weights: Mapping[str, torch.Tensor]) -> list[float]:
        """Return a score for each example that was held out, in order."""
        own = dict(self._model.named_parameters())
        if own.keys() != weights.keys():
            raise ValueError(f"not the same tensors: {sorted(own.keys() ^ weights.keys())[:4]}")
        for name, tensor in own.items():
            tensor.copy_(weights[name])
        texts, others = zip(*self._texts.held_out, strict=True)
        labels = self._texts.labels
        if labels:
            targets = torch.tensor([labels.index(each) for each in others])
            return (self._run(texts).argmax(-1) == targets).double().tolist()
        similar = self._run(texts) @ self._run(others).T
        better = (similar > similar.diagonal().unsqueeze(1)).sum(1)
        return (1 / (1 + better).double()).tolist()

    def _run(self, texts: Sequence[str]) -> torch.Tensor:
        """The outputs on these texts; those of about a length are computed together."""
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
        found = []
        for first in range(0, len(order), _AT_ONCE):
            chosen = [texts[at] for at in order[first : first + _AT_ONCE]]
            with _mixed():
                if self._texts.labels:
                    inputs = _tokens(self._tokenizer, chosen, self._tokens)
                    found.append(self._model(**inputs).logits.float())
                else:
                    found.append(_embedded(self._model, self._tokenizer, chosen, self._tokens))
        back = torch.tensor(order).argsort()
        return torch.cat(found)[back]


def with_head(tune: Path, base: Path, texts: Texts, recipe: Recipe, seed: int) -> Weights:
    """Return the base's weights with a head that was trained on it, all else frozen.

    The head learns from the same examples as the fine-tune did, in ten times as many epochs.
    """
    import transformers as hf

    torch.manual_seed(seed)
    weights = {**weights_of(tune), **weights_of(base)}
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(tune)
    model: Any = hf.AutoModelForSequenceClassification.from_pretrained(tune, dtype=torch.float32)
    model.load_state_dict({**model.state_dict(), **weights})
    model.eval()
    examples = texts.training(seed, recipe.examples)
    targets = torch.tensor([texts.labels.index(other) for _, other in examples])
    features = []
    with torch.no_grad(), _mixed():
        for at in range(0, len(examples), _AT_ONCE):
            some = [text for text, _ in examples[at : at + _AT_ONCE]]
            features.append(model.bert(**_tokens(tokenizer, some, recipe.tokens)).pooler_output)
    inputs = torch.cat(features).float()
    head = torch.nn.Linear(inputs.shape[1], len(texts.labels))
    optimizer = torch.optim.AdamW(head.parameters(), lr=_HEAD_RATE, weight_decay=0.01)
    for _ in range(10 * recipe.epochs):
        for batch in torch.split(torch.randperm(len(examples)), recipe.batch):
            optimizer.zero_grad()
            loss: Any = torch.nn.functional.cross_entropy(head(inputs[batch]), targets[batch])
            loss.backward()
            optimizer.step()
    trained = {HEAD + name: each.detach().bfloat16() for name, each in head.named_parameters()}
    return {**weights, **trained}


def weights_of(folder: Path) -> Weights:
    """Return the tensors of a checkpoint of one file, as they are kept."""
    return load_file(folder / WEIGHTS)


def quantised(
    weights: Mapping[str, torch.Tensor], bits: int, shared: Collection[str]
) -> tuple[dict[str, torch.Tensor], int]:
    """Return weights as they are after rounding to so many bits, and the bytes that they take.

    Symmetric, to the nearest of 2**bits - 1 steps, with a scale of 16 bits for each row (8 bits) or
    for each 64 numbers of a row: the one of 21 that leaves the least squared error. No data is used
    for it. All matrices are quantised but the head's. The tensors of `shared` are the base's: they
    are left as they are, and not counted.
    """
    found, nbytes = dict[str, torch.Tensor](), 0
    for name, tensor in weights.items():
        if name in shared:
            found[name] = tensor
        elif tensor.dim() < 2 or name.startswith(HEAD):
            found[name], nbytes = tensor, nbytes + tensor.nbytes
        else:
            group = tensor.shape[-1] if bits == _BY_ROW else _GROUP
            found[name], scales = rounded(tensor.float(), bits, group)
            nbytes += -(-tensor.numel() * bits // 8) + scales * _SCALE_BYTES
    return found, nbytes


def rounded(tensor: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, int]:
    """Return a matrix with its numbers rounded in groups of a row, and how many scales that took.

    Rows are multiples of `group` wide.
    """
    steps = 2 ** (bits - 1) - 1
    parts = tensor.reshape(-1, group)
    most = parts.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float16).tiny)
    best, error = torch.zeros_like(parts), torch.full_like(most, torch.inf)
    for clip in _CLIPS:
        scale = (most * clip / steps).half().float()
        scale = scale.clamp_min(torch.finfo(torch.float16).smallest_normal)
        near = (parts / scale).round().clamp(-steps, steps) * scale
        apart = (near - parts).square().sum(1, keepdim=True)
        best = torch.where(apart < error, near, best)
        error = torch.minimum(apart, error)
    return best.reshape(tensor.shape), len(parts)


def tiny(folder: Path, texts: Sequence[Texts]) -> Path:
    """Write a random encoder of two layers, with a tokenizer for these texts."""
    import transformers as hf

    words = sorted(
        {word for each in texts for pair in each.pool for word in pair[0].lower().split()}
    )
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words[:400]]
    tokenizer: Any = hf.BertTokenizer(
        vocab={word: at for at, word in enumerate(known)}, model_max_length=64
    )
    config = hf.BertConfig(
        vocab_size=len(known),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model: Any = hf.BertModel(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
