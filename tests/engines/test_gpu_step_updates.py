"""An engine whose weights are a GPU's shared memory changes to another step of its run.

Over the fake driver, as in test_gpu_engines. The oracle is an engine that loads the step.
"""

import copy
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf

from gpu_runs import gpus
from gpu_runs.fake_driver import GRANULARITY, RefusingDriver
from gpu_runs.gpu_engines import PLACE, Sleepers, accesses, on
from manager_runs import managers
from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup import report, unshare, verify
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.blocks import BLOCK_BYTES
from tensor_dedup.loader.cuda.exchange import AddressExchange, LostWeightsError
from tensor_dedup.loader.cuda.openers import VmmOpener
from tensor_dedup.loader.takeover import Takeover
from tensor_dedup.memory_manager.cuda.driver import Access, Result, refused
from tensor_dedup.memory_manager.errors import BackendError, DeviceError
from tensor_dedup.patches.vllm import load_formats
from tensor_dedup.patches.vllm.weight_transfer import StepTransferEngine
from tensor_dedup.training import CheckpointStore
from vllm_runs import engines, following, plain, shared

pytestmark = pytest.mark.vllm

_RUN = "policy"
_SHORT = {"llama_tied", "deepseek_v2"}
_HIDDEN = 512
_ROWS = 2 * BLOCK_BYTES // (2 * _HIDDEN) + 64  # of an embedding in three blocks
Seen = tuple[Any, dict[str, str]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, as a training may change a model.

    From the first, the second has another row in each large matrix and other small ones, the third
    is all different, and the fourth has another layer.
    """
    root = tmp_path_factory.mktemp("gpu-steps")
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=_ROWS,
        hidden_size=_HIDDEN,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        attention_bias=True,
    )
    made: Any = hf.LlamaForCausalLM
    base = checkpoints.save(made(config).to(torch.bfloat16), root / "base")
    first = checkpoints.tensors(base)
    second = {n: each * (1.5 if "proj.weight" in n else 1.0) for n, each in first.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        second[name][-1] += 1
    third = {n: each * -1.25 for n, each in first.items()}
    fourth = {n: each * (1.5 if "layers.1." in n else 1.0) for n, each in first.items()}
    with CheckpointStore(root / "store", _RUN, config=base) as run:
        for number, each in enumerate((first, second, third, fourth)):
            run.save(each, number)
    engines.warm_up(base)
    return root / "store"


def following_engine(store: Path, step: int, **config: Any) -> Any:
    return plain.engine(
        f"store://{_RUN}@{step}",
        tensor_dedup={"store": str(store), **config},
        weight_transfer_config=following.BACKEND,
    )


def held(llm: Any) -> dict[str, str]:
    """A digest of each parameter and buffer."""
    model = plain.model(llm)
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: engines.fingerprint(tensor) for name, tensor in every}


def seen(llm: Any) -> Seen:
    llm.llm_engine.reset_prefix_cache()
    return plain.outputs(llm), held(llm)


@pytest.fixture(scope="module")
def expected(store: Path) -> list[Seen]:
    """What engines answer and hold that have loaded the steps, without a GPU."""
    found = []
    for step in range(4):
        llm = plain.engine(
            f"store://{_RUN}@{step}", tensor_dedup={"store": str(store), "cpu_weights": "plain"}
        )
        found.append(seen(llm))
        plain.let_go(llm)
        del llm
    assert len({repr(each[0]) for each in found}) == 4, "the steps do not differ"
    return found


def end(*llms: Any) -> None:
    """End engines, whose modules refer to each other."""
    engines.drop(*llms)
    gc.collect()


@contextmanager
def lender(folder: Path, managed: bool) -> Iterator[tuple[gpus.GpuManager | None, dict[str, str]]]:
    """A memory manager of the GPU, if there is to be one, and the configuration that names it."""
    if not managed:
        yield None, {}
        return
    folder.chmod(0o700)
    with gpus.running(folder, "--budget", str(1 << 30)) as manager:
        yield manager, {"memory_manager": str(folder / "m.sock")}


@pytest.mark.parametrize("managed", [False, True], ids=["alone", "managed"])
def test_after_each_update_an_engine_equals_a_fresh_load_and_has_the_memory_of_one(
    store: Path, expected: list[Seen], driver: gpus.Full, tmp_path: Path, managed: bool
) -> None:
    with lender(tmp_path, managed) as (manager, config), on(driver):

        def in_use() -> int:
            return manager.overview().totals.resident_bytes if manager else gpus.in_use()

        llm = following_engine(store, 0, **config)
        assert set(accesses(llm, driver).values()) == {Access.READ}
        once, versions = in_use(), {llm.get_weight_version()}
        assert seen(llm) == expected[0]
        for step in (1, 2, 0, 0, 1):
            llm.update_weights({"step": step})
            assert seen(llm) == expected[step]
            assert set(accesses(llm, driver).values()) == {Access.READ}
            managers.until(lambda: in_use() <= once + 2 * GRANULARITY, 10)
            assert verify().ok
            versions.add(llm.get_weight_version())
        assert len(versions) == 3
        assert unshare(llm) > 0
        assert seen(llm) == expected[1]
        end(llm)
        del llm


def test_what_did_not_change_is_not_sent_again_and_stays_shared(
    store: Path, expected: list[Seen], driver: gpus.Full
) -> None:
    with on(driver):
        first, second = (following_engine(store, 0) for _ in range(2))
        assert shared.everything(first, second)
        sent = driver.traffic["copy_in"]
        first.update_weights({"step": 1})
        changed = driver.traffic["copy_in"] - sent
        whole = sum(each.nbytes for each in shared.parameters(first).values())
        assert 0 < changed < whole / 2
        common = shared.shared_parameters(first, second)
        assert {name for name in common if "layers.0" in name} == {
            f"model.layers.0.{name}"
            for name in (
                "input_layernorm.weight",
                "post_attention_layernorm.weight",
                "self_attn.o_proj.bias",
                "self_attn.qkv_proj.bias",
            )
        }
        assert report().models[-1].leaf_shared_bytes == 4 * BLOCK_BYTES
        assert seen(second) == expected[0]
        sent = driver.traffic["copy_in"]
        second.update_weights({"step": 1})
        assert driver.traffic["copy_in"] == sent
        assert shared.everything(first, second)
        assert [seen(llm) for llm in (first, second)] == [expected[1]] * 2
        end(first, second)
        del first, second


def test_a_step_is_loaded_in_the_background(
    store: Path, expected: list[Seen], driver: gpus.Full
) -> None:
    with on(driver):
        llm = following_engine(store, 0)
        call = llm.llm_engine.collective_rpc
        info = {"update_info": {"url": f"store://{_RUN}@1"}}
        call("tensor_dedup_prepare_update", kwargs=info)
        while not all(call("tensor_dedup_update_is_prepared")):
            time.sleep(0.01)
        sent = driver.traffic["copy_in"]
        assert seen(llm) == expected[0]
        llm.update_weights({"step": 1})
        assert driver.traffic["copy_in"] == sent
        assert seen(llm) == expected[1]
        end(llm)
        del llm


def test_without_room_for_the_step_the_engine_stays_where_it_was(
    store: Path, expected: list[Seen], driver: gpus.Full
) -> None:
    with on(driver):
        llm = following_engine(store, 0)
        driver.room = once = gpus.in_use()
        with (
            mock.patch("tensor_dedup.loader.cuda.provider.GpuProvider.private", new=no_room),
            pytest.raises(torch.OutOfMemoryError),
        ):
            llm.update_weights({"step": 2})
        gc.collect()
        assert gpus.in_use() == once
        assert seen(llm) == expected[0]
        driver.room = 1 << 40
        llm.update_weights({"step": 2})
        assert seen(llm) == expected[2]
        end(llm)
        del llm


def no_room(*_: object) -> None:
    raise torch.OutOfMemoryError("no room")


def failed_update(llm: Any, driver: RefusingDriver, refuse: int) -> bool:
    """Let a call of an update to step 1 fail; return whether the update fails, too."""
    driver.again(refuse)
    try:
        with mock.patch("tensor_dedup.loader.cuda.provider.GpuProvider.private", new=no_room):
            llm.update_weights({"step": 1})
    except Exception:  # noqa: BLE001  # whatever it is
        return True
    finally:
        driver.again()
    return False


def some(calls: list[str], every: bool) -> Iterator[int]:
    """Numbers of calls, from 1: the first and the last of each kind, or all."""
    for number, call in enumerate(calls):
        if every or call not in calls[:number] or call not in calls[number + 1 :]:
            yield number + 1


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_whatever_the_driver_refuses_the_engine_is_wholly_at_one_step(
    store: Path, expected: list[Seen], driver: gpus.Full, *, every: bool
) -> None:
    refusing = RefusingDriver(driver)
    with on(refusing):
        llm = following_engine(store, 0)
        assert not failed_update(llm, refusing, 0)
        llm.update_weights({"step": 0})
        refusing.again()
        llm.update_weights({"step": 1})
        calls = list(refusing.calls)
        assert {"create", "reserve", "map", "allow"} <= set(calls)
        failed = 0
        for number in some(calls, every):
            llm.update_weights({"step": 0})
            fails = failed_update(llm, refusing, number)
            failed += fails
            assert held(llm) == expected[0 if fails else 1][1], (number, calls[number - 1])
        assert failed
        llm.update_weights({"step": 1})
        assert seen(llm) == expected[1]
        end(llm)
        del llm


def test_a_failure_before_the_change_leaves_nothing_on_the_gpu(
    store: Path, expected: list[Seen], driver: gpus.Full
) -> None:
    with on(driver) as gpu:
        llm = following_engine(store, 0)
        once = gpus.in_use()

        def refuse(*_: object) -> None:
            raise UnsupportedError("not now")

        failing = mock.patch.object(Takeover, "plan", new=refuse)  # a Mock would keep the model
        with failing, pytest.raises(UnsupportedError, match="not now"):
            llm.update_weights({"step": 2})
        assert gpu.gpu.reap(wait=True) == 0
        assert gpus.in_use() == once
        assert seen(llm) == expected[0]
        end(llm)
        del llm


def test_an_engine_sleeps_and_wakes_at_the_step_to_which_it_has_changed(
    store: Path, expected: list[Seen], driver: gpus.Full, sleepers: Sleepers
) -> None:
    def engine() -> Any:
        return sleepers.engine(
            f"store://{_RUN}@0", {"store": str(store)}, weight_transfer_config=following.BACKEND
        )

    pair = [engine() for _ in range(2)]
    assert shared.everything(*pair)
    for llm in pair:
        llm.update_weights({"step": 1})
        llm.sleep(level=1)
        assert set(accesses(llm, driver).values()) == {Access.NONE}
    with pytest.raises(UnsupportedError, match="wake_up"):
        pair[0].update_weights({"step": 2})
    managers.until(lambda: sleepers.on_gpu() == gpus.in_use() == 0)
    for llm in pair:
        assert llm.wake_up()
        assert seen(llm) == expected[1]
    assert shared.everything(*pair)
    pair[0].update_weights({"step": 2})
    assert [seen(llm) for llm in pair] == [expected[2], expected[1]]
    assert verify().ok
    end(*pair)
    del llm, pair


def test_an_engine_with_captured_graphs_needs_memory_that_can_be_mapped_again(
    store: Path, driver: gpus.Full
) -> None:
    with on(driver):
        llm = following_engine(store, 0)
        config = copy.copy(llm.llm_engine.vllm_config)
        config.model_config = copy.copy(config.model_config)
        place = torch.device("cuda", 0)  # which is not here
        StepTransferEngine(config.weight_transfer_config, config, place, plain.model(llm))
        config.model_config.enforce_eager = False
        with pytest.raises(UnsupportedError, match="enforce_eager=True"):
            StepTransferEngine(config.weight_transfer_config, config, place, plain.model(llm))
        end(llm)
        del llm


# Engines whose graphs know the addresses of weights.


@pytest.fixture
def graphs() -> Iterator[None]:
    """Engines are taken to have captured graphs, which CPU engines do not."""
    with with_graphs():
        yield


@contextmanager
def with_graphs() -> Iterator[None]:
    with (
        mock.patch.object(StepTransferEngine, "_is_eager", return_value=False),
        mock.patch.object(load_formats, "keeps_addresses", new=load_formats.follows_steps),
    ):
        yield


def places(llm: Any) -> dict[str, int]:
    """The address of every tensor of a model: parameters, buffers and attributes."""
    found = {}
    for name, module in plain.model(llm).named_modules():
        every = {**vars(module), **module._parameters, **module._buffers}
        for key, value in every.items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = value.data_ptr()
    return found


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("managed", [False, True], ids=["alone", "managed"])
def test_where_graphs_are_captured_all_addresses_stay(
    store: Path, expected: list[Seen], driver: gpus.Full, tmp_path: Path, managed: bool
) -> None:
    with lender(tmp_path, managed) as (manager, config), on(driver):

        def in_use() -> int:
            return gpus.in_use() + (manager.overview().totals.resident_bytes if manager else 0)

        llm = following_engine(store, 0, **config)
        once, versions = in_use(), {llm.get_weight_version()}
        before = places(llm)
        for step in (1, 2, 0, 0, 3, 2, 1):
            llm.update_weights({"step": step})
            assert places(llm) == before
            assert seen(llm) == expected[step]
            managers.until(lambda: in_use() <= 1.1 * once, 10)
            assert verify().ok
            versions.add(llm.get_weight_version())
            # From the first step that changes a slab in part, this is copied.
            rights = accesses(llm, driver)
            assert rights["lm_head.weight"] is Access.READ
            copied = {name for name, access in rights.items() if access is Access.READ_WRITE}
            assert bool(copied) is (len(versions) == 4)
            assert not copied or "model.layers.0.mlp.down_proj.weight" in copied
        end(llm)
        del llm


@pytest.mark.usefixtures("graphs")
def test_where_addresses_stay_large_tensors_stay_shared(
    store: Path, expected: list[Seen], driver: gpus.Full
) -> None:
    with on(driver):
        first, second = (following_engine(store, 0) for _ in range(2))
        name = "model.embed_tokens.weight"
        assert name in shared.shared_parameters(first, second)
        first.update_weights({"step": 1})
        assert name not in shared.shared_parameters(first, second)
        assert seen(second) == expected[0]
        second.update_weights({"step": 1})
        assert name in shared.shared_parameters(first, second)
        assert [seen(llm) for llm in (first, second)] == [expected[1]] * 2
        end(first, second)
        del first, second


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_whatever_the_driver_refuses_where_addresses_stay_the_engine_is_at_one_step(
    store: Path, expected: list[Seen], driver: gpus.Full, *, every: bool
) -> None:
    refusing = RefusingDriver(driver)
    with on(refusing):
        llm = following_engine(store, 0)
        before = places(llm)
        calls: list[str] = []
        for number in (0, *range(1, 1000)):
            # The first update makes small tensors the engine's own, so each try has a new engine.
            if number and number not in set(some(calls, every)):
                continue
            fails = failed_update(llm, refusing, number)
            assert held(llm) == expected[0 if fails else 1][1], (number, calls[number - 1])
            assert places(llm) == before
            if not number:
                calls = list(refusing.calls)
                assert not fails
            llm.update_weights({"step": 0})
            assert held(llm) == expected[0][1]
        llm.update_weights({"step": 1})
        assert seen(llm) == expected[1]
        end(llm)
        del llm


def with_maps_refused(driver: gpus.Full, numbers: Callable[[int], bool]) -> Any:
    """Let the calls of these numbers that map memory during an exchange fail."""
    swap, map_ = AddressExchange._swap, driver.map
    count = itertools.count()

    def mapped(*given: int) -> None:
        if numbers(next(count)):
            raise refused("cuMemMap", Result.MAP_FAILED)
        map_(*given)

    def swapped(self: AddressExchange) -> None:
        with mock.patch.object(driver, "map", mapped):
            swap(self)

    return mock.patch.object(AddressExchange, "_swap", swapped)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_what_was_mapped_is_mapped_back_where_one_fails(
    store: Path, expected: list[Seen], driver: gpus.Full, number: int
) -> None:
    """There are two large tensors, of three blocks each."""
    with on(driver):
        llm = following_engine(store, 0)
        before = places(llm)
        with (
            with_maps_refused(driver, lambda each: each == number),
            pytest.raises(DeviceError, match="cuMemMap"),
        ):
            llm.update_weights({"step": 1})
        assert seen(llm) == expected[0]
        assert places(llm) == before
        assert verify().ok
        llm.update_weights({"step": 1})
        assert seen(llm) == expected[1]
        end(llm)
        del llm


@pytest.mark.usefixtures("graphs")
def test_an_engine_whose_memory_cannot_be_mapped_back_computes_with_nothing(
    store: Path, driver: gpus.Full
) -> None:
    with on(driver):
        llm = following_engine(store, 0)
        with (
            with_maps_refused(driver, lambda each: each >= 3),
            pytest.raises(LostWeightsError, match="started anew"),
        ):
            llm.update_weights({"step": 1})
        large = [accesses(llm, driver)[name] for name in ("model.embed_tokens.weight",)]
        large.append(accesses(llm, driver)["lm_head.weight"])
        assert large == [Access.NONE, Access.NONE]
        end(llm)
        del llm


@pytest.mark.usefixtures("graphs")
def test_without_room_for_copies_the_engine_stays_where_it_was(
    store: Path, expected: list[Seen], driver: gpus.Full
) -> None:
    with on(driver):
        llm = following_engine(store, 0)
        short = mock.patch.object(
            VmmOpener, "make_private", side_effect=refused("cuMemCreate", Result.OUT_OF_MEMORY, 1)
        )
        with short, pytest.raises(BackendError, match="cuMemCreate"):
            llm.update_weights({"step": 3})
        assert seen(llm) == expected[0]
        assert set(accesses(llm, driver).values()) == {Access.READ}
        llm.update_weights({"step": 3})
        assert seen(llm) == expected[3]
        end(llm)
        del llm


@pytest.mark.usefixtures("graphs")
def test_an_engine_that_keeps_addresses_sleeps_and_wakes(
    store: Path, expected: list[Seen], driver: gpus.Full, sleepers: Sleepers
) -> None:
    llm = sleepers.engine(
        f"store://{_RUN}@0", {"store": str(store)}, weight_transfer_config=following.BACKEND
    )
    before = places(llm)
    for step in (1, 3, 2):
        llm.update_weights({"step": step})
        llm.sleep(level=1)
        # What was copied is the model's own, and stays.
        own = {Access.READ_WRITE} if step != 1 else set()
        assert set(accesses(llm, driver).values()) == {Access.NONE, *own}
        managers.until(lambda: sleepers.on_gpu() == 0)
        assert llm.wake_up()
        assert places(llm) == before
        assert seen(llm) == expected[step]
    assert verify().ok
    end(llm)
    del llm


@pytest.fixture
def from_equal(tmp_path: Path) -> Path:
    """The first step has two equal layers, as norms and biases are when a training begins."""
    pair = checkpoints.make("llama", tmp_path / "checkpoint")
    first = checkpoints.tensors(pair.base)
    for name in [name for name in first if "layers.1." in name]:
        first[name] = first[name.replace("layers.1.", "layers.0.")].clone()
    second = {name: each * (1.5 if "layers.1." in name else 1) for name, each in first.items()}
    with CheckpointStore(tmp_path / "store", _RUN, config=pair.base) as run:
        for number, tensors in enumerate((first, second)):
            run.save(tensors, number)
    return tmp_path / "store"


@pytest.mark.usefixtures("graphs")
def test_where_addresses_stay_equal_tensors_may_become_unequal(
    from_equal: Path, driver: gpus.Full
) -> None:
    found = []
    with on(driver):
        for step in range(2):
            once = plain.engine(f"store://{_RUN}@{step}", tensor_dedup={"store": str(from_equal)})
            found.append(seen(once))
            equal = [each.data_ptr() for each in shared.parameters(once).values()]
            plain.let_go(once)
            del once
            assert (len({*equal}) < len(equal)) or step, "no tensors are equal"
        assert found[0] != found[1]
        llm = following_engine(from_equal, 0)
        where = [each.data_ptr() for each in shared.parameters(llm).values()]
        assert len({*where}) == len(where)
        for step in (1, 0, 1):
            llm.update_weights({"step": step})
            assert seen(llm) == found[step]
        end(llm)
        del llm


@pytest.mark.usefixtures("graphs")
def test_equal_tensors_at_addresses_of_their_own_sleep_and_wake(
    from_equal: Path, driver: gpus.Full, sleepers: Sleepers
) -> None:
    llm = sleepers.engine(
        f"store://{_RUN}@0", {"store": str(from_equal)}, weight_transfer_config=following.BACKEND
    )
    before, first = places(llm), seen(llm)
    for _ in range(2):
        llm.sleep(level=1)
        assert set(accesses(llm, driver).values()) == {Access.NONE}
        managers.until(lambda: sleepers.on_gpu() == 0)
        assert llm.wake_up()
        assert seen(llm) == first
        assert places(llm) == before
    llm.update_weights({"step": 1})
    second = seen(llm)
    assert second != first
    llm.sleep(level=1)
    assert llm.wake_up()
    assert seen(llm) == second
    assert verify().ok
    end(llm)
    del llm


# An engine all of whose tensors are small, and become its own where addresses stay.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of a model without large tensors.

    From the first, the second differs in some tensors of each slab, and the third in all.
    """
    root = tmp_path_factory.mktemp("small-steps")
    pair = checkpoints.make("llama", root / "checkpoints")
    first = checkpoints.tensors(pair.base)
    with CheckpointStore(root / "store", _RUN, config=pair.base) as run:
        run.save(first, 0)
        run.save({n: t * (1.5 if "layers.1." in n else 1.0) for n, t in first.items()}, 1)
        run.save({n: t * -1.25 for n, t in first.items()}, 2)
    return root / "store"


@pytest.mark.usefixtures("graphs")
def test_an_engine_that_sleeps_with_memory_of_its_own_is_refused(
    small: Path, driver: gpus.Full, sleepers: Sleepers
) -> None:
    llm = sleepers.engine(
        f"store://{_RUN}@0", {"store": str(small)}, weight_transfer_config=following.BACKEND
    )
    assert unshare(llm) > 0
    assert set(accesses(llm, driver).values()) == {Access.READ_WRITE}
    before = held(llm)
    llm.sleep(level=1)
    for tags in (None, ["kv_cache"]):
        if tags:
            llm.wake_up(tags)
        with pytest.raises(UnsupportedError, match="wake_up"):
            llm.update_weights({"step": 1})
        with pytest.raises(UnsupportedError, match="wake_up"):
            llm.llm_engine.collective_rpc(
                "tensor_dedup_prepare_update",
                kwargs={"update_info": {"url": f"store://{_RUN}@1"}},
            )
    llm.wake_up(["weights"])
    assert held(llm) == before
    llm.update_weights({"step": 1})
    assert held(llm) != before
    end(llm)
    del llm


@pytest.mark.parametrize("changed", [True, False])
def test_after_an_interruption_the_former_step_is_freed_if_the_change_was_made(
    small: Path, driver: gpus.Full, tmp_path: Path, *, changed: bool
) -> None:
    tmp_path.chmod(0o700)
    apply = Takeover.apply

    def interrupted(self: Takeover, note: Callable[[], None] | None = None) -> None:
        if changed:
            apply(self, note)
        raise KeyboardInterrupt

    with gpus.running(tmp_path, "--budget", str(256 << 20)) as manager, on(driver):
        llm = following_engine(small, 0, memory_manager=str(tmp_path / "m.sock"))
        before, once = held(llm), manager.overview().totals.resident_bytes
        with (
            mock.patch.object(Takeover, "apply", interrupted),
            pytest.raises(KeyboardInterrupt),
        ):
            llm.update_weights({"step": 2})
        gc.collect()
        assert (held(llm) != before) is changed
        if changed:
            managers.until(lambda: manager.overview().totals.resident_bytes <= once, 20)
        end(llm)
        del llm


def test_of_former_steps_no_copy_stays_in_host_memory(
    small: Path, driver: gpus.Full, sleepers: Sleepers
) -> None:
    llm = sleepers.engine(
        f"store://{_RUN}@0", {"store": str(small)}, weight_transfer_config=following.BACKEND
    )
    for step in (1, 2):
        llm.sleep(level=1)
        managers.until(lambda: sleepers.on_gpu() == 0)
        assert sleepers.in_host_memory() > 0
        llm.wake_up()
        llm.update_weights({"step": step})
        managers.until(lambda: not sleepers.in_host_memory(), 20)
    end(llm)
    del llm


def test_memory_that_cannot_keep_addresses_is_refused_where_graphs_are_captured(
    small: Path, driver: gpus.Full, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    with gpus.running(tmp_path, "--backend", "ipc"), on(driver):
        llm = following_engine(small, 0, memory_manager=str(tmp_path / "m.sock"))
        config, model = llm.llm_engine.vllm_config, plain.model(llm)
        make = StepTransferEngine
        make(config.weight_transfer_config, config, PLACE, model)
        with (
            mock.patch.object(StepTransferEngine, "_is_eager", return_value=False),
            pytest.raises(UnsupportedError, match=r"backend `vmm`, or .* enforce_eager=True"),
        ):
            make(config.weight_transfer_config, config, PLACE, model)
        end(llm)
        del llm, model


def follow_with_graphs(arch: str, root: str) -> list[bool]:
    """Change to another step and back; are addresses as before, and the rest as in a fresh load?"""
    pair = checkpoints.make(arch, Path(root, "checkpoints"))
    with CheckpointStore(Path(root, "store"), _RUN, config=pair.base) as run:
        for number, path in enumerate((pair.base, pair.fine_tune)):
            run.save(checkpoints.tensors(path), number)
    store, found, equal = Path(root, "store"), [], []
    with on(gpus.Full()), with_graphs():
        for step in range(2):
            once = plain.engine(f"store://{_RUN}@{step}", tensor_dedup={"store": str(store)})
            found.append(seen(once))
            plain.let_go(once)
        assert found[0] != found[1]
        llm = following_engine(store, 0)
        assert seen(llm) == found[0]  # first, for some tables are made when they are first used
        before = places(llm)
        for step in (1, 0, 1):
            llm.update_weights({"step": step})
            equal += [places(llm) == before, seen(llm) == found[step]]
        plain.let_go(llm)
    return equal


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=[] if arch in _SHORT else [pytest.mark.long])
        for arch in checkpoints.ARCHITECTURES
        if arch not in checkpoints.POOLING
    ],
)
def test_of_each_architecture_all_addresses_stay(arch: str, tmp_path: Path) -> None:
    assert fresh.call_forked(follow_with_graphs, arch, str(tmp_path)) == [True] * 6
