"""Measures how much a model's outputs on given texts change with other weights in some layers."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from tensor_dedup.analyze.tensors import AnalyzedTensor
from tensor_dedup.errors import (
    CheckpointNotFoundError,
    ConfigError,
    NotInstalledError,
    UnsupportedError,
)
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.formats.errors import shorten
from tensor_dedup.formats.layers.layer_pairs import Layer
from tensor_dedup.suggestions import install_hint


@dataclass(frozen=True, slots=True)
class Movement:
    """How much a fine-tune's outputs change with some layers replaced, over all tokens of samples.

    `old` are the logits of the fine-tune, and `new` those with the layers replaced. If the model
    has no logits, they are its last hidden states.

    * `distance` is |new - old| / |old|. It is None if it is infinite, or if an output is NaN.
    * `agreement` is the fraction of tokens at which `new` and `old` have the same largest logit. It
      is None without logits. Tokens with NaN do not agree.
    """

    samples: int
    distance: float | None
    agreement: float | None


class Samples:
    """A fine-tune and its base, and texts on which their outputs are compared. For one thread.

    Both models are loaded by transformers from their folders and kept in memory. They are run in
    float32 on the CPU.

    Raises:
        ConfigError: There is no text, or the fine-tune has no tokenizer.
        CheckpointNotFoundError: Transformers cannot load one of the models.
        NotInstalledError: Transformers is not installed.
        UnsupportedError: An output of the fine-tune is NaN or infinite.
    """

    def __init__(self, tune: Path, base: Path, texts: Sequence[str]) -> None:
        if not texts:
            raise ConfigError("there are no samples; give a file with one text a line")
        try:
            import transformers
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise NotInstalledError(
                f"samples need transformers; {install_hint('diffusers')}, or choose without them",
                module="transformers",
            ) from error
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(tune, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{tune}: has no tokenizer for the samples ({error})") from error
        self._model, self._base = _load(tune), _load(base).state_dict()
        # A tokenizer that was saved without its model's length has none, and would not shorten.
        most = getattr(self._model.config, "max_position_embeddings", tokenizer.model_max_length)
        length = {"truncation": True, "max_length": min(most, tokenizer.model_max_length)}
        self._inputs = [tokenizer(text, return_tensors="pt", **length) for text in texts]
        self._own = self._model.state_dict()
        self._followers = _followers(self._own, tune)
        self._outputs = [self._run(each, {}) for each in self._inputs]
        for number, (text, output) in enumerate(zip(texts, self._outputs, strict=True), 1):
            if not output.isfinite().all():
                raise UnsupportedError(
                    f"{tune}: its outputs on sample {number} ({shorten(text)}) are not all finite "
                    "numbers, so nothing can be compared with them; choose without samples",
                    path=str(tune),
                    sample=number,
                )

    def moved(self, layers: Sequence[Layer[AnalyzedTensor]]) -> Movement:
        """Return how much the fine-tune's outputs change if `layers` are taken from the base.

        Raises:
            UnsupportedError: Transformers uses another name for a tensor than the files do.
        """
        other = dict[str, torch.Tensor]()
        for tensor, its in (pair for layer in layers for pair in layer.pairs):
            name, value = _called(self._own, tensor.name), self._base[_called(self._base, its.name)]
            other |= dict.fromkeys((name, *self._followers.get(name, ())), value)
        found = [self._run(each, other) for each in self._inputs]
        apart = size = agreeing = positions = 0.0
        for new, old in zip(found, self._outputs, strict=True):
            apart += float((new - old).double().square().sum())
            size += float(old.double().square().sum())
            same = (new.argmax(-1) == old.argmax(-1)) & ~new.isnan().any(-1)
            agreeing += float(same.sum())
            positions += old.shape[:-1].numel()
        share = agreeing / positions if self._has_logits else None
        moved = 0.0 if apart == 0 else math.sqrt(apart / size) if size else math.inf
        return Movement(len(found), moved if math.isfinite(moved) else None, share)

    def _run(
        self, inputs: Mapping[str, torch.Tensor], other: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        with torch.inference_mode():
            found = functional_call(self._model, other, kwargs=dict(inputs), tie_weights=False)
        self._has_logits = "logits" in found
        output: torch.Tensor = found["logits"] if self._has_logits else found["last_hidden_state"]
        return output


def _followers(state: Mapping[str, torch.Tensor], path: Path) -> dict[str, tuple[str, ...]]:
    """Return the tensors of a model that are one with a tensor of its files, by that one's name.

    Transformers ties only what the files do not hold, or hold with equal numbers: where one of two
    such is another's, the new checkpoint is loaded with two.
    """
    tied = defaultdict[object, list[str]](list)
    for name, tensor in state.items():
        tied[tensor.data_ptr(), tensor.shape, tensor.stride()].append(name)
    groups = [names for names in tied.values() if len(names) > 1]
    files = [name for name, _, _ in open_checkpoint(path).tensors()] if groups else []
    found = {}
    for names in groups:
        held = [name for name in names if any(_matches(name, each) for each in files)]
        found[(held or names)[0]] = tuple(name for name in names if name not in held)
    return found


def _load(path: Path) -> Any:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        names = config.architectures or ()
        known = (getattr(transformers, name, None) for name in names)
        kind = next((each for each in known if each is not None), transformers.AutoModel)
        return kind.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    except (OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"{path}: transformers cannot load it ({error}); choose without samples", path=str(path)
        ) from error


def _called(state: Mapping[str, torch.Tensor], name: str) -> str:
    """What transformers calls a tensor of a file: it adds or drops the name of an outer module."""
    if name in state:
        return name
    found = [each for each in state if _matches(each, name)]
    if len(found) != 1:
        raise UnsupportedError(
            f"{name}: transformers has {len(found) or 'no'} tensors of that name, so it cannot be "
            "told how far outputs move; choose without samples",
            tensor=name,
        )
    return found[0]


def _matches(one: str, other: str) -> bool:
    return one == other or one.endswith("." + other) or other.endswith("." + one)
