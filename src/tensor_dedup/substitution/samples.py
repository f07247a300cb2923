"""How far a model's outputs move on given texts, with other weights in some layers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tensor_dedup.analyze.tensors import AnalyzedTensor
from tensor_dedup.errors import CheckpointNotFoundError, ConfigError, UnsupportedError
from tensor_dedup.layer_pairs import Layer
from tensor_dedup.substitution.distance import Pair
from tensor_dedup.suggestions import install_hint


@dataclass(frozen=True, slots=True)
class Movement:
    """How far outputs have moved from the fine-tune's, over all tokens of all samples.

    `distance` is |new - old| / |old| of the logits, or of the last hidden states of a model without
    logits. `agreement` is the share of positions whose largest logit is the same, or None.
    """

    samples: int
    distance: float
    agreement: float | None


class Samples:
    """A fine-tune's outputs on some texts, computed in float32 on the CPU; for one thread.

    Holds the fine-tune and the base in memory, as transformers loads them from their folders.

    Raises:
        ConfigError: there is no text, or no tokenizer with the fine-tune.
        CheckpointNotFoundError: transformers cannot load one of them.
    """

    def __init__(self, tune: Path, base: Path, texts: Sequence[str]) -> None:
        if not texts:
            raise ConfigError("there are no samples; give a file with one text a line")
        try:
            import transformers
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise UnsupportedError(
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
        self._outputs = [self._run(each) for each in self._inputs]

    def moved(self, layers: Sequence[Layer[AnalyzedTensor]]) -> Movement:
        """Return how far the outputs move with these layers of the base.

        Raises:
            UnsupportedError: transformers calls a tensor otherwise than the files do.
        """
        pairs = [pair for layer in layers for pair in layer.pairs]
        with self._substituted(pairs):
            found = [self._run(each) for each in self._inputs]
        apart = size = agreeing = positions = 0.0
        for new, old in zip(found, self._outputs, strict=True):
            apart += float((new - old).double().square().sum())
            size += float(old.double().square().sum())
            agreeing += float((new.argmax(-1) == old.argmax(-1)).sum())
            positions += old.shape[:-1].numel()
        share = agreeing / positions if self._has_logits else None
        return Movement(len(found), (apart / size) ** 0.5 if size else 0.0, share)

    @contextmanager
    def _substituted(self, pairs: Sequence[Pair]) -> Iterator[None]:
        names = [
            (_called(self._own, tensor.name), _called(self._base, old.name))
            for tensor, old in pairs
        ]
        kept = {name: self._own[name].clone() for name, _ in names}
        try:
            for name, old in names:
                self._own[name].copy_(self._base[old])
            yield
        finally:
            for name, tensor in kept.items():
                self._own[name].copy_(tensor)

    def _run(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            found = self._model(**inputs)
        self._has_logits = "logits" in found
        output: torch.Tensor = found["logits"] if self._has_logits else found["last_hidden_state"]
        return output


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
    found = [each for each in state if each.endswith("." + name) or name.endswith("." + each)]
    if len(found) != 1:
        raise UnsupportedError(
            f"{name}: transformers has {len(found) or 'no'} tensors of that name, so it cannot be "
            "told how far outputs move; choose without samples",
            tensor=name,
        )
    return found[0]
