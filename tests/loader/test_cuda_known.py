"""Of a known fine-tune a load on a fake GPU reads the blocks that nobody has, and no others."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import deferring
import gpus
from lent_tensors import changed, rows
from sleepers import SleepyEngine
from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.digest import (
    BLOCK_BYTES,
    block_places,
    digests_by_place,
    leaf_digests,
    leaf_places,
)
from tensor_dedup.loader.checkpoint_io.sources import SourceTensor, StaleHintError
from tensor_dedup.loader.cuda.manager_residents import device_session
from tensor_dedup.loader.cuda.provider import GpuProvider
from tensor_dedup.loader.deferred.evaluate import Scratch
from tensor_dedup.loader.deferred.session import LoadSession
from tensor_dedup.loader.residents.manager import ManagerResidents
from tensor_dedup.loader.residents.resident import tensor_bytes

# Three blocks and a leaf and a half; in its last block nothing is a whole number of leaves.
LEAVES = 25.5
BASE = rows(LEAVES, 1)
TUNE = changed(BASE, 9)  # in its second block
# Fused, k first: q begins in the middle of a block.
K, Q = rows(20, 3), rows(16, 2)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., SleepyEngine]]:
    tmp_path.chmod(0o700)
    made: list[SleepyEngine] = []
    with gpus.running(tmp_path, "--budget", str(512 << 20)):

        def make(*, managed: bool) -> SleepyEngine:
            made.append(SleepyEngine(tmp_path, managed=managed, tier=False))
            return made[-1]

        yield make
        for each in made:
            each.close()


def remember(source: SourceTensor, tensor: torch.Tensor, blocks: torch.Tensor) -> None:
    """Know of a source what is known of these tensors of its size."""
    nbytes = tensor.nbytes
    found = digests_by_place(0, nbytes, leaf_digests(tensor_bytes(tensor)))
    others = digests_by_place(0, nbytes, leaf_digests(tensor_bytes(blocks)))
    source.digest = found[0, nbytes]
    source.leaves = tuple(found[place] for place in leaf_places(0, nbytes))
    source.blocks = tuple(others[place] for place in block_places(0, nbytes))


def load(
    engine: SleepyEngine,
    path: Path,
    *,
    known: bool,
    wrong: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    **config: Any,
) -> tuple[LoadSession, int]:
    """Load the tensors of a file side by side as one; how many bytes of it were read.

    `wrong` is what is remembered of a file of one tensor, and `blocks` of its blocks.
    """
    tensors = load_file(path)
    whole = torch.cat([tensors[name] for name in sorted(tensors)])

    def fuse(model: Any, weights: deferring.Weights) -> None:
        at = 0
        for name in sorted(weights):
            model.fused.data[at : at + len(weights[name])].copy_(weights[name])
            at += len(weights[name])

    with deferring.deferred(deferring.module(fused=torch.zeros_like(whole)), path, fuse) as run:
        for name, source in run.file.tensors.items() if known else ():
            truth = tensors[name] if wrong is None else wrong
            remember(source, truth, truth if blocks is None else blocks)
        session = device_session(engine.device, engine.gpu.gpu, "base") if engine.device else None
        provider = GpuProvider(engine.gpu, ManagerResidents(session))
        made = LoadSession(
            TensorDedupConfig(**config), run.reader, Scratch(), run.evaluator, provider
        )
        try:
            made.expect(list(run.parameters.values()))
            made.share(list(run.parameters.values()))
        finally:
            made.close()
        assert provider.not_lent is provider.not_by_leaf is None
        engine.tensors.append(run.model.get_parameter("fused").data)
        engine.wanted.append(whole)
        assert engine.is_right()
        return made, run.reader.counters.bytes_read


@pytest.mark.parametrize("managed", [False, True])
def test_a_known_fine_tune_reads_the_blocks_that_differ(
    engine: Callable[..., SleepyEngine], tmp_path: Path, managed: bool
) -> None:
    one = engine(managed=managed)
    base = deferring.save(tmp_path / "base.safetensors", {"w": BASE})
    tune = deferring.save(tmp_path / "tune.safetensors", {"w": TUNE})
    _, read = load(one, base, known=True)
    assert read == BASE.nbytes  # nobody has any of it
    other = engine(managed=True) if managed else one
    session, read = load(other, tune, known=True)
    assert read == BLOCK_BYTES
    assert session.ledger.leaf_shared_bytes == TUNE.nbytes - BLOCK_BYTES
    session, read = load(other, tune, known=True)
    assert (read, session.ledger.leaf_shared_bytes) == (0, 0)  # there as a whole


def test_a_grown_one_reads_its_last_block_and_what_is_new(
    engine: Callable[..., SleepyEngine], tmp_path: Path
) -> None:
    one = engine(managed=False)
    grown = torch.cat([BASE, rows(1, 5)])
    load(one, deferring.save(tmp_path / "base.safetensors", {"w": BASE}), known=True)
    _, read = load(one, deferring.save(tmp_path / "grown.safetensors", {"w": grown}), known=True)
    assert read == grown.nbytes - 3 * BLOCK_BYTES


def test_of_a_fused_one_blocks_that_are_of_two_sources_are_read(
    engine: Callable[..., SleepyEngine], tmp_path: Path
) -> None:
    one = engine(managed=True)
    load(one, deferring.save(tmp_path / "base.safetensors", {"k": K, "q": Q}), known=True)
    path = deferring.save(tmp_path / "tune.safetensors", {"k": K, "q": changed(Q, 15)})
    session, read = load(one, path, known=True)
    # k comes first: two blocks of it are the whole's. The next has its end and the beginning of q.
    assert read == (K.nbytes - 2 * BLOCK_BYTES) + Q.nbytes
    assert session.ledger.leaf_shared_bytes == 4 * BLOCK_BYTES


def test_wrong_hints_are_found_out(engine: Callable[..., SleepyEngine], tmp_path: Path) -> None:
    one = engine(managed=False)
    load(one, deferring.save(tmp_path / "base.safetensors", {"w": BASE}), known=True)
    path = deferring.save(tmp_path / "tune.safetensors", {"w": TUNE})
    # Of what is read.
    with pytest.raises(StaleHintError, match="leaf 9"):
        load(one, path, known=True, wrong=changed(TUNE, 9))
    # Of what is not: by its blocks it is the base, by its digest it is not.
    with pytest.raises(StaleHintError, match="it hashes to"):
        load(one, path, known=True, wrong=TUNE, blocks=BASE)
    assert gpus.in_use() == BASE.nbytes


def test_an_audit_reads_what_was_not_read(
    engine: Callable[..., SleepyEngine], tmp_path: Path
) -> None:
    """What is remembered is true of other bytes: of a block that somebody has, and nobody reads."""
    one = engine(managed=False)
    load(one, deferring.save(tmp_path / "base.safetensors", {"w": BASE}), known=True)
    path = deferring.save(tmp_path / "tune.safetensors", {"w": changed(TUNE, 25)})
    with pytest.raises(StaleHintError, match="it hashes to"):
        load(one, path, known=True, wrong=TUNE, audit=1.0)
