"""Base and fine-tune of every architecture, sharing, give exactly what plain vLLM gives."""

from pathlib import Path

import msgspec
import pytest

from models import tiny_checkpoints as checkpoints
from tensor_dedup.formats.safetensors import read_header
from vllm_runs import engines, pair_run

pytestmark = pytest.mark.vllm

# One of each way to lay weights out and to load them runs everywhere; the others, which load as one
# of these does, in long runs only.
_SHORT = {
    "llama",
    "llama_tied",
    "mixtral",  # experts as separate tensors
    "deepseek_v2",  # latent attention, shared experts
    "gpt_oss",  # experts stacked in the file
    "gemma3",
    "gpt2",  # transposed matrices
    "phi3",  # fused in the file
    "falcon",  # queries, keys and values interleaved
    "bert",  # pooling, tensors that are never asked for
}
# What vLLM never asks for, or asks for and drops.
_UNUSED = {"bert": "pooler.", "roberta": "pooler."}
# Where the changed tensors are processed with others as one layer, that layer's tensors.
_ONE_LAYER = {
    "mixtral": "model.layers.2.block_sparse_moe.experts.",
    "gpt_oss": "model.layers.2.mlp.experts.",
}
# Its loading code sets attributes of its own, which a plan does not repeat.
_UNPLANNED = {"deepseek_v2"}
# How much more than a plain load one of ours may read beside the checkpoint (hints, /proc): far
# less than any checkpoint here has.
_BESIDE_BYTES = 100_000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


@pytest.fixture(scope="module")
def results(root: Path, request: pytest.FixtureRequest) -> dict[str, pair_run.Result]:
    """What is tested here, in one process of its own; what it said is in the test's output."""
    written = pair_run.apart(pair_run.main, root, request)
    return msgspec.json.decode(written, type=dict[str, pair_run.Result])


@pytest.fixture(
    params=[
        pytest.param(arch, marks=[] if arch in _SHORT else [pytest.mark.long])
        for arch in checkpoints.ARCHITECTURES
    ]
)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def result(arch: str, results: dict[str, pair_run.Result]) -> pair_run.Result:
    assert arch in results, "its run failed, see the process's output"
    _assert_shared(results[arch])
    return results[arch]


@pytest.fixture
def pair(arch: str, root: Path, result: pair_run.Result) -> checkpoints.Pair:
    return checkpoints.make(arch, root / "checkpoints")


def test_there_are_at_least_24() -> None:
    assert len(checkpoints.ARCHITECTURES) >= 24
    assert set(checkpoints.ARCHITECTURES) >= _SHORT


def test_the_same_model_again_follows_the_plan_of_the_first(
    arch: str, result: pair_run.Result
) -> None:
    assert result.planned == (arch not in _UNPLANNED)
    assert result.again.equal_outputs
    assert result.differing == []
    if result.planned:
        report, before = result.again.report, result.loads[-1].report
        assert result.again.shared
        assert all(result.again.shared.values())
        assert result.again.data_bytes == report.bytes_read == report.private_bytes == 0
        assert report.known
        assert report.shared_bytes == report.total_bytes == before.total_bytes
        assert report.tensors_total == report.tensors_shared == before.tensors_total
        assert report.source_tensors_total == before.source_tensors_total
        assert report.checkpoint_bytes == before.checkpoint_bytes


def test_outputs_equal_those_of_plain_vllm(result: pair_run.Result) -> None:
    assert result.different_outputs
    assert [load.equal_outputs for load in result.loads] == [True] * 4


def test_an_unknown_checkpoint_is_read_once(
    arch: str, pair: checkpoints.Pair, result: pair_run.Result
) -> None:
    base, fine_tune = result.loads[:2]
    for path, load in ((pair.base, base), (pair.fine_tune, fine_tune)):
        used = [name for name in _spans(path) if not _unused(arch, name)]
        assert not load.report.known
        assert not load.read_twice
        assert load.ranges == _joined(path, used)
        _assert_counted(load, result)


def test_of_a_known_checkpoint_only_layers_with_a_change_are_read(
    arch: str, pair: checkpoints.Pair, result: pair_run.Result
) -> None:
    base, fine_tune = result.loads[2:]
    for path, load in ((pair.base, base), (pair.fine_tune, fine_tune)):
        layer = _ONE_LAYER.get(arch)
        read = [n for n in _spans(path) if layer and n.startswith(layer)] or list(pair.changed)
        assert set(pair.changed) <= set(read) < set(_spans(path))
        assert load.report.known
        assert not load.read_twice
        assert load.ranges == _joined(path, read)
        _assert_counted(load, result)


def test_the_report_tells_what_is_shared(
    arch: str, pair: checkpoints.Pair, result: pair_run.Result
) -> None:
    unused = {name for name in _spans(pair.base) if _unused(arch, name)}
    private = len(set(pair.changed) | unused)
    assert result.loads[0].report.shared_bytes == 0
    for load in result.loads[1:]:
        report = load.report
        assert report.source_tensors_total == len(_spans(pair.base))
        assert report.source_tensors_total - report.source_tensors_shared == private
        assert report.tensors_total - report.tensors_shared == 1
        assert report.skipped == []


def test_nothing_is_left_of_models_that_are_gone(result: pair_run.Result) -> None:
    assert result.left_alive == 0


def _assert_shared(result: pair_run.Result) -> None:
    """Every parameter is shared in all its forms if plain vLLM assembles it alike; no other is."""
    unchanged = {name for name, same in result.assembled.items() if same}
    assert 0 < len(unchanged) < len(result.assembled)
    first, *others = result.loads
    assert first.shared is None
    for load in others:
        assert load.shared is not None
        forms = {f: s for f, s in load.shared.items() if not f.endswith(pair_run.DERIVED)}
        assert {form.removesuffix(engines.PACKED) for form in forms} == set(result.assembled)
        wrong = [f for f, s in forms.items() if s != (f.removesuffix(engines.PACKED) in unchanged)]
        assert not wrong


def _assert_counted(load: pair_run.Load, result: pair_run.Result) -> None:
    assert load.report.bytes_read == load.data_bytes
    assert load.report.header_bytes == load.header_bytes
    assert load.unseen - result.unseen < _BESIDE_BYTES


def _unused(arch: str, name: str) -> bool:
    return arch in _UNUSED and name.startswith(_UNUSED[arch])


def _spans(path: Path) -> dict[str, tuple[int, int]]:
    header = read_header(path / checkpoints.WEIGHTS)
    return {spec.name: (spec.start, spec.start + spec.nbytes) for spec in header.tensors}


def _joined(path: Path, names: list[str]) -> list[tuple[int, int]]:
    """The ranges of these tensors in the file, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(_spans(path)[name] for name in names):
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, stop))
    return joined
