"""A fine-tune that takes leaves of its base gives what plain vLLM gives, of every architecture."""

import msgspec
import pytest

from models import tiny_checkpoints as checkpoints
from tensor_dedup.digest import LEAF_BYTES
from vllm_runs import leaf_run, pair_run

pytestmark = pytest.mark.vllm

# Embedding and head apart, tied, and a mixture of experts, which vLLM loads otherwise.
_SHORT = {"llama", "gpt2", "mixtral"}


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, leaf_run.Result]:
    """What is tested here, in one process of its own."""
    written = pair_run.apart(leaf_run.main, tmp_path_factory.mktemp("leaves"), request)
    return msgspec.json.decode(written, type=dict[str, leaf_run.Result])


@pytest.fixture(
    params=[
        pytest.param(arch, marks=[] if arch in _SHORT else [pytest.mark.long])
        for arch in checkpoints.ARCHITECTURES
    ]
)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def result(arch: str, results: dict[str, leaf_run.Result]) -> leaf_run.Result:
    assert arch in results, "its run failed, see the process's output"
    return results[arch]


def test_outputs_equal_those_of_plain_vllm_where_leaves_are_shared(
    result: leaf_run.Result,
) -> None:
    for load in result.loads:
        tensors = len(load.pieces)
        assert tensors in (1, 2)  # the embedding, and the head unless it is tied or there is none
        assert load.pieces == [4] * tensors
        assert load.report.leaf_shared_bytes == tensors * 4 * LEAF_BYTES
        assert load.common == load.report.shared_bytes + load.report.leaf_shared_bytes
        assert load.report.skipped == []
        assert load.equal_outputs
    assert result.different_outputs
    assert result.bases_outputs == [True] * 4
    assert result.alone
    assert result.verified
    assert result.left_alive == 0


def test_of_a_known_fine_tune_only_the_leaves_that_differ_are_read(result: leaf_run.Result) -> None:
    unknown, known = (load.report for load in result.loads)
    assert not unknown.known
    assert known.known
    assert 0 < known.bytes_read <= 1.05 * result.changed
