"""vLLM engines of one process that have leaves of each other's tensors, from a memory manager too.

A base, and a fine-tune of it with more rows in its vocabulary or with one block of one fp8 weight
changed. tests/engines/test_leaves.py has the other changes, and pairs of two processes.
"""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from vllm.model_executor.model_loader.reload import layerwise

from manager_runs import managers
from models import quantised
from models import tiny_checkpoints as checkpoints
from models.leaf_tunes import MIB, WIDE
from processes import process_state
from tensor_dedup import shared_bytes, unshare, verify
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.memory_manager.client.admin import Admin
from vllm_runs import engines, plain, reference_kernels, shared

pytestmark = pytest.mark.vllm

# What a manager remembers is charged, too.
RECORDS = 1 << 20
Answers = tuple[plain.Answer, ...]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Any = hf.LlamaForCausalLM
    made = checkpoints.save(
        make(hf.LlamaConfig(**WIDE)), tmp_path_factory.mktemp("managed") / "base"
    )
    engines.warm_up(made)
    return made


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    held: list[Any] = []
    yield held
    engines.drop(*held)
    held.clear()
    layerwise.LAYERWISE_INFO.clear()  # where vLLM keeps what it has reloaded
    gc.collect()


def answers_of(path: Path) -> Answers:
    """What plain vLLM answers with the same kernels."""
    with plain.kept_as("plain"):
        llm = plain.engine(path)
        found = plain.outputs(llm)
    engines.drop(llm)
    del llm
    gc.collect()
    return found


def common_bytes(one: Any, other: Any) -> int:
    """Bytes of the first engine's parameters that are memory of the second's of the same name."""
    theirs = shared.parameters(other)
    return sum(shared_bytes(mine, theirs[name]) for name, mine in shared.parameters(one).items())


def slab_pss(*llms: Any) -> int:
    """What the slabs of this process take, when every page of these models was read."""
    gc.collect()
    for llm in llms:
        shared.contents(llm)
    return process_state.slab_memory()["Pss"]


# One block of an fp8 weight.


@pytest.mark.parametrize(
    "managed",
    [pytest.param(False, id="alone", marks=pytest.mark.long), pytest.param(True, id="managed")],
)
def test_of_an_fp8_weight_with_one_changed_block_the_other_leaves_are_shared(
    llama: Path, managed: bool, tmp_path: Path, opened: list[Any]
) -> None:
    tmp_path.chmod(0o700)
    base = quantised.make("fp8 block", llama, tmp_path / "base")
    tune = checkpoints.mapped(base, tmp_path / "tune", quantised.block_changed)
    [name] = checkpoints.different(base, tune)
    old, new = (checkpoints.tensors(path)[name].view(torch.uint8) for path in (base, tune))
    assert int((old != new).sum()) == 128 * 128
    with (
        reference_kernels.installed(),
        managers.running(tmp_path) if managed else nullcontext() as manager,
    ):
        config: dict[str, Any] = {"memory_manager": str(manager.socket)} if manager else {}
        expected = [answers_of(path) for path in (base, tune)]
        first = engines.sharing(base, cpu_weights="plain", **config)
        opened.append(first)
        before = slab_pss(first)
        charged = manager.overview().totals.charged if manager else 0
        second = engines.sharing(tune, cpu_weights="plain", **config)
        opened.append(second)
        last = engines.last_report()
        # Of 12 MiB of q, k and v one leaf is the fine-tune's.
        assert last.leaf_shared_bytes == 10 * MIB
        assert last.private_bytes == 12 * MIB
        assert last.shared_bytes + last.private_bytes == last.total_bytes
        assert common_bytes(second, first) == last.shared_bytes + 10 * MIB
        more = slab_pss(first, second) - before
        assert LEAF_BYTES <= more <= 128 * 128 + LEAF_BYTES
        if manager:
            more = manager.overview().totals.charged - charged
            assert LEAF_BYTES <= more <= LEAF_BYTES + RECORDS
        assert [plain.outputs(first), plain.outputs(second)] == expected
        assert expected[0] != expected[1]
        assert verify().ok
        engines.drop(*opened)
        opened.clear()
        del first, second
        gc.collect()


