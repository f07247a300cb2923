"""A base and a fine-tune of Diffusers or Transformers on a GPU: loaded plainly, then sharing.

In three sizes: tiny, a gigabyte or so, and that of SDXL. The weights are random, the shapes those
of configurations that were published. Each pair is made where it is used.
"""

import gc
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gpu_runs import gpu_world, gpus
from models import tiny_checkpoints, tiny_pipelines, true_sizes
from tensor_dedup import enable, report, shares_memory

DTYPE = torch.bfloat16


class Library(NamedTuple):
    """How a library loads a model to a device, and what it then computes."""

    load: Callable[[Path, str, str], Any]  # of a folder, in a way, to a device
    parameters: Callable[[Any], Mapping[str, nn.Parameter]]
    answer: Callable[[Any], bytes]


def compare(library: str, way: str, size: str, folder: str) -> dict[str, float]:
    """Load a pair plainly and sharing, compare all of it, and say what it took.

    `library` is one of LIBRARIES, `way` "to" or "device_map", `size` "tiny", "gigabyte" or "full".
    Bytes and seconds by name.
    """
    place = _place()
    chosen = LIBRARIES[library]
    paths = MAKERS[library](size, Path(folder), place)
    took: dict[str, float] = {}

    def both(what: str) -> list[Any]:
        began = time.perf_counter()
        loaded = [chosen.load(path, way, place) for path in paths]
        gpu_world.wait_for_gpu()
        took[f"{what}, s"] = round(time.perf_counter() - began, 2)
        return loaded

    plain = both("plain")
    base, tuned = (dict(chosen.parameters(each)) for each in plain)
    different = {name for name in base if not torch.equal(base[name], tuned[name])}
    assert 0 < len(different) < len(base)
    right = [chosen.answer(each) for each in plain]
    assert right[0] != right[1]
    before = _used()
    with enable():
        models = both("sharing")
    taken = _used() - before
    assert not report().devices
    one, other = (dict(chosen.parameters(each)) for each in models)
    for mine, theirs in ((one, base), (other, tuned)):
        assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []
    shared = {name for name in one if shares_memory(one[name], other[name])}
    assert shared == set(base) - different
    unique = sum(each.nbytes for each in base.values())
    unique += sum(tuned[name].nbytes for name in different)
    spare = gpu_world.MIB * (64 if size != "tiny" else 0.5)  # parts of handles, and buffers
    assert 0.97 * unique - spare <= taken <= 1.03 * unique + spare, (taken, unique)
    assert [chosen.answer(each) for each in models] == right
    whole = sum(each.nbytes for held in (base, tuned) for each in held.values())
    return {"both, bytes": whole, "once, bytes": unique, "taken, bytes": taken, **took}


def _place() -> str:
    if not gpu_world.REHEARSAL:
        return "cuda"
    from gpu_runs import torch_gpu

    torch_gpu.install()
    return torch_gpu.NAME


def _used() -> int:
    """What is in use of the GPU; of the fake one only what this package has made is counted."""
    gc.collect()
    if gpu_world.REHEARSAL:
        return gpus.in_use()
    torch.cuda.empty_cache()
    return gpu_world.used_bytes()


# Diffusers.


def _load_pipeline(path: Path, way: str, place: str) -> Any:
    options = {} if (path / "float32").exists() else {"torch_dtype": DTYPE}
    if way == "device_map":
        return tiny_pipelines.load(path, device_map=place, **options)
    return tiny_pipelines.load(path, **options).to(place)


def _picture(pipeline: Any) -> bytes:
    large = {} if pipeline.dtype == torch.float32 else {"height": 256, "width": 256}
    return tiny_pipelines.image(pipeline, **large)


def _make_pipelines(size: str, root: Path, place: str) -> tuple[Path, Path]:
    """SDXL in that size, and one of which cross attention was trained further."""
    if size == "tiny":
        tiny_pipelines.make(root)
        for name in ("sd", "tuned"):
            (root / name / "float32").touch()
        return root / "sd", root / "tuned"
    whole = size == "full"
    unet = _made(true_sizes.unet_sdxl if whole else true_sizes.unet_of_a_gigabyte, 1, place)
    second = true_sizes.clip_bigg if whole else true_sizes.clip_bigg_of_four_layers
    tokenizer = tiny_pipelines.byte_tokenizer(root / "tokenizer")
    tiny_pipelines.xl(
        _made(true_sizes.vae, 2, place),
        _made(true_sizes.clip_l, 3, place),
        _made(second, 4, place),
        unet,
        tokenizer,
    ).save_pretrained(root / "base")
    shutil.copytree(root / "base", root / "tuned", ignore=shutil.ignore_patterns("*.safetensors"))
    for part in ("vae", "text_encoder", "text_encoder_2"):
        for file in (root / "base" / part).glob("*.safetensors"):
            shutil.copyfile(file, root / "tuned" / part / file.name)
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if "attn2" in name:
                parameter.mul_(1.25)
    unet.save_pretrained(root / "tuned" / "unet")
    return root / "base", root / "tuned"


def _made(build: Callable[[], Any], seed: int, place: str) -> Any:
    torch.manual_seed(seed)
    with torch.device(place):
        return build().to(DTYPE).eval()


# Transformers.


def _load_transformer(path: Path, way: str, place: str) -> Any:
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    if way == "device_map":
        return kind.from_pretrained(path, dtype=DTYPE, device_map=place)
    return kind.from_pretrained(path, dtype=DTYPE).to(place)


def _logits(model: Any) -> bytes:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(64)[None].to(model.device)).logits
    return found.float().cpu().numpy().tobytes()


def _make_transformers(size: str, root: Path, place: str) -> tuple[Path, Path]:
    """A Llama in that size, and one with other matrices in its third layer."""
    if size == "tiny":
        made = tiny_checkpoints.make("llama_tied", root)
        return made.base, made.fine_tune
    model = _made(true_sizes.llama_of_a_gigabyte, 1, place)
    model.save_pretrained(root / "base")
    with torch.no_grad():
        for parameter in model.model.layers[2].parameters():
            if parameter.dim() > 1:  # norms are equal to each other: which of them is which is open
                parameter.mul_(1.25)
    model.save_pretrained(root / "tuned")
    return root / "base", root / "tuned"


LIBRARIES = {
    "diffusers": Library(_load_pipeline, tiny_pipelines.parameters, _picture),
    "transformers": Library(
        _load_transformer, lambda model: dict(model.named_parameters()), _logits
    ),
}
MAKERS = {"diffusers": _make_pipelines, "transformers": _make_transformers}
