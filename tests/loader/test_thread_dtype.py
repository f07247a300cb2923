"""A default dtype that holds for one thread."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tensor_dedup.loader.thread_dtype import ThreadDtype


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3),
        lambda: torch.zeros(2, 2),
        lambda: torch.ones(()),
        lambda: torch.full((2,), 1.5),
        lambda: torch.full((2,), 1),
        lambda: torch.arange(3),
        lambda: torch.arange(0, 1, 0.5),
        lambda: torch.tensor(1.5),
        lambda: torch.tensor([1, 2]),
        lambda: torch.tensor([1.5, 2.5]),
        lambda: torch.tensor([True]),
        lambda: torch.tensor(np.float64(1)),
        lambda: torch.tensor(np.ones(2, np.float32)),
        lambda: torch.zeros(2, dtype=torch.float32),
        lambda: torch.linspace(0, 1, 3),
        lambda: torch.eye(2),
        lambda: torch.zeros(2, dtype=torch.float32).clone(),
    ],
)
def test_a_thread_creates_what_the_default_dtype_would_give(
    make: Callable[[], torch.Tensor],
) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        expected = make()
    finally:
        torch.set_default_dtype(before)
    with ThreadDtype(torch.bfloat16):
        found = make()
    assert found.dtype is expected.dtype


def test_another_thread_is_as_before() -> None:
    found = []
    with ThreadDtype(torch.bfloat16):
        other = threading.Thread(target=lambda: found.append(torch.empty(1).dtype))
        other.start()
        other.join()
        assert torch.empty(1).dtype is torch.bfloat16
    assert found == [torch.float32]
    assert torch.empty(1).dtype is torch.float32
