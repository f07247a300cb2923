"""Deferred parameters in place of real ones: the module keeps its objects, and nothing is left."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensor_dedup.loader.deferred.parameters import defer, replace_data, settle_strays
from tensor_dedup.loader.deferred.storage import byte_view
from tensor_dedup.loader.deferred.trace import Tracer, UntraceableError
from vllm_runs import deferring
from vllm_runs.deferring import Weights, module

VALUES = torch.arange(24, dtype=torch.float32).view(4, 6)


class Tagged(nn.Parameter):
    """A parameter class of an engine's own, with attributes that its loading code uses."""

    loader: str


def tracer() -> Tracer:
    return Tracer(lambda view: pytest.fail("nothing is to be evaluated"), torch.device("cpu"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return deferring.save(tmp_path / "m.safetensors", {"w": VALUES, "v": VALUES + 1})


def test_parameter_objects_stay_what_they_are() -> None:
    parameter = Tagged(torch.zeros(4, 6), requires_grad=False)
    parameter.loader = "mine"
    model = nn.Module()
    model.register_parameter("p", parameter)
    deferred = defer(model, tracer())
    assert model.get_parameter("p") is parameter
    assert isinstance(parameter, Tagged)
    assert parameter.loader == "mine"
    assert parameter.device.type == "meta"
    assert parameter.shape == (4, 6)
    assert deferred[id(parameter)].name == "p"
    assert deferred[id(parameter)].nbytes == 96
    replace_data(parameter, VALUES.clone())
    assert model.get_parameter("p") is parameter
    assert parameter.device.type == "cpu"
    assert isinstance(parameter, Tagged)
    assert parameter.loader == "mine"
    assert torch.equal(parameter, VALUES)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6).t(),
        torch.zeros(8, 6)[2:5],
        torch.zeros(8, 6)[:, ::2],
        torch.zeros(3, 2, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.zeros(()),
        torch.zeros(7, dtype=torch.uint8)[1:],
        torch.zeros(1, 3).expand(2, 3),
    ],
)
def test_geometry_stays(tensor: torch.Tensor) -> None:
    model = module(p=tensor)
    before = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
    defer(model, tracer())
    p = model.get_parameter("p")
    assert (p.dtype, p.shape, p.stride(), p.storage_offset()) == before


def test_parameters_on_one_storage_go_on_sharing_one() -> None:
    both = torch.zeros(8, 6)
    model = module(upper=both[:5], lower=both[3:], other=torch.zeros(2))
    defer(model, tracer())
    storages = [p.untyped_storage()._cdata for p in model.parameters()]
    assert storages[0] == storages[1] != storages[2]


def test_a_parameter_that_a_buffer_shows_stays_real(path: Path) -> None:
    def make() -> nn.Module:
        model = module(p=torch.zeros(4, 6), q=torch.zeros(4, 6))
        model.register_buffer("b", model.get_parameter("p").data[0])
        return model

    def load(m: Any, w: Weights) -> None:
        m.p.data.copy_(w["w"])
        m.q.data.copy_(w["v"])

    wanted = deferring.real(make(), path, load)
    with deferring.deferred(make(), path, load) as run:
        assert list(run.parameters) == ["q"]
        named = {**dict(run.model.named_parameters()), **dict(run.model.named_buffers())}
        assert deferring.raw(named["p"]) == wanted["p"]
        assert deferring.raw(named["b"]) == wanted["b"]
        assert run.bytes("q") == wanted["q"]


@pytest.mark.parametrize("inside", [False, True])
def test_a_parameter_that_an_attribute_shows_stays_real(path: Path, inside: bool) -> None:
    model = module(p=torch.zeros(4, 6))
    shown = model.get_parameter("p").data.t()
    setattr(model, "shown", [shown] if inside else shown)  # noqa: B010
    with deferring.deferred(model, path, lambda m, w: m.p.data.copy_(w["w"])):
        assert torch.equal(shown, VALUES.t())


