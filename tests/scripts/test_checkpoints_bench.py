"""The benchmark of training checkpoints: every method gives back what it saved, and it runs."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import fresh
from project import package_source

SCRIPTS = package_source.ROOT / "scripts"


def sizes_and_answers(root: str) -> dict[str, tuple[bool, int, int]]:
    """Of each method and framework: are all answers equal, and how large are two steps and one."""
    sys.path.append(str(SCRIPTS))
    import numpy as np
    import torch

    from bench import checkpoint_methods as methods
    from bench import checkpoint_models as models

    network = models.perceptron(64, 2).eval()
    forest, rounds = models.Forest(30), models.Rounds(30)
    x, _ = models.table()

    def moved() -> None:
        [*network.parameters()][-1].data.add_(1)

    inputs = torch.from_numpy(x[:, :1]).float().repeat(1, 64)
    cases: list[tuple[str, methods.Kind, Any, Callable[[], object], Callable[[Any], Any]]] = [
        ("torch", methods.TORCH, network, moved, lambda m: m(inputs).detach().numpy()),
        (
            "sklearn",
            methods.SKLEARN,
            forest.model,
            lambda: forest.grow(3),
            lambda m: m.predict_proba(x),
        ),
        (
            "xgboost",
            methods.XGBOOST,
            rounds.model,
            lambda: rounds.grow(3),
            lambda m: m.inplace_predict(x),
        ),
    ]
    found = {}
    for name, kind, model, grow, answer in cases:
        ways: list[methods.Method] = [methods.Ours(Path(root, name, "ours"))]
        ways += [methods.Chunks(Path(root, name, "chunks"), kind)]
        ways += [methods.Files(each, Path(root, name, each), kind) for each in kind.files]
        ways += [methods.WholeFiles(Path(root, name, "md5"), kind)]
        sizes = []
        for step in (1, 2):
            for way in ways:
                way.save(model, step)
            sizes.append([way.size().apparent for way in ways])
            if step == 1:
                grow()
        expected = answer(model)
        for way, first, both in zip(ways, *sizes, strict=True):
            equal = bool(np.array_equal(answer(way.load(2, model)), expected))
            found[f"{name}: {way.name}"] = (equal, both, first)
            way.close()
    return found


def test_every_method_gives_back_what_it_saved(tmp_path: Path) -> None:
    found = fresh.call(sizes_and_answers, str(tmp_path))
    sharing = [name for name, (_, both, first) in found.items() if both < 1.9 * first]
    assert sorted(sharing) == [
        f"{kind}: {name}"
        for kind in ("sklearn", "torch", "xgboost")
        for name in ("TensorCAS's method", "tensor-dedup")
    ]
    assert [name for name, (equal, _, _) in found.items() if not equal] == []
    assert len(found) == 13


@pytest.mark.long
def test_the_benchmark_of_checkpoints_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPTS / "bench" / "checkpoints.py"),
            "--quick",
            "--work",
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": str(package_source.SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("ResNet-18, frozen", "XGBoost, 5 rounds a step", "500 trees, 10 new"):
        assert f"\n| {name} | " in done.stdout
    assert not any((tmp_path / "checkpoints-bench").iterdir())
