"""When the last model is dropped nothing is left: no resident, mapping, descriptor or memory."""

import ctypes
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from models import tiny_checkpoints as checkpoints
from processes import fresh, process_state
from tensor_dedup import report
from tensor_dedup.loader.residents.registry import registry
from vllm_runs import engines, plain, shared

pytestmark = pytest.mark.vllm

# What the product promises beyond plain vLLM after the same loads and drops.
SLACK = 64 << 20
MEDIUM: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
GENERATIONS = 2


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """About 200 MB of llama, and a fine-tune of its last layer."""
    root = tmp_path_factory.mktemp("medium")
    torch.manual_seed(0)
    kind: Any = hf.LlamaForCausalLM
    model = kind(hf.LlamaConfig(**MEDIUM)).to(torch.bfloat16)
    model.save_pretrained(root / "base")
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.mul_(1.01)
    model.save_pretrained(root / "fine_tune")
    assert checkpoints.nbytes(root / "base") > 190 << 20
    return root / "base", root / "fine_tune"


@pytest.fixture(scope="module")
def plainly(medium: tuple[Path, Path]) -> list[dict[str, int]]:
    """What plain vLLM takes for the same loads and drops, in a process of its own too."""
    return fresh.call_forked(load_and_drop, *medium, None)


@pytest.mark.parametrize("policy", ["packed", pytest.param("plain", marks=pytest.mark.long)])
def test_memory_after_all_is_dropped_is_that_of_plain_vllm(
    policy: str, medium: tuple[Path, Path], plainly: list[dict[str, int]]
) -> None:
    sharing = fresh.call_forked(load_and_drop, *medium, {"cpu_weights": policy})

    size = checkpoints.nbytes(medium[0])
    for generation in range(GENERATIONS):
        mine, theirs = sharing[generation], plainly[generation]
        said = f"generation {generation}: {mine} sharing, {theirs} plainly, {size} of weights"
        assert mine["dropped"] - theirs["dropped"] < SLACK, said
        # The measure would notice: while the models live, one copy more or less is seen.
        assert theirs["loaded"] - theirs["dropped"] > 1.5 * size, said
        assert theirs["loaded"] - mine["loaded"] > 0.5 * size, said
        assert mine["left"] == 0, said
    assert sharing[-1]["dropped"] - sharing[0]["dropped"] < SLACK


def load_and_drop(
    base: Path, fine_tune: Path, config: dict[str, Any] | None
) -> list[dict[str, int]]:
    """By generation: bytes while both models live, and after; what is left of slabs and records."""
    settings: dict[str, Any] = {} if config is None else {"tensor_dedup": config}
    found = []
    for _ in range(GENERATIONS):
        first = plain.engine(base, **settings)
        second = plain.engine(fine_tune, **settings)
        if config is not None:
            assert not shared.nothing(first, second), "nothing is shared, so this proves nothing"
        plain.outputs(first)
        plain.outputs(second)
        loaded = memory()
        plain.let_go(first)
        plain.let_go(second)
        del first, second
        gc.collect()
        left = sum(process_state.slabs()) + len(registry.residents()) + len(registry.records())
        found.append({"loaded": loaded, "dropped": memory(), "left": left})
    return found


def memory() -> int:
    """PSS of this process in bytes, but for files: who else maps torch's libraries is chance."""
    ctypes.CDLL(None).malloc_trim(0)
    fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    sizes = {name: int(size) * 1024 for name, size, *_ in fields}
    return sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]


@pytest.fixture(scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    first = checkpoints.make("llama", tmp_path_factory.mktemp("lifetime")).base
    engines.warm_up(first)


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize(
    ("arch", "policy"),
    [
        ("llama_tied", "plain"),
        ("opt", "packed"),
        pytest.param("llama_tied", "packed", marks=pytest.mark.long),
        pytest.param("opt", "plain", marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_and_a_second_generation_is_as_the_first(
    arch: str, policy: str, tmp_path: Path
) -> None:
    pair = checkpoints.make(arch, tmp_path)
    answers = []
    for path in (pair.base, pair.fine_tune):
        with plain.kept_as(policy):
            llm = plain.engine(path)
        answers.append(plain.outputs(llm))
        plain.let_go(llm)
        del llm
    before, descriptors = process_state.remaining(), process_state.descriptors()

    for _ in range(GENERATIONS):
        _generation(pair, policy, answers)
        assert not process_state.remaining().beyond(before)
        assert not process_state.descriptors() - descriptors


def _held() -> list[object]:
    return [*registry.residents(), *registry.records().values()]


def _generation(pair: checkpoints.Pair, policy: str, answers: list[Any]) -> None:
    """Load three models and drop them one by one: a resident lives as long as one uses it."""
    others = {id(each) for each in _held()}  # of engines that vLLM itself keeps
    first = shared.engine(pair.base, cpu_weights=policy)
    second = shared.engine(pair.fine_tune, cpu_weights=policy)
    third = shared.engine(pair.base, cpu_weights=policy)
    assert shared.everything(first, third)
    assert not shared.nothing(first, second)
    assert [plain.outputs(first), plain.outputs(second)] == answers
    held = [weakref.ref(each) for each in _held() if id(each) not in others]
    assert len(held) > 10

    plain.let_go(first)
    del first
    gc.collect()
    assert all(each() is not None for each in held), "the third model uses them still"
    assert plain.outputs(third) == answers[0]
    plain.let_go(third)
    del third
    gc.collect()
    assert 0 < sum(each() is not None for each in held) < len(held), "the second uses some"
    assert plain.outputs(second) == answers[1]
    plain.let_go(second)
    del second
    gc.collect()
    assert not [each for each in held if each() is not None]


@pytest.mark.usefixtures("_warm")
def test_what_was_dropped_is_read_again(tmp_path: Path) -> None:
    """The registry holds nothing: a model that nobody else has costs a full read each time."""
    base = checkpoints.make("llama", tmp_path).base
    shared.quiet(base)
    for _ in range(GENERATIONS):
        first = shared.engine(base)
        assert report().models[-1].bytes_read == checkpoints.nbytes(base)
        again = shared.engine(base)
        assert report().models[-1].bytes_read == 0
        assert shared.everything(first, again)
        for llm in (first, again):
            plain.let_go(llm)
        del first, again, llm
        gc.collect()
