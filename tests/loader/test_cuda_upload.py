"""Files go to a GPU through a few buffers and are hashed on the way; over the fake driver."""

import ctypes
from pathlib import Path

import pytest

from gpu_runs.fake_driver import FakeDriver
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.errors import ChangedFileError
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.openers import MappedExtent
from tensor_dedup.loader.cuda.tensors import CPU, held
from tensor_dedup.loader.cuda.upload import Uploader
from tensor_dedup.memory_manager.backends.vmm import VmmBackend


def pattern(nbytes: int) -> bytes:
    return bytes(index * 7 % 251 for index in range(1009)) * (nbytes // 1009 + 1)


@pytest.mark.parametrize("nbytes", [1, LEAF_BYTES, LEAF_BYTES + 1, 5 * LEAF_BYTES - 3])
def test_bytes_arrive_and_their_digest_is_known(tmp_path: Path, nbytes: int) -> None:
    data = pattern(nbytes)[:nbytes]
    file = tmp_path / "weights"
    file.write_bytes(b"header" + data + b"more")
    driver = FakeDriver()
    gpu = Gpu(driver, "0")
    slab = VmmBackend(FakeDriver(), "0").reserve(6 * LEAF_BYTES)
    extent = MappedExtent(slab.fileno, slab.nbytes, 1)
    found: list[str] = []
    with file.open("rb") as opened, Uploader(0, CPU, LEAF_BYTES, 2) as uploader:
        write = uploader.writer(opened.fileno(), len(b"header"), nbytes)
        gpu.fill(extent, gpu.vmm(), lambda address: found.append(write(address + 512)))
        again = uploader.writer(opened.fileno(), len(b"header"), nbytes)
        gpu.fill(extent, gpu.vmm(), lambda address: found.append(again(address + 512)))
    assert found == [digest(data)] * 2
    mapping = gpu.map([extent], gpu.vmm(), slab)
    assert ctypes.string_at(mapping.address + 512, nbytes) == data
    assert held() == 0
    del mapping
    assert gpu.reap(wait=True) == 0
    assert driver.left() == {}


def test_a_file_that_is_too_short_is_said(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(100))
    driver = FakeDriver()
    gpu = Gpu(driver, "0")
    slab = VmmBackend(FakeDriver(), "0").reserve(2 * LEAF_BYTES)
    with file.open("rb") as opened, Uploader(0, CPU) as uploader:
        write = uploader.writer(opened.fileno(), 50, 51)
        with pytest.raises(ChangedFileError, match="byte 100"):
            gpu.fill(MappedExtent(slab.fileno, slab.nbytes, 1), gpu.vmm(), write)
    assert driver.left() == {}
