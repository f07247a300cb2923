"""The models of the tensor deduplication article: true shapes, random weights, equal as theirs are.

SDXL Base, with a CLIP that is its text encoder, too; DeepFloyd IF's two stages with text encoder,
safety checker and watermarker in common; Qwen2-0.5B. Everything is written tensor by tensor, so
that making a model takes the memory of its largest tensor.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import diffusers
import numpy as np
import torch
import transformers as hf
from diffusers.pipelines.deepfloyd_if.safety_checker import IFSafetyChecker
from diffusers.pipelines.deepfloyd_if.watermark import IFWatermarker

from demonstration.models import CONFIG as QWEN
from tensor_dedup.formats.safetensors import MAX_HEADER_BYTES

# Both divide every width, so they are powers of two; the second is as much as a head's 64 allow.
SCALES: Final = (1, 2, 4, 8, 16)
DEEPFLOYD_SCALE: Final = 4
SDXL: Final = ("sdxl-base", "clip")
DEEPFLOYD: Final = ("if-stage-1", "if-stage-2")
QWEN2: Final = "qwen2-0.5b"
_D: Any = diffusers
_H: Any = hf
# Random bits with this one cleared are finite numbers below two.
_FINITE: Final[dict[torch.dtype, tuple[Any, int]]] = {
    torch.float16: (np.uint16, 0xBFFF),
    torch.float32: (np.uint32, 0xBFFFFFFF),
}
_FINITE[torch.bfloat16] = _FINITE[torch.float16]
_NAMES: Final = {torch.float16: "F16", torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Component:
    """A module of a pipeline: how it is built, its library's name for it, and what it draws from.

    Components of one `seed` and configuration have equal weights.
    """

    build: Callable[[], Any]
    library: str
    seed: str


def make(folder: Path, name: str, scale: int) -> Path:
    """Write one of the models, unless it is there; return its folder."""
    target = folder / name
    if target.exists():
        return target
    partial = folder / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if name == SDXL[0]:
        _pipeline(partial, "StableDiffusionXLPipeline", _sdxl(scale), torch.float16)
    elif name == SDXL[1]:
        _write(partial, _clip_l(scale), torch.float16)
    elif name == DEEPFLOYD[0]:
        _pipeline(partial, "IFPipeline", _stage(scale, 1), torch.float32)
    elif name == DEEPFLOYD[1]:
        _pipeline(partial, "IFSuperResolutionPipeline", _stage(scale, 2), torch.float32)
    else:
        _write(partial, _qwen(scale), torch.bfloat16)
    partial.rename(target)
    return target


def dtype_of(name: str) -> torch.dtype:
    """The type that a model is loaded in."""
    return torch.float16 if name in SDXL else torch.float32


def _sdxl(scale: int) -> dict[str, Component]:
    def unet() -> Any:
        return _D.UNet2DConditionModel(
            sample_size=128,
            block_out_channels=tuple(width // scale for width in (320, 640, 1280)),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(5, 10, 20),
            transformer_layers_per_block=(1, 2, 10),
            cross_attention_dim=2048 // scale,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256 // scale,
            projection_class_embeddings_input_dim=2816 // scale,
            norm_num_groups=32 // scale,
        )

    def vae() -> Any:
        return _D.AutoencoderKL(
            block_out_channels=tuple(width // scale for width in (128, 256, 512, 512)),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            norm_num_groups=32 // scale,
        )

    def bigg() -> Any:
        config = _clip(1280, 32, 20, scale, vocab_size=49_408, projection_dim=1280)
        return _H.CLIPTextModelWithProjection(_H.CLIPTextConfig(**config))

    return {
        "unet": Component(unet, "diffusers", "sdxl unet"),
        "text_encoder": _clip_l(scale),
        "text_encoder_2": Component(bigg, "transformers", "bigg"),
        "vae": Component(vae, "diffusers", "sdxl vae"),
    }


def _clip_l(scale: int) -> Component:
    def build() -> Any:
        config = _clip(768, 12, 12, scale, vocab_size=49_408, projection_dim=768)
        return _H.CLIPTextModel(_H.CLIPTextConfig(**config))

    return Component(build, "transformers", "clip")


def _clip(width: int, layers: int, heads: int, scale: int, **more: int) -> dict[str, Any]:
    return {
        "hidden_size": width // scale,
        "intermediate_size": 4 * width // scale,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **{key: value // scale for key, value in more.items()},
    }


def _stage(scale: int, number: int) -> dict[str, Component]:
    """A stage of DeepFloyd IF.

    The article's total leaves 1.245e9 numbers for the second U-Net, whose configuration is not at
    hand: here it is the architecture of the first in widths that make 1.241e9 of it.
    """

    def unet() -> Any:
        widths, cross = (704, 1408, 2112, 2816), 2816
        more: dict[str, Any] = {"in_channels": 3}
        if number == 2:
            widths, cross = (320, 704, 1216, 1472), 1280
            more = {"in_channels": 6, "class_embed_type": "timestep"}
        return _D.UNet2DConditionModel(
            sample_size=64,
            out_channels=6,
            down_block_types=["ResnetDownsampleBlock2D"] + ["SimpleCrossAttnDownBlock2D"] * 3,
            up_block_types=["SimpleCrossAttnUpBlock2D"] * 3 + ["ResnetUpsampleBlock2D"],
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            block_out_channels=[width // scale for width in widths],
            layers_per_block=3,
            act_fn="gelu",
            addition_embed_type="text",
            addition_embed_type_num_heads=64,
            attention_head_dim=64 // scale,
            cross_attention_dim=max(32, cross // scale // 32 * 32),  # 32 groups, whatever is asked
            cross_attention_norm="group_norm",
            encoder_hid_dim=4096 // scale,
            norm_num_groups=max(1, 32 // scale),
            mid_block_scale_factor=1.414,
            resnet_out_scale_factor=1.414,
            resnet_time_scale_shift="scale_shift",
            time_embedding_act_fn="gelu",
            **more,
        )

    def t5() -> Any:
        config = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "vocab_size": 32_128}
        scaled = {key: value // scale for key, value in config.items()}
        kind = {"num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
        return _H.T5EncoderModel(_H.T5Config(**scaled, **kind))

    def safety() -> Any:
        projection = 768 // scale
        vision = {**_clip(1024, 24, 16, scale), "patch_size": 14, "projection_dim": projection}
        checker: Any = IFSafetyChecker
        return checker(_H.CLIPConfig(projection_dim=projection, vision_config=vision))

    watermarker: Any = IFWatermarker
    return {
        "unet": Component(unet, "diffusers", f"if unet {number}"),
        "text_encoder": Component(t5, "transformers", "t5"),
        "safety_checker": Component(safety, "deepfloyd_if", "if safety"),
        "watermarker": Component(watermarker, "deepfloyd_if", "if watermark"),
    }


def _qwen(scale: int) -> Component:
    # Its 14 heads of 64 become 14 of 64 / scale; vLLM on a CPU wants at least 32.
    kept = {"num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    kept |= {"max_position_embeddings", "tie_word_embeddings"}
    config = {key: value if key in kept else value // scale for key, value in QWEN.items()}
    if scale > 2:
        config |= {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}

    def build() -> Any:
        return _H.Qwen2ForCausalLM(_H.Qwen2Config(**config, dtype=torch.bfloat16))

    return Component(build, "transformers", "qwen2")


def _pipeline(
    folder: Path, kind: str, components: Mapping[str, Component], dtype: torch.dtype
) -> None:
    index: dict[str, Any] = {"_class_name": kind, "_diffusers_version": diffusers.__version__}
    optional = ("tokenizer", "tokenizer_2", "image_encoder", "feature_extractor")
    index |= {name: [None, None] for name in optional if name in _names(kind)}
    for name, component in components.items():
        (folder / name).mkdir()
        built = _write(folder / name, component, dtype)
        index[name] = [component.library, built]
    if "safety_checker" in components:  # which Diffusers does not load without
        _H.CLIPImageProcessor().save_pretrained(folder / "feature_extractor")
        index["feature_extractor"] = ["transformers", "CLIPImageProcessor"]
    for name in ("scheduler", "image_noising_scheduler"):
        if name in _names(kind):
            _D.DDPMScheduler().save_pretrained(folder / name)
            index[name] = ["diffusers", "DDPMScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


def _names(kind: str) -> tuple[str, ...]:
    return tuple(getattr(_D, kind).__init__.__annotations__)


def _write(folder: Path, component: Component, dtype: torch.dtype) -> str:
    """Write weights and configuration of a component; return the name of its class."""
    with torch.device("meta"):
        model: Any = component.build()
    kinds: Any = diffusers.ModelMixin
    if isinstance(model, kinds) and not isinstance(model, hf.PreTrainedModel):
        model.save_config(folder)
        file = folder / "diffusion_pytorch_model.safetensors"
    else:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        file = folder / "model.safetensors"
    once = {id(tensor): (name, tensor) for name, tensor in _reversed(model)}
    shapes = {name: tuple(tensor.shape) for name, tensor in reversed(once.values())}
    _write_tensors(file, shapes, dtype, component.seed)
    return type(model).__name__


def _reversed(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The state dict from its end: of tied names the first is the one that stays."""
    yield from reversed(model.state_dict(keep_vars=True).items())


def _write_tensors(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: str
) -> None:
    kind, finite = _FINITE[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        place = [begin, end]
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) <= MAX_HEADER_BYTES
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little")
    draw = np.random.Generator(np.random.SFC64(number))
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            count = torch.Size(shape).numel()
            drawn = draw.integers(0, np.iinfo(kind).max, count, dtype=kind, endpoint=True)
            np.bitwise_and(drawn, finite, out=drawn, casting="unsafe")
            out.write(drawn.data)
