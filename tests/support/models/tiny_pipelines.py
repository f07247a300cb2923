"""Tiny random pipelines of Diffusers that share components as published ones do; single files.

Everything is float32, seeded, and written by Diffusers as a user would write it. The tokenizer is
made of bytes: nothing is downloaded. A pipeline can also be written as one file in the layout that
Stable Diffusion was first published in, with the names of the original code
("model.diffusion_model.input_blocks.1.0.in_layers.0.weight"), which Diffusers converts back.
"""

import copy
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.utils.logging import disable_progress_bar
from safetensors.torch import save_file
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)
from transformers.utils import logging as hf_logging

from tensor_dedup import shares_memory

disable_progress_bar()
hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

# Their classes are typed in part only.
_D: Any = diffusers
_HIDDEN = 64
_PROMPT = "a cat in a hat"


def make(root: Path) -> None:
    """Write `sd`, `tuned` (of it: cross attention), `fp16` (of it), `base` and `refiner`."""
    tokenizer = byte_tokenizer(root / "tokenizer")
    vae, text = _vae(1), _text(2, CLIPTextModel, len(tokenizer))
    unet = _unet(3, cross_attention_dim=_HIDDEN)
    _sd(vae, text, unet, tokenizer).save_pretrained(root / "sd")
    half = [copy.deepcopy(each).half() for each in (vae, text, unet)]
    _sd(half[0], half[1], half[2], tokenizer).save_pretrained(root / "fp16", variant="fp16")
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if "attn2" in name:
                parameter.add_(0.01 * torch.randn_like(parameter))
    _sd(vae, text, unet, tokenizer).save_pretrained(root / "tuned")


def make_xl(root: Path) -> None:
    """Write `base` and `refiner`, with the second text encoder and the VAE in common.

    The UNet of `base` is in several files.
    """
    tokenizer = byte_tokenizer(root / "tokenizer")
    vae = _vae(4)
    second = _text(5, CLIPTextModelWithProjection, len(tokenizer))
    unet = _unet_xl(7, 2 * _HIDDEN, _HIDDEN + 6 * 8)
    text = _text(6, CLIPTextModel, len(tokenizer))
    xl(vae, text, second, unet, tokenizer).save_pretrained(root / "base")
    shutil.rmtree(root / "base" / "unet")
    unet.save_pretrained(root / "base" / "unet", max_shard_size="200KB")
    _D.StableDiffusionXLImg2ImgPipeline(
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=second,
        tokenizer_2=tokenizer,
        unet=_unet_xl(8, _HIDDEN, _HIDDEN + 5 * 8),
        scheduler=_scheduler(),
        requires_aesthetics_score=True,
        force_zeros_for_empty_prompt=False,
    ).save_pretrained(root / "refiner")


def xl(vae: Any, text: Any, second: Any, unet: Any, tokenizer: CLIPTokenizer) -> Any:
    """A pipeline of these parts."""
    return _D.StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=text,
        text_encoder_2=second,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=_scheduler(),
    )


