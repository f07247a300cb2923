"""Adapters, drafts, models that see, and pooling models: shared, and exactly what plain vLLM has.

Each is loaded beside a model of another kind with which it has weights in common, packed and
plain. What it shares is asserted first.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

from models import kinds
from models import tiny_checkpoints as checkpoints
from tensor_dedup import report
from vllm_runs import engines, plain, shared

if TYPE_CHECKING:
    from torch import nn
    from vllm import LLM

pytestmark = [
    pytest.mark.vllm,
    # What n-gram drafts give to numba.
    pytest.mark.filterwarnings("ignore:(?s).*reflected list"),
]

Options = dict[str, Any]
_REPEATED = [{"prompt_token_ids": [7, 8, 9, 10] * 6}, {"prompt_token_ids": [1, 2, 3] * 5}]


@dataclass(frozen=True)
class Case:
    """One kind of model: how it is loaded and asked, and what is there before it."""

    path: Path
    neighbour: Path
    ask: Callable[["LLM"], Any]
    options: Options = field(default_factory=dict)
    beside: Options = field(default_factory=dict)  # how the neighbour is loaded
    ask_beside: Callable[["LLM"], Any] = plain.outputs
    own: tuple[str, ...] = ()  # how names of parameters begin that the neighbour does not have
    # Of a draft: what no checkpoint fills, because it takes that from its target afterwards.
    taken: frozenset[str] = frozenset()
    computed: tuple[str, ...] = ()  # of numbers that were read while loading: never shared


def _llamas(root: Path) -> dict[str, Case]:
    base = checkpoints.make("llama", root).base
    adapter = str(kinds.lora(base, root / "adapter"))

    def with_and_without(llm: "LLM") -> Any:
        first = plain.outputs(llm)
        adapted = plain.outputs(llm, lora_request=LoRARequest("adapter", 1, adapter))
        assert adapted != first
        assert plain.outputs(llm) == first
        return first, adapted

    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    draft = kinds.eagle(base, root / "eagle")
    eagle = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    pooling = {"runner": "pooling", "skip_tokenizer_init": False}
    embedder, classifier = (
        kinds.embedder(base, root / "embedder"),
        kinds.classifier(base, root / "classifier"),
    )
    return {
        "lora": Case(base, base, with_and_without, lora),
        "ngram": Case(base, base, _greedy, {"speculative_config": lookup}),
        "eagle": Case(
            base,
            base,
            _greedy,
            {"speculative_config": eagle},
            taken=frozenset({"model.embed_tokens.weight"}),
        ),
        "embed": Case(embedder, base, lambda llm: kinds.pooled(llm, "embed"), pooling),
        "classify": Case(
            classifier,
            base,
            lambda llm: kinds.pooled(llm, "classify"),
            pooling,
            own=("score.",),
        ),
    }


def _qwens(root: Path) -> dict[str, Case]:
    base = checkpoints.make("qwen2", root).base
    third = checkpoints.make("qwen3", root).base
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    pooling = {"runner": "pooling", "skip_tokenizer_init": False}
    return {
        "mtp": Case(kinds.mimo(base, root / "mimo"), base, _greedy, {"speculative_config": mtp}),
        "reward": Case(
            kinds.reward(base, root / "reward"),
            base,
            lambda llm: kinds.pooled(llm, "token_classify"),
            pooling,
            own=("score.",),
        ),
        "rerank": Case(
            kinds.reranker(third, root / "reranker"),
            third,
            lambda llm: kinds.pooled(llm, "classify"),
            pooling,
            own=("score.",),
            computed=("score.",),
        ),
    }


def _seers(root: Path) -> dict[str, Case]:
    _, first, second = kinds.seeing(root)
    options = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}
    own = ("language_model.", "language_projection.", "qformer.", "query_tokens")
    return {"vision": Case(second, first, _look, options, options, _look, own)}


def _greedy(llm: "LLM") -> Any:
    """Tokens of prompts that repeat themselves: what is drafted for them is often accepted."""
    return plain.tokens(plain.outputs(llm, prompts=_REPEATED))


def _look(llm: "LLM") -> Any:
    found = plain.outputs(llm, prompts=kinds.pictures())
    assert found[0] != found[1], "it does not see"
    return found


MAKERS = {
    **dict.fromkeys(("lora", "ngram", "eagle", "embed", "classify"), _llamas),
    **dict.fromkeys(("mtp", "reward", "rerank"), _qwens),
    "vision": _seers,
}


@dataclass
class Expected:
    """What plain vLLM answers, and what it has put together and packed."""

    answers: Any
    assembled: kinds.Loaded
    packed: list[str]


class World:
    """Cases, and what plain vLLM makes of each, once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cases: dict[str, Case] = {}
        self._expected: dict[str, Expected] = {}

    def case(self, name: str) -> Case:
        if name not in self._cases:
            maker = MAKERS[name]
            self._cases |= maker(self._root / maker.__name__)
        return self._cases[name]

    def expected(self, name: str, policy: str) -> Expected:
        case = self.case(name)
        key = f"{name} {policy}"
        if key not in self._expected:
            with plain.kept_as(policy):
                self._expected[key] = _plainly(case.path, case.ask, case.options)
        return self._expected[key]

    def beside(self, name: str, policy: str) -> Expected:
        case = self.case(name)
        key = f"beside {case.neighbour} {sorted(case.beside)} {policy}"
        if key not in self._expected:
            with plain.kept_as(policy):
                self._expected[key] = _plainly(case.neighbour, case.ask_beside, case.beside)
        return self._expected[key]


