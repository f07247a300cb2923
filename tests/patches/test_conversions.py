"""Conversions of models that share: what was shared before is shared after."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

from models.tiny_pipelines import equal, parameters, shared
from tensor_dedup import TensorDedupConfig, move, shares_memory, sweep, unshare, verify
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.load_lock import LOAD_LOCK
from tensor_dedup.loader.residents.mappings import MAPPINGS
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.unsharing.device_copies import COPIES
from tensor_dedup.loader.unsharing.private import make_private
from tensor_dedup.patches.huggingface.conversions import APPLY
from tensor_dedup.seams import usable

pytestmark = pytest.mark.usefixtures("nothing_stays")


def pair() -> tuple[Any, Any]:
    """Two models of equal weights which share them, twins among them."""
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        parts = nn.Linear(64, 64), nn.LayerNorm(64), nn.LayerNorm(64), nn.Conv2d(4, 4, 3)
        models.append(nn.Sequential(*parts).half())
        sweep(models[-1])
    assert shared(*models) == parameters(models[0]).keys()
    return models[0], models[1]


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.float(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.double(),
        lambda model: model.to("cpu", torch.float32),
        lambda model: model.to(memory_format=torch.channels_last),
    ],
)
def test_two_that_are_converted_meet_again(convert: Callable[[Any], Any]) -> None:
    first, second = pair()
    objects = list(first.parameters())
    for model in (first, second):
        convert(model)
    assert shared(first, second) == equal(first, second) == parameters(first).keys()
    assert list(first.parameters()) == objects
    assert verify().ok


def test_one_that_is_cast_leaves_the_other_and_comes_back() -> None:
    first, second = pair()
    before = {name: value.clone() for name, value in second.state_dict().items()}
    first.float()
    assert not shared(first, second)
    assert {p.dtype for p in second.parameters()} == {torch.float16}
    first.half()
    assert shared(first, second) == parameters(first).keys()
    assert all(torch.equal(before[name], value) for name, value in first.state_dict().items())


def test_a_move_to_where_it_is_changes_nothing() -> None:
    first, second = pair()
    places = [p.data_ptr() for p in first.parameters()]
    first.to("cpu", torch.float16).cpu()
    assert [p.data_ptr() for p in first.parameters()] == places
    assert shared(first, second) == parameters(first).keys()


def test_what_was_private_stays_private() -> None:
    first, second = pair()
    for model in (first, second):
        model.add_module("adapter", nn.Linear(8, 8, dtype=torch.float16))
        nn.init.ones_(model.adapter.weight)
        model.float()
    assert shared(first, second) == {n for n in parameters(first) if not n.startswith("adapter")}


def test_memory_that_processes_are_to_have_in_common_is_left_to_them() -> None:
    first, _ = pair()
    first.share_memory()
    assert all(p.is_shared() for p in first.parameters())


def test_the_seam_is_what_was_recorded_and_goes_with_what_is_shared() -> None:
    first, second = pair()
    assert usable(APPLY)
    assert hasattr(nn.Module._apply, "_tensor_dedup")
    del first, second
    gc.collect()
    nn.Linear(2, 2).half()
    assert hasattr(nn.Module._apply, "_tensor_dedup") == (len(MAPPINGS) > 0)


def test_a_cast_that_was_made_already_is_neither_made_nor_hashed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = pair()
    first.float()
    monkeypatch.setattr("tensor_dedup.loader.post_load.batch.submit", forbidden)
    second.float()
    assert shared(first, second) == equal(first, second) == parameters(first).keys()
    assert verify().ok


def forbidden(*_: object) -> Any:
    pytest.fail("nothing was to be hashed")


def test_what_was_written_is_not_taken_for_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair()
    first.float()
    with torch.no_grad():
        second[0].weight[0, 0] = 7.0
    second.float()
    assert second[0].weight[0, 0] == 7.0
    assert shared(first, second) == parameters(first).keys() - {"0.weight"}
    assert first[0].weight[0, 0] != 7.0


def test_parts_converted_one_by_one_keep_twins_apart() -> None:
    first, second = pair()
    for model in (first, second):
        for part in model:
            part.float()
    assert shared(first, second) == parameters(first).keys()
    for model in (first, second):
        mine = list(model.parameters())
        assert not any(shares_memory(x, y) for x in mine for y in mine if x is not y)


def test_casts_that_come_to_one_value_stay_apart_in_one_model() -> None:
    """Two tensors that differ, and are equal after a cast; in another model only one is cast."""
    models = []
    for _ in range(2):
        wide = torch.full((64, 64), 1.0)
        parts = [nn.Linear(64, 64, bias=False) for _ in range(2)]
        parts[0].weight.data = wide.clone()
        parts[1].weight.data = wide + 1e-6
        models.append(nn.Sequential(*parts))
        sweep(models[-1])
    assert len({id(part.weight) for model in models for part in model}) == 4
    first, second = models
    first.half()
    second[1].half()
    second.half()
    assert shared(first, second) == {"0.weight", "1.weight"}
    for model in models:
        one, other = model.parameters()
        assert not shares_memory(one, other)


def test_two_threads_that_convert_meet() -> None:
    first, second = pair()
    threads = [threading.Thread(target=model.float) for model in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared(first, second) == parameters(first).keys()


def test_a_conversion_that_fails_leaves_the_rest_as_it_was() -> None:
    first, second = pair()
    before = {name: value.clone() for name, value in second.state_dict().items()}

    class Broken(nn.Module):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            raise MemoryError("no room")

    first.append(Broken())
    with pytest.raises(MemoryError):
        first.float()
    assert all(torch.equal(before[name], value) for name, value in second.state_dict().items())
    second.float()
    second.half()
    assert all(torch.equal(before[name], value) for name, value in second.state_dict().items())
    assert verify().ok


def storages(model: nn.Module) -> list[int]:
    return [each.untyped_storage()._cdata for each in model.parameters()]


def test_on_another_device_the_second_gets_what_the_first_made() -> None:
    first, second = pair()
    third, _ = pair()
    assert len(COPIES) == 0
    for model in (first, second):
        move(model, "meta")
    assert {p.device.type for model in (first, second) for p in model.parameters()} == {"meta"}
    assert storages(first) == storages(second)
    assert len(set(storages(first))) == len(storages(first))  # twins are apart there too
    assert len(COPIES) == len(storages(first))
    assert verify().ok
    assert len(verify().not_verifiable) == len(COPIES)
    assert {p.device.type for p in third.parameters()} == {"cpu"}
    assert all(torch.isfinite(p).all() for p in third.parameters())
    del first, second, model
    gc.collect()
    assert len(COPIES) == 0


def test_a_cast_on_another_device_is_followed_and_so_is_the_way_back() -> None:
    first, second = pair()
    first.to("meta")
    before = storages(first)
    first.float()
    second.to("meta", torch.float32)
    assert storages(first) == storages(second) != before
    kept, _ = pair()
    kept.to("meta")
    second.half()
    assert storages(second) == storages(kept)


@pytest.mark.parametrize("cast_first", [False, True])
def test_a_model_on_two_devices_stays_there_when_it_is_cast(cast_first: bool) -> None:
    """Another model has been cast, and is on one of the devices as a whole."""
    first, second = pair()
    if cast_first:
        second.float()
    second.to("meta")
    second.float()
    first[0].to("meta")
    before = [each.device.type for each in first.parameters()]
    assert set(before) == {"meta", "cpu"}
    first.float()
    assert [each.device.type for each in first.parameters()] == before
    assert {each.dtype for each in first.parameters()} == {torch.float32}


def one_digest(_: object, algorithm: str) -> "Future[str]":
    """As somebody arranges it who can."""
    found: Future[str] = Future()
    found.set_result(f"{algorithm}:" + "0" * 16)
    return found


WEAK = TensorDedupConfig(hash_algorithm="xxhash64")


@pytest.mark.parametrize("last", [WEAK, TensorDedupConfig()])
def test_what_only_has_the_same_forgeable_digest_is_not_what_another_becomes(
    monkeypatch: pytest.MonkeyPatch, last: TensorDedupConfig
) -> None:
    models: list[Any] = [nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(2)]
    nn.init.ones_(models[0][0].weight)
    nn.init.constant_(models[1][0].weight, 2.0)
    twin: Any = nn.Sequential(nn.Linear(64, 64, bias=False))
    nn.init.ones_(twin[0].weight)
    with monkeypatch.context() as patched:
        patched.setattr("tensor_dedup.loader.post_load.batch.submit", one_digest)
        sweep(models[0], WEAK)
        sweep(twin, WEAK)
        assert shared(models[0], twin) == {"0.weight"}
        models[0].half()  # its first resident goes, what it became stays
        twin.half()
        gc.collect()
        sweep(models[1], WEAK)
        sweep(nn.Linear(2, 2), last)
        models[1].half()
        assert (models[1][0].weight == 2.0).all()
        assert (models[0][0].weight == 1.0).all()
    for model in models:
        model.to("meta")
    assert storages(models[0]) != storages(models[1])


def test_what_was_written_on_another_device_is_not_what_came_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = pair()
    kept, _ = pair()
    for model in (first, second, kept):
        model.to("meta")
    with torch.no_grad():
        second[0].weight.add_(1)  # nobody guards this one
    second.to("meta")
    for model in (first, second, kept):
        model.float()
    assert {x == y for x, y in zip(storages(first), storages(kept), strict=True)} == {True}
    differs = [x != y for x, y in zip(storages(first), storages(second), strict=True)]
    assert differs == [True] + [False] * (len(differs) - 1)
    assert "call unshare(model) before writing" in caplog.text
    caplog.clear()
    # That one is its own now, and it may write.
    with torch.no_grad():
        second[0].weight.add_(1)
    second.double()
    assert not caplog.messages


def test_a_conversion_does_not_wait_for_a_load_of_another_thread() -> None:
    first, second = pair()
    first.float()
    converted = threading.Event()

    def convert() -> None:
        second.float()
        converted.set()

    thread = threading.Thread(target=convert, daemon=True)
    with LOAD_LOCK:  # as while a load downloads
        thread.start()
        assert converted.wait(60)
    thread.join()
    assert shared(first, second) == equal(first, second) == parameters(first).keys()


def test_memory_of_another_device_can_be_made_private() -> None:
    first, second = pair()
    for model in (first, second):
        model.to("meta")
    assert unshare(second) == sum(p.nbytes for p in second.parameters())
    assert set(storages(first)).isdisjoint(storages(second))
    assert make_private(first.parameters()) == sum(p.nbytes for p in first.parameters())
    assert make_private(first.parameters()) == 0


def test_what_is_one_memory_on_another_device_is_one_after_it_is_made_private() -> None:
    first, second = pair()
    for model in (first, second):
        model.to("meta")
    second.append(nn.Linear(64, 64, bias=False))
    second[4].weight = nn.Parameter(second[0].weight.detach())
    second.register_buffer("view", second[0].weight.detach()[:8])
    size = second[0].weight.nbytes
    tied = second[0].weight, second[4].weight, second.view
    assert make_private(tied) == size
    assert len({each.untyped_storage()._cdata for each in tied}) == 1
    assert first[0].weight.untyped_storage()._cdata != tied[0].untyped_storage()._cdata


def test_what_is_offloaded_after_each_use_keeps_its_place_in_host_memory() -> None:
    others = set(registry.residents())
    first, second = pair()
    first._hf_hook = object()  # as accelerate marks it
    number = len(registry.residents())
    for model in (first, second):
        model.to("meta")
    assert len(registry.residents()) == number
    del first, model
    gc.collect()
    assert set(registry.residents()) <= others


def test_a_move_takes_pipelines_and_modules_only() -> None:
    with pytest.raises(UnsupportedError, match="move takes a pipeline or a module, not dict"):
        move({}, "meta")


def test_what_has_no_values_any_more_cannot_come_back() -> None:
    first, second = pair()
    first.to("meta")
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        first.to("cpu")
    assert all(torch.isfinite(p).all() for p in second.parameters())


def test_a_module_that_was_never_shared_is_when_it_moves() -> None:
    first, second = (nn.Linear(64, 64) for _ in range(2))
    second.load_state_dict(first.state_dict())
    move(first, "meta")
    move(second, "meta")
    assert storages(first) == storages(second)


@pytest.mark.gpu
def test_what_comes_from_a_gpu_is_there_before_it_is_hashed() -> None:
    first, second = pair()
    first.to("cuda")
    sleep: Any = torch.cuda._sleep
    sleep(1 << 30)
    first.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    assert shared(first, second) == equal(first, second) == parameters(first).keys()
    assert verify().ok


@pytest.mark.gpu
def test_on_a_gpu_two_models_are_one_memory_and_what_they_compute_is_right() -> None:
    first, second = pair()
    kept, _ = pair()
    values = torch.randn(4, 64, dtype=torch.float16)
    expected = nn.Linear(64, 64).half().cuda()
    expected.load_state_dict(kept[0].state_dict())
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    before = torch.cuda.memory_allocated()
    move(first, "cuda")
    with torch.cuda.stream(stream):
        second.to("cuda", non_blocking=True)
        assert torch.cuda.memory_allocated() <= before, "weights are in memory of torch's"
        result = second[0](values.cuda())
    stream.synchronize()
    assert all(map(shares_memory, first.parameters(), second.parameters()))
    assert torch.equal(result, expected(values.cuda()))
    assert verify().ok
    second.load_state_dict({n: v + 1 for n, v in second.state_dict().items()})
    assert torch.equal(first[0].weight.cpu(), kept[0].weight)
    assert torch.equal(second[0].weight.cpu(), kept[0].weight + 1)
    first.to("cpu")
    assert shared(first, kept) == parameters(kept).keys()
