"""PyTorch Distributed Checkpoint over the store: one rank and several, at once and behind."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from processes import fresh
from tensor_dedup.errors import StoreError
from tensor_dedup.integrations.dcp import StoreReader, StoreWriter
from tensor_dedup.store.errors import NameTakenError
from tensor_dedup.store.steps.errors import BadStepError
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.errors import NamedTwiceError, UnsupportedArrayError

# DCP says so whenever there is no process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Training:
    """A network and its optimizer: 20 steps of it are always the same."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        self.model[0].requires_grad_(False)
        head = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(head, 1e-2)
        self.losses: list[float] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            dice = torch.Generator().manual_seed(len(self.losses))
            x = torch.randn(8, 64, generator=dice)
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.losses.append(loss.item())

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "rate": 1e-2,
        }

    def resume(self, root: Path, step: int | None) -> None:
        self.steps(1)  # so that the optimizer has its state
        state = self.state() | {"losses": []}
        loader.load(state, checkpoint_id=step, storage_reader=StoreReader(root, "run"))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"]


def shared(root: Path) -> bool:
    found = CheckpointStore(root, "run").stats()
    return int(str(found["unique_chunks"])) < int(str(found["total_chunks"]))


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"t": torch.eye(3).to_sparse()}, UnsupportedArrayError),
        ({"x": 5, "#bytes x": torch.arange(9)}, NamedTwiceError),
    ],
    ids=["sparse", "one name"],
)
def test_what_cannot_be_stored_is_said(tmp_path: Path, state: Any, error: type[StoreError]) -> None:
    writer = StoreWriter(tmp_path, "run")
    with pytest.raises(CheckpointException) as caught:
        saver.save(state, checkpoint_id=0, storage_writer=writer, no_dist=True)
    writer.close()
    (failure,) = caught.value.failures.values()
    assert isinstance(failure[0], error)
    assert CheckpointStore(tmp_path, "run").steps() == []


def test_a_training_resumes_to_the_same_losses(tmp_path: Path) -> None:
    training, writer = Training(), StoreWriter(tmp_path, "run")
    for step in range(3):
        training.steps(2)
        saver.save(training.state(), checkpoint_id=step, storage_writer=writer)
    assert shared(tmp_path)
    training.steps(4)
    wanted: tuple[tuple[int | None, int], ...] = ((1, 6), (None, 4))
    for wanted_step, again in wanted:
        resumed = Training()
        resumed.resume(tmp_path, wanted_step)
        resumed.steps(again)
        assert resumed.losses == training.losses
    assert CheckpointStore(tmp_path, "run").steps() == [0, 1, 2]


def test_a_run_whose_parts_no_file_can_be_called_by_stores_nothing(tmp_path: Path) -> None:
    run = "a/" * 60 + "a" * (243 - 4 * 60)  # RUN/part-0@1 has 254 bytes, RUN/part-meta@1 has 257
    writer = StoreWriter(tmp_path, run)
    with pytest.raises(CheckpointException, match=r"BadNameError.*257 bytes"):
        saver.save(Training().state(), checkpoint_id=1, storage_writer=writer)
    writer.close()
    assert not list(tmp_path.rglob("*.slab"))
    assert not list(tmp_path.rglob("*.pack"))


def test_async_save_saves_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    training, writer = Training(), StoreWriter(tmp_path, "run")
    for step in range(2):
        training.steps(2)
        future: Any = saver.async_save(
            training.state(), checkpoint_id=str(step), storage_writer=writer
        )
        if step:
            before = list(training.losses)
            training.steps(1)
        future.result()
    assert shared(tmp_path)
    resumed = Training()
    resumed.resume(tmp_path, 1)
    assert resumed.losses == before
    resumed.steps(1)
    assert resumed.losses == training.losses


def test_a_step_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    training = Training()
    writer = StoreWriter(tmp_path / "s", "run", config={"config.json": "{}"}, weights="model")
    for step in (0, 1):
        training.steps(1)
        saver.save(training.state(), checkpoint_id=step, storage_writer=writer)
    assert shared(tmp_path / "s")
    with writer._part("meta").store.checkpoint("run@1") as checkpoint:
        files = {file.path for file in checkpoint.files}
        assert checkpoint["model.2.weight"].shape == (4, 64)
    assert {"config.json", "model.safetensors"} <= files
    store = writer._part("meta").store
    store.export("run@1", tmp_path / "out")
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "out" / "model.safetensors")
    expected = training.model.state_dict()
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert [result.name for result in store.list()] == ["run@0", "run@1"]