# A grown vocabulary, from a manager.


def grown(source: Path, target: Path) -> Path:
    return checkpoints.grown_vocabulary(source, target, rows=256)


def other(source: Path, target: Path) -> Path:
    """Something to reload: the base with other numbers everywhere."""
    return checkpoints.mapped(source, target, lambda _, tensor: tensor * 1.5)


def test_a_managed_pair_of_one_process_lends_leaves_and_neither_changes_the_other(
    llama: Path, tmp_path: Path, opened: list[Any]
) -> None:
    tmp_path.chmod(0o700)
    tune, reloaded = grown(llama, tmp_path / "tune"), other(llama, tmp_path / "other")
    of_base, of_tune, of_other = (answers_of(path) for path in (llama, tune, reloaded))
    assert len({of_base, of_tune, of_other}) == 3
    with managers.running(tmp_path) as manager:
        config: dict[str, Any] = {"cpu_weights": "plain", "memory_manager": str(manager.socket)}
        base = engines.sharing(llama, **config)
        opened.append(base)
        charged = manager.overview().totals.charged
        first = engines.sharing(tune, **config)
        opened.append(first)
        last = engines.last_report()
        assert last.leaf_shared_bytes == 32 * MIB  # embedding and head, but for their new rows
        assert last.shared_bytes + last.private_bytes == last.total_bytes
        assert common_bytes(first, base) == last.shared_bytes + last.leaf_shared_bytes
        more = manager.overview().totals.charged - charged
        assert MIB <= more <= 2 * (MIB // 2 + LEAF_BYTES) + RECORDS
        second = engines.sharing(tune, **config)
        opened.append(second)
        assert shared.everything(first, second)
        assert engines.last_report().private_bytes == 0
        assert manager.overview().totals.charged <= charged + more + RECORDS
        assert [plain.outputs(llm) for llm in opened] == [of_base, of_tune, of_tune]

        # A writer to what is lent, leaf by leaf, has pages of its own: the borrower and the lender.
        for llm, rest in ((first, (base, second)), (base, (first, second))):
            before = [shared.contents(each) for each in rest]
            with torch.no_grad():
                for name, each in shared.parameters(llm).items():
                    if "embed_tokens" in name or "lm_head" in name:
                        each[: LEAF_BYTES // (2 * 1024)].zero_()
            assert [shared.contents(each) for each in rest] == before
        assert plain.outputs(base) != of_base
        assert plain.outputs(second) == of_tune
        assert verify().ok

        # So has one that is reloaded, whose memory others go on using, and one that stops sharing.
        shared.reload(base, reloaded)
        assert plain.outputs(base) == of_other
        assert not common_bytes(first, base)
        assert plain.outputs(second) == of_tune
        assert unshare(first) >= 32 * MIB
        assert not common_bytes(first, second)
        assert plain.outputs(second) == of_tune
        assert verify().ok

        # Of the base only what the fine-tune has of it is leased by now, and not to be evicted.
        needed = sum(each.nbytes for each in shared.parameters(second).values())
        with Admin(manager.socket) as admin:
            admin.evict(str(llama))
            assert admin.totals().charged >= needed
        assert plain.outputs(second) == of_tune
        third = engines.sharing(llama, **config)
        opened.append(third)
        assert plain.outputs(third) == of_base
        assert common_bytes(second, third) == last.shared_bytes + last.leaf_shared_bytes
        engines.drop(*opened)
        opened.clear()
        del base, first, second, third, llm, rest, each
        layerwise.LAYERWISE_INFO.clear()
        gc.collect()
        managers.until(lambda: manager.overview().totals.leases == 0)
