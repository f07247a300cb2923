"""Transformers' Trainer saves into the store, resumes from it, and its steps are models."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from processes import fresh
from store_runs.disk_faults import Faults, FaultyFiles
from tensor_dedup import Publisher, Store
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.integrations.trainer import PublishCallback, StoreCallback
from tensor_dedup.store.errors import NoSpaceError
from tensor_dedup.store.steps.errors import UnknownStepError
from tensor_dedup.training import CheckpointStore, HostPool
from training_runs import killed_training

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same 24 rows of tokens, every time."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (12,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": tokens, "labels": tokens}


def model() -> Any:
    torch.manual_seed(1)
    make: Any = LlamaForCausalLM
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        attention_dropout=0.1,  # so that random states matter
    )
    made = make(config)
    made.model.layers[0].requires_grad_(False)
    made.model.embed_tokens.requires_grad_(False)
    return made


def arguments(folder: Path, steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=steps,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )


def trainer(folder: Path, callback: StoreCallback) -> Trainer:
    return Trainer(model(), arguments(folder, 9), train_dataset=Sentences(), callbacks=[callback])


def weights(of: Trainer) -> dict[str, torch.Tensor]:
    assert of.model is not None
    return of.model.state_dict()


def losses(of: Trainer) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


def test_training_resumes_to_the_same_losses_and_weights(tmp_path: Path) -> None:
    callback = StoreCallback(tmp_path / "store", "org/run", every=3)
    first = trainer(tmp_path / "out", callback)
    first.train()
    found = callback.run.stats()
    assert int(str(found["unique_chunks"])) < int(str(found["total_chunks"]))
    assert callback.run.steps() == [3, 6, 9]
    expected = losses(first)
    assert len(expected) == 9
    for step in (3, 6):
        resumed = trainer(tmp_path / "out", StoreCallback(tmp_path / "other", "run"))
        folder = callback.check_out(tmp_path / f"resume-{step}", step)
        resumed.train(resume_from_checkpoint=folder)
        assert losses(resumed) == expected
        assert resumed.state.global_step == 9
        for name, tensor in weights(first).items():
            assert torch.equal(tensor, weights(resumed)[name])


def test_the_scale_of_gradients_is_resumed(tmp_path: Path) -> None:
    def scaled(folder: Path, callback: StoreCallback) -> Trainer:
        made = trainer(folder, callback)
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8, growth_interval=2)
        return made

    callback = StoreCallback(tmp_path / "store", "run", every=3)
    first = scaled(tmp_path / "out", callback)
    first.train()
    assert first.accelerator.scaler.get_scale() == 8 * 2**4
    resumed = scaled(tmp_path / "out", StoreCallback(tmp_path / "other", "run"))
    folder = callback.check_out(tmp_path / "resume", 3)
    resumed.train(resume_from_checkpoint=folder)
    assert resumed.accelerator.scaler.state_dict() == first.accelerator.scaler.state_dict()
    assert losses(resumed) == losses(first)


def evaluated(folder: Path, callback: StoreCallback) -> Trainer:
    """A training whose evaluations log, lower the learning rate, and draw random numbers."""
    given: Any = arguments(folder, 9)
    for name, value in {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0, "factor": 0.9},
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that what Trainer calls its best is not the last step
    }.items():
        setattr(given, name, value)
    given.__post_init__()
    data = Sentences()
    return Trainer(model(), given, train_dataset=data, eval_dataset=data, callbacks=[callback])


def evaluations(of: Trainer) -> dict[int, float]:
    history: list[dict[str, Any]] = of.state.log_history
    return {each["step"]: each["eval_loss"] for each in history if "eval_loss" in each}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_has_the_metrics_of_its_own_evaluation(tmp_path: Path, asynchronous: bool) -> None:
    callback = StoreCallback(tmp_path / "store", "run", every=1, asynchronous=asynchronous)
    first = evaluated(tmp_path / "out", callback)
    first.train()
    found, expected = callback.run.metrics(), evaluations(first)
    assert expected.keys() == {2, 4, 6, 8, 9}
    assert len(set(expected.values())) == 5
    assert {at: each["eval_loss"] for at, each in found.items() if "eval_loss" in each} == expected
    assert [found[step]["loss"] for step in range(1, 10)] == losses(first)
    assert all("train_loss" not in each for each in found.values())
    assert callback.run.best("eval_loss") == min(expected, key=lambda step: expected[step])
    # At the end Trainer has gone back to its best model; the step is what was trained.
    last = callback.run.load(9)["model"]
    assert any(not torch.equal(last[name], each) for name, each in weights(first).items())
    for step in (3, 4, 6):
        resumed = evaluated(tmp_path / f"out-{step}", StoreCallback(tmp_path / "other", f"{step}"))
        resumed.train(callback.check_out(tmp_path / f"resume-{step}", step))
        assert losses(resumed) == losses(first)
        assert evaluations(resumed) == expected


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_what_a_launcher_shards_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    training = trainer(tmp_path / "out", StoreCallback(tmp_path / "store", "run"))
    assert not training.args.fsdp
    # Accelerate itself switches it on only where there are accelerators.
    monkeypatch.setitem(AcceleratorState._shared_state, "distributed_type", DistributedType[kind])
    events = training.callback_handler
    for event in (events.on_init_end, events.on_train_begin):
        with pytest.raises(UnsupportedError, match=r"integrations\.dcp"):
            event(training.args, training.state, training.control)


def start_wrapped(root: str) -> str:
    """What the callback says of a model that is in parts already."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    group = f"file://{root}/group"
    torch.distributed.init_process_group("gloo", group, rank=0, world_size=1)
    callback = StoreCallback(Path(root, "store"), "run")
    training = trainer(Path(root, "out"), callback)
    cut = fully_shard(model(), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedError) as refused:
        callback.on_train_begin(training.args, training.state, training.control, model=cut)
    torch.distributed.destroy_process_group()
    return str(refused.value)


