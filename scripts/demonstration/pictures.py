"""The demonstration's pipelines: two that differ in a tiny UNet, and have the rest in common.

Text encoder (CLIP ViT-L) and VAE have their true sizes, 794 MB in float32; weights are random, from
fixed seeds. They are made once: written under a temporary name and renamed.
"""

import json
from pathlib import Path
from typing import Any, Final

from demonstration.models import published

NAMES: Final = ("pipeline", "fine-tune")
SIZE: Final = 128
PIPELINE_BYTES: Final = 850_000_000
_CLIP_L: Final[dict[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
_VAE: Final[dict[str, Any]] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
TINY_CLIP: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY_VAE: Final[dict[str, Any]] = {
    **_VAE,
    "block_out_channels": (32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
}


def missing(work: Path) -> list[str]:
    """Names of the pipelines that are still to be made."""
    return [name for name in NAMES if not (work / name).is_dir()]


def make(name: str, work: Path, *, tiny: bool = False, dtype: str = "float32") -> None:
    """Make one pipeline below a folder. Loads torch, transformers and diffusers."""
    import diffusers
    import torch

    kinds: Any = diffusers
    _quiet()
    with published(work / name) as folder:
        tokenizer = _tokenizer(folder / "tokenizer")
        text = _text_encoder(TINY_CLIP if tiny else _CLIP_L, tokenizer)
        torch.manual_seed(2)
        vae = kinds.AutoencoderKL(**(TINY_VAE if tiny else _VAE))
        unet = _unet(10 + NAMES.index(name), text.config.hidden_size)
        pipeline = kinds.StableDiffusionPipeline(
            vae=vae,
            text_encoder=text,
            tokenizer=tokenizer,
            unet=unet,
            scheduler=kinds.DDIMScheduler(clip_sample=False, steps_offset=1),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipeline.to(getattr(torch, dtype))
        pipeline.save_pretrained(folder)


def _quiet() -> None:
    """No advice of the libraries', and no bars."""
    import diffusers
    import transformers

    for each in (diffusers.utils.logging, transformers.utils.logging):
        logging: Any = each
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def _text_encoder(sizes: dict[str, Any], tokenizer: Any) -> Any:
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(1)
    end = len(tokenizer) - 1
    config = CLIPTextConfig(**sizes, bos_token_id=end - 1, eos_token_id=end, pad_token_id=1)
    build: Any = CLIPTextModel
    return build(config).eval()


def _unet(seed: int, width: int) -> Any:
    import diffusers
    import torch

    torch.manual_seed(seed)
    build: Any = diffusers.UNet2DConditionModel
    return build(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=SIZE // 8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=width,
    )


def _tokenizer(folder: Path) -> Any:
    """One token a byte, as GPT-2 names bytes, and with the end of a word: nothing is fetched."""
    from transformers import CLIPTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + number) for number in range(256 - len(plain)))
    letters = [chr(byte) if byte in plain else next(others) for byte in range(256)]
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=77)
