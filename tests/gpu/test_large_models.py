"""Pairs of Diffusers and Transformers of a gigabyte, and of SDXL's size: bit-equal, and there once.

Each library is left out where it is not installed. In a rehearsal a pair is tiny.
"""

import sys
from pathlib import Path

import pytest

from gpu_runs import gpu_world
from processes import fresh

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def compared(library: str, way: str, size: str, folder: str) -> dict[str, float]:
    from gpu_runs import library_pairs

    return library_pairs.compare(library, way, size, folder)


@pytest.mark.parametrize(
    ("library", "way", "size"),
    [
        ("diffusers", "to", "gigabyte"),
        ("transformers", "to", "gigabyte"),
        ("transformers", "device_map", "gigabyte"),
        ("diffusers", "to", "full"),
    ],
)
def test_a_pair_is_what_it_is_plainly_and_lies_there_once(
    library: str, way: str, size: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for needed in (library, "accelerate"):
        pytest.importorskip(needed)
    if gpu_world.REHEARSAL and size == "full":
        pytest.skip("tiny like the others, and rehearsed by them")
    # Another process each: a device of the fake driver stays in one, and what a test has taken
    # of a real one is given back.
    found = fresh.call(
        compared, library, way, "tiny" if gpu_world.REHEARSAL else size, str(tmp_path)
    )
    with capfd.disabled():
        sys.stdout.write(f"\n{library} {way} {size}: {found}\n")
