"""Programs that were written for tensorcas run as they are."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tensor_dedup import Store
from tensor_dedup.store.errors import NotAStoreError
from tensor_dedup.training import CheckpointStore, TensorCasStore, list_runs
from tensor_dedup.training.adapters import (
    ModelAdapter,
    PyTorchAdapter,
    SklearnAdapter,
    XGBoostAdapter,
)

# The example in tensorcas' README.md, to the letter.
README = """\
from pathlib import Path
import torch
import torch.nn as nn
from tensorcas.store import TensorCasStore
from tensorcas.adapters.pytorch import PyTorchAdapter

model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

store = TensorCasStore(
    root=Path("./checkpoints"),
    run_id="mlp-run-001",
    adapter=PyTorchAdapter(),
)

# Save a checkpoint at each epoch
for epoch in range(1, 21):
    # ... training loop ...
    store.save(model, step=epoch)

# Load any checkpoint
store.load(step=10, original=model)

# Inspect what was saved
print(store.stats())
"""
HOMES = {
    ("tensorcas.store", "TensorCasStore"): TensorCasStore,
    ("tensorcas.store", "list_runs"): list_runs,
    ("tensorcas.adapters.base", "ModelAdapter"): ModelAdapter,
    ("tensorcas.adapters.pytorch", "PyTorchAdapter"): PyTorchAdapter,
    ("tensorcas.adapters.sklearn", "SklearnAdapter"): SklearnAdapter,
    ("tensorcas.adapters.xgboost", "XGBoostAdapter"): XGBoostAdapter,
}


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_example_of_its_readme_runs(tmp_path: Path) -> None:
    stats = ast.literal_eval(run(README, tmp_path))
    assert (stats["run_id"], stats["checkpoints"]) == ("mlp-run-001", 20)
    assert stats["total_chunks"] == 20 * stats["unique_chunks"]  # nothing trained
    assert stats["dedup_ratio"] == 0.05
    assert CheckpointStore(tmp_path / "checkpoints", "mlp-run-001").steps() == [*range(1, 21)]


def test_the_runs_of_a_folder_are_listed(tmp_path: Path) -> None:
    with pytest.raises(NotAStoreError, match="there is no store"):
        list_runs(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    for run, step in (("b", 3), ("a/one", 0), ("b", 4)):
        TensorCasStore(tmp_path / "store", run).save({"values": [step]}, step)
    store = Store.open(tmp_path / "store")
    store.export("b@3", tmp_path / "out")
    store.import_(tmp_path / "out", "c@3")  # an import makes no run, whatever its name
    assert list_runs(tmp_path / "store") == list_runs(store) == ["a/one", "b"]


@pytest.mark.parametrize(("module", "name"), HOMES)
def test_its_names_are_ours(module: str, name: str) -> None:
    assert getattr(import_module(module), name) is HOMES[module, name]


def test_its_names_import_no_framework(tmp_path: Path) -> None:
    imports = "\n".join(f"from {module} import {name}" for module, name in HOMES)
    code = (
        f"{imports}\nimport sys\n"
        "SklearnAdapter(), XGBoostAdapter(), PyTorchAdapter()\n"
        "print(*[name for name in ('torch', 'sklearn', 'xgboost') if name in sys.modules])"
    )
    assert run(code, tmp_path) == ""
    first = "import sys, tensorcas, tensorcas.adapters; print('tensor_dedup' in sys.modules)"
    assert run(first, tmp_path) == "False"