def test_a_parameter_given_real_memory_is_installed(path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        m.q = nn.Parameter(torch.ones(2), requires_grad=False)

    with deferring.deferred(module(p=torch.zeros(4, 6), q=torch.zeros(2)), path, load) as run:
        assert list(run.parameters) == ["p"]
        assert run.model.get_parameter("q").tolist() == [1.0, 1.0]


def test_a_parameter_that_the_loading_code_makes_is_deferred_too(path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        m.register_parameter("new", nn.Parameter(w["w"] * 2, requires_grad=False))
        del m.q

    with deferring.deferred(module(p=torch.zeros(4, 6), q=torch.zeros(2)), path, load) as run:
        assert sorted(run.parameters) == ["new", "p"]
        assert run.bytes("new") == deferring.raw(VALUES * 2)


def test_strays_get_memory(path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        m.register_buffer("b", w["w"].t())
        m.scale = w["v"][0] * 2

    with deferring.deferred(module(p=torch.zeros(4, 6)), path, load) as run:
        settle_strays(run.model, run.tracer, run.evaluator.value)
        assert torch.equal(run.model.get_buffer("b"), VALUES.t())
        assert torch.equal(run.model.scale, (VALUES + 1)[0] * 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [lambda t: [t], lambda t: (t,), lambda t: {"a": t}])
def test_strays_in_containers_are_refused(path: Path, wrap: Any) -> None:
    def load(m: Any, w: Weights) -> None:
        m.kept = wrap(w["w"])

    with (
        deferring.deferred(module(p=torch.zeros(4, 6)), path, load) as run,
        pytest.raises(UntraceableError, match="container"),
    ):
        settle_strays(run.model, run.tracer, run.evaluator.value)


def test_a_parameter_that_somebody_watches_is_refused() -> None:
    model = module(p=torch.zeros(4, 6))
    watch = weakref.ref(model.get_parameter("p"))
    with pytest.raises(UntraceableError, match="other memory"):
        defer(model, tracer())
    assert watch() is model.get_parameter("p")


def test_nothing_of_a_load_stays_alive(path: Path) -> None:
    model = module(p=torch.zeros(4, 6))
    with deferring.deferred(model, path, lambda m, w: m.p.data.copy_(w["w"])) as run:
        replace_data(model.get_parameter("p"), run.make("p"))
        watch = weakref.ref(run.tracer)
    del run
    gc.collect()
    assert watch() is None
    assert torch.equal(model.get_parameter("p"), VALUES)


def test_a_tensor_copied_over_a_part_of_itself_is_refused(tmp_path: Path) -> None:
    """What that gives follows from the order of the elements, which torch does not promise."""
    path = deferring.save(tmp_path / "a.safetensors", {"w": torch.arange(24.0)})

    def load(model: Any, weights: Any) -> None:
        model.w.data.copy_(weights["w"])
        model.w.data[12:].view(2, 6).copy_(torch.as_strided(model.w.data, (2, 6), (12, 1)))

    with (
        pytest.raises(UntraceableError, match="over a part of itself"),
        deferring.deferred(module(w=torch.zeros(24)), path, load),
    ):
        pass


def test_a_tensor_copied_to_another_part_of_itself_is_not(tmp_path: Path) -> None:
    path = deferring.save(tmp_path / "a.safetensors", {"w": torch.arange(24.0)})

    def load(model: Any, weights: Any) -> None:
        model.w.data.copy_(weights["w"])
        model.w.data[12:].copy_(model.w.data[:12])

    with deferring.deferred(module(w=torch.zeros(24)), path, load) as run:
        assert run.bytes("w") == deferring.real(module(w=torch.zeros(24)), path, load)["w"]


@pytest.mark.parametrize("tensor", [VALUES[1:2, 3], VALUES[1:2, 3:4], VALUES[1, 3], VALUES[1:1]])
def test_the_bytes_of_a_tensor_are_a_view_whatever_its_stride(tensor: torch.Tensor) -> None:
    assert tensor.is_contiguous()
    seen = byte_view(tensor)
    assert bytes(seen.numpy()) == tensor.numpy().tobytes()
    assert seen.data_ptr() == tensor.data_ptr()
