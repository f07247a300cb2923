"""Ranks of one model, and of others: each loads what plain vLLM gives it, and equal slices meet.

Here one process loads the model of every rank in turn, by vLLM's own code; what really runs in
several processes is in test_parallel_engines.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup.loader.not_shared import NotShared
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.types import ResidentKey
from vllm_runs import engines, loads

pytestmark = pytest.mark.vllm

PLAIN: dict[str, Any] = {"cpu_weights": "plain"}
Digests = dict[str, str]
Place = tuple[loads.Kind, int, int]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def base(root: Path) -> Iterator[Path]:
    """A llama; loads are prepared."""
    path = checkpoints.make("llama", root).base
    engines.warm_up(path)
    with loads.prepared(path):
        yield path


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    gc.collect()
    before = resident_keys()  # of engines that vLLM itself keeps
    yield
    gc.collect()
    assert resident_keys() <= before


def resident_keys() -> set[ResidentKey]:
    return {resident.key for resident in registry.residents()}


def settings(*places: Place) -> dict[str, Any]:
    """What a configuration says of a rank that stands there."""
    names = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}
    found: dict[str, Any] = {"world_size": 1, "rank": 0}
    for kind, rank, size in places:
        found[names[kind]] = size
        found["world_size"] *= size
        found["rank"] += rank
    return found


def load(
    path: Path,
    *places: Place,
    config: dict[str, Any] | None = None,
    parallel: Mapping[str, Any] | None = None,
) -> loads.Model:
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(loads.as_rank(*place))
        return loads.load(path, config, settings(*places) if parallel is None else parallel)


def expected(path: Path, *places: Place) -> Digests:
    """A digest of every parameter that plain vLLM puts together for that rank, before it packs."""
    with engines.assembled() as found:
        load(path, *places)
    return found


def shared(one: loads.Model, other: loads.Model) -> set[str]:
    """Parameters of `one` that are the same memory in the other, packed ones as the same object."""
    forms = engines.forms(one.module, other.module)
    return {name for name, same in forms.items() if same}


def check(model: loads.Model, wanted: Digests) -> None:
    """Every parameter is there, has bytes, and is what plain vLLM makes of it."""
    named = dict(model.module.named_parameters(remove_duplicate=False))
    assert all(parameter.numel() for parameter in named.values())
    assert model.parameters() == wanted


def norms(names: Mapping[str, object]) -> set[str]:
    return {name for name in names if "norm" in name}


def test_slices_of_ranks_are_those_of_plain_vllm_and_meet_their_like(base: Path) -> None:
    """Two engines of two ranks: every slice twice; what is whole in both ranks, among all."""
    places: list[Place] = [("tp", 0, 2), ("tp", 1, 2)]
    wanted = [expected(base, place) for place in places]
    different = {name for name in wanted[0] if wanted[0][name] != wanted[1][name]}
    assert different == wanted[0].keys() - norms(wanted[0])

    first = [load(base, place, config=PLAIN) for place in places]
    second = [load(base, place, config=PLAIN) for place in places]

    for rank, digests in enumerate(wanted):
        check(first[rank], digests)
        check(second[rank], digests)
        assert shared(second[rank], first[rank]) == digests.keys()
    assert norms(wanted[0])
    assert shared(first[0], first[1]) == norms(wanted[0])


@pytest.mark.parametrize("policy", ["packed", "plain"])
def test_a_known_slice_reads_nothing(base: Path, policy: str) -> None:
    engines.leave_alone(base / checkpoints.WEIGHTS)
    place: Place = ("tp", 1, 2)
    config = {"cpu_weights": policy}

    first = load(base, place, config=config)
    again = load(base, place, config=config)

    assert shared(again, first) >= {
        name for name, p in again.module.named_parameters() if p.numel()
    }
    assert report().bytes_read == 0
    assert report().shared_bytes == report().total_bytes
    plain = load(base, place)
    wanted = plain.functions() if policy == "packed" else {}
    assert again.functions() == first.functions() == wanted
    assert policy != "packed" or again.parameters() == plain.parameters()


def report() -> ModelReport:
    return engines.last_report()


@pytest.mark.parametrize("policy", ["packed", "plain"])
def test_two_ranks_together_read_an_unknown_checkpoint_once(base: Path, policy: str) -> None:
    """But for the norms, which both have; and where they are packed, they hash it once."""
    places: list[Place] = [("tp", 0, 2), ("tp", 1, 2)]
    read = hashed = both = 0
    for place in places:
        model = load(base, place, config={"cpu_weights": policy})
        read += report().bytes_read
        hashed += report().bytes_hashed
        both = sum(p.nbytes for n, p in model.module.named_parameters() if "norm" in n)
        del model
        gc.collect()
    once = report().checkpoint_bytes + both
    assert 0 < both < once / 100
    assert read == once
    assert policy == "plain" or hashed == once


def test_what_is_whole_in_every_rank_meets_the_model_that_is_in_one(base: Path) -> None:
    """Sizes 1, 2 and 4: slices differ in shape, and norms do not."""
    whole = load(base, config=PLAIN)
    half = load(base, ("tp", 0, 2), config=PLAIN)
    quarter = load(base, ("tp", 3, 4), config=PLAIN)

    check(half, expected(base, ("tp", 0, 2)))
    check(quarter, expected(base, ("tp", 3, 4)))
    every = norms(whole.parameters())
    assert every
    assert shared(half, whole) == shared(quarter, whole) == shared(quarter, half) == every


def test_equal_halves_of_one_tensor_meet(base: Path, root: Path) -> None:
    """Two ranks whose slices of a file come from different bytes of it, which are equal."""
    path = checkpoints.frozen_embedding(base, root / "halves")
    _make_halves_equal(path)
    one, other = (load(path, ("tp", rank, 2), config=PLAIN) for rank in range(2))

    check(one, expected(path, ("tp", 0, 2)))
    check(other, expected(path, ("tp", 1, 2)))
    # Of the fused ones too, which are put together of several halves; embeddings are left as
    # they were.
    assert {n for n in one.parameters() if n not in shared(one, other)} == {
        "lm_head.weight",
        "model.embed_tokens.weight",
    }


def _make_halves_equal(path: Path) -> None:
    """In the file, the second half of every matrix is as the first, along the cut of its ranks."""
    import safetensors.torch

    file = path / checkpoints.WEIGHTS
    held = safetensors.torch.load_file(file)
    for name, tensor in held.items():
        if "_proj" in name:
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            half = tensor.narrow(dim, 0, tensor.shape[dim] // 2)
            held[name] = torch.cat([half, half], dim).contiguous()
    safetensors.torch.save_file(held, file, metadata={"format": "pt"})


def test_a_fine_tune_shares_the_slices_that_it_did_not_change(base: Path, root: Path) -> None:
    pair = checkpoints.make("llama", root)
    place: Place = ("tp", 1, 2)
    one = load(pair.base, place, config=PLAIN)
    other = load(pair.fine_tune, place, config=PLAIN)

    check(other, expected(pair.fine_tune, place))
    [changed] = pair.changed
    assert other.parameters().keys() - shared(other, one) == {changed}


def test_stages_of_a_pipeline_meet_the_layers_of_the_whole_model(base: Path) -> None:
    """Stage by stage, and stages that are cut differently."""
    whole = load(base, config=PLAIN)
    stages = [load(base, ("pp", rank, 2), config=PLAIN) for rank in range(2)]

    for rank, stage in enumerate(stages):
        check(stage, expected(base, ("pp", rank, 2)))
        assert shared(stage, whole) == stage.parameters().keys()
    held = [set(stage.parameters()) for stage in stages]
    assert not held[0] & held[1]
    assert held[0] | held[1] == whole.parameters().keys()
    last = load(base, ("pp", 2, 3), config=PLAIN)
    assert shared(last, stages[1]) == last.parameters().keys()


def test_a_stage_of_ranks_meets_those_ranks_without_a_pipeline(base: Path) -> None:
    places: list[Place] = [("tp", 1, 2), ("pp", 1, 2)]
    whole = load(base, places[0], config=PLAIN)
    stage = load(base, *places, config=PLAIN)

    check(stage, expected(base, *places))
    assert shared(stage, whole) == stage.parameters().keys()


def test_experts_of_ranks(root: Path) -> None:
    """In a process of its own, because a MoE model must be its first."""
    fresh.call_forked(experts_of_ranks, root / "experts")


def experts_of_ranks(folder: Path) -> None:
    pair = checkpoints.make("mixtral", folder)
    engines.warm_up(pair.base)
    with loads.prepared(pair.base):
        _cut_within_experts(pair.base)
        _whole_experts(pair.base)
        _balanced_experts(pair.base)
        gc.collect()
        assert registry.residents() == []


def _is_expert(name: str) -> bool:
    return name.endswith(("w13_weight", "w2_weight"))


def _cut_within_experts(base: Path) -> None:
    """Tensor parallel: every rank has a part of each expert."""
    for rank in range(2):
        first = load(base, ("tp", rank, 2), config=PLAIN)
        again = load(base, ("tp", rank, 2), config=PLAIN)
        _check_processed(again, load(base, ("tp", rank, 2)))
        assert shared(again, first) == again.parameters().keys()
        assert any(map(_is_expert, shared(again, first)))


def _expert_parallel(rank: int, size: int) -> dict[str, Any]:
    return {**settings(("tp", rank, size)), "enable_expert_parallel": True}


def _whole_experts(base: Path) -> None:
    """Expert parallel: every rank has some experts, whole, and a part of the rest."""
    plain, first, again = (
        [
            load(base, ("tp", rank, 2), config=config, parallel=_expert_parallel(rank, 2))
            for rank in range(2)
        ]
        for config in (None, PLAIN, PLAIN)
    )
    for rank in range(2):
        _check_processed(first[rank], plain[rank])
        assert shared(again[rank], first[rank]) == first[rank].parameters().keys()
    experts = {name for name in first[0].parameters() if _is_expert(name)}
    assert all(first[0].module.get_parameter(name).shape[0] == 2 for name in experts)
    assert experts
    assert not shared(first[0], first[1]) & experts
    assert shared(first[0], first[1]) >= norms(first[0].parameters())


def _balanced_experts(base: Path) -> None:
    """What moves experts from rank to rank writes them: they are each model's own."""
    parallel = _expert_parallel(0, 2)
    before = load(base, ("tp", 0, 2), config=PLAIN, parallel=parallel)
    balanced = {**parallel, "enable_eplb": True}
    one, other = (load(base, ("tp", 0, 2), config=PLAIN, parallel=balanced) for _ in range(2))

    _check_processed(one, load(base, ("tp", 0, 2), parallel=balanced))
    experts = {name for name in one.parameters() if _is_expert(name)}
    assert experts
    assert dict(report().skipped) == dict.fromkeys(experts, NotShared.EPLB)
    for model in (before, other):
        assert shared(one, model) == one.parameters().keys() - experts
    with torch.no_grad():
        for name in experts:
            one.module.get_parameter(name).zero_()
    assert other.parameters() == before.parameters()
    assert one.parameters() != other.parameters()


def _check_processed(model: loads.Model, plain: loads.Model) -> None:
    """Every parameter that plain vLLM does not keep as nothing but packed is what it is there."""
    wanted = plain.parameters()
    assert any(map(_is_expert, wanted))
    mine = model.parameters()
    assert {name: mine[name] for name in wanted} == wanted
