"""Frozen layers stay bit-identical through real trainings, and a check finds one that does not."""

import gc
import re
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from processes import fresh
from tensor_dedup import Store
from tensor_dedup.errors import ConfigError
from tensor_dedup.integrations import FrozenLayerError, check_frozen, freeze
from tensor_dedup.integrations.trainer import FreezeCallback, StoreCallback
from tensor_dedup.training import CheckpointStore
from training_runs import killed_training

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
BLOCKS = 8


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(16, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.drop(self.norm(self.mix(x)))
        return found


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


def net() -> Any:
    torch.manual_seed(0)
    return Net()


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.numpy().tobytes() == two.numpy().tobytes()


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    draw = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        x = torch.randn(8, 16, generator=draw)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        loss.backward()
        optimizer.step()


def stayed(before: dict[str, torch.Tensor], model: torch.nn.Module) -> set[str]:
    after = model.state_dict()
    return {name for name in before if same(before[name], after[name])}


def test_frozen_layers_stay_through_200_steps_of_adamw() -> None:
    model = net()
    before = state(model)
    frozen = freeze(model, "0-5")
    assert set(frozen.names) == {
        n for n in before if n.startswith(tuple(f"blocks.{b}." for b in range(6)))
    }
    # Not even one that was given everything.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    train(model, optimizer, 200)
    assert stayed(before, model) == set(frozen.names)
    assert len(optimizer.state) == len([p for p in model.parameters() if p.requires_grad]) > 0
    assert all(p.requires_grad for p in optimizer.state)
    frozen.check()
    check_frozen(model)


def test_without_freezing_everything_moves() -> None:
    """Else the test above would say nothing."""
    model = net()
    before = state(model)
    train(model, torch.optim.AdamW(model.parameters(), 1e-2), 2)
    assert stayed(before, model) == set()


def test_a_tensor_that_changed_is_named() -> None:
    model = net()
    frozen = freeze(model, "0-1,head")
    with torch.no_grad():
        model.blocks[1].mix.weight[3, 3] += 1e-6
    with pytest.raises(FrozenLayerError, match=r"^blocks\.1\.mix\.weight: frozen, and changed"):
        frozen.check()
    frozen.note()
    frozen.check()
    model.blocks[0].norm.running_mean.add_(1)
    with pytest.raises(FrozenLayerError, match=r"blocks\.0\.norm\.running_mean"):
        check_frozen(torch.nn.Sequential(model))


def test_thawed_layers_are_trained_again() -> None:
    model = net()
    model.head.requires_grad_(False)
    before = state(model)
    with freeze(model, "*"):
        assert not any(p.requires_grad for p in model.parameters())
    train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), 2)
    assert stayed(before, model) == {"head.weight", "head.bias"}  # which others had frozen
    check_frozen(model)


def test_tied_weights_are_frozen_by_either_name() -> None:
    for name in ("embed", "out"):
        model = torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(4, 4), "out": torch.nn.Linear(4, 4)}
        )
        model["out"].weight = model["embed"].weight
        freeze(model, name)
        assert not model["embed"].weight.requires_grad
        assert model["out"].bias.requires_grad == (name == "embed")


def test_layers_that_are_not_there_are_refused() -> None:
    for layers, why in (("0-9", "write '0-7'"), ("nix", "no layer"), ("", "no layer is named")):
        with pytest.raises(ConfigError, match=why):
            freeze(net(), layers)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ("2", "'2': layer 2 has no tensors, or is not there; there are 0-1, 3: give some of these"),
        ("0-3", "'0-3': layer 2 has no tensors, or is not there; there are 0-1, 3: write '0-1,3'"),
        ("3-0", "'3-0': it counts backwards; there are 0-1, 3: write '0-1,3'"),
    ],
)
def test_what_is_wrong_with_numbers_is_said_and_what_to_write(layers: str, says: str) -> None:
    parts = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(*parts)
    with pytest.raises(ConfigError) as caught:
        freeze(model, layers)
    assert str(caught.value) == says
    for right in re.findall("write '(.*)'", says):
        assert {name.partition(".")[0] for name in freeze(model, right).names} == {"0", "1", "3"}


def test_a_frozen_model_can_be_dropped() -> None:
    model = net()
    frozen = freeze(model, "0")
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert frozen.names


