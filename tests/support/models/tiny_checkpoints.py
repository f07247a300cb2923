"""Tiny random checkpoints of many architectures, each with a fine-tune, and variants of them.

Every checkpoint is bfloat16 unless its function says otherwise, seeded, 1 to 6 MB, written by
transformers as a user would write it. A folder that exists is reused, so a root shared by a whole
session builds each checkpoint once. Nothing here imports vllm.
"""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers as hf
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()  # type: ignore[no-untyped-call]

BASE = "base"
FINE_TUNE = "fine_tune"
POOLING = frozenset({"bert", "roberta"})
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Three layers, so that a change in the last leaves whole layers alone; head size 32, the smallest
# that vLLM's CPU attention takes.
_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
_GPT2_LIKE: dict[str, Any] = {
    "n_embd": 128,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 512,
    "n_positions": 512,
}
_SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
_GEMMA: dict[str, Any] = {**_LLAMA_LIKE, "head_dim": 32, "sliding_window": 128}
_BERT_LIKE = {k: v for k, v in _LLAMA_LIKE.items() if k != "num_key_value_heads"}
_FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_DEEPSEEK: dict[str, Any] = {
    **_LLAMA_LIKE,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

# (class of the model, class of its configuration, the configuration)
_RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA_LIKE),
    "llama_tied": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_LLAMA_LIKE, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA_LIKE),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA_LIKE, "head_dim": 32}),
    "mistral": ("MistralForCausalLM", "MistralConfig", _LLAMA_LIKE),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_LLAMA_LIKE, **_FOUR_EXPERTS, "shared_expert_intermediate_size": 128},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_LLAMA_LIKE, **_FOUR_EXPERTS, "head_dim": 32},
    ),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _GEMMA),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2_LIKE),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_SMALL, "ffn_dim": 256, "word_embed_proj_dim": 128, "max_position_embeddings": 512},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_LLAMA_LIKE, "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _BERT_LIKE),
    "falcon": ("FalconForCausalLM", "FalconConfig", _SMALL),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 128, "n_layer": 3, "n_head": 4, "vocab_size": 512},
    ),
    "gptbigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT2_LIKE),
    "cohere": ("CohereForCausalLM", "CohereConfig", _LLAMA_LIKE),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _LLAMA_LIKE),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", _LLAMA_LIKE),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", _LLAMA_LIKE),
    "granite": ("GraniteForCausalLM", "GraniteConfig", _LLAMA_LIKE),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", _DEEPSEEK),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_LLAMA_LIKE,
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
        },
    ),
    "bert": ("BertModel", "BertConfig", _BERT_LIKE),
    "roberta": ("RobertaModel", "RobertaConfig", {**_BERT_LIKE, "max_position_embeddings": 514}),
}
ARCHITECTURES = tuple(_RECIPES)


@dataclass(frozen=True)
class Pair:
    """A base and its fine-tune; `changed` are the tensors of the files that differ."""

    base: Path
    fine_tune: Path
    changed: tuple[str, ...]


def make(arch: str, root: Path) -> Pair:
    """A random checkpoint of `arch` under `root` and a fine-tune with one changed weight.

    The changed weight is a matrix of the last layer; where a file stores it in pieces (experts),
    `changed` names every piece.
    """
    base, fine_tune = root / arch / BASE, root / arch / FINE_TUNE
    if not (base.exists() and fine_tune.exists()):
        model = _random_model(arch)
        _save(model, base)
        with torch.no_grad():
            _last_matrix(model).mul_(1.01)
        _save(model, fine_tune)
    return Pair(base, fine_tune, different(base, fine_tune))


def make_large(arch: str, root: Path, rows: int, new_rows: int, changed_row: int) -> Pair:
    """A random checkpoint of `arch` with so many rows of vocabulary, and a fine-tune with more.

    One of the rows that both have differs. Everything else is equal.
    """
    base, fine_tune = root / arch / BASE, root / arch / FINE_TUNE
    model: Any = _random_model(arch, vocab_size=rows)
    _save(model, base)
    model.resize_token_embeddings(rows + new_rows, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            if layer is not None:
                layer.weight[changed_row] *= 1.5
                layer.weight[rows:].normal_()
    _save(model, fine_tune)
    return Pair(base, fine_tune, different(base, fine_tune))


def save(model: Any, target: Path) -> Path:
    """A random model of any size, made by its own constructor, in bfloat16."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    _save(model.to(torch.bfloat16), target)
    return target


def different(a: Path, b: Path) -> tuple[str, ...]:
    """Names whose bytes, dtype or shape differ between two checkpoints, or that only one has."""
    left, right = tensors(a), tensors(b)
    names = {*left, *right}
    return tuple(sorted(n for n in names if not _same(left.get(n), right.get(n))))


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint folder, by name."""
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(file).items()
    }


def nbytes(path: Path) -> int:
    """Bytes of tensor data in a checkpoint folder."""
    return sum(t.numel() * t.element_size() for t in tensors(path).values())


