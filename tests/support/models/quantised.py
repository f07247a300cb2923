"""Quantised checkpoints, made from plain ones by the definition of each format.

Only the projections of the layers are quantised, as the tools that write these formats do it; equal
weights give equal tensors. Nothing here imports vllm.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from models import tiny_checkpoints as checkpoints
from tensor_dedup.digest import LEAF_BYTES

Tensors = dict[str, torch.Tensor]
_GROUP = 32
_BLOCK = (64, 128)
_FP8_MAX = 448.0
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Which of eight neighbours lies in each half byte of an int32, in AWQ's order.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Format:
    """`quantise`: the tensors of a weight by what they are called after the layer's name."""

    quantise: Callable[[torch.Tensor], Tensors]
    config: dict[str, Any]


def make(kind: str, source: Path, target: Path) -> Path:
    """The plain checkpoint in `source`, in a format; a folder that exists is reused."""
    if target.exists():
        return target
    chosen = FORMATS[kind]
    held: Tensors = {}
    for name, tensor in checkpoints.tensors(source).items():
        layer, _, last = name.rpartition(".")
        if not layer.endswith("_proj") or last != "weight":
            held[name] = tensor
            continue
        for part, value in chosen.quantise(tensor.float()).items():
            held[f"{layer}.{part}"] = value.contiguous()
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in (checkpoints.WEIGHTS, "config.json"):
            (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = chosen.config
    (target / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(held, target / checkpoints.WEIGHTS, {"format": "pt"})
    return target


def with_kv_scales(source: Path, target: Path) -> Path:
    """A checkpoint of the fp8 format with a scale for the keys and values of each layer."""
    held = checkpoints.tensors(source)
    layers = {name.rpartition(".k_proj")[0] for name in held if ".k_proj." in name}
    for number, layer in enumerate(sorted(layers)):
        held[f"{layer}.attn.k_scale"] = torch.tensor(0.02 + number / 100)
        held[f"{layer}.attn.v_scale"] = torch.tensor(0.03 + number / 100)
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != checkpoints.WEIGHTS:
            (target / file.name).write_bytes(file.read_bytes())
    safetensors.torch.save_file(held, target / checkpoints.WEIGHTS, {"format": "pt"})
    return target


def block_changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Change the signs of 128 x 128 numbers of an fp8 weight of the second layer's q.

    They are in its second leaf.
    """
    if not name.endswith("layers.1.self_attn.q_proj.weight"):
        return tensor
    rows = LEAF_BYTES // tensor.shape[1]
    changed = tensor.view(torch.uint8).clone()
    changed[rows + 128 : rows + 256, 128:256] ^= 0x80
    return changed.view(tensor.dtype)


_IN_GGUF = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_file(source: Path, target: Path, kind: str) -> Path:
    """A llama as a GGUF file whose matrices are of this type, as the `gguf` package writes it."""
    import gguf

    config = json.loads((source / "config.json").read_text())
    chosen = getattr(gguf.GGMLQuantizationType, kind)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for name, tensor in checkpoints.tensors(source).items():
        values = tensor.float().numpy()
        if tensor.dim() == 2:
            packed = gguf.quants.quantize(values, chosen)
            writer.add_tensor(_name_in_gguf(name), packed, raw_dtype=chosen)
        else:
            writer.add_tensor(_name_in_gguf(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _name_in_gguf(name: str) -> str:
    parts = name.split(".")
    block = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    return f"{block}{_IN_GGUF[parts[-2]]}.{parts[-1]}"


# --- fp8


def _fp8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max() / _FP8_MAX
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _fp8_static(weight: torch.Tensor) -> Tensors:
    return {**_fp8(weight), "input_scale": torch.tensor(0.05)}


def _fp8_rows(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / _FP8_MAX
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _fp8_block(weight: torch.Tensor) -> Tensors:
    rows, columns = _BLOCK
    blocks = weight.view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
    scale = blocks.abs().amax((1, 3)) / _FP8_MAX
    scaled = (blocks / scale[:, None, :, None]).view_as(weight)
    return {"weight": scaled.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


# --- whole numbers of 4 and 8 bits


def _packed(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight neighbours of 4 bits in an int32, along the last dimension."""
    eights = _parts(values.to(torch.int64), 8)[..., list(order)]
    joined = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(joined >= 1 << 31, joined - (1 << 32), joined).to(torch.int32)


def _grouped(weight: torch.Tensor) -> torch.Tensor:
    return _parts(weight, _GROUP)


def _parts(values: torch.Tensor, size: int) -> torch.Tensor:
    """The last dimension cut into parts of one size."""
    return values.reshape(*values.shape[:-1], -1, size)


def _signed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers from 0 to 15 that mean -8 to 7, and their scales by group."""
    groups = _grouped(weight)
    scale = (groups.abs().amax(-1) / 7).to(torch.float16)
    numbers = (groups / scale.float()[..., None]).round().clamp(-8, 7) + 8
    return numbers.flatten(1), scale


def _awq(weight: torch.Tensor) -> Tensors:
    groups = _grouped(weight)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).to(torch.float16)
    zero = (-low / scale.float()).round().clamp(0, 15)
    numbers = ((groups / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    return {
        "qweight": _packed(numbers.flatten(1).t(), _AWQ_ORDER),
        "qzeros": _packed(zero.t(), _AWQ_ORDER),
        "scales": scale.t(),
    }


def _gptq(weight: torch.Tensor) -> Tensors:
    numbers, scale = _signed(weight)
    # Zero points are stored one less than they are.
    zeros = torch.full((scale.shape[1], weight.shape[0]), 7)
    return {
        "qweight": _packed(numbers).t(),
        "qzeros": _packed(zeros),
        "scales": scale.t(),
        "g_idx": (torch.arange(weight.shape[1]) // _GROUP).to(torch.int32),
    }


def _w4a16(weight: torch.Tensor) -> Tensors:
    numbers, scale = _signed(weight)
    shape = torch.tensor(weight.shape)
    return {
        "weight_packed": _packed(numbers),
        "weight_scale": scale.bfloat16(),
        "weight_shape": shape,
    }


def _w8a8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _w8a8_static(weight: torch.Tensor) -> Tensors:
    scale = (weight.abs().max() / 127).view(1)
    numbers = (weight / scale).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor([0.05])}


def _w8a8_offset(weight: torch.Tensor) -> Tensors:
    zero = torch.tensor([3], dtype=torch.int8)
    return {**_w8a8_static(weight), "input_zero_point": zero}


# --- floats of 4 bits


def _fp4(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest floats of 4 bits (two, one and one), two to a byte."""
    nearest = (scaled.abs()[..., None] - _FP4).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpacked_fp4(packed: torch.Tensor) -> torch.Tensor:
    """What two to a byte mean."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    return _FP4[(codes & 7).long()] * torch.where(codes < 8, 1.0, -1.0)


def _nvfp4(weight: torch.Tensor) -> Tensors:
    all_of_it = _FP8_MAX * 6 / weight.abs().max()
    groups = _parts(weight, 16)
    scale = (groups.abs().amax(-1) / 6 * all_of_it).to(torch.float8_e4m3fn)
    scaled = groups / (scale.float() / all_of_it)[..., None]
    return {
        "weight_packed": _fp4(scaled.flatten(1)),
        "weight_scale": scale,
        "weight_global_scale": all_of_it.view(1),
        "input_global_scale": torch.tensor([_FP8_MAX * 6 / 20]),
    }


def _mxfp4(weight: torch.Tensor) -> Tensors:
    groups = _grouped(weight)
    exponent = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    scaled = groups / exponent.exp2()[..., None]
    return {
        "weight_packed": _fp4(scaled.flatten(1)),
        "weight_scale": (exponent + 127).to(torch.uint8),
    }


def _numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    common = {"num_bits": bits, "type": kind, "strategy": strategy}
    return {**common, "symmetric": True, "dynamic": False, **more}


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


_FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_PER_TOKEN = _numbers(8, "int", "token", dynamic=True)
_PER_TENSOR = _numbers(8, "int", "tensor")

FORMATS: dict[str, Format] = {
    "fp8": Format(_fp8, _FP8_CONFIG),
    "fp8 static": Format(_fp8_static, {**_FP8_CONFIG, "activation_scheme": "static"}),
    "fp8 block": Format(_fp8_block, {**_FP8_CONFIG, "weight_block_size": list(_BLOCK)}),
    "fp8 rows": Format(
        _fp8_rows,
        _compressed(
            "float-quantized",
            _numbers(8, "float", "channel"),
            _numbers(8, "float", "token", dynamic=True),
        ),
    ),
    "AWQ": Format(
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": _GROUP,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    "GPTQ": Format(
        _gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": _GROUP,
            "desc_act": False,
            "sym": True,
        },
    ),
    "w4a16": Format(
        _w4a16,
        _compressed("pack-quantized", _numbers(4, "int", "group", group_size=_GROUP), None),
    ),
    "w8a8": Format(_w8a8, _compressed("int-quantized", _numbers(8, "int", "channel"), _PER_TOKEN)),
    "w8a8 static": Format(
        _w8a8_static, _compressed("int-quantized", _numbers(8, "int", "tensor"), _PER_TENSOR)
    ),
    "w8a8 offset": Format(
        _w8a8_offset,
        _compressed(
            "int-quantized", _numbers(8, "int", "tensor"), {**_PER_TENSOR, "symmetric": False}
        ),
    ),
    "NVFP4": Format(
        _nvfp4,
        _compressed(
            "nvfp4-pack-quantized",
            _numbers(4, "float", "tensor_group", group_size=16),
            _numbers(4, "float", "tensor_group", group_size=16, dynamic="local"),
        ),
    ),
    "MXFP4": Format(
        _mxfp4,
        _compressed(
            "mxfp4-pack-quantized",
            _numbers(4, "float", "group", group_size=_GROUP),
            _numbers(4, "float", "group", group_size=_GROUP, dynamic=True),
        ),
    ),
}
