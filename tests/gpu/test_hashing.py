"""Digests that the GPU computes are those of the host, and `verify` and sharing use them."""

import random
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gpu_world
import stand_in
from gpu_world import PLACE
from tensor_dedup import report, shares_memory, sweep, verify
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.loader.cuda.hashing import HASHING, digest_of
from tensor_dedup.loader.residents.resident import tensor_bytes

pytestmark = pytest.mark.gpu
_LARGE = 65 * LEAF_BYTES + 12_345  # more than a piece of the kernel's


@pytest.fixture(autouse=True)
def _there() -> Iterator[None]:
    """The rehearsal's device is the host, which stands in for the kernel."""
    if gpu_world.REHEARSAL:
        with HASHING.replaced("cpu", stand_in.hasher):
            yield
        return
    pytest.importorskip("triton")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("Triton builds its launchers with a C compiler, and there is none")
    HASHING.digest(content(1 << 20).to(PLACE))
    HASHING.settle()
    yield


def content(nbytes: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(nbytes)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=made)


def require_hashed_there(tensor: torch.Tensor) -> None:
    found = HASHING.digest(tensor)
    reason = report().devices if found is None else "it was too small"
    if tensor.nbytes >= 1 << 20 or gpu_world.REHEARSAL:
        assert found is not None, reason
    assert found in (None, digest(tensor_bytes(tensor.cpu())))


def test_lengths_of_every_kind() -> None:
    """Whatever the size that is worth a launch, the kernel itself takes any."""
    chosen = random.Random(4)
    lengths = [*range(1, 1100, 61), *(chosen.randrange(1, 5 * LEAF_BYTES) for _ in range(60))]
    hashed: list[int] = []
    for nbytes in lengths:
        for start in (0, 3):
            host = content(nbytes + start)
            there = host.to(PLACE)[start:]
            assert _leaves(there) == stand_in.leaves(host[start:]), (nbytes, start)
            hashed.append(nbytes)
    assert len(hashed) == 2 * len(lengths)


def _leaves(data: torch.Tensor) -> list[bytes]:
    if gpu_world.REHEARSAL:
        return stand_in.leaves(data)
    from tensor_dedup.loader.cuda import blake3_kernel

    return blake3_kernel.leaf_digests(data)


def test_large_tensors_of_every_kind() -> None:
    data = content(_LARGE).to(PLACE)
    for tensor in (
        data,
        data[1:],
        data[: 8 << 20].view(torch.bfloat16).view(2048, 2048).T,
        data[: 8 << 20].view(torch.float32).view(128, 64, 256).permute(2, 0, 1),
        data[: 8 << 20].view(torch.float8_e4m3fn),
    ):
        require_hashed_there(tensor)


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


@pytest.mark.skipif(gpu_world.REHEARSAL, reason="rehearsed by tests/patches/test_gpu_moves.py")
def test_what_is_shared_is_hashed_there_and_verified_there() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(64, 64)).to(PLACE))
    large = next(models[0].parameters()).nbytes
    before = HASHING.nbytes
    for each in models:
        sweep(each)
    first, second = (list(each.parameters()) for each in models)
    assert all(shares_memory(p, q) for p, q in zip(first, second, strict=True))
    assert HASHING.nbytes == before + 2 * large
    assert verify().ok
    assert HASHING.nbytes >= before + 3 * large
    data = content(large).to(PLACE)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        data.add_(1)
        assert HASHING.digest(data) is None
    assert f"hashing on {PLACE}" not in report().devices
