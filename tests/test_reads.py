"""The byte counter of the tests sees every way to read a file, and the kernel agrees."""

import io
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from files import reads

TENSORS = {"a": torch.arange(65_536), "b": torch.ones(1_000)}
DATA = 65_536 * 8 + 1_000 * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(TENSORS, path)
    return path


def _by_read(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    while os.read(fd, 100_000):
        pass
    os.close(fd)


def _by_vectors(path: Path) -> None:
    fd, size = os.open(path, os.O_RDONLY), path.stat().st_size
    first, second = bytearray(1_000), bytearray(size - 1_000)
    os.readv(fd, [first])
    os.preadv(fd, [second], 1_000)
    os.close(fd)


def _by_raw_file(path: Path) -> None:
    with io.FileIO(path) as raw:
        raw.readall()


def _by_unbuffered(path: Path) -> None:
    with path.open("rb", buffering=0) as raw:
        raw.read()


def _by_descriptor_file(path: Path) -> None:
    with os.fdopen(os.open(path, os.O_RDONLY), "rb") as opened:
        opened.read()


def _by_map(path: Path) -> None:
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as view:
        bytes(view)


def _by_numpy(path: Path) -> None:
    numpy.fromfile(path, dtype=numpy.uint8)


def _by_torch(path: Path) -> None:
    torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)


WAYS: dict[str, Callable[[Path], object]] = {
    "read": _by_read,
    "vectors": _by_vectors,
    "Path": Path.read_bytes,
    "FileIO": _by_raw_file,
    "unbuffered": _by_unbuffered,
    "fdopen": _by_descriptor_file,
    "mmap": _by_map,
    "copy": lambda path: shutil.copyfile(path, path.with_suffix(".copy")),
    "load_file": safetensors.torch.load_file,
    "numpy": _by_numpy,
    "from_file": _by_torch,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_read_a_file_is_counted_once(file: Path, way: str) -> None:
    with reads.counted(file) as seen:
        WAYS[way](file)
    assert seen.data_bytes() == DATA
    assert not seen.twice()
    assert seen.ranges(file) == [(file.stat().st_size - DATA, file.stat().st_size)]
    # numpy and torch look at the file themselves; everything else is seen to the byte, up to the
    # counter's own few reads.
    assert abs(seen.unseen()) < 16_384 or way in {"numpy"}


def test_a_byte_read_again_is_reported_with_its_range(file: Path) -> None:
    with reads.counted(file) as seen:
        fd = os.open(file, os.O_RDONLY)
        os.pread(fd, 2_000, 10_000)
        os.pread(fd, 2_000, 11_500)
        os.close(fd)
    assert seen.twice() == [reads.Read(file, 11_500, 12_000, "again")]


def test_a_tensor_taken_alone_counts_its_bytes_alone(file: Path) -> None:
    with reads.counted(file) as seen, safe_open(file, framework="pt") as opened:
        opened.get_tensor("b")
    assert seen.data_bytes() == 4_000


def test_other_names_of_a_file_are_that_file(file: Path) -> None:
    link = file.with_name("link.safetensors")
    link.symlink_to(file)
    with reads.counted(file) as seen:
        link.read_bytes()
    assert seen.data_bytes() == DATA


def test_other_files_are_not_counted_and_everything_is_put_back(file: Path) -> None:
    other = shutil.copyfile(file, file.with_name("other.safetensors"))
    before = (open, io.open, io.FileIO, os.read, os.preadv, mmap.mmap, torch.load)
    with reads.counted(file) as seen:
        other.read_bytes()
    assert seen.bytes() == 0
    assert seen.unseen() >= DATA
    assert (open, io.open, io.FileIO, os.read, os.preadv, mmap.mmap, torch.load) == before
