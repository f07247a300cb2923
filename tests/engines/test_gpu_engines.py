"""vLLM engines whose weights are a GPU's shared memory, over the fake driver.

The fake's memory is host memory, so vLLM's CPU engine computes with it; every mapping is read-only,
and a write to one would end this process.
"""

import gc
import os
from collections import Counter
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import nn
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform
from vllm.utils import mem_utils

from gpu_runs import gpus
from gpu_runs.fake_driver import GRANULARITY, FakeDriver, RefusingDriver
from gpu_runs.gpu_engines import GPUS, PLACE, Sleepers, accesses, addresses, on
from gpu_runs.gpu_loads import Lender, key_of, weights
from manager_runs import managers
from models import leaf_tunes, quantised
from models import tiny_checkpoints as checkpoints
from tensor_dedup import report, shared_bytes, shares_memory, unshare, verify
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import AuditError, ConfigError, UnsupportedError
from tensor_dedup.loader import process_state
from tensor_dedup.loader.checkpoint_io.sources import SourceFile
from tensor_dedup.loader.cuda.blocks import BLOCK_BYTES
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.cuda.residents import DeviceRequest, copy_of
from tensor_dedup.loader.cuda.transfers import BUFFER_BYTES, MOST_BUFFERS, RING
from tensor_dedup.loader.deferred.evaluate import Scratch
from tensor_dedup.loader.deferred.session import LoadSession
from tensor_dedup.loader.deferred.trace import UntraceableError
from tensor_dedup.loader.not_shared import WhyRead
from tensor_dedup.loader.residents.slab import OutOfMemoryError
from tensor_dedup.memory_manager.client import connect
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.client.names import checkpoint_name
from tensor_dedup.memory_manager.cuda.driver import Access, Result, refused
from tensor_dedup.memory_manager.errors import MemoryManagerError
from tensor_dedup.patches.vllm.run import LoadRun
from tensor_dedup.types import TensorSpec
from vllm_runs import engines, loads, plain, shared

pytestmark = pytest.mark.vllm


class FakeGenerators:
    """Of torch's module of a GPU what has to do with random numbers."""

    def __init__(self) -> None:
        self.one = torch.Generator().manual_seed(5)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.one.get_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.one.set_state(states[0])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Pair:
    pair = checkpoints.make("llama", tmp_path_factory.mktemp("gpu-engines"))
    engines.warm_up(pair.base)
    return pair


def tokens_of(path: Path) -> list[Any]:
    llm = plain.engine(path)
    found = plain.tokens(plain.outputs(llm))
    engines.drop(llm)
    del llm
    gc.collect()
    return found


def test_the_second_engine_costs_what_differs_and_both_answer_as_plain_ones(
    llama: checkpoints.Pair, driver: gpus.Full
) -> None:
    expected = [tokens_of(path) for path in (llama.base, llama.fine_tune)]
    with on(driver):
        base = engines.sharing(llama.base)
        first = gpus.in_use()
        assert set(accesses(base, driver).values()) == {Access.READ}
        unique = sum(each.nbytes for each in shared.parameters(base).values())
        assert unique <= first <= unique + 2 * GRANULARITY
        # What is resident needs no room: so little is left that nothing else would fit.
        different = checkpoints.different(llama.base, llama.fine_tune)
        driver.room = first + unique // 2
        tuned = engines.sharing(llama.fine_tune)
        last = engines.last_report()
        assert last.shared_bytes > last.total_bytes / 2
        assert gpus.in_use() - first <= last.private_bytes + 2 * GRANULARITY < unique
        assert not last.skipped, last.skipped
        together = shared.shared_parameters(tuned, base)
        assert together
        assert len(together) < len(shared.parameters(base)), different
        assert [plain.tokens(plain.outputs(llm)) for llm in (base, tuned)] == expected
        assert verify().ok
        assert verify().residents >= len(shared.parameters(base))
        engines.drop(base, tuned)
        del base, tuned


