"""Checkpoints of published sizes that take next to no space: sparse files with a stamp a tensor.

Shapes come from the configurations that were published, on the meta device. A tensor is all zeros
but for its stamp, which no other one has; what two checkpoints have in common has one stamp in
both.
"""

import json
import struct
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers as hf
from blake3 import blake3

Shapes = Mapping[str, tuple[int, ...]]
_D: Any = diffusers
_BYTES = {"F16": 2, "F32": 4, "U8": 1}
_STAMP_BYTES = 16


def write(file: Path, shapes: Shapes, dtype: str, stamp: str) -> int:
    """Write these tensors; the bytes of all. Equal shapes and stamps are equal bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        nbytes = prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        begin = out.tell()
        out.truncate(begin + end)
        for number, (name, entry) in enumerate(header.items()):
            start, stop = entry["data_offsets"]
            # A number first, so that what is too small for a hash has a stamp of its own too.
            mark = struct.pack("<H", number + 1) + blake3(f"{stamp} {name}".encode()).digest()
            out.seek(begin + start)
            out.write(mark[: min(_STAMP_BYTES, stop - start)])
    return end


def shapes_of(build: Callable[[], Any]) -> Shapes:
    """Names and shapes of the parameters of a model."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in build().named_parameters()}


def clip_l() -> Any:
    """The text encoder of Stable Diffusion 1.5, and SDXL's first."""
    config: Any = hf.CLIPTextConfig(**_clip(768, 12, 12))
    kind: Any = hf.CLIPTextModel
    return kind(config)


def clip_bigg() -> Any:
    """SDXL's second text encoder."""
    config: Any = hf.CLIPTextConfig(**_clip(1280, 32, 20), projection_dim=1280)
    kind: Any = hf.CLIPTextModelWithProjection
    return kind(config)


def vae() -> Any:
    """The VAE of Stable Diffusion and SDXL."""
    return _D.AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
    )


def clip_bigg_of_four_layers() -> Any:
    """A tenth of SDXL's second text encoder."""
    config: Any = hf.CLIPTextConfig(**_clip(1280, 4, 20), projection_dim=1280)
    kind: Any = hf.CLIPTextModelWithProjection
    return kind(config)


def unet_sdxl() -> Any:
    """The U-Net of SDXL base."""
    return _unet_xl((320, 640, 1280), (1, 2, 10))


def unet_of_a_gigabyte() -> Any:
    """One half as wide, with fewer layers: 0.7 GB in 16 bits."""
    return _unet_xl((160, 320, 640), (1, 2, 4))


def llama_of_a_gigabyte() -> Any:
    """A Llama with 12 layers: 1.3 GB in 16 bits."""
    config: Any = hf.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    kind: Any = hf.LlamaForCausalLM
    return kind(config)


def _unet_xl(channels: tuple[int, int, int], layers: tuple[int, int, int]) -> Any:
    return _D.UNet2DConditionModel(
        sample_size=128,
        block_out_channels=channels,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(5, 10, 20),
        transformer_layers_per_block=layers,
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )


def t5_xxl() -> Any:
    """The text encoder of DeepFloyd IF."""
    config: Any = hf.T5Config(
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=24,
        num_heads=64,
        feed_forward_proj="gated-gelu",
    )
    kind: Any = hf.T5EncoderModel
    return kind(config)


def safety_checker() -> Any:
    """The image encoder of DeepFloyd IF's safety checker, with its two heads."""
    config: Any = hf.CLIPVisionConfig(**_clip(1024, 24, 16), patch_size=14, projection_dim=768)
    kind: Any = hf.CLIPVisionModelWithProjection
    model = kind(config)
    model.p_head = torch.nn.Linear(768, 1)
    model.w_head = torch.nn.Linear(768, 1)
    return model


def _clip(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
