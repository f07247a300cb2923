"""Families of tensors on a fake GPU, in any order of events, are what private copies would be."""

import gc
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpu_runs import gpus
from manager_runs import managers
from manager_runs.sleepers import SleepyEngine
from tensor_dedup import shared_bytes
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.cuda.blocks import BLOCK_BYTES, BLOCKS_FROM, TensorInBlocks
from tensor_dedup.loader.cuda.residents import DeviceResident, Views
from tensor_dedup.loader.cuda.tensors import CPU
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.cuda.driver import Access
from vllm_runs.lent_tensors import ROWS_OF_A_LEAF, rows

MOST = 5
# What has failed keeps its slabs, so whatever is tried after it fails, too, and for that alone.
UNTIL_ONE_FAILS: dict[str, Any] = {"phases": [Phase.generate], "report_multiple_bugs": False}
ROWS_OF_A_BLOCK = BLOCK_BYTES // LEAF_BYTES * ROWS_OF_A_LEAF


class CudaModel:
    """A tensor as a model of this engine sees it, and what it must be."""

    def __init__(self, engine: SleepyEngine, content: torch.Tensor) -> None:
        [resident] = engine._residents([content])
        self.engine = engine
        self.shared = resident.leaf_shared_bytes
        blocks = resident.blocks if isinstance(resident, TensorInBlocks) else ()
        self.blocks = [(memory(each), each.nbytes) for each in blocks]
        self.views = Views(CPU)
        self.tensor = self.views.tensor(resident)
        self.content = content
        self.written = False


class CudaFamilies(RuleBasedStateMachine):
    """Bases, fine-tunes, grown and shrunk ones, written, dropped and evicted, of two processes."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.manager = self.stack.enter_context(gpus.running(folder, "--budget", str(512 << 20)))
        # With a manager, both; and a process that has none.
        self.engines = [SleepyEngine(folder, managed=n < 2, tier=False) for n in range(3)]
        self.models: list[CudaModel] = []

    def add(self, engine: int, content: torch.Tensor) -> CudaModel:
        self.models.append(CudaModel(self.engines[engine], content))
        return self.models[-1]

    def choose(self, number: int) -> CudaModel:
        return self.models[number % len(self.models)]

    @initialize(base=st.integers(0, 1), tune=st.integers(0, 1))
    def two_have_something_in_common(self, base: int, tune: int) -> None:
        content = rows(17, 1)
        assert self.add(base, content).shared == 0
        changed = content.clone()
        changed[-1, 0] += 1
        assert self.add(tune, changed).shared == 2 * BLOCK_BYTES

    @precondition(lambda self: len(self.models) < MOST)
    @rule(engine=st.integers(0, 2), seed=st.integers(1, 2))
    def base(self, engine: int, seed: int) -> None:
        self.add(engine, rows(17, seed))

    @precondition(lambda self: 0 < len(self.models) < MOST)
    @rule(
        engine=st.integers(0, 2),
        number=st.integers(0, MOST),
        blocks=st.lists(st.integers(0, 2), max_size=2),
        more=st.sampled_from([0, 0, 1, -1, 40, -40, -ROWS_OF_A_LEAF]),
    )
    def fine_tune(self, engine: int, number: int, blocks: Sequence[int], more: int) -> None:
        origin = self.choose(number)
        content = origin.content
        content = content[:more] if more < 0 else torch.cat([content, content[:more]])
        content = content.clone()
        for block in blocks:
            content[block * ROWS_OF_A_BLOCK :][:1] += 1
        made = self.add(engine, content)
        managed = {each.device is not None for each in (origin.engine, made.engine)}
        near = origin.engine is made.engine or managed == {True}
        event(f"near: {near}, shared in part: {made.shared > 0}")
        if near and not origin.written and not torch.equal(content, origin.content):
            common = in_common(content, origin.content)
            theirs = {block for block, _ in origin.blocks}
            assert sum(nbytes for block, nbytes in made.blocks if block in theirs) == common
            if origin.engine is made.engine:
                assert shared_bytes(made.tensor, origin.tensor) == common

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, MOST), row=st.integers(0, 2000))
    def write(self, number: int, row: int) -> None:
        model = self.choose(number)
        model.views.make_private()
        model.written = True
        model.content = model.content.clone()
        for each in (model.tensor, model.content):
            each[row % len(each)] = row

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, MOST))
    def drop(self, number: int) -> None:
        self.models.remove(self.choose(number))
        self.collect()

    def collect(self) -> None:
        gc.collect()
        for each in self.engines:
            each.gpu.gpu.reap(wait=True)

    @rule()
    def evict(self) -> None:
        with Admin(self.manager.socket) as admin:
            admin.evict("base")

    @invariant()
    def every_model_is_what_a_private_copy_is(self) -> None:
        for each in self.models:
            assert torch.equal(each.tensor, each.content)
            access = each.engine.fake.access(each.tensor.data_ptr())
            assert access == (Access.READ_WRITE if each.written else Access.READ)

    def teardown(self) -> None:
        self.models.clear()
        with self.stack:
            for each in self.engines:
                each.close()
            managers.until(lambda: self.manager.overview().totals.leases == 0)
            self.evict()
            assert self.manager.overview().totals.resident_bytes == gpus.in_use() == 0


def blocks_in(content: torch.Tensor) -> list[torch.Tensor]:
    starts = range(0, len(content), ROWS_OF_A_BLOCK)
    return [content[start : start + ROWS_OF_A_BLOCK] for start in starts]


def memory(block: DeviceResident) -> tuple[int, int]:
    """What tells a block's memory from other memory, in every process that has it."""
    found = os.fstat(block.slabs[0].source.fileno)
    return found.st_dev, found.st_ino


def in_common(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many bytes lie in blocks that both have, wherever."""
    if min(one.nbytes, other.nbytes) < BLOCKS_FROM:
        return 0
    theirs = blocks_in(other)
    return sum(
        block.nbytes for block in blocks_in(one) if any(torch.equal(block, each) for each in theirs)
    )


def test_any_order_of_events_gives_what_private_copies_are() -> None:
    few = settings(max_examples=3, stateful_step_count=10, deadline=None, derandomize=True)
    run_state_machine_as_test(CudaFamilies, settings=settings(few, **UNTIL_ONE_FAILS))


@pytest.mark.long
def test_any_order_of_events_gives_what_private_copies_are_for_long() -> None:
    many = settings(max_examples=40, stateful_step_count=30, deadline=None, database=None)
    run_state_machine_as_test(CudaFamilies, settings=settings(many, **UNTIL_ONE_FAILS))
