"""Models that have leaves in common with others, run on that memory and on private memory.

A model is loaded as a user loads it, after one of which every other leaf differs. Then its weights
are placed in turns: as they were loaded, mapped from the residents, and copied into private memory.
Nothing else of it changes.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bench.stats import ENVIRONMENT
from tensor_dedup import enable, report
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.residents.param_data import set_param_data
from tensor_dedup.loader.unsharing.lookup import residents_of

NEW_TOKENS: Final = 8
# Four bytes a number: what a token costs is then reading the weights, 320 MB.
_LLAMA: Final[dict[str, Any]] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
# 250 MB, most of it in convolutions of 9 MiB and more.
_UNET: Final[dict[str, Any]] = {
    "sample_size": 8,
    "block_out_channels": (512, 1024),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "mid_block_type": None,
    "up_block_types": ("UpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 64,
}


class PlacedModel:
    """A model whose weights lie in one of two memories. For one thread."""

    def __init__(self, model: nn.Module, run: Callable[[], object]) -> None:
        """Take a model as it was loaded, and what is to be run."""
        found = residents_of(model.parameters())
        self._run = run
        self._parts = [
            (each, found[id(each)][1]) for each in model.parameters() if id(each) in found
        ]
        self.nbytes: Final = sum(each.nbytes for each in model.parameters())
        self.extents: Final = sum(len(resident.extents) for _, resident in self._parts)
        self.leaf_shared_bytes: Final = sum(each.leaf_shared_bytes for _, each in self._parts)
        if not self.leaf_shared_bytes:
            raise UnsupportedError(f"no leaf is shared; nothing to measure: {report().models[-1]}")
        self._sides: dict[str, list[torch.Tensor]] = {}

    def renew(self) -> None:
        """Map and copy all weights anew, elsewhere in memory, and use every page of both."""
        self._sides.clear()
        gc.collect()
        shared = [resident.map() for _, resident in self._parts]
        self._sides = {"leaves": shared, "private": [each.clone() for each in shared]}
        self.on_private()
        self.on_leaves()

    def on_leaves(self) -> None:
        """Run it on memory that others have leaves of."""
        self._on("leaves")

    def on_private(self) -> None:
        """Run it on private memory."""
        self._on("private")

    def _on(self, side: str) -> None:
        for (parameter, _), tensor in zip(self._parts, self._sides[side], strict=True):
            set_param_data(parameter, tensor)
        self._run()


def _save(model: Any, folder: Path) -> tuple[Path, Path]:
    """Write a model, and one of which every other leaf of each tensor differs."""
    base, tune = folder / "base", folder / "tune"
    for path in (base, tune):
        model.save_pretrained(path, safe_serialization=True)
    [file] = tune.glob("*.safetensors")
    tensors = load_file(file)
    for tensor in tensors.values():
        tensor.view(-1)[:: 2 * LEAF_BYTES // tensor.itemsize] += 1
    save_file(tensors, file, {"format": "pt"})
    return base, tune


@contextmanager
def llama(folder: Path) -> Iterator[PlacedModel]:
    """vLLM's engine of a fine-tune of a Llama, which decodes, beside the engine of its base."""
    os.environ.update(ENVIRONMENT, VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    import transformers
    from vllm import SamplingParams

    from bench.loading import engine, let_go

    kinds: Any = transformers
    torch.manual_seed(1)
    base, tune = _save(kinds.LlamaForCausalLM(kinds.LlamaConfig(**_LLAMA)).float(), folder)
    # By default vLLM makes half of it, and of every leaf something new.
    more: dict[str, Any] = {"dedup": {"cpu_weights": "plain"}, "dtype": "float32"}
    engines = [engine(path, **more) for path in (base, tune)]
    core: Any = engines[1].llm_engine.engine_core
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True
    )

    def decode() -> None:
        prompts: Any = [{"prompt_token_ids": [1, 2, 3, 4]}]
        engines[1].generate(prompts, sampling, use_tqdm=False)

    try:
        yield PlacedModel(core.engine_core.model_executor.driver_worker.worker.get_model(), decode)
    finally:
        for each in engines:
            let_go(each)
        engines.clear()


@contextmanager
def unet(folder: Path) -> Iterator[PlacedModel]:
    """Diffusers' UNet of a fine-tune, which makes one step, beside that of its base."""
    import diffusers

    kind: Any = diffusers.UNet2DConditionModel
    torch.manual_seed(1)
    paths = _save(kind(**_UNET), folder)
    with enable():
        base, tune = (kind.from_pretrained(path) for path in paths)
    noise, text = torch.randn(1, 4, 8, 8), torch.randn(1, 7, _UNET["cross_attention_dim"])

    def step() -> None:
        with torch.no_grad():
            tune(noise, 3, text)

    yield PlacedModel(tune, step)
    del base
