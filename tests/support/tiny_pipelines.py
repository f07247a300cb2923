"""Tiny random pipelines of Diffusers, which share components as published ones do.

Import it from any test as `import tiny_pipelines`. Everything is float32, seeded, and written by
Diffusers as a user would write it. The tokenizer is made of bytes: nothing is downloaded.
"""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.utils.logging import disable_progress_bar
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
    tokenizer = _tokenizer(root / "tokenizer")
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
    tokenizer = _tokenizer(root / "tokenizer")
    vae = _vae(4)
    second = _text(5, CLIPTextModelWithProjection, len(tokenizer))
    unet = _unet_xl(7, 2 * _HIDDEN, _HIDDEN + 6 * 8)
    _D.StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=_text(6, CLIPTextModel, len(tokenizer)),
        text_encoder_2=second,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=_scheduler(),
    ).save_pretrained(root / "base")
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


def _tokenizer(folder: Path) -> CLIPTokenizer:
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
