"""vLLM's own `sleep` and `wake_up` of a GPU's worker, with shared weights over the fake driver.

No GPU is needed, and no engine: a worker without a runner has a model of three parameters. torch's
accelerator and vLLM's allocator for GPUs are stood in for.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from vllm.config.load import LoadConfig
from vllm.v1.worker import gpu_worker

from gpu_runs import gpus
from gpu_runs.gpu_loads import weights
from manager_runs import managers
from manager_runs.sleepers import SleepyEngine
from tensor_dedup import unshare
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.cuda.sleep import SleepingModel
from tensor_dedup.memory_manager.cuda.driver import Access
from tensor_dedup.patches.vllm import sleep
from tensor_dedup.patches.vllm.load_formats import KEY, LOAD_FORMAT

pytestmark = pytest.mark.vllm
SHARED = [[weights(1, 200_000)], [weights(2, 100), weights(3, 70_000)]]
NBYTES = sum(each.nbytes for group in SHARED for each in group)


class Backend:
    """vLLM's sleep backend as far as it matters: what it was told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.fails = False

    def suspend(self, level: int) -> None:
        if self.fails:
            raise RuntimeError("it does not want to")
        self.told.append(level)

    def resume(self, tags: list[str] | None) -> None:
        self.told.append(tags)


class Model(nn.Module):
    """What an engine shares, and a parameter of its own."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in tensors)
        self.own = nn.Parameter(torch.ones(5))


class Bare:
    """A worker of vLLM's for a GPU, without what computes."""

    def __init__(self, engine: SleepyEngine, folder: Path) -> None:
        self.engine = engine
        self.model = Model(engine.tensors)
        self.backend = Backend()
        worker: Any = gpu_worker.Worker.__new__(gpu_worker.Worker)
        mine = {"memory_manager": str(folder / "m.sock")}
        load = LoadConfig(load_format=LOAD_FORMAT, model_loader_extra_config={KEY: mine})
        model = SimpleNamespace(model="base", enable_nccl_comm_suspend=False)
        worker.vllm_config = SimpleNamespace(load_config=load, model_config=model)
        worker.device = torch.device("cpu")
        worker.get_model = lambda: self.model
        worker.get_draft_model = lambda: None
        worker._sleep_mode_backend = self.backend
        worker._sleep_saved_parameters = {}
        worker._sleep_saved_buffers = {}
        worker._sleep_saved_draft_buffers = {}
        self.worker = worker

    def accesses(self) -> set[Access]:
        return {self.engine.fake.access(each.data_ptr()) for each in self.model.weights}


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bare]:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (1, 2))
    monkeypatch.setattr(gpu_worker.Worker, "synchronize_device", lambda *_: None)
    sleep.install()
    tmp_path.chmod(0o700)
    gc.collect()  # memory that earlier tests have left
    assert gpus.in_use() == 0
    with gpus.running(tmp_path):
        engine = SleepyEngine(tmp_path, tier=False).load(*SHARED)
        made = Bare(engine, tmp_path)
        with DEVICES.replaced("cpu", lambda _device: engine.gpu):
            yield made
        sleep._asleep.clear()
        made.model.weights = nn.ParameterList()
        del made
        gc.collect()
        engine.close()


def test_shared_weights_leave_the_gpu_with_the_others_and_come_back_to_their_addresses(
    bare: Bare, tmp_path: Path
) -> None:
    places = [each.data_ptr() for each in bare.model.parameters()]
    worker = cast("Any", bare.worker)
    with managers.running(tmp_path) as host:
        for _ in range(2):
            worker.sleep(1)
            assert bare.accesses() == {Access.NONE}
            # A lease that ends on its way to the manager still looks like a user's: then its slab
            # follows with the thread that settles.
            managers.until(lambda: gpus.in_use() == 0)
            assert host.overview().totals.resident_bytes == NBYTES
            worker.wake_up(["kv_cache"])
            assert bare.accesses() == {Access.NONE}
            worker.wake_up(["weights"])
            assert bare.engine.is_right()
            assert [each.data_ptr() for each in bare.model.parameters()] == places
        worker.sleep()
        worker.wake_up()
        assert bare.engine.is_right()
        assert bare.backend.told == [1, ["kv_cache"], ["weights"]] * 2 + [1, None]


def test_level_2_is_refused_before_anything_sleeps(bare: Bare, tmp_path: Path) -> None:
    with managers.running(tmp_path), pytest.raises(UnsupportedError, match="use level 1"):
        bare.worker.sleep(2)
    assert bare.backend.told == []
    assert bare.engine.is_right()


def test_what_vllm_does_not_manage_wakes_what_was_asleep(bare: Bare, tmp_path: Path) -> None:
    bare.backend.fails = True
    with managers.running(tmp_path), pytest.raises(RuntimeError, match="does not want"):
        bare.worker.sleep(1)
    assert bare.engine.is_right()


def test_whatever_ends_falling_asleep_the_engine_is_awake(
    bare: Bare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        assert bare.accesses() == {Access.NONE}
        raise KeyboardInterrupt

    monkeypatch.setattr(SleepingModel, "settle", interrupted)
    with managers.running(tmp_path):
        with pytest.raises(KeyboardInterrupt):
            bare.worker.sleep(1)
        assert bare.backend.told == []
        assert bare.engine.is_right()
        monkeypatch.undo()


def test_without_a_manager_of_host_memory_they_stay_and_that_is_said(
    bare: Bare, caplog: pytest.LogCaptureFixture
) -> None:
    bare.worker.sleep(1)
    assert "stay on the GPU" in caplog.text
    assert bare.engine.is_right()
    bare.worker.wake_up()
    assert bare.backend.told == [1, None]


def test_what_has_slept_can_become_private(bare: Bare, tmp_path: Path) -> None:
    with managers.running(tmp_path):
        bare.worker.sleep(1)
        bare.worker.wake_up()
        assert unshare(bare.model) > 0
        assert bare.accesses() == {Access.READ_WRITE}


def test_an_engine_without_us_sleeps_as_ever(bare: Bare) -> None:
    bare.worker.vllm_config.load_config = LoadConfig()
    bare.worker.sleep(1)
    bare.worker.wake_up()
    assert bare.backend.told == [1, None]
    assert bare.engine.is_right()
