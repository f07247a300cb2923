"""What lies at an address, as the kernel answers for one and as it lists all."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from processes.process_state import forked
from tensor_dedup import libc
from tensor_dedup.loader.residents.process_mappings import FileMapping, ProcessMappings, _Kernel
from tensor_dedup.loader.residents.resident import pack

NBYTES = 3 * mmap.PAGESIZE


def over(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def of_file(path: Path, flags: int, open_flags: int = os.O_RDWR) -> torch.Tensor:
    path.write_bytes(bytes(NBYTES))
    fd = os.open(path, open_flags)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if open_flags == os.O_RDWR else 0)
        return over(mmap.mmap(fd, NBYTES, flags=flags, prot=protection))
    finally:
        os.close(fd)


@pytest.fixture(params=["asked", "listed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "listed":
        monkeypatch.setattr(_Kernel, "open", lambda: None)
    elif _Kernel.open() is None:
        pytest.skip("this kernel lists only (before Linux 6.11)")
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_what_memory_is(tmp_path: Path) -> None:
    private = of_file(tmp_path / "a", mmap.MAP_PRIVATE)
    deleted = of_file(tmp_path / "a file (deleted)", mmap.MAP_PRIVATE)
    (tmp_path / "a file (deleted)").unlink()
    common = of_file(tmp_path / "c", mmap.MAP_SHARED)
    seen = of_file(tmp_path / "d", mmap.MAP_SHARED, os.O_RDONLY)
    [resident] = pack([(torch.ones(100), "digest")])
    memory = ProcessMappings()
    for tensor in (torch.zeros(10), torch.zeros(0), torch.zeros(3, device="meta"), resident.map()):
        assert memory.file(tensor) is None
        assert not memory.is_common(tensor)
    assert memory.file(common) is None
    assert memory.is_common(common)
    status = (tmp_path / "a").stat()
    found = memory.file(private[5000:])
    assert found == FileMapping(
        private.data_ptr(),
        private.data_ptr() + NBYTES,
        0,
        f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}",
        status.st_ino,
        str(tmp_path / "a"),
    )
    assert memory.file(private) is found, "the kernel is asked once"
    for tensor in (deleted, seen):
        assert memory.file(tensor) is not None
        assert not memory.is_common(tensor)


@pytest.mark.usefixtures("way")
def test_the_second_page_of_a_file_begins_there(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(NBYTES))
    with path.open("r+b") as file:
        tensor = over(
            mmap.mmap(file.fileno(), mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, offset=mmap.PAGESIZE)
        )
    found = ProcessMappings().file(tensor)
    assert found is not None
    assert found.offset == mmap.PAGESIZE


def test_where_proc_cannot_be_read_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = of_file(tmp_path / "a", mmap.MAP_PRIVATE)
    assert ProcessMappings().file(tensor) is not None
    monkeypatch.setattr(libc, "MAPS", tmp_path / "maps")
    assert ProcessMappings().file(tensor) is None
    assert not ProcessMappings().is_common(tensor)


def test_a_forked_child_asks_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def child() -> bool:
        tensor = of_file(path, mmap.MAP_PRIVATE)
        return ProcessMappings().file(tensor) is not None

    assert forked(child)


def test_no_descriptor_stays(tmp_path: Path) -> None:
    tensor = of_file(tmp_path / "a", mmap.MAP_PRIVATE)
    ProcessMappings().file(tensor)
    assert not [link for link in Path("/proc/self/fd").iterdir() if _leads_to_maps(link)]


def _leads_to_maps(link: Path) -> bool:
    try:
        return str(link.readlink()).endswith("/maps")
    except FileNotFoundError:
        return False