def test_a_crash_before_the_end_leaves_no_step_and_the_next_clears_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, writer = Training(), StoreWriter(tmp_path, "run")
    saver.save(training.state(), checkpoint_id=0, storage_writer=writer)

    def crash(*_: object) -> None:
        raise ConnectionResetError

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "finish", crash)
        with pytest.raises(CheckpointException):
            saver.save(training.state(), checkpoint_id=1, storage_writer=writer)
    run = CheckpointStore(tmp_path, "run")
    assert run.steps() == [0]
    reader = StoreReader(tmp_path, "run")
    with pytest.raises(CheckpointException, match="no checkpoint 'run@1'"):
        loader.load(training.state(), checkpoint_id=1, storage_reader=reader)
    assert len(run.store.handle.objects.names()) == 2
    saver.save(training.state(), checkpoint_id=2, storage_writer=writer)
    assert run.store.handle.objects.names() == ["run@0", "run@2"]
    assert shared(tmp_path)


@pytest.mark.parametrize("name", ["run/part-2", "run/part-meta", "run/part-two"])
def test_runs_that_are_called_like_parts_stay(tmp_path: Path, name: str) -> None:
    whose = CheckpointStore(tmp_path, name)
    whose.save({"w": torch.ones(3)}, 7)
    whose.keep(7)
    whose.save({"w": torch.zeros(3)}, 8)
    nested = StoreWriter(tmp_path, f"{name}/part-0")
    saver.save({"w": torch.ones(2)}, checkpoint_id=1, storage_writer=nested)
    saver.save(Training().state(), checkpoint_id=0, storage_writer=StoreWriter(tmp_path, "run"))
    saver.save({"w": torch.ones(2)}, checkpoint_id=2, storage_writer=StoreWriter(tmp_path, name))
    assert whose.steps() == [2, 7, 8]
    assert whose.kept() == {7}
    assert torch.equal(whose.load(7)["w"], torch.ones(3))
    assert CheckpointStore(tmp_path, f"{name}/part-0").steps() == [1]


@pytest.mark.parametrize("part", ["run/part-0", "run/part-meta"])
def test_a_step_that_is_called_like_a_part_is_not_replaced(tmp_path: Path, part: str) -> None:
    whose = CheckpointStore(tmp_path, part)
    whose.save({"w": torch.ones(3)}, 0)
    writer = StoreWriter(tmp_path, "run")
    with pytest.raises((CheckpointException, NameTakenError), match=f"{part}@0"):
        saver.save({"w": torch.zeros(3)}, checkpoint_id=0, storage_writer=writer)
    assert torch.equal(whose.load(0)["w"], torch.ones(3))
    assert CheckpointStore(tmp_path, "run").steps() == []


def test_a_kept_step_is_not_replaced(tmp_path: Path) -> None:
    writer, run = StoreWriter(tmp_path, "run"), CheckpointStore(tmp_path, "run")
    saver.save({"w": torch.ones(3)}, checkpoint_id=0, storage_writer=writer)
    before = run.store.handle.objects.ref("run@0")
    run.keep(0)
    with pytest.raises(CheckpointException, match="kept"):
        saver.save({"w": torch.zeros(3)}, checkpoint_id=0, storage_writer=writer)
    assert run.store.handle.objects.ref("run@0") == before


AHEAD_S = 4_000_000_000  # in the year 2096


def test_a_clock_that_is_set_changes_no_order(tmp_path: Path) -> None:
    writer, run = StoreWriter(tmp_path, "run"), CheckpointStore(tmp_path, "run")
    for number, step in enumerate([5, 7, 6, 7]):
        saver.save({"w": torch.full((3,), step)}, checkpoint_id=step, storage_writer=writer)
        again = {"w": torch.zeros(3, dtype=torch.int64)}
        loader.load(again, storage_reader=StoreReader(tmp_path, "run"))
        assert again["w"].tolist() == [step] * 3
        assert run.latest() == step
        for reference in (tmp_path / "refs").iterdir():
            os.utime(reference, (AHEAD_S - number, AHEAD_S - number))  # it is set back
        if number == 1:
            writer = StoreWriter(tmp_path, "run")
    run.save({"w": torch.zeros(3)}, 1)
    assert run.latest() == 1


def test_what_was_imported_is_not_replaced(tmp_path: Path) -> None:
    run = CheckpointStore(tmp_path / "store", "run")
    run.save({"w": torch.ones(3)}, 0)
    run.store.export("run@0", tmp_path / "out")
    run.store.import_(tmp_path / "out", "run@1")
    before = run.store.handle.objects.ref("run@1")
    writer = StoreWriter(tmp_path / "store", "run")
    with pytest.raises(CheckpointException, match="would replace 'run@1', which was imported"):
        saver.save({"w": torch.zeros(3)}, checkpoint_id=1, storage_writer=writer)
    assert run.store.handle.objects.ref("run@1") == before