def _plainly(path: Path, ask: Callable[["LLM"], Any], options: Options) -> Expected:
    with kinds.assembled() as assembled, kinds.packing() as packed:
        llm = plain.engine(path, **options)
    answers = ask(llm)
    engines.drop(llm)
    del llm
    gc.collect()
    return Expected(answers, assembled, packed)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("kinds")
    engines.warm_up(checkpoints.make("llama", root / _llamas.__name__).base)
    return World(root)


@pytest.fixture(autouse=True)
def _dropped() -> Iterator[None]:
    yield
    gc.collect()


def _once_each() -> Iterator[Any]:
    """Every kind in one of both forms in any run, in the other one in long runs only."""
    for number, name in enumerate(MAKERS):
        for policy in ("packed", "plain"):
            # numba compiles for longer than all of the others take.
            long = name == "ngram" or (policy == "plain") == (number % 2 == 0)
            yield pytest.param(name, policy, marks=[pytest.mark.long] if long else [])


@pytest.mark.parametrize(("name", "policy"), list(_once_each()))
def test_a_kind_of_model_shares_and_is_what_plain_vllm_has(
    name: str, policy: str, world: World
) -> None:
    case, beside = world.case(name), world.beside(name, policy)
    expected = world.expected(name, policy)
    with kinds.packing() as packed:
        neighbour = plain.engine(
            case.neighbour, tensor_dedup={"cpu_weights": policy}, **case.beside
        )
        before = shared.contents(neighbour)
        with kinds.finished() as finished:
            llm = plain.engine(case.path, tensor_dedup={"cpu_weights": policy}, **case.options)
        again = plain.engine(case.path, tensor_dedup={"cpu_weights": policy}, **case.options)

    _assert_shares(llm, neighbour, case.own)
    _assert_shares(again, llm, case.computed)
    assert case.ask(llm) == expected.answers
    assert case.ask_beside(neighbour) == beside.answers
    assert case.ask(again) == expected.answers
    # Adapters were applied, drafts proposed: still one memory, and nobody wrote to it.
    assert shared.contents(neighbour) == before
    _assert_shares(llm, neighbour, case.own)
    if policy == "packed":
        theirs = {*expected.packed} - {expected.assembled[-1].get(n) for n in case.taken}
        assert theirs <= {*packed}
    else:
        _assert_equal(finished, expected.assembled, case.taken)
    engines.drop(neighbour, llm, again)


def _assert_shares(one: "LLM", other: "LLM", own: tuple[str, ...]) -> None:
    """All in one memory but what begins like `own`; drafts too, where both have one."""
    pairs = [(plain.model(one), plain.model(other))]
    drafts = _draft(one), _draft(other)
    if drafts[0] is not None and drafts[1] is not None:
        pairs.append((drafts[0], drafts[1]))
    for mine, theirs in pairs:
        forms = kinds.same_memory(mine, theirs)
        assert any(forms.values())
        assert [form for form, same in forms.items() if same == form.startswith(own or "-")] == []


def _assert_equal(mine: kinds.Loaded, theirs: kinds.Loaded, taken: frozenset[str]) -> None:
    """Parameter by parameter."""
    assert len(mine) == len(theirs) > 0
    for number, (model, plain_model) in enumerate(zip(mine, theirs, strict=True)):
        left_out = taken if number else frozenset()
        assert model.keys() == plain_model.keys()
        assert kinds.NOTHING not in {model[name] for name in model.keys() - left_out}
        assert engines.equal(model, plain_model) >= model.keys() - left_out


