"""One process on a GPU: dtypes, streams, graphs, and becoming private at the same address."""

import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gpu_runs import gpu_world
from gpu_runs.gpu_world import KIND, PLACE, Load, wait_for_gpu, weights
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.cuda.local import LocalDevice
from tensor_dedup.loader.cuda.residents import DeviceRequest, Views, copy_of
from tensor_dedup.loader.cuda.tensors import tensor_at
from tensor_dedup.loader.process_state import rng_restored_on_failure
from tensor_dedup.loader.residents.resident import shares_memory

pytestmark = pytest.mark.gpu
needs_streams = pytest.mark.skipif(gpu_world.REHEARSAL, reason="the CPU has no streams or graphs")
_A_WHILE = 200_000_000  # clock cycles: about a tenth of a second


@pytest.fixture
def load(folder: Path) -> Iterator[Load]:
    with gpu_world.running(folder) as manager:
        made = Load(str(manager.socket.with_name("m.sock")))
        made.put(weights(1), weights(2))
        yield made
        gc.collect()
        wait_for_gpu()
        assert made.gpu.reap(wait=True) == 0
        made.client.close()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.int8,
        torch.bool,
    ],
)
def test_every_dtype_is_seen_as_it_is(dtype: torch.dtype) -> None:
    source = torch.randint(0, 2, (64, 32), dtype=torch.uint8, device=PLACE)
    seen = tensor_at(source.data_ptr(), (dtype, (32,), (1,)), (KIND, 0), source)
    assert (seen.dtype, seen.device, seen.data_ptr()) == (dtype, PLACE, source.data_ptr())
    assert torch.equal(seen.view(torch.uint8)[:16].cpu(), source.flatten()[:16].cpu())


def test_two_models_share_and_one_becomes_private(load: Load) -> None:
    other = Views(KIND)
    mine, theirs = load.find(weights(1)), load.find(weights(1), other)
    assert shares_memory(mine, theirs)
    address = mine.data_ptr()
    load.views.make_private()
    assert mine.data_ptr() == address
    assert not shares_memory(mine, theirs)
    mine.mul_(2)
    wait_for_gpu()
    assert torch.equal(mine.cpu(), 2 * weights(1))
    assert torch.equal(theirs.cpu(), weights(1))


@needs_streams
def test_a_mapping_stays_until_a_kernel_on_another_stream_has_ended(load: Load) -> None:
    tensor = load.find(weights(1))
    result = torch.empty(1024, 1024, device=PLACE)
    wait_for_gpu()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        # cuBLAS takes longer to start on a stream than the sleep lasts.
        torch.matmul(tensor, tensor, out=result)
        torch.cuda._sleep(_A_WHILE)  # type: ignore[no-untyped-call]
        torch.matmul(tensor, tensor, out=result)
    del tensor
    gc.collect()
    assert load.gpu.reap() >= 1, "unmapped while a kernel was to read it"
    side.synchronize()
    assert load.gpu.reap() == 0
    w = weights(1).to(PLACE)
    assert torch.allclose(result, w @ w, atol=1e-3)


@needs_streams
def test_a_graph_goes_on_with_private_memory_at_the_same_address(load: Load) -> None:
    tensor = load.find(weights(1))
    x, y = torch.ones(8, 1024, device=PLACE), torch.empty(8, 1024, device=PLACE)
    torch.matmul(x, tensor, out=y)  # cuBLAS makes its workspace before the capture
    wait_for_gpu()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.matmul(x, tensor, out=y)
    graph.replay()
    wait_for_gpu()
    before = y.clone()
    assert torch.allclose(before, x @ weights(1).to(PLACE), atol=1e-3)
    load.views.make_private()
    y.zero_()
    graph.replay()
    wait_for_gpu()
    assert torch.equal(y, before)
    tensor.mul_(2)
    graph.replay()
    wait_for_gpu()
    assert torch.allclose(y, 2 * before, atol=1e-3)


@needs_streams
def test_dropping_a_model_does_not_end_another_ones_capture(load: Load) -> None:
    other = Views(KIND)
    dropped = load.find(weights(2), other)
    tensor = load.find(weights(1))
    x, y = torch.ones(8, 1024, device=PLACE), torch.empty(8, 1024, device=PLACE)
    torch.matmul(x, tensor, out=y)
    wait_for_gpu()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.matmul(x, tensor, out=y)
        del dropped
        gc.collect()
    graph.replay()
    wait_for_gpu()
    assert load.gpu.reap(wait=True) == 0
    assert torch.allclose(y, x @ weights(1).to(PLACE), atol=1e-3)


@needs_streams
def test_capture_of_the_legacy_allocators_memory_is_not_ours(load: Load) -> None:
    """torch's own allocator neither frees nor reuses what we have mapped."""
    tensor = load.find(weights(1))
    torch.cuda.empty_cache()
    made = [torch.randn(1024, 1024, device=PLACE) for _ in range(64)]
    wait_for_gpu()
    assert torch.equal(tensor.cpu(), weights(1))
    assert not any(shares_memory(tensor, each) for each in made)


@pytest.mark.alone
@needs_streams
def test_memory_that_torch_keeps_for_later_makes_room() -> None:
    """torch has nearly all of the GPU and uses none of it: it gives it back, and we go on."""
    shared = DEVICES.at(PLACE)
    assert shared is not None, DEVICES.reasons()
    free, _ = torch.cuda.mem_get_info()
    torch.empty(free - (512 << 20), dtype=torch.uint8, device=PLACE)
    assert torch.cuda.mem_get_info()[0] < 1 << 30, "torch keeps it"
    mine = torch.ones(1 << 28)  # 1 GiB
    wanted = DeviceRequest("", gpu_world.key_of(mine), mine.nbytes, copy_of(mine, shared.gpu))
    seen = Views(KIND).tensor(LocalDevice(shared.gpu).put([wanted])[0][0])
    assert bool((seen == 1).all())
    del seen
    gc.collect()
    assert shared.gpu.reap(wait=True) == 0


@needs_streams
def test_a_load_that_begins_again_has_drawn_no_numbers() -> None:
    torch.rand(1, device=PLACE)
    before = torch.cuda.get_rng_state()
    with suppress(ZeroDivisionError), rng_restored_on_failure():
        torch.rand(3, device=PLACE)
        assert not torch.equal(torch.cuda.get_rng_state(), before)
        raise ZeroDivisionError
    assert torch.equal(torch.cuda.get_rng_state(), before)
