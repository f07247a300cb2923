"""The same model twice: the second load reads no weights and adds none."""

import gc
import json
import logging
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch

from demonstration import models
from files import reads
from models import tiny_checkpoints as checkpoints
from tensor_dedup import shares_memory
from tensor_dedup.loader import report as loader_report
from tensor_dedup.loader.deferred import evaluate, session
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.loader.residents import resident, slab
from tensor_dedup.loader.residents.slab import OutOfMemoryError
from tensor_dedup.patches.vllm import arguments
from tensor_dedup.patches.vllm.loader import TensorDedupLoader
from vllm_runs import engines, loads, plain

pytestmark = pytest.mark.vllm

# Of the article: tensors below 4 MiB are left alone, and 858 MB of a Qwen2-0.5B are shared.
_SMALLEST = 4 << 20
_SOURCE_TENSORS = 73
_SOURCE_BYTES = 899_842_048
# Three matrices of 24 layers and the embedding; gate and up are one final tensor.
_FINAL_TENSORS = 49


@dataclass
class Second:
    """What the second load of a model read and reported, and what it shares with the first."""

    data_bytes: int
    header_bytes: int
    unseen: int
    forms: dict[str, bool]
    equal_outputs: bool
    report: ModelReport


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("same-model")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Path:
    pair = checkpoints.make("llama_tied", folder)
    engines.warm_up(pair.base)
    return pair.base


def test_the_second_load_reads_no_weights(tiny: Path) -> None:
    engines.leave_alone(tiny / checkpoints.WEIGHTS)
    second = _load_twice(tiny)
    assert all(second.forms.values())
    assert second.data_bytes == second.report.bytes_read == 0
    assert second.header_bytes == second.report.header_bytes > 0
    # Nor by any other way: the whole process read less than the weights are.
    assert second.unseen < checkpoints.nbytes(tiny) / 2
    assert second.report.known
    assert second.report.private_bytes == second.report.bytes_materialised == 0
    assert second.report.shared_bytes == second.report.total_bytes
    assert second.report.source_bytes_shared == checkpoints.nbytes(tiny)
    assert second.equal_outputs


def test_an_emptied_parameter_shares_what_its_packed_weight_does(tiny: Path) -> None:
    """vLLM leaves an empty parameter where it has packed a weight: 16 of 31 in a small llama."""
    one, other = engines.sharing(tiny), engines.sharing(tiny)
    model = plain.model(one)
    mine, theirs = (dict(plain.model(llm).named_parameters()) for llm in (one, other))
    emptied = {name for name, parameter in mine.items() if not parameter.numel()}
    report = engines.last_report()
    assert 0 < len(emptied) < len(mine)
    assert report.tensors_shared == report.tensors_total == len(mine)

    assert {name for name in mine if not shares_memory(mine[name], theirs[name])} == set()
    first, second, *_ = sorted(emptied)
    assert not shares_memory(mine[first], mine[second])
    assert not shares_memory(mine[first], torch.empty(0, dtype=mine[first].dtype))

    # Like the empty parameters of plain vLLM.
    assert pickle.loads(pickle.dumps(mine[first])).shape == mine[first].shape

    packed = {f"{name}.weight": layer for name, layer in model.named_modules()}
    packed[first].cpu_linear = None  # as a reload packs another weight
    assert not shares_memory(mine[first], theirs[first])
    assert shares_memory(mine[second], theirs[second])
    engines.drop(one, other)


