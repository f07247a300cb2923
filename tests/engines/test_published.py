"""A published step in vLLM is the model that `save_pretrained` would have written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from models import tiny_checkpoints as checkpoints
from remote_runs.remotes import s3
from tensor_dedup import Publisher, Store
from vllm_runs import engines, plain

pytestmark = pytest.mark.vllm


@pytest.fixture
def bucket() -> Iterator[str]:
    with s3():
        yield "s3://bucket/policy"


def trained(base: Path) -> Iterator[Any]:
    """The model, as a trainer has it, before and after a step."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    yield model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    yield model


def test_an_engine_loads_a_published_step(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = checkpoints.make("llama_tied", tmp_path / "made").base
    expected = []
    with Publisher(bucket, work=tmp_path / "work") as policy:
        for step, model in enumerate(trained(base)):
            model.save_pretrained(tmp_path / f"saved-{step}")
            policy.publish(model, step)
    for step in range(2):
        llm = plain.engine(tmp_path / f"saved-{step}")
        expected.append(plain.outputs(llm))
        engines.drop(llm)
    assert expected[0] != expected[1]
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "host"))
    for step, name in enumerate(("policy@0", "policy@latest")):
        llm = engines.sharing(f"store://{name}", store=bucket)
        assert plain.outputs(llm) == expected[step]
        assert engines.last_report().name == f"store://policy@{step}"
        served = llm.llm_engine.model_config.served_model_name
        assert served == f"store://{name}"  # for clients it is the same model after each step
        engines.drop(llm)
    assert Store.open().names() == ["policy@0", "policy@1"]
