"""Modules, optimizers and schedulers: what is shared, bit for bit what it was, and going on."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from processes import fresh
from store_runs.stores import frozen, new_bytes, thawed, there_and_back, unchanged
from tensor_dedup.training.adapters import PyTorchAdapter
from tensor_dedup.training.errors import (
    MismatchedOriginalError,
    UnsupportedArrayError,
    UnsupportedValueError,
)

ADAPTER = PyTorchAdapter()


class Net(nn.Module):
    """A backbone with running statistics, and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.backbone(x).flatten(1))
        return result


class Tied(nn.Module):
    """A language model's usual knot."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(8, 1, 8, 8, generator=generator), torch.arange(8) % 3) for _ in range(steps)
    ]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, skip: int = 0) -> list[str]:
    """The loss of each step, every bit of it."""
    losses = []
    for x, y in batches(skip + steps)[skip:]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.item()).hex())
    return losses


def equal(a: nn.Module, b: nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_what_is_frozen_is_shared() -> None:
    net = Net().eval()
    optimizer = torch.optim.SGD(net.head.parameters(), 0.1)
    before = frozen(ADAPTER, net)
    train(net, optimizer, 2)
    after = frozen(ADAPTER, net)
    assert set(before) - unchanged(before, after) == {"head.weight", "head.bias"}
    assert new_bytes(before, after) == (4 * 36 * 3 + 3) * 4


def test_pieces_are_called_and_typed_as_in_the_state_dict() -> None:
    net = Net().to(torch.bfloat16)
    held = frozen(ADAPTER, net)
    assert list(held) == [*net.state_dict(), "#structure", "#values"]
    assert held["head.weight"].dtype == "BF16"
    assert held["backbone.1.num_batches_tracked"].shape == ()


def test_a_module_fills_one_like_it() -> None:
    net, other = Net(0), Net(1)
    train(net, torch.optim.SGD(net.parameters(), 0.1), 2)
    assert not equal(net, other)
    addresses = [p.data_ptr() for p in other.parameters()]
    assert there_and_back(ADAPTER, net, other) is other
    assert equal(net, other)
    assert [p.data_ptr() for p in other.parameters()] == addresses


def test_without_an_original_there_is_the_state_dict() -> None:
    net = Net()
    back = there_and_back(ADAPTER, net)
    assert isinstance(back, OrderedDict)
    assert vars(back)["_metadata"] == vars(net.state_dict())["_metadata"]
    other = Net(1)
    other.load_state_dict(back)
    assert equal(net, other)


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    net, other = Net(), Net(1)
    back = there_and_back(ADAPTER, net.state_dict())
    assert back._metadata == vars(net.state_dict())["_metadata"]
    assert there_and_back(ADAPTER, net.state_dict(), other) is other
    assert equal(net, other)
    assert there_and_back(ADAPTER, dict(net.state_dict()), Net(1)).head.in_features == 144
    held = other.state_dict()
    assert there_and_back(ADAPTER, Net(5).state_dict(), held) is held
    assert equal(other, Net(5))


def test_tied_weights_are_one_content_and_stay_tied() -> None:
    net = Tied()
    held = frozen(ADAPTER, net)
    assert held["embed.weight"].data == held["head.weight"].data
    back = thawed(ADAPTER, held)
    assert back["embed.weight"] is back["head.weight"]
    other = thawed(ADAPTER, held, Tied())
    assert other.head.weight is other.embed.weight
    assert equal(net, other)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.01, max_iter=4),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_been(make: Callable[[Any], Any]) -> None:
    def step(net: nn.Module, optimizer: Any, skip: int) -> list[str]:
        if type(optimizer).__name__ != "LBFGS":
            return train(net, optimizer, 3, skip)
        x, y = batches(1)[0]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return [optimizer.step(closure).item().hex() for _ in range(3)]

    net = Net()
    optimizer = make(net.parameters())
    step(net, optimizer, 0)
    held = frozen(ADAPTER, {"model": net, "optimizer": optimizer, "epoch": 3})
    expected = step(net, optimizer, 3)
    other = Net(1)
    original = {"model": other, "optimizer": make(other.parameters()), "epoch": 0}
    back = thawed(ADAPTER, held, original)
    assert back is original
    assert (back["model"] is other, back["epoch"]) == (True, 3)
    assert step(other, back["optimizer"], 3) == expected
    assert equal(net, other)


def test_a_whole_run_resumes() -> None:
    def start(seed: int) -> dict[str, Any]:
        net = Net(seed)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
        cold = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cold], [2])
        generator = torch.Generator().manual_seed(seed)
        return {
            "model": net,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "rng": generator,
            "best": 0.5,
        }

    def go(run: dict[str, Any], skip: int) -> list[str]:
        losses = []
        for step in range(3):
            noise = torch.randn(1, generator=run["rng"])
            losses += [
                *train(run["model"], run["optimizer"], 1, skip + step),
                float(noise.item()).hex(),
            ]
            run["scheduler"].step()
            losses.append(run["optimizer"].param_groups[0]["lr"].hex())
        return losses

    run = start(0)
    go(run, 0)
    held = frozen(ADAPTER, run)
    expected = go(run, 3)
    again = thawed(ADAPTER, held, start(9))
    assert go(again, 3) == expected


@pytest.mark.parametrize("name", ["CosineAnnealingWarmRestarts", "OneCycleLR", "ReduceLROnPlateau"])
def test_schedulers_are_plain_values(name: str) -> None:
    def make() -> Any:
        optimizer = torch.optim.SGD(Net().parameters(), 0.1, momentum=0.9)
        arguments = {"OneCycleLR": (0.2, 10), "CosineAnnealingWarmRestarts": (4,)}.get(name, ())
        return getattr(torch.optim.lr_scheduler, name)(optimizer, *arguments)

    first, second = make(), make()
    first.optimizer.step()
    first.step(*([0.5] if name == "ReduceLROnPlateau" else []))
    held = frozen(ADAPTER, {"scheduler": first})
    assert set(held) == {"#structure", "#values"}
    assert thawed(ADAPTER, held, {"scheduler": second})["scheduler"] is second
    assert second.state_dict() == first.state_dict()


def test_an_optimizer_keeps_its_pieces_and_counts_in_one() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    train(net, optimizer, 1)
    before = frozen(ADAPTER, {"model": net, "optimizer": optimizer})
    assert "optimizer.state.0.exp_avg" in before
    assert not [name for name in before if name.endswith(".step")]
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    for state in optimizer.state.values():
        state["step"] += 1
    after = frozen(ADAPTER, {"model": net, "optimizer": optimizer})
    assert set(before) - unchanged(before, after) == {"#values"}
    plain = there_and_back(ADAPTER, {"optimizer": optimizer})["optimizer"]
    assert plain["state"][0]["step"].item() == 2
    assert plain["param_groups"] == optimizer.state_dict()["param_groups"]


DENSE = torch.tensor([[0.0, 1, 0, 0], [2, 0, 0, 3]])
TWICE = torch.tensor([[0, 0], [1, 1]]), torch.ones(2), (2, 3)
SPARSE: dict[str, Callable[[], torch.Tensor]] = {
    "coo": DENSE.to_sparse,
    "uncoalesced": lambda: torch.sparse_coo_tensor(*TWICE, check_invariants=True),
    "csr": DENSE.to_sparse_csr,
    "csc": DENSE.to_sparse_csc,
    "bsr": lambda: DENSE.to_sparse_bsr((1, 2)),
    "bsc": lambda: DENSE.to_sparse_bsc((1, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_sparse_tensors_are_their_indices_and_values(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    back = there_and_back(ADAPTER, {"graph": tensor})["graph"]
    assert (back.layout, back.shape, back.dtype) == (tensor.layout, tensor.shape, tensor.dtype)
    assert torch.equal(back.to_dense(), tensor.to_dense())
    if tensor.layout == torch.sparse_coo:
        assert back.is_coalesced() == tensor.is_coalesced()


class Remembers(nn.Module):
    """Has state that is no tensor."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.note = note

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def test_extra_state_of_a_module_is_saved() -> None:
    note = {"seen": (1, 2), "mean": torch.ones(2)}
    back = there_and_back(ADAPTER, nn.Sequential(Remembers(note)), nn.Sequential(Remembers(None)))
    assert (back[0].note["seen"], back[0].note["mean"].tolist()) == ((1, 2), [1.0, 1.0])
    with pytest.raises(UnsupportedValueError, match=r"""^model\["0._extra_state"\]: a .*method"""):
        ADAPTER.extract({"model": nn.Sequential(Remembers(Remembers(1).named_parameters))})


