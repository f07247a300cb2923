"""Loads that fail, or whose memory and disk are full: as plain vLLM says it, and nothing is left.

Before each there is a model with which most of the failing one is shared. Afterwards the table of
residents, their memory and the layers' records are what they were, and a sound load shares again.
"""

import errno
import gc
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from files.hub_caches import snapshot
from manager_runs import managers
from models import kinds
from models import tiny_checkpoints as checkpoints
from processes import process_state
from store_runs.stores import assert_clean, content
from tensor_dedup import Store, report, verify
from tensor_dedup.errors import (
    ChangedFileError,
    IncompleteCheckpointError,
    TensorDedupError,
    UnreadableFileError,
)
from vllm_runs import engines, loads

pytestmark = pytest.mark.vllm

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1."
# Whatever loading may raise; which of them is what the tests are about.
_RAISED = (
    AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError,
    SafetensorError, TensorDedupError, KeyboardInterrupt,
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[checkpoints.Pair]:
    """A base, of which a fine-tune is damaged in each test."""
    made = checkpoints.make("llama", tmp_path_factory.mktemp("errors"))
    engines.warm_up(made.base)
    with loads.prepared(made.base):
        yield made


@dataclass
class Resident:
    """A model that is there before, and what there was of it."""

    pair: checkpoints.Pair
    model: loads.Model
    parameters: dict[str, str]
    functions: dict[str, str]
    state: process_state.Remains

    def is_as_before(self) -> None:
        """Nothing is left of a failed load; the next one of sound files shares all but a change."""
        assert not process_state.remaining().beyond(self.state)
        assert verify().ok
        tuned = loads.load(self.pair.fine_tune, {})
        forms = engines.forms(tuned.module, self.model.module)
        private = {form.removesuffix(engines.PACKED) for form, same in forms.items() if not same}
        assert private == {"model.layers.2.mlp.down_proj.weight"}
        expected = loads.load(self.pair.fine_tune)
        assert tuned.parameters() == expected.parameters()
        assert tuned.functions() == expected.functions()
        assert self.model.parameters() == self.parameters
        assert self.model.functions() == self.functions


@pytest.fixture
def resident(pair: checkpoints.Pair) -> Iterator[Resident]:
    model = loads.load(pair.base, {})
    yield Resident(pair, model, model.parameters(), model.functions(), process_state.remaining())
    del model
    gc.collect()


@dataclass(frozen=True)
class Failure:
    """What a load was ended by."""

    kind: type[BaseException]
    text: str


def _failure(path: Path, config: dict[str, Any] | None) -> Failure | None:
    """How loading ends, plainly without a config; None: well. The model is let go."""
    try:
        loads.load(path, config)
    except _RAISED as error:
        return Failure(type(error), str(error))
    finally:
        gc.collect()
    return None


def _change(path: Path, change: Callable[[Tensors], object]) -> None:
    held = checkpoints.tensors(path)
    change(held)
    kinds.save(path / checkpoints.WEIGHTS, held)


def _without(*names: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        _change(path, lambda held: [held.pop(name) for name in names])

    return damage


def _reshaped(name: str, *shape: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        _change(path, lambda held: held.update({name: kinds.noise(1, *shape)}))

    return damage


def _content(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / checkpoints.WEIGHTS
        file.write_bytes(change(file.read_bytes()))

    return damage


def _dangling(path: Path) -> None:
    (path / checkpoints.WEIGHTS).unlink()
    (path / checkpoints.WEIGHTS).symlink_to(path / "gone")


def _folder(path: Path) -> None:
    (path / checkpoints.WEIGHTS).unlink()
    (path / checkpoints.WEIGHTS).mkdir()


def _missing_shard(path: Path) -> None:
    """An index that names a shard which is not there, with the last layer in it."""
    held = checkpoints.tensors(path)
    (path / checkpoints.WEIGHTS).unlink()
    last = {name for name in held if ".layers.2." in name}
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    kinds.save(path / first, {name: held[name] for name in held.keys() - last})
    index = {name: second if name in last else first for name in held}
    (path / checkpoints.INDEX).write_text(json.dumps({"weight_map": index}))


# For these plain vLLM has an error of its own.
DAMAGES: dict[str, Callable[[Path], None]] = {
    "a norm is missing": _without("model.norm.weight"),
    "a shard is missing": _missing_shard,
    "a matrix is transposed": _reshaped(f"{LAYER}mlp.down_proj.weight", 256, 128),
    "a fused part is too short": _reshaped(f"{LAYER}self_attn.k_proj.weight", 32, 128),
    "a norm is too long": _reshaped(f"{LAYER}input_layernorm.weight", 129),
    "the vocabulary is too large": _reshaped("model.embed_tokens.weight", 640, 128),
    "a tensor too many": _reshaped("model.nothing.weight", 4, 4),
    "half a file": _content(lambda content: content[: len(content) // 2]),
    "an empty file": _content(lambda _: b""),
    "no header": _content(lambda content: b"\xff" * 16 + content[16:]),
    "a header that is no JSON": _content(lambda content: content[:8] + b"?" + content[9:]),
    "a link to nothing": _dangling,
    "a folder instead of a file": _folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_fails_as_it_does_plainly(
    damage: str, resident: Resident, tmp_path: Path
) -> None:
    path = checkpoints.same(resident.pair.fine_tune, tmp_path / "damaged")
    DAMAGES[damage](path)
    expected = _failure(path, None)
    assert expected is not None, "plain vLLM loads it"

    for config in ({}, {"verify": "always"}, {"cpu_weights": "plain"}):
        found = _failure(path, config)
        assert found is not None
        assert found.kind is expected.kind
        assert not process_state.remaining().beyond(resident.state)
    resident.is_as_before()


@pytest.mark.parametrize(
    ("missing", "parameter"),
    [
        ((f"{LAYER}self_attn.k_proj.weight",), f"{LAYER}self_attn.qkv_proj.weight"),
        ((f"{LAYER}mlp.up_proj.weight",), f"{LAYER}mlp.gate_up_proj.weight"),
        ((f"{LAYER}self_attn.o_proj.weight",), f"{LAYER}self_attn.o_proj.weight"),
        (("lm_head.weight",), "lm_head.weight"),
        (("model.embed_tokens.weight",), "model.embed_tokens.weight"),
    ],
)
def test_what_plain_vllm_would_leave_uninitialised_is_an_error_by_name(
    missing: tuple[str, ...], parameter: str, resident: Resident, tmp_path: Path
) -> None:
    path = checkpoints.same(resident.pair.fine_tune, tmp_path / "incomplete")
    _without(*missing)(path)
    assert _failure(path, None) is None, "plain vLLM has an error of its own by now"

    for config in ({}, {"cpu_weights": "plain"}):
        found = _failure(path, config)
        assert found is not None
        assert found.kind is IncompleteCheckpointError
        assert f"nothing for {parameter} (" in found.text
        assert str(path) in found.text
        assert not process_state.remaining().beyond(resident.state)
    resident.is_as_before()


# --- what happens in the middle of a load


@contextmanager
def _at_read(number: int, action: Callable[[], object]) -> Iterator[list[int]]:
    """Do something just before the `number`th read of tensor data."""
    seen = [0]
    preadv = os.preadv

    def read(*args: Any) -> int:
        seen[0] += 1
        if seen[0] == number:
            action()
        return preadv(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", read)
        yield seen


def _bad_disk() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("number", [1, 15])
def test_a_disk_that_fails_is_an_error_by_file_and_tensor(
    number: int, resident: Resident, tmp_path: Path
) -> None:
    path = checkpoints.same(resident.pair.fine_tune, tmp_path / "bad-disk")
    with _at_read(number, _bad_disk) as seen:
        found = _failure(path, {})
    assert seen[0] >= number
    assert found is not None
    assert found.kind is UnreadableFileError
    assert str(path / checkpoints.WEIGHTS) in found.text
    assert "tensor 'model." in found.text
    assert "Input/output error" in found.text
    resident.is_as_before()


@pytest.mark.parametrize("number", [1, 15])
def test_a_file_written_to_during_a_load(number: int, resident: Resident, tmp_path: Path) -> None:
    path = checkpoints.same(resident.pair.fine_tune, tmp_path / "written")
    file = path / checkpoints.WEIGHTS
    with _at_read(number, lambda: file.write_bytes(file.read_bytes())) as seen:
        found = _failure(path, {})
    assert seen[0] >= number
    assert found is not None
    assert found.kind is ChangedFileError
    assert str(file) in found.text
    resident.is_as_before()


def test_a_file_cut_during_a_load_fails_as_the_cut_file_does(
    resident: Resident, tmp_path: Path
) -> None:
    path = checkpoints.same(resident.pair.fine_tune, tmp_path / "cut")
    with _at_read(10, lambda: os.truncate(path / checkpoints.WEIGHTS, 200_000)):
        found = _failure(path, {})
    assert found is not None
    assert found == _failure(path, None)
    resident.is_as_before()


def test_a_load_that_is_interrupted_leaves_nothing(resident: Resident, tmp_path: Path) -> None:
    path = checkpoints.same(resident.pair.fine_tune, tmp_path / "interrupted")
    with _at_read(5, lambda: signal.raise_signal(signal.SIGINT)):
        found = _failure(path, {})
    assert found is not None
    assert found.kind is KeyboardInterrupt
    resident.is_as_before()


def test_a_failed_load_leaves_nothing_in_a_memory_manager(
    pair: checkpoints.Pair, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    path = checkpoints.same(pair.fine_tune, tmp_path / "bad-disk")
    with managers.running(tmp_path) as manager:
        config = {"memory_manager": str(manager.socket)}
        with _at_read(15, _bad_disk):
            found = _failure(path, config)
        assert found is not None
        assert found.kind is UnreadableFileError
        managers.until(lambda: manager.overview().totals.leases == 0)
        assert manager.overview().builds == []
        first, second = loads.load(path, config), loads.load(path, config)
        forms = engines.forms(second.module, first.module)
        assert forms
        assert all(forms.values())
        with engines.assembled() as assembled:
            loads.load(path)
        assert second.parameters() == assembled
        del first, second
        gc.collect()


# --- full disks and memory


@contextmanager
def _full(limit: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes, be it in memory or on disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("policy", ["packed", "plain"])
@pytest.mark.parametrize("limit", [0, 100_000])
def test_where_no_shared_memory_is_left_a_model_loads_privately(
    limit: int, policy: str, pair: checkpoints.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_HINTS", str(tmp_path / "hints.sqlite"))
    config = {"cpu_weights": policy}
    before = process_state.remaining()
    with engines.assembled() as assembled:
        expected = loads.load(pair.base)
    with _full(limit):
        model = loads.load(pair.base, config)
    last = report().models[-1]
    assert any("File too large" in reason for _, reason in last.skipped)
    if policy == "packed":
        assert model.parameters() == expected.parameters()
        assert model.functions() == expected.functions()
    else:
        assert model.parameters() == assembled
    assert verify().ok

    del model
    assert not process_state.remaining().beyond(before)
    first, second = loads.load(pair.base, config), loads.load(pair.base, config)
    forms = engines.forms(second.module, first.module)
    assert forms
    assert all(forms.values())
    assert report().models[-1].skipped == []


def test_a_snapshot_of_shared_blobs_is_written_to_the_store(
    pair: checkpoints.Pair, tmp_path: Path
) -> None:
    files = content(pair.base)
    folder = snapshot(tmp_path / "hub", "org/name", files)
    weights = (folder / checkpoints.WEIGHTS).resolve()
    assert weights.parent.parent == tmp_path / "hub" / "blobs"
    model = loads.load(folder, {"store": str(tmp_path / "store"), "store_writes": True})
    last = report().models[-1]
    assert (last.stored_as, last.skipped) == ("org/name", [])
    assert_clean(Store.open(tmp_path / "store"), {"org/name": files})
    assert model.parameters() == loads.load(pair.base).parameters()


def test_a_store_on_a_full_disk_fails_no_load(pair: checkpoints.Pair, tmp_path: Path) -> None:
    store = tmp_path / "store"
    Store.open(store)
    config = {"store": str(store), "store_writes": True, "cpu_weights": "plain"}
    with engines.assembled() as assembled:
        loads.load(pair.base)
    # What is resident needs no memory, so that all that fails is the store.
    first = loads.load(pair.base, {"cpu_weights": "plain"})
    with _full(100_000):
        model = loads.load(pair.base, config)
    last = report().models[-1]
    assert last.stored_as is None
    assert [(name, "not written to the store" in reason) for name, reason in last.skipped] == [
        ("<store>", True)
    ]
    assert model.parameters() == first.parameters() == assembled
    again = loads.load(pair.base, config)
    assert report().models[-1].stored_as is not None
    assert all(engines.forms(again.module, first.module).values())
