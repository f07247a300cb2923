"""The kernel that hashes on a GPU, without one: an interpreter runs it, the compiler builds it.

The interpreter is chosen before Triton is imported, so these are processes of their own. It takes
about a tenth of a second for a block, however many chunks have it: few launches, and wide ones.
"""

import importlib.util
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from blake3 import blake3

import fresh
from tensor_dedup.digest import LEAF_BYTES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


class Case(NamedTuple):
    """So many bytes from so many after a word's address on, with these sizes of the kernel's."""

    nbytes: int
    start: int = 0
    leaf: int = 4096
    most: int = 2
    lanes: int = 16


def content(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def right(case: Case) -> list[bytes]:
    data = content(case.nbytes)
    return [blake3(data[n : n + case.leaf]).digest() for n in range(0, case.nbytes, case.leaf)]


def interpreted(cases: list[tuple[int, ...]]) -> list[list[bytes]]:
    import torch

    from tensor_dedup.loader.cuda.blake3_kernel import leaf_digests

    found = []
    for nbytes, start, *sizes in cases:
        room = torch.empty(nbytes + start, dtype=torch.uint8)
        room[start:] = torch.tensor(list(content(nbytes)), dtype=torch.uint8)
        found.append(leaf_digests(room[start:], *sizes))
    return found


def run(monkeypatch: pytest.MonkeyPatch, cases: list[Case]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = fresh.call(interpreted, [tuple(case) for case in cases])
    wrong = [case for case, leaves in zip(cases, found, strict=True) if leaves != right(case)]
    assert not wrong
    assert sum(map(len, found)) >= len(cases) - 1  # none for no bytes


def test_leaves_are_those_of_blake3(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [Case(n) for n in (0, 1, 63, 64, 65, 129, 500)]
    chunks = [
        Case(1023),
        Case(1024),
        Case(4096 + 3 * 1024 + 65, start=1, most=1),  # pieces, from no word on
        Case(LEAF_BYTES + 1025, leaf=LEAF_BYTES, lanes=2048),  # programs
    ]
    run(monkeypatch, blocks + chunks)


@pytest.mark.long
def test_leaves_of_any_length_are_those_of_blake3(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = random.Random(3)
    cases = []
    for _ in range(12):
        leaf = 1024 << chosen.randrange(5)
        most = chosen.randrange(1, 4)
        nbytes = chosen.randrange(1, 3 * leaf) + chosen.choice((0, 0, 2 * most * leaf))
        cases.append(Case(nbytes, chosen.randrange(4), leaf, most, 1 << chosen.randrange(4, 6)))
    run(monkeypatch, [*cases, *(Case(n * 1024 + 1, leaf=16384) for n in (3, 5, 6, 7, 11, 13))])


def refused() -> str:
    """What is said where there is no GPU to launch on."""
    import torch

    from tensor_dedup.errors import UnsupportedError
    from tensor_dedup.loader.cuda.blake3_kernel import leaf_digests

    try:
        leaf_digests(torch.zeros(2048, dtype=torch.uint8))
    except UnsupportedError as error:
        return str(error)
    return "it launched"


class NoGpu:
    """What Triton asks a driver before it compiles."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> Any:
        return self._target


class Compiled:
    """A kernel that is compiled as often as a launch would compile it, and never launched.

    `built`: what it was compiled into before.
    """

    def __init__(self, kernel: Any, built: Any) -> None:
        self._kernel = kernel
        self.found: dict[int, Any] = {id(built): built}

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, **sizes: Any) -> None:
            made = self._kernel.run(*args, grid=grid, warmup=True, **sizes)
            self.found[id(made)] = made

        return launch


def machine_code(architecture: int) -> dict[str, list[dict[str, Any]]]:
    """What each kernel's launches are compiled into, for a GPU that is not here."""
    import torch
    from triton.runtime import driver

    from tensor_dedup.loader.cuda import blake3_kernel as kernel

    driver.set_active(NoGpu(architecture))
    names = ("_chunks", "_pairs")
    kernel.build(torch.device("cpu"))
    for name in names:
        built = getattr(kernel, name)
        [found] = built.device_caches[0][0].values()
        setattr(kernel, name, Compiled(built, found))
    room = torch.zeros(2 * LEAF_BYTES + 3072, dtype=torch.uint8)
    for nbytes in (17, 1024, 1040, 6000, 2 * LEAF_BYTES + 3000):
        for start in (0, 1, 4, 16):
            kernel.leaf_digests(room[start : start + nbytes])
    return {
        name: [
            {part: made.asm[part] for part in ("ptx", "cubin")}
            for made in getattr(kernel, name).found.values()
        ]
        for name in names
    }


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(80, marks=pytest.mark.long), 90, pytest.param(100, marks=pytest.mark.long)],
)
def test_it_becomes_machine_code(
    architecture: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = fresh.call(machine_code, architecture)
    assert {name: len(made) for name, made in found.items()} == {"_chunks": 1, "_pairs": 1}
    for [made] in found.values():
        assert f".target sm_{architecture}" in made["ptx"]
        assert ".local" not in made["ptx"], "registers would be kept in memory"
        assert made["cubin"].startswith(b"\x7fELF")


def test_whatever_triton_raises_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "Triton cannot hash there" in fresh.call(refused)
