"""What DeepSpeed's files become in the store, also where DeepSpeed is not installed.

The engine is called as DeepSpeed calls it; nothing that DeepSpeed itself does is tested.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensor_dedup.integrations import datastates
from tensor_dedup.integrations.datastates import DecoupledStoreEngine
from tensor_dedup.store.checkpoints import CheckpointStore

Start = Callable[..., DecoupledStoreEngine]
MODEL = "mp_rank_00_model_states.pt"
TAGS = ("step0", "step1", "step2")


def optimizer(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start an engine of one training as DeepSpeed does, with these entries of its JSON."""
    monkeypatch.setattr(datastates, "usable", lambda _: True)
    monkeypatch.setattr(datastates, "TorchCheckpointEngine", lambda _: None)
    zero = SimpleNamespace(offload_optimizer=None, offload_param=None, zenflow=None)

    def start(rank: int = 0, /, **options: Any) -> DecoupledStoreEngine:
        entry = {"store": str(tmp_path / "fast"), "run": "run", "compress": None, **options}
        config = SimpleNamespace(datastates_config=SimpleNamespace(config=entry), zero_config=zero)
        return DecoupledStoreEngine(config, rank)

    return start


def save(engine: DecoupledStoreEngine, file: Path, number: int, ranks: int = 1) -> None:
    """Start saving one of DeepSpeed's files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    state = {"number": number, "weight": torch.full((200, 200), float(number))}
    if file.name == MODEL:
        state |= {"dp_world_size": ranks, "mp_world_size": 1, "param_shapes": []}
    engine.save(state, str(file))


@pytest.mark.parametrize("emptied", [False, True])
def test_every_tag_loads_when_steps_are_drained(
    tmp_path: Path, start: Start, emptied: bool
) -> None:
    engine = start(drain=str(tmp_path / "second"))
    for number, tag in enumerate(TAGS):
        for name in (MODEL, optimizer(0)):
            save(engine, tmp_path / "files" / tag / name, number)
        engine.wait(persist=True)
    near = CheckpointStore(tmp_path / "fast", "run/mp_rank_00_model_states")
    assert near.steps() == [2]
    if emptied:
        shutil.rmtree(tmp_path / "fast")
    # Another training begins with what this one has saved.
    for later in (engine, start(drain=str(tmp_path / "second"), run="other")):
        for number, tag in enumerate(TAGS):
            for name in (MODEL, optimizer(0)):
                assert later.load(str(tmp_path / "files" / tag / name))["number"] == number
        if emptied:
            assert near.steps() == []
