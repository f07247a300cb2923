"""A training of a given size on every rank, and the engines that save its steps."""

import io
import os
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader as dcp_loader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from bench.checkpoint_methods import sync
from tensor_dedup.training import CheckpointStore, PendingSave
from tensor_dedup.training.capture import HostPool

NOTHING: Final = "no saves"
TORCH: Final = "torch.save"
SYNCED: Final = "torch.save + fsync"
DCP: Final = "DCP async_save"
SNAPSHOT: Final = "torchsnapshot async_take"
DEEPSPEED: Final = "DeepSpeed, torch engine"
FAST: Final = "DeepSpeed, fast engine, python writer"
DECOUPLED: Final = "DeepSpeed, decoupled engine, python writer"
SAVE: Final = "ours, save"
SAVE_RAW: Final = "ours, save, compress=None"
LAZY: Final = "ours, save_async, lazy"
LAZY_RAW: Final = "ours, save_async, lazy, compress=None"
OURS: Final = (SAVE, SAVE_RAW, LAZY, LAZY_RAW)
OTHERS: Final = (TORCH, SYNCED, DCP, SNAPSHOT, DEEPSPEED, FAST, DECOUPLED)
TOKENS: Final = 16
_PACKAGES: Final = {SNAPSHOT: "torchsnapshot"} | dict.fromkeys(
    (DEEPSPEED, FAST, DECOUPLED), "deepspeed"
)
# Width and blocks of the model by the bytes of a step, of weights and Adam's two moments.
SHAPES: Final = {
    2_000_000: (72, 4),
    45_000_000: (242, 8),
    420_000_000: (604, 12),
    1_700_000_000: (1215, 12),
}


def absent() -> dict[str, str]:
    """The engines whose packages are not installed, and why they take no part."""
    return {
        engine: f"{package} is not installed"
        for engine, package in _PACKAGES.items()
        if find_spec(package) is None
    }


class Block(nn.Module):
    """What a transformer's block is without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (tokens, width), the same shape."""
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


