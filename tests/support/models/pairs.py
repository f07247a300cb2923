"""Pairs of tiny models and pipelines that have tensors in common, as published ones do.

Each case makes two folders (or files), loads one, and says what it computes, as bytes.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers as hf
from PIL import Image

from models import tiny_checkpoints as checkpoints
from models import tiny_pipelines

_D: Any = diffusers
_HIDDEN = 64


@dataclass(frozen=True)
class Case:
    """Two of a kind. `casts`, `saves`: can it be converted, and written by `save_pretrained`?"""

    make: Callable[[Path], tuple[Path, Path]]
    load: Callable[[Path], Any]
    output: Callable[[Any], bytes]
    casts: bool = True
    saves: bool = True


def _sdxl(root: Path) -> tuple[Path, Path]:
    tiny_pipelines.make_xl(root)
    return root / "base", root / "refiner"


def _draw_xl(pipeline: Any) -> bytes:
    if "Img2Img" not in type(pipeline).__name__:
        return tiny_pipelines.image(pipeline)
    photo = Image.fromarray(np.full((32, 32, 3), 99, np.uint8))
    return tiny_pipelines.image(pipeline, image=photo, strength=1.0)


def _sd(root: Path) -> tuple[Path, Path]:
    tiny_pipelines.make(root)
    return root / "sd", root / "tuned"


def _deepfloyd(root: Path) -> tuple[Path, Path]:
    """Both stages hold the text encoder and the watermark."""
    marker: Any = importlib.import_module("diffusers.pipelines.deepfloyd_if.watermark")
    common = {
        "tokenizer": None,
        "text_encoder": _t5(),
        "safety_checker": None,
        "feature_extractor": None,
        "watermarker": marker.IFWatermarker(),
        "requires_safety_checker": False,
    }
    first = _D.IFPipeline(unet=_unet_if(12, 3), scheduler=_noise(), **common)
    second = _D.IFSuperResolutionPipeline(
        unet=_unet_if(13, 6, class_embed_type="timestep"),
        scheduler=_noise(),
        image_noising_scheduler=_noise(),
        **common,
    )
    first.save_pretrained(root / "stage-1")
    second.save_pretrained(root / "stage-2")
    return root / "stage-1", root / "stage-2"


def _noise() -> Any:
    return _D.DDPMScheduler(
        beta_schedule="squaredcos_cap_v2",
        variance_type="learned_range",
        thresholding=True,
        sample_max_value=1.5,
    )


def _unet_if(seed: int, channels: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    return _D.UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        in_channels=channels,
        out_channels=6,
        cross_attention_dim=_HIDDEN,
        encoder_hid_dim=_HIDDEN,
        attention_head_dim=8,
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
        cross_attention_norm="group_norm",
        resnet_time_scale_shift="scale_shift",
        act_fn="gelu",
        time_embedding_act_fn="gelu",
        **options,
    )


def _draw_if(pipeline: Any) -> bytes:
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        words = pipeline.text_encoder(torch.arange(20)[None])[0]
    options: dict[str, Any] = {}
    if "SuperResolution" in type(pipeline).__name__:
        options = {"image": torch.zeros(1, 3, 8, 8), "height": 16, "width": 16}
    drawn = pipeline(
        prompt_embeds=words,
        negative_prompt_embeds=torch.zeros_like(words),
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **options,
    )
    return np.asarray(drawn.images).tobytes()


def _flux(root: Path) -> tuple[Path, Path]:
    """Two files of quantised blocks, of which one layer differs."""
    torch.manual_seed(21)
    model = _D.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    model.save_config(root)
    _write_gguf(root / "base.gguf", model.state_dict())
    with torch.no_grad():
        model.transformer_blocks[0].attn.to_q.weight.mul_(1.5)
    _write_gguf(root / "tuned.gguf", model.state_dict())
    return root / "base.gguf", root / "tuned.gguf"


def _write_gguf(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(file, "flux")
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _load_flux(file: Path) -> Any:
    return _D.FluxTransformer2DModel.from_single_file(
        str(file),
        config=str(file.parent),
        quantization_config=_D.GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
        local_files_only=True,
    )


def _run_flux(model: Any) -> bytes:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found = model(
            hidden_states=torch.randn(1, 16, 4, generator=generator),
            encoder_hidden_states=torch.randn(1, 8, 32, generator=generator),
            pooled_projections=torch.randn(1, 32, generator=generator),
            timestep=torch.ones(1),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(8, 3),
            return_dict=False,
        )[0]
    return bytes(found.numpy().tobytes())


def _language(arch: str) -> Case:
    def make(root: Path) -> tuple[Path, Path]:
        pair = checkpoints.make(arch, root)
        return pair.base, pair.fine_tune

    def load(path: Path) -> Any:
        return hf.AutoModelForCausalLM.from_pretrained(path)

    def output(model: Any) -> bytes:
        with torch.no_grad():
            return bytes(model(torch.arange(8)[None]).logits.float().numpy().tobytes())

    return Case(make, load, output)


def _t5() -> Any:
    torch.manual_seed(11)
    kind: Any = hf.T5EncoderModel
    config: Any = hf.T5Config(
        vocab_size=300,
        d_model=_HIDDEN,
        d_kv=16,
        d_ff=2 * _HIDDEN,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return kind(config).eval()


def _clip() -> Any:
    torch.manual_seed(12)
    kind: Any = hf.CLIPTextModel
    config: Any = hf.CLIPTextConfig(
        vocab_size=300,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=298,
        eos_token_id=299,
    )
    return kind(config).eval()


def _states(model: Any) -> bytes:
    with torch.no_grad():
        found = model(torch.arange(20)[None]).last_hidden_state
    return bytes(found.numpy().tobytes())


def _encoder(build: Callable[[], Any], output: Callable[[Any], bytes] = _states) -> Case:
    def make(root: Path) -> tuple[Path, Path]:
        model = build()
        model.save_pretrained(root / "base")
        with torch.no_grad():
            [*model.parameters()][-3].add_(0.5)
        model.save_pretrained(root / "tuned")
        return root / "base", root / "tuned"

    def load(path: Path) -> Any:
        return type(build()).from_pretrained(path)

    return Case(make, load, output)


def _checker() -> Any:
    """DeepFloyd IF's, which neither 5.19 nor 5.23 of Transformers loads without this attribute."""
    module: Any = importlib.import_module("diffusers.pipelines.deepfloyd_if.safety_checker")
    kind = module.IFSafetyChecker
    kind.all_tied_weights_keys = {}
    torch.manual_seed(13)
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 30,
        "patch_size": 6,
    }
    config: Any = hf.CLIPConfig(projection_dim=32, vision_config=vision)
    return kind(config).eval()


def _check(model: Any) -> bytes:
    with torch.no_grad():
        found = model.p_head(model.vision_model(torch.ones(1, 3, 30, 30))[0])
    return bytes(found.numpy().tobytes())


CASES = {
    "SDXL base and refiner": Case(_sdxl, tiny_pipelines.load, _draw_xl),
    "SD 1.5 and a fine-tune": Case(_sd, tiny_pipelines.load, tiny_pipelines.image),
    "IF stage I and II": Case(_deepfloyd, tiny_pipelines.load, _draw_if),
    # A cast and the way back lay weights anew, and where they lie decides how its products round.
    "IF safety checker": replace(_encoder(_checker, _check), casts=False),
    "Flux in GGUF": Case(_flux, _load_flux, _run_flux, casts=False, saves=False),
    "Mixtral": _language("mixtral"),
    "tied GPT-2": _language("gpt2"),
    "T5": _encoder(_t5),
    "CLIP": _encoder(_clip),
}