def test_a_model_in_parts_is_refused(tmp_path: Path) -> None:
    assert "integrations.dcp" in fresh.call_forked(start_wrapped, str(tmp_path))


def test_a_step_is_a_model_with_its_config(tmp_path: Path) -> None:
    callback = StoreCallback(tmp_path / "store", "run")
    training = trainer(tmp_path / "out", callback)
    training.train()
    found = callback.run.stats()
    assert int(str(found["unique_chunks"])) < int(str(found["total_chunks"]))
    assert callback.run.steps() == [6, 9]  # epochs
    assert callback.run.metrics()[9].keys() >= {"loss", "learning_rate", "epoch"}
    callback.run.store.export("run@9", tmp_path / "model")
    loaded: Any = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    for name, tensor in weights(training).items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    with pytest.raises(UnknownStepError):
        StoreCallback(tmp_path / "none", "run").check_out(tmp_path / "nothing")


class Recording(TrainerCallback):
    """Notes how often a step begins while a save is not finished."""

    def __init__(self, callback: StoreCallback) -> None:
        self.callback, self.unfinished = callback, 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        pending = self.callback.run._saves._pending
        self.unfinished += any(not each.done() for each in pending)


class InOrderOfRanks(TrainerCallback):
    """Adds gradients in the order of ranks, whatever DDP's buckets are: see `mean_by_rank`."""

    def __init__(self, training: Trainer) -> None:
        self.training = training

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.world_size > 1:
            wrapped = self.training.model_wrapped
            assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
            wrapped.register_comm_hook(args.world_size, killed_training.mean_by_rank)


class RecordingTrainer(Trainer):
    """Notes each loss to the last bit."""

    root = ""

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        loss = super().compute_loss(*given, **named)
        whole: Any = loss[0] if isinstance(loss, tuple) else loss
        number = self.state.global_step * self.args.world_size + self.args.process_index
        killed_training.record(self.root, number, whole.item())
        return loss


def train_behind(root: str, steps: int) -> None:
    """Save every step in the background, and resume from the latest one."""
    torch.set_num_threads(1)
    callback = StoreCallback(root, "run", every=1, asynchronous=True, keep_last=2)
    recording = Recording(callback)
    training = RecordingTrainer(
        model(),
        arguments(Path(root), steps),
        train_dataset=Sentences(),
        callbacks=[callback, recording],
    )
    training.root = root
    training.add_callback(InOrderOfRanks(training))
    folder = None
    if callback.run.latest() is not None:
        folder = callback.check_out(f"{root}-{os.getpid()}")
    training.train(resume_from_checkpoint=folder)
    if training.args.process_index == 0:  # the others save nothing, and do not wait for it
        assert callback.run.latest() == steps  # the end has waited
        assert folder is not None or recording.unfinished > 0