class Training:
    """One rank's part of a training: its own blocks, as under pipeline parallelism, and Adam."""

    def __init__(self, nbytes: int, rank: int, ranks: int, *, frozen: bool = False) -> None:
        width, blocks = SHAPES[nbytes]
        torch.manual_seed(rank)
        self.rank, self.ranks, self.frozen = rank, ranks, frozen
        self.model = nn.Sequential(*(Block(width) for _ in range(blocks // ranks)))
        if frozen:
            self.model.requires_grad_(requires_grad=False)
            self.model[-1].requires_grad_(requires_grad=True)
        moving = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.Adam(moving, lr=1e-3, fused=True)
        self._tokens = torch.randn(TOKENS, width)
        self.step(lambda: None)  # now the optimizer has its state

    @property
    def objects(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def state(self) -> dict[str, Any]:
        """The same as others take it."""
        return {name: each.state_dict() for name, each in self.objects.items()}

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors of this rank's state."""
        return sum(each.nbytes for each in tensors(self.state).values())

    def step(self, before_update: Callable[[], None]) -> float:
        """Forward, backward, a collective, update; seconds in `before_update`."""
        self.optimizer.zero_grad(set_to_none=False)  # fresh memory would cost more than the step
        loss: Any = self.model(self._tokens).square().mean()
        loss.backward()
        self.meet(loss.detach())
        began = time.perf_counter()
        before_update()
        taken = time.perf_counter() - began
        self.optimizer.step()
        return taken

    def meet(self, value: torch.Tensor | None = None) -> None:
        """Wait for the other ranks, as every step of a training of several does."""
        if self.ranks > 1:
            torch.distributed.all_reduce(torch.zeros(1) if value is None else value)


def tensors(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a state by their places in it."""
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    pairs: Any = state.items() if isinstance(state, dict) else ()
    if isinstance(state, list | tuple):
        pairs = enumerate(state)
    return {k: v for key, each in pairs for k, v in tensors(each, f"{prefix}/{key}").items()}


class Engine:
    """A way to save one rank's part of each step."""

    def __init__(self, folder: Path, training: Training) -> None:
        self.folder, self.training = folder, training
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int) -> None:
        """Save, or begin to; the caller waits for as long as this takes."""

    def before_update(self) -> None:
        """Wait until the state may change."""

    def settle(self) -> None:
        """Wait until the last save has ended."""

    def load(self, step: int, into: Training) -> None:
        """Restore a step."""
        raise NotImplementedError

    def tidy(self) -> None:
        """Free the disk between turns; also end what is left to be done at leisure."""
        self.training.meet()
        if self.training.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        self.training.meet()

    def close(self) -> None:
        """Let go of everything."""

    def parts(self, step: int) -> dict[str, float]:
        """Seconds of a save, until it has ended, by what is done: serialise, stage, write."""
        raise NotImplementedError

    def _path(self, step: int) -> Path:
        """The file of this rank, over that of the step before the last."""
        return self.folder / f"{step % 2}-{self.training.rank}.pt"


class _Nowhere(io.RawIOBase):
    """A file that forgets what is written to it."""

    def write(self, data: Any) -> int:
        """Count the bytes."""
        return memoryview(data).nbytes


def serialise(state: Any) -> None:
    """What `torch.save` does, without a file."""
    nowhere: Any = _Nowhere()
    torch.save(state, nowhere)


class TorchSave(Engine):
    """torch.save, a file a rank."""

    def __init__(self, folder: Path, training: Training, *, synced: bool = False) -> None:
        super().__init__(folder, training)
        self._synced = synced

    def save(self, step: int) -> None:
        # docstring inherited
        torch.save(self.training.state, self._path(step))
        if self._synced:
            sync(self._path(step))

    def load(self, step: int, into: Training) -> None:
        # docstring inherited
        restore(torch.load(self._path(step)), into)

    def parts(self, step: int) -> dict[str, float]:
        # docstring inherited
        pickled = seconds(lambda: serialise(self.training.state))
        whole = seconds(lambda: self.save(step))
        return {"serialise": pickled, "stage": 0.0, "write": max(0.0, whole - pickled)}


class _Planner(DefaultSavePlanner):
    """DCP's planner, timed."""

    def __init__(self, spent: dict[str, float]) -> None:
        super().__init__()
        self._spent = spent

    def create_local_plan(self) -> Any:
        began = time.perf_counter()
        plan = super().create_local_plan()
        self._spent["serialise"] += time.perf_counter() - began
        return plan

    def create_global_plan(self, all_plans: Any) -> Any:
        began = time.perf_counter()
        found = super().create_global_plan(all_plans)
        self._spent["serialise"] += time.perf_counter() - began
        return found


class _Writer(FileSystemWriter):
    """DCP's writer, timed."""

    def __init__(self, path: str, spent: dict[str, float]) -> None:
        super().__init__(path)
        self._spent = spent

    def write_data(self, plan: Any, planner: Any) -> Any:
        began = time.perf_counter()
        done = super().write_data(plan, planner)
        done.wait()
        self._spent["write"] += time.perf_counter() - began
        return done


class Dcp(Engine):
    """PyTorch Distributed Checkpoint: one save at a time, as it is used; it syncs its files."""

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__(folder, training)
        # What else there is to choose needs a GPU.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        # Its collectives run in a thread of its own beside those of the training.
        self._group = torch.distributed.new_group(backend="gloo")
        self._pending: Any = None

    def save(self, step: int) -> None:
        # docstring inherited
        self.settle()
        self._begin(step)

    def _begin(self, step: int, **options: Any) -> None:
        self._pending = async_save(
            self._state(self.training),
            checkpoint_id=str(self.folder / str(step % 2)),
            process_group=self._group,
            async_stager=self._stager,
            **options,
        )

    def settle(self) -> None:
        # docstring inherited
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def load(self, step: int, into: Training) -> None:
        # docstring inherited
        state = self._state(into)
        path = str(self.folder / str(step % 2))
        dcp_loader.load(state, checkpoint_id=path, process_group=self._group)
        restore(state[f"rank{into.rank}"], into)

    def parts(self, step: int) -> dict[str, float]:
        # docstring inherited
        spent = {"serialise": 0.0, "stage": 0.0, "write": 0.0}
        stage = self._stager.stage
        state = self._state(self.training)
        spent["stage"] = seconds(lambda: stage(state))
        path = str(self.folder / "parts")
        self._begin(step, planner=_Planner(spent), storage_writer=_Writer(path, spent))
        self.settle()
        return spent

    def close(self) -> None:
        # docstring inherited
        self._stager.close()

    def _state(self, training: Training) -> dict[str, Any]:
        return {f"rank{training.rank}": training.state}


class Torchsnapshot(Engine):
    """torchsnapshot: one save at a time, as DCP; it leaves its files to the kernel."""

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__(folder, training)
        self._library: Any = import_module("torchsnapshot")
        self._pending: Any = None

    def save(self, step: int) -> None:
        # docstring inherited
        self.settle()
        path = str(self.folder / str(step % 2))
        self._pending = self._library.Snapshot.async_take(path, self.training.objects)

    def settle(self) -> None:
        # docstring inherited
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def load(self, step: int, into: Training) -> None:
        # docstring inherited
        self._library.Snapshot(str(self.folder / str(step % 2))).restore(into.objects)

    def parts(self, step: int) -> dict[str, float]:
        # docstring inherited
        module = import_module("torchsnapshot.snapshot")
        stage, spent = module.sync_execute_write_reqs, {"stage": 0.0}

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = stage(*args, **kwargs)
            spent["stage"] += time.perf_counter() - began
            return found

        module.sync_execute_write_reqs = timed  # type: ignore[attr-defined]
        try:
            calls = seconds(lambda: self.save(step))
        finally:
            module.sync_execute_write_reqs = stage  # type: ignore[attr-defined]
        write = seconds(self.settle)
        return {"serialise": calls - spent["stage"], **spent, "write": write}


class DeepSpeed(Engine):
    """DeepSpeed's own engines, called as its `save_checkpoint` and `step` call them."""

    def __init__(self, folder: Path, training: Training, name: str) -> None:
        super().__init__(folder, training)
        model_checkpointing = import_module("deepspeed.runtime.model_checkpointing.config")
        self._base = import_module("deepspeed.runtime.checkpoint_engine.checkpoint_engine")
        _initialised()
        # The writer "fast" needs libaio and a compiler.
        writer = {"type": "python", "decoupled": name == DECOUPLED}
        given = {} if name == DEEPSPEED else {"writer": writer}
        checkpoint = model_checkpointing.get_checkpoint_config({"checkpoint": given})
        config = SimpleNamespace(checkpoint_config=checkpoint, aio_config=None)
        self._engine = _deepspeed_engine(name, config, training.rank)
        self._pending: Any = None

    def save(self, step: int) -> None:
        # docstring inherited
        self.before_update()
        tag = str(step % 2)
        (self.folder / tag).mkdir(exist_ok=True)
        info = self._base.CheckpointCommitInfo(tag=tag, save_dir=str(self.folder), save_latest=True)
        self._engine.create(info)
        self._engine.save(self.training.state, str(self._path(step)))
        if self._engine.is_decoupled():
            self._pending = info
        else:
            self._engine.commit(info)

    def before_update(self) -> None:
        # docstring inherited
        if self._pending is not None:
            self._engine.commit(self._pending)
            self._pending = None

    def settle(self) -> None:
        # docstring inherited
        self.before_update()

    def load(self, step: int, into: Training) -> None:
        # docstring inherited
        restore(torch.load(self._path(step)), into)

    def parts(self, step: int) -> dict[str, float]:
        # docstring inherited; a decoupled engine serialises in another process, as it writes
        if self._engine.is_decoupled():
            stage = seconds(lambda: self.save(step))
            return {"serialise": 0.0, "stage": stage, "write": seconds(self.settle)}
        pickled = seconds(lambda: serialise(self.training.state))
        whole = seconds(lambda: self.save(step))
        return {"serialise": pickled, "stage": 0.0, "write": max(0.0, whole - pickled)}

    def close(self) -> None:
        # docstring inherited
        self.settle()
        self._engine.cleanup()


def _initialised() -> None:
    deepspeed: Any = import_module("deepspeed")
    # It would be compiled here and now, for several processes on one machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def _deepspeed_engine(name: str, config: Any, rank: int) -> Any:
    engines: Any = import_module("deepspeed.runtime.checkpoint_engine.utils")
    if name == DEEPSPEED:
        return engines.TorchCheckpointEngine(config)
    factory: Any = import_module(
        "deepspeed.runtime.model_checkpointing.data_parallel_writer_factory"
    )
    writers = factory.DataParallelWriterConfig(1, 0, rank, rank, pure_dp=False)
    kind = engines.DecoupledCheckpointEngine if name == DECOUPLED else engines.FastCheckpointEngine
    return kind(config, writers, False)


class Ours(Engine):
    """A run of ours for each rank, in one store, as our engine for DeepSpeed saves."""

    def __init__(self, folder: Path, training: Training, name: str, pool: HostPool) -> None:
        super().__init__(folder, training)
        self._lazy = name in (LAZY, LAZY_RAW)
        self._run = CheckpointStore(
            folder,
            f"run/rank-{training.rank}",
            keep_last=2,
            compress=None if name in (SAVE_RAW, LAZY_RAW) else "auto",
            pool_bytes=pool,
        )
        self._pending: PendingSave | None = None

    def save(self, step: int) -> None:
        # docstring inherited
        if self._lazy:
            self._pending = self._run.save_async(self.training.objects, step, lazy=True)
        else:
            self._run.save(self.training.objects, step)

    def before_update(self) -> None:
        # docstring inherited
        self._run.before_update()

    def settle(self) -> None:
        # docstring inherited
        if self._pending is not None:
            self._pending.wait()

    def load(self, step: int, into: Training) -> None:
        # docstring inherited
        self._run.load(step, into.objects)

    def tidy(self) -> None:
        # docstring inherited
        # What is deleted is not encoded, which for all of a large model would take long.
        steps = self._run.steps()
        for step in steps[:-1] if self.training.frozen else steps:
            self._run.delete(step)
        self.training.meet()
        if self.training.rank == 0:
            self._run.gc(0)
        self.training.meet()

    def parts(self, step: int) -> dict[str, float]:
        # docstring inherited
        pending = self._run.save_async(self.training.objects, step, lazy=True)
        pending.wait()
        times = pending.times
        return {"serialise": times.metadata, "stage": times.copy, "write": times.write}

    def close(self) -> None:
        # docstring inherited
        self._run.close()


def made(name: str, folder: Path, training: Training, pool: HostPool) -> Engine:
    """An engine by its name."""
    if name in OURS:
        return Ours(folder, training, name, pool)
    if name in (DEEPSPEED, FAST, DECOUPLED):
        return DeepSpeed(folder, training, name)
    if name in (TORCH, SYNCED):
        return TorchSave(folder, training, synced=name == SYNCED)
    if name == DCP:
        return Dcp(folder, training)
    return Torchsnapshot(folder, training) if name == SNAPSHOT else Engine(folder, training)


def restore(state: dict[str, Any], into: Training) -> None:
    """Load a state into the model and optimizer of a training."""
    for name, each in into.objects.items():
        each.load_state_dict(state[name])


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def sync_all(folder: Path) -> float:
    """Make all files in a folder durable; seconds it takes."""

    def work() -> None:
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):  # the index comes and goes
                if path.is_file() and not path.is_symlink():
                    sync(path)

    return seconds(work)


def quiet() -> None:
    """Silence what DCP, torchsnapshot and DeepSpeed say at each save."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
