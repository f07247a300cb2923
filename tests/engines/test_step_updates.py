"""A running engine changes to another step of its run, wholly or not at all.

The oracle is an engine that loads the step.
"""

import asyncio
import copy
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import transformers as hf

from manager_runs import managers
from models import quantised
from models import tiny_checkpoints as checkpoints
from processes import fresh
from store_runs import damage
from tensor_dedup import Store
from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.takeover import Takeover
from tensor_dedup.memory_manager.client.admin import Overview
from tensor_dedup.memory_manager.client.names import checkpoint_name
from tensor_dedup.memory_manager.protocol.messages import Done
from tensor_dedup.memory_manager.protocol.tables import CheckpointRow
from tensor_dedup.patches.vllm import step_updates, weight_transfer
from tensor_dedup.store.errors import CorruptTensorError
from tensor_dedup.training import CheckpointStore
from vllm_runs import engines, following, plain, shared

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.vllm

_RUN = "policy"
_BACKEND = {"backend": "tensor_dedup"}
_OPTIONS: dict[str, Any] = {}  # of every engine
_STATE_SPACE = "mamba2"
# Tied; latent attention; experts with biases; views of weights.
_SHORT = {"llama_tied", "deepseek_v2", "gpt_oss", _STATE_SPACE}


def _steps(arch: str, root: Path, kind: str = "") -> Path:
    """A store with three steps of a run: unlike, and the third a little unlike the first.

    With `kind`, they are quantised in this format.
    """
    if arch == _STATE_SPACE:
        base = _state_space(root / "base")
        fine_tune = checkpoints.mapped(base, root / "tuned", lambda name, tensor: tensor * 1.25)
    else:
        pair = checkpoints.make(arch, root / "checkpoints")
        base, fine_tune = pair.base, pair.fine_tune
    folders = [base, checkpoints.same_header(base, root / "other"), fine_tune]
    if kind:
        folders = [quantised.make(kind, f, root / f"{kind}-{f.name}") for f in folders]
    with CheckpointStore(root / "store", _RUN, config=folders[0]) as run:
        for number, folder in enumerate(folders):
            torch.manual_seed(number)
            held = checkpoints.tensors(folder)
            # Kernels of experts hold their biases, which are zeros in a model that is new.
            biases = [name for name in held if name.endswith("bias") and "experts" in name]
            run.save({**held, **{name: torch.randn_like(held[name]) for name in biases}}, number)
    return root / "store"


def _state_space(folder: Path) -> Path:
    """A model that computes with views of its weights, which are buffers."""
    config = hf.Mamba2Config(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        state_size=16,
        num_heads=4,
        head_dim=32,
        n_groups=1,
        chunk_size=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    model: Any = hf.Mamba2ForCausalLM  # not annotated
    return checkpoints.save(model(config), folder)


def _engine(store: Path, step: int, *, follow: bool = True, **config: Any) -> "LLM":
    options: dict[str, Any] = {"weight_transfer_config": _BACKEND} if follow else {}
    options |= _OPTIONS
    return plain.engine(
        f"store://{_RUN}@{step}", tensor_dedup={"store": str(store), **config}, **options
    )


def _held(llm: "LLM") -> dict[str, str]:
    """A digest of each parameter and buffer of an engine's model."""
    model = plain.model(llm)
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: engines.fingerprint(tensor) for name, tensor in every}


def _seen(llm: "LLM") -> tuple[Any, dict[str, str]]:
    llm.llm_engine.reset_prefix_cache()
    return plain.outputs(llm), _held(llm)


def _fresh(store: Path, step: int, **config: Any) -> tuple[Any, dict[str, str]]:
    llm = _engine(store, step, follow=False, **config)
    found = _seen(llm)
    plain.let_go(llm)
    return found


def follow_everywhere(arch: str, root: str, policy: str, kind: str = "") -> list[bool]:
    """Change to steps, there and back; return whether each equals a fresh load of that step."""
    store = _steps(arch, Path(root), kind)
    expected = [_fresh(store, step, cpu_weights=policy) for step in range(3)]
    assert len({repr(each[0]) for each in expected}) == 3, "the steps do not differ"
    llm = _engine(store, 0, cpu_weights=policy)
    equal = [_seen(llm) == expected[0]]
    for step in (1, 2, 0, 0, 1):
        llm.update_weights({"step": step})
        equal.append(_seen(llm) == expected[step])
    plain.let_go(llm)
    return equal


