"""Checkpoints whose tensors differ in part, the changes, and what they cost.

The parts that do not change are at least 8 MiB each, or nothing would be proved.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers as hf
from torch import nn

from files import hinted
from models import tiny_checkpoints as checkpoints
from processes.process_state import slab_memory
from tensor_dedup import libc
from tensor_dedup.digest import LEAF_BYTES, digest, leaf_places
from tensor_dedup.formats.weights import read_header
from tensor_dedup.loader.checkpoint_io.hints import FileIdentity, HintIndex
from tensor_dedup.loader.residents import mappings
from tensor_dedup.loader.residents.resident import tensor_bytes

MIB = 1 << 20
# Attention has 32 heads of 128: q, k and v are 8 MiB each, and an embedding is 16 MiB.
WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
# 64 experts: 1 MiB each of gate and up, half of that of down.
EXPERTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
# What models of these tests have in common.
_BLOCKS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
# Files of Phi-3 hold q, k and v as one, 8 MiB each, and gate and up, too.
FUSED: dict[str, Any] = {
    **_BLOCKS,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 0,
}
Change = Callable[[Path, Path], Path]


def save_llama(folder: Path) -> Path:
    """A wide model, of which each weight of attention is as large as what may be shared."""
    make: Any = hf.LlamaForCausalLM
    return checkpoints.save(make(hf.LlamaConfig(**WIDE)), folder)


def save_mixture(folder: Path) -> Path:
    """A model of 64 experts a layer."""
    make: Any = hf.Qwen3MoeForCausalLM
    return checkpoints.save(make(hf.Qwen3MoeConfig(**EXPERTS)), folder)


def first_third_changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return _scaled(tensor, 0, 1) if "qkv_proj" in name else tensor


def first_and_last_third_changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return _scaled(_scaled(tensor, 0, 1), 2, 3) if "qkv_proj" in name else tensor


def _scaled(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Change some thirds of the rows."""
    third = len(tensor) // 3
    tensor = tensor.clone()
    tensor[start * third : end * third] *= 1.5
    return tensor


def grown(source: Path, target: Path) -> Path:
    return checkpoints.grown_vocabulary(source, target, rows=256)


def scaled(*parts: str) -> Change:
    """Change the tensors whose names have one of these parts in them."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1.5 if any(part in name for part in parts) else tensor

    return lambda source, target: checkpoints.mapped(source, target, change)


def adapted(source: Path, target: Path) -> Path:
    return checkpoints.merged_lora(source, target, ("q_proj", "v_proj"), layers=(0,))


def changed_bytes(base: Path, tune: Path) -> tuple[int, int]:
    """How many bytes two checkpoints do not have in common, and in how many tensors they lie."""
    old, new = checkpoints.tensors(base), checkpoints.tensors(tune)
    names = checkpoints.different(base, tune)
    more = [new[n].nbytes - (old[n].nbytes if _begins_with(new[n], old[n]) else 0) for n in names]
    return sum(more), len(names)


def _begins_with(new: torch.Tensor, old: torch.Tensor) -> bool:
    return len(new) > len(old) and torch.equal(new[: len(old)], old)


def read(model: nn.Module) -> None:
    for each in model.parameters():
        each.view(torch.uint8).max()


def slab_pss(*models: nn.Module) -> int:
    """What the slabs of this process take, when every page of these models was read."""
    gc.collect()
    for model in models:
        read(model)
    return slab_memory()["Pss"]


def grown_by_ten(source: Path, target: Path) -> Path:
    """vLLM puts 54 rows of zeros behind it, which no file has."""
    return checkpoints.grown_vocabulary(source, target, rows=10)


@contextmanager
def near_the_limit_of_mappings() -> Iterator[None]:
    """As if this process could have no more mappings than it has."""
    with (
        mock.patch.object(libc, "max_mappings", libc.count_mappings),
        mock.patch.object(mappings.BUDGET, "_until", 0.0),
    ):
        yield


Place = tuple[int, int]


def whole(path: Path, name: str) -> tuple[Place, str]:
    """Where a tensor is in its file, and its digest."""
    file = path / checkpoints.WEIGHTS
    [spec] = [spec for spec in read_header(file).tensors if spec.name == name]
    content = file.read_bytes()[spec.start : spec.start + spec.nbytes]
    return (spec.start, spec.nbytes), digest(content)


def leaves_of(path: Path, name: str) -> list[tuple[Place, str]]:
    content = (path / checkpoints.WEIGHTS).read_bytes()
    (start, nbytes), _ = whole(path, name)
    return [
        ((at, size), digest(content[at : at + size])) for at, size in leaf_places(start, nbytes)
    ]


def forge(path: Path, mine: tuple[Place, str], theirs: tuple[Place, str]) -> None:
    """Have a hint say that a range of a file is what another's is."""
    index, (place, true) = HintIndex(), mine
    with hinted.opened(path / checkpoints.WEIGHTS) as fd:
        before = FileIdentity.of(fd)
        assert index.lookup(fd, "blake3")[place] == true != theirs[1]
        assert index.record(fd, before, hinted.old_enough(before), "blake3", {place: theirs[1]})


def changed_leaves(base: Path, tune: Path) -> tuple[int, int]:
    """How many bytes the leaves have in which two checkpoints differ, and how many tensors do."""
    old, new = checkpoints.tensors(base), checkpoints.tensors(tune)
    names = checkpoints.different(base, tune)
    total = 0
    for name in names:
        mine, theirs = tensor_bytes(new[name]), tensor_bytes(old[name])
        for start in range(0, len(mine), LEAF_BYTES):
            leaf = mine[start : start + LEAF_BYTES]
            total += len(leaf) if leaf != theirs[start : start + LEAF_BYTES] else 0
    return total, len(names)
