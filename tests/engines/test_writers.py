"""What writes into the weights of one model never reaches another.

Whatever vLLM 0.32 itself does wrong when it reloads (it forgets the packed copy of a tied head,
and reloads experts wrongly on the CPU) a sharing engine does in the same way: the oracle is a
plain engine that was treated alike.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.model_executor.model_loader import get_model_loader

from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup import report, unshare, verify
from tensor_dedup.digest import digest
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.deferred.layer_records import RECORD
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import pack
from vllm_runs import engines as engine_tools
from vllm_runs import plain, shared

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.vllm

POLICIES = ("packed", "plain")
Open = Callable[..., "LLM"]
Answers = tuple[plain.Answer, ...]


@dataclass
class Expected:
    """What plain engines answer: of either checkpoint; of the base reloaded to the other, and back.

    Their weights are in the form that `policy` keeps them in.
    """

    base: Path
    other: Path
    policy: str

    def __post_init__(self) -> None:
        self.of_other = self._answers(self.other)[0]
        self.of_base, self.reloaded, self.back = self._answers(self.base, self.other, self.base)
        assert self.of_base not in (self.of_other, self.reloaded), "a reload would show nothing"

    def _answers(self, path: Path, *reloads: Path) -> list[Answers]:
        with plain.kept_as(self.policy):
            llm = plain.engine(path)
            found = [plain.outputs(llm)]
            for each in reloads:
                shared.reload(llm, each)
                found.append(plain.outputs(llm))
        plain.let_go(llm)
        return found


class Oracle:
    """Two checkpoints of one model, and what plain engines answer, by the form of weights."""

    def __init__(self, base: Path, other: Path) -> None:
        self.base, self.other = base, other
        self._found: dict[str, Expected] = {}

    def of(self, policy: str) -> Expected:
        if policy not in self._found:
            self._found[policy] = Expected(self.base, self.other, policy)
        return self._found[policy]


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    first = checkpoints.make("llama", tmp_path_factory.mktemp("writers-first")).base
    engine_tools.warm_up(first)


def _oracle(arch: str, root: Path) -> Oracle:
    base = checkpoints.make(arch, root).base
    return Oracle(base, checkpoints.same_header(base, root / "other"))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A llama, which has a head of its own."""
    return _oracle("llama", tmp_path_factory.mktemp("writers"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """An opt: its head is its embedding, and everything has a bias."""
    return _oracle("opt", tmp_path_factory.mktemp("writers-tied"))


@pytest.fixture
def engines() -> Iterator[Open]:
    """Opens sharing engines, and ends them all."""
    opened: list[LLM] = []

    def engine(path: Path, **config: Any) -> "LLM":
        opened.append(shared.engine(path, **config))
        return opened[-1]

    yield engine
    for llm in opened:
        plain.let_go(llm)
    opened.clear()
    gc.collect()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("which", ["oracle", "tied"])
def test_a_reload_changes_nothing_in_the_other_model(
    which: str, policy: str, engines: Open, request: pytest.FixtureRequest
) -> None:
    oracle: Oracle = request.getfixturevalue(which)
    expected = oracle.of(policy)
    mine = engines(oracle.base, cpu_weights=policy)
    other = engines(oracle.base, cpu_weights=policy)
    assert shared.everything(mine, other)
    before, packed = shared.contents(other), shared.handlers(other)

    shared.reload(mine, oracle.other)

    assert not shared.shared_parameters(mine, other)
    assert shared.contents(other) == before
    assert shared.handlers(other) == packed
    assert plain.outputs(other) == expected.of_base
    # Without a packed copy there is none of a tied head to forget: then a reload is like a load.
    packs = policy == "packed"
    assert plain.outputs(mine) == (expected.reloaded if packs else expected.of_other)
    shared.reload(mine, oracle.base)
    assert plain.outputs(mine) == (expected.back if packs else expected.of_base)
    assert bool(shared.handlers(mine)) == (packs and plain.packs())
    assert plain.outputs(other) == expected.of_base
    assert verify().ok


@pytest.mark.parametrize("policy", ["packed", pytest.param("plain", marks=pytest.mark.long)])
def test_with_two_threads_answers_are_those_of_weights_in_the_same_form(
    policy: str, oracle: Oracle, engines: Open
) -> None:
    """With two, oneDNN's product of a packed weight is not torch's of a plain one on every CPU."""
    with engine_tools.threads(2):
        expected = Expected(oracle.base, oracle.other, policy)
        mine = engines(oracle.base, cpu_weights=policy)
        other = engines(oracle.base, cpu_weights=policy)
        assert shared.everything(mine, other)
        assert plain.outputs(mine) == plain.outputs(other) == expected.of_base
        shared.reload(mine, oracle.other)
        shared.reload(mine, oracle.base)
        assert plain.outputs(mine) == expected.back


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_in_kernel_format_are_written_into_one_model_only(
    policy: str, oracle: Oracle, engines: Open
) -> None:
    mine = engines(oracle.base, cpu_weights=policy)
    other = engines(oracle.base, cpu_weights=policy)
    assert shared.shared_parameters(mine, other) == shared.parameters(mine).keys()
    before = shared.contents(other)
    weights = [(name, p.detach() * 1.5) for name, p in shared.parameters(mine).items()]

    mine.collective_rpc(
        "reload_weights",
        kwargs={"weights_iterator": iter(weights), "is_checkpoint_format": False},
    )

    assert not shared.shared_parameters(mine, other)
    assert all(torch.equal(shared.parameters(mine)[name], value) for name, value in weights)
    assert shared.contents(other) == before
    assert plain.outputs(other) == oracle.of(policy).of_base


@pytest.mark.parametrize("policy", POLICIES)
def test_writes_stay_where_they_are_and_are_never_lent(
    policy: str, oracle: Oracle, engines: Open
) -> None:
    mine = engines(oracle.base, cpu_weights=policy)
    other = engines(oracle.base, cpu_weights=policy)
    every = shared.shared_parameters(mine, other)
    assert every == shared.parameters(mine).keys()
    before = shared.contents(other)

    for parameter in shared.parameters(mine).values():
        parameter.data.add_(1)

    assert not shared.shared_parameters(mine, other)
    assert shared.contents(other) == before
    assert plain.outputs(other) == oracle.of(policy).of_base
    assert plain.outputs(mine) != oracle.of(policy).of_base
    third = engines(oracle.base, cpu_weights=policy)
    assert report().models[-1].bytes_read == 0
    assert shared.everything(third, other)
    assert not shared.shared_parameters(third, mine)
    assert shared.contents(third) == before
    assert plain.outputs(third) == oracle.of(policy).of_base


def test_originals_are_lent_while_only_a_reloaded_model_holds_them(
    oracle: Oracle, engines: Open
) -> None:
    mine = engines(oracle.base, cpu_weights="plain")
    before = shared.contents(mine)
    shared.reload(mine, oracle.other)
    assert shared.contents(mine).keys() == before.keys()
    assert not any(content == before[n] for n, content in shared.contents(mine).items())

    third = engines(oracle.base, cpu_weights="plain")

    assert not shared.shared_parameters(third, mine)
    assert shared.contents(third) == before
    assert plain.outputs(third) == oracle.of("plain").of_base


def test_a_reload_frees_the_packed_weights_it_replaces(tied: Oracle, engines: Open) -> None:
    oracle = tied
    mine, other = engines(oracle.base), engines(oracle.base)
    assert shared.shared_handlers(mine, other) == shared.handlers(mine).keys()
    shared.reload(mine, oracle.other)
    kept = shared.shared_handlers(mine, other)  # a tied head, see above
    old = {n: weakref.ref(f) for n, f in shared.handlers(other).items() if n not in kept}
    assert bool(old) == plain.packs()

    shared.reload(other, oracle.other)
    gc.collect()

    assert not [name for name, handler in old.items() if handler() is not None]


def test_our_loader_reads_for_real_when_it_is_asked_for_a_reload(
    oracle: Oracle, engines: Open
) -> None:
    mine, other = engines(oracle.base), engines(oracle.base)
    assert shared.everything(mine, other)
    config = mine.llm_engine.vllm_config
    assert config.load_config.load_format == "tensor_dedup"
    loader: Any = get_model_loader(config.load_config)

    weights = list(loader.get_all_weights(config.model_config, plain.model(mine)))

    expected = checkpoints.tensors(oracle.base)
    assert {name for name, _ in weights} == expected.keys()
    assert all(tensor.device.type == "cpu" for _, tensor in weights)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights)


def test_a_weight_update_that_vllm_refuses_changes_nothing(oracle: Oracle, engines: Open) -> None:
    """It runs only with `weight_transfer_config`; what happens then is in test_after_load."""
    mine, other = engines(oracle.base), engines(oracle.base)
    assert shared.everything(mine, other)

    for step in ("start_weight_update", "finish_weight_update"):
        with pytest.raises(RuntimeError, match=r"[Ww]eight transfer"):
            mine.collective_rpc(step)
    with pytest.raises(RuntimeError, match=r"[Ww]eight transfer"):
        mine.collective_rpc("update_weights", kwargs={"update_info": {}})

    assert shared.everything(mine, other)


@pytest.mark.parametrize("policy", POLICIES)
def test_unshare_gives_a_model_memory_of_its_own(
    policy: str, oracle: Oracle, engines: Open
) -> None:
    mine = engines(oracle.base, cpu_weights=policy)
    other = engines(oracle.base, cpu_weights=policy)
    assert shared.everything(mine, other)
    before, objects = shared.contents(mine), shared.parameters(mine)

    copied = unshare(mine)

    assert copied == sum(map(len, before.values()))
    assert not shared.shared_parameters(mine, other)
    assert all(shared.parameters(mine)[name] is each for name, each in objects.items())
    assert shared.contents(mine) == shared.contents(other) == before
    assert plain.outputs(mine) == plain.outputs(other) == oracle.of(policy).of_base
    assert unshare(mine) == 0
    # What is opaque is never written, and stays one object.
    assert shared.shared_handlers(mine, other) == shared.handlers(mine).keys()


def test_unshare_says_what_it_takes() -> None:
    with pytest.raises(UnsupportedError, match="collective_rpc"):
        unshare(object())


def test_verify_finds_a_resident_whose_bytes_are_not_its_names(
    oracle: Oracle, engines: Open
) -> None:
    mine, other = engines(oracle.base), engines(oracle.base)
    assert shared.everything(mine, other)
    found = verify()
    assert found.ok
    assert found.residents == len(registry.residents()) > 0
    packed = {getattr(linear, RECORD).key for linear in shared.handlers(mine).values()}
    assert bool(packed) == plain.packs()
    assert packed <= set(found.not_verifiable)
    wrong = digest(b"something else")

    [resident] = pack([(torch.arange(100), wrong)])
    registry.register(resident)

    assert verify().mismatches == (wrong,)
    assert verify().residents == found.residents + 1


@pytest.mark.parametrize(
    ("arch", "policy"),
    [("mixtral", "packed"), pytest.param("qwen3_moe", "plain", marks=pytest.mark.long)],
)
def test_a_reload_of_experts_changes_nothing_in_the_other_model(
    arch: str, policy: str, tmp_path: Path
) -> None:
    fresh.call_forked(reload_experts, arch, policy, tmp_path)


def reload_experts(arch: str, policy: str, root: Path) -> None:
    """In a process of its own, because a MoE model must be its first."""
    engine_tools.warm_up(checkpoints.make(arch, root).base)
    _reload_experts(_oracle(arch, root), policy)


def _reload_experts(oracle: Oracle, policy: str) -> None:
    base, expected = oracle.base, oracle.of(policy)
    _frees_its_experts(shared.engine(base, cpu_weights=policy), oracle.other)
    mine = shared.engine(base, cpu_weights=policy)
    other = shared.engine(base, cpu_weights=policy)
    assert shared.everything(mine, other)
    before, experts = shared.contents(other), _experts(mine)
    assert experts

    shared.reload(mine, oracle.other)

    assert not shared.shared_parameters(mine, other) & experts
    assert shared.contents(other) == before
    assert plain.outputs(other) == expected.of_base
    assert plain.outputs(mine) == expected.reloaded
    third = shared.engine(base, cpu_weights=policy)
    assert shared.everything(third, other)
    assert plain.outputs(third) == expected.of_base


def _frees_its_experts(alone: "LLM", other: Path) -> None:
    """What only this one used is gone when it is reloaded, though the engine lives."""
    # Nothing else is stacked.
    held = [weakref.ref(each) for each in registry.residents() if len(each.key.shape) == 3]
    assert len(held) == len(_experts(alone)) > 0
    shared.reload(alone, other)
    gc.collect()
    assert not [each for each in held if each() is not None]
    plain.let_go(alone)


def _experts(llm: "LLM") -> set[str]:
    """The experts' weights; their biases vLLM leaves as they were."""
    return {name for name in shared.parameters(llm) if name.endswith(("w13_weight", "w2_weight"))}
