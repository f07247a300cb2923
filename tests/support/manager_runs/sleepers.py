"""Engines of a fake GPU that sleep: a model of several tensors, and what it falls asleep to."""

import ctypes
import gc
from pathlib import Path
from typing import cast

import torch

from gpu_runs.fake_driver import FakeDriver, RefusingDriver, fake_uuid
from gpu_runs.gpu_loads import key_of
from tensor_dedup.loader.cuda.builds import DeviceBuilds
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents, device_session
from tensor_dedup.loader.cuda.residents import DeviceResident, Views
from tensor_dedup.loader.cuda.shared import SharedGpu
from tensor_dedup.loader.cuda.sleep import SleepingModel, SleepReport
from tensor_dedup.loader.cuda.tensors import CPU
from tensor_dedup.loader.residents.resident import ReplicaKey
from tensor_dedup.memory_manager.client import Client, connect
from tensor_dedup.memory_manager.cuda.driver import Access, Driver


class SleepyEngine:
    """A process's engine: its GPU, its connections, and a model whose tensors it shares."""

    def __init__(
        self, folder: Path, *, managed: bool = True, tier: bool = True, late: bool = False
    ) -> None:
        self.fake = FakeDriver(late=late)
        self.driver = RefusingDriver(self.fake)
        self.gpu = SharedGpu(
            Gpu(cast("Driver", self.driver), fake_uuid(0)), torch.device("cpu"), CPU
        )
        where = folder / "m.sock"
        self.host: Client | None = connect(where, keep_connected=False) if tier else None
        self.device: Client | None = (
            connect(where, keep_connected=False, device=fake_uuid(0)) if managed else None
        )
        self.views = Views(CPU)
        self.wanted: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        if self.host is not None:
            self.model = SleepingModel(self.gpu, self.host, self.device, "base")

    def load(self, *groups: list[torch.Tensor]) -> "SleepyEngine":
        """Share these tensors, each group in a slab of its own unless it is there already."""
        for group in groups:
            self.wanted += group
            self.tensors += [self.views.tensor(each) for each in self._residents(group)]
        return self

    def _residents(self, group: list[torch.Tensor]) -> list[DeviceResident]:
        residents = (
            DeviceManagerResidents()
            if self.device is None
            else DeviceManagerResidents(device_session(self.device, self.gpu.gpu, "base"))
        )
        keys = [ReplicaKey(key_of(each), 0) for each in group]
        found = self.gpu.find(keys, residents)
        missing = [
            (key, f"recipe {key.key.digest}", self.gpu.copy_of(each))
            for key, each, here in zip(keys, group, found, strict=True)
            if here is None
        ]
        made = iter(
            [resident for resident, _ in DeviceBuilds(self.gpu, residents).get_or_build(missing)]
        )
        return [here or next(made) for here in found]

    def sleep(self) -> SleepReport:
        return self.model.sleep(self.tensors)

    def addresses(self) -> list[int]:
        return [each.data_ptr() for each in self.tensors]

    def is_right(self) -> bool:
        """Does it have what it loaded, read-only?"""
        return all(
            self.fake.access(have.data_ptr()) == Access.READ
            and ctypes.string_at(have.data_ptr(), have.nbytes)
            == ctypes.string_at(want.data_ptr(), want.nbytes)
            for have, want in zip(self.tensors, self.wanted, strict=True)
        )

    def is_unmapped(self) -> bool:
        return {self.fake.access(each) for each in self.addresses()} == {Access.NONE}

    def close(self) -> None:
        """End it, and see that nothing is left of it."""
        self.driver.again()
        self.tensors.clear()
        vars(self).pop("model", None)
        gc.collect()
        assert self.gpu.gpu.reap(wait=True) == 0
        left = self.fake.left()
        assert left == {}, left
        if self.host is not None:
            self.host.close()
        if self.device is not None:
            self.device.close()
