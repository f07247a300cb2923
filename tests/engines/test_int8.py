"""Int8 layers, whose packed weight knows its scales by address; and scales of keys and values.

What each format shares is in test_quantised. The oracle is a plain engine that was treated alike.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from vllm import _custom_ops as ops

from models import quantised
from models import tiny_checkpoints as checkpoints
from tensor_dedup import unshare
from tensor_dedup.patches.vllm import kernels as vllm_quantised
from tensor_dedup.patches.vllm.kernels import scales_kept
from vllm_runs import (
    engines,
    loads,
    plain,
    reference_kernels,
    shared,
    transfers,  # engines that transfer weights without a GPU
)

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.vllm


class World:
    """A checkpoint in some formats, and what a plain engine answers of each."""

    def __init__(self, root: Path) -> None:
        self.plain = checkpoints.make("llama", root / "plain").base
        self.path = {k: quantised.make(k, self.plain, root / k) for k in ("w8a8", "w8a8 offset")}
        self.path["kv"] = quantised.with_kv_scales(
            quantised.make("fp8", self.plain, root / "fp8"), root / "kv"
        )
        self.expected = cache(self._expected)

    def _expected(self, kind: str) -> tuple[plain.Answer, ...]:
        llm = plain.engine(self.path[kind])
        answers = plain.outputs(llm)
        engines.drop(llm)
        return answers


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("int8"))
    with reference_kernels.installed():
        engines.warm_up(made.plain)
        yield made


@pytest.fixture
def opened() -> Iterator[Callable[..., "LLM"]]:
    """Opens engines, and ends them all."""
    every: list[LLM] = []

    def engine(path: Path, **options: Any) -> "LLM":
        every.append(plain.engine(path, **options))
        return every[-1]

    gc.collect()
    yield engine
    engines.drop(*every)
    every.clear()
    gc.collect()


def litter() -> None:
    """Use all memory of the sizes of scales that was given back, and leave nonsense there."""
    held = [torch.full((64 << n,), float("nan")) for n in range(6) for _ in range(300)]
    del held


def forms(one: "LLM", other: "LLM") -> dict[str, bool]:
    """The quantised layers: is it the same memory in both?"""
    found = engines.forms(plain.model(one), plain.model(other))
    return {form: same for form, same in found.items() if "_proj." in form}


def handlers(llm: "LLM") -> list[Any]:
    layers = plain.model(llm).modules()
    kernels: list[Any] = [getattr(getattr(m, "scheme", None), "kernel", None) for m in layers]
    return [k.dnnl_handler for k in kernels if hasattr(k, "dnnl_handler")]


@pytest.mark.parametrize("known", [True, False], ids=["known", "renamed"])
def test_a_handler_keeps_its_scales_whatever_the_kernel_is_called(
    known: bool, world: World, opened: Callable[..., "LLM"], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = world.path["w8a8 offset"], world.expected("w8a8 offset")
    if not known:
        for name in ("_KINDS", "_INT8", "_INT8_KERNELS"):
            monkeypatch.setattr(vllm_quantised, name, ())
    first, second = opened(path, tensor_dedup={}), opened(path, tensor_dedup={})
    litter()
    found = forms(second, first)
    packed = [same for form, same in found.items() if form.endswith(engines.PACKED)]
    scales = [same for form, same in found.items() if form.endswith("weight_scale")]
    assert len(packed) == len(scales) == len(handlers(first)) > 0
    assert packed == [known] * len(packed)
    assert all(scales)
    assert plain.outputs(second) == plain.outputs(first) == expected
    for handler in handlers(first):
        held = {n: v for n, v in vars(handler).items() if isinstance(v, torch.Tensor)}
        [kept] = held.keys() - {"handler_tensor"}
        assert held[kept].numel() in (1, handler.n)


def test_scales_that_are_written_later_reach_the_kernel(
    world: World, opened: Callable[..., "LLM"], tmp_path: Path
) -> None:
    """Its handler reads them by address, so a layer that may be written shares nothing."""
    path, name = world.path["w8a8"], "model.layers.0.mlp.gate_up_proj.weight_scale"
    transfer = {"weight_transfer_config": {"backend": "patches"}}
    oracle, other = opened(path, **transfer), opened(path, tensor_dedup={})
    mine = opened(path, tensor_dedup={}, **transfer)
    skipped = engines.last_report().skipped
    scales = plain.model(oracle).get_parameter(name).detach() * 1.5
    safetensors.torch.save_file({name: scales}, tmp_path / checkpoints.WEIGHTS)
    assert forms(mine, other)
    assert not any(forms(mine, other).values())
    assert shared.shared_parameters(mine, other)
    assert name in {n for n, why in skipped if "weight_transfer_config" in why}
    for llm in (oracle, mine):
        _send(llm, tmp_path, name)
    assert plain.outputs(mine) == plain.outputs(oracle) != world.expected("w8a8")
    assert plain.outputs(other) == world.expected("w8a8")


@pytest.mark.parametrize("how", ["reload", "transfer"])
def test_weights_that_are_loaded_again_are_computed_with_their_own_scales(
    how: str, world: World, opened: Callable[..., "LLM"], tmp_path: Path
) -> None:
    """Plain vLLM drops them, so a fresh load is the oracle here, not an engine treated alike."""
    source = checkpoints.same_header(world.plain, tmp_path / "plain")
    path = quantised.make("w8a8", source, tmp_path / "other")
    options = {"weight_transfer_config": {"backend": "files"}} if how == "transfer" else {}
    oracle, other = opened(path), opened(world.path["w8a8"], tensor_dedup={})
    mine = opened(world.path["w8a8"], tensor_dedup={}, **options)
    assert shared.shared_parameters(mine, other)
    assert all(forms(mine, other).values()) == (how == "reload")
    before = shared.contents(other)

    if how == "reload":
        shared.reload(mine, path)
    else:
        _send(mine, path, *sorted(checkpoints.tensors(path)))
    litter()

    assert plain.outputs(mine) == plain.outputs(oracle) != world.expected("w8a8")
    assert plain.outputs(other) == world.expected("w8a8")
    assert shared.contents(other) == before
    assert not shared.shared_parameters(mine, other)


def _send(llm: "LLM", path: Path, *names: str) -> None:
    llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    llm.collective_rpc("start_weight_update")
    update = {"path": str(path), "names": list(names)}
    llm.collective_rpc("update_weights", kwargs={"update_info": update})
    llm.collective_rpc("finish_weight_update")


def test_taking_sharing_back_leaves_both_models_as_they_are(
    world: World, opened: Callable[..., "LLM"]
) -> None:
    path, expected = world.path["w8a8"], world.expected("w8a8")
    mine, other = opened(path, tensor_dedup={}), opened(path, tensor_dedup={})
    before = forms(mine, other)
    assert before
    assert all(before.values())
    assert unshare(mine) > 0
    litter()
    # A packed weight is written by nobody and stays one; everything else is each model's own.
    assert forms(mine, other) == {form: form.endswith(engines.PACKED) for form in before}
    assert plain.outputs(mine) == plain.outputs(other) == expected


def test_scales_of_keys_and_values_are_those_of_plain_vllm(
    world: World, opened: Callable[..., "LLM"]
) -> None:
    path, expected = world.path["kv"], world.expected("kv")
    oracle = opened(path)
    first, second = opened(path, tensor_dedup={}), opened(path, tensor_dedup={})
    assert engines.last_report().skipped == []
    assert shared.everything(first, second)
    assert kv_scales(first) == kv_scales(second) == kv_scales(oracle) != {}
    assert plain.outputs(first) == plain.outputs(second) == expected


def kv_scales(llm: "LLM") -> dict[str, tuple[float, float]]:
    layers = plain.model(llm).named_modules()
    return {n: (m._k_scale_float, m._v_scale_float) for n, m in layers if hasattr(m, "_k_scale")}


def test_an_update_may_wait_for_a_thread_that_loads(
    world: World, opened: Callable[..., "LLM"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does when engines of one process meet in a collective operation, one of them late."""
    path = world.path["w8a8"]
    mine = opened(path, tensor_dedup={}, weight_transfer_config={"backend": "files"})
    receive, late = transfers.Files.receive_weights, threading.Event()

    def load() -> None:
        loads.load(world.plain, tensor_dedup={})
        late.set()

    def meet(self: transfers.Files, info: transfers.Update) -> None:
        thread.start()
        assert late.wait(60), "each waits for the other"
        receive(self, info)

    thread = threading.Thread(target=load, daemon=True)
    monkeypatch.setattr(transfers.Files, "receive_weights", meet)
    with loads.prepared(world.plain):
        try:
            _send(mine, path, *sorted(checkpoints.tensors(path)))
        finally:
            thread.join()
    litter()
    assert plain.outputs(mine) == world.expected("w8a8")
    for handler in handlers(mine):
        held = [v for v in vars(handler).values() if isinstance(v, torch.Tensor)]
        assert len(held) == 2  # itself, and its scales


def test_what_another_thread_makes_meanwhile_is_as_it_would_be(world: World) -> None:
    made: list[Any] = []

    def make() -> None:
        weight = torch.ones(16, 32, dtype=torch.int8).t()
        scales = torch.ones(16)
        made.append(ops.create_onednn_scaled_mm(weight, scales, torch.bfloat16, True, False))

    create = ops.create_onednn_scaled_mm
    with scales_kept() as kept:
        other = threading.Thread(target=make)
        other.start()
        other.join()
        assert kept == []
        with scales_kept() as inner:
            make()
        assert len(kept) == 1
        assert kept == inner
        assert ops.create_onednn_scaled_mm is not create
    assert ops.create_onednn_scaled_mm is create
    theirs, ours = ([v for v in vars(h).values() if isinstance(v, torch.Tensor)] for h in made)
    assert len(ours) == len(theirs) + 1