@pytest.mark.parametrize("wrong", ["-1", "later", "checkpoints/3", "1.5", "9" * 5000])
def test_what_is_no_step_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(BadStepError):
        saver.save({}, checkpoint_id=wrong, storage_writer=StoreWriter(tmp_path, "run"))


def rank(number: int, port: int, ranks: int, root: str) -> None:
    """A tensor in parts, one that all have, values; saved twice by all ranks, read back."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=number, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(64 * 48, dtype=torch.float32).view(64, 48)
    writer = StoreWriter(root, "run")
    for step in (1, 2):
        parts = distribute_tensor(whole, mesh, [Shard(0)])
        state = {"parts": parts, "same": torch.ones(500), "step": torch.tensor(step)}
        saver.save(state, checkpoint_id=step, storage_writer=writer)
        whole = whole.clone()
        whole[:8] += 1  # only the first rank's part changes
    empty = {
        "parts": distribute_tensor(torch.zeros(64, 48), mesh, [Shard(1)]),  # cut the other way
        "same": torch.zeros(500),
        "step": torch.tensor(0),
    }
    loader.load(empty, checkpoint_id=2, storage_reader=StoreReader(root, "run"))
    expected = torch.arange(64 * 48, dtype=torch.float32).view(64, 48)
    expected[:8] += 1
    found: Any = empty["parts"]
    assert torch.equal(found.full_tensor(), expected)
    assert torch.equal(empty["same"], torch.ones(500))
    assert empty["step"] == 2
    dist.destroy_process_group()


def late_rank(number: int, port: int, root: str, step: int | None) -> None:
    """Of two ranks, the second looks up the step to load after another one was saved."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=number, world_size=2)

    class Reader(StoreReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            if number:
                dist.barrier()
                return super().read_metadata(*args, **kwargs)
            found = super().read_metadata(*args, **kwargs)
            save_ones(Path(root), step=1 if step is None else step)
            dist.barrier()
            return found

    state = {"w": torch.full((3,), 2.0)}
    with pytest.raises(CheckpointException, match="ranks have found different content"):
        loader.load(state, checkpoint_id=step, storage_reader=Reader(root, "run"))
    assert state["w"].tolist() == [2.0] * 3
    loader.load(state, storage_reader=StoreReader(root, "run"))
    assert state["w"].tolist() == [1.0] * 3
    dist.destroy_process_group()


def save_ones(root: Path, step: int) -> None:
    writer = StoreWriter(root, "run")
    saver.save({"w": torch.ones(3)}, checkpoint_id=step, storage_writer=writer, no_dist=True)


@pytest.mark.parametrize("step", [None, 0], ids=["latest", "replaced"])
def test_ranks_that_find_different_steps_load_none(tmp_path: Path, step: int | None) -> None:
    writer, port = StoreWriter(tmp_path, "run"), free_port()
    saver.save({"w": torch.zeros(3)}, checkpoint_id=0, storage_writer=writer)
    with ThreadPoolExecutor(2) as pool:
        children = [
            pool.submit(fresh.call_forked, late_rank, n, port, str(tmp_path), step)
            for n in range(2)
        ]
    for child in children:
        child.result()


def test_a_step_that_is_replaced_during_a_load_is_not_loaded(tmp_path: Path) -> None:
    class Reader(StoreReader):
        def prepare_global_plan(self, plans: Any) -> Any:
            save_ones(tmp_path, 0)
            return super().prepare_global_plan(plans)

    saver.save({"w": torch.zeros(3)}, checkpoint_id=0, storage_writer=StoreWriter(tmp_path, "run"))
    state = {"w": torch.full((3,), 2.0)}
    with pytest.raises(CheckpointException, match="run@0 was saved again while it was loaded"):
        loader.load(state, checkpoint_id=0, storage_reader=Reader(tmp_path, "run"))
    assert state["w"].tolist() == [2.0] * 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_several_ranks_save_one_step_and_read_it_cut_otherwise(tmp_path: Path) -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        children = [
            pool.submit(fresh.call_forked, rank, n, port, 2, str(tmp_path)) for n in range(2)
        ]
    for child in children:
        child.result()
    run = CheckpointStore(tmp_path, "run")
    found = run.stats()
    # Of two steps of five tensors (two parts, one for all, the number, what DCP knows), three new.
    assert (found["checkpoints"], found["total_chunks"], found["unique_chunks"]) == (2, 10, 7)
    whole = {"parts": torch.zeros(64, 48)}
    loader.load(whole, checkpoint_id=1, storage_reader=StoreReader(tmp_path, "run"))
    assert torch.equal(whole["parts"].view(-1), torch.arange(64 * 48, dtype=torch.float32))
    assert run.store.handle.objects.names() == ["run@1", "run@2"]
