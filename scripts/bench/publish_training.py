"""Real trainings in bf16 whose steps are published: a model from its config, text, and AdamW."""

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

# Elements whose bits differ are counted, so numbers of two bytes are compared as integers.
Weights = dict[str, Tensor]
_VOCABULARY: Final = 8192
_TOKENS: Final = 64
_BATCH: Final = 2
_TEXT_BYTES: Final = 4 << 20


@dataclass(frozen=True)
class Setup:
    """The learning rate, and whether the optimizer has a copy of the weights in float32."""

    rate: float
    masters: bool

    @property
    def name(self) -> str:
        return f"lr {self.rate:.0e}, {'fp32 masters' if self.masters else 'bf16 alone'}".replace(
            "e-0", "e-"
        )


SETUPS: Final = tuple(
    Setup(rate, masters) for masters in (True, False) for rate in (1e-6, 3e-6, 1e-5)
)


def shape(millions: int) -> dict[str, int]:
    """The sizes of a Llama of so many million parameters, or a little more."""
    width = next(w for w in range(64, 4096, 64) if _parameters(w) >= millions * 1e6)
    return {
        "hidden_size": width,
        "intermediate_size": 8 * width // 3 // 64 * 64 + 64,
        "num_hidden_layers": max(2, width // 64),
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
    }


def _parameters(width: int) -> int:
    layers = max(2, width // 64)
    return _VOCABULARY * width + layers * (4 * width**2 + 3 * width * (8 * width // 3))


class Training:
    """A Llama with weights of the usual initial scale that learns to continue text."""

    def __init__(self, setup: Setup, millions: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes: dict[str, Any] = {"vocab_size": _VOCABULARY, **shape(millions)}
        config = LlamaConfig(tie_word_embeddings=True, **sizes)
        make: Any = LlamaForCausalLM
        self.model = make(config).to(torch.bfloat16)
        self._own = list(self.model.parameters())
        self._learnt = self._own
        if setup.masters:
            self._learnt = [p.detach().float().requires_grad_() for p in self._own]
        self._optimizer = torch.optim.AdamW(self._learnt, lr=setup.rate, weight_decay=0.0)
        self._dice = torch.Generator().manual_seed(1)

    @property
    def nbytes(self) -> int:
        """The size of the weights."""
        return sum(each.nbytes for each in self._own)

    def step(self) -> None:
        """Train one step."""
        text = _tokens()
        starts = torch.randint(len(text) - _TOKENS, (_BATCH,), generator=self._dice).tolist()
        batch = torch.stack([text[start : start + _TOKENS] for start in starts])
        torch.autograd.backward(self.model(input_ids=batch, labels=batch).loss)
        if self._learnt is not self._own:
            for own, learnt in zip(self._own, self._learnt, strict=True):
                assert own.grad is not None
                learnt.grad, own.grad = own.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self._learnt, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._learnt is not self._own:
            with torch.no_grad():
                for own, learnt in zip(self._own, self._learnt, strict=True):
                    own.copy_(learnt)

    def weights(self) -> Weights:
        """A copy of the weights, each as whole numbers of two bytes; tied ones once."""
        return {
            name: parameter.detach().view(torch.int16).clone()
            for name, parameter in self.model.named_parameters()
        }


@cache
def _tokens() -> Tensor:
    """Words of Python's library as numbers: the same text on every machine of one version."""
    text = "".join(_sources())[:_TEXT_BYTES]
    words = re.findall(r"\w+|\s+|[^\w\s]", text)
    common = Counter(words).most_common(_VOCABULARY - 1)
    numbers = {word: number + 1 for number, (word, _) in enumerate(common)}
    return torch.tensor([numbers.get(word, 0) for word in words])


def _sources() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")
