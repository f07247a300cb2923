"""DeepSpeed saves in the background, chosen by its JSON alone, and goes on after kills."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import torch

from processes import fresh
from project import package_source
from tensor_dedup import Store
from tensor_dedup.integrations.deepspeed import Pointer
from tensor_dedup.store.errors import StoreIOError
from tensor_dedup.store.steps.errors import UnknownStepError
from tensor_dedup.training import CheckpointStore
from training_runs import killed_training

sys.path.append(str(package_source.STAND_IN_FOLDER))  # for DeepSpeed, in children too
WIDTH = 160  # so that weights are too large to be copied at once


def rank(
    root: str,
    number: int,
    group: str,
    ranks: int,
    stage: int,
    steps: int,
    micro: int,
    **options: Any,
) -> None:
    """Train from `latest` to the end: batches of `micro` parts, a checkpoint after each step."""
    here = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in here.items()})
    torch.set_num_threads(1)
    import deepspeed

    # It would be compiled here and now, for several processes on one machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{group}",
        rank=number,
        world_size=ranks,
    )
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(64, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4)
    )
    model[0].requires_grad_(False)
    config = {
        "train_batch_size": 4 * ranks * micro,
        "gradient_accumulation_steps": micro,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "datastates_ckpt": {"store": root, "run": "run", **options},
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[each for each in model.parameters() if each.requires_grad],
        config=config,
    )
    saves = engine.checkpoint_engine.ckpt_engine
    assert saves._lazy
    engine.load_checkpoint(f"{root}-files")
    unfinished = 0
    while engine.global_steps < steps:
        before = engine.global_steps
        for part in range(before * micro, (before + 1) * micro):
            assert engine.global_steps == before
            dice = torch.Generator().manual_seed(part * ranks + number)
            loss = engine(torch.randn(4, 64, generator=dice)).square().mean()
            engine.backward(loss)
            killed_training.record(root, part * ranks + number, loss.item())
            unfinished += saves._last is not None and not saves._last.done()
            engine.step()  # which changes nothing before the last part
        assert engine.global_steps == before + 1
        engine.save_checkpoint(f"{root}-files")
    with Path(f"{root}.unfinished").open("a") as file:
        file.write(f"{unfinished}\n")
    engine.destroy()
    torch.distributed.destroy_process_group()


def latest(root: str) -> int:
    """The last whole checkpoint's number of steps, 0 if there is none."""
    path = Path(f"{root}-files", "latest")
    return int(path.read_text().removeprefix("global_step")) if path.exists() else 0


def training(root: str, alone: str, ranks: int, stage: int, kills: int, micro: int) -> list[int]:
    """Kill a training so many times, then let it end; `latest` after each kill."""
    import deepspeed  # noqa: F401
    import torch._dynamo  # noqa: F401

    import datastates  # noqa: F401 (before children are forked, for each of them)

    steps = killed_training.enough_steps(kills)

    def once(root: str, /, *, number: int, group: str) -> None:
        rank(root, number, group, ranks, stage, steps, micro, keep_last=1, compress=None)

    for folder in (root, alone):
        Store.open(folder)  # one rank makes it
    found = killed_training.killed_ranks(once, root, ranks, kills, latest)
    killed_training.end_ranks(once, alone, ranks)
    return found


@pytest.mark.parametrize(
    ("ranks", "stage", "kills", "micro"),
    [
        (2, 2, 1, 1),
        (2, 2, 1, 3),
        *(pytest.param(2, stage, 6, 1, marks=pytest.mark.long) for stage in (0, 1, 2, 3)),
        *(pytest.param(2, stage, 4, 3, marks=pytest.mark.long) for stage in (0, 1, 2, 3)),
        *(pytest.param(4, stage, 4, 1, marks=pytest.mark.long) for stage in (0, 1, 2, 3)),
        pytest.param(3, 3, 4, 2, marks=pytest.mark.long),
    ],
)
def test_a_killed_training_ends_as_one_that_is_not(
    tmp_path: Path, ranks: int, stage: int, kills: int, micro: int
) -> None:
    root, alone = str(tmp_path / "killed"), str(tmp_path / "alone")
    found = fresh.call(training, root, alone, ranks, stage, kills, micro)
    steps = killed_training.enough_steps(kills)
    assert len(found) == kills
    assert all(0 < each < steps for each in found)
    killed_training.assert_same_losses(root, alone, steps * ranks * micro)
    unfinished = Path(f"{alone}.unfinished").read_text().split()
    assert any(int(each) > 0 for each in unfinished)
    assert latest(root) == latest(alone) == steps


