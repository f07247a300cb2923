"""A real training that saves in the background is killed again and again, and goes on."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from processes import fresh
from store_runs.clocks import JUMPS, ClockedFiles, SetClock

_FOREVER = 10**6


def killing(root: str, seconds: float) -> dict[str, Any]:
    """Trains in children that are killed; what was there at the end. Their clocks jump by hours.

    Every other child writes its steps while they are captured, as large models' are.
    """
    # Before children are forked nothing is computed, or torch's threads would be missing in them.
    import torch._dynamo  # noqa: F401 (what every optimizer imports when it is made)

    from tensor_dedup.training import CheckpointStore
    from training_runs import trainings

    dice, end, kills, done = random.Random(4), time.monotonic() + seconds, 0, -1
    CheckpointStore(root, "run").close()
    while time.monotonic() < end or kills < 4:
        child = os.fork()
        if not child:
            if kills % 2:
                stream(Path(f"{root}.streamed"))
            trainings.train(root, _FOREVER, ClockedFiles(SetClock(jumps=JUMPS)))
        if kills % 4 != 3:  # else while it begins
            while os.waitpid(child, os.WNOHANG) == (0, 0) and not _is_further(root, done):
                time.sleep(0.02)
        time.sleep(dice.uniform(0.0, 0.6))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        kills += 1
        with CheckpointStore(root, "run") as run:
            latest = run.latest()
            assert (latest if latest is not None else -1) >= done  # nothing that was there is gone
            if latest is not None:
                done = latest
                assert len(run.load(latest)["losses"]) == latest + 1
    with CheckpointStore(root, "run") as run:
        stats: Any = run.stats()
        losses = {step: held["loss"] for step, held in run.metrics().items()}
        assert run.store.verify(full=True).fine
    return {"kills": kills, "losses": losses, "stats": stats}


def stream(seen: Path) -> None:
    """Have every step of this process streamed, piece by piece, and note that one was."""
    from tensor_dedup.training import background, capture, piece_writer

    arriving = capture.StepCapture.arriving

    def noted(step: capture.StepCapture) -> Any:
        seen.touch()
        return arriving(step)

    for home, name, value in (
        (background, "_HELPED_BYTES", 1),
        (piece_writer, "_BATCH", 1),
        (capture.StepCapture, "arriving", noted),
    ):
        setattr(home, name, value)


def _is_further(root: str, step: int) -> bool:
    from tensor_dedup.training import CheckpointStore

    with CheckpointStore(root, "run") as run:
        return max(run.steps(), default=-1) > step


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(2, id="short"),
        pytest.param(240, id="long", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_kill_9_of_a_training(tmp_path: Path, seconds: float) -> None:
    root = str(tmp_path / "store")
    found = fresh.call(killed_and_resumed, root, seconds)
    assert Path(f"{root}.streamed").exists()
    assert found["stats"]["unique_chunks"] < found["stats"]["total_chunks"]
    assert found["kills"] >= 4
    latest = max(found["losses"])
    losses = found["both"]
    assert losses["resumed"] == losses["uninterrupted"]
    assert len(losses["resumed"]) == latest + 6
    for step, loss in found["losses"].items():
        assert loss == losses["uninterrupted"][step]


def killed_and_resumed(root: str, seconds: float) -> dict[str, Any]:
    """Both in one process: to import torch takes longer than to train."""
    found = killing(root, seconds)
    return {**found, "both": both(root, max(found["losses"]) + 6)}


def both(root: str, steps: int) -> dict[str, list[float]]:
    """The losses of the training that goes on, and of one that nobody killed."""
    from training_runs import trainings

    return {
        "resumed": trainings.train(root, steps),
        "uninterrupted": trainings.uninterrupted(steps),
    }
