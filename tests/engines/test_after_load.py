"""What happens to a model after it was loaded happens to no other one.

Reloading in place is in test_writers, dropping everything in test_lifetime. The oracle is a plain
engine that was treated alike.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from models import tiny_checkpoints as checkpoints
from processes import process_state
from tensor_dedup import report, verify
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.types import ResidentKey
from vllm_runs import (
    engines,
    plain,
    shared,
    transfers,  # noqa: F401 - engines that transfer weights without a GPU
)

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.vllm

POLICIES = ("packed", "plain")
TIMES = 20  # in long runs; elsewhere often enough that each of three is made twice
Answers = tuple[plain.Answer, ...]
Open = Callable[..., "LLM"]


@dataclass
class World:
    """A base, a fine-tune of it, another model under the same names, and what plain vLLM says."""

    base: Path
    fine_tune: Path
    changed: str  # the one tensor that differs between them, in the files and in the model
    other: Path
    expected: dict[str, dict[Path, Answers]]  # by the form that weights are kept in


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("after-load")
    pair = checkpoints.make("llama", root)
    other = checkpoints.same_header(pair.base, root / "other")
    shared.quiet(pair.base, pair.fine_tune, other)
    engines.warm_up(pair.base)
    expected: dict[str, dict[Path, Answers]] = {policy: {} for policy in POLICIES}
    for policy in POLICIES:
        for path in (pair.base, pair.fine_tune, other):
            with plain.kept_as(policy):
                llm = plain.engine(path)
            expected[policy][path] = plain.outputs(llm)
            plain.let_go(llm)
            del llm
        assert len(set(expected[policy].values())) == 3
    [changed] = pair.changed
    return World(pair.base, pair.fine_tune, changed, other, expected)


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens engines, and ends them all."""
    every: list[LLM] = []

    def engine(path: Path, *, config: dict[str, Any] | None, **options: Any) -> "LLM":
        tensor_dedup = False if config is None else config
        every.append(plain.engine(path, tensor_dedup=tensor_dedup, **options))
        return every[-1]

    yield engine
    for llm in every:
        plain.let_go(llm)
    every.clear()
    gc.collect()


# --- weight updates


def send(llm: "LLM", path: Path, *chunks: list[str]) -> None:
    """Update weights as a trainer does, over the engine's calls."""
    llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    llm.collective_rpc("start_weight_update")
    for names in chunks:
        update = {"path": str(path), "names": names}
        llm.collective_rpc("update_weights", kwargs={"update_info": update})
    llm.collective_rpc("finish_weight_update")


def resident_keys() -> set[ResidentKey]:
    return {resident.key for resident in registry.residents()}


