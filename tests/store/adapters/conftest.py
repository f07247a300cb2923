"""One thread for models this small: several would spend their time waiting for each other."""

from collections.abc import Iterator

import pytest
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(before)