def kill_trainer(root: str, alone: str, kills: int) -> list[int]:
    # Before children are forked nothing is computed, or torch's threads would be missing in them.
    import torch._dynamo  # noqa: F401 (what every optimizer imports when it is made)

    train = partial(train_behind, steps=killed_training.enough_steps(kills))
    return killed_training.killed_and_alone(train, root, alone, kills)


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.long)])
def test_a_killed_training_that_saves_behind_ends_as_one_that_is_not(
    tmp_path: Path, kills: int
) -> None:
    root, alone = str(tmp_path / "killed"), str(tmp_path / "alone")
    latest = fresh.call_forked(kill_trainer, root, alone, kills)
    steps = killed_training.enough_steps(kills)
    assert len(latest) == kills
    assert max(latest) < steps
    killed_training.assert_same_losses(root, alone, steps)
    first, second = (CheckpointStore(each, "run").load(steps)["model"] for each in (root, alone))
    assert all(torch.equal(first[name], second[name]) for name in second)


def rank(root: str, /, *, number: int, group: str, ranks: int, steps: int) -> None:
    """Train as one process of several, each with the whole model (DDP)."""
    killed_training.join_group(number, group, ranks)
    train_behind(root, steps)
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
    first, second = (CheckpointStore(each, "run").load(steps)["model"] for each in (root, alone))
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_the_error_of_a_save_behind_ends_the_training(tmp_path: Path) -> None:
    (tmp_path / "limbo").mkdir()
    files = FaultyFiles(tmp_path / "limbo")
    store = Store.open(tmp_path / "store", files=files)
    callback = StoreCallback(store, "run", every=2, asynchronous=True)
    training = trainer(tmp_path / "out", callback)
    training.add_callback(Filling(callback, files))
    with pytest.raises(NoSpaceError, match="run@4"):
        training.train()
    assert 4 <= training.state.global_step < 9
    files._faults = Faults()
    assert callback.run.steps() == [2]
    training.train(resume_from_checkpoint=callback.check_out(tmp_path / "resume"))
    assert callback.run.steps() == [2, 4, 6, 8]


class Filling(TrainerCallback):
    """The disk is full once the first step is there."""

    def __init__(self, callback: StoreCallback, files: FaultyFiles) -> None:
        self.callback, self.files, self.filled = callback, files, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3 and not self.filled:
            self.callback.run._saves.finish()
            self.files._faults, self.filled = Faults(full_from=0), True


def test_callbacks_that_share_a_pool_share_its_bound(tmp_path: Path) -> None:
    pool = HostPool(1 << 20)
    callbacks = [
        StoreCallback(tmp_path / "store", name, every=2, asynchronous=True, pool_bytes=pool)
        for name in ("one", "two")
    ]
    training = trainer(tmp_path / "out", callbacks[0])
    training.add_callback(callbacks[1])
    training.train()
    assert all(each.run._saves._pool is pool for each in callbacks)
    for each in callbacks:
        assert each.run.steps() == [2, 4, 6, 8]
    first, second = (each.run.load(8)["model"] for each in callbacks)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_are_published_as_they_are_made(asynchronous: bool, tmp_path: Path) -> None:
    class Noted(TrainerCallback):
        """Notes the weights after each step."""

        def __init__(self) -> None:
            self.weights: dict[int, dict[str, torch.Tensor]] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            held = given["model"].state_dict()
            self.weights[state.global_step] = {name: t.clone() for name, t in held.items()}

    noted = Noted()
    policy = Publisher(tmp_path / "policy")
    callback = PublishCallback(policy, every=3, asynchronous=asynchronous)
    given = arguments(tmp_path / "out", 9)
    trained = Trainer(model(), given, train_dataset=Sentences(), callbacks=[noted, callback])
    trained.train()
    assert policy.run.steps() == [3, 6, 9]
    store = Store.open(tmp_path / "policy")
    for step in (3, 6, 9):
        store.export(f"policy@{step}", tmp_path / f"{step}")
        found = LlamaForCausalLM.from_pretrained(tmp_path / f"{step}").state_dict()
        assert found.keys() == noted.weights[step].keys()
        for name, tensor in noted.weights[step].items():
            assert torch.equal(found[name], tensor)
    assert any(
        not torch.equal(noted.weights[3][name], tensor) for name, tensor in noted.weights[9].items()
    )


def test_a_sharded_model_is_not_published(tmp_path: Path) -> None:
    callback = PublishCallback(Publisher(tmp_path / "policy"))
    made = Trainer(model(), arguments(tmp_path / "out", 1), train_dataset=Sentences())
    made.args.fsdp = "full_shard"
    with pytest.raises(UnsupportedError):
        callback.on_train_begin(made.args, made.state, made.control, model=made.model)