@pytest.mark.parametrize("policy", ["packed", "plain"])
@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=[] if arch in _SHORT else [pytest.mark.long])
        for arch in (*checkpoints.ARCHITECTURES, _STATE_SPACE)
        if arch not in checkpoints.POOLING
    ],
)
def test_after_each_update_a_model_equals_a_fresh_load(
    arch: str, policy: str, tmp_path: Path
) -> None:
    assert fresh.call_forked(follow_everywhere, arch, str(tmp_path), policy) == [True] * 6


@pytest.mark.parametrize(
    "kind",
    [
        "w8a8",
        "w4a16",
        *(pytest.param(k, marks=pytest.mark.long) for k in ("fp8 rows", "AWQ", "GPTQ")),
    ],
)
def test_quantised_layers_take_over_their_kernels(kind: str, tmp_path: Path) -> None:
    if not plain.multiplies(kind):
        pytest.skip("vLLM has no kernel for this format on this CPU")
    equal = fresh.call_forked(follow_everywhere, "llama", str(tmp_path), "packed", kind)
    assert equal == [True] * 6


def test_a_compiled_model_computes_with_the_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # traced, and not compiled to machine code
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    assert fresh.call_forked(follow_compiled, str(tmp_path)) == [True] * 6


def follow_compiled(root: str) -> list[bool]:
    with mock.patch.dict(_OPTIONS, enforce_eager=False):
        return follow_everywhere("llama", root, "plain")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("step-updates")
    found = _steps("llama", root)
    engines.warm_up(checkpoints.make("llama", root / "checkpoints").base)
    return found


@pytest.fixture
def llm(store: Path) -> Iterator["LLM"]:
    """An engine at step 0."""
    made = _engine(store, 0, cpu_weights="plain")
    yield made
    plain.let_go(made)
    gc.collect()


def test_a_parameter_remains_the_same_object(store: Path, llm: "LLM") -> None:
    before = dict(plain.model(llm).named_parameters())
    bytes_before = _held(llm)
    llm.update_weights({"update_info": {"url": f"store://{_RUN}@1"}})
    after = dict(plain.model(llm).named_parameters())
    assert _held(llm) != bytes_before
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


def test_latest_is_the_step_that_was_saved_last(store: Path, llm: "LLM") -> None:
    expected = _fresh(store, 2, cpu_weights="plain")
    assert _seen(llm) != expected
    llm.update_weights()  # type: ignore[call-arg]
    assert _seen(llm) == expected


def test_the_memory_of_the_former_step_is_freed_at_once(store: Path, llm: "LLM") -> None:
    gc.collect()
    gc.disable()  # what would wait for a collection must not be needed
    try:
        before = {id(each) for each in registry.residents()}
        assert before
        held = sum(each.nbytes for each in registry.residents())
        llm.update_weights({"step": 1})
        assert not before & {id(each) for each in registry.residents()}
        assert sum(each.nbytes for each in registry.residents()) == held
    finally:
        gc.enable()


def test_the_heap_of_the_former_step_is_given_back(llm: "LLM") -> None:
    with mock.patch.object(weight_transfer, "release_memory") as release:
        llm.update_weights({"step": 1})
        managers.until(lambda: release.called)


def test_a_manager_frees_a_former_step_whose_leases_come_back_one_by_one(
    llm: "LLM", monkeypatch: pytest.MonkeyPatch
) -> None:
    evicted: list[str] = []
    name = checkpoint_name(f"store://{_RUN}@0")

    class Manager:
        """Of three slabs one comes back after each attempt."""

        def __init__(self, path: object) -> None: ...
        def __enter__(self) -> "Manager":
            return self

        def __exit__(self, *_: object) -> None: ...
        def evict(self, what: str) -> Done:
            evicted.append(what)
            return Done(1, 1)

        def overview(self, *, residents: bool) -> Overview:
            assert not residents
            left = 3 - len(evicted)
            rows = [CheckpointRow(name, left, left, left, pinned=False)] if left else []
            return Overview(mock.Mock(), [], rows, [], [])

    monkeypatch.setattr(weight_transfer, "Admin", Manager)
    config = llm.llm_engine.vllm_config.load_config
    former = f"store://{_RUN}@0"
    formers = {former}
    llm.update_weights({"step": 1})
    weight_transfer._evict_formers(Path("/somewhere"), formers, config)
    assert evicted == [name] * 3
    assert not formers
    llm.update_weights({"step": 0})
    weight_transfer._evict_formers(Path("/somewhere"), {former}, config)
    assert evicted == [name] * 3, "it runs that step again"


