"""Checkpoints of mixtures of very many, very small experts, to count with and not to talk to."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from bench.fine_tunes import WEIGHTS
from demonstration.models import check_space

HIDDEN: Final = 64
INTERMEDIATE: Final = 32
HEADS: Final = 2
HEAD_SIZE: Final = 32
VOCABULARY: Final = 256


@dataclass(frozen=True)
class Mixture:
    """The number of its layers and of the experts in each; `dense`: layers without, at first."""

    name: str
    layers: int
    experts: int
    dense: int = 0

    @property
    def expert_tensors(self) -> int:
        """Three matrices each."""
        return (self.layers - self.dense) * self.experts * 3


# As many layers with experts as it takes for about 45,000 expert tensors, by the names of:
# Qwen3-235B-A22B has 94 layers of 128, DeepSeek-V3 61 of 256, three of them dense.
QWEN3: Final = Mixture("qwen3-moe", 118, 128)
DEEPSEEK: Final = Mixture("deepseek-v3", 61, 256, dense=3)
SMALL: Final = Mixture("qwen3-moe", 2, 4)  # to make a process ready with
MIXTURES: Final = {mixture.name: mixture for mixture in (QWEN3, DEEPSEEK)}

_COMMON: Final[dict[str, Any]] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INTERMEDIATE,
    "intermediate_size": 2 * INTERMEDIATE,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
}
_RANKS: Final = {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def made(mixture: Mixture, work: Path) -> Path:
    """The folder of this checkpoint under `work`, made where it is missing. UnsupportedError."""
    path = work / f"{mixture.name}-{mixture.layers}x{mixture.experts}"
    if not path.is_dir():
        shapes = dict(_shapes(mixture))
        size = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
        check_space(work, [mixture.name], each=size)
        unfinished = path.with_name(f".{path.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        generator = torch.Generator().manual_seed(1)
        tensors = {
            name: torch.randn(shape, generator=generator, dtype=torch.bfloat16) * 0.05
            for name, shape in shapes.items()
        }
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
        (unfinished / "config.json").write_text(json.dumps(_configuration(mixture)))
        unfinished.rename(path)
    return path


def _configuration(mixture: Mixture) -> dict[str, Any]:
    layers = {"num_hidden_layers": mixture.layers}
    own: dict[str, Any]
    if mixture.name == QWEN3.name:
        own = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": HEAD_SIZE,
            "num_experts": mixture.experts,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        }
        return {**_COMMON, **layers, **own}
    own = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_routed_experts": mixture.experts,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": mixture.dense,
        "qk_nope_head_dim": HEAD_SIZE,
        "v_head_dim": HEAD_SIZE,
        **_RANKS,
    }
    return {**_COMMON, **layers, **own}


def _shapes(mixture: Mixture) -> Iterator[tuple[str, tuple[int, ...]]]:
    attention = _qwen3_attention if mixture.name == QWEN3.name else _deepseek_attention
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield name, (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for number in range(mixture.layers):
        layer = f"model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", (HIDDEN,)
        for name, shape in attention().items():
            yield f"{layer}.self_attn.{name}.weight", shape
        yield from _mlp(mixture, number)


def _mlp(mixture: Mixture, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    mlp = f"model.layers.{number}.mlp"
    if number < mixture.dense:
        yield from _matrices(mlp, 2 * INTERMEDIATE)
        return
    yield f"{mlp}.gate.weight", (mixture.experts, HIDDEN)
    if mixture.name == DEEPSEEK.name:
        yield f"{mlp}.gate.e_score_correction_bias", (mixture.experts,)
        yield from _matrices(f"{mlp}.shared_experts", INTERMEDIATE)
    for expert in range(mixture.experts):
        yield from _matrices(f"{mlp}.experts.{expert}", INTERMEDIATE)


def _matrices(prefix: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (size, HIDDEN)
    yield f"{prefix}.up_proj.weight", (size, HIDDEN)
    yield f"{prefix}.down_proj.weight", (HIDDEN, size)


def _qwen3_attention() -> dict[str, tuple[int, ...]]:
    wide = HEADS * HEAD_SIZE
    return {
        **{f"{name}_proj": (wide, HIDDEN) for name in "qkv"},
        "o_proj": (HIDDEN, wide),
        "q_norm": (HEAD_SIZE,),
        "k_norm": (HEAD_SIZE,),
    }


def _deepseek_attention() -> dict[str, tuple[int, ...]]:
    query, latent, rope = _RANKS["q_lora_rank"], _RANKS["kv_lora_rank"], _RANKS["qk_rope_head_dim"]
    return {
        "q_a_proj": (query, HIDDEN),
        "q_a_layernorm": (query,),
        "q_b_proj": (HEADS * (HEAD_SIZE + rope), query),
        "kv_a_proj_with_mqa": (latent + rope, HIDDEN),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (HEADS * 2 * HEAD_SIZE, latent),
        "o_proj": (HIDDEN, HEADS * HEAD_SIZE),
    }