def engines(root: str, count: int, **options: Any) -> list[Any]:
    """DeepSpeed's own engines of so many ranks of one training, in this process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime.checkpoint_engine import DataStatesCheckpointEngine
    from deepspeed.runtime.config import DeepSpeedConfig

    entry = {"store": root, "run": "run", **options}
    config = DeepSpeedConfig({"train_batch_size": 1, "datastates_ckpt": entry})
    made = [DataStatesCheckpointEngine(deepspeed_config=config, rank=n) for n in range(count)]
    for each in made:
        each.ckpt_engine._session = made[0].ckpt_engine._session
    return made


MODEL = "mp_rank_00_model_states.pt"


def optimizer(number: int) -> str:
    return f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt"


def save(engine: Any, root: str, tag: str, name: str) -> None:
    """Save what DeepSpeed would on two ranks, and wait until it is durable."""
    folder = Path(f"{root}-files", tag)
    folder.mkdir(parents=True, exist_ok=True)
    state = {"weight": torch.full((200, 200), float(len(tag))), "tag": tag}
    if name == MODEL:
        state |= {"dp_world_size": 2, "mp_world_size": 1, "param_shapes": []}
    engine.save(state, str(folder / name))
    engine.ckpt_engine.wait(persist=True)


def half_saved(root: str) -> None:
    first, second = engines(root, 2)
    whole, half = Path(f"{root}-files", "1"), Path(f"{root}-files", "22")
    latest = whole.parent / "latest"
    save(first, root, "1", MODEL)
    save(second, root, "1", optimizer(1))
    assert not latest.exists()
    save(first, root, "1", optimizer(0))
    assert latest.read_text() == "1"
    save(first, root, "22", MODEL)
    save(first, root, "22", optimizer(0))
    assert latest.read_text() == "1"
    (later,) = engines(root, 1)
    for name in (MODEL, optimizer(0), optimizer(1)):
        assert later.load(str(whole / name))["tag"] == "1"
    for name in (MODEL, optimizer(0)):
        with pytest.raises(UnknownStepError, match="not saved by all ranks; load 'latest'"):
            later.load(str(half / name))
    # The tag is saved again by a training that does get to the end of it.
    first, second = engines(root, 2)
    save(first, root, "22", MODEL)
    save(first, root, "22", optimizer(0))
    assert latest.read_text() == "1"
    save(second, root, "22", optimizer(1))
    assert latest.read_text() == "22"
    assert first.load(str(half / MODEL))["tag"] == "22"


def test_a_checkpoint_is_there_when_all_ranks_have_saved_it(tmp_path: Path) -> None:
    fresh.call(half_saved, str(tmp_path / "store"))


def ahead(root: str) -> None:
    first, second = engines(root, 2, keep_last=1)
    run = CheckpointStore(root, f"run/{optimizer(0).removesuffix('.pt')}")
    for tag in ("1", "22"):
        save(first, root, tag, MODEL)
        save(second, root, tag, optimizer(1))
        save(first, root, tag, optimizer(0))
    assert run.steps() == [1]
    for number in range(4):  # one rank is killed again and again, and this one is ahead each time
        (again,) = engines(root, 1, keep_last=1)
        save(again, root, "333", MODEL)
        save(again, root, "333", optimizer(0))
        assert run.steps() == list(range(1, number + 3))
    file = Path(f"{root}-files", "22", optimizer(0))
    assert again.load(str(file))["tag"] == "22"
    # Whoever is last lets go of all that nobody needs any more.
    first, second = engines(root, 2, keep_last=1)
    save(first, root, "4444", MODEL)
    save(second, root, "4444", optimizer(1))
    save(first, root, "4444", optimizer(0))
    assert run.load(max(run.steps()))["tag"] == "4444"
    assert 1 not in run.steps()
    with pytest.raises(UnknownStepError):
        first.load(str(file))
    pools = {each._saves._pool for each in first.ckpt_engine._runs.values()}
    assert len(first.ckpt_engine._runs) == 2
    assert len(pools) == 1  # one bound for all files of a rank


def test_a_rank_that_is_ahead_deletes_nothing_that_others_need(tmp_path: Path) -> None:
    fresh.call(ahead, str(tmp_path / "store"))


def reading(root: str) -> list[int]:
    """How many pointer files each save of a rank reads, where four checkpoints are kept."""
    first, second = engines(root, 2, keep_last=4)
    counts, read = list[int](), Pointer.read

    def counted(path: Path) -> Pointer | None:
        counts[-1] += 1
        return read(path)

    # Bound to the class: whoever reads one is counted.
    Pointer.read = staticmethod(counted)  # type: ignore[method-assign]
    for number in range(8):
        for engine, name in ((first, MODEL), (second, optimizer(1)), (first, optimizer(0))):
            counts.append(0)
            save(engine, root, "x" * (number + 1), name)
    Pointer.read = read  # type: ignore[method-assign]
    run = CheckpointStore(root, f"run/{optimizer(0).removesuffix('.pt')}")
    assert run.steps() == [4, 5, 6, 7]
    assert {path.name for path in Path(f"{root}-files").iterdir()} == {
        "latest",
        *("x" * number for number in (5, 6, 7, 8)),
    }
    return counts[-3:]


def test_a_save_reads_few_pointers_of_what_is_kept(tmp_path: Path) -> None:
    # Each reads those of its own file, when it saves and when it closes, and whether its checkpoint
    # is whole. Only the last one, who has something to delete, asks that of others.
    kept, files = 4, 3
    found = fresh.call(reading, str(tmp_path / "store"))
    assert max(found[:2]) <= 3 * (kept + files) < found[2]


def left_behind(root: str) -> None:
    (engine,) = engines(root, 1)
    files = Path(f"{root}-files")
    files.mkdir()
    left = [files / f".{tag}.{MODEL}.part" for tag in ("1", "global_step22")]
    others = [files / f".1.{optimizer(1)}.part", files / MODEL, files / f"mine.{MODEL}.part"]
    for each in (*left, *others):
        each.write_text("[")
    save(engine, root, "333", MODEL)
    assert not any(each.exists() for each in left)
    assert all(each.exists() for each in others)  # another rank may be writing there
    left[0].write_text("[")
    save(engine, root, "4444", MODEL)
    assert left[0].exists()  # by whoever trains at the same time, not by a kill


def test_what_a_kill_left_of_a_pointer_is_removed(tmp_path: Path) -> None:
    fresh.call(left_behind, str(tmp_path / "store"))


def failing(root: str) -> None:
    (engine,) = engines(root, 1, compress=None)
    weight = torch.nn.Parameter(torch.ones(200, 200))
    update = torch.optim.SGD([weight], 0.1)
    engine.save({"weight": weight}, f"{root}-nowhere/tag/{MODEL}")
    engine.ckpt_engine._last.finish()
    weight.grad = torch.ones_like(weight)
    with pytest.raises(StoreIOError, match="nowhere"):
        update.step()
    assert torch.equal(weight, torch.ones(200, 200))
    update.step()  # it was told of once
    folder = Path(f"{root}-files")
    folder.mkdir()
    engine.save({"weight": weight}, str(folder / "pytorch_model.bin"))
    assert torch.equal(torch.load(folder / "pytorch_model.bin")["weight"], weight)
    wrong: list[dict[str, Any]] = [{"parser_threads": 4}, {"keep_last": 0}, {"pool_bytes": -1}]
    for options in wrong:
        with pytest.raises(RuntimeError, match=f"{next(iter(options))}|keep_last=5|pool_bytes"):
            engines(root, 1, **options)


def test_errors_reach_the_training(tmp_path: Path) -> None:
    fresh.call(failing, str(tmp_path / "store"))
