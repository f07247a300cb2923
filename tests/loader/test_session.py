"""What a load session reads of final tensors that are shared in one call."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tensor_dedup import shares_memory
from vllm_runs import deferring
from vllm_runs.lent_tensors import load_deferred, rows


@pytest.mark.parametrize("known", [True, False])
def test_of_equal_known_tensors_one_is_read(tmp_path: Path, known: bool) -> None:
    """As a merge that repeats layers has them. Nothing of it is resident."""
    tensors = {"a": rows(1, 71), "b": rows(1, 71), "c": rows(1, 72)}
    path = deferring.save(tmp_path / "merge.safetensors", tensors)
    model = deferring.module(**{name: torch.zeros_like(each) for name, each in tensors.items()})

    def fill(m: Any, weights: deferring.Weights) -> None:
        for name, each in weights.items():
            m.get_parameter(name).data.copy_(each)

    _, read = load_deferred(None, path, model, fill, known=known)
    assert read == tensors["a"].nbytes * (2 if known else 3)
    for name, each in tensors.items():
        assert torch.equal(model.get_parameter(name), each)
    assert shares_memory(model.get_parameter("a"), model.get_parameter("b"))
