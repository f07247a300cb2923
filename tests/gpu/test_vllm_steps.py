"""An engine of vLLM on a GPU changes to other steps of its run, and answers as plain engines.

Without a GPU `tests/engines/test_gpu_step_updates.py` does the like over the fake driver. A file of
its own, for vLLM changes the process it is in.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_runs import gpu_world
from tensor_dedup import Store, verify
from tensor_dedup.training import CheckpointStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_world.REHEARSAL, reason="rehearsed by test_gpu_step_updates.py"),
]

RUN = "policy"
OPTIONS: dict[str, Any] = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.3}
SIZES = {"cudagraph_capture_sizes": [1, 2, 4]}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", **SIZES},
    },
    "compiled": {"enforce_eager": False, "compilation_config": SIZES},
}


@pytest.fixture(autouse=True)
def _follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where vLLM is missing, or one that follows no steps."""
    pytest.importorskip("vllm")
    from tensor_dedup.patches.vllm.seams import why_not

    if (reason := why_not("steps")) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")


def steps(root: Path) -> Path:
    """A store with three steps, and an export of each beside it."""
    from models import tiny_checkpoints as checkpoints

    pair = checkpoints.make("llama", root / "checkpoints")
    first, tuned = (checkpoints.tensors(each) for each in (pair.base, pair.fine_tune))
    turned = {name: each * -1.25 for name, each in first.items()}
    with CheckpointStore(root / "store", RUN, config=pair.base) as run:
        for number, each in enumerate((first, tuned, turned)):
            run.save(each, number)
    with Store.open(root / "store") as store:
        for number in range(3):
            store.export(f"{RUN}@{number}", root / f"step-{number}")
    return root / "store"


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_follows_and_answers_as_plain_ones(way: str, tmp_path: Path) -> None:
    from vllm_runs import plain

    store = steps(tmp_path)
    expected = []
    for step in range(3):
        alone = plain.engine(tmp_path / f"step-{step}", **OPTIONS)
        expected.append(plain.tokens(plain.outputs(alone)))
        plain.let_go(alone)
    assert len({repr(each) for each in expected}) > 1
    llm: Any = plain.engine(
        f"store://{RUN}@0",
        tensor_dedup={"store": str(store)},
        weight_transfer_config={"backend": "tensor_dedup"},
        **{**OPTIONS, **WAYS[way]},
    )
    places = [each.data_ptr() for each in plain.model(llm).parameters()]
    assert plain.tokens(plain.outputs(llm)) == expected[0]
    free = []
    for step in (1, 2, 0, 0, 1) * 4:
        llm.update_weights({"step": step})
        llm.llm_engine.reset_prefix_cache()
        assert plain.tokens(plain.outputs(llm)) == expected[step]
        free.append(torch.cuda.mem_get_info()[0])
    assert verify().ok
    if way != "eager":
        assert [each.data_ptr() for each in plain.model(llm).parameters()] == places
    # Of former steps nothing stays: 15 would take at least 2 MiB each, the least of a handle.
    assert max(free[5:]) - min(free[5:]) < 8 << 20