def resharded(source: Path, target: Path, shards: int = 3) -> Path:
    """The same tensors in other files and in the opposite order, with an index."""
    with _publish(target, like=source) as folder:
        names = sorted(tensors(source), reverse=True)
        held, where = tensors(source), {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: held[name] for name in names[number::shards]}
            _write(folder / file, part)
            where.update(dict.fromkeys(part, file))
        index = {"metadata": {"total_size": nbytes(source)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index))
    return target


def merged_lora(
    source: Path,
    target: Path,
    modules: tuple[str, ...] = ("q_proj", "v_proj"),
    layers: tuple[int, ...] = (1,),
) -> Path:
    """`source` with a random low-rank adapter merged into `modules` of `layers` by peft."""
    if not target.exists():
        import peft

        torch.manual_seed(7)
        config = peft.LoraConfig(
            r=4,
            target_modules=list(modules),
            layers_to_transform=list(layers),
            init_lora_weights=False,
        )
        adapted: Any = peft.get_peft_model(_load(source), config)
        _save(adapted.merge_and_unload(), target)
    return target


def grown_vocabulary(source: Path, target: Path, rows: int = 64) -> Path:
    """`source` with `rows` more rows in embedding and head; the old rows are unchanged."""
    if not target.exists():
        torch.manual_seed(8)
        model = _load(source)
        model.resize_token_embeddings(model.config.vocab_size + rows, mean_resizing=False)
        _save(model, target)
    return target


def frozen_embedding(source: Path, target: Path) -> Path:
    """`source` with every tensor changed but embedding and head."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        keep = any(part in name for part in ("embed", "lm_head", "wte", "wpe"))
        return tensor if keep else tensor * 1.03 + 0.001

    return mapped(source, target, change)


def as_fp32(source: Path, target: Path) -> Path:
    """`source` with every tensor cast to float32."""
    copy = mapped(source, target, lambda name, tensor: tensor.float())
    config = json.loads((copy / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = "float32"
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def same_header(source: Path, target: Path) -> Path:
    """`source` with other weights under byte-identical file headers and equal file sizes."""
    with _publish(target, like=source) as folder:
        for file in sorted(source.glob("*.safetensors")):
            content = bytearray(file.read_bytes())
            data = 8 + int.from_bytes(content[:8], "little")
            # The lowest bit of each low byte: every bf16 value moves by at most 1/128 of itself.
            content[data::2] = bytes(byte ^ 1 for byte in content[data::2])
            (folder / file.name).write_bytes(content)
    return target


def same(source: Path, target: Path) -> Path:
    """A byte-for-byte copy in another folder (other inodes)."""
    with _publish(target, like=source) as folder:
        for file in sorted(source.glob("*.safetensors")):
            shutil.copyfile(file, folder / file.name)
    return target


VARIANTS: dict[str, Callable[[Path, Path], Path]] = {
    "same": same,
    "resharded": resharded,
    "merged_lora": merged_lora,
    "grown_vocabulary": grown_vocabulary,
    "frozen_embedding": frozen_embedding,
    "as_fp32": as_fp32,
    "same_header": same_header,
}


def _random_model(arch: str, **other: Any) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # GPTBigCode's module still uses torch.jit.script, which this torch calls deprecated.
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        kind, config, settings = _RECIPES[arch]
        built: Any = getattr(hf, kind)(getattr(hf, config)(**{**settings, **other}))
        model: hf.PreTrainedModel = built.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            # Fresh models predict nearly uniform logits and have constant norms and biases: the
            # first makes greedy tokens insensitive, the second would share where nothing should.
            if parameter.dim() >= 2:
                parameter.mul_(3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def _last_matrix(model: hf.PreTrainedModel) -> torch.Tensor:
    matrices: list[torch.Tensor] = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and ".2." in name and "bias" not in name
    ]
    return matrices[-1]


def _load(path: Path) -> hf.PreTrainedModel:
    return hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


def _save(model: hf.PreTrainedModel, target: Path) -> None:
    with _publish(target) as folder:
        model.save_pretrained(folder)


def mapped(source: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """`source` with every tensor replaced by what `change` makes of its name and values."""
    with _publish(target, like=source) as folder:
        for file in sorted(source.glob("*.safetensors")):
            held = safetensors.torch.load_file(file)
            _write(folder / file.name, {name: change(name, held[name]) for name in held})
    return target


def _write(file: Path, part: dict[str, torch.Tensor]) -> None:
    dense = {name: tensor.contiguous() for name, tensor in part.items()}
    safetensors.torch.save_file(dense, file, metadata={"format": "pt"})


@contextmanager
def _publish(target: Path, like: Path | None = None) -> Iterator[Path]:
    """A folder that becomes `target` when complete; tests in several processes share a root."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        if like is not None:
            for file in like.iterdir():
                if file.suffix != ".safetensors" and file.name != INDEX:
                    shutil.copyfile(file, folder / file.name)
        yield folder
        folder.chmod(0o755)
        if not target.exists():
            os.rename(folder, target)  # noqa: PTH104 (fails, unlike replace, on a full folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    # As bytes: NaN is not equal to itself, and 0.0 equals -0.0.
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
