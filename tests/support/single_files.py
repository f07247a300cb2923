"""Stable Diffusion pipelines as one file in the layout they were first published in.

Import it from any test as `import single_files`. The names are those of the original code
("model.diffusion_model.input_blocks.1.0.in_layers.0.weight"): Diffusers converts them back.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file
from torch import nn

_D: Any = diffusers
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


def write(pipeline: Any, file: Path) -> Path:
    """Write a pipeline of `tiny_pipelines` into one file, and return the file."""
    tensors = {
        **_prefixed("model.diffusion_model.", _unet(pipeline.unet)),
        **_prefixed("first_stage_model.", _vae(pipeline.vae)),
        **_prefixed("cond_stage_model.transformer.", _text(pipeline.text_encoder)),
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


def load(file: Path, folder: Path, **options: Any) -> Any:
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


def _text(model: nn.Module) -> dict[str, torch.Tensor]:
    # The original holds a module within the module; newer classes have it no more.
    state = {name.removeprefix("text_model."): each for name, each in model.state_dict().items()}
    return _prefixed("text_model.", state)


def _unet(model: Any) -> dict[str, torch.Tensor]:
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


def _vae(model: Any) -> dict[str, torch.Tensor]:
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
