"""The digests of loaded models: of their checkpoints and of their weights."""

import copy
import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import nn

from models import tiny_checkpoints as checkpoints
from tensor_dedup import Store, unshare
from tensor_dedup.digest import checkpoint_root, digest
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.loader.unsharing.model_digests import digests_of, take_over, weight_version
from tensor_dedup.patches.vllm.loader import TensorDedupLoader
from vllm_runs import engines, loads, plain, shared

pytestmark = pytest.mark.vllm

PLAIN: dict[str, Any] = {"cpu_weights": "plain"}
TP: dict[str, Any] = {"tensor_parallel_size": 2, "world_size": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = checkpoints.make("llama", tmp_path_factory.mktemp("digests")).base
    engines.warm_up(path)
    with loads.prepared(path):
        yield path


@pytest.fixture(autouse=True)
def _own_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What other tests have hashed is not known here."""
    monkeypatch.setenv("TENSOR_DEDUP_HINTS", str(tmp_path / "hints.sqlite"))
    yield
    gc.collect()


def loaded(path: Path | str, **config: Any) -> tuple[nn.Module, ModelReport]:
    model = loads.load(Path(path), {**PLAIN, **config}).module
    return model, engines.last_report()


def as_rank(path: Path, rank: int) -> ModelReport:
    with loads.as_rank("tp", rank, 2):
        loads.load(path, PLAIN, {**TP, "rank": rank})
    return engines.last_report()


def expected(path: Path) -> str:
    """The digest of a checkpoint by its description, of what the safetensors library reads."""
    entries = []
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no dict
                tensor = opened.get_tensor(name)
                dtype = opened.get_slice(name).get_dtype()
                found = digest(shared.raw(tensor))
                entries.append([name, dtype, list(tensor.shape), found])
    return checkpoint_root(entries)


def flipped(path: Path, target: Path) -> Path:
    """A copy with one bit changed, in the middle of the last tensor of the file."""
    copied = shutil.copytree(path, target)
    file = copied / checkpoints.WEIGHTS
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    return copied


def test_both_digests_change_with_one_bit_and_come_back_with_the_bytes(
    base: Path, tmp_path: Path
) -> None:
    other = flipped(base, tmp_path / "flipped")
    found = []
    for path in (base, other, base):
        _model, report = loaded(path)
        found.append((report.checkpoint_digest, report.weights_digest))
    first, second, third = found
    assert first == third
    assert None not in first
    assert first[0] == expected(base)
    assert second[0] == expected(other) != first[0]
    assert second[1] not in (None, first[1])


def test_a_folder_a_copy_of_it_and_a_stored_checkpoint_have_one_digest(
    base: Path, tmp_path: Path
) -> None:
    store = Store.open(tmp_path / "store")
    store.import_(base, "tiny")
    shards = checkpoints.resharded(base, tmp_path / "shards")
    wanted = expected(base)
    for path in (base, checkpoints.same(base, tmp_path / "copy"), shards):
        assert loaded(path)[1].checkpoint_digest == wanted
    folder = str(tmp_path / "store")
    llm = engines.sharing("store://tiny", store=folder, **PLAIN)
    report = engines.last_report()
    assert report.known_checkpoint_digest == report.checkpoint_digest == wanted
    assert llm.get_weight_version() == wanted[:16]
    engines.drop(llm)


def test_a_load_by_a_plan_knows_the_digest(base: Path) -> None:
    engines.leave_alone(*base.iterdir())
    kept = [loaded(base), loaded(base)]
    model, report = loaded(base)
    assert report.known
    assert report.bytes_read == 0
    assert report.known_checkpoint_digest == expected(base)
    assert {each.weights_digest for _, each in kept} == {report.weights_digest}
    assert weight_version(model) == weight_version(report) == expected(base)[:16]


def test_ranks_that_use_parts_have_the_digest_of_the_whole(base: Path) -> None:
    engines.leave_alone(*base.iterdir())
    wanted = expected(base)
    first = as_rank(base, 0)
    assert first.bytes_hashed < first.checkpoint_bytes
    assert first.known_checkpoint_digest is None, "it had parts only"
    assert first.to_dict()["checkpoint_digest"] is None
    assert first.checkpoint_digest == wanted
    assert first.to_dict()["checkpoint_digest"] == wanted
    second = as_rank(base, 1)
    assert second.known_checkpoint_digest == wanted, "what the first has hashed is remembered"


def test_a_file_that_has_changed_since_tells_nothing_of_what_was_loaded(
    base: Path, tmp_path: Path
) -> None:
    path = checkpoints.same(base, tmp_path / "changes")
    engines.leave_alone(*path.iterdir())
    report = as_rank(path, 0)
    assert report.known_checkpoint_digest is None
    file = path / checkpoints.WEIGHTS
    other = checkpoints.same_header(base, tmp_path / "other") / checkpoints.WEIGHTS
    with file.open("r+b") as opened:
        opened.write(other.read_bytes())
    assert report.checkpoint_digest is None
    model = loads.load(base, PLAIN).module
    assert weight_version(model) == expected(base)[:16]


def test_a_file_that_may_have_changed_unseen_tells_nothing_either(
    base: Path, tmp_path: Path
) -> None:
    """It was written a moment before the load: a later write may have left its times alone."""
    path = checkpoints.same(base, tmp_path / "young")
    for file in path.iterdir():
        os.utime(file)
    report = as_rank(path, 0)
    assert report.known_checkpoint_digest is None
    assert report.checkpoint_digest is None


def test_without_hints_the_digest_is_of_the_bytes_that_were_read(base: Path) -> None:
    engines.leave_alone(*base.iterdir())
    report = loaded(base, verify="always")[1]
    assert report.known_checkpoint_digest == expected(base)
    with loads.as_rank("tp", 0, 2):
        loads.load(base, {**PLAIN, "verify": "always"}, {**TP, "rank": 0})
    assert engines.last_report().known_checkpoint_digest is None
    assert engines.last_report().checkpoint_digest == expected(base)


def test_a_model_that_vllm_loads_by_itself_has_both(base: Path, tmp_path: Path) -> None:
    engines.leave_alone(*base.iterdir())
    _model, wanted = loaded(base)
    refused = mock.patch.object(TensorDedupLoader, "_refusal", return_value="for this test")
    with refused, plain.kept_as("plain"):
        _apart, report = loaded(base)
        assert report.skipped == [("<model>", "for this test")]
        assert report.checkpoint_digest == wanted.checkpoint_digest == expected(base)
        assert report.weights_digest == wanted.weights_digest is not None
        Store.open(tmp_path / "store").import_(base, "tiny")
        llm = engines.sharing("store://tiny", store=str(tmp_path / "store"), **PLAIN)
        assert engines.last_report().skipped == [("<model>", "for this test")]
        assert engines.last_report().known_checkpoint_digest == wanted.checkpoint_digest
        engines.drop(llm)


def test_the_digest_of_the_weights_is_that_of_the_bytes_now(base: Path) -> None:
    model, report = loaded(base)
    _other, untouched = loaded(base)
    first = report.weights_digest
    assert first is not None
    parameter = next(p for p in model.parameters() if p.ndim == 2)
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter[0, 0] += 1  # into the shared memory, copied on write
    second = report.weights_digest
    assert second not in (None, first)
    with torch.no_grad():
        parameter.copy_(before)
    assert report.weights_digest == first, "hashed, for its page is no longer the shared one"
    assert untouched.weights_digest == first
    unshare(model)
    assert report.weights_digest == first
    with torch.no_grad():
        parameter[0, 0] += 1
    assert report.weights_digest == second
    assert weight_version(model) == f"weights:{second[:16]}", "it may be no checkpoint's any more"
    assert report.checkpoint_digest == expected(base), "which is what was loaded"


def test_a_model_that_takes_over_another_ones_weights_takes_over_its_digests(
    base: Path, tmp_path: Path
) -> None:
    other = checkpoints.same_header(base, tmp_path / "other")
    model, report = loaded(base)
    fresh, fresh_report = loaded(other)
    for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        mine.data = theirs.data
    token = digests_of(model)
    take_over(model, fresh)
    del fresh
    gc.collect()
    assert digests_of(model) is not token
    assert weight_version(model) == expected(other)[:16]
    assert fresh_report.weights_digest not in (None, report.known_checkpoint_digest)
    _again, later = loaded(other)
    assert fresh_report.weights_digest == later.weights_digest


def test_what_is_gone_has_no_digest_of_weights(base: Path) -> None:
    model, report = loaded(base)
    before = report.weights_digest
    copied = copy.deepcopy(report)
    del model
    gc.collect()
    assert (before is None, report.weights_digest) == (False, None)
    assert report.checkpoint_digest == expected(base)
    assert copied.checkpoint_digest == expected(base)
    with pytest.raises(UnsupportedError, match="version of your own"):
        weight_version(ModelReport())


def test_packed_weights_are_covered_by_what_was_packed(base: Path, tmp_path: Path) -> None:
    other = flipped(base, tmp_path / "flipped")
    found = []
    for path in (base, other, base):
        loads.load(path, {})
        found.append(engines.last_report().weights_digest)
    # Nothing held them.
    assert found == [None, None, None]
    for path in (base, other, base):
        model = loads.load(path, {})
        found.append(engines.last_report().weights_digest)
        del model
    assert found[3] == found[5] != found[4]
    assert None not in found[3:]


def test_weights_that_were_packed_for_one_model_alone_are_not_claimed(base: Path) -> None:
    model = loads.load(base, {"min_tensor_bytes": 1 << 40})
    if not model.functions():
        pytest.skip("nothing is packed on this CPU")
    assert engines.last_report().weights_digest is None
    assert engines.last_report().checkpoint_digest is not None
