"""What a running model takes over from a new one, and what it keeps."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from gpu_runs.fake_driver import FakeDriver
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.exchange import AddressExchange
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.shared import SharedGpu
from tensor_dedup.loader.cuda.tensors import CPU
from tensor_dedup.loader.takeover import Built, Takeover, note_loaded


class Method:
    """A helper object of a layer, as a quantisation method is."""

    apply: Any
    bias: Any
    handler: "Method"

    def __init__(self) -> None:
        self.kernel = "none"
        self.width = 4

    def multiply(self) -> str:
        return self.kernel


class Layer(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3), requires_grad=False)
        self.register_buffer("scale", torch.zeros(1))
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.method = Method()
        self.rotary = shared
        self.cache = None
        self.table_of_forms: list[str] = []
        self.derived = torch.zeros(1)

    def linear(self) -> torch.Tensor:
        return self.weight.sum()


SHARED = nn.Identity()


def built() -> tuple[Any, Built]:
    """Two layers; the second one's weight is the first's."""
    model = nn.ModuleList([Layer(SHARED), Layer(SHARED)])
    model[1].weight = model[0].weight
    return model, Built(model)


def loaded(value: float, *, packed: bool = True) -> Any:
    model, before = built()
    for number, layer in enumerate(model):
        layer.weight.data = torch.full((2, 3), value)
        layer.scale.fill_(value + number)
        layer.table.fill_(value)
        layer.method.kernel = f"kernel {value} {number}"
        layer.table_of_forms.append(f"form {value}")
        layer.derived.fill_(value)
        if packed:
            layer.packed = ("form", value, layer.weight, layer.linear)
            layer.kernel = Method()
            layer.kernel.bias = layer.weight  # as a kernel of experts has their biases
            layer.method.apply = layer.method.multiply
            layer.method.handler = Method()
            layer.method.handler.kernel = f"handler {value}"
    note_loaded(model, before)
    return model


def test_a_running_model_gets_weights_buffers_and_what_processing_set() -> None:
    running, fresh = loaded(1.0), loaded(2.0)
    layers, methods = list(running), [layer.method for layer in running]
    parameters = [layer.weight for layer in running]
    Takeover.plan(running, fresh).apply()
    assert list(running) == layers
    assert [layer.method for layer in running] == methods
    assert all(layer.weight is one for layer, one in zip(running, parameters, strict=True))
    for number, layer in enumerate(running):
        assert torch.equal(layer.weight, torch.full((2, 3), 2.0))
        assert layer.scale.item() == 2.0 + number
        assert layer.method.kernel == f"kernel 2.0 {number}"
        assert layer.table_of_forms == ["form 2.0"]  # written in place, both
        assert layer.derived.item() == 2.0
        # It refers to the running model, not to the one that is gone.
        form, value, weight, linear = layer.packed
        assert (form, value) == ("form", 2.0)
        assert weight is layer.weight
        assert linear.__self__ is layer
        assert layer.method.apply() == f"kernel 2.0 {number}"
        assert layer.method.apply.__self__ is layer.method
        assert layer.method.handler.kernel == "handler 2.0"


def test_what_the_engine_has_set_stays() -> None:
    running, fresh = loaded(1.0), loaded(2.0)
    running[0].cache = kept = torch.ones(4)
    running[0].method.width = 8
    Takeover.plan(running, fresh).apply()
    assert running[0].cache is kept
    assert running[0].table.item() == 2.0  # not persistent, but it may follow from weights
    assert running[0].method.width == 8


def test_what_only_the_former_load_has_set_goes() -> None:
    running = loaded(1.0)
    assert running[0].packed
    Takeover.plan(running, loaded(2.0, packed=False)).apply()
    assert not hasattr(running[0], "packed")
    Takeover.plan(running, loaded(3.0)).apply()  # and comes back
    assert running[1].packed[1] == 3.0


def test_what_refers_to_the_new_models_parameter_has_the_new_weights() -> None:
    running = loaded(1.0)
    for value in (2.0, 3.0):
        Takeover.plan(running, loaded(value)).apply()
        assert torch.equal(running[0].kernel.bias, running[0].weight)
        assert running[0].weight.unique().tolist() == [value]


def test_the_memory_of_a_former_step_is_not_kept() -> None:
    running, first, second = loaded(1.0), loaded(2.0), loaded(3.0)
    Takeover.plan(running, first).apply()
    assert first[0].weight.data_ptr() == running[0].weight.data_ptr()
    Takeover.plan(running, second).apply()
    assert sum(parameter.nbytes for parameter in first.parameters()) == 0
    assert running[0].weight.unique().tolist() == [3.0]
    assert second[0].weight.data_ptr() == running[0].weight.data_ptr()


def test_a_tensor_that_was_replaced_meanwhile_is_not_overlooked() -> None:
    running, fresh = loaded(1.0), loaded(2.0)
    plan = Takeover.plan(running, fresh)
    running[1].scale = torch.ones(1)
    with pytest.raises(UnsupportedError, match="scale was replaced"):
        plan.apply()
    assert running[0].weight.unique().tolist() == [1.0]


def test_nothing_changes_before_apply() -> None:
    running, fresh = loaded(1.0), loaded(2.0)
    Takeover.plan(running, fresh)
    assert running[0].weight.unique().tolist() == [1.0]
    assert running[0].method.kernel == "kernel 1.0 0"


def _untied(model: Any) -> None:
    model[1].weight = nn.Parameter(torch.zeros(2, 3), requires_grad=False)


def _of_another_shape(model: Any) -> None:
    model[0].weight.data = torch.zeros(3, 2)


def _of_another_dtype(model: Any) -> None:
    model[1].scale = torch.zeros(1, dtype=torch.float64)


def _with_another_module(model: Any) -> None:
    model[0].rotary = nn.Flatten()


def _with_a_module_more(model: Any) -> None:
    model[0].bias = nn.Identity()


def _with_a_parameter_more(model: Any) -> None:
    model[0].bias = nn.Parameter(torch.zeros(2), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (_untied, r"1\.weight is tied"),
        (_of_another_shape, r"0\.weight is torch.float32 \(2, 3\) on cpu and torch.float32 \(3, 2"),
        (_of_another_dtype, r"1\.scale is torch.float32 \(1,\) on cpu and torch.float64"),
        (_with_another_module, r"0\.rotary is a Identity and a Flatten"),
        (_with_a_module_more, r"0\.bias is a module of one of them only"),
        (_with_a_parameter_more, r"0\.bias is a tensor of one of them only"),
    ],
)
@pytest.mark.parametrize("which", ["running", "fresh"])
def test_models_that_differ_in_more_than_weights_are_refused(
    change: object, where: str, which: str
) -> None:
    running, fresh = loaded(1.0), loaded(2.0)
    assert callable(change)
    change(running if which == "running" else fresh)
    before = {name: tensor.clone() for name, tensor in running.state_dict().items()}
    expected = where.partition(" is ")[0] if which == "running" else where
    with pytest.raises(UnsupportedError, match=expected):
        Takeover.plan(running, fresh)
    assert all(torch.equal(before[name], now) for name, now in running.state_dict().items())


def test_a_model_of_another_loader_is_refused() -> None:
    running, _ = built()
    with pytest.raises(UnsupportedError, match="another loader"):
        Takeover.plan(running, loaded(2.0))


# Where graphs have captured the addresses of tensors.


def alike(value: float, **odd: Any) -> Any:
    """A loaded model in which only contents of tensors depend on `value`; `odd` is set on top."""
    model, before = built()
    for layer in model:
        layer.weight.data = torch.full((2, 3), value)
        layer.scale.fill_(value)
        layer.table.fill_(value)
        layer.derived = torch.full((3,), value)
        layer.method.kernel = "kernel"
        layer.method.bias = torch.full((2,), value)
        layer.kernel = Method()
        layer.kernel.handler = Method()
        layer.kernel.handler.bias = torch.full((4,), value)
        layer.forms = ("form", 1.5, {"weight": layer.weight, "views": [layer.weight[0]]})
        layer.multiply = layer.linear
        bias = layer.derived
        layer.add = lambda given, bias=bias: given + bias
        layer.scaled = partial(torch.mul, layer.method.bias)
        for name, value_ in odd.items():
            setattr(layer, name, value_)
    note_loaded(model, before)
    return model


class Slots:
    """What is set in `scale` is not in its dictionary."""

    __slots__ = ("__dict__", "scale")


class Table(dict[str, Any]):
    pass


def hidden(where: str, value: float) -> Any:
    """A loaded model which has a tensor where few look for one."""
    scale = torch.full((4,), value)
    holder: Any
    if where == "slots":
        holder = Slots()
        holder.scale = scale
    elif where == "table":
        holder = Table()
        holder.scale = scale
    elif where == "partial":
        holder = partial(torch.mul)
        holder.scale = scale
    elif where == "globals":
        names: dict[str, Any] = {"scale": scale}
        exec("def scaled(): return scale", names)
        holder = names["scaled"]
    model = alike(value, **({} if where == "parameter" else {"holder": holder}))
    if where == "parameter":
        model[0].weight.scale = (iter(()), scale)
    return model


@pytest.mark.parametrize("where", ["slots", "table", "partial", "globals", "parameter"])
def test_where_addresses_are_kept_what_cannot_be_seen_is_refused(where: str) -> None:
    running = hidden(where, 1.0)
    before = [each.clone() for each in tensors_of(running)]
    with pytest.raises(UnsupportedError, match="captured graphs"):
        kept(running, hidden(where, 2.0))
    assert all(map(torch.equal, tensors_of(running), before))


def test_where_addresses_are_kept_tensors_of_parameters_and_functions_change_too() -> None:
    def model(value: float) -> Any:
        def scaled() -> None:
            pass

        scaled.scale = torch.full((2,), value)  # type: ignore[attr-defined]
        made = alike(value, scaled=scaled)
        made[0].weight.scale = torch.full((4,), value)
        return made

    def found(made: Any) -> list[list[float]]:
        return [made[0].scaled.scale.tolist(), made[0].weight.scale.tolist()]

    running = model(1.0)
    assert found(running) == [[1.0] * 2, [1.0] * 4]
    kept(running, model(2.0)).apply()
    assert found(running) == [[2.0] * 2, [2.0] * 4]


def tensors_of(model: Any) -> list[torch.Tensor]:
    found = [*model.parameters(), *model.buffers()]
    for layer in model:
        found += [layer.derived, layer.method.bias, layer.kernel.handler.bias]
        found += [layer.forms[2]["views"][0], layer.scaled.args[0]]
    return found


def kept(running: Any, fresh: Any) -> Takeover:
    gpu = SharedGpu(Gpu(FakeDriver(), "0"), torch.device("cpu"), CPU)
    return Takeover.plan(running, fresh, gpu)


def test_where_addresses_are_kept_only_contents_change() -> None:
    running, fresh = alike(1.0), alike(2.0)
    held = [dict(vars(layer)) for layer in running]
    before = tensors_of(running)
    places = [each.data_ptr() for each in before]
    noted: list[bool] = []
    kept(running, fresh).apply(lambda: noted.append(True))
    assert noted == [True]
    assert [dict(vars(layer)) for layer in running] == held
    assert all(mine is each for mine, each in zip(tensors_of(running), before, strict=True))
    assert [each.data_ptr() for each in before] == places
    assert all(bool((each == 2.0).all()) for each in before)
    assert running[0].add(torch.zeros(3)).tolist() == [2.0] * 3
    # And again, from what the first time has left.
    kept(running, alike(3.0)).apply()
    assert all(bool((each == 3.0).all()) for each in before)
    assert [each.data_ptr() for each in before] == places


@pytest.mark.parametrize(
    "odd",
    [
        {"forms": ("form", 2.5, {})},
        {"multiply": None},
        {"derived": torch.zeros(5)},
        {"kernel": object()},
        {"add": lambda given: given},
        {"another": 1},
        {"handle": iter(())},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_where_addresses_are_kept_what_else_differs_is_refused(odd: dict[str, Any]) -> None:
    running = alike(1.0, **({"handle": iter(())} if "handle" in odd else {}))
    before = [each.clone() for each in tensors_of(running)]
    with pytest.raises(UnsupportedError, match=rf"{next(iter(odd))} .*captured graphs use it"):
        kept(running, alike(2.0, **odd))
    assert all(map(torch.equal, tensors_of(running), before))


def test_what_is_interrupted_where_addresses_are_kept_is_done_all_the_same() -> None:
    running = alike(1.0)
    copy, interrupted = AddressExchange._copy, iter([True])

    def copied(self: AddressExchange) -> None:
        for own, new in self._copies[:2]:
            own.copy_(new)
        if next(interrupted, False):
            raise KeyboardInterrupt
        copy(self)

    takeover = kept(running, alike(2.0))
    with mock.patch.object(AddressExchange, "_copy", copied), pytest.raises(KeyboardInterrupt):
        takeover.apply()
    assert all(bool((each == 2.0).all()) for each in tensors_of(running))


def joined(running: Any) -> Any:
    """Let two unequal parts of a model lie at one address, as shared tensors of equal bytes do."""
    running[0].derived.set_(running[1].derived)
    return running


def test_where_addresses_are_kept_equal_tensors_must_stay_equal() -> None:
    running, fresh = joined(alike(1.0)), alike(2.0)
    assert running[0].derived.data_ptr() == running[1].derived.data_ptr()
    before = [each.clone() for each in tensors_of(running)]
    for odd in (fresh, alike(1.0)):  # also if nobody says that they are equal
        with pytest.raises(UnsupportedError, match=r"tensors that were equal.*enforce_eager=True"):
            kept(running, odd)
    assert all(map(torch.equal, tensors_of(running), before))
    kept(running, joined(fresh)).apply()
    assert all(bool((each == 2.0).all()) for each in tensors_of(running))


def test_where_addresses_are_kept_an_expanded_tensor_is_refused() -> None:
    running, fresh = (alike(each, wide=torch.tensor(each).expand(4)) for each in (1.0, 2.0))
    before = [each.clone() for each in tensors_of(running)]
    with pytest.raises(RuntimeError, match="memory location"):
        running[0].wide.copy_(fresh[0].wide)
    with pytest.raises(UnsupportedError, match=r"expanded to \(4,\).*enforce_eager=True"):
        kept(running, fresh)
    assert all(map(torch.equal, tensors_of(running), before))
