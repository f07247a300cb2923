"""Digests of what lies on the GPU are those of the host, and `verify` and sharing use them."""

import pytest
import torch
from torch import nn

from gpu_runs import gpu_world
from gpu_runs.gpu_world import PLACE
from tensor_dedup import shares_memory, sweep, verify
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.loader.residents.resident import digest_of, tensor_bytes

pytestmark = pytest.mark.gpu
_LARGE = 65 * LEAF_BYTES + 12_345


def content(nbytes: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(nbytes)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=made)


def test_large_tensors_of_every_kind() -> None:
    data = content(_LARGE).to(PLACE)
    for tensor in (
        data,
        data[1:],
        data[: 8 << 20].view(torch.bfloat16).view(2048, 2048).T,
        data[: 8 << 20].view(torch.float32).view(128, 64, 256).permute(2, 0, 1),
        data[: 8 << 20].view(torch.float8_e4m3fn),
    ):
        assert digest_of(tensor) == digest(tensor_bytes(tensor.cpu()))


def test_it_is_in_the_order_of_the_stream() -> None:
    """What writes the tensor is still under way when its digest is asked for."""
    side = 2048
    weights = content(4 * side * side).view(torch.int32).view(side, side).to(PLACE)
    expected = digest(tensor_bytes(weights.cpu() >> 1))
    for _ in range(3):
        made = torch.zeros_like(weights)
        if not gpu_world.REHEARSAL:
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        torch.bitwise_right_shift(weights, 1, out=made)
        assert digest_of(made) == expected


@pytest.mark.skipif(gpu_world.REHEARSAL, reason="rehearsed by patches/test_gpu_conversions.py")
def test_what_is_shared_is_verified() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(64, 64)).to(PLACE))
    for each in models:
        sweep(each)
    first, second = (list(each.parameters()) for each in models)
    assert all(shares_memory(p, q) for p, q in zip(first, second, strict=True))
    assert verify().ok
