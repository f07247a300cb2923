"""vLLM's engines on a GPU: the second costs what differs, and answers are plain.

Left out where vLLM is not installed. Without a GPU `tests/engines/test_gpu_engines.py` does the
like over the fake driver. A file of its own, for vLLM changes the process it is in.
"""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gpu_runs import gpu_world
from tensor_dedup import report, shares_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        gpu_world.REHEARSAL, reason="rehearsed by tests/engines/test_gpu_engines.py"
    ),
]

# As it comes, vLLM compiles; what is captured here is what its layers do one by one.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4]}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {"enforce_eager": False, "compilation_config": GRAPHS},
}


@pytest.fixture(autouse=True)
def _without_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """`scripts/test-gpu --gather` brings neither FlashInfer nor flash attention."""
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")


@pytest.mark.parametrize("way", WAYS)
def test_a_pair_answers_as_plain_engines_and_the_second_costs_what_differs(
    way: str, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    from models import tiny_checkpoints as checkpoints
    from vllm_runs import plain

    made = checkpoints.make("llama", tmp_path)
    options = {
        **WAYS[way],
        "attention_backend": "TRITON_ATTN",
        # Every engine wants so much to be free when it starts, whatever it takes.
        "gpu_memory_utilization": 0.5,
    }

    right = []
    for path in (made.base, made.fine_tune):
        alone = plain.engine(path, **options)
        right.append(plain.tokens(plain.outputs(alone)))
        plain.let_go(alone)
    base, again, tuned = (
        plain.engine(path, tensor_dedup=True, **options)
        for path in (made.base, made.base, made.fine_tune)
    )

    assert not any(each.skipped for each in report().models[-3:])
    models = [plain.model(each) for each in (base, again, tuned)]
    assert {p.device.type for each in models for p in each.parameters()} == {"cuda"}
    assert all(held_by_both(models[0], models[1]).values())
    alike = held_by_both(models[0], models[2])
    assert 0 < sum(alike.values()) < len(alike)  # one layer of three is another
    for engine, expected in zip((base, again, tuned), (right[0], *right), strict=True):
        assert plain.tokens(plain.outputs(engine)) == expected


def held_by_both(one: nn.Module, other: nn.Module) -> dict[str, bool]:
    """For each parameter, by name: is it the same memory of the GPU in both?"""
    theirs = dict(other.named_parameters())
    return {name: shares_memory(p, theirs[name]) for name, p in one.named_parameters()}