def halves(path: Path) -> tuple[list[str], list[str]]:
    names = sorted(checkpoints.tensors(path))
    return names[: len(names) // 2], names[len(names) // 2 :]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_transfer_reaches_one_model_only(policy: str, world: World, opened: Open) -> None:
    transfer = {"weight_transfer_config": {"backend": "files"}}
    with plain.kept_as(policy):
        oracle = opened(world.base, config=None, **transfer)
    mine = opened(world.base, config={"cpu_weights": policy}, **transfer)
    other = opened(world.base, config={"cpu_weights": policy})
    assert shared.everything(mine, other)
    before, packed = shared.contents(other), shared.handlers(other)
    addresses = {name: p.data_ptr() for name, p in shared.parameters(mine).items()}

    for path in (world.other, world.base, world.other):
        with plain.kept_as(policy):
            send(oracle, path, *halves(path))
        send(mine, path, *halves(path))

        assert plain.outputs(mine) == plain.outputs(oracle) == world.expected[policy][path]
        assert plain.outputs(other) == world.expected[policy][world.base]
        assert not shared.shared_parameters(mine, other)
    assert {name: p.data_ptr() for name, p in shared.parameters(mine).items()} == addresses
    assert (shared.contents(other), shared.handlers(other)) == (before, packed)
    assert verify().ok


def test_who_was_updated_keeps_nothing_of_what_was_shared(
    world: World, opened: Open, tmp_path: Path
) -> None:
    transfer = {"weight_transfer_config": {"backend": "files"}}
    # Weights of its own: vLLM keeps an engine of an earlier test until the next one is made.
    own = checkpoints.mapped(world.base, tmp_path / "own", lambda name, tensor: tensor * 1.25)
    gc.collect()
    before, slabs = resident_keys(), process_state.slabs()
    mine = opened(own, config={"cpu_weights": "plain"}, **transfer)
    assert len(resident_keys() - before) == len(shared.parameters(mine)) > 10

    send(mine, world.other, *halves(world.other))
    gc.collect()

    assert resident_keys() <= before
    assert all(now <= then for now, then in zip(process_state.slabs(), slabs, strict=True))
    assert plain.outputs(mine) == world.expected["plain"][world.other]


def test_an_update_of_some_weights_leaves_the_others_shared(world: World, opened: Open) -> None:
    """As sparse patches do: in place, by the names of the model."""
    transfer = {"weight_transfer_config": {"backend": "patches"}}
    mine = opened(world.base, config={"cpu_weights": "plain"}, **transfer)
    other = opened(world.base, config={"cpu_weights": "plain"})
    assert shared.everything(mine, other)
    every = shared.parameters(mine).keys()
    assert world.changed in every

    send(mine, world.fine_tune, [world.changed])

    assert shared.shared_parameters(mine, other) == every - {world.changed}
    assert plain.outputs(mine) == world.expected["plain"][world.fine_tune]
    assert plain.outputs(other) == world.expected["plain"][world.base]


def load_weights(worker: Any, path: str) -> None:
    """What trainers call in a worker that has no transfer engine."""
    tensors = checkpoints.tensors(Path(path))
    worker.model_runner.model.load_weights(iter(tensors.items()))


def test_a_call_that_loads_weights_reaches_one_model_only(world: World, opened: Open) -> None:
    """What vLLM has packed cannot be loaded into, plain weights can."""
    oracle = opened(world.base, config=None)
    packed = opened(world.base, config={"cpu_weights": "packed"})
    mine = opened(world.base, config={"cpu_weights": "plain"})
    other = opened(world.base, config={"cpu_weights": "plain"})
    assert shared.everything(mine, other)
    assert shared.shared_parameters(packed, mine)
    before = shared.contents(other)

    mine.collective_rpc(load_weights, args=(str(world.other),))
    refused = []
    for llm in (oracle, packed):
        try:
            llm.collective_rpc(load_weights, args=(str(world.other),))
        except AssertionError as error:
            refused.append(str(error))

    assert len(refused) == (2 if plain.packs() else 0)
    assert len(set(refused)) <= 1
    assert plain.outputs(mine) == world.expected["plain"][world.other]
    assert shared.contents(other) == before
    assert plain.outputs(other) == world.expected["plain"][world.base]
    assert plain.outputs(packed) == plain.outputs(oracle)
    assert verify().ok


# --- sleeping


@pytest.mark.parametrize(
    ("policy", "level"),
    [
        ("packed", 1),
        ("plain", 2),
        pytest.param("packed", 2, marks=pytest.mark.long),
        pytest.param("plain", 1, marks=pytest.mark.long),
    ],
)
def test_a_model_that_sleeps_takes_nothing_from_another(
    policy: str, level: int, world: World, opened: Open
) -> None:
    """vLLM's CPU worker says that it does not sleep, and does nothing."""
    sleeper = opened(world.base, config={"cpu_weights": policy})
    other = opened(world.base, config={"cpu_weights": policy})
    tuned = opened(world.fine_tune, config={"cpu_weights": policy})
    assert shared.everything(sleeper, other)
    before = {id(llm): shared.contents(llm) for llm in (sleeper, other, tuned)}

    sleeper.sleep(level=level)
    assert shared.everything(sleeper, other)
    expected = world.expected[policy]
    assert plain.outputs(other) == expected[world.base]
    assert plain.outputs(tuned) == expected[world.fine_tune]
    # Who comes meanwhile shares with the sleeping one too.
    third = opened(world.base, config={"cpu_weights": policy})
    assert (report().models[-1].bytes_read, report().models[-1].private_bytes) == (0, 0)
    assert shared.everything(third, sleeper)
    assert sleeper.wake_up()

    assert {id(llm): shared.contents(llm) for llm in (sleeper, other, tuned)} == before
    assert plain.outputs(sleeper) == plain.outputs(third) == expected[world.base]
    assert verify().ok


# --- made again and again


@pytest.mark.parametrize("times", [6, pytest.param(TIMES, marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_made_again_and_again_changes_no_neighbour_and_leaves_nothing(
    policy: str, times: int, world: World, opened: Open
) -> None:
    base = opened(world.base, config={"cpu_weights": policy})
    tuned = opened(world.fine_tune, config={"cpu_weights": policy})
    assert not shared.nothing(base, tuned)
    paths = (world.base, world.other, world.fine_tune)
    sizes = []

    for turn in range(times):
        path = paths[turn % 3]
        llm = shared.engine(path, cpu_weights=policy)
        neighbour = {world.base: base, world.fine_tune: tuned}.get(path)
        assert shared.nothing(llm, base) if neighbour is None else shared.everything(llm, neighbour)
        answers = [plain.outputs(each) for each in (llm, base, tuned)]
        expected = [world.expected[policy][p] for p in (path, world.base, world.fine_tune)]
        assert answers == expected
        plain.let_go(llm)
        del llm
        gc.collect()
        sizes.append(
            (
                resident_keys(),
                set(registry.records()),
                process_state.slabs(),
                process_state.descriptors(),
            )
        )

    # The first of each kind may open what stays open, such as the index of hints.
    assert all(size == sizes[2] for size in sizes[3:])
    assert torch.equal(*(shared.parameters(llm)["model.norm.weight"] for llm in (base, tuned)))
    assert verify().ok
