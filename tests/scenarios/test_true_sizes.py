"""What the article on tensor deduplication says diffusion models save, at true sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from models import true_sizes
from processes import fresh
from tensor_dedup.analyze import analyze

MIB, GIB = 1 << 20, 1 << 30
# The U-Nets of DeepFloyd IF: stage I's is known, stage II's is what the article's total leaves.
ARTICLE_TOTAL_GIB = 58.42
IF_UNET_1 = 4_304_695_110
IF_WATERMARK = 15_376


def disk(folder: Path) -> int:
    return sum(512 * file.stat().st_blocks for file in folder.rglob("*") if file.is_file())


def test_the_shapes_are_those_that_were_published() -> None:
    sizes = {
        build.__name__: (len(shapes), sum(torch.Size(shape).numel() for shape in shapes.values()))
        for build in (true_sizes.clip_l, true_sizes.clip_bigg, true_sizes.vae, true_sizes.t5_xxl)
        for shapes in [true_sizes.shapes_of(build)]
    }
    assert sizes == {
        "clip_l": (196, 123_060_480),
        "clip_bigg": (517, 694_659_840),
        "vae": (248, 83_653_863),
        "t5_xxl": (219, 4_762_310_656),
    }


def test_sdxl_and_the_text_encoder_it_shares(tmp_path: Path) -> None:
    """All 6.9 GB are hashed, in seconds: pages of holes cost memory bandwidth only."""
    clip = true_sizes.shapes_of(true_sizes.clip_l)
    sdxl = tmp_path / "sdxl"
    parts = {
        "text_encoder_2": true_sizes.clip_bigg,
        "unet": true_sizes.unet_sdxl,
        "vae": true_sizes.vae,
    }
    for name, build in parts.items():
        shapes = true_sizes.shapes_of(build)
        true_sizes.write(sdxl / name / "model.safetensors", shapes, "F16", name)
    for folder in (sdxl, tmp_path / "clip"):
        true_sizes.write(folder / "text_encoder" / "model.safetensors", clip, "F16", "clip")
    assert disk(tmp_path) < 64 * MIB
    found = analyze([sdxl, tmp_path / "clip"])
    [pair] = found.pairs
    assert pair.shared_tensors == 196
    assert round(pair.shared_bytes / MIB, 2) == 234.72
    assert round(found.total_bytes / MIB) == 6851
    assert f"{found.saving:.2%}" == "3.43%"
    assert found.total_bytes - found.unique_bytes == pair.shared_bytes


@pytest.mark.long
def test_both_stages_of_deepfloyd_if(tmp_path: Path) -> None:
    """All 58 GiB are hashed: minutes. The U-Nets' sizes are the article's, not their shapes."""
    shared = {
        "text_encoder": (true_sizes.shapes_of(true_sizes.t5_xxl), "F32"),
        "safety_checker": (true_sizes.shapes_of(true_sizes.safety_checker), "F32"),
        "watermarker": ({"watermark_image": (62, 62, 4)}, "U8"),
    }
    stages = [tmp_path / "stage-1", tmp_path / "stage-2"]
    sizes: dict[str, int] = {}
    for stage in stages:
        for name, (shapes, dtype) in shared.items():
            file = stage / name / "model.safetensors"
            sizes[name] = true_sizes.write(file, shapes, dtype, name)
    common = sum(sizes.values())
    left = int(ARTICLE_TOTAL_GIB * GIB) - 2 * common - 4 * IF_UNET_1
    for stage, count in zip(stages, (IF_UNET_1, left // 4), strict=True):
        blocks = {f"blocks.{number}": (count // 256,) for number in range(256)}
        true_sizes.write(stage / "unet" / "model.safetensors", blocks, "F32", stage.name)
    assert disk(tmp_path) < 64 * MIB
    assert round(sizes["text_encoder"] / GIB, 3) == 17.741
    assert round(sizes["safety_checker"] / GIB, 4) == 1.1324
    assert sizes["watermarker"] == IF_WATERMARK
    found = analyze(stages)
    [pair] = found.pairs
    assert pair.shared_tensors == sum(len(shapes) for shapes, _ in shared.values())
    assert pair.shared_bytes == common
    assert round(common / GIB, 3) == 18.873
    assert f"{found.saving:.2%}" in ("32.30%", "32.31%")
    assert f"{common / GIB / ARTICLE_TOTAL_GIB:.2%}" == "32.31%"


KINDS: dict[str, tuple[Any, Any, str]] = {
    "text_encoder": (true_sizes.clip_l, CLIPTextModel, "model"),
    "text_encoder_2": (true_sizes.clip_bigg, CLIPTextModelWithProjection, "model"),
    "vae": (true_sizes.vae, AutoencoderKL, "diffusion_pytorch_model"),
}


def write_components(folder: Path) -> int:
    total = 0
    for name, (build, _, file) in KINDS.items():
        with torch.device("meta"):
            model = build()
        save = model.save_config if name == "vae" else model.config.save_pretrained
        save(folder / name)
        shapes = true_sizes.shapes_of(build)
        total += true_sizes.write(folder / name / f"{file}.safetensors", shapes, "F16", name)
    return total


def growth(one: str, two: str, dedup: bool) -> list[int]:
    """PSS that each of two pipelines' components add, with every page of them read."""
    from tensor_dedup import enable

    def pss() -> int:
        text = Path("/proc/self/smaps_rollup").read_text()
        return int(text.partition("Pss:")[2].split()[0]) * 1024

    kept, sizes = [], []
    before = pss()
    for folder in (one, two):
        with enable({"enabled": dedup}):
            kept += [
                kind.from_pretrained(Path(folder) / name, torch_dtype=torch.float16)
                for name, (_, kind, _) in KINDS.items()
            ]
        for model in kept:
            for parameter in model.parameters():
                parameter.data.view(-1).view(torch.uint8)[::4096].sum()
        sizes.append(pss() - before)
        before = pss()
    return sizes


@pytest.mark.long
def test_what_a_second_pipeline_adds_of_true_size(tmp_path: Path) -> None:
    """CLIP-L, bigG and the VAE, loaded twice from different files: 1719 MiB each."""
    one, two = tmp_path / "one", tmp_path / "two"
    total = write_components(one)
    assert write_components(two) == total
    assert round(total / MIB) == 1719
    plain = fresh.call(growth, str(one), str(two), dedup=False)
    ours = fresh.call(growth, str(one), str(two), dedup=True)
    assert min(plain) > 0.5 * total  # clean pages of files: the kernel may take some back
    assert ours[0] < 1.1 * total
    assert ours[1] <= max(0.02 * total, 16 * MIB)
