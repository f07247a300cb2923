"""Loads by Transformers that fail, are refused, or find what a hint remembers of a file."""

import gc
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf

from files.hub_caches import snapshot
from models import tiny_checkpoints as checkpoints
from models.tiny_pipelines import equal, nbytes, parameters, shared
from processes import process_state
from store_runs.stores import assert_clean, content, write
from tensor_dedup import Store, TensorDedupConfig, disable, enable, report, verify
from tensor_dedup.errors import AuditError
from tensor_dedup.formats.safetensors import read_header
from tensor_dedup.loader.checkpoint_io.hints import FileIdentity, HintIndex
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.patches.huggingface import model_load
from tensor_dedup.text_table import BETWEEN_PROCESSES
from vllm_runs.shared import quiet


@pytest.fixture(autouse=True)
def no_descriptors_stay(nothing_stays: None) -> Iterator[None]:
    descriptors = process_state.descriptors()
    yield
    disable()
    assert not process_state.descriptors() - descriptors


def load(path: Path | str, **options: Any) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(path, **options)


def sharded(path: Path, target: Path) -> list[Path]:
    load(path).save_pretrained(target, max_shard_size="100KB")
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    return files


def test_a_load_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    files = sharded(checkpoints.make("llama", tmp_path).base, tmp_path / "shards")
    whole = files[-1].read_bytes()
    files[-1].write_bytes(whole[: len(whole) // 2])
    before = process_state.remaining()
    with enable(), pytest.raises(Exception, match=r"(?i)incomplete|header|invalid"):
        load(tmp_path / "shards")
    assert not process_state.remaining().beyond(before)
    assert model_load.under_way() is None
    files[-1].write_bytes(whole)
    with enable():
        first, second = load(tmp_path / "shards"), load(tmp_path / "shards")
    assert shared(first, second) == parameters(first).keys()


def test_an_error_of_ours_in_the_middle_stops_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = checkpoints.make("llama", tmp_path)
    with enable():
        first = load(pair.base)
    # As if a resident had rotted: no bytes are the same any more.
    monkeypatch.setattr("tensor_dedup.loader.post_load.dedup.same_bytes", lambda *_: False)
    with enable({"audit": 1.0}), pytest.raises(AuditError, match="differs from"):
        load(pair.base)
    monkeypatch.undo()
    with enable({"audit": 1.0}):
        second = load(pair.base)
    assert shared(first, second) == parameters(first).keys()


def test_without_its_manager_a_load_shares_within_the_process_and_says_so(tmp_path: Path) -> None:
    pair = checkpoints.make("llama", tmp_path)
    home = tmp_path / "socket"
    home.mkdir(mode=0o755)
    nobody = home / "manager.sock"
    with enable({"memory_manager": str(nobody)}):
        first, second = load(pair.base), load(pair.base)
    assert shared(first, second) == parameters(first).keys()
    [*_, (name, why)] = report().models[-1].skipped
    assert name == BETWEEN_PROCESSES
    assert "open to others (mode 755)" in why


def test_a_part_that_is_refused_is_left_alone(tmp_path: Path) -> None:
    pair = checkpoints.make("llama", tmp_path)
    before = len(registry.residents())

    class Both:
        """As a pipeline: one of its models is to be shared, the other one not."""

        def __init__(self) -> None:
            plain = load(pair.fine_tune, tensor_dedup=False)
            assert len(registry.residents()) == before
            self.components = {"plain": plain, "shared": load(pair.base)}

    both = model_load.run(Both, TensorDedupConfig(), "both", set())
    other = load(pair.fine_tune, tensor_dedup=True)
    again = load(pair.base, tensor_dedup=True)
    assert not shared(both.components["plain"], other)
    assert shared(both.components["shared"], again) == parameters(again).keys()
    first = report().models[-3]
    assert [each["name"] for each in first.components] == ["shared"]
    assert first.skipped == [("plain", "it was loaded with tensor_dedup=False")]


def test_what_holds_nothing_to_share_says_so() -> None:
    class Session:
        """As a pipeline of ONNX files: nothing in it is a module."""

        components: ClassVar = {"unet": object(), "scheduler": None}

    loaded = model_load.run(Session, TensorDedupConfig(), "onnx", set())
    assert isinstance(loaded, Session)
    last = report().models[-1]
    assert (last.name, last.total_bytes, last.components) == ("onnx", 0, [])
    assert last.skipped == [("", "a Session holds no module of torch")]


def test_a_model_inside_another_one_is_counted_once(tmp_path: Path) -> None:
    pair = checkpoints.make("llama", tmp_path)

    def whole() -> Any:
        return torch.nn.Sequential(load(pair.base), torch.nn.Linear(8, 8))

    model = model_load.run(whole, TensorDedupConfig(), "whole", set())
    assert report().models[-1].total_bytes == nbytes(model)
    assert report().models[-1].tensors_total == len(parameters(model))
    with enable():
        other = load(pair.base)
    assert {f"0.{name}" for name in parameters(other)} < parameters(model).keys()
    assert shared(model[0], other) == parameters(other).keys()


def remembered(path: Path) -> Any:
    """A model of a file that hints know by now."""
    quiet(path)
    with enable():
        model = load(path)
    assert not report().models[-1].known
    assert report().models[-1].seconds["hash"] > 0
    assert report().models[-1].bytes_hashed == nbytes(model)
    return model


def test_what_a_hint_knows_and_what_is_resident_is_not_hashed(tmp_path: Path) -> None:
    pair = checkpoints.make("llama_tied", tmp_path)
    first = remembered(pair.base)
    with enable():
        second = load(pair.base)
    last = report().models[-1]
    assert (last.known, last.bytes_hashed) == (True, 0)
    assert (last.shared_bytes, last.private_bytes) == (nbytes(second), 0)
    assert shared(first, second) == parameters(first).keys()
    with enable({"verify": "always"}):
        third = load(pair.base)
    assert (report().models[-1].known, report().models[-1].bytes_hashed) == (False, nbytes(third))
    del first, second, third
    gc.collect()
    with enable():  # remembered, but nowhere resident: it is read, and compared with the hint
        fourth = load(pair.base)
    assert (report().models[-1].known, report().models[-1].bytes_hashed) == (True, nbytes(fourth))
    assert verify().ok


def test_a_cast_is_not_taken_for_the_bytes_of_its_file(tmp_path: Path) -> None:
    pair = checkpoints.make("llama", tmp_path)
    first = remembered(pair.base)
    with enable():
        wide = load(pair.base, dtype=torch.float32)
    assert report().models[-1].bytes_hashed == nbytes(wide)
    assert not shared(first, wide)
    assert all(
        torch.equal(p.float(), parameters(wide)[name]) for name, p in parameters(first).items()
    )


def test_another_file_of_that_name_and_size_is_another_file(tmp_path: Path) -> None:
    pair = checkpoints.make("llama", tmp_path)
    first = remembered(pair.base)
    file, other = pair.base / "model.safetensors", pair.fine_tune / "model.safetensors"
    assert file.stat().st_size == other.stat().st_size
    file.write_bytes(other.read_bytes())
    plain = load(pair.fine_tune)
    with enable():
        second = load(pair.base)
    assert equal(second, plain) == parameters(plain).keys()
    assert shared(first, second) == equal(first, second) != parameters(first).keys()


def forge(path: Path, digest: str) -> None:
    """Make hints say this digest of every tensor of a checkpoint."""
    file = path / "model.safetensors"
    places = {(t.start, t.nbytes): digest for t in read_header(file).tensors}
    fd = os.open(file, os.O_RDONLY)
    index = HintIndex()
    index.forget(fd)
    assert index.record(fd, FileIdentity.of(fd), time.time_ns(), "blake3", places)
    os.close(fd)


def test_a_hint_that_is_wrong_is_found_out_and_the_model_loaded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = checkpoints.make("llama", tmp_path)
    plain = load(pair.base)
    quiet(pair.base)
    forge(pair.base, "0" * 64)
    with enable(), caplog.at_level(logging.WARNING):
        first = load(pair.base)
    assert "loading again without hints" in caplog.text
    assert equal(first, plain) == parameters(plain).keys()
    with enable():
        second = load(pair.base)
    assert shared(first, second) == parameters(first).keys()
    assert verify().ok


def test_a_revision_of_a_hub_cache_is_written_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are blobs that the whole cache shares."""
    pair, cache = checkpoints.make("llama", tmp_path), tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    base, tune = content(pair.base), content(pair.fine_tune)
    snapshot(cache, "org/name", tune, "2" * 40)
    write(cache / "models--org--name" / "refs", {"refs/pr/1": b"2" * 40})
    weights = snapshot(cache, "org/name", base) / checkpoints.WEIGHTS
    assert weights.resolve().parent.parent == cache / "blobs"
    options = {"cache_dir": cache, "local_files_only": True}
    store = Store.open(tmp_path / "store")
    with enable({"store": store.path, "store_writes": True}):
        first = load("org/name", **options)
        second = load("org/name", revision="refs/pr/1", **options)
    one, two = report().models[-2:]
    assert (one.name, two.name) == ("org/name", "org/name@refs/pr/1")
    assert (one.skipped, two.skipped) == ([], [])
    assert shared(first, second) == equal(first, second) < parameters(second).keys()
    assert one.stored_as is not None
    assert two.stored_as is not None
    assert_clean(store, {one.stored_as: base, two.stored_as: tune})
