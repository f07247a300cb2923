"""What the head of a plan tells apart, and what a look at a model's modules finds changed."""

import enum
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensor_dedup.loader.deferred.load_plan import (
    Head,
    LoadPlans,
    ModuleStates,
    UndescribedError,
    described,
    plan_of,
)
from tensor_dedup.loader.residents.resident import Resident, pack


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclass
class Settings:
    number: int = 1
    kind: Kind = Kind.ONE
    nested: dict[str, Any] = field(default_factory=lambda: {"deep": [1, {"deeper": {2, 3}}]})


class Method:
    def __init__(self) -> None:
        self.bits = 8
        self.seen: list[int] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.register_buffer("table", torch.zeros(3))
        self.width = 4
        self.names = ["a"]
        self.nested = {"a": [["b"]]}
        self.methods = [Method()]
        self.quant_method = Method()


class OtherLayer(Layer):
    pass


class Weight(nn.Parameter):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()


def widen(model: Any) -> None:
    model.second.width = 5


def reshape(model: Any) -> None:
    model.second.weight = nn.Parameter(torch.zeros(2, 4), requires_grad=False)


def cast(model: Any) -> None:
    model.second.weight = nn.Parameter(torch.zeros(4, 2).half(), requires_grad=False)


def transpose(model: Any) -> None:
    model.second.weight = nn.Parameter(torch.zeros(2, 4).t(), requires_grad=False)


def reclass(model: Any) -> None:
    model.second.weight.__class__ = Weight


def tie(model: Any) -> None:
    model.second.weight = model.first.weight


def other_loader(model: Any) -> None:
    model.second.weight.weight_loader = lambda *_: None


def other_class(model: Any) -> None:
    model.second = OtherLayer()


def rename(model: Any) -> None:
    model.third = model.second
    del model.second


def other_method(model: Any) -> None:
    model.second.quant_method.bits = 4


def longer_table(model: Any) -> None:
    model.second.table = torch.zeros(4)


def other_slice(model: Any) -> None:
    model.second.weight.output_dim = 1


@pytest.mark.parametrize(
    "change",
    [
        widen, reshape, cast, transpose, reclass, tie, other_loader, other_class, rename,
        other_method, longer_table, other_slice,
    ],
)  # fmt: skip
def test_a_head_tells_models_apart(change: Callable[[Any], None]) -> None:
    model = Model()
    before = Head.of(model)
    assert before.digest == Head.of(Model()).digest
    change(model)
    assert Head.of(model).digest != before.digest


def test_an_object_that_loads_weights_is_refused() -> None:
    """It might hold the model, which the plan would then keep alive."""
    model = Layer()
    assert Head.of(model).digest == Head.of(Layer()).digest
    model.weight.weight_loader = partial(print)  # type: ignore[attr-defined]
    with pytest.raises(UndescribedError, match="partial"):
        Head.of(model)


def test_a_head_is_that_of_its_inputs_too() -> None:
    model = Model()
    heads = {
        Head.of(model, each).digest
        for each in (
            Settings(),
            Settings(number=2),
            Settings(kind=Kind.TWO),
            Settings(nested={"deep": [1, {"deeper": {2, 4}}]}),
            Settings(nested={"deep": [1, {"deeper": {2, 3}}], "more": None}),
            {"number": 1},
            {"number": "1"},
            {"number": True},
            {"number": 1.0},
            {1: 1},
            {"1": 1},
            [torch.float16],
            ["torch.float16"],
            Path("a"),
            "a",
        )
    }
    assert len(heads) == 15


@pytest.mark.parametrize("value", [object(), [object()], {"a": object()}, lambda: None, Settings])
def test_what_cannot_be_described_is_refused(value: object) -> None:
    with pytest.raises(UndescribedError, match="cannot be described"):
        described(value)


def test_a_configuration_that_holds_itself_is_refused() -> None:
    settings = Settings()
    settings.nested["self"] = settings
    with pytest.raises(UndescribedError):
        described(settings)


def append(model: Any) -> None:
    model.second.names.append("b")


def append_deep(model: Any) -> None:
    model.second.nested["a"][0].append("c")


def in_listed_object(model: Any) -> None:
    model.second.methods[0].seen.append(1)


def new_attribute(model: Any) -> None:
    model.second.loaded = True


def helper(model: Any) -> None:
    model.second.quant_method.bits = 4


def in_helper(model: Any) -> None:
    model.second.quant_method.more = True


def of_parameter(model: Any) -> None:
    model.second.weight.is_loaded = True


def buffer(model: Any) -> None:
    model.second.table = torch.zeros(3)


def memory_of_buffer(model: Any) -> None:
    model.second.table.data = torch.zeros(3)


def write_buffer(model: Any) -> None:
    model.second.table.add_(1)


def module(model: Any) -> None:
    model.second.inner = nn.Identity()


@pytest.mark.parametrize(
    "change",
    [
        append, append_deep, in_listed_object, new_attribute, helper, in_helper, of_parameter,
        buffer, memory_of_buffer, write_buffer, module, widen, reshape, tie, other_class, rename,
    ],
)  # fmt: skip
def test_a_change_of_a_module_is_noticed(change: Callable[[Any], None]) -> None:
    model = Model()
    states = ModuleStates(model)
    assert states.unchanged(model)
    change(model)
    assert not states.unchanged(model)


def test_what_parameters_contain_is_no_change_of_a_module() -> None:
    model = Model()
    states = ModuleStates(model)
    model.first.weight.data = torch.ones(4, 2)
    model.second.weight.data.fill_(1)
    model.second.width = int("4")
    assert states.unchanged(model)


def test_a_plan_is_found_while_a_model_and_all_of_its_parts_live() -> None:
    plans, model = LoadPlans(), Model()
    head = Head.of(model)
    residents: dict[str, Resident] = {}
    for name, number in (("a", 1.0), ("b", 2.0)):
        [residents[name]] = pack([(torch.full((8,), number), f"digest {name}")])
    plans.keep(model, plan_of(head, "key", residents, {}, [0, 1]))

    assert plans.has_head(head.digest)
    assert not plans.has_head("another")
    assert plans.find("another") is None
    held = plans.find("key")
    assert held is not None
    assert held.residents == residents
    assert list(held.plan.sources) == [0, 1]

    del residents["b"], held
    gc.collect()
    assert plans.find("key") is None

    del model
    gc.collect()
    assert not len(plans)
