"""Lightning saves into the store and resumes from it."""

import importlib
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

lightning = pytest.importorskip("pytorch_lightning")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from processes import fresh  # noqa: E402
from store_runs.disk_faults import Faults, FaultyFiles  # noqa: E402
from tensor_dedup import Store  # noqa: E402
from tensor_dedup.errors import NotInstalledError, UnsupportedError  # noqa: E402
from tensor_dedup.integrations.lightning import StoreCallback, StoreIO  # noqa: E402
from tensor_dedup.remote import transfer  # noqa: E402
from tensor_dedup.remote.errors import UnknownRemoteNameError  # noqa: E402
from tensor_dedup.store.errors import NoSpaceError  # noqa: E402
from tensor_dedup.training import CheckpointStore  # noqa: E402
from tensor_dedup.training.background import Saves  # noqa: E402
from training_runs import killed_training  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning_fabric"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def module(root: str | None = None, ranks: int = 1) -> Any:
    """A network; if it records its losses, it makes each of its batches by itself.

    Lightning resumes in the middle of an epoch with that epoch's first batches.
    """

    class Network(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.back = torch.nn.Linear(32, 64).requires_grad_(False)
            self.head = torch.nn.Linear(64, 1)
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            number = self.trainer.fit_loop.total_batch_idx * ranks + self.global_rank
            rows = batch[0]
            if root is not None:
                rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
            loss: torch.Tensor = self.head(self.back(rows)).square().mean()
            self.losses.append(loss.item())
            if root is not None:
                killed_training.record(root, number, loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.head.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Network()


def fit(
    folder: Path,
    *callbacks: Any,
    start: str | None = None,
    steps: int = -1,
    root: str | None = None,
    ranks: int = 1,
    accumulate: int = 1,
) -> Any:
    rows = torch.randn(24, 32, generator=torch.Generator().manual_seed(3))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=3 if steps < 0 else -1,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[*callbacks],
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
    )
    network = module(root, ranks)
    trainer.fit(network, data, ckpt_path=start)
    return network


def test_training_resumes_to_the_same_losses(tmp_path: Path) -> None:
    callback = StoreCallback(tmp_path / "store", "org/run", config={"config.json": "{}"})
    expected = fit(tmp_path, callback)
    found = callback.run.stats()
    assert int(str(found["unique_chunks"])) < int(str(found["total_chunks"]))
    assert callback.run.steps() == [6, 12, 18]
    assert callback.run.best("loss") in (6, 12, 18)
    for step in (6, 12):
        again = StoreCallback(tmp_path / "store", "again")
        resumed = fit(tmp_path, again, start=f"store://org/run@{step}")
        assert resumed.losses == expected.losses[step:]
        for name, tensor in expected.state_dict().items():
            assert torch.equal(tensor, resumed.state_dict()[name])


def test_a_step_of_another_machine_is_pulled_to_resume_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = StoreCallback(tmp_path / "store", "run")
    expected = fit(tmp_path, first)
    url = f"file://{tmp_path}/remote"
    transfer.push(first.run.store, url, "run")
    monkeypatch.setenv("TENSOR_DEDUP_REMOTE", url)
    again = StoreCallback(tmp_path / "elsewhere", "run")
    assert again.run.steps() == []
    assert fit(tmp_path, again, start="store://run@6").losses == expected.losses[6:]
    assert again.run.steps() == [6, 12, 18]
    with pytest.raises(UnknownRemoteNameError, match="run@7"):
        again._io.load_checkpoint("store://run@7")


def test_steps_of_the_optimizer_are_models_like_any_other(tmp_path: Path) -> None:
    callback = StoreCallback(tmp_path / "store", "run", every=5, keep_last=2)
    network = fit(tmp_path, callback)
    found = callback.run.stats()
    assert int(str(found["unique_chunks"])) < int(str(found["total_chunks"]))
    assert callback.run.steps() == [10, 15]
    callback.run.store.export("run@15", tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == network.state_dict().keys()
    assert torch.equal(exported["back.weight"], network.back.weight)


def test_each_callback_saves_its_run_into_its_store_by_its_rules(tmp_path: Path) -> None:
    few = StoreCallback(tmp_path / "one", "few", every=2, keep_last=1)
    many = StoreCallback(tmp_path / "two", "many", every=3, config={"config.json": "{}"})
    best = StoreCallback(tmp_path / "one", "best", every=9, keep_best=("loss", 1, "min"))
    expected = fit(tmp_path, few, many, best)
    assert few.run.steps() == [18]
    assert many.run.steps() == [3, 6, 9, 12, 15, 18]
    assert len(best.run.steps()) == 1
    assert {step.name for step in few.run.store.list()} == {
        "few@18",
        f"best@{best.run.steps()[0]}",
    }
    found = many.run.metrics()
    assert found[18]["loss"] == pytest.approx(expected.losses[17])
    assert found[3]["loss"] == pytest.approx(expected.losses[2])
    many.run.store.export("many@3", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    # Any of them finds any run of any of their stores.
    others = [StoreCallback(tmp_path / folder, f"later-{folder}") for folder in ("one", "two")]
    assert fit(tmp_path, *others, start="store://many@6").losses == expected.losses[6:]


def test_two_callbacks_of_one_run_are_refused(tmp_path: Path) -> None:
    two = [StoreCallback(tmp_path / folder, "run") for folder in ("one", "two")]
    with pytest.raises(UnsupportedError, match="'run'"):
        fit(tmp_path, *two)
    assert [each.run.steps() for each in two] == [[], []]


@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy"])
def test_strategies_that_write_their_own_files_are_refused(tmp_path: Path, name: str) -> None:
    strategy = getattr(lightning.strategies, name)()
    callback = StoreCallback(tmp_path / "store", "run")
    before = strategy.checkpoint_io
    trainer = SimpleNamespace(strategy=strategy, callbacks=[callback])
    with pytest.raises(UnsupportedError, match=f"{name}.*integrations.dcp"):
        callback.setup(trainer, module(), "fit")
    assert strategy.checkpoint_io is before


@pytest.mark.parametrize("absent", ["lightning_fabric", "pytorch_lightning"])
def test_without_lightning_the_error_says_what_to_install(
    absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tensor_dedup.integrations.lightning")
    for name in [each for each in sys.modules if each.startswith(f"{absent}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(NotInstalledError, match="`pip install pytorch-lightning`") as caught:
        importlib.import_module("tensor_dedup.integrations.lightning")
    assert isinstance(caught.value, ImportError)


def test_files_still_go_where_they_did(tmp_path: Path) -> None:
    from pytorch_lightning.plugins.io import AsyncCheckpointIO

    behind = AsyncCheckpointIO()
    callback = StoreCallback(tmp_path / "store", "run")
    strategy = lightning.strategies.SingleDeviceStrategy("cpu", checkpoint_io=behind)
    callback.setup(SimpleNamespace(strategy=strategy, callbacks=[callback]), module(), "fit")
    strategy.checkpoint_io.save_checkpoint({"a": 1}, tmp_path / "file.ckpt")
    strategy.checkpoint_io.teardown()  # waits for the thread
    assert torch.load(tmp_path / "file.ckpt") == {"a": 1}
    assert behind._executor is None


class Unfinished(lightning.Callback):  # type: ignore[misc,name-defined]
    """Counts the batches that begin while a save is not finished."""

    def __init__(self, callback: StoreCallback) -> None:
        self.callback, self.count = callback, 0

    def on_train_batch_start(self, *_: Any) -> None:
        pending = self.callback.run._saves._pending
        self.count += any(not each.done() for each in pending)


def train_behind(root: str, steps: int, accumulate: int = 1) -> None:
    """Save every step in the background, and resume from the latest one."""
    torch.set_num_threads(1)
    kept = 2 if accumulate == 1 else steps
    callback = StoreCallback(root, "run", every=1, asynchronous=True, keep_last=kept)
    latest, unfinished = callback.run.latest(), Unfinished(callback)
    start = None if latest is None else f"store://run@{latest}"
    fit(
        *(Path(root), callback, unfinished),
        start=start,
        steps=steps,
        root=root,
        accumulate=accumulate,
    )
    assert callback.run.latest() == steps  # the end has waited
    assert start is not None or unfinished.count > 0


def kill_fit(root: str, alone: str, kills: int, accumulate: int) -> list[int]:
    import torch._dynamo  # noqa: F401 (what every optimizer imports when it is made)

    steps = killed_training.enough_steps(kills)
    train = partial(train_behind, steps=steps, accumulate=accumulate)
    return killed_training.killed_and_alone(train, root, alone, kills)


@pytest.mark.parametrize(
    ("kills", "accumulate"),
    [
        (2, 1),
        (2, 2),
        pytest.param(12, 1, marks=pytest.mark.long),
        pytest.param(12, 3, marks=pytest.mark.long),
    ],
)
def test_a_killed_training_that_saves_behind_ends_as_one_that_is_not(
    tmp_path: Path, kills: int, accumulate: int
) -> None:
    root, alone = str(tmp_path / "killed"), str(tmp_path / "alone")
    latest = fresh.call_forked(kill_fit, root, alone, kills, accumulate)
    steps = killed_training.enough_steps(kills)
    assert len(latest) == kills
    assert max(latest) < steps
    killed_training.assert_same_losses(root, alone, steps * accumulate)
    first, second = (CheckpointStore(each, "run") for each in (root, alone))
    first_kept = steps - 1 if accumulate == 1 else 1
    assert first.steps() == second.steps() == [*range(first_kept, steps + 1)]
    for step in first.steps():  # also those that were resumed from
        one, other = first.load(step), second.load(step)
        batches = one["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
        assert batches == step * accumulate
        for name, tensor in one["state_dict"].items():
            assert torch.equal(tensor, other["state_dict"][name])


class InOrderOfTime(lightning.Callback):  # type: ignore[misc,name-defined]
    """Notes what happens within a batch."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_before_zero_grad(self, *_: Any) -> None:
        self.events.append("zero_grad")

    def on_before_backward(self, *_: Any) -> None:
        self.events.append("backward")


@pytest.mark.parametrize(
    ("accumulate", "expected"),
    [
        (1, ["wait", "zero_grad", "backward"]),
        (2, ["zero_grad", "backward", "wait", "backward"]),
    ],
)
def test_an_optimizer_waits_before_lightning_computes_gradients_in_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int, expected: list[str]
) -> None:
    order, wait = InOrderOfTime(), Saves.before_update

    def noted(saves: Saves) -> None:
        order.events.append("wait")
        wait(saves)

    monkeypatch.setattr(Saves, "before_update", noted)
    callback = StoreCallback(tmp_path / "store", "run", every=1, asynchronous=True)
    fit(tmp_path, callback, order, steps=2, accumulate=accumulate)
    assert order.events[: 2 * len(expected)] == 2 * expected


class InOrderOfRanks(lightning.Callback):  # type: ignore[misc,name-defined]
    """Adds gradients in the order of ranks, whatever DDP's buckets are: see `mean_by_rank`."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        wrapped = trainer.strategy.model
        assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
        wrapped.register_comm_hook(trainer.world_size, killed_training.mean_by_rank)


def rank(root: str, /, *, number: int, group: str, ranks: int, steps: int) -> None:
    """Train as one process of several, each with the whole model (DDP)."""
    torch.set_num_threads(1)
    killed_training.join_group(number, group, ranks)
    callback = StoreCallback(root, "run", every=1, asynchronous=True, keep_last=2)
    latest, unfinished = callback.run.latest(), Unfinished(callback)
    fit(
        *(Path(root), callback, unfinished, InOrderOfRanks()),
        start=None if latest is None else f"store://run@{latest}",
        steps=steps,
        root=root,
        ranks=ranks,
    )
    if number == 0:  # the others save nothing, and do not wait for it
        assert callback.run.latest() == steps
        assert latest is not None or unfinished.count > 0
    killed_training.leave_group()


def kill_ranks(root: str, alone: str, ranks: int, kills: int) -> list[int]:
    import torch._dynamo  # noqa: F401

    train = partial(rank, ranks=ranks, steps=killed_training.enough_steps(kills))
    return killed_training.killed_ranks_and_alone(train, root, alone, ranks, kills)


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        (2, 1),
        pytest.param(2, 6, marks=pytest.mark.long),
        pytest.param(4, 4, marks=pytest.mark.long),
    ],
)
def test_a_killed_training_of_several_ranks_ends_as_one_that_is_not(
    tmp_path: Path, ranks: int, kills: int
) -> None:
    root, alone = str(tmp_path / "killed"), str(tmp_path / "alone")
    latest = fresh.call_forked(kill_ranks, root, alone, ranks, kills)
    steps = killed_training.enough_steps(kills)
    assert len(latest) == kills
    assert max(latest) < steps
    losses = killed_training.assert_same_losses(root, alone, steps * ranks)
    assert all(len(each) == 1 for each in losses.values())
    first, second = (CheckpointStore(each, "run").load(steps) for each in (root, alone))
    for name, tensor in first["state_dict"].items():
        assert torch.equal(tensor, second["state_dict"][name])


def test_the_error_of_a_save_behind_ends_the_training(tmp_path: Path) -> None:
    (tmp_path / "limbo").mkdir()
    files = FaultyFiles(tmp_path / "limbo")
    store = Store.open(tmp_path / "store", files=files)
    callback = StoreCallback(store, "run", every=5, asynchronous=True)

    class Filling(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 8:
                callback.run._saves.finish()
                files._faults = Faults(full_from=0)

    with pytest.raises(NoSpaceError):
        fit(tmp_path, callback, Filling())
    files._faults = Faults()
    assert callback.run.steps() == [5]
    callback.run.close()


def test_an_error_of_the_training_waits_for_its_last_step(tmp_path: Path) -> None:
    callback = StoreCallback(tmp_path / "store", "run", every=1, asynchronous=True)

    class Failing(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit(tmp_path, callback, Failing())
    assert not callback.run._saves._pending
    assert callback.run.latest() == 4
    assert callback._hooks == []


def test_removing_a_step_waits_for_saves_and_not_for_encoding(tmp_path: Path) -> None:
    run = CheckpointStore(tmp_path / "store", "run")
    plug_in = StoreIO(run)
    plug_in.add(run, asynchronous=True)
    plug_in.save_checkpoint({"weight": torch.randn(2_000_000)}, "store://run@1")
    run._saves.finish()
    encoder = run._saver._encoder.background
    with encoder.saving():  # as long as a save lasts, nothing is encoded
        plug_in.save_checkpoint({"weight": torch.randn(2_000_000)}, "store://run@2")
        remove = threading.Thread(target=plug_in.remove_checkpoint, args=("store://run@1",))
        remove.start()
        remove.join(20)
        waits = remove.is_alive()
        steps, left = run.steps(), len(encoder._waiting)
    remove.join()
    run.close()
    assert not waits
    assert left > 0  # there was something to wait for
    assert steps == [2]
