"""Tensors and arrays that share memory, in what is saved and in what it is loaded into."""

import pytest
import torch

from frozen_pieces import there_and_back
from tensor_dedup.store.checkpoints.adapters import PyTorchAdapter

ADAPTER = PyTorchAdapter()


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
