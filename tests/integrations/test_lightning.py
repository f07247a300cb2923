"""Lightning saves into the store and resumes from it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

lightning = pytest.importorskip("pytorch_lightning")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from tensor_dedup.errors import UnsupportedError  # noqa: E402
from tensor_dedup.integrations.lightning import StoreCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning_fabric"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def module() -> Any:
    class Network(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.back = torch.nn.Linear(32, 64).requires_grad_(False)
            self.head = torch.nn.Linear(64, 1)
            self.losses: list[float] = []

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.head(self.back(batch[0])).square().mean()
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.head.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Network()


def fit(folder: Path, *callbacks: StoreCallback, start: str | None = None) -> Any:
    rows = torch.randn(24, 32, generator=torch.Generator().manual_seed(3))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[*callbacks],
    )
    network = module()
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
