"""Models of every framework through a store on disk: shared, and the same to the last bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightgbm as lgb
import numpy as np
import pytest
import torch
import xgboost as xgb
from sklearn.ensemble import GradientBoostingClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from store_runs.stores import open_store
from tensor_dedup.store.steps.runs import manifest_of
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.adapters import PyTorchAdapter
from tensor_dedup.training.errors import UnsupportedValueError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 6))
Y = (X[:, 0] + X[:, 1] * X[:, 2] > 0).astype(int)
QUIET = {"verbosity": -1, "num_threads": 1}


def sklearn_boosting(model: Any) -> Any:
    if model is None:
        model = GradientBoostingClassifier(n_estimators=0, warm_start=True, random_state=0)
    return model.set_params(n_estimators=model.n_estimators + 20).fit(X, Y)


def sklearn_forest(model: Any) -> Any:
    if model is None:
        model = RandomForestRegressor(n_estimators=0, warm_start=True, random_state=0, max_depth=4)
    return model.set_params(n_estimators=model.n_estimators + 20).fit(X, Y)


def xgboost_rounds(model: Any, rounds: int = 20) -> Any:
    parameters = {"objective": "binary:logistic", "max_depth": 3, "nthread": 1}
    return xgb.train(parameters, xgb.DMatrix(X, Y), rounds, xgb_model=model)


def lightgbm_rounds(model: Any) -> Any:
    data = lgb.Dataset(X, Y, params={"verbosity": -1})
    if model is None:
        model = lgb.Booster({"objective": "binary", "num_leaves": 5, **QUIET}, data)
    for _ in range(20):
        model.update()
    return model


GROWING: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bytes]]] = {
    "sklearn boosting": (sklearn_boosting, lambda model: model.predict_proba(X).tobytes()),
    "sklearn forest": (sklearn_forest, lambda model: model.predict(X).tobytes()),
    "xgboost": (xgboost_rounds, lambda model: model.predict(xgb.DMatrix(X)).tobytes()),
    "lightgbm": (lightgbm_rounds, lambda model: model.predict(X).tobytes()),
}


@pytest.mark.parametrize("name", GROWING)
def test_ensembles_cost_their_new_trees(name: str, tmp_path: Path) -> None:
    grow, said = GROWING[name]
    expected, saved, model = {}, [], None
    with CheckpointStore(open_store(tmp_path), "run") as run:
        for step in range(4):
            model = grow(model)
            saved.append(run.save(model, step))
            expected[step] = said(model)
        # Twenty trees in each step; what changes beside them are a few pieces.
        assert [each.new_tensors for each in saved[1:]] == pytest.approx([23, 23, 23], abs=4)
        assert saved[3].tensors - saved[3].new_tensors >= 60
        assert run.stats()["dedup_ratio"] < 0.6  # type: ignore[operator]
    with CheckpointStore(open_store(tmp_path), "run") as run:  # asks nobody who was there before
        for step, bits in expected.items():
            assert said(run.load(step)) == bits
        if name != "lightgbm":  # a booster that was loaded has no data to go on with
            assert said(grow(run.load(2))) == expected[3]


@pytest.mark.parametrize("name", GROWING)
def test_a_step_of_an_ensemble_keeps_the_pages_of_the_one_before(name: str, tmp_path: Path) -> None:
    def pages(run: CheckpointStore, step: int) -> list[bytes]:
        _, manifest, _ = manifest_of(run.store.handle.objects, "run", step)
        return list(manifest.pages)

    grow, model = GROWING[name][0], None
    for _ in range(14):
        model = grow(model)
    with CheckpointStore(open_store(tmp_path), "run") as run:
        run.save(model, 0)
        run.save(grow(model), 1)
        before, after = pages(run, 0), pages(run, 1)
        assert len(before) == len(after) == 2
        # What changes beside the trees, as the scores of boosting do, is not among the first.
        assert after[0] == before[0]
        assert after[1] != before[1]


class Net(nn.Module):
    """A frozen part, a part that is trained, and a knot."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(6, 64).requires_grad_(False)
        self.head = nn.Linear(64, 2)
        self.again = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.relu(self.frozen(x)))
        return result


def run_of(seed: int) -> dict[str, Any]:
    model = Net(seed)
    optimizer = torch.optim.AdamW(model.head.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}


def epoch(run: dict[str, Any]) -> str:
    x, y = torch.from_numpy(X).float(), torch.from_numpy(Y)
    run["optimizer"].zero_grad()
    loss = nn.functional.cross_entropy(run["model"](x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    run["optimizer"].step()
    run["scheduler"].step()
    run["epoch"] += 1
    return float(loss.item()).hex()


def test_a_training_run_resumes_from_any_step(tmp_path: Path) -> None:
    losses = []
    with CheckpointStore(open_store(tmp_path), "run") as run:
        training = run_of(0)
        for step in range(6):
            losses.append(epoch(training))
            saved = run.save(training, step, {"loss": float.fromhex(losses[-1])})
            # The head, its two moments, and the numbers; the knot is the head.
            assert saved.new_tensors == (7 + 2 if step == 0 else 7) + (step == 0)
        assert run.best("loss") == 5
        for step in (0, 3):
            again = run_of(9)
            objects = dict(again)
            assert run.load(step, again) is again
            assert all(again[key] is objects[key] for key in ("model", "optimizer", "scheduler"))
            assert again["epoch"] == step + 1
            assert again["model"].again is again["model"].head
            assert [epoch(again) for _ in range(step + 1, 6)] == losses[step + 1 :]


def test_tensors_of_a_module_are_those_of_its_checkpoint(tmp_path: Path) -> None:
    model = Net().to(torch.bfloat16)
    with CheckpointStore(open_store(tmp_path), "run", PyTorchAdapter()) as run:
        run.save(model, 3)
        with run.store.checkpoint("run@3") as checkpoint:
            found = {t.name: (t.dtype, t.shape) for t in checkpoint if not t.name.startswith("#")}
        assert found == {name: ("BF16", tuple(t.shape)) for name, t in model.state_dict().items()}
        back = run.load(3)
        assert all(torch.equal(back[name], held) for name, held in model.state_dict().items())


def test_structures_of_several_frameworks(tmp_path: Path) -> None:
    chain = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, Y)
    booster = xgboost_rounds(None)
    state = {
        "chain": chain,
        "booster": booster,
        "rng": np.random.default_rng(3),
        "noise": np.arange(6, dtype=">f4").reshape(2, 3).T,
        "half": torch.arange(4).to(torch.float8_e4m3fn),
        "seen": {(1, "a"), (2, "b")},
        "big": 1 << 90,
    }
    with CheckpointStore(open_store(tmp_path), "run") as run:
        run.save(state, 0)
        expected = state["rng"].random(3).tolist()
        back = run.load(0)
    assert back["chain"].predict_proba(X).tobytes() == chain.predict_proba(X).tobytes()
    assert back["booster"].save_raw() == booster.save_raw()
    assert back["rng"].random(3).tolist() == expected
    assert (back["noise"].dtype, back["noise"].flags.f_contiguous) == (np.dtype(">f4"), True)
    assert torch.equal(back["half"].float(), torch.arange(4).float())
    assert (back["seen"], back["big"]) == (state["seen"], state["big"])


def test_what_is_refused_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    with CheckpointStore(open_store(tmp_path), "run") as run:
        run.save({"a": np.ones(3)}, 0)
        with pytest.raises(UnsupportedValueError, match=r"^a\[1\]: a builtins\.builtin_function"):
            run.save({"a": [np.ones(3), len]}, 1)
        assert run.steps() == [0]