def rank(root: str, /, *, number: int, group: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{group}", rank=number, world_size=2)
    model = net()
    before = state(model)
    frozen = freeze(model, "0-5")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    train(wrapped, torch.optim.AdamW(wrapped.parameters(), 1e-2, weight_decay=0.1), 200, number)
    check_frozen(wrapped)
    torch.save([stayed(before, model), set(frozen.names)], Path(root, str(number)))
    del wrapped
    killed_training.leave_group()


def both_ranks(root: str) -> None:
    import torch._dynamo  # noqa: F401 (before children are forked, for each of them)

    killed_training.end_ranks(rank, root, 2)


def test_two_ranks_in_mixed_precision(tmp_path: Path) -> None:
    fresh.call_forked(both_ranks, str(tmp_path))
    for number in range(2):
        found, frozen = torch.load(tmp_path / str(number))
        assert found == frozen
        assert len(frozen) == 6 * 7


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (12,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": tokens, "labels": tokens}


def llama() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    make: Any = LlamaForCausalLM
    return make(config)


def trainer(folder: Path, rate: float, *callbacks: TrainerCallback, **more: Any) -> Trainer:
    given: dict[str, Any] = {"save_strategy": "no", **more}
    arguments = TrainingArguments(
        **given,
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=rate,
        weight_decay=0.1,
        bf16=True,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(llama(), arguments, train_dataset=Sentences(), callbacks=[*callbacks])


def test_runs_of_a_sweep_keep_frozen_layers_once(tmp_path: Path) -> None:
    base = state(llama())
    for number, rate in enumerate((1e-2, 3e-2)):
        callback = StoreCallback(tmp_path / "store", f"run-{number}", every=6)
        made = trainer(tmp_path, rate, FreezeCallback("0-1,*embed*"), callback)
        made.train()
        assert made.model is not None
        kept = stayed(base, made.model)
        assert kept == {n for n in base if "layers.0." in n or "layers.1." in n or "embed" in n}
    both = [CheckpointStore(tmp_path / "store", f"run-{n}").load(6)["model"] for n in range(2)]
    assert {name for name in base if same(both[0][name], both[1][name])} == kept
    digests = []
    for number in range(2):
        with Store.open(tmp_path / "store").checkpoint(f"run-{number}@6") as stored:
            digests.append({each.name: each.digest for each in stored})
    there = {name for name in base if f"model.{name}" in digests[0]}
    assert len(there & kept) > 10
    assert {n for n in there if digests[0][f"model.{n}"] == digests[1][f"model.{n}"]} == (
        there & kept
    )


class Breaking(TrainerCallback):
    """What an averaging of weights would do."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 4:
            given["model"].model.layers[1].mlp.up_proj.weight.data.mul_(1.001)


def test_a_broken_layer_ends_the_training_before_it_is_saved(tmp_path: Path) -> None:
    callback = StoreCallback(tmp_path / "store", "run", every=2)
    made = trainer(tmp_path, 1e-2, FreezeCallback("0-1"), Breaking(), callback)
    with pytest.raises(FrozenLayerError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight: frozen"):
        made.train()
    assert callback.run.steps() == [2]


def saving(folder: Path, *callbacks: TrainerCallback, **more: Any) -> Trainer:
    made = trainer(folder, 1e-2, *callbacks, save_steps=2, save_strategy="steps", **more)
    assert made.args.save_strategy == "steps"
    return made


class BreakingInside(TrainerCallback):
    """Breaks a layer in a step, before Trainer decides to save."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 3:
            given["model"].model.layers[1].mlp.up_proj.weight.data.mul_(1.001)


def folders(folder: Path) -> set[str]:
    return {each.name for each in folder.glob("checkpoint-*")}


def test_trainer_does_not_write_a_broken_layer(tmp_path: Path) -> None:
    made = saving(tmp_path, FreezeCallback("0-1"), BreakingInside())
    with pytest.raises(FrozenLayerError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight: frozen"):
        made.train()
    assert folders(tmp_path) == {"checkpoint-2"}
    saving(tmp_path, FreezeCallback("0-1")).train(resume_from_checkpoint=True)
    assert folders(tmp_path) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}


def test_a_checkpoint_with_other_bytes_is_not_resumed(tmp_path: Path) -> None:
    saving(tmp_path, FreezeCallback("0-1")).train()
    broken = str(tmp_path / "checkpoint-4")
    saved = load_file(f"{broken}/model.safetensors")
    saved["model.layers.1.mlp.up_proj.weight"].mul_(1.001)
    save_file(saved, f"{broken}/model.safetensors", {"format": "pt"})
    with pytest.raises(FrozenLayerError, match=r"^model\.layers\.1\.mlp\.up_proj") as raised:
        saving(tmp_path, FreezeCallback("0-1")).train(resume_from_checkpoint=broken)
    [note] = raised.value.__notes__
    assert "from_pretrained" in note


def test_only_what_keeps_statistics_evaluates() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.drop = net(), torch.nn.Dropout(0.5)
            self.bias = torch.nn.Buffer(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.drop(self.net(x) + self.bias)
            return y

    model = Outer()
    freeze(model, "net.blocks.0-5,bias")
    statistics = {n: t.clone() for n, t in model.named_buffers() if "running_mean" in n}
    assert len(statistics) == 8
    model.train()
    model(torch.randn(8, 16))
    assert model.training
    assert model.drop.training
    moved = {n for n, t in model.named_buffers() if n in statistics and not same(statistics[n], t)}
    assert moved == {f"net.blocks.{block}.norm.running_mean" for block in (6, 7)}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_lightning_keeps_and_checks_them(tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    from tensor_dedup.integrations import lightning as ours

    class Network(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, breaks: bool) -> None:
            super().__init__()
            self.net, self.breaks = net(), breaks

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if self.breaks and self.global_step == 4:
                self.net.blocks[2].norm.weight.data.add_(1)
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1)

    rows = torch.randn(24, 16, generator=torch.Generator().manual_seed(3))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)
    before = {f"net.{name}": tensor for name, tensor in state(net()).items()}
    for breaks in (False, True):
        callback = ours.StoreCallback(
            tmp_path / "store", f"run-{breaks}", every=3, config={"config.json": "{}"}
        )
        made = lightning.Trainer(
            max_steps=6,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=[ours.FreezeCallback("0-5"), callback],
        )
        network = Network(breaks)
        if breaks:
            with pytest.raises(FrozenLayerError, match=r"net\.blocks\.2\.norm\.weight"):
                made.fit(network, data)
            assert callback.run.steps() == [3]
        else:
            made.fit(network, data)
            assert callback.run.steps() == [3, 6]
            assert len(stayed(before, network)) == 6 * 7
