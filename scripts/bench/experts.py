"""A checkpoint of very many, very small experts, to count tensors with and not to talk to."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from bench.fine_tunes import WEIGHTS
from demonstration.models import check_space

# Qwen3-235B-A22B has 94 layers of 128 experts; the largest mixtures have about 45,000 matrices.
LAYERS: Final = 118
EXPERTS: Final = 128
TENSORS: Final = LAYERS * EXPERTS * 3
_HIDDEN: Final = 64
_INTERMEDIATE: Final = 32
_HEADS: Final = 2
_HEAD: Final = 32
_VOCABULARY: Final = 256
_CONFIGURATION: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": _HIDDEN,
    "intermediate_size": 2 * _INTERMEDIATE,
    "moe_intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": _HEAD,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
}


def made(work: Path) -> Path:
    """The folder of the checkpoint under `work`, made where it is missing. UnsupportedError."""
    path = work / f"experts-{LAYERS}x{EXPERTS}"
    if not path.is_dir():
        shapes = dict(_shapes())
        size = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
        check_space(work, [path.name], each=size)
        unfinished = path.with_name(f".{path.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        generator = torch.Generator().manual_seed(1)
        tensors = {
            name: torch.randn(shape, generator=generator, dtype=torch.bfloat16) * 0.05
            for name, shape in shapes.items()
        }
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
        (unfinished / "config.json").write_text(json.dumps(_CONFIGURATION))
        unfinished.rename(path)
    return path


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield name, (_VOCABULARY, _HIDDEN)
    yield "model.norm.weight", (_HIDDEN,)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", (_HIDDEN,)
        for name in "qkv":
            yield f"{layer}.self_attn.{name}_proj.weight", (_HEADS * _HEAD, _HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (_HIDDEN, _HEADS * _HEAD)
        for name in "qk":
            yield f"{layer}.self_attn.{name}_norm.weight", (_HEAD,)
        yield f"{layer}.mlp.gate.weight", (EXPERTS, _HIDDEN)
        for expert in range(EXPERTS):
            prefix = f"{layer}.mlp.experts.{expert}"
            yield f"{prefix}.gate_proj.weight", (_INTERMEDIATE, _HIDDEN)
            yield f"{prefix}.up_proj.weight", (_INTERMEDIATE, _HIDDEN)
            yield f"{prefix}.down_proj.weight", (_HIDDEN, _INTERMEDIATE)