def test_views_of_all_kinds_are_saved_as_they_are_seen() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "part": base[1:3, ::2],
        "turned": base.t(),
        "expanded": base[:1].expand(3, 6),
        "number": torch.tensor(5, dtype=torch.int32),
        "none": base[:0],
        "fp8": base.to(torch.float8_e4m3fn),
        "conj": torch.complex(base, base).conj(),
    }
    back = there_and_back(ADAPTER, state)
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].to(torch.complex64), tensor.to(torch.complex64)), name


def test_an_expanded_original_is_replaced() -> None:
    original = {"a": torch.zeros(1, 2).expand(3, 2)}
    back = there_and_back(ADAPTER, {"a": torch.arange(6.0).view(3, 2)}, original)
    assert back["a"].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    "original",
    [nn.Linear(2, 2), {"weight": 1}, torch.optim.SGD(Net().parameters()), "a name"],
    ids=["another module", "a dict", "an optimizer", "text"],
)
def test_an_original_of_another_kind_is_refused(original: Any) -> None:
    with pytest.raises(MismatchedOriginalError, match="built like what was saved"):
        there_and_back(ADAPTER, Net(), original)


def test_an_optimizer_of_other_parameters_is_refused_with_its_place() -> None:
    net = Net()
    state = {"opt": torch.optim.SGD(net.parameters(), 0.1)}
    with pytest.raises(MismatchedOriginalError, match=r"^opt: "):
        there_and_back(ADAPTER, state, {"opt": torch.optim.SGD(net.head.parameters(), 0.1)})


