"""Small checkpoints like those of the demonstration: a base and fine-tunes of it, as BF16."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy

from store_runs.stores import Tensors, safetensors, write

LAYERS = 6
WIDTH = 32
ROWS = 400
ADDED_ROWS = 26


def _noise(seed: int, *shape: int) -> Any:
    size = int(numpy.prod(shape)) * 2
    return "BF16", shape, numpy.random.default_rng(seed).bytes(size)


def _shapes() -> Mapping[str, tuple[int, ...]]:
    block = {
        "self_attn.q_proj.weight": (WIDTH, WIDTH),
        "self_attn.k_proj.weight": (WIDTH // 4, WIDTH),
        "self_attn.v_proj.weight": (WIDTH // 4, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, WIDTH),
        "mlp.gate_proj.weight": (4 * WIDTH, WIDTH),
        "mlp.up_proj.weight": (4 * WIDTH, WIDTH),
        "mlp.down_proj.weight": (WIDTH, 4 * WIDTH),
        "input_layernorm.weight": (WIDTH,),
    }
    return {
        "model.embed_tokens.weight": (ROWS, WIDTH),
        **{
            f"model.layers.{n}.{name}": shape
            for n in range(LAYERS)
            for name, shape in block.items()
        },
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (ROWS, WIDTH),
    }


def _base() -> dict[str, Any]:
    return {name: _noise(seed, *shape) for seed, (name, shape) in enumerate(_shapes().items())}


def _one_layer() -> Tensors:
    return _changed(lambda name: ".layers.3." in name, 1000)


def _merged_lora() -> Tensors:
    return _changed(lambda name: "q_proj" in name or "v_proj" in name, 2000)


def _grown_vocabulary() -> Tensors:
    content = _base()
    for seed, name in enumerate(("model.embed_tokens.weight", "lm_head.weight"), 3000):
        content[name] = _noise(seed, ROWS + ADDED_ROWS, WIDTH)
    return content


def _full_fine_tune() -> Tensors:
    return _changed(lambda _: True, 4000)


def _changed(is_changed: Callable[[str], bool], seed: int) -> Tensors:
    return {
        name: _noise(seed + number, *tensor[1]) if is_changed(name) else tensor
        for number, (name, tensor) in enumerate(_base().items())
    }


MAKERS: Mapping[str, Callable[[], Tensors]] = {
    "Qwen2-tiny": _base,
    "Qwen2-tiny-Instruct": _one_layer,
    "Qwen2-tiny-sql-lora-merged": _merged_lora,
    "Qwen2-tiny-de-extended-vocab": _grown_vocabulary,
    "Qwen2-tiny-full-ft": _full_fine_tune,
}


def make(folder: Path) -> list[Path]:
    """Write them below a folder, in the order of loading: the base first."""
    paths = []
    for name, maker in MAKERS.items():
        path = folder / name
        write(path, {"model.safetensors": safetensors(maker())})
        paths.append(path)
    return paths