def test_a_known_model_is_not_read_again_when_settings_have_changed_since(
    llama: checkpoints.Pair, driver: gpus.Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's monitor of kernels sets this variable once the first engine of a process is warm."""
    engines.leave_alone(llama.base / checkpoints.WEIGHTS)
    with on(driver), loads.prepared(llama.base):
        first = loads.load(llama.base, {})
        assert engines.last_report().bytes_read == checkpoints.nbytes(llama.base)
        monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", "1")
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        second = loads.load(llama.base, {})
        last = engines.last_report()
        assert last.known
        assert last.shared_bytes == last.total_bytes
        fused = [name for name in second.parameters() if "qkv_proj" in name]
        assert fused
        assert last.bytes_read == last.bytes_hashed == 0
        assert last.known_reads == []
        assert second.parameters() == first.parameters()
        del first, second


def test_the_report_says_which_tensors_of_a_known_model_were_read_and_why(
    llama: checkpoints.Pair, driver: gpus.Full, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = checkpoints.mapped(llama.base, tmp_path / "base", lambda _, tensor: tensor * 2)
    cast = checkpoints.mapped(base, tmp_path / "cast", lambda _, tensor: tensor.float())
    paths = base, cast
    engines.leave_alone(*(path / checkpoints.WEIGHTS for path in paths))
    every = [checkpoints.nbytes(path) for path in paths]

    def reads(path: Path, **config: Any) -> dict[str, int]:
        model = loads.load(path, config)
        kept.append(model)
        last = engines.last_report()
        assert sum(group["bytes"] for group in last.known_reads) in (0, last.bytes_read)
        for group in last.known_reads:
            largest = group["largest"]
            assert len(largest) == min(group["tensors"], 8)
            assert {name for name, _ in largest} <= set(model.parameters())
            assert [size for _, size in largest] == sorted((n for _, n in largest), reverse=True)
        return {group["reason"]: group["bytes"] for group in last.known_reads}

    kept: list[loads.Model] = []
    with on(driver) as gpu, loads.prepared(llama.base):
        assert reads(base) == reads(cast) == {}  # nothing is known yet
        assert engines.last_report().bytes_read == every[1]
        assert reads(base, audit=1.0) == {WhyRead.COMPARED: every[0]}
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        assert reads(cast) == {WhyRead.FOUND_AFTERWARDS: every[1]}
        kept.clear()
        gc.collect()
        assert gpu.gpu.reap(wait=True) == 0
        # But the norms, which are all equal: one is read, and the others find it.
        assert set(found := reads(base)) == {WhyRead.NOT_RESIDENT}
        assert found[WhyRead.NOT_RESIDENT] > 0.95 * every[0]
        kept.clear()


def test_of_layers_that_a_merge_repeats_one_is_read_where_they_are_known(
    llama: checkpoints.Pair, driver: gpus.Full, tmp_path: Path
) -> None:
    """Nothing of it is resident when it is loaded again."""
    tensors = load_file(llama.base / checkpoints.WEIGHTS)

    def repeat(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensors[name.replace("layers.1.", "layers.0.")].clone()

    merge = checkpoints.mapped(llama.base, tmp_path / "merge", repeat)
    engines.leave_alone(merge / checkpoints.WEIGHTS)
    repeated = {name: each for name, each in tensors.items() if "layers.1." in name}
    distinct = {name: each for name, each in tensors.items() if name not in repeated}
    assert len(repeated) > 8
    with on(driver) as gpu, loads.prepared(llama.base):
        expected = loads.load(merge, {}).parameters()  # and dropped
        gc.collect()
        assert gpu.gpu.reap(wait=True) == 0
        assert gpus.in_use() == 0
        again = loads.load(merge, {})
        last = engines.last_report()
        assert last.known
        assert 0 < last.bytes_read <= sum(each.nbytes for each in distinct.values())
        assert again.parameters() == expected
        del again


def large_llama(folder: Path, rows: int) -> Path:
    """Fused tensors whose parts begin at leaves, and an embedding of so many rows in blocks."""
    torch.manual_seed(3)
    config = hf.LlamaConfig(
        vocab_size=rows,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model: Any = hf.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return checkpoints.save(model.to(torch.bfloat16), folder)


def test_a_first_load_reads_hashes_and_copies_each_byte_once(tmp_path: Path) -> None:
    """Counted, with copies that are made as late as CUDA allows."""
    rows = 20_001  # which vLLM pads to 20,032
    path = large_llama(tmp_path / "large", rows)
    nbytes = checkpoints.nbytes(path)
    engines.leave_alone(path / checkpoints.WEIGHTS)
    driver = gpus.Full(late=True)
    scratch: list[int] = []
    with loads.prepared(path):
        copy = checkpoints.same(path, tmp_path / "copy")  # of which nothing becomes known
        expected = loads.load(copy, {"cpu_weights": "plain"}).parameters()
    with on(driver) as gpu, loads.prepared(path):
        with mock.patch.object(Scratch, "take", side_effect=scratch.append):
            model = loads.load(path, {})
        last = engines.last_report()
        finals = sum(p.nbytes for p in {id(p): p for p in model.module.parameters()}.values())
        assert model.parameters() == expected
        assert set(accesses_of(model, driver)) == {Access.READ}
        traffic = Counter(driver.traffic)
        assert (last.bytes_read, traffic["copy_in"]) == (nbytes, finals)
        assert traffic["copy_out"] == traffic["copy"] == 0
        assert scratch == []
        assert traffic["page_lock"] <= RING.nbytes <= MOST_BUFFERS * BUFFER_BYTES
        assert traffic["synchronize"] == 0
        # The last rows of an embedding and of a head, and the zeros behind them, are in one leaf.
        padding, rest = (finals - nbytes) // 2, rows * 2048 % LEAF_BYTES
        assert padding
        assert last.bytes_hashed == nbytes + 2 * (padding + rest)
        # The same again, and known: nothing of it moves.
        again = loads.load(path, {})
        last = engines.last_report()
        assert (last.bytes_read, last.bytes_hashed) == (0, 0)
        assert driver.traffic["copy_in"] == finals
        assert again.parameters() == expected
        del model, again
        gc.collect()
        assert gpu.gpu.reap(wait=True) == 0
        gc.collect()
    GPUS.clear()
    assert (driver.left(), gpus.in_use()) == ({}, 0)


@pytest.mark.parametrize("managed", [False, True])
def test_a_known_fine_tune_reads_the_blocks_that_changed(
    driver: gpus.Full, tmp_path: Path, managed: bool
) -> None:
    """Of an embedding of 40 MiB, in three blocks, a few rows in the second; and a projection."""
    base = large_llama(tmp_path / "base", 20_480)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "embed_tokens" in name:
            tensor[BLOCK_BYTES // 2048 + 5] += 1
        return tensor * 2 if "layers.1.mlp.down_proj" in name else tensor

    tune = checkpoints.mapped(base, tmp_path / "tune", change)
    engines.leave_alone(base / checkpoints.WEIGHTS, tune / checkpoints.WEIGHTS)
    tmp_path.chmod(0o700)
    running = gpus.running(tmp_path, "--budget", str(512 << 20)) if managed else nullcontext()
    config = {"memory_manager": str(tmp_path / "m.sock")} if managed else {}
    with running as manager, on(driver) as gpu, loads.prepared(base):
        expected = loads.load(tune, config).parameters()  # and dropped; it is known from now on
        gc.collect()
        assert gpu.gpu.reap(wait=True) == 0
        if manager is not None:
            with Admin(manager.socket) as admin:
                assert admin.evict(checkpoint_name(str(tune))).nbytes > 0
            assert manager.overview().totals.resident_bytes == 0
        first = loads.load(base, config)
        assert engines.last_report().bytes_read > 0
        copied = driver.traffic["copy_in"]
        with on(driver) if managed else nullcontext():  # as if it were another process
            second = loads.load(tune, config)
            last = engines.last_report()
            changed = BLOCK_BYTES + 1024 * 2048 * 2
            assert last.known
            assert last.bytes_read == last.bytes_hashed == changed
            assert driver.traffic["copy_in"] - copied == changed
            assert last.leaf_shared_bytes == 20_480 * 2048 - BLOCK_BYTES
            assert second.parameters() == expected
            del first, second
            gc.collect()
            for each in GPUS:
                each.gpu.reap(wait=True)


def accesses_of(model: loads.Model, driver: FakeDriver) -> list[Access]:
    return [driver.access(p.data_ptr()) for p in model.module.parameters() if p.numel()]


def test_a_file_that_ends_early_leaves_nothing_on_the_gpu(
    driver: gpus.Full,
    tmp_path: Path,
    llama: checkpoints.Pair,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = checkpoints.same(llama.base, tmp_path / "cut")
    with on(driver) as gpu, loads.prepared(llama.base):
        fill = SourceFile._read

        def short(
            file: SourceFile, parts: list[memoryview], spec: TensorSpec, at: int, offset: int
        ) -> int:
            return fill(file, [] if "down_proj" in spec.name else parts, spec, at, offset)

        with mock.patch.object(SourceFile, "_read", short):
            model = loads.load(path, {})
        assert f"{path / checkpoints.WEIGHTS}: tensor" in caplog.text
        assert "truncated while it was open" in caplog.text
        # vLLM has loaded it by itself.
        assert DEVICES.known(next(model.module.parameters())) is None
        gc.collect()
        assert gpu.gpu.reap(wait=True) == 0
        assert gpus.in_use() == 0


def test_what_finds_no_room_with_its_files_is_read_again_when_that_room_is_free(
    driver: gpus.Full, tmp_path: Path, llama: checkpoints.Pair
) -> None:
    """So that what others have is found where only what differs has room."""
    path = checkpoints.same(llama.base, tmp_path / "copy")
    engines.leave_alone(path / checkpoints.WEIGHTS)
    in_use: list[int] = []
    share_missed = LoadSession._share_missed

    with loads.prepared(path):
        expected = loads.load(path, {"cpu_weights": "plain"}).parameters()
    with on(driver) as gpu, loads.prepared(llama.base):

        def refuse(*_: int) -> None:
            raise refused("cuMemMap", Result.OUT_OF_MEMORY, 1)

        def again(*given: Any) -> None:
            full.stop()
            in_use.append(gpus.in_use())
            share_missed(*given)

        full = mock.patch.object(driver, "map", refuse)
        full.start()
        with mock.patch.object(LoadSession, "_share_missed", again):
            found = loads.load(path, {})
        assert in_use[0] == 0
        assert found.parameters() == expected
        assert set(accesses_of(found, driver)) == {Access.READ}
        del found
        gc.collect()
        assert gpu.gpu.reap(wait=True) == 0


def test_a_remembered_digest_that_is_wrong_is_noticed_while_it_is_uploaded(
    driver: gpus.Full, tmp_path: Path, llama: checkpoints.Pair
) -> None:
    path = checkpoints.same(llama.base, tmp_path / "forged")
    engines.leave_alone(path / checkpoints.WEIGHTS)
    with on(driver) as gpu, loads.prepared(llama.base):
        first = loads.load(path, {})
        expected = first.parameters()
        del first
        gc.collect()
        assert gpu.gpu.reap(wait=True) == 0
        names = ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight")
        leaf_tunes.forge(path, *(leaf_tunes.whole(path, name) for name in names))
        found = loads.load(path, {})
        # The load begins again without hints.
        assert found.parameters() == expected
        assert not engines.last_report().known
        del found


def test_one_that_is_reloaded_leaves_the_other_and_keeps_its_addresses(
    llama: checkpoints.Pair, driver: gpus.Full
) -> None:
    tuned_alone = tokens_of(llama.fine_tune)
    with on(driver):
        first, second = engines.sharing(llama.base), engines.sharing(llama.base)
        assert shared.everything(first, second)
        assert engines.last_report().bytes_materialised == 0
        before = shared.contents(second)
        places = {n: p.data_ptr() for n, p in shared.parameters(first).items()}
        assert unshare(first) >= sum(len(each) for each in before.values())
        assert {n: p.data_ptr() for n, p in shared.parameters(first).items()} == places
        assert set(accesses(first, driver).values()) == {Access.READ_WRITE}
        assert not shared.shared_parameters(first, second)
        shared.reload(first, llama.fine_tune)
        assert plain.tokens(plain.outputs(first)) == tuned_alone
        assert shared.contents(second) == before
        assert unshare(first) == 0
        engines.drop(first, second)
        del first, second


def test_a_reload_that_finds_no_room_is_refused_before_anything_moves(
    llama: checkpoints.Pair, driver: gpus.Full
) -> None:
    """Graphs have captured addresses: what moves would leave them to read the old weights."""
    tuned_alone = tokens_of(llama.fine_tune)
    with on(driver):
        first, second = engines.sharing(llama.base), engines.sharing(llama.base)
        before = shared.contents(first)
        places = {n: p.data_ptr() for n, p in shared.parameters(first).items()}
        driver.room = gpus.in_use()
        for write in (lambda llm: shared.reload(llm, llama.fine_tune), unshare):
            with pytest.raises(OutOfMemoryError, match="nothing moved"):
                write(first)
            assert {n: p.data_ptr() for n, p in shared.parameters(first).items()} == places
            assert shared.contents(first) == before
            assert shared.everything(first, second)
            assert set(accesses(first, driver).values()) == {Access.READ}
        driver.room = 1 << 40
        shared.reload(first, llama.fine_tune)
        assert {n: p.data_ptr() for n, p in shared.parameters(first).items()} == places
        assert plain.tokens(plain.outputs(first)) == tuned_alone
        assert shared.contents(second) == before
        engines.drop(first, second)
        del first, second


def test_a_load_that_falls_back_leaves_random_numbers_as_plain_loading_does(
    llama: checkpoints.Pair, driver: gpus.Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGenerators()
    monkeypatch.setattr(process_state, "accelerator", lambda: gpu)
    begun = gpu.get_rng_state_all()

    def finish(self: LoadRun, model: nn.Module) -> None:
        torch.rand(3, generator=gpu.one)  # as a constructor may
        raise UntraceableError("it does not want to")

    monkeypatch.setattr(LoadRun, "finish", finish)
    with on(driver):
        llm = engines.sharing(llama.base)
        assert ("<model>", "it does not want to") in engines.last_report().skipped
        assert torch.equal(gpu.get_rng_state_all()[0], begun[0])
        engines.drop(llm)
        del llm


def test_what_vllm_processes_on_the_device_is_shared_by_content(
    tmp_path: Path, driver: gpus.Full, llama: checkpoints.Pair
) -> None:
    path = quantised.make("w8a8", llama.base, tmp_path / "quantised")
    expected = tokens_of(path)
    with on(driver):
        first = engines.sharing(path)
        made = gpus.in_use()
        assert engines.last_report().bytes_hashed > 0
        second = engines.sharing(path)
        last = engines.last_report()
        assert gpus.in_use() == made
        assert last.shared_bytes > 0.99 * last.total_bytes, last.skipped
        assert [n for n in shared.shared_parameters(first, second) if "qkv_proj.weight" in n]
        assert plain.tokens(plain.outputs(second)) == expected
        engines.drop(first, second)
        del first, second


def test_a_gpu_that_has_no_room_gets_private_weights_and_the_reason_is_said(
    llama: checkpoints.Pair, driver: gpus.Full
) -> None:
    expected = tokens_of(llama.base)
    refusing = RefusingDriver(driver)
    with on(refusing):
        driver.room = 0
        llm = engines.sharing(llama.base)
        reasons = {reason for _, reason in engines.last_report().skipped}
        assert reasons
        assert all("the GPU has no" in reason for reason in reasons)
        assert set(accesses(llm, driver).values()) == {Access.NONE}
        assert plain.tokens(plain.outputs(llm)) == expected
        engines.drop(llm)
        del llm


# Embedding and head are three blocks each; with 256 more rows, half a MiB of a fourth.
_LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 3 * BLOCK_BYTES // 2048,
    "max_position_embeddings": 512,
}


def with_large_vocabulary(folder: Path) -> tuple[Path, Path]:
    """A base, and one with 256 more rows."""
    make: Any = hf.LlamaForCausalLM
    base = checkpoints.save(make(hf.LlamaConfig(**_LARGE)), folder / "base")
    engines.warm_up(base)
    return base, checkpoints.grown_vocabulary(base, folder / "grown", rows=256)


def test_an_audit_reaches_the_blocks_of_others(driver: gpus.Full, tmp_path: Path) -> None:
    base, grown = with_large_vocabulary(tmp_path)
    with on(driver) as gpu:
        llm = engines.sharing(base)
        blocks = list(gpu._blocks.values())
        assert len(blocks) == 6
        for each in blocks:  # past the protection of every mapping
            os.pwrite(each.slabs[0].source.fileno, b"spoiled", 0)
        del blocks, each
        with pytest.raises(AuditError):
            engines.sharing(grown, audit=1.0)
        engines.drop(llm)
        del llm


@pytest.mark.parametrize("managed", [False, True], ids=["alone", "managed"])
def test_a_grown_vocabulary_costs_its_new_rows_and_a_writer_has_its_own(
    driver: gpus.Full, tmp_path: Path, managed: bool
) -> None:
    tmp_path.chmod(0o700)
    base, grown = with_large_vocabulary(tmp_path)
    other = checkpoints.mapped(grown, tmp_path / "other", lambda _, tensor: tensor * 1.5)
    expected = [tokens_of(path) for path in (base, grown, other)]
    budget = "--budget", str(1 << 30)
    lender = gpus.running(tmp_path, *budget) if managed else nullcontext()
    config: dict[str, Any] = {"memory_manager": str(tmp_path / "m.sock")} if managed else {}
    with lender as manager, on(driver):
        first = engines.sharing(base, **config)
        before = manager.overview().totals.resident_bytes if manager else gpus.in_use()
        second = engines.sharing(grown, **config)
        last = engines.last_report()
        assert not last.skipped, last.skipped
        assert last.leaf_shared_bytes == 6 * BLOCK_BYTES
        assert last.bytes_materialised == last.private_bytes - 6 * BLOCK_BYTES == 1 << 20
        after = manager.overview().totals.resident_bytes if manager else gpus.in_use()
        assert after - before == 1 << 20  # and nothing else
        theirs = shared.parameters(first)
        common = [
            shared_bytes(mine, theirs[name]) for name, mine in shared.parameters(second).items()
        ]
        assert sum(common) == last.shared_bytes + last.leaf_shared_bytes
        assert verify().ok
        assert [plain.tokens(plain.outputs(llm)) for llm in (first, second)] == expected[:2]
        shared.reload(second, other)
        assert set(accesses(second, driver).values()) == {Access.READ_WRITE}
        assert plain.tokens(plain.outputs(second)) == expected[2]
        assert set(accesses(first, driver).values()) == {Access.READ}
        assert plain.tokens(plain.outputs(first)) == expected[0]
        third = engines.sharing(grown, **config)
        assert plain.tokens(plain.outputs(third)) == expected[1]
        assert unshare(first) >= 6 * BLOCK_BYTES
        assert plain.tokens(plain.outputs(first)) == expected[0]
        assert plain.tokens(plain.outputs(third)) == expected[1]
        assert verify().ok
        engines.drop(first, second, third)
        del first, second, third, theirs


def external_bytes(llm: Any) -> int:
    """What the plan of another such engine on this GPU leaves out, for somebody has it already."""
    config = llm.llm_engine.vllm_config
    return get_model_loader(config.load_config).get_external_weight_memory(config)


def test_a_manager_keeps_what_no_engine_uses(
    llama: checkpoints.Pair, driver: gpus.Full, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    with gpus.running(tmp_path) as manager, on(driver):
        socket = str(tmp_path / "m.sock")
        expected = None
        for number in range(2):
            llm = engines.sharing(llama.base, memory_manager=socket)
            last = engines.last_report()
            assert not last.skipped, last.skipped
            assert last.shared_bytes == (last.total_bytes if number else 0)
            expected = expected or plain.tokens(plain.outputs(llm))
            assert plain.tokens(plain.outputs(llm)) == expected
            [row] = manager.overview().checkpoints
            assert row.name == str(llama.base)
            assert row.nbytes == row.leased_bytes > 0
            assert external_bytes(llm) == row.nbytes
            engines.drop(llm)
            del llm
            gc.collect()
    # The manager's process is gone, and with it the memory.


def test_the_plan_leaves_out_no_more_than_the_engine_can_share(
    llama: checkpoints.Pair, driver: gpus.Full, tmp_path: Path
) -> None:
    """Others may have the checkpoint in their own dtype, under its name too."""
    tmp_path.chmod(0o700)
    with gpus.running(tmp_path) as manager, on(driver) as gpu:
        socket = tmp_path / "m.sock"
        llm = engines.sharing(llama.base, memory_manager=str(socket))
        own = engines.last_report().total_bytes
        assert external_bytes(llm) == own
        client = connect(socket, keep_connected=False, device=gpu.gpu.device.uuid)
        lender = Lender(client, gpu.gpu, checkpoint_name(str(llama.base)))
        other = weights(7, 4 * own)
        key = key_of(other)
        wanted = DeviceRequest("other", key, other.nbytes, copy_of(other, gpu.gpu))
        held = lender.put([wanted])
        assert manager.overview().checkpoints[0].nbytes == own + other.nbytes
        assert external_bytes(llm) == own
        engines.drop(llm)
        del llm, held
        gc.collect()
        client.close()


def test_what_engines_write_to_stays_private(driver: gpus.Full) -> None:
    from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents
    from tensor_dedup.loader.cuda.provider import GpuProvider

    with on(driver) as gpu:
        provider = GpuProvider(gpu, DeviceManagerResidents())
        for name in ("layers.0.attn._k_scale", "layers.0.attn.v_scale", "moe.expert_map"):
            assert provider.reason(name)
        assert provider.reason("layers.0.attn.qkv_proj.weight_scale") is None


def test_vllms_profile_counts_shared_memory_for_whoever_made_it_and_once(
    llama: checkpoints.Pair, driver: gpus.Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own function, over the memory of the fake GPU: torch's allocator has none of it."""
    total = 1 << 30
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "memory_stats", lambda *_: {})
    monkeypatch.setattr(accelerator, "memory_reserved", lambda *_: 0)
    monkeypatch.setattr(accelerator, "get_memory_info", lambda *_: (total - gpus.in_use(), total))
    monkeypatch.setattr(accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(accelerator, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(current_platform, "is_integrated_gpu", lambda *_: False)

    def measured() -> tuple[Any, int]:
        before = mem_utils.MemorySnapshot(device=PLACE)
        llm = engines.sharing(llama.base)
        with mem_utils.memory_profiling(before) as result:
            pass
        return llm, result.non_kv_cache_memory

    with on(driver):
        first, counted = measured()
        unique = sum(each.nbytes for each in shared.parameters(first).values())
        assert unique <= counted <= unique + 2 * GRANULARITY
        second, again = measured()
        assert again == 0
        assert shares_memory(*[next(iter(shared.parameters(m).values())) for m in (first, second)])
        engines.drop(first, second)
        del first, second
    assert report().models


# Engines that sleep.


@pytest.fixture(scope="module")
def answers(llama: checkpoints.Pair) -> list[tuple[plain.Answer, ...]]:
    """What plain vLLM answers for the base and the fine-tune, its weights not packed, as here."""
    found = []
    for path in (llama.base, llama.fine_tune):
        with plain.kept_as("plain"):
            llm = plain.engine(path)
            found.append(plain.outputs(llm))
        engines.drop(llm)
        del llm
        gc.collect()
    return found


def test_engines_fall_asleep_and_wake_in_each_order_and_answer_as_plain_ones(
    llama: checkpoints.Pair,
    answers: list[tuple[plain.Answer, ...]],
    driver: gpus.Full,
    sleepers: Sleepers,
) -> None:
    pair = [sleepers.engine(path) for path in (llama.base, llama.fine_tune)]
    common = shared.shared_parameters(*pair)
    assert 0 < len(common) < len(shared.parameters(pair[0]))
    unique, made = sleepers.on_gpu(), gpus.in_use()
    places = [addresses(llm) for llm in pair]
    base_first, tune_first = (0, 1), (1, 0)
    for falling, waking in product((base_first, tune_first), repeat=2):
        first, last = falling
        pair[first].sleep(level=1)
        assert pair[first].llm_engine.is_sleeping()
        assert set(accesses(pair[first], driver).values()) == {Access.NONE}
        assert sleepers.on_gpu() >= sum(
            each.nbytes for name, each in shared.parameters(pair[last]).items() if name in common
        )
        assert plain.outputs(pair[last]) == answers[last]
        pair[last].sleep(level=1)
        # One of each tensor in host memory for both; what the first was told is used, its thread
        # sees to within a second.
        managers.until(lambda: sleepers.on_gpu() == gpus.in_use() == 0)
        assert sleepers.in_host_memory() == unique
        for number in waking:
            assert pair[number].wake_up()
            assert addresses(pair[number]) == places[number]
            assert set(accesses(pair[number], driver).values()) == {Access.READ}
            assert plain.outputs(pair[number]) == answers[number]
        assert [plain.outputs(llm) for llm in pair] == answers
        assert verify().ok  # and leaves mappings behind, which must not keep the next from sleeping
        if waking == base_first:
            assert shared.shared_parameters(*pair) == common
            assert gpus.in_use() == made
        else:  # which uses a part of the base's slab of small tensors, and makes another of these
            assert gpus.in_use() <= 2 * made
    engines.drop(*pair)
    del pair


def test_what_an_engine_shares_while_it_is_awake_is_not_copied(
    llama: checkpoints.Pair,
    answers: list[tuple[plain.Answer, ...]],
    driver: gpus.Full,
    sleepers: Sleepers,
) -> None:
    pair = [sleepers.engine(llama.base) for _ in range(2)]
    assert shared.everything(*pair)
    before = sleepers.on_gpu()
    pair[0].sleep(level=1)
    assert (sleepers.on_gpu(), sleepers.in_host_memory()) == (before, 0)
    assert plain.outputs(pair[1]) == answers[0]
    # The one that is awake is dropped: the one that sleeps is the last to have them.
    engines.drop(pair.pop())
    gc.collect()
    managers.until(lambda: sleepers.on_gpu() == 0)
    assert sleepers.in_host_memory() == before
    # And whoever is dropped asleep leaves them to nobody.
    engines.drop(pair.pop())
    gc.collect()
    assert gpus.in_use() == 0
    managers.until(lambda: sleepers.host.overview().totals.leases == 0)


def test_who_is_loaded_while_the_others_sleep_shares_with_them_when_they_wake(
    llama: checkpoints.Pair,
    answers: list[tuple[plain.Answer, ...]],
    driver: gpus.Full,
    sleepers: Sleepers,
) -> None:
    pair = [sleepers.engine(path) for path in (llama.base, llama.fine_tune)]
    assert shared.shared_parameters(*pair)
    for llm in pair:
        llm.sleep(level=1)
    managers.until(lambda: sleepers.on_gpu() == 0)
    third = sleepers.engine(llama.base)
    assert plain.outputs(third) == answers[0]
    for llm in pair:
        assert not llm.wake_up(tags=["weights"])
        assert llm.wake_up(tags=["kv_cache"])
    assert shared.everything(third, pair[0])
    assert [plain.outputs(llm) for llm in (third, *pair)] == [answers[0], *answers]
    # What one of them has woken to, and then reloads, is its own.
    shared.reload(pair[0], llama.fine_tune)
    assert shared.nothing(third, pair[0])
    assert [plain.outputs(llm) for llm in (third, *pair)] == [answers[0], answers[1], answers[1]]
    engines.drop(third, *pair)
    del third, llm, pair


def test_one_that_finds_no_room_when_it_wakes_sleeps_on(
    llama: checkpoints.Pair,
    answers: list[tuple[plain.Answer, ...]],
    driver: gpus.Full,
    sleepers: Sleepers,
) -> None:
    pair = [sleepers.engine(path) for path in (llama.base, llama.fine_tune)]
    assert shared.shared_parameters(*pair)
    for llm in pair:
        llm.sleep(level=1)
    managers.until(lambda: sleepers.on_gpu() == 0)
    sleepers.device.refuse("create")  # neither has the manager room for it,
    driver.room = 0  # nor this process
    with pytest.raises(MemoryManagerError):
        pair[0].wake_up()
    assert pair[0].llm_engine.is_sleeping()
    assert set(accesses(pair[0], driver).values()) == {Access.NONE}
    sleepers.device.refuse()
    driver.room = 1 << 40
    for llm, expected in zip(pair, answers, strict=True):
        assert llm.wake_up()
        assert plain.outputs(llm) == expected
    engines.drop(*pair)
    del llm, pair


def test_level_2_is_refused_and_after_wake_up_the_engine_goes_on(
    llama: checkpoints.Pair,
    answers: list[tuple[plain.Answer, ...]],
    driver: gpus.Full,
    sleepers: Sleepers,
) -> None:
    pair = [sleepers.engine(path) for path in (llama.base, llama.fine_tune)]
    assert shared.shared_parameters(*pair)
    with pytest.raises(UnsupportedError, match=r"use level 1.*wake_up\(\) first"):
        pair[0].sleep(level=2)
    assert set(accesses(pair[0], driver).values()) == {Access.READ}
    assert plain.outputs(pair[1]) == answers[1]
    assert pair[0].llm_engine.is_sleeping()  # vLLM pauses before it asks the worker
    assert pair[0].wake_up()
    assert plain.outputs(pair[0]) == answers[0]
    engines.drop(*pair)
    del pair


@pytest.mark.usefixtures("sleepers")
def test_engines_without_a_memory_manager_do_not_sleep(llama: checkpoints.Pair) -> None:
    with pytest.raises(ConfigError, match="memory_manager='auto'"):
        plain.engine(llama.base, tensor_dedup=True, enable_sleep_mode=True)
