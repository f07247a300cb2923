"""Weights that have leaves in common with others, beside the same weights in private memory.

Models are loaded as a user loads them, after one of which every other leaf differs, and are run on
both memories in turns. Nothing else of them changes.
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bench.stats import ENVIRONMENT
from demonstration import models
from demonstration.engine import facts
from tensor_dedup import enable, report, unshare
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.residents import leaves
from tensor_dedup.loader.residents.leaves import build_from_leaves
from tensor_dedup.loader.residents.param_data import set_param_data
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM, registry
from tensor_dedup.loader.residents.resident import pack

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


class TwoMemories:
    """Tensors of which others have leaves: mapped from those, and copied. For one thread.

    Where memory comes to lie decides a few percent of what reading it costs, so `renew` makes all
    of it anew, the two in the other order each time.
    """

    def __init__(self, bases: Sequence[torch.Tensor], tunes: Sequence[torch.Tensor]) -> None:
        """Take tensors in private memory, and what others are to have of each."""
        self._tensors = list(zip(bases, tunes, strict=True))
        self._leaves_first = False
        self.shared: list[torch.Tensor] = []
        self.private: list[torch.Tensor] = []
        self.leaf_shared_bytes = self.extents = 0

    def renew(self) -> None:
        """Make both anew, elsewhere in memory."""
        self.shared, self.private = [], []
        gc.collect()
        self._leaves_first = not self._leaves_first
        if self._leaves_first:
            self._map()
        self.private = [tune.clone() for _, tune in self._tensors]
        if not self._leaves_first:
            self._map()

    def _map(self) -> None:
        made = []
        for number, (base, tune) in enumerate(self._tensors):
            [held] = pack([(base, f"base {number}")])
            registry.register(held)
            found = build_from_leaves(tune, f"tune {number}")
            assert found is not None
            made.append(found)
        self.leaf_shared_bytes = sum(each.leaf_shared_bytes for each in made)
        self.extents = sum(len(each.extents) for each in made)
        self.shared = [each.map() for each in made]


class PlacedModel:
    """A model whose weights lie in one of two memories. For one thread."""

    def __init__(self, base: nn.Module, tune: nn.Module, run: Callable[[], object]) -> None:
        """Take two models in private memory that were loaded sharing, and what is to be run."""
        pairs = zip(base.parameters(), tune.parameters(), strict=True)
        parts = [(theirs, mine) for theirs, mine in pairs if mine.nbytes >= LEAF_SHARED_FROM]
        self._parameters = [mine for _, mine in parts]
        self._run = run
        self.nbytes: Final = sum(each.nbytes for each in tune.parameters())
        self.memories: Final = TwoMemories(
            [theirs.detach().clone() for theirs, _ in parts],
            [mine.detach().clone() for _, mine in parts],
        )
        self.renew()

    def renew(self) -> None:
        """Make both memories anew, and use every page of them."""
        self.memories.renew()
        self.on_private()
        self.on_leaves()

    def on_leaves(self) -> None:
        """Run it on memory that others have leaves of."""
        self._on(self.memories.shared)

    def on_private(self) -> None:
        """Run it on private memory."""
        self._on(self.memories.private)

    def _on(self, tensors: Sequence[torch.Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            set_param_data(parameter, tensor)
        self._run()


@dataclass(frozen=True)
class GrownVocabulary:
    """What the demonstration's grown vocabulary adds to a process that has its base, in bytes.

    By the kernel's account (PSS, every page of the weights read), without its KV cache: sharing
    whole tensors only, and by leaf, when its digests are not known and when they are. `again` is
    what the base adds when it is loaded once more.
    """

    whole: int
    unknown: int
    known: int
    again: int


def grown_vocabulary(work: Path) -> GrownVocabulary:
    """Load the demonstration's base, and beside it the same with 256 more rows of vocabulary.

    Weights are plain. The checkpoints are made in `work` where they are missing: 2 GB. The index of
    hints must be a new one.
    """
    os.environ.update(ENVIRONMENT)
    from bench.loading import engine, let_go, prepare_process
    from bench.process_memory import pss, settle

    base, grown = work / models.BASE, work / "grown-vocabulary"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for path in (base, grown):
            if not path.is_dir():
                pool.submit(models.make, path.name, work).result()
    prepare_process(base)

    def added(path: Path, *, known: bool, by_leaf: bool = True) -> int:
        settle()
        before = pss()
        one = engine(path, dedup={"cpu_weights": "plain"})
        cache = facts(one)["kv_cache"]
        settle()
        found = pss() - before - int(cache)
        last = report().models[-1]
        let_go(one)
        del one
        settle()
        if not last.shared_bytes or last.known != known or (last.leaf_shared_bytes > 0) != by_leaf:
            raise UnsupportedError(f"nothing to measure: {last}")
        return found

    first = engine(base, dedup={"cpu_weights": "plain"})
    facts(first)
    unknown, known = added(grown, known=False), added(grown, known=True)
    with patch.object(leaves, "LEAF_SHARED_FROM", 1 << 62):
        whole = added(grown, known=True, by_leaf=False)
    again = added(base, known=True, by_leaf=False)
    let_go(first)
    return GrownVocabulary(whole, unknown, known, again)


def _require_leaves() -> None:
    """Require that the last load has shared by leaf, as what is measured does."""
    last = report().models[-1]
    if not last.leaf_shared_bytes:
        raise UnsupportedError(f"no leaf is shared; nothing to measure: {last}")


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
    _require_leaves()
    models = []
    for each in engines:
        unshare(each)
        core: Any = each.llm_engine.engine_core
        models.append(core.engine_core.model_executor.driver_worker.worker.get_model())
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True
    )

    def decode() -> None:
        prompts: Any = [{"prompt_token_ids": [1, 2, 3, 4]}]
        engines[1].generate(prompts, sampling, use_tqdm=False)

    try:
        yield PlacedModel(models[0], models[1], decode)
    finally:
        models.clear()
        while engines:
            let_go(engines.pop())


@contextmanager
def unet(folder: Path) -> Iterator[PlacedModel]:
    """Diffusers' UNet of a fine-tune, which makes one step, beside that of its base."""
    import diffusers

    kind: Any = diffusers.UNet2DConditionModel
    torch.manual_seed(1)
    paths = _save(kind(**_UNET), folder)
    with enable():
        base, tune = (kind.from_pretrained(path) for path in paths)
    _require_leaves()
    for each in (base, tune):
        unshare(each)
    noise, text = torch.randn(1, 4, 8, 8), torch.randn(1, 7, _UNET["cross_attention_dim"])

    def step() -> None:
        with torch.no_grad():
            tune(noise, 3, text)

    yield PlacedModel(base, tune, step)
