"""Trainings of several ranks, by FSDP and DDP, that save by DCP behind and are killed."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from processes import fresh
from tensor_dedup.integrations.dcp import StoreReader, StoreWriter
from tensor_dedup.training import CheckpointStore
from training_runs import killed_training

WIDTH = 160


class Training:
    """A network, its optimizer and its process group for checkpoints, on one rank."""

    def __init__(self, kind: str, ranks: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
        model[0].requires_grad_(False)
        if kind == "fsdp":
            self.model: Any = fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        else:
            self.model = nn.parallel.DistributedDataParallel(model)
            self.model.register_comm_hook(ranks, killed_training.mean_by_rank)
        moving = [each for each in model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.Adam(moving, 1e-2)
        self.done = 0

    def step(self, number: int, ranks: int) -> float:
        dice = torch.Generator().manual_seed(self.done * ranks + number)
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 64, generator=dice)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return float(loss.item())

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "done": torch.tensor(self.done)}

    def resume(self, root: str, step: int) -> None:
        state = self.state()
        loader.load(state, checkpoint_id=step, storage_reader=StoreReader(root, "run"))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.done = int(state["done"])


@contextmanager
def grouped(number: int, file: str, ranks: int) -> Iterator[dist.ProcessGroup]:
    """The default group, and one for checkpoints, whose messages are not the training's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{file}", rank=number, world_size=ranks)
    yield dist.new_group(backend="gloo")
    killed_training.leave_group()


def rank(root: str, /, *, number: int, group: str, kind: str, ranks: int, steps: int) -> None:
    """Train from the latest step to the end; each step is saved in the background."""
    with grouped(number, group, ranks) as behind:
        training, writer = Training(kind, ranks), StoreWriter(root, "run")
        if (last := latest(root)) > 0:
            training.resume(root, last)
        pending: Any = None
        unfinished = 0
        while training.done < steps:
            unfinished += pending is not None and not pending.done()
            before = training.done
            loss = training.step(number, ranks)
            killed_training.record(root, before * ranks + number, loss)
            if pending is not None:
                pending.result()
            pending = saver.async_save(
                training.state(),
                checkpoint_id=str(training.done),
                storage_writer=writer,
                process_group=behind,
            )
        pending.result()
        writer.close()
        del training
        with Path(f"{root}.unfinished").open("a") as lines:
            lines.write(f"{unfinished}\n")


def latest(root: str) -> int:
    return max(CheckpointStore(root, "run").latest() or 0, 0)


def training(root: str, alone: str, kind: str, ranks: int, kills: int) -> list[int]:
    import torch._dynamo  # noqa: F401 (before children are forked, for each of them)

    train = partial(rank, kind=kind, ranks=ranks, steps=killed_training.enough_steps(kills))
    found = killed_training.killed_ranks(train, root, ranks, kills, latest)
    CheckpointStore(alone, "run").close()  # one rank makes it
    killed_training.end_ranks(train, alone, ranks)
    return found


@pytest.mark.parametrize(
    ("kind", "ranks", "kills"),
    [
        ("fsdp", 2, 1),
        ("ddp", 2, 1),
        *(pytest.param(kind, 2, 6, marks=pytest.mark.long) for kind in ("fsdp", "ddp")),
        *(pytest.param(kind, 4, 4, marks=pytest.mark.long) for kind in ("fsdp", "ddp")),
    ],
)
def test_a_killed_training_ends_as_one_that_is_not(
    tmp_path: Path, kind: str, ranks: int, kills: int
) -> None:
    root, alone = str(tmp_path / "killed"), str(tmp_path / "alone")
    found = fresh.call_forked(training, root, alone, kind, ranks, kills)
    steps = killed_training.enough_steps(kills)
    assert len(found) == kills
    assert all(0 < each < steps for each in found)
    losses = killed_training.assert_same_losses(root, alone, steps * ranks)
    assert all(len(each) == 1 for each in losses.values())
    assert any(int(each) > 0 for each in Path(f"{alone}.unfinished").read_text().split())
    assert latest(root) == latest(alone) == steps
    stats = CheckpointStore(alone, "run").stats()
    assert int(str(stats["unique_chunks"])) < int(str(stats["total_chunks"]))


def save_some(root: str, /, *, number: int, group: str, ranks: int) -> None:
    with grouped(number, group, ranks):
        training = Training("fsdp", ranks)
        for _ in range(3):
            training.step(number, ranks)
        saver.save(training.state(), checkpoint_id=3, storage_writer=StoreWriter(root, "run"))
        note(root, number, training)


def save_again(root: str, /, *, number: int, group: str, ranks: int, step: int) -> None:
    """Load on another number of ranks, and save what was loaded."""
    with grouped(number, group, ranks):
        training = Training("fsdp", ranks)
        training.resume(root, step)
        writer = StoreWriter(root, "run")
        saver.save(training.state(), checkpoint_id=step + 1, storage_writer=writer)
        note(root, number, training)


def note(root: str, number: int, training: Training) -> None:
    """Note what is not equal when one bit is not: the digest of the full state."""
    state = training.state()
    found = {}
    for name, tensor in state["model"].items():
        found[name] = tensor.full_tensor()
    for name, each in state["optimizer"]["state"].items():
        for kind, tensor in each.items():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[f"{name} {kind}"] = full
    if number == 0:
        from hashlib import sha256

        blob = b"".join(
            name.encode() + found[name].detach().contiguous().numpy().tobytes()
            for name in sorted(found)
        )
        with Path(f"{root}.digests").open("a") as file:
            file.write(f"{len(found)} {sha256(blob).hexdigest()}\n")


def reshard(root: str, many: int, few: int) -> None:
    import torch._dynamo  # noqa: F401

    killed_training.end_ranks(partial(save_some, ranks=many), root, many)
    killed_training.end_ranks(partial(save_again, ranks=few, step=3), root, few)
    killed_training.end_ranks(partial(save_again, ranks=many, step=4), root, many)


@pytest.mark.parametrize(
    ("many", "few"), [(2, 1), *(pytest.param(4, few, marks=pytest.mark.long) for few in (1, 2, 3))]
)
def test_a_state_is_the_same_on_many_ranks_on_fewer_and_on_many_again(
    tmp_path: Path, many: int, few: int
) -> None:
    root = str(tmp_path / "store")
    fresh.call_forked(reshard, root, many, few)
    digests = Path(f"{root}.digests").read_text().splitlines()
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert int(digests[0].split()[0]) > 12  # parameters, and the optimizer's state of most
    run = CheckpointStore(root, "run")
    assert run.steps() == [3, 4, 5]
    found = []
    for step in (3, 5):
        with run.store.checkpoint(f"run@{step}") as checkpoint:
            found.append({each.name: each.digest for each in checkpoint})
    assert found[0] == found[1]  # cut as at first, it is what was there
