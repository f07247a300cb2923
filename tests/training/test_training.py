"""A training that is killed again and again goes on as if nothing had happened."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from store_runs.stores import Model, assert_same, handle, shares

_FORK = multiprocessing.get_context("fork")
_FOREVER = 10**6


def begin() -> Model:
    dice = np.random.default_rng(7)
    return {
        "frozen": dice.standard_normal((200, 300)).astype(np.float32),
        "weight": dice.standard_normal((150, 200)).astype(np.float32),
        "momentum": np.zeros((150, 200), np.float32),
        "bias": np.zeros(150, np.float32),
        "steps": np.zeros((), np.int64),
    }


def advance(model: Model) -> float:
    """A step of training, in place: what comes of it depends on the state alone. The loss."""
    dice = np.random.default_rng(int(model["steps"]))
    gradient = dice.standard_normal((150, 200)).astype(np.float32) + model["weight"]
    model["momentum"] *= np.float32(0.9)
    model["momentum"] += gradient
    model["weight"] -= np.float32(1e-3) * model["momentum"]
    model["bias"] += model["weight"].sum(axis=1) * np.float32(1e-4)
    model["steps"] += 1
    return float(np.square(model["weight"]).sum())


def trained(steps: int) -> Model:
    """What a training that nobody killed has after so many steps."""
    model = begin()
    for _ in range(steps):
        advance(model)
    return model


def training(root: Path) -> None:
    """Goes on from the latest step, until it is killed."""
    run = handle(root, keep_last=3, keep_every=10)
    latest = run.latest()
    model = begin() if latest is None else run.load(latest)
    for step in range(0 if latest is None else latest + 1, _FOREVER):
        loss = advance(model)
        run.save(model, step, {"loss": loss})
        if step % 7 == 0:
            run.gc(0)


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(3, id="short"),
        pytest.param(180, id="long", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_kill_9_at_any_moment(tmp_path: Path, seconds: int) -> None:
    handle(tmp_path).close()
    dice, end, kills = random.Random(3), time.monotonic() + seconds, 0
    reference, done, losses = begin(), -1, dict[int, float]()
    while time.monotonic() < end or kills < 3 or done < 1:
        process = _FORK.Process(target=training, args=[tmp_path])
        process.start()
        time.sleep(dice.uniform(0.05, 0.6))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        run = handle(tmp_path)
        latest = run.latest()
        if latest is None:
            continue
        assert latest >= done  # nothing that was saved is gone
        while done < latest:
            done += 1
            losses[done] = advance(reference)
        assert_same(run.load(latest), reference)
        for step, metrics in run.metrics().items():
            assert metrics == {"loss": losses[step]}
        run.close()
    assert kills >= 3
    assert done > 0
    run = handle(tmp_path)
    assert shares(run)
    assert run.store.verify(full=True).fine
    assert_same(run.load(done), trained(done + 1))
