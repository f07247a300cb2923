"""Tensors of which no digest is known are written into new slabs of a fake GPU, many at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_runs import gpus
from gpu_runs.gpu_loads import key_of
from manager_runs.sleepers import SleepyEngine
from tensor_dedup.loader.cuda.blocks import BLOCK_BYTES
from tensor_dedup.loader.cuda.builds import DeviceBuilds
from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents, device_session
from tensor_dedup.loader.cuda.residents import DeviceResident, UnreadTensor
from tensor_dedup.loader.cuda.transfers import HostContent, memory_part
from tensor_dedup.memory_manager.protocol.limits import MAX_PIECES
from tensor_dedup.types import ResidentKey


def unread(tensor: torch.Tensor) -> UnreadTensor:
    key = key_of(tensor)
    geometry = ResidentKey(key.dtype, key.shape, key.stride, "")
    content = HostContent(tensor.nbytes, [memory_part(tensor)])
    return UnreadTensor(geometry, content, lambda: f"recipe {content.digest}")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SleepyEngine]:
    made = SleepyEngine(tmp_path, managed=False, tier=False, late=True)
    yield made
    made.close()


def built(
    engine: SleepyEngine, residents: DeviceManagerResidents, *tensors: torch.Tensor
) -> list[DeviceResident]:
    found = DeviceBuilds(engine.gpu, residents).build_unread([unread(each) for each in tensors])
    return [resident for resident, _ in found]


def test_a_tensor_that_is_a_block_of_another_has_its_own_shape(engine: SleepyEngine) -> None:
    """As a quantised weight is that another model has fused with others."""
    row = torch.arange(4096, dtype=torch.int32).view(torch.uint8)
    large = (row.repeat(3 * BLOCK_BYTES // row.nbytes)).view(-1, 4096).clone()
    large[:4096] += 1
    one = large[:4096].clone()
    assert one.nbytes == BLOCK_BYTES
    [whole] = built(engine, DeviceManagerResidents(), large)
    assert len(whole.slabs) == 3
    [found] = built(engine, DeviceManagerResidents(), one)
    assert found.slabs == whole.slabs[:1]
    assert found.key == key_of(one)
    assert torch.equal(engine.views.tensor(found), one)


def test_the_manager_takes_more_tensors_than_a_slab_may_hold(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    tensors = [torch.tensor([number]) for number in range(MAX_PIECES + 5)]
    with gpus.running(tmp_path, "--budget", str(64 << 20)):
        engine = SleepyEngine(tmp_path, tier=False, late=True)
        assert engine.device is not None
        residents = DeviceManagerResidents(device_session(engine.device, engine.gpu.gpu, "base"))
        found = built(engine, residents, *tensors)
        assert residents.not_lent is None
        assert all(each.lease is not None for each in found)
        assert [int(engine.views.tensor(each)) for each in found] == [*range(len(tensors))]
        assert engine.fake.traffic["synchronize"] == 0
        del found
        engine.close()
