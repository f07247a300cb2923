"""Steps of a training as models: `store://RUN@STEP` in vLLM."""

from pathlib import Path

import pytest
import torch

from models import tiny_checkpoints as checkpoints
from tensor_dedup.training import CheckpointStore
from vllm_runs import engines, plain

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Pair:
    made = checkpoints.make("llama", tmp_path_factory.mktemp("steps"))
    engines.warm_up(made.base)
    return made


def test_steps_of_a_run_answer_as_the_models_that_were_saved(
    pair: checkpoints.Pair, tmp_path: Path
) -> None:
    expected = []
    with CheckpointStore(tmp_path, "org/run", config=pair.base, weights="model") as run:
        for step, path in enumerate((pair.base, pair.fine_tune)):
            llm = plain.engine(path)
            expected.append(plain.outputs(llm))
            engines.drop(llm)
            moment = {"moment": torch.full((70, 70), step / 7), "epoch": step}
            run.save({"model": checkpoints.tensors(path), "optimizer": moment}, step)
        found = run.stats()
    assert int(str(found["unique_chunks"])) < int(str(found["total_chunks"]))
    assert expected[0] != expected[1]
    first = engines.sharing("store://org/run@0", store=str(tmp_path))
    second = engines.sharing("store://org/run@1", store=str(tmp_path))
    report = engines.last_report()
    assert 0 < report.shared_bytes < report.total_bytes
    assert [plain.outputs(first), plain.outputs(second)] == expected
    engines.drop(first, second)