def test_engines_at_one_step_share_it(store: Path, llm: "LLM") -> None:
    second = _engine(store, 0, cpu_weights="plain")
    assert shared.everything(llm, second)
    llm.update_weights({"step": 1})
    assert shared.nothing(llm, second)
    second.update_weights({"step": 1})
    assert shared.everything(llm, second)
    plain.let_go(second)


def test_vllms_own_protocol_changes_at_its_end(store: Path, llm: "LLM") -> None:
    at_0, at_1 = _seen(llm), _fresh(store, 1, cpu_weights="plain")
    llm.start_weight_update()
    llm.update_weights({"update_info": {"step": 1}})
    assert _seen(llm) == at_0
    llm.finish_weight_update(weight_version="mine")
    assert _seen(llm) == at_1
    assert llm.get_weight_version() == "mine"


def test_the_last_step_that_was_loaded_is_the_one_to_change_to(store: Path, llm: "LLM") -> None:
    llm.start_weight_update()
    llm.update_weights({"step": 1})
    llm.update_weights({"step": 2})
    llm.finish_weight_update()
    assert _seen(llm) == _fresh(store, 2, cpu_weights="plain")
    llm.start_weight_update()
    with pytest.raises(UnsupportedError, match="call update_weights before"):
        llm.finish_weight_update()


def test_a_damaged_step_leaves_the_engine_where_it_was(tmp_path: Path) -> None:
    store = _steps("llama", tmp_path)
    llm = _engine(store, 0, cpu_weights="plain")
    before, at_2 = _seen(llm), _fresh(store, 2, cpu_weights="plain")
    with Store.open(store) as opened:
        damage.damage_piece(opened, f"{_RUN}@1", "model.norm.weight")
    with pytest.raises(CorruptTensorError):
        llm.update_weights({"step": 1})
    assert _seen(llm) == before
    llm.update_weights({"step": 2})  # the next one repairs
    assert _seen(llm) == at_2
    plain.let_go(llm)


def test_a_failure_before_the_change_leaves_the_engine_where_it_was(
    store: Path, llm: "LLM"
) -> None:
    before = _seen(llm)
    with (
        mock.patch.object(Takeover, "plan", side_effect=UnsupportedError("not now")),
        pytest.raises(UnsupportedError, match="not now"),
    ):
        llm.update_weights({"step": 1})
    assert _seen(llm) == before
    llm.update_weights({"step": 1})
    assert _seen(llm) == _fresh(store, 1, cpu_weights="plain")


def test_a_step_of_another_model_is_refused(store: Path, llm: "LLM", tmp_path: Path) -> None:
    other = checkpoints.make("qwen2", tmp_path).base
    with CheckpointStore(store, "other", config=other) as run:
        run.save(checkpoints.tensors(other), 0)
    before = _seen(llm)
    with pytest.raises(UnsupportedError, match=r"store://other@0 is another model.*config.json"):
        llm.update_weights({"url": "store://other@0"})
    assert _seen(llm) == before


def _prepare(llm: "LLM", step: int) -> None:
    """Let the engine begin to load a step in the background, as an update does."""
    info = {"update_info": {"url": f"store://{_RUN}@{step}"}}
    llm.llm_engine.collective_rpc("tensor_dedup_prepare_update", kwargs=info)


def _wait_until_prepared(llm: "LLM") -> None:
    while not all(llm.llm_engine.collective_rpc("tensor_dedup_update_is_prepared")):
        time.sleep(0.01)


def _loading() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "tensor-dedup-step"]


