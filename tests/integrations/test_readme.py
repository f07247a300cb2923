"""The examples of training checkpoints in README.md run as they stand there."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import package_source
from tensor_dedup.store.checkpoints import CheckpointStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning_fabric"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@dataclass
class Corpus:
    words: Any
    seen: int


def example(mark: str) -> str:
    """The one Python example of the section that has this text."""
    section = (package_source.ROOT / "README.md").read_text().split("## Training checkpoints\n")[1]
    section = section.split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    [found] = [block for block in blocks if mark in block]
    return str(found)


def run(mark: str, here: Path, monkeypatch: pytest.MonkeyPatch, **names: Any) -> dict[str, Any]:
    monkeypatch.chdir(here)
    torch.manual_seed(0)
    exec(compile(example(mark), "README.md", "exec"), names)
    return names


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(4, 2)


def test_saving_each_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    losses = iter([3.0, 1.0, 2.0] + [4.0] * 17)

    def train_one_epoch(model: torch.nn.Linear, optimizer: object) -> None:
        names["val_loss"] = next(losses)
        with torch.no_grad():
            model.bias.fill_(names["val_loss"])

    names: dict[str, Any] = {"model": model, "optimizer": None, "train_one_epoch": train_one_epoch}
    monkeypatch.chdir(tmp_path)
    exec(compile(example("keep_best="), "README.md", "exec"), names)
    assert CheckpointStore("checkpoints", "run-001").steps() == [0, 1, 2, *range(15, 20)]
    assert model.bias[0].item() == 1.0  # the best one was loaded


def test_saving_while_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train_one_step(model: Any, optimizer: Any, batch: torch.Tensor) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()

    batches = torch.ones(3, 5, 4)
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": batches}
    run(
        *("save_async", tmp_path, monkeypatch),
        **names,
        CheckpointStore=CheckpointStore,
        train_one_step=train_one_step,
    )
    assert CheckpointStore("checkpoints", "run-001").steps() == [0, 1, 2]


def test_a_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointStore(tmp_path / "store", "run") as saver:
        names = {"model": linear(), "corpus": Corpus(np.arange(9.0), 3), "Corpus": Corpus}
        run("register_provider", tmp_path, monkeypatch, run=saver, **names)
        found = saver.load(20)["corpus"]
    assert type(found) is Corpus
    assert found.seen == 3
    assert np.array_equal(found.words, np.arange(9.0))


def test_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    make: Any = LlamaForCausalLM
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = torch.randint(64, (12, 8), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in rows]
    done = run(
        *("transformers", tmp_path, monkeypatch), model=make(config), arguments=arguments, data=data
    )
    assert CheckpointStore("checkpoints", "run-002").steps() == [3, 6]
    assert done["trainer"].state.global_step == 6


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Network(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.layer.parameters(), 0.1)

    rows = torch.utils.data.TensorDataset(torch.ones(24, 4))
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    run("pytorch_lightning", tmp_path, monkeypatch, module=Network(), loader=loader)
    assert CheckpointStore("checkpoints", "run-003").steps() == [6, 12, 18]


def test_dcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    done = run("torch.distributed.checkpoint", tmp_path, monkeypatch, model=model)
    assert torch.equal(done["state"]["model"]["weight"], model.weight)
    assert CheckpointStore("checkpoints", "run-004").steps() == [100]
