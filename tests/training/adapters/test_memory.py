"""Tensors and arrays that share memory, in what is saved and in what it is loaded into."""

from typing import Any

import numpy as np
import pytest
import torch

from store_runs.stores import there_and_back
from tensor_dedup.training.adapters import NumpyAdapter, PyTorchAdapter
from tensor_dedup.training.errors import MismatchedOriginalError

ADAPTER, NUMPY = PyTorchAdapter(), NumpyAdapter()


def test_what_is_seen_of_one_memory_as_two_things_is_two() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    back = there_and_back(ADAPTER, {"a": x, "conj": x.conj(), "imag": x.imag})
    assert torch.equal(back["a"], x)
    assert torch.equal(back["conj"], x.conj())
    turned = {"imag": x.imag, "neg": x.conj().imag}
    assert turned["neg"].is_neg()
    back = there_and_back(ADAPTER, turned)
    assert back["imag"].tolist() == [2, -4]
    assert back["neg"].tolist() == [-2, 4]


@pytest.mark.parametrize("names", [("p", "shadow", "q"), ("shadow", "p", "q")])
def test_a_parameter_stays_one_beside_what_shares_its_memory(names: tuple[str, ...]) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    held = {"p": p, "q": p, "shadow": p.detach()}
    back = there_and_back(ADAPTER, {name: held[name] for name in names})
    assert type(back["p"]) is torch.nn.Parameter
    assert back["p"].requires_grad
    assert back["q"] is back["p"]
    assert type(back["shadow"]) is torch.Tensor
    assert not back["shadow"].requires_grad
    with torch.no_grad():
        back["p"].zero_()
    assert back["shadow"].tolist() == [0, 0, 0]


def test_gradients_are_asked_for_where_they_were() -> None:
    plain = torch.ones(2)
    graded = plain.detach().requires_grad_()
    back = there_and_back(ADAPTER, [plain, graded, torch.nn.Parameter(plain, requires_grad=False)])
    assert [held.requires_grad for held in back] == [False, True, False]
    assert [type(held).__name__ for held in back] == ["Tensor", "Tensor", "Parameter"]


def test_an_original_of_one_memory_cannot_be_two_values() -> None:
    saved = {"a": torch.zeros(3), "b": torch.ones(3)}
    both = torch.full((3,), 7.0)
    with pytest.raises(MismatchedOriginalError, match=r"^a: .*one memory"):
        there_and_back(ADAPTER, saved, {"a": both, "b": both})
    with pytest.raises(MismatchedOriginalError, match="one memory"):
        there_and_back(ADAPTER, saved, {"a": both, "b": both.detach()})
    array = np.zeros(5)
    with pytest.raises(MismatchedOriginalError, match=r"^a: .*one memory"):
        there_and_back(NUMPY, {"a": np.zeros(3), "b": np.ones(3)}, {"a": array[:3], "b": array[2:]})
    with pytest.raises(MismatchedOriginalError, match="one memory"):
        there_and_back(
            NUMPY,
            {"a": np.zeros(3), "b": torch.ones(2, dtype=torch.float64)},
            {"a": array[:3], "b": torch.from_numpy(array[1:3])},
        )


def seen_in_parts(fill: float) -> dict[str, Any]:
    base = torch.arange(12.0).reshape(3, 4) + fill
    twin = torch.complex(base, -base)
    array = base.numpy().astype(">f4")
    return {
        "whole": base,
        "again": base.view(3, 4),
        "rows": base[1:],
        "columns": [base[:, 0], base[:, 1]],
        "detached": torch.nn.Parameter(base),
        "conj": [twin, twin.conj()],
        "arrays": [array, array[::-1], array[1:, ::2]],
    }


def test_an_original_that_is_as_tied_as_what_was_saved_is_filled() -> None:
    saved, original = seen_in_parts(1), seen_in_parts(100)
    whole, columns, twins = original["whole"], original["columns"][1], original["conj"][1]
    back = there_and_back(ADAPTER, saved, original)
    assert (back["whole"] is whole, back["columns"][1] is columns) == (True, True)
    assert back["conj"][1] is twins
    for name in ("whole", "again", "rows", "detached"):
        assert torch.equal(back[name], saved[name]), name
    for name in ("columns", "conj"):
        assert all(map(torch.equal, back[name], saved[name])), name
    assert all(map(np.array_equal, back["arrays"], saved["arrays"]))


def test_each_of_an_original_s_own_is_filled_with_what_was_one() -> None:
    tensor, array = torch.arange(3.0), np.arange(3)
    original = {
        "a": torch.zeros(3),
        "b": torch.zeros(3),
        "c": torch.zeros(4),
        "x": np.zeros(3, int),
        "y": np.zeros(3, int),
        "z": None,
    }
    places = dict(original)
    saved = {"a": tensor, "b": tensor, "c": tensor, "x": array, "y": array, "z": array}
    back = there_and_back(ADAPTER, saved, original)
    for name in "abxy":
        assert back[name] is places[name]
        assert back[name].tolist() == [0, 1, 2]
    assert back["c"] is back["a"]
    assert back["z"] is back["x"]


def test_a_container_in_two_places_of_an_original_is_filled_once() -> None:
    box: dict[str, Any] = {}
    saved = {"a": {"n": 1, "t": torch.zeros(2)}, "b": {"n": 2, "t": torch.ones(2)}}
    back = there_and_back(ADAPTER, saved, {"a": box, "b": box})
    assert back["a"] is box
    assert (back["a"]["n"], back["b"]["n"]) == (1, 2)
    assert (back["a"]["t"].tolist(), back["b"]["t"].tolist()) == ([0, 0], [1, 1])
    rows: list[int] = []
    assert there_and_back(NUMPY, [[np.ones(1), 1], [np.ones(1), 2]], [rows, rows])[0][1] == 1


def test_an_object_in_two_places_of_an_original_cannot_be_two() -> None:
    nets = {"net": torch.nn.Linear(2, 2), "ema": torch.nn.Linear(2, 2)}
    one = torch.nn.Linear(2, 2)
    with pytest.raises(MismatchedOriginalError, match=r"^ema: .*one object"):
        there_and_back(ADAPTER, nets, {"net": one, "ema": one})
    states = {name: dict(net.state_dict()) for name, net in nets.items()}
    with pytest.raises(MismatchedOriginalError, match=r"^ema: .*one object"):
        there_and_back(ADAPTER, states, {"net": one, "ema": one})
    back = there_and_back(ADAPTER, {"net": one, "ema": one}, dict.fromkeys(nets, nets["net"]))
    assert back["net"] is back["ema"] is nets["net"]


def test_a_sparse_original_is_replaced() -> None:
    back = there_and_back(ADAPTER, [torch.eye(2)], [torch.eye(2).to_sparse()])
    assert torch.equal(back[0], torch.eye(2))
