"""Tiny checkpoints of further kinds: an adapter, drafts, images, poolers; and what was loaded.

Everything is bfloat16 and seeded, and is derived from the text models of `tiny_checkpoints`, so
that models of two kinds have weights in common.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import safetensors.torch
import torch
import transformers as hf
from torch import nn

from models import tiny_checkpoints as checkpoints
from vllm_runs import engines

if TYPE_CHECKING:
    from vllm import LLM

Tensors = dict[str, torch.Tensor]
HIDDEN, VOCABULARY = 128, 512
IMAGE_TOKEN, IMAGE_SIZE, PATCH_SIZE = VOCABULARY - 1, 32, 8
_QUERIES = 8
TOWER = "vision_model."


def derive(source: Path, target: Path, tensors: Tensors, **config: Any) -> Path:
    """A checkpoint of these tensors, with the configuration of `source` changed by `config`."""
    target.mkdir(parents=True, exist_ok=True)
    save(target / checkpoints.WEIGHTS, tensors)
    settings = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(settings | config))
    return target


def save(file: Path, tensors: Tensors) -> None:
    """Write a safetensors file."""
    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(dense, file, metadata={"format": "pt"})


def noise(seed: int, *shape: int, scale: float = 0.05) -> torch.Tensor:
    """Random numbers, always the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)


def lora(base: Path, target: Path) -> Path:
    """A low-rank adapter for every matrix of a llama, as peft saves one."""
    import peft

    torch.manual_seed(31)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=8, target_modules=names, init_lora_weights=False)
    model = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    peft.get_peft_model(model, config).save_pretrained(str(target))
    return target


def eagle(base: Path, target: Path) -> Path:
    """A draft of one layer for a llama, without embedding and head: it takes the target's."""
    held = _layer(checkpoints.tensors(base), "layers.0.")
    del held["layers.0.input_layernorm.weight"]
    held["fc.weight"] = noise(32, HIDDEN, 2 * HIDDEN)
    return derive(base, target, held, num_hidden_layers=1)


def mimo(base: Path, target: Path) -> Path:
    """A qwen2 with a layer that predicts one more token, in the same files."""
    held, prefix = checkpoints.tensors(base), "model.mtp_layers.0."
    added = _layer(held, prefix)
    for number, name in enumerate(("token_layernorm", "hidden_layernorm", "final_layernorm")):
        added[f"{prefix}{name}.weight"] = noise(33 + number, HIDDEN) + 1
    added[f"{prefix}input_proj.weight"] = noise(36, HIDDEN, 2 * HIDDEN)
    more = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return derive(base, target, held | added, **more)


def _layer(held: Tensors, prefix: str) -> Tensors:
    """The first layer's tensors, changed and renamed."""
    first = "model.layers.0."
    return {
        prefix + name.removeprefix(first): tensor * 1.1 + 0.01
        for name, tensor in held.items()
        if name.startswith(first)
    }


def embedder(base: Path, target: Path) -> Path:
    """The body of a llama alone, under the names that such a file has."""
    held = {n.removeprefix("model."): t for n, t in _body(base).items()}
    return with_tokenizer(derive(base, target, held, architectures=["LlamaModel"]))


def classifier(base: Path, target: Path) -> Path:
    """A llama with three classes for a head."""
    held = _body(base) | {"score.weight": noise(41, 3, HIDDEN, scale=1)}
    labels: dict[str, Any] = {"id2label": {str(n): f"LABEL_{n}" for n in range(3)}}
    more = {"architectures": ["LlamaForSequenceClassification"], **labels}
    return with_tokenizer(derive(base, target, held, **more))


def reward(base: Path, target: Path) -> Path:
    """A qwen2 that rewards every token."""
    held = _body(base)
    held |= {"score.0.weight": noise(42, HIDDEN, HIDDEN), "score.0.bias": noise(43, HIDDEN)}
    held |= {"score.2.weight": noise(44, 1, HIDDEN), "score.2.bias": noise(45, 1)}
    return with_tokenizer(derive(base, target, held, architectures=["Qwen2ForRewardModel"]))


def reranker(base: Path, target: Path) -> Path:
    """A qwen3 that answers yes or no, of whose head vLLM makes a classifier while loading."""
    more: dict[str, Any] = {"classifier_from_token": ["w7", "w9"]}
    more["architectures"] = ["Qwen3ForSequenceClassification"]
    more["is_original_qwen3_reranker"] = True
    return with_tokenizer(derive(base, target, checkpoints.tensors(base), **more))


def with_tokenizer(path: Path) -> Path:
    """The checkpoint with a tokenizer: vLLM does not make a pooling engine without one."""
    tokenizer().save_pretrained(path)
    return path


def _body(base: Path) -> Tensors:
    held = checkpoints.tensors(base).items()
    return {name: tensor for name, tensor in held if name.startswith("model.")}


