"""Checkpoints for a GPU: a base of Qwen2's architecture in any number of layers, and a fine-tune.

Random weights, bfloat16, written tensor by tensor; no framework builds the model.
"""

import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from bench.fine_tunes import WEIGHTS, fine_tune

BASE: Final = "base"
TUNED: Final = "one-layer"
# Random numbers with these bits cleared are finite in bfloat16, and below two.
_FINITE: Final = np.uint64(0xBFFFBFFFBFFFBFFF)


@dataclass(frozen=True)
class Shape:
    """The widths of a model, as its configuration names them."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    num_hidden_layers: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a checkpoint's tensors by name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        keys = hidden // self.num_attention_heads * self.num_key_value_heads
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "self_attn.o_proj.weight": (hidden, hidden),
        }
        for name, rows in (("q", hidden), ("k", keys), ("v", keys)):
            layer[f"self_attn.{name}_proj.weight"] = (rows, hidden)
            layer[f"self_attn.{name}_proj.bias"] = (rows,)
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        for number in range(self.num_hidden_layers):
            found |= {f"model.layers.{number}.{name}": each for name, each in layer.items()}
        return found

    @property
    def nbytes(self) -> int:
        """The size of the tensors in bytes."""
        return sum(2 * prod(shape) for shape in self.tensors().values())

    @property
    def changed_layer(self) -> int:
        """The layer in which a fine-tune differs: one in the middle."""
        return self.num_hidden_layers // 2

    @property
    def changed_bytes(self) -> int:
        """The size of the tensors of that layer."""
        mine = f".layers.{self.changed_layer}."
        return sum(2 * prod(shape) for name, shape in self.tensors().items() if mine in name)


def large(gib: float) -> Shape:
    """Return Qwen2.5-3B's widths, in as many layers as come closest to a size; 36 are its own."""
    few, more = (Shape(2048, 11008, 16, 2, 151_936, layers) for layers in (2, 3))
    layers = 2 + round((gib * 2**30 - few.nbytes) / (more.nbytes - few.nbytes))
    return Shape(2048, 11008, 16, 2, 151_936, max(2, layers))


SMALL: Final = Shape(896, 4864, 14, 2, 151_936, 24)  # Qwen2-0.5B
TINY: Final = Shape(128, 256, 4, 2, 512, 3)


def made(work: Path, shape: Shape) -> tuple[Path, Path]:
    """Return the folders of a base and of a fine-tune in which one layer differs."""
    base, tuned = work / BASE, work / TUNED
    if not base.exists():
        write(base, shape)
    if not tuned.exists():
        fine_tune(base, tuned, [shape.changed_layer])
    return base, tuned


def write(folder: Path, shape: Shape) -> None:
    """Write a checkpoint; it is complete once the folder is there."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text(json.dumps(_configuration(shape)))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, each in shape.tensors().items():
        nbytes = 2 * prod(each)
        header[name] = {"dtype": "BF16", "shape": each, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (unfinished / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for piece in _numbers(end):
            file.write(piece.data)
    unfinished.rename(folder)


def _numbers(nbytes: int, piece: int = 64 << 20) -> Iterator[np.ndarray]:
    random = np.random.default_rng(1)
    for at in range(0, nbytes, piece):
        count = min(piece, nbytes - at)
        words = random.integers(0, 2**64, size=-(-count // 8), dtype=np.uint64)
        yield (words & _FINITE).view(np.uint8)[:count]


def _configuration(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **vars(shape),
    }
