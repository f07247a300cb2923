"""A load that is begun again has drawn no random numbers."""

import pytest
import torch

from tensor_dedup.loader import process_state
from tensor_dedup.loader.process_state import rng_restored_on_failure


class Gpus:
    """Two GPUs' generators, as torch's module of them has them."""

    def __init__(self) -> None:
        self.all = [torch.Generator().manual_seed(number) for number in range(2)]

    def is_initialized(self) -> bool:
        return True

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [each.get_state() for each in self.all]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        for each, state in zip(self.all, states, strict=True):
            each.set_state(state)

    def draw(self) -> list[float]:
        return [float(torch.rand(1, generator=each)) for each in self.all]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    made = Gpus()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made


def fails(gpus: Gpus) -> None:
    gpus.draw()
    torch.rand(5)
    raise ZeroDivisionError


def test_what_failed_has_drawn_nothing(gpus: Gpus) -> None:
    states = gpus.get_rng_state_all(), torch.get_rng_state()
    expected = gpus.draw(), torch.rand(3)
    gpus.set_rng_state_all(states[0])
    torch.set_rng_state(states[1])
    with pytest.raises(ZeroDivisionError), rng_restored_on_failure():
        fails(gpus)
    assert gpus.draw() == expected[0]
    assert torch.equal(torch.rand(3), expected[1])


def test_what_succeeds_has_drawn_what_it_drew(gpus: Gpus) -> None:
    before = gpus.get_rng_state_all()
    with rng_restored_on_failure():
        gpus.draw()
    assert not any(map(torch.equal, gpus.get_rng_state_all(), before))


def test_a_gpu_that_is_not_in_use_is_not_begun_for_it(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "is_initialized", lambda: False)
    monkeypatch.setattr(gpus, "get_rng_state_all", lambda: pytest.fail("it was asked"))
    assert process_state.accelerator() is None
    with rng_restored_on_failure():
        pass
