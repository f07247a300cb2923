"""DeepSpeed saves into the store when its JSON says so, and resumes from it."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from processes import fresh
from tensor_dedup import Store
from tensor_dedup.training import CheckpointStore


def train(root: str, stage: int, load: str | None, tags: list[str], count: int) -> list[float]:
    """Losses of `count` steps after loading; a checkpoint before each step that has a tag."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    import deepspeed
    import torch

    import tensor_dedup.integrations.deepspeed as switch

    # It would be compiled here and now, for several processes on one machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    switch.enable()
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
    model[0].requires_grad_(False)
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "tensor_dedup": {"store": root, "run": "run"},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[*model[1].parameters()], config=config
    )
    if load is not None:
        engine.load_checkpoint(f"{root}-files", tag=load)
    losses = []
    for step in range(count):
        if step < len(tags):
            engine.save_checkpoint(f"{root}-files", tag=tags[step])
        dice = torch.Generator().manual_seed(engine.global_steps)
        loss = engine(torch.randn(8, 64, generator=dice)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 1])
def test_training_resumes_to_the_same_losses(tmp_path: Path, stage: int) -> None:
    root = str(tmp_path / "store")
    tags = ["global_step0", "global_step1", "middle"]
    losses = fresh.call(train, root, stage, None, tags, 5)
    names = Store.open(root).handle.objects.names()
    files = {name.partition("@")[0] for name in names}
    assert len(names) == 3 * len(files)
    found = CheckpointStore(root, "run/mp_rank_00_model_states").stats()
    assert int(str(found["unique_chunks"])) < int(str(found["total_chunks"]))
    written = list(Path(f"{root}-files").rglob("*.pt"))
    assert len(written) == len(names)
    assert all(path.stat().st_size < 500 for path in written)
    assert fresh.call(train, root, stage, "global_step1", [], 4) == losses[1:]
    assert fresh.call(train, root, stage, "middle", [], 3) == losses[2:]


def save_and_load(root: str, saves: list[tuple[str, str]]) -> list[int]:
    """What each of the files holds in the end, when each save has put its number there."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

    from tensor_dedup.integrations.deepspeed import StoreEngine

    paths = []
    for number, (folder, tag) in enumerate(saves):
        engine = StoreEngine(None, root, "run")
        engine.create(CheckpointCommitInfo(tag, folder, True))
        paths.append(f"{root}-{folder}/{tag}/mp_rank_00_model_states.pt")
        engine.makedirs(Path(paths[-1]).parent, exist_ok=True)
        engine.save({"number": number}, paths[-1])
        engine.commit(CheckpointCommitInfo(tag, folder, True))
        engine.cleanup()
    return [StoreEngine(None, root, "run").load(path)["number"] for path in paths]


def test_no_checkpoint_replaces_another(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    tags = ["global_step100", "best", "global_step101", "epoch-100", "v2.100", "best-of-7"]
    saves = [(folder, tag) for folder in ("one", "two") for tag in tags]
    assert fresh.call(save_and_load, root, saves) == list(range(12))
    run = CheckpointStore(root, "run/mp_rank_00_model_states")
    assert run.steps() == list(range(12))


def test_a_file_that_is_saved_again_stands_for_the_later_save(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    saves = [("one", "best"), ("one", "global_step9"), ("one", "best")]
    assert fresh.call(save_and_load, root, saves) == [2, 1, 2]
    run = CheckpointStore(root, "run/mp_rank_00_model_states")
    assert [run.load(step)["number"] for step in run.steps()] == [0, 1, 2]