def _held_now() -> set[int]:
    return {id(each) for each in registry.residents()}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preparation waits for the thread of the model for longer than a test may take."""
    monkeypatch.setattr(weight_transfer, "_BUILT_WITHIN_S", 3600.0)


@pytest.mark.usefixtures("patient")
def test_an_update_does_not_wait_for_the_preparation_of_another_step(
    store: Path, llm: "LLM"
) -> None:
    _prepare(llm, 1)
    assert _loading()
    llm.update_weights({"step": 2})
    assert _seen(llm) == _fresh(store, 2, cpu_weights="plain")
    managers.until(lambda: not _loading())


@pytest.mark.usefixtures("patient")
def test_a_preparation_replaces_the_one_before(store: Path, llm: "LLM") -> None:
    _prepare(llm, 1)
    _prepare(llm, 2)
    _wait_until_prepared(llm)
    with mock.patch.object(weight_transfer, "load_beside", side_effect=AssertionError("again")):
        llm.update_weights({"step": 2})
    assert _seen(llm) == _fresh(store, 2, cpu_weights="plain")


@pytest.mark.usefixtures("patient")
def test_of_a_preparation_nothing_stays_in_an_engine_that_ends(store: Path) -> None:
    gc.collect()
    before = _held_now()
    llm = _engine(store, 0, cpu_weights="plain")
    _prepare(llm, 1)
    assert _loading()
    plain.let_go(llm)
    del llm
    managers.until(lambda: not _loading())
    gc.collect()
    assert not _held_now() - before


def test_of_an_update_that_failed_nothing_stays(store: Path, llm: "LLM") -> None:
    gc.collect()
    before = _held_now()
    assert before
    _prepare(llm, 1)
    _wait_until_prepared(llm)
    assert _held_now() > before

    def refuse(*_: object) -> None:
        raise UnsupportedError("not now")

    failing = mock.patch.object(Takeover, "plan", new=refuse)  # a Mock would keep the model
    with failing, pytest.raises(UnsupportedError, match="not now") as raised:
        llm.update_weights({"step": 1})
    assert raised.value.__traceback__ is not None
    assert _held_now() == before


def test_a_step_that_is_damaged_is_not_loaded_again_while_nothing_is_answered(
    tmp_path: Path,
) -> None:
    store = _steps("llama", tmp_path)
    llm = _engine(store, 0, cpu_weights="plain")
    gc.collect()
    before = _held_now()
    with Store.open(store) as opened:
        damage.damage_piece(opened, f"{_RUN}@1", "model.norm.weight")
    _prepare(llm, 1)
    _wait_until_prepared(llm)
    again = mock.patch.object(weight_transfer, "load_beside", side_effect=AssertionError("again"))
    with again, pytest.raises(CorruptTensorError):
        llm.update_weights({"step": 1})
    assert _held_now() == before
    plain.let_go(llm)


def test_a_worker_that_was_left_within_an_update_gets_out_of_it(store: Path, llm: "LLM") -> None:
    llm.llm_engine.collective_rpc("start_weight_update")  # and another worker has failed
    with pytest.raises(RuntimeError, match="already"):
        llm.update_weights({"step": 1})
    llm.update_weights({"step": 1})
    assert _seen(llm) == _fresh(store, 1, cpu_weights="plain")


def test_after_a_step_that_failed_another_needs_one_call(store: Path, llm: "LLM") -> None:
    llm.start_weight_update()
    with (
        mock.patch.object(Takeover, "plan", side_effect=UnsupportedError("not now")),
        pytest.raises(UnsupportedError, match="not now"),
    ):
        llm.update_weights({"step": 1})
    llm.update_weights({"step": 1})
    assert _seen(llm) == _fresh(store, 1, cpu_weights="plain")


def test_a_step_without_a_url_is_of_the_run_that_was_loaded(store: Path, llm: "LLM") -> None:
    pair = checkpoints.make("llama", store.parent / "checkpoints")
    with CheckpointStore(store, "another", config=pair.base) as run:
        for number, folder in enumerate((pair.fine_tune, pair.base)):
            run.save(checkpoints.tensors(folder), number)
    at_1 = _fresh(store, 1, cpu_weights="plain")
    llm.update_weights({"url": "store://another@0"})
    assert _seen(llm) == _fresh(store, 2, cpu_weights="plain")
    llm.update_weights({"step": 1})
    assert _seen(llm) == at_1


def test_a_checkpoint_that_is_no_step_may_have_a_name_with_an_at(store: Path, llm: "LLM") -> None:
    pair = checkpoints.make("llama", store.parent / "checkpoints")
    Store.open(store).import_(pair.fine_tune, "org/tuned@v2")
    llm.update_weights({"url": "store://org/tuned@v2"})
    assert _seen(llm) == _fresh(store, 2, cpu_weights="plain")


@pytest.mark.parametrize(
    "request_", [{}, {"step": 1, "url": "store://policy@1"}, {"stap": 1}, {"url": "policy@1"}, 7]
)
def test_a_request_that_says_nothing_is_refused(llm: "LLM", request_: Any) -> None:
    before = _held(llm)
    with pytest.raises(ConfigError, match="update_weights"):
        llm.update_weights(request_)
    assert _held(llm) == before


def test_a_worker_does_not_guess_what_the_latest_step_is(llm: "LLM") -> None:
    llm.start_weight_update()
    wanted = {"update_info": {"step": "latest"}}
    with pytest.raises(ConfigError, match="one worker and another to the next"):
        llm.llm_engine.collective_rpc("update_weights", kwargs=wanted)


def test_an_engine_without_the_loader_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path).base
    with pytest.raises(ConfigError, match="loaded with tensor_dedup"):
        plain.engine(folder, weight_transfer_config=_BACKEND)


def _transfer(llm: "LLM") -> Any:
    executor: Any = llm.llm_engine.model_executor
    return executor.driver_worker.worker.weight_transfer_engine


@pytest.mark.parametrize(
    "setting", ["lora_config", "speculative_config", "kv_transfer_config", "ec_transfer_config"]
)
def test_what_may_bring_the_work_of_other_weights_is_refused(llm: "LLM", setting: str) -> None:
    own = _transfer(llm)
    config = copy.copy(own.vllm_config)
    type(own)(own.config, config, own.device, own.model)
    setattr(config, setting, object())
    with pytest.raises(UnsupportedError, match=setting) as raised:
        type(own)(own.config, config, own.device, own.model)
    assert raised.value.facts["setting"] == setting


def test_replicas_that_compute_one_answer_together_are_refused(llm: "LLM") -> None:
    own = _transfer(llm)
    config = copy.copy(own.vllm_config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.data_parallel_size = 2
    with pytest.raises(UnsupportedError, match=r"data_parallel_size.*experts of two steps"):
        type(own)(own.config, config, own.device, own.model)


def test_an_update_waits_until_each_replica_has_loaded_the_step() -> None:
    """Of several, vLLM's `collective_rpc` has the answers of the first one alone."""
    called: list[str] = []
    loaded = iter([[[True], [False]], [[True], [True]]])

    class Client:
        async def call_utility_all_async(self, method: str, *args: Any) -> list[list[bool]]:
            called.append(args[0])
            return next(loaded)

    class Engine:
        engine_core, errored = Client(), False

        async def collective_rpc(self, method: str, kwargs: object = None) -> list[bool]:
            called.append(method)
            return [True]

    asyncio.run(step_updates._change(Engine(), {"update_info": {"url": "store://policy@1"}}))
    prepared = ["tensor_dedup_update_is_prepared"] * 2
    change = ["start_weight_update", "update_weights", "finish_weight_update"]
    assert called == ["tensor_dedup_prepare_update", *prepared, *change]


