"""Fine-tunes of several kinds: exactly what is equal is shared, and reported as it is.

What is equal is computed from the checkpoints' own bytes: source tensors as the files hold them,
final tensors as plain vLLM assembles them.
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from models import tiny_checkpoints as checkpoints
from tensor_dedup.loader.report import ModelReport
from vllm_runs import engines, plain

pytestmark = pytest.mark.vllm

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# How vLLM's llama fuses what the file holds apart.
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
BF16 = {"dtype": "bfloat16"}


@dataclass
class Plain:
    """What plain vLLM makes of a checkpoint: parameters as assembled, and answers."""

    assembled: dict[str, str]
    answers: tuple[plain.Answer, ...]


@dataclass
class World:
    """The base, where to put variants of it, and what plain vLLM makes of each."""

    base: Path
    root: Path
    known: dict[Path, Plain] = field(default_factory=dict)

    def plainly(self, path: Path, **options: Any) -> Plain:
        """Load `path` without sharing, once."""
        if path not in self.known:
            with engines.assembled() as assembled:
                llm = plain.engine(path, **options)
            self.known[path] = Plain(assembled, plain.outputs(llm))
            engines.drop(llm)
            del llm
            gc.collect()
        return self.known[path]


@dataclass
class Shared:
    """What a variant shares with the base that is loaded already: names of parameters all of whose
    forms are shared, and of those of which none is."""

    shared: set[str]
    private: set[str]
    report: ModelReport


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("variants")
    base = checkpoints.make("llama", root).base
    engines.warm_up(base)
    return World(base, root)


def test_grown_vocabulary_shares_all_but_embedding_and_head(world: World) -> None:
    grown = checkpoints.grown_vocabulary(world.base, world.root / "grown")
    assert set(checkpoints.different(world.base, grown)) == {EMBEDDING, HEAD}
    found = _load_beside_base(world, grown)
    assert found.private == {EMBEDDING, HEAD}
    _assert_reported(found.report, world.base, grown)


@pytest.mark.parametrize("shards", [2, 5])
def test_other_files_and_another_order_share_all(world: World, shards: int) -> None:
    other = checkpoints.resharded(world.base, world.root / f"shards-{shards}", shards)
    assert len(list(other.glob("*.safetensors"))) == shards
    found = _load_beside_base(world, other)
    assert not found.private
    assert found.report.private_bytes == 0
    _assert_reported(found.report, world.base, other)


def test_merged_lora_costs_more_final_tensors_than_it_changed(world: World) -> None:
    merged = checkpoints.merged_lora(world.base, world.root / "lora", layers=(0, 2))
    changed = checkpoints.different(world.base, merged)
    assert len(changed) == 4  # q and v of two layers
    found = _load_beside_base(world, merged)
    # k is as it was, and yet private: it lies in one tensor with q and v.
    assert found.private == {f"model.layers.{n}.self_attn.qkv_proj.weight" for n in (0, 2)}
    _assert_reported(found.report, world.base, merged)
    total = len(checkpoints.tensors(merged))
    assert found.report.source_tensors_shared == total - 6


def test_merged_lora_of_unfused_matrices_costs_what_it_changed(world: World) -> None:
    merged = checkpoints.merged_lora(world.base, world.root / "lora-o", ("o_proj", "down_proj"))
    found = _load_beside_base(world, merged)
    assert found.private == set(checkpoints.different(world.base, merged))
    assert len(found.private) == 2
    _assert_reported(found.report, world.base, merged)


def test_frozen_embedding_shares_embedding_and_head_alone(world: World) -> None:
    frozen = checkpoints.frozen_embedding(world.base, world.root / "frozen")
    found = _load_beside_base(world, frozen)
    assert found.shared == {EMBEDDING, HEAD}
    assert found.report.source_tensors_shared == 2
    _assert_reported(found.report, world.base, frozen)


def test_fp32_and_bf16_at_one_dtype_share_where_the_final_bytes_are_equal(world: World) -> None:
    upcast = checkpoints.as_fp32(world.base, world.root / "upcast")
    found = _load_beside_base(world, upcast, **BF16)
    assert not found.private

    # Every third tensor has values of its own; a few differ from bf16 ones by less than its step.
    held = checkpoints.tensors(upcast)
    different = sorted(held)[::3]
    near = sorted(held)[1::3]
    changed = {n: held[n] * 1.5 for n in different} | {n: _nudged(held[n]) for n in near}
    mixed = _written(upcast, world.root / "mixed", held | changed)
    found = _load_beside_base(world, mixed, **BF16)
    assert found.private == {_final(name) for name in different}
    assert found.shared


def _load_beside_base(world: World, variant: Path, **options: Any) -> Shared:
    """Load the base, the variant beside it, and hold both to what plain vLLM makes of them."""
    base_alone, alone = world.plainly(world.base, **options), world.plainly(variant, **options)
    expected = engines.equal(alone.assembled, base_alone.assembled)
    beside = plain.engine(world.base, tensor_dedup={}, **options)
    llm = plain.engine(variant, tensor_dedup={}, **options)
    report = engines.last_report()
    forms = engines.forms(plain.model(llm), plain.model(beside))
    shared = {form for form, both in forms.items() if both}
    assert {form for form in forms if form.removesuffix(engines.PACKED) in expected} == shared
    answers = plain.outputs(beside), plain.outputs(llm)
    engines.drop(beside, llm)
    del beside, llm
    gc.collect()
    assert answers == (base_alone.answers, alone.answers)
    return Shared(
        {form.removesuffix(engines.PACKED) for form in shared},
        {form.removesuffix(engines.PACKED) for form in forms.keys() - shared},
        report,
    )


def _assert_reported(report: ModelReport, base: Path, variant: Path) -> None:
    """Both levels of sharing, as they follow from which tensors of the files are equal."""
    held = checkpoints.tensors(variant)
    different = set(checkpoints.different(base, variant))
    finals: dict[str, set[str]] = {}
    for name in held:
        finals.setdefault(_final(name), set()).add(name)
    shared = {final: names for final, names in finals.items() if not names & different}
    sources = [name for names in shared.values() for name in names]
    assert report.tensors_total == len(finals)
    assert report.tensors_shared == len(shared)
    assert report.source_tensors_total == len(held)
    assert report.source_tensors_shared == len(sources)
    assert report.source_bytes_shared == sum(held[name].nbytes for name in sources)
    assert report.total_bytes == sum(_resident_bytes(name, held) for name in held)
    assert report.shared_bytes == sum(_resident_bytes(name, held) for name in sources)
    assert report.shared_bytes + report.private_bytes == report.total_bytes


def _resident_bytes(name: str, held: Mapping[str, torch.Tensor]) -> int:
    """Where vLLM packs, it keeps embedding and head beside their packed forms."""
    return held[name].nbytes * (2 if name in (EMBEDDING, HEAD) and plain.packs() else 1)


def _final(name: str) -> str:
    """The parameter of vLLM's llama that this tensor of the file goes into."""
    parts = name.split(".")
    return ".".join(FUSED.get(part, part) for part in parts)


def _nudged(tensor: torch.Tensor) -> torch.Tensor:
    """Other fp32 values that round to the same bf16 ones."""
    nudged = tensor * (1 + 2**-12)
    assert not torch.equal(nudged, tensor)
    assert torch.equal(nudged.bfloat16(), tensor.bfloat16())
    return nudged


def _written(like: Path, target: Path, held: Mapping[str, torch.Tensor]) -> Path:
    target.mkdir()
    for file in like.iterdir():
        if file.name != checkpoints.WEIGHTS:
            (target / file.name).write_bytes(file.read_bytes())
    contiguous = {name: tensor.contiguous() for name, tensor in held.items()}
    safetensors.torch.save_file(contiguous, target / checkpoints.WEIGHTS, {"format": "pt"})
    return target