def _draft(llm: "LLM") -> "nn.Module | None":
    """The draft model inside an engine, if there is one."""
    executor: Any = llm.llm_engine.model_executor
    drafter = getattr(executor.driver_worker.worker.model_runner, "drafter", None)
    model: nn.Module | None = getattr(drafter, "model", None)
    return model


def test_a_frozen_vision_tower_is_most_of_what_two_models_that_see_share(world: World) -> None:
    case = world.case("vision")
    config = {"cpu_weights": "plain"}
    first = plain.engine(case.neighbour, tensor_dedup=config, **case.beside)
    second = plain.engine(case.path, tensor_dedup=config, **case.options)
    sizes = {name: parameter.nbytes for name, parameter in shared.parameters(second).items()}
    tower = {name for name in sizes if name.startswith(kinds.TOWER)}

    assert shared.shared_parameters(first, second) == tower
    last = report().models[-1]
    assert last.total_bytes == sum(sizes.values())
    assert last.shared_bytes == sum(sizes[name] for name in tower)
    assert round(last.shared_bytes / last.total_bytes, 2) == 0.59
    engines.drop(first, second)


# --- load formats with a loader of their own in vLLM


@pytest.mark.parametrize(
    ("arch", "policy"),
    [
        ("llama", "packed"),
        ("llama_tied", "plain"),
        pytest.param("llama", "plain", marks=pytest.mark.long),
        pytest.param("llama_tied", "packed", marks=pytest.mark.long),
    ],
)
def test_a_saved_state_shares_with_the_checkpoint_it_came_from(
    arch: str, policy: str, tmp_path: Path, world: World
) -> None:
    base = checkpoints.make(arch, tmp_path).base
    state = _saved_state(base, tmp_path / "state")
    with kinds.loaded_states() as assembled:
        llm = plain.engine(state, load_format="sharded_state")
    answers = plain.outputs(llm)
    engines.drop(llm)
    del llm
    neighbour = shared.engine(base, cpu_weights=policy)
    with kinds.finished() as finished:
        mine = plain.engine(
            state, load_format="sharded_state", tensor_dedup={"cpu_weights": policy}
        )

    again = plain.engine(state, load_format="sharded_state", tensor_dedup={"cpu_weights": policy})
    assert shared.everything(again, mine)
    assert report().models[-1].skipped == []
    assert plain.outputs(mine) == plain.outputs(neighbour) == answers
    if policy == "plain":
        assert shared.everything(mine, neighbour)
        _assert_equal(finished, assembled, frozenset())
    else:
        # Packed weights are found by the parts they were put together of, and these are whole.
        private = shared.handlers(mine).keys() - shared.shared_handlers(mine, neighbour)
        fused = {"qkv_proj", "gate_up_proj"} if plain.packs() else set()
        assert {name.rpartition(".")[2] for name in private} == fused
        assert shared.shared_parameters(mine, neighbour) == shared.parameters(mine).keys()
    engines.drop(neighbour, mine, again)


def _saved_state(base: Path, target: Path) -> Path:
    """What vLLM saves of a model whose weights are plain; packed ones it cannot save."""
    llm = shared.engine(base, cpu_weights="plain")
    target.mkdir()
    ShardedStateLoader.save_model(plain.model(llm), str(target))
    (target / "config.json").write_bytes((base / "config.json").read_bytes())
    engines.drop(llm)
    return target


def test_what_the_streamer_reads_from_a_folder_is_shared(world: World) -> None:
    pytest.importorskip("runai_model_streamer")
    case = world.case("ngram")
    streamed: dict[str, Any] = {"load_format": "runai_streamer"}
    with kinds.streamed() as assembled:
        llm = plain.engine(case.path, **streamed)
    answers = plain.outputs(llm)
    engines.drop(llm)
    del llm
    neighbour = shared.engine(case.path, cpu_weights="plain")
    with kinds.finished() as finished:
        mine = plain.engine(case.path, tensor_dedup={"cpu_weights": "plain"}, **streamed)

    assert shared.everything(mine, neighbour)
    assert report().models[-1].skipped == []
    assert plain.outputs(mine) == answers
    _assert_equal(finished, assembled, frozenset())
    engines.drop(neighbour, mine)