def answer_while_following(root: str) -> tuple[list[int], list[bool]]:
    """Tokens that came during each update; and is each answer that begins after it of that step?

    In the end, two updates are asked for at once, and one is given up.
    """
    store = _steps("llama", Path(root))
    config = {"store": str(store), "cpu_weights": "plain"}
    expected = [_fresh(store, step, cpu_weights="plain")[0] for step in range(3)]
    assert len(set(expected)) == 3

    async def follow() -> tuple[list[int], list[bool]]:
        during, right = [], []
        async with following.engine(f"store://{_RUN}@0", config) as engine:
            for step in (1, 2, 0):
                during.append(await engine.update(step))
                right.append(await engine.outputs() == expected[step])
            await asyncio.gather(engine.update(1), engine.update(2))
            right.append(await engine.outputs() == expected[2])
            given_up = asyncio.create_task(engine.update(1))
            while not given_up.done():
                await asyncio.sleep(0.05)
                given_up.cancel()
            right += [given_up.cancelled(), await engine.outputs() == expected[2]]
            await engine.update(0)
            right.append(await engine.outputs() == expected[0])
        return during, right

    return asyncio.run(follow())


def test_requests_are_answered_while_a_step_is_loaded(tmp_path: Path) -> None:
    during, right = fresh.call_forked(answer_while_following, str(tmp_path))
    assert all(during)
    assert right == [True] * 7
