"""What the benchmark of leaves measures of the demonstration, and its aim."""

import sys
from pathlib import Path

import pytest

import fresh
import package_source

MIB = 1 << 20


def grown_vocabulary(work: str) -> tuple[int, int, int]:
    """What it adds: whole tensors shared only, by leaf, and by leaf when it is known."""
    sys.path.append(str(package_source.ROOT / "scripts"))
    from bench import leaf_models

    found = leaf_models.grown_vocabulary(Path(work))
    return found.whole, found.unknown, found.known


@pytest.mark.vllm
@pytest.mark.long
def test_the_demonstrations_grown_vocabulary_adds_at_most_16_mib(tmp_path: Path) -> None:
    whole, unknown, known = fresh.call(grown_vocabulary, str(tmp_path))
    assert whole > 256 * MIB  # all of the embedding, or nothing is tested here
    assert unknown <= 16 * MIB
    assert known <= 16 * MIB
