"""Something happens at any moment in which a model on a GPU gets other weights at its addresses."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from gpu_runs import gpus
from tensor_dedup.loader import takeover
from tensor_dedup.loader.cuda import exchange, gpu, openers
from tensor_dedup.loader.cuda.exchange import LostWeightsError
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.residents import DeviceResident, DeviceSlab, Views
from tensor_dedup.loader.cuda.shared import SharedGpu
from tensor_dedup.loader.cuda.tensors import CPU
from tensor_dedup.loader.takeover import Built, Takeover, note_loaded
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.cuda.driver import Access
from tensor_dedup.types import ResidentKey
from vllm_runs.moments import Moment, Moments

_COUNT = 1 << 15
_NAMES = ("first", "second", "bias")


@dataclass
class Card:
    """A GPU, and models on it: two shared tensors, each with a slab of its own, and another."""

    driver: gpus.Full = field(default_factory=gpus.Full)
    shared: SharedGpu = field(init=False)

    def __post_init__(self) -> None:
        self.shared = SharedGpu(Gpu(self.driver, "0"), torch.device("cpu"), CPU)

    def model(self, value: float) -> Any:
        made, views = nn.Module(), Views(CPU)
        built = Built(made)
        for name in _NAMES[:2]:
            tensor = views.tensor(self._resident(name, value))
            made.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        made.bias = nn.Parameter(torch.full((3,), value), requires_grad=False)
        note_loaded(made, built)
        return made

    def _resident(self, name: str, value: float) -> DeviceResident:
        content, device = torch.full((_COUNT,), value), self.shared.gpu
        memory = VmmBackend(self.driver, device.device.uuid).reserve(content.nbytes)
        slab = DeviceSlab(device, device.vmm(), memory, content.nbytes)

        def write(address: int) -> None:
            self.driver.copy_in(address, content.data_ptr(), content.nbytes)

        device.fill(slab.extent, device.vmm(), write)
        key = ResidentKey("F32", (_COUNT,), (1,), f"{name} {value}")
        return DeviceResident(key, [slab], 0)

    def contents(self, model: Any) -> list[float | None]:
        """The value of each tensor, or None for what is not mapped."""
        found: list[float | None] = []
        for name in _NAMES:
            tensor = getattr(model, name)
            mapping = self.shared.gpu.mapping_at(tensor.data_ptr())
            if mapping is not None and self.driver.access(tensor.data_ptr()) is Access.NONE:
                found.append(None)
                continue
            assert mapping is None or not mapping.asleep
            assert mapping is None or len(mapping.owners()) >= 2, "nothing holds its memory"
            assert len(set(tensor.tolist())) == 1
            found.append(tensor[0].item())
        return found


def changed(card: Card, moment: Moment | None = None, act: Callable[[], object] = bool) -> Any:
    """Change a model from 1 to 2, and let something happen at a moment.

    Returns the moments, whether it came, the error, the contents, and whether it was noted."""
    running, noted = card.model(1.0), []
    plan = Takeover.plan(running, card.model(2.0), card.shared)
    moments = Moments(takeover, exchange, gpu, openers)
    error: type[BaseException] | None = None
    try:
        with moments.at(moment, act) if moment else moments.listed():
            plan.apply(lambda: noted.append(True))
    except (KeyboardInterrupt, LostWeightsError) as raised:
        error = type(raised)
    found = moments.found, moments.struck, error, card.contents(running), bool(noted)
    del running, plan
    card.shared.gpu.reap(wait=True)
    return found


def press_a_key() -> None:
    raise KeyboardInterrupt


def test_an_exception_at_any_moment_of_an_exchange() -> None:
    card = Card()
    found, _, error, contents, noted = changed(card)
    assert (error, contents, noted) == (None, [2.0] * 3, True)
    # In a finalizer nobody gets what is raised.
    found = [m for m in found if m.function not in {"_retire", "_forget"}]
    assert {"sleep", "wake", "_swap", "_copy", "apply", "unmap", "remap"} <= {
        m.function for m in found
    }
    ended = []
    for moment in found:
        _, struck, error, contents, noted = changed(card, moment, press_a_key)
        assert contents in ([1.0] * 3, [2.0] * 3), moment
        assert noted is (contents[0] == 2.0), moment
        assert error is KeyboardInterrupt or not struck or contents[0] == 2.0, moment
        ended.append((error, contents[0]))
    assert {(KeyboardInterrupt, 1.0), (KeyboardInterrupt, 2.0)} <= {*ended}


def test_where_the_copies_fail_again_and_again_nothing_can_be_computed_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("not now")

    monkeypatch.setattr(exchange.AddressExchange, "_copy", refuse)
    _, _, error, contents, noted = changed(Card())
    assert error is LostWeightsError
    assert contents[:2] == [None, None]
    assert not noted