@pytest.mark.parametrize(
    "beside", ["a worker", "one that has ended", "another model", "a worker of another rank"]
)
def test_an_engine_that_only_its_process_keeps_from_sharing_says_so_once(
    beside: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in the process of a second engine, beside the first one's report."""
    reports = tmp_path / "reports"
    reports.mkdir()
    monkeypatch.setenv(loader_report.REPORT_DIR_VARIABLE, str(reports))
    monkeypatch.setattr(TensorDedupLoader, "_said_apart", False)
    monkeypatch.setattr(arguments, "share_with_workers", lambda: None)
    monkeypatch.setattr(loader_report._collection, "own", None)
    rank = 1 if beside == "a worker of another rank" else 0  # the first one speaks for all
    with loads.prepared(tiny):
        first = loads.load(tiny, {}, {"rank": rank})
    [file] = reports.iterdir()
    held = json.loads(file.read_bytes())
    assert held["largest"]
    held["pid"] = 2**22 + 1 if beside == "one that has ended" else os.getppid()
    if beside == "another model":
        held["largest"] = ["00" * 32]
    file.unlink()
    (reports / f"{held['pid']}-1.json").write_text(json.dumps(held))

    with caplog.at_level(logging.WARNING), loads.prepared(tiny):
        again = [loads.load(tiny, {}, {"rank": rank}) for _ in range(2)]

    said = [each.getMessage() for each in caplog.records if "own" in each.getMessage()]
    assert len(said) == (1 if beside == "a worker" else 0)
    for text in said:
        assert f"in process {os.getppid()}" in text
        assert "VLLM_ENABLE_V1_MULTIPROCESSING=0" in text
        assert "memory_manager" in text
    del first, again
    gc.collect()


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of every size go straight into shared memory, as large ones do."""
    monkeypatch.setattr(session, "STREAM_BYTES", 0)
    monkeypatch.setattr(evaluate, "MAX_AHEAD_BYTES", 0)


@pytest.mark.usefixtures("small_is_large")
def test_what_is_poured_in_vain_is_not_kept(tiny: Path) -> None:
    test_the_second_load_shares_all_when_hints_may_not_be_used(tiny)


@pytest.mark.usefixtures("small_is_large")
def test_a_model_loads_by_itself_when_there_is_no_shared_memory(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> NoReturn:
        raise OutOfMemoryError("no descriptor is left", nbytes=nbytes)

    llm = plain.engine(tiny)
    expected = plain.outputs(llm)
    engines.drop(llm)
    monkeypatch.setattr(slab, "_memory_file", refuse)
    llm = engines.sharing(tiny, verify="always")
    assert plain.outputs(llm) == expected
    engines.drop(llm)
    reasons = dict(engines.last_report().skipped)
    assert reasons["model.embed_tokens.weight"] == "no descriptor is left"


def test_the_second_load_shares_all_when_hints_may_not_be_used(tiny: Path) -> None:
    second = _load_twice(tiny, verify="always")
    assert all(second.forms.values())
    assert second.data_bytes == second.report.bytes_read == checkpoints.nbytes(tiny)
    assert not second.report.known
    assert second.report.private_bytes == second.report.bytes_materialised == 0
    assert second.equal_outputs


def test_tensors_below_the_threshold_are_left_alone(tiny: Path) -> None:
    """Of each of three layers gate, up and down have 64 KiB, the embedding twice as many."""
    engines.leave_alone(tiny / checkpoints.WEIGHTS)
    second = _load_twice(tiny, min_tensor_bytes=64 << 10)
    report = second.report
    shared = {form.removesuffix(engines.PACKED) for form, both in second.forms.items() if both}
    shared -= {"lm_head.weight"}  # another name of the embedding
    kinds = {name.split(".")[-2] for name in shared}
    assert kinds == {"embed_tokens", "gate_up_proj", "down_proj"}
    assert len(shared) == report.tensors_shared == 3 * 2 + 1
    assert report.source_tensors_shared == 3 * 3 + 1
    private = checkpoints.nbytes(tiny) - report.source_bytes_shared
    assert second.data_bytes == report.bytes_read == private > 0
    assert second.equal_outputs


@pytest.mark.long
def test_large_tensors_of_a_qwen2_of_half_a_billion(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.make(models.BASE, folder)
    path = folder / models.BASE
    engines.leave_alone(path / checkpoints.WEIGHTS)
    monkeypatch.setattr(session, "STREAM_BYTES", 64 << 20)
    with patch.object(session, "read_into_slab", wraps=resident.read_into_slab) as pour:
        second = _load_twice(path, min_tensor_bytes=_SMALLEST)
    assert pour.call_count == 1  # the embedding, for the first
    report = second.report
    shared = {form.removesuffix(engines.PACKED) for form, both in second.forms.items() if both}
    shared -= {"lm_head.weight"}  # another name of the embedding
    assert len(shared) == report.tensors_shared == _FINAL_TENSORS
    assert report.source_tensors_shared == _SOURCE_TENSORS
    assert report.source_bytes_shared == _SOURCE_BYTES
    private = checkpoints.nbytes(path) - _SOURCE_BYTES
    assert second.data_bytes == report.bytes_read == private
    assert second.equal_outputs


def _load_twice(path: Path, **config: Any) -> Second:
    first = engines.sharing(path, **config)
    with reads.counted(path) as seen:
        second = engines.sharing(path, **config)
    report = engines.last_report()
    forms = engines.forms(plain.model(second), plain.model(first))
    answers = plain.outputs(first), plain.outputs(second)
    engines.drop(first, second)
    del first, second
    gc.collect()
    llm = plain.engine(path)
    expected = plain.outputs(llm)
    engines.drop(llm)
    return Second(
        seen.data_bytes(),
        seen.header_bytes(),
        seen.unseen(),
        forms,
        answers == (expected, expected),
        report,
    )
