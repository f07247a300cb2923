"""vLLM's engines on a GPU: the second costs what differs, and answers are plain.

Left out where vLLM is not installed. Without a GPU `tests/engines/test_gpu_engines.py` does the
like over the fake driver, `test_quantised.py` and `test_bin_and_gguf.py` in host memory. A file of
its own, for vLLM changes the process it is in.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpu_runs import gpu_world
from tensor_dedup import report, shares_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        gpu_world.REHEARSAL, reason="rehearsed by test_gpu_engines.py and test_quantised.py"
    ),
]

SIZES = {"cudagraph_capture_sizes": [1, 2, 4]}
# As it comes, vLLM compiles; what is captured here is what its layers do one by one.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL", **SIZES}
SEGMENTS = "expandable_segments"
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    SEGMENTS: {},
    "graphs": {"enforce_eager": False, "compilation_config": GRAPHS},
    "compiled": {"enforce_eager": False, "compilation_config": SIZES},
}


@pytest.fixture(autouse=True)
def _without_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """`scripts/test-gpu --gather` brings neither FlashInfer nor flash attention."""
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")


@pytest.fixture
def _segments(request: pytest.FixtureRequest) -> Iterator[None]:
    """PyTorch's allocator as the way `expandable_segments` has it."""
    settings: Any = torch.cuda.memory._set_allocator_settings
    if request.node.callspec.params["way"] == SEGMENTS:
        settings(f"{SEGMENTS}:True")
    yield
    settings(f"{SEGMENTS}:False")


@pytest.mark.usefixtures("_segments")
@pytest.mark.parametrize("way", WAYS)
def test_a_pair_answers_as_plain_engines_and_the_second_costs_what_differs(
    way: str, tmp_path: Path
) -> None:
    from models import tiny_checkpoints as checkpoints

    made = checkpoints.make("llama", tmp_path)
    models = answering_as_plain_ones(made.base, made.fine_tune, **WAYS[way])
    loads = report().models[-3:]
    assert not any(each.skipped for each in loads)
    assert loads[1].bytes_read == 0, "what is resident was read again"
    assert 0 < loads[2].bytes_read <= loads[0].bytes_read
    if way == SEGMENTS:
        snapshot: Any = torch.cuda.memory_snapshot
        assert any(each["is_expandable"] for each in snapshot())
    assert all(held_by_both(models[0], models[1]).values())
    alike = held_by_both(models[0], models[2])
    assert 0 < sum(alike.values()) < len(alike)  # one layer of three is another


def test_a_pair_in_fp8_answers_as_plain_engines(tmp_path: Path) -> None:
    from models import quantised
    from models import tiny_checkpoints as checkpoints

    made = checkpoints.make("llama", tmp_path)
    base, tuned = (
        quantised.make("fp8", each, tmp_path / f"{each.name} in fp8")
        for each in (made.base, made.fine_tune)
    )
    models = answering_as_plain_ones(base, tuned)
    assert torch.float8_e4m3fn in {each.dtype for each in models[0].parameters()}
    shares_in_fp8 = {
        dict(models[0].named_parameters())[name].dtype
        for name, alike in held_by_both(models[0], models[2]).items()
        if alike
    }
    assert torch.float8_e4m3fn in shares_in_fp8


def test_a_pair_in_gguf_answers_as_plain_engines(tmp_path: Path) -> None:
    """The plug-in's kernels need CUDA, so on a CPU stand-ins compute."""
    pytest.importorskip("vllm_gguf_plugin")
    from models import quantised
    from models import tiny_checkpoints as checkpoints

    made = checkpoints.make("llama", tmp_path)
    base, tuned = (
        quantised.gguf_file(each, tmp_path / f"{each.name}.gguf", "Q8_0")
        for each in (made.base, made.fine_tune)
    )
    options = {"tokenizer": str(made.base), "hf_config_path": str(made.base)}
    models = answering_as_plain_ones(base, tuned, **options)
    last = report().models[-1]
    assert 0 < last.shared_bytes < last.total_bytes, last.skipped
    assert any(held_by_both(models[0], models[2]).values())


def answering_as_plain_ones(base: Path, tuned: Path, **options: Any) -> list[nn.Module]:
    """The models of three engines that share, of base, base and fine-tune, with plain tokens."""
    from vllm_runs import plain

    options |= {
        "attention_backend": "TRITON_ATTN",
        # Every engine wants so much to be free when it starts, whatever it takes.
        "gpu_memory_utilization": 0.3,
    }
    right, answers = [], []
    for path in (base, tuned):
        alone = plain.engine(path, **options)
        answers.append(plain.outputs(alone))
        right.append(plain.tokens(answers[-1]))
        plain.let_go(alone)
    assert answers[0] != answers[1]  # at least in how likely tokens are
    engines = [plain.engine(path, tensor_dedup=True, **options) for path in (base, base, tuned)]
    models = [plain.model(each) for each in engines]
    assert {p.device.type for each in models for p in each.parameters()} == {"cuda"}
    for engine, expected in zip(engines, (right[0], *right), strict=True):
        assert plain.tokens(plain.outputs(engine)) == expected
    return models


def held_by_both(one: nn.Module, other: nn.Module) -> dict[str, bool]:
    """For each parameter, by name: is it the same memory of the GPU in both?"""
    theirs = dict(other.named_parameters())
    return {name: shares_memory(p, theirs[name]) for name, p in one.named_parameters()}