def load(path: Path, **options: Any) -> Any:
    """The pipeline of a folder, without a progress bar."""
    pipeline = _D.DiffusionPipeline.from_pretrained(path, local_files_only=True, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def image(pipeline: Any, **options: Any) -> bytes:
    """The bytes of what two steps make of a fixed prompt and noise."""
    drawn = pipeline(
        _PROMPT,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **options,
    )
    return np.asarray(drawn.images).tobytes()


def parameters(loaded: Any) -> dict[str, nn.Parameter]:
    """Every parameter of a pipeline or model, by component and name."""
    if isinstance(loaded, nn.Module):
        return dict(loaded.named_parameters())
    return {
        f"{component}.{name}": parameter
        for component, module in _modules(loaded)
        for name, parameter in module.named_parameters()
    }


def nbytes(loaded: Any) -> int:
    """What the parameters take."""
    return sum(parameter.nbytes for parameter in parameters(loaded).values())


def shared(a: Any, b: Any) -> set[str]:
    """Names of parameters that are the same physical memory in both."""
    theirs = parameters(b)
    return {n for n, p in parameters(a).items() if n in theirs and shares_memory(p, theirs[n])}


def equal(a: Any, b: Any) -> set[str]:
    """Names of parameters that have equal values in both."""
    theirs = parameters(b)
    return {n for n, p in parameters(a).items() if n in theirs and torch.equal(p, theirs[n])}


def _modules(pipeline: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module):
            yield name, component


def byte_tokenizer(folder: Path) -> CLIPTokenizer:
    """One token a byte, as GPT-2 names bytes, and with the end of a word."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + n) for n in range(256 - len(plain)))
    letters = [chr(byte) if byte in plain else next(others) for byte in range(256)]
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=77)
    return tokenizer


def _text(seed: int, kind: Any, vocabulary: int) -> Any:
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=_HIDDEN,
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
        pad_token_id=1,
    )
    return kind(config).eval()


def _vae(seed: int) -> Any:
    torch.manual_seed(seed)
    return _D.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        sample_size=32,
    )


def _unet(seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    return _D.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **options,
    )


def _unet_xl(seed: int, cross: int, projection: int) -> Any:
    return _unet(
        seed,
        cross_attention_dim=cross,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=projection,
    )


def _sd(vae: Any, text: Any, unet: Any, tokenizer: CLIPTokenizer) -> Any:
    return _D.StableDiffusionPipeline(
        vae=vae,
        text_encoder=text,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _scheduler() -> Any:
    return _D.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1)


_RESNET = (
    ("norm1", "in_layers.0"),
    ("conv1", "in_layers.2"),
    ("norm2", "out_layers.0"),
    ("conv2", "out_layers.3"),
    ("time_emb_proj", "emb_layers.1"),
    ("conv_shortcut", "skip_connection"),
)
_UNET = (
    ("time_embedding.linear_1", "time_embed.0"),
    ("time_embedding.linear_2", "time_embed.2"),
    ("conv_in", "input_blocks.0.0"),
    ("conv_norm_out", "out.0"),
    ("conv_out", "out.2"),
    ("mid_block.resnets.0", "middle_block.0"),
    ("mid_block.attentions.0", "middle_block.1"),
    ("mid_block.resnets.1", "middle_block.2"),
)
_VAE = (
    ("conv_norm_out", "norm_out"),
    ("mid_block.resnets.0", "mid.block_1"),
    ("mid_block.resnets.1", "mid.block_2"),
    ("mid_block.attentions.0", "mid.attn_1"),
    ("downsamplers.0", "downsample"),
    ("upsamplers.0", "upsample"),
    ("conv_shortcut", "nin_shortcut"),
    (".resnets.", ".block."),
)
_VAE_ATTENTION = (
    ("group_norm", "norm"),
    ("to_q", "q"),
    ("to_k", "k"),
    ("to_v", "v"),
    ("to_out.0", "proj_out"),
)


def write_single_file(pipeline: Any, file: Path) -> Path:
    """Write a pipeline of `tiny_pipelines` into one file, and return the file."""
    tensors = {
        **_prefixed("model.diffusion_model.", _original_unet(pipeline.unet)),
        **_prefixed("first_stage_model.", _original_vae(pipeline.vae)),
        **_prefixed("cond_stage_model.transformer.", _original_text(pipeline.text_encoder)),
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


def load_single_file(file: Path, folder: Path, **options: Any) -> Any:
    """The pipeline of such a file; configuration and tokenizer are those of a folder."""
    pipeline = _D.StableDiffusionPipeline.from_single_file(
        str(file), config=str(folder), local_files_only=True, **options
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _prefixed(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _replaced(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    for ours, theirs in pairs:
        name = name.replace(ours, theirs)
    return name


def _original_text(model: nn.Module) -> dict[str, torch.Tensor]:
    # The original holds a module within the module; newer classes have it no more.
    state = {name.removeprefix("text_model."): each for name, each in model.state_dict().items()}
    return _prefixed("text_model.", state)


def _original_unet(model: Any) -> dict[str, torch.Tensor]:
    layers = model.config.layers_per_block
    return {_unet_name(name, layers): each for name, each in model.state_dict().items()}


def _unet_name(name: str, layers: int) -> str:
    """`layers`: residual blocks of a block on the way down; on the way up there is one more."""
    found = re.fullmatch(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.*)", name)
    if found is None:
        return _replaced(_replaced(name, _RESNET) if ".resnets." in name else name, _UNET)
    way, block, kind, index, rest = found.groups()
    place = int(block) * (layers + 1) + int(index)
    if kind == "downsamplers":
        return f"input_blocks.{place + layers + 1}.0.op.{rest.removeprefix('conv.')}"
    if kind == "upsamplers":
        attends = 2 if block == "0" else 1  # tiny pipelines attend in the first block only
        return f"output_blocks.{place + layers}.{attends}.{rest}"
    outer = f"input_blocks.{place + 1}" if way == "down" else f"output_blocks.{place}"
    part, rest = (0, _replaced(rest, _RESNET)) if kind == "resnets" else (1, rest)
    return f"{outer}.{part}.{rest}"


def _original_vae(model: Any) -> dict[str, torch.Tensor]:
    last = len(model.config.up_block_types) - 1
    found = {}
    for name, tensor in model.state_dict().items():
        up = re.sub(r"up_blocks\.(\d+)", lambda m: f"up.{last - int(m[1])}", name)
        theirs = _replaced(up.replace("down_blocks.", "down."), _VAE)
        if ".mid.attn_1." in theirs:
            head, _, tail = theirs.rpartition("attn_1.")
            theirs = f"{head}attn_1.{_replaced(tail, _VAE_ATTENTION)}"
            # The original's are convolutions of one pixel.
            tensor = tensor[:, :, None, None] if tensor.dim() == 2 else tensor
        found[theirs] = tensor
    return found