def tokenizer() -> Any:
    """A word for every number, and one for an image."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{n}": n for n in range(IMAGE_TOKEN)} | {"<image>": IMAGE_TOKEN}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    kind: Any = hf.PreTrainedTokenizerFast
    special = {"pad_token": "w0", "eos_token": "w2", "additional_special_tokens": ["<image>"]}
    return kind(tokenizer_object=raw, unk_token="w0", **special)


def seeing(root: Path) -> tuple[Path, Path, Path]:
    """A model that sees, and two fine-tunes of all but its vision tower."""
    base = root / "base"
    model = _blip()
    model.save_pretrained(base)
    _processor().save_pretrained(base)
    return base, _tuned(base, root / "first", 1.02), _tuned(base, root / "second", 0.97)


def _blip() -> Any:
    """A tower, queries that look at what it sees, and a language model that is told of it."""
    torch.manual_seed(51)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": 4}
    config = hf.Blip2Config(
        vision_config=hf.Blip2VisionConfig(
            num_hidden_layers=8,
            intermediate_size=256,
            image_size=IMAGE_SIZE,
            patch_size=PATCH_SIZE,
            **sizes,
        ),
        qformer_config=hf.Blip2QFormerConfig(
            num_hidden_layers=2, intermediate_size=256, vocab_size=VOCABULARY, **sizes
        ),
        text_config=hf.OPTConfig(
            num_hidden_layers=2,
            ffn_dim=256,
            word_embed_proj_dim=HIDDEN,
            vocab_size=VOCABULARY,
            max_position_embeddings=512,
            **sizes,
        ),
        num_query_tokens=_QUERIES,
        image_token_index=IMAGE_TOKEN,
    )
    kind: Any = hf.Blip2ForConditionalGeneration
    model = kind(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3).add_(torch.randn_like(parameter) * 0.02)
    return model


def _processor() -> Any:
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    images: Any = BlipImageProcessorPil
    kind: Any = hf.Blip2Processor
    side = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return kind(images(size=side), tokenizer(), num_query_tokens=_QUERIES)


def _tuned(source: Path, target: Path, factor: float) -> Path:
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    held = {
        name: tensor if TOWER in name else tensor * factor + 0.001
        for name, tensor in checkpoints.tensors(source).items()
    }
    save(target / checkpoints.WEIGHTS, held)
    return target


def pictures() -> list[dict[str, Any]]:
    """Two prompts with an image each, which differ in nothing but the image."""
    from PIL import Image

    side = (IMAGE_SIZE, IMAGE_SIZE)
    images = [Image.new("RGB", side, colour) for colour in ((200, 30, 90), (10, 120, 240))]
    tokens = [1, 5, 9, 12]
    return [{"prompt_token_ids": tokens, "multi_modal_data": {"image": i}} for i in images]


def pooled(llm: "LLM", task: str) -> tuple[tuple[float, ...], ...]:
    """What a pooling model makes of two prompts, every number of it."""
    from vllm_runs import plain

    prompts: Any = [{"prompt_token_ids": list(prompt)} for prompt in plain.PROMPTS]
    kind: Any = task
    found = llm.encode(prompts, pooling_task=kind, use_tqdm=False)
    return tuple(tuple(each.outputs.data.flatten().tolist()) for each in found)


Loaded = list[dict[str, str]]
# In place of the fingerprint of a parameter without bytes, which is equal to any other.
NOTHING = "not checked"


@contextmanager
def assembled() -> Iterator[Loaded]:
    """A fingerprint of each parameter of each model that plain vLLM loads, none packed yet."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    with _after(DefaultModelLoader, "load_weights", lambda args, _: args[1]) as found:
        yield found


@contextmanager
def loaded_states() -> Iterator[Loaded]:
    """The same, of saved states."""
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    with _after(ShardedStateLoader, "load_weights", lambda args, _: args[1]) as found:
        yield found


@contextmanager
def streamed() -> Iterator[Loaded]:
    """The same, of what is streamed."""
    from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

    with _after(RunaiModelStreamerLoader, "load_weights", lambda args, _: args[1]) as found:
        yield found


@contextmanager
def finished() -> Iterator[Loaded]:
    """A fingerprint of every parameter of each model that our loader hands over."""
    from tensor_dedup.patches.vllm.loader import TensorDedupLoader

    with _after(TensorDedupLoader, "load_model", lambda _, model: model) as found:
        yield found


@contextmanager
def _after(
    kind: type, name: str, model_of: Callable[[tuple[Any, ...], Any], nn.Module]
) -> Iterator[Loaded]:
    found: Loaded = []
    original = getattr(kind, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        named = model_of(args, result).named_parameters(remove_duplicate=False)
        found.append({each: _checked(parameter) for each, parameter in named})
        return result

    with mock.patch.object(kind, name, wrapped):
        yield found


def _checked(parameter: nn.Parameter) -> str:
    return NOTHING if parameter.is_meta or not parameter.numel() else engines.fingerprint(parameter)


@contextmanager
def packing() -> Iterator[list[str]]:
    """A fingerprint of every weight that vLLM packs, just before it does."""
    from vllm.model_executor.layers import utils

    found: list[str] = []
    original = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: nn.Module, remove_weight: bool) -> None:
        weight = layer.get_parameter("weight")
        if not weight.is_meta:  # a pooling model's head, which is never used
            found.append(engines.fingerprint(weight))
        original(layer, remove_weight)

    with mock.patch.object(utils, "dispatch_cpu_unquantized_gemm", dispatch):
        yield found


def same_memory(one: nn.Module, other: nn.Module) -> dict[str, bool]:
    """`engines.forms`, whether or not an adapter was put around the layers of either."""
    return engines.forms(_Bare(one), _Bare(other))


class _Bare(nn.Module):
    """A model seen without the layers that adapters put around its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters(*args, **kwargs):
            yield name.replace(".base_layer", ""), parameter

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for name, module in self.model.named_modules(*args, **kwargs):
            yield name.replace(".base_layer", ""), module