def refusals_of_parts_of_tensors() -> list[str]:
    """What is said of a DTensor, in a process that has a group of one."""
    import torch.distributed as parts
    from torch.distributed.device_mesh import init_device_mesh

    parts.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    mesh = init_device_mesh("cpu", (1,))
    net = nn.Linear(2, 2)
    sharded = torch.distributed.tensor.distribute_module(net, mesh)
    try:
        ADAPTER.extract({"model": sharded})
    except UnsupportedArrayError as error:
        return [str(error)]
    finally:
        parts.destroy_process_group()
    return []


def test_parts_of_tensors_on_other_ranks_are_refused() -> None:
    # Not in a fork: an engine that this process has had leaves its group of processes there.
    (said,) = fresh.call(refusals_of_parts_of_tensors)
    assert said.startswith("model.weight: a torch.distributed.tensor.DTensor")


def test_a_module_without_memory_is_refused() -> None:
    with torch.device("meta"):
        net = Net()
    with pytest.raises(UnsupportedArrayError, match=r"^model\[.*weight.*meta"):
        ADAPTER.extract({"model": net})
    with pytest.raises(UnsupportedArrayError, match="UninitializedParameter"):
        ADAPTER.extract(nn.LazyLinear(3))


def test_a_model_does_not_take_a_dict_of_parts_and_is_told_of_them() -> None:
    model = torch.nn.Linear(2, 2)
    held = frozen(
        ADAPTER, {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "n": 1}
    )
    with pytest.raises(MismatchedOriginalError) as caught:
        thawed(ADAPTER, held, model)
    told = str(caught.value)
    assert "`original` is a Linear, and what was saved there is a dict of 'model', 'opti" in told
    assert told.endswith('such as {"model": model}')
    thawed(ADAPTER, held, {"model": model})
