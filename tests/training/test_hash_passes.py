"""How often a save reads what it saves, counted in bytes at the functions that hash.

BLAKE3 names what is stored; XXH3, the change hash, tells whether bytes have changed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from xxhash import xxh3_128_digest

from files.counted_hashes import Counted
from store_runs.stores import shares
from tensor_dedup import digest
from tensor_dedup.store import hashing
from tensor_dedup.training import CheckpointStore, background

LEAF = digest.LEAF_BYTES
LARGE = 3 * LEAF + 1000
# Beside tensors: manifests, tables, notes, and digests of leaves.
LITTLE = 64 << 10


@pytest.fixture
def blake(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """BLAKE3, counted."""
    counted = Counted(blake3)
    monkeypatch.setattr(digest, "blake3", counted)
    return counted


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """The change hash, counted."""
    counted = Counted(xxh3_128_digest)
    monkeypatch.setattr(hashing, "xxh3_128_digest", counted)
    return counted


def model_of() -> dict[str, torch.Tensor]:
    """Two large tensors, one of which is trained, and many small ones that are."""
    large = {name: torch.randint(256, (LARGE,), dtype=torch.uint8) for name in ("base", "head")}
    return large | {f"bias{n}": torch.randn(1000) for n in range(40)}


SMALL = 40 * 4000


def train(model: dict[str, torch.Tensor]) -> None:
    """Change all but the base."""
    for name in model.keys() - {"base"}:
        model[name].add_(1)


def assert_passes(counted: Counted, expected: int) -> None:
    """So many bytes were hashed since it was asked last, and little beside."""
    assert expected <= counted.taken() <= expected + LITTLE


@pytest.mark.parametrize("helped", [False, True])
@pytest.mark.parametrize("compress", [None, "auto"])
def test_a_private_copy_is_hashed_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blake: Counted,
    change: Counted,
    helped: bool,
    compress: Any,
) -> None:
    if helped:
        monkeypatch.setattr(background, "_HELPED_BYTES", 1)
    model = model_of()
    run = CheckpointStore(tmp_path, "run", compress=compress)
    run._saves._helpers = 2
    blake.taken(), change.taken()

    def save(step: int) -> None:
        run.save_async(model, step, lazy=True).wait()
        run._saver.drop_encoding()

    save(0)  # all is new
    assert_passes(blake, 2 * LARGE + SMALL)
    assert_passes(change, 2 * LARGE + SMALL)
    for step in (1, 2, 3):
        train(model)
        save(step)
        assert_passes(blake, LARGE + SMALL)
        assert_passes(change, 2 * LARGE + SMALL)  # what did not change, too: where it lies
    save(4)
    assert_passes(blake, 0)
    assert_passes(change, 2 * LARGE + SMALL)
    run.before_update()
    model["base"].add_(1)  # after steps without a change it is compared first, then copied
    save(5)
    assert_passes(blake, LARGE)
    assert_passes(change, 3 * LARGE + SMALL)
    assert shares(run)
    expected = {name: each.numpy().copy() for name, each in model.items()}
    found = run.load(5)
    run.close()
    assert all(np.array_equal(np.asarray(found[name]), each) for name, each in expected.items())


def test_a_save_reads_what_changed_three_times_to_notice_writes(
    tmp_path: Path, blake: Counted, change: Counted
) -> None:
    model, run = model_of(), CheckpointStore(tmp_path, "run", compress=None)
    blake.taken(), change.taken()
    run.save(model, 0)
    assert_passes(blake, 2 * LARGE + SMALL)
    assert_passes(change, 3 * (2 * LARGE + SMALL))
    for step in (1, 2):
        train(model)
        run.save(model, step)
        assert_passes(blake, LARGE + SMALL)
        # What did not change is compared; what did is so when its digest is made and when it is
        # written, too: others can write to it between.
        assert_passes(change, LARGE + 3 * (LARGE + SMALL))
    run.save(model, 3)
    assert_passes(blake, 0)
    assert_passes(change, 2 * LARGE + SMALL)
    assert shares(run)
